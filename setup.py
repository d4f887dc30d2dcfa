"Everything about the package stands in settings.ini; this file hands it to setuptools."
import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here/"settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]
names = ("dev", "alpaca-eval", "flash", "wandb", "tensorboard", "browser", "docs", "ray", "slurm", "gpu",
         "gguf", "trl")
extras = {name: cfg[f"{name}_requirements"].split() for name in names}


class BuildWithNotebooks(build_py):
    "A build with the notebooks, recipes and judges' configurations, as `alpaca_farm/nbs`."
    def run(self):
        super().run()
        if self.editable_mode: return   # an editable installation reads those of the checkout
        target = Path(self.build_lib)/"alpaca_farm"/"nbs"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(here/"nbs", target, ignore=shutil.ignore_patterns(".*", "__pycache__"))


setup(name=cfg["dist_name"], version=cfg["version"], description=cfg["description"],
      long_description=(here/"README.md").read_text(encoding="utf-8"),
      long_description_content_type="text/markdown", license="Apache-2.0",
      author=cfg["author"], author_email=cfg["author_email"], url=cfg["git_url"],
      keywords=cfg["keywords"], python_requires=">=" + cfg["min_python"],
      packages=find_packages(include=["alpaca_farm", "alpaca_farm.*"]),
      install_requires=cfg["requirements"].split(), extras_require=extras,
      cmdclass={"build_py": BuildWithNotebooks},
      entry_points={"nbdev": ["alpaca_farm=alpaca_farm._modidx:d"]}, zip_safe=False)
