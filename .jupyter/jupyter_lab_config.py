"""JupyterLab as `make lab` opens it: on the notebooks, with runs/ in reach, asking the network for nothing, saving no
metadata. The project's notebooks keep the outputs that `make outputs` has made: what cells show here is saved in runs/."""
import json
from pathlib import Path

import nbformat
from nbdev.clean import clean_jupyter

c = get_config()  # noqa: F821


def save_outputs_in_runs(model, path, **more):
    "Save a notebook of ours with the outputs that it had, and one with the new outputs in runs/."
    clean_jupyter(model=model, path=path, **more)
    folder, _, name = path.removesuffix('.ipynb').partition('/')
    record = json.loads(Path('nbs/outputs.json').read_text(encoding='utf-8'))
    ours = name in record or name.startswith('recipes/')
    if folder != 'nbs' or not ours or model['type'] != 'notebook': return
    before = Path(path).read_text(encoding='utf-8')
    old = {cell.id: cell.get('outputs', []) for cell in nbformat.reads(before, 4).cells}
    shown = nbformat.reads(json.dumps(model['content']), 4)
    if any(cell.get('outputs', []) != old.get(cell.id, []) for cell in shown.cells):
        nbformat.write(shown, Path('runs', Path(path).name))
    kept = {cell['id']: cell.get('outputs', []) for cell in json.loads(before)['cells']}
    for cell in model['content']['cells']:
        if 'outputs' in cell: cell['outputs'] = kept.get(cell['id'], [])


c.LabApp.default_url = '/lab/tree/nbs'
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = 'jupyterlab.NeverCheckForUpdate'
c.LabApp.extension_manager = 'readonly'
c.ContentsManager.pre_save_hook = save_outputs_in_runs
