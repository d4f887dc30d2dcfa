"""What holds for every notebook and module, whatever they compute."""
import ast
import builtins
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from graphlib import TopologicalSorter

import pytest

import floors
import tiny
from parameters import is_parameters, own_settings, parameters_cell

NBS = tiny.ROOT/'nbs'
PACKAGE = tiny.ROOT/'alpaca_farm'
# a template is no notebook yet
NOTEBOOKS = sorted(p for p in NBS.rglob('*.ipynb')
                   if not {'.ipynb_checkpoints', 'recipes'} & {*p.parts})
RUNNABLE = [p for p in NOTEBOOKS if p.relative_to(NBS).parts[0] not in tiny.SHARED]
MODULES = sorted(p for p in PACKAGE.rglob('*.py') if p.name not in ('__init__.py', '_modidx.py'))
FLOORS = floors.read_floors()
PATHS = floors.modules()


def name_of(path): return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)
def cells(path): return json.loads(path.read_text(encoding='utf-8'))['cells']
def source(cell): return ''.join(cell['source'])


def defined(text):
    return [s for s in ast.parse(text).body
            if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]


def config_of(path): return tiny.config_class(path.stem)


def parameters(path): return [c for c in cells(path) if is_parameters(c)]


SETTABLE = [p for p in RUNNABLE if re.search(r'class \w+Config\(', p.read_text(encoding='utf-8'))]
each_notebook = pytest.mark.parametrize('path', SETTABLE, ids=lambda p: p.stem)
each_module = pytest.mark.parametrize('path', MODULES, ids=name_of)


@pytest.mark.slow
@each_notebook
def test_a_notebook_is_known_as_its_module(path):
    "Executed from top to bottom, a notebook has the identity of the module that it exports."
    from alpaca_farm.run.runs import code_hash, notebook_hash
    history = [source(c) for c in cells(path) if c['cell_type'] == 'code']
    executed = eval('lambda: 0', dict(In=history))
    module = importlib.import_module(config_of(path).__module__)
    exported = getattr(module, 'train', None) or module.run
    assert code_hash(executed) == code_hash(exported) == notebook_hash(path.stem)


@each_notebook
def test_parameters_cell_is_written_from_the_dataclass(path):
    "By `python tools/parameters.py`; papermill reads every line of it."
    from papermill import inspect_notebook
    cls = config_of(path)
    assert [source(c) for c in parameters(path)] == [parameters_cell(cls)]
    assert [*inspect_notebook(str(path))] == own_settings(cls)


@each_notebook
def test_no_setting_hides_a_name_of_the_notebook(path):
    "papermill assigns globals: no other cell binds one, nor is one a builtin that is used."
    import symtable
    known = {f.name for f in dataclasses.fields(config_of(path))}
    for c in cells(path):
        if c['cell_type'] != 'code' or source(c).startswith('%') or c in parameters(path):
            continue
        names = symtable.symtable(source(c), path.stem, 'exec').get_symbols()
        bound = {s.get_name() for s in names if s.is_assigned() or s.is_imported()}
        used = {n.id for n in ast.walk(ast.parse(source(c))) if isinstance(n, ast.Name)
                and isinstance(n.ctx, ast.Load)}
        assert not known & (bound | used & set(dir(builtins))), source(c)


@each_notebook
def test_notebook_of_a_method(path):
    "Title and sentence, cfg right after the parameters, runs marked slow, one command."
    code = [c for c in cells(path) if c['cell_type'] == 'code']
    first = source(cells(path)[0])
    assert first.startswith('# ')
    assert re.search(r'^> \S', first, re.M)
    at = next(i for i, c in enumerate(code) if is_parameters(c))
    assert re.match(rf'cfg = {config_of(path).__name__}\.collect\(globals\(\)\)',
                    source(code[at + 1]))
    name = config_of(path).__name__
    frames = [c for c in code if re.search(rf'^(@makes_run|command)\({name}\b', source(c), re.M)]
    assert [source(c).startswith('#| export') for c in frames] == [True]
    for c in code:
        if re.search(r'^(train|run)\(cfg', source(c), re.M):
            assert source(c).startswith('#| slow')


@pytest.mark.parametrize('path', sorted((tiny.ROOT/'nbs'/'studies').glob('*.ipynb')), ids=lambda p: p.stem)
def test_a_study_checks_its_parameters(path):
    "Papermill gives lists as texts, and passes over names that are unknown."
    code = [c for c in cells(path) if c['cell_type'] == 'code']
    at = next(i for i, c in enumerate(code) if is_parameters(c))
    assert source(code[at + 1]).endswith('\ncheck_parameters(globals())')


@each_notebook
def test_help_lists_every_setting(path, capsys):
    from alpaca_farm.run.settings import from_args
    with pytest.raises(SystemExit) as e:
        from_args(config_of(path), ['--help'], path.stem)
    said = capsys.readouterr().out
    assert e.value.code == 0
    for f in dataclasses.fields(config_of(path)):
        assert re.search(rf'^ +--{f.name} \[?\w+', said, re.M), f.name
    assert not re.search(r'^ +--\w+ \w+\s*\n(?= +--)', said, re.M)  # each with its comment


FORKS = '''
import importlib, os, sys
already, unwanted, names = (words.split() for words in sys.argv[1:])
for name in already: importlib.import_module(name)
for name in names:
    if os.fork() == 0:
        importlib.import_module(f'alpaca_farm.{name}')
        print(name, *(m for m in unwanted if m in sys.modules), flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, name
'''
HEAVY = 'openai datasets wandb tensorboard alpaca_eval matplotlib ray submitit'
TENSORLESS = ['judging.measures', 'judging.stats', 'run.settings', 'run.runs', 'world',
              'data.records', 'worlds.embedded.crowd', 'annotators', 'eval', 'boards.text']


@pytest.mark.slow
@pytest.mark.parametrize('already, unwanted, names', [
    ('torch transformers', HEAVY, [name_of(p) for p in MODULES]),
    ('', 'torch transformers', TENSORLESS)], ids=['all', 'without tensors'])
def test_imports_are_light(already, unwanted, names):
    "Each module in a process of its own that has imported nothing else before."
    out = subprocess.run([sys.executable, '-c', FORKS, already, unwanted, ' '.join(names)],
                         cwd=tiny.ROOT, env=tiny.environment(), capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout.splitlines() == names, out.stderr + out.stdout


@each_module
def test_imports_only_go_down(path):
    "The floors of nbs/architecture.md; a module's name in a string is an import too."
    name = name_of(path)
    level = floors.floor_of(name, FLOORS)
    for other in floors.imported_modules(path, PATHS):
        assert floors.floor_of(other, FLOORS) <= level, f'{name} imports {other}'
        assert FLOORS[level].title != 'Methods' or floors.floor_of(other, FLOORS) < level


def test_no_modules_import_each_other_in_a_circle():
    imports = {name: floors.imported_modules(path, PATHS) for name, path in PATHS.items()}
    assert len([*TopologicalSorter(imports).static_order()]) == len(PATHS)


@each_module
def test_imports_have_one_form(path):
    "nbdev makes those at the top relative, if each is on one line; those inside of functions not."
    tree = ast.parse(path.read_text(encoding='utf-8'))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith('alpaca_farm')):
            assert (node.level > 0) == (node in tree.body), ast.unparse(node)


WORLDS = re.compile(r'(world|real|bring_your_own|worlds\..*)$')


@pytest.mark.parametrize('path', [p for p in MODULES if not WORLDS.match(name_of(p))], ids=name_of)
def test_no_module_knows_a_world_by_name(path):
    "None imports one, but for what reads a world's folder; none names its functions."
    read = {m for m in floors.imported_modules(path, PATHS) if WORLDS.match(m)}
    assert read <= {'worlds.folder'}
    if name_of(path).partition('.')[0] in tiny.SHARED:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) else getattr(node, 'id', '')
        if isinstance(text, str):
            assert not re.search(r'embedded|alpaca_farm\.(real|world)\b|world:', text), text


def test_a_name_means_one_thing():
    "A function or class is defined in one module only, but for `train` and `run`."
    where = {}
    for path in MODULES:
        for d in defined(path.read_text(encoding='utf-8')):
            patched = any(ast.unparse(x).startswith('patch') for x in d.decorator_list)
            if not patched:
                where.setdefault(d.name, []).append(name_of(path))
    assert {n: m for n, m in where.items() if len(m) > 1 and n not in ('train', 'run')} == {}


UNSAFE = r'trust_remote_code=(?!False)|\bpickle\b|torch\.(load|save)\b|\bmarshal\b|shell=True'


@each_module
def test_a_module_has_a_docstring_short_lines_and_nothing_unsafe(path):
    text = path.read_text(encoding='utf-8')
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    assert '\t' not in text
    assert not re.search(UNSAFE, text)
    called = {n.func.id for n in ast.walk(tree)
              if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not called & {'eval', 'exec'}
    # of what is written: nbdev wraps `__all__` in its own way
    written = re.sub(r'^__all__ = \[.*?\]$', '', text, flags=re.M | re.S)
    assert [l for l in written.splitlines() if len(l) > 110] == []


def test_who_reads_a_model_refuses_its_code():
    "On a terminal transformers asks whether to execute it, unless a call says that it must not."
    kinds = r'\b(?:Auto\w+|kind)\.from_(?:%s)\((?:[^()]|\([^()]*\))*\)'
    texts = [p.read_text(encoding='utf-8') for p in (tiny.ROOT/'tests').rglob('*.py')]
    texts += [source(c) for p in NOTEBOOKS for c in cells(p)]
    calls = [c for text in texts for c in re.findall(kinds % 'pretrained', text)]
    for p in MODULES:
        calls += re.findall(kinds % 'config', p.read_text(encoding='utf-8'))
    assert len(calls) > 9
    assert [c for c in calls if 'trust_remote_code=False' not in c] == []


def test_ci_installs_the_pinned_versions_by_their_hashes():
    "Every package that the project names, and every version as in constraints.txt."
    def named(line): return re.split('[><=!~ ]', line.lower().replace('_', '-'))[0]
    pinned = {line for line in (tiny.ROOT/'constraints.txt').read_text().lower().splitlines()
              if '==' in line}
    files = (tiny.ROOT/'.ci'/name for name in ('torch.txt', 'requirements.txt'))
    text = ''.join(file.read_text().lower() for file in files)
    hashes = r'((?: \\\n +--hash=sha256:[0-9a-f]{64})+)'
    found = dict(re.findall(rf'^(\S+==\S+)(?: ; .*?)?{hashes}$', text, re.M))
    assert len(found) == len(re.findall(r'^\w', text, re.M))
    assert 'torch==2.13.0' in found
    versions = {v.replace('_', '-').removesuffix('+cpu') for v in found}
    assert versions <= {v.replace('_', '-') for v in pinned}
    parser = ConfigParser(delimiters=['='])
    parser.read(tiny.ROOT/'settings.ini')
    wanted = ' '.join(parser['DEFAULT'][f'{part}requirements'] for part in ('', 'dev_', 'docs_'))
    assert {named(w) for w in wanted.split()} <= {named(v) for v in found}


def test_what_nbdev_reads_is_the_same_in_both_files():
    parser = ConfigParser(delimiters=['='])
    parser.read(tiny.ROOT/'settings.ini')
    settings = tomllib.loads((tiny.ROOT/'pyproject.toml').read_text())['tool']['nbdev']
    for name, value in settings.items():
        assert parser['DEFAULT'][name] == str(value), name
