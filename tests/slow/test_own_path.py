"The README's commands for one's own model, data and judge, all cells, on four kinds of worlds."
import re
import shlex
import shutil
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

import tiny
from alpaca_farm.data.records import load_records
from alpaca_farm.run import execution
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.paths import notebook_path
from alpaca_farm.run.runs import read_summary

README = (tiny.ROOT/'README.md').read_text()
BLOCK = re.search(r'## Your own model.*?```\n(.*?)```', README, re.S)[1]
LINES = BLOCK.replace('\\\n', ' ').splitlines()   # one command a line
COMMANDS = [shlex.split(line) for line in LINES if not line.startswith('#')]
COMMANDS = {Path(words[1]).stem: words for words in COMMANDS}
JUDGES = """
def my_judge(pairs): return [1 + (len(p['output_2']) > len(p['output_1'])) for p in pairs]
def strict(pairs): return [1 + (p['output_2'].count('a') < p['output_1'].count('a')) for p in pairs]
"""
SMALL = dict(reward_model=dict(held_out=2, batch_size=4, epochs=1), dpo=dict(batch_size=4))
TINY = dict(bring_your_own=dict(n=2, max_new_tokens=12, max_prompt=110, recipe='my/small.json'),
            farm={}, decide=dict(budget=20, size='my/small.json'))


@pytest.fixture
def project(base, tmp_path, monkeypatch):
    "A folder with what is a user's own."
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path/'nbs').symlink_to(tiny.ROOT/'nbs')
    (tmp_path/'runs').mkdir()
    shutil.copytree(base/'sft'/'model', tmp_path/'my'/'model')
    (tmp_path/'my_module.py').write_text(JUDGES)
    prompts = load_records(str(base/'world'), 'eval', n=24)
    prompts = [dict(instruction=r['instruction'], input=r['input']) for r in prompts]
    pairs = load_records(str(base/'annotators'), 'preferences', 'preference')
    labels = [dict(p, annotator='Ann') for p in pairs[:5]]
    own = dict(prompts=prompts, pairs=pairs, labels=labels, small=SMALL)
    for name, rows in own.items():
        write_json(f'my/{name}.json', rows)
    here = 'alpaca_farm.run.jobs.run_jobs'
    monkeypatch.setattr(here, lambda jobs, *_, **__: tiny.run_here(jobs))
    monkeypatch.setattr(execution, 'is_needed', lambda cell: cell.cell_type == 'code')
    yield
    sys.modules.pop('my_module', None)


def shown(name, **more):
    "What each cell below the settings shows, of a README's command with further settings."
    words = COMMANDS[name]
    given = tiny.given(words) | TINY[name] | more
    execution.run_notebook(notebook_path(name), Path(words[2]), given)
    cells = nbformat.read(words[2], 4).cells
    while 'injected-parameters' not in cells.pop(0).metadata.get('tags', []):
        pass
    texts = []
    for cell in cells:
        data = [o.get('data', {}) for o in cell.get('outputs', [])]
        said = [o.get('text', '') for o in cell.get('outputs', [])]
        said += [d.get(kind, '') for d in data for kind in ('text/markdown', 'text/html')]
        texts.append('\n'.join(said))
    return texts


@pytest.mark.parametrize('preferences', [True, False])
@pytest.mark.parametrize('board_judge', ['', 'my_module:strict'])
def test_from_files_to_what_to_keep(project, preferences, board_judge):
    "Where another judges the board, the farm has two replicates and the decision two seeds."
    shown('bring_your_own', board_judge=board_judge, **{} if preferences else dict(preferences=''))
    seeds = 2 if board_judge else 1
    board = '\n'.join(shown('farm', seeds=seeds))
    assert ('>strict<' if board_judge else '>my_judge<') in board
    assert '>crowd<' not in board
    assert 'held-out crowd' not in board
    assert ('>labels: preferences<' in board) == ('dpo_crowd' in board) == preferences
    assert ('judges what its own labels have taught' in board) == (not board_judge)
    assert 'was made before' not in board
    assert 'runs/own has no utility' in board
    assert 'has no parts.csv' in board
    assert ('no comparison of simulation' in board) == (not preferences)
    assert ('has no simulation.csv' in board) == (not preferences)

    said = '\n'.join(shown('decide', seeds=seeds))
    assert 'labels are missing: see above' in said
    assert 'CPU minutes' not in said
    pairs = read_json('runs/decide/to_label.json')
    for p in pairs:
        p['preference'] = 1 + (len(p['output_2']) > len(p['output_1']))
    labels = [dict(p, annotator='Ann') for p in pairs]
    write_json('my/labels.json', read_json('my/labels.json') + labels)
    cells = shown('decide', seeds=seeds)
    said = '\n'.join(cells)
    assert 'expert_iteration, rloo, ppo not made: runs/own was made without them' in said
    table = pd.read_csv('runs/decide/win_rates.csv')
    assert (table.instructions == len(read_json('runs/own/eval.json'))).all()
    rows = {'dpo', 'best_of_n', 'bag of words', 'words x asker'}
    of_people = {f'{row}_crowd' for row in rows} if preferences else set()
    found = {*table.second}
    assert rows < found
    assert {row for row in found if row.endswith('_crowd')} == of_people
    assert read_summary('runs/decide')['forecasts']
    page, = [text for text in cells if '# Keep' in text]
    assert ('>dpo, labels: preferences<' in page) == preferences
    assert '_crowd<' not in said
    assert 'win rate over model, %' in page
    assert '>greedy model<' in page
    assert 'SFT' not in page
