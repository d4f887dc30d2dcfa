"""The site is built from the notebooks as they are, without a warning and without a dead link."""
import re
import shutil
import subprocess
import sys

import pytest

import tiny

for name in ('myst_nb', 'sphinx-mathjax-offline'):
    pytest.importorskip(name)


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    source = tmp_path_factory.mktemp('site')/'source'
    html = tmp_path_factory.mktemp('html')
    shutil.copytree(tiny.ROOT/'nbs', source, ignore=shutil.ignore_patterns('.ipynb_checkpoints'))
    shutil.copy(tiny.ROOT/'README.md', source/'index.md')
    command = [sys.executable, '-m', 'sphinx', '-q', '--fail-on-warning', '--keep-going']
    built = subprocess.run([*command, source, html], capture_output=True, text=True, cwd=tiny.ROOT)
    assert built.returncode == 0, built.stderr
    return html


def test_links_of_the_site_lead_somewhere(site):
    pages = list(site.rglob('*.html'))
    dead = {(page.name, link) for page in pages
            for link in re.findall(r'href="([^"#?]+)', page.read_text())
            if not link.startswith(('http', 'mailto', 'data:'))
            and not (page.parent/link).exists()}
    assert len(pages) > 150
    assert not dead


def test_every_notebook_and_module_is_on_the_site(site):
    text = (site/'llms.txt').read_text()
    listed = set(re.findall(r'\]\((.*?)\)', text))
    assert all((site/page).exists() for page in listed)
    assert {'start.html', 'studies/hybrid.html', 'api/dpo.html', 'gpus.html'} <= listed
    assert 'dpo_loss' in (site/'api/dpo.html').read_text()
    assert all(re.search(r'\): \w.+\w', line) for line in text.splitlines() if '](' in line)
    about = 'Direct preference optimisation and its family: a policy trained like a classifier.'
    assert f'[dpo](dpo.html): {about}' in text
    page = (site/'dpo.html').read_text()
    assert f'<meta name="description" content="{about}">' in page
    assert 'rel="canonical" href="https://alpaca-farm.github.io/alpaca_farm/dpo.html"' in page
    mathjax = '_static/mathjax/tex-chtml.js'   # formulas without a network
    assert f'src="{mathjax}' in (site/'dpo.html').read_text()
    assert (site/mathjax).exists()
    assert '#| export' not in (site/'dpo.html').read_text()
