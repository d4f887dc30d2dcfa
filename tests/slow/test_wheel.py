"The wheel, outside of any checkout: the package as somebody has it who installs it by pip."
import email
import shutil
import subprocess
import sys
import zipfile

import pytest

import tiny
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_summary


def said_by(command, folder, **variables):
    "What a command prints in a folder; it must succeed."
    done = subprocess.run(command, cwd=folder, env=tiny.environment(**variables),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "A wheel of this checkout."
    source = tmp_path_factory.mktemp('source')
    for name in ('alpaca_farm', 'nbs'):
        shutil.copytree(tiny.ROOT/name, source/name,
                        ignore=shutil.ignore_patterns('__pycache__', '.*'))
    for name in ('setup.py', 'settings.ini', 'README.md', 'MANIFEST.in'):
        shutil.copy(tiny.ROOT/name, source)
    said_by([sys.executable, '-m', 'pip', 'wheel', '-q', '.', '--no-deps', '--no-build-isolation',
             '-w', 'wheel'], source)
    found, = (source/'wheel').glob('*.whl')
    return found


@pytest.fixture(scope='module')
def outside(wheel, tmp_path_factory):
    "A working folder in no checkout, and the variables with which Python finds the wheel's package."
    site = tmp_path_factory.mktemp('venv')/'lib'/'python3'/'site-packages'
    site.mkdir(parents=True)
    said_by([sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--no-index',
             '--no-compile', '--target', str(site), str(wheel)], site)
    (site/'neighbour.py').write_text('import json')
    return tmp_path_factory.mktemp('outside'), dict(PYTHONPATH=str(site))


def run_notebook(name, outside, **given):
    "Execute a notebook of the wheel by papermill in the working folder."
    folder, variables = outside
    code = f'from alpaca_farm.run.paths import notebook_path\nprint(notebook_path("{name}"))'
    notebook = said_by([sys.executable, '-c', code], folder, **variables).strip()
    assert notebook.startswith(variables['PYTHONPATH'])
    said_by(tiny.papermill(notebook, f'{name}.ipynb', **given), folder, **variables)


def test_its_name_is_free_and_only_alpaca_eval_holds_setuptools(wheel):
    with zipfile.ZipFile(wheel) as file:
        name, = (n for n in file.namelist() if n.endswith('.dist-info/METADATA'))
        about = email.message_from_bytes(file.read(name))
    assert about['Name'].replace('_', '-') == 'alpaca-farm-lab'
    needed = about.get_all('Requires-Dist')
    held = [n for n in needed if n.startswith(('alpaca-eval', 'alpaca_eval', 'setuptools'))]
    assert len(held) == 2
    assert all('extra == "alpaca' in n for n in held)
    assert [n for n in needed if 'execnb' in n and 'extra' not in n] == []


def test_notebooks_are_found_and_nothing_is_written(outside, tmp_path):
    code = '''
from pathlib import Path
import alpaca_farm
from alpaca_farm.farm import FarmConfig
from alpaca_farm.judging.prompts import judge_config_file
from alpaca_farm.run.paths import at_root, notebook_path, notebooks_folder
from alpaca_farm.run.runs import _module_files, _places, recipe
package = Path(alpaca_farm.__file__).parent
assert package.parent == Path(SITE), package
assert notebooks_folder() == package/'nbs', notebooks_folder()
assert recipe('runs/sft') == ('sft', {}) and FarmConfig(size='quick')
assert notebook_path('best_of_n').is_file() and at_root('runs/a') == Path.cwd()/'runs'/'a'
assert judge_config_file('structured') and judge_config_file('open_pool')
assert not _module_files('neighbour', _places())   # whose code makes no run another one
assert _module_files('alpaca_farm.dpo', _places())
print('all is there')
'''.replace('SITE', repr(outside[1]['PYTHONPATH']))
    assert 'all is there' in said_by([sys.executable, '-c', code], tmp_path, **outside[1])
    assert not list(tmp_path.iterdir())


def test_runs_of_modules_and_notebooks_lie_in_the_working_folder(outside):
    "A world by a module, SFT by papermill on the notebook of the package, its answers by another."
    folder, variables = outside
    said_by(tiny.command('world', **tiny.SETTINGS['world']), folder, **variables)
    run_notebook('sft', outside, **tiny.SETTINGS['sft'])
    settings = tiny.SETTINGS['best_of_n'] | dict(reward_model='', n=1)
    said_by(tiny.command('best_of_n', **settings), folder, **variables)
    assert {p.name for p in (folder/'runs').iterdir()} >= {'world', 'sft', 'best_of_n'}
    assert read_summary(folder/'runs'/'sft')['warnings'] is not None
    assert (folder/'runs'/'sft'/'model'/'model.safetensors').is_file()


def test_data_is_looked_at_in_a_folder_without_runs(base, outside, tmp_path):
    data = tiny.write(tmp_path/'mine.json', [dict(prompt='Hi.', completion='Yes?')]*2)
    given = dict(data=data, policy=str(base/'sft'), out='look')
    run_notebook('look_at_data', (tmp_path, outside[1]), **given)
    assert read_summary(tmp_path/'look')['findings'] == 1


def test_the_tour_draws_its_figure(outside):
    folder, _ = outside
    size = tiny.write(folder/'tour.json', tiny.FARM)
    run_notebook('start', outside, runs='tour', size=size, steps=4, instances=20)
    assert (folder/'tour'/'start'/'0.1'/'tour.png').is_file()


def test_the_courses_exercises_are_worked_on(outside):
    "As a student has them who has solved all; their library runs train in processes of their own."
    folder, variables = outside
    shutil.copy(tiny.ROOT/'nbs'/'exercises.ipynb', folder/'exercises.ipynb')
    size = tiny.write(folder/'tiny.json', tiny.FARM)
    given = dict(size=size, student=7, instances=20)
    said_by(tiny.papermill('exercises.ipynb', 'solved.ipynb', **given), folder, **variables)
    cells = read_json(folder/'solved.ipynb')['cells']
    handed = [o['data']['application/json'] for c in cells for o in c.get('outputs', [])
              if 'application/json' in o.get('data', {})]
    assert handed[0]['student'] == 7
    assert len(handed[0]['found']) == 9
    assert (folder/'runs'/'course'/'ppo_crowd'/'summary.json').is_file()
