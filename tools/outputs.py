"""Every notebook is committed with the outputs of its default run, all from one farm.

On a code host a notebook is read without being run, so its figures are committed with it, and agree
with each other only if all come from the same runs. `make outputs` makes the farm, executes every
notebook on its runs, and records in `nbs/outputs.json` which farm each notebook was saved from, or
`own` for a study that makes worlds of its own; test_outputs.py reads that record.

    make outputs                                        # the farm, then all notebooks
    python tools/outputs.py --notebooks ppo dpo         # some of them
    python tools/outputs.py --slow false                # outputs of runs stay as they are
"""
import sys
from dataclasses import dataclass, field
from pathlib import Path

from floors import shared_folders
from alpaca_farm.run.files import digest, read_json, write_json
from alpaca_farm.run.paths import at_root, root
from alpaca_farm.run.progress import Progress
from alpaca_farm.run.runs import run_config
from alpaca_farm.run.settings import Config, from_args


@dataclass
class OutputsConfig(Config):
    "Settings of saving outputs."
    notebooks: list[str] = field(default_factory=list)  # names of the notebooks; empty for all
    farm: str = 'runs/farm'  # run folder of the farm whose runs are shown
    slow: bool = True        # also execute cells marked slow; else their outputs stay
    timeout: int = 7200      # seconds that one cell may take


def notebook_paths(names=()) -> list[Path]:
    "The notebooks of these names, or all: those that make no runs first, the farm last."
    paths = [p for p in sorted((root()/'nbs').rglob('*.ipynb'))
             if not {'.ipynb_checkpoints', 'recipes'} & {*p.parts}]
    unknown = sorted(set(names) - {p.stem for p in paths})
    if unknown: raise ValueError(f'notebooks: there is no {unknown[0]} in nbs/')
    shared = {*shared_folders()}
    chosen = [p for p in paths if not names or p.stem in names]
    return sorted(chosen, key=lambda p: (not shared & {*p.parts}, p.stem == 'farm', p.stem))


def is_slow(cell: dict) -> bool:
    "Whether a cell is marked as one that makes or shows runs."
    return ''.join(cell['source']).startswith('#| slow')


def execute(
    path: Path,
    slow: bool,    # also the cells marked slow; one that is not executed keeps its outputs
    timeout: int,
    given: dict,   # settings of its run, so that it shows that run and does not make another
):
    "Execute a notebook from the root and save its outputs in place; an error saves nothing."
    import nbformat
    from nbclient import NotebookClient
    from nbdev.clean import nbdev_clean
    nb = nbformat.read(path, as_version=4)
    sources = [c.source for c in nb.cells]
    skipped = [c for c in nb.cells if c.cell_type == 'code' and not slow and is_slow(c)]
    # where results are kept, so are the settings that are shown with them
    shown = [c for c in nb.cells if not slow and '.collect(' in c.source and c.get('outputs')]
    kept = [(c, c.outputs) for c in (*skipped, *shown)]
    for cell in skipped: cell.source = ''
    for cell in nb.cells:
        if 'parameters' in cell.metadata.get('tags', []):
            cell.source += ''.join(f'\n{name} = {value!r}' for name, value in given.items())
    where = dict(metadata=dict(path=str(root())))
    NotebookClient(nb, timeout=timeout, resources=where, coalesce_streams=True).execute()
    nb.metadata.pop('widgets', None)   # bars and sliders that have gone, and their state
    view = 'application/vnd.jupyter.widget-view+json'
    for cell, source in zip(nb.cells, sources, strict=True):
        cell.source = source
        if cell.cell_type == 'code':
            cell.outputs = [o for o in cell.outputs if view not in o.get('data', {})]
    for cell, outputs in kept: cell.outputs = outputs
    for cell in skipped: cell.execution_count = None
    nbformat.write(nb, path)
    nbdev_clean(str(path))


def code_mark(path: Path) -> str:
    "Twelve digits that stand for the code of a notebook's cells."
    cells = read_json(path)['cells']
    return digest([''.join(c['source']) for c in cells if c['cell_type'] == 'code'])


def farm_mark(path: Path, farm: Path) -> str:
    """The fingerprint of the farm that a notebook shows; `own` if it shows runs of its own, as a
    study does even in a farm's worlds; empty if the farm is not made."""
    own = path.stem in ('bench', 'real', 'ppo_single', 'look_at_data')
    return 'own' if own or path.parent.name == 'studies' else run_config(farm).get('fingerprint', '')


def save_outputs(cfg: OutputsConfig):
    "Execute notebooks and save their outputs; RuntimeError at the end, naming those that failed."
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    paths, failed = notebook_paths(cfg.notebooks), []
    file, farm = root()/'nbs'/'outputs.json', at_root(cfg.farm)
    show = Progress('outputs', len(paths))
    for step, path in enumerate(paths, 1):
        try:
            made = run_config(farm.with_name(path.stem))
            execute(path, cfg.slow, cfg.timeout, made.get('given', {}))
            record = read_json(file) if file.exists() else {}
            name = path.relative_to(file.parent).with_suffix('').as_posix()
            shown = record.get(name, {}).get('farm', '')   # what is not executed stays as it is
            if cfg.slow: shown = farm_mark(path, farm) or shown
            record[name] = dict(farm=shown, code=code_mark(path))
            write_json(file, dict(sorted(record.items())))
        except CellExecutionError as e: failed.append(f'{path.stem}: {e.ename}: {e.evalue}')
        except (CellTimeoutError, DeadKernelError) as e:
            failed.append(f'{path.stem}: {type(e).__name__}')
        show(step, path.stem)
    if failed: raise RuntimeError('some notebooks failed:\n' + '\n'.join(failed))


if __name__ == '__main__': save_outputs(from_args(OutputsConfig, sys.argv[1:], __doc__))
