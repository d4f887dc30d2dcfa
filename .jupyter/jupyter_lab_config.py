"JupyterLab as `make lab` opens it: on the notebooks, with runs/ in reach, asking the network for nothing, saving no metadata."
from nbdev.clean import clean_jupyter

c = get_config()  # noqa: F821
c.LabApp.default_url = '/lab/tree/nbs'
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = 'jupyterlab.NeverCheckForUpdate'
c.LabApp.extension_manager = 'readonly'
c.ContentsManager.pre_save_hook = clean_jupyter
