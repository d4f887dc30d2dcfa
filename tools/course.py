"""The course's assignment, and its grades.

    python tools/course.py assignment runs/exercises.ipynb   # make assignment
    python tools/course.py grade runs/exercises.ipynb        # make grade FILE=runs/exercises.ipynb
    python tools/course.py grade handed_in/                  # of a class, with one table

`nbs/exercises.ipynb` is the solution: cells with nbgrader's metadata are answers, and functions in
them are the library's. A submitted function runs in a process of its own with a time limit, beside
the solution and beside wrong ones, each with the sentence that names its fault. Numbers are found
anew from the answers in the last cell, whose requests must be those of the student's own world.
That is no protection from malice: grade strangers' files in a container.
"""
import ast
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from IPython.display import display

sys.path.insert(0, str(Path(__file__).parents[1]/'tests'))
import tiny
from course_faults import CHECKS
from alpaca_farm.farm import read_sizes
from alpaca_farm.judging.stats import bootstrap
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.paths import notebook_path
from alpaca_farm.world import sample_splits, WorldConfig

DECISIONS = 'ppo', 'dpo', 'undecided'
SECONDS = 20   # that a function may take for all its cases
ALLOWED = {'torch', 'numpy', 'math', 'itertools', 'statistics', 'random', 're', 'collections',
           'functools'}
REFUSED = {'open', 'exec', 'eval', 'compile', '__import__', 'globals', 'getattr'}
# attributes that are refused: re.compile is none of them, torch.os is
OUTSIDE = {'open', 'exec', 'os', 'sys', 'builtins', 'importlib', 'subprocess', 'pickle'}
OF_PANDAS = {'eval', 'query', 'read_pickle'}   # they execute texts and files
# names that functions may use
GIVEN = dict(bootstrap=bootstrap, display=display, F=F, itertools=itertools, math=math, np=np,
             pd=pd, plt=plt, re=re, torch=torch)
# %%time, %timeit f(), !pip list, ?f and f?
MAGIC = re.compile(r'(?m)^([ \t]*)(?:%%?[a-z].*|!(?!=).*|\?.*|[\w.]+\?\??[ \t]*)$')
NOTEBOOKS = '.ipynb', '.ipynb.json', '.ipynb.txt'   # as mail and browsers name them
THREE = 'three numbers are asked for: (value, low, high)'


def answers(notebook: dict) -> dict[str, str]:
    "The source of each answer of a notebook, by its name; of a divided cell all parts."
    found = {}
    for cell in notebook['cells']:
        name = cell['metadata'].get('nbgrader', {}).get('grade_id')
        if not name: continue
        source = ''.join(cell['source'])
        found[name] = f'{found[name]}\n{source}' if name in found else source
    return found


def blank(source: str) -> str:
    "An answer's cell without the answer: a function's first lines, or a name that is None."
    tree = ast.parse(source)
    first = tree.body[0]
    if isinstance(first, ast.ImportFrom):
        function = getattr(importlib.import_module(first.module), first.names[0].name)
        left_out = re.findall(r'\w+', source.partition('# without')[2])
        source = inspect.getsource(function)
        for name in left_out: source = re.sub(rf'(?m)^ +\**{name}\b.*\n', '', source)
        first = ast.parse(source).body[0]
    if isinstance(first, ast.FunctionDef):
        lines = source.splitlines()[:first.body[0].end_lineno]
        return '\n'.join([*lines, '    raise NotImplementedError'])
    return re.sub(r'(?m)^((?:predicted|found)\[.*?\]) = .*?(   #.*)?$', r'\1 = None\2',
                  re.sub(r'(?m)^_, .*\n', '', source))


def write_assignment(path):
    "Write the exercises with their answers blanked, and without outputs; ValueError over answers."
    notebook = read_json(notebook_path('exercises'))
    for cell in notebook['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown':   # links lead from where it lies
            source = re.sub(r'\]\((\w+\.(md|ipynb))\)', r'](../nbs/\1)', source)
        else:
            cell['outputs'] = []
            source = source.removeprefix('#| slow\n')
            if 'nbgrader' in cell['metadata']: source = blank(source)
        cell['source'] = source.splitlines(True)
    if Path(path).exists() and not is_blank(Path(path), answers(notebook)):
        raise ValueError(f'{path} is there already: move it, or name another file')
    write_json(Path(path), notebook)


def is_blank(path: Path, blanks: dict) -> bool:
    "Whether a file is the assignment, without a single answer."
    try: return answers(read_submission(path)) == blanks
    except ValueError: return False


def plain(x):
    "Lists and numbers of a result; of a record its output alone."
    if isinstance(x, dict): return dict(output=x.get('output'))
    if isinstance(x, (list, tuple)): return [plain(y) for y in x]
    return x.tolist() if hasattr(x, 'tolist') else x


def same(one, two, tolerance: float) -> bool:
    "Whether two results are equal up to a share of their size."
    try:
        a, b = np.array(one), np.array(two)
        if a.shape != b.shape: return False
        if tolerance == 0: return bool((a == b).all())
        if tolerance == .2: scale = max(np.ptp(b), 1e-9)   # of an interval: its width
        else: scale = np.abs(b) + 1e-2
        return bool((np.abs(a - b) <= tolerance*scale).all())
    except (TypeError, ValueError): return False


def without_magic(source: str) -> str:
    "A cell that is not Python, with `pass` for what only Jupyter runs: %%time, !pip, dpo_loss?"
    try: ast.parse(source)
    except SyntaxError: return MAGIC.sub(r'\1pass', source)
    return source


def refusal(source: str) -> str:
    "Why a cell is not executed; empty if it may be."
    try: tree = ast.parse(source)
    except SyntaxError as e: return f'it is not Python (line {e.lineno}: {e.msg})'
    outside = OUTSIDE | OF_PANDAS if re.search(r'\bpd\b', source) else OUTSIDE
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or '.']
            names += [a.name for a in node.names if a.name.lstrip('_') in OUTSIDE]
        odd = [n for n in names if n.split('.')[0] not in ALLOWED]
        if odd and odd[0].startswith('alpaca_farm'): return "it is the library's"
        if odd: return f'it imports {odd[0]}, which no exercise needs: not executed'
        used = getattr(node, 'id', getattr(node, 'attr', ''))
        if isinstance(node, ast.Attribute): refused = used.lstrip('_') in outside
        else: refused = used in REFUSED
        if refused or used.startswith('__'):
            return f'it uses {used}, which no exercise needs: not executed'
    return ''


def _child(source, name, cases, more, pipe):
    torch.set_num_threads(1)
    plt.switch_backend('agg')   # no windows
    known = GIVEN | more
    try:
        exec(source, known)
        if name not in known:
            pipe.send(json.dumps(dict(error=f'it defines no function {name}')))
            return
        found = []
        for case in cases: found.append(plain(known[name](*case)))
        pipe.send(json.dumps(dict(found=found)))
    except NotImplementedError: pipe.send(json.dumps(dict(error='not done yet')))
    except BaseException as e:
        said = f'it fails with {type(e).__name__}: {e}'[:200]
        if type(e) is NameError:
            said += ': the grader does not have this name; see *What your functions may use*'
        pipe.send(json.dumps(dict(error=said)))


def results(source: str, name: str, cases: list, more: dict):
    "What a function returns for each case, given more names, or a text that says why nothing."
    source = without_magic(source)
    if why := refusal(source): return why
    context = multiprocessing.get_context('fork' if sys.platform == 'linux' else 'spawn')
    here, there = context.Pipe(False)
    process = context.Process(target=_child, args=(source, name, cases, more, there))
    process.start()
    there.close()
    try:
        if not here.poll(SECONDS): return f'it still runs after {SECONDS} s: does it loop for ever?'
        said = json.loads(here.recv())
        return said.get('found', said.get('error'))
    except EOFError: return 'its process ended without a result'
    finally:
        process.kill()
        process.join()


def grade_function(name: str, source: str, names: dict) -> tuple[float, str]:
    "Points, of 4, and what is wrong."
    if name == 'judge': return grade_judge(source, names)
    check = CHECKS[name]
    found = results(source, name, check.cases, {})
    if isinstance(found, str): return 0, found
    right = [plain(names[name](*case)) for case in check.cases]
    pairs = [same(a, b, check.tolerance) for a, b in zip(found, right)]
    if all(pairs): return 4, ''
    for fault, make in check.faults.items():
        wrong = [plain(make(names[name])(*case)) for case in check.cases]
        if all(same(a, b, check.tolerance) for a, b in zip(found, wrong)): return 1, fault
    k = pairs.index(False)
    if any(x is None for x in found): return 0, 'it returns nothing: is a `return` missing?'
    if shape(found[k]) != shape(right[k]):
        return 0, f'it returns the shape {shape(found[k])}, and {shape(right[k])} is asked for'
    points = sum(pairs)/len(pairs)
    if not finite(found[k]):
        return points, 'it returns nan or infinity: is something divided by 0, or log(0)?'
    if factor := common_factor(found, right):
        return 1, f'all of it is {factor:.3g} times what is right'
    one, two = (textwrap.shorten(f'{x[k]}', 80) for x in (found, right))
    about = f' ({check.about[k]})' if check.about else ''
    return points, f'case {k + 1} of {len(pairs)}{about}: {one}, where {two} is right'


def finite(x) -> bool:
    "Whether a result holds numbers, and all are finite."
    try: return bool(np.isfinite(np.array(x, float)).all())
    except (TypeError, ValueError): return True   # texts


def common_factor(found: list, right: list) -> float:
    "By what all results are to be divided; 0 if there is no such number."
    try: a, b = (np.concatenate([np.array(x, float).ravel() for x in y]) for y in (found, right))
    except (TypeError, ValueError): return 0
    if a.shape != b.shape: return 0
    factor = (a*b).sum()/(b*b).sum()
    return factor if np.allclose(a, factor*b, rtol=1e-3, atol=1e-4) else 0


def shape(x):
    "The shape of a result, or what it is instead."
    try: return np.shape(x)
    except ValueError: return 'ragged'


def grade_judge(source: str, names: dict) -> tuple[float, str]:
    "Points of a judge, by other pairs than the student's own."
    truth = names['sample_truth'](987_654)   # of the world of these pairs
    more = {k: names[k] for k in ('ASKERS', 'PHRASES', 'mark_difference', 'quality')}
    more |= dict(WANTED=truth.wanted, truth=truth)
    pairs = [{k: p[k] for k in ('instruction', 'input', 'output_1', 'output_2')}
             for p in names['voted_pairs'](987_654)]
    turned = [dict(p, output_1=p['output_2'], output_2=p['output_1']) for p in pairs]
    found = results(source, 'judge', [(pairs,), (turned,)], more)
    if isinstance(found, str): return 0, found
    if any(np.shape(x) != (len(pairs),) or not np.isin(x, (1, 1.5, 2)).all() for x in found):
        return 0, 'it must return 1, 1.5 or 2 for each pair'
    own, other = map(np.array, found)
    if (own == 1.5).all(): return 1, 'it never decides: 1.5 for each pair'
    if (own + other != 3).mean() > .01:
        return 1, 'it prefers another answer when the two change places: it has a position bias'
    crowd = names['sample_crowd'](987_654, 'held_out_crowd', truth=truth)
    majority = 1.5 + np.sign(np.array(crowd(pairs)) - 1.5)/2
    agreed = 100*(1 - np.abs(own - majority)).mean()
    if agreed >= 60: return 4, ''
    longer = [1 + (len(p['output_2']) > len(p['output_1'])) for p in pairs]
    if (own == longer).mean() > .95: return 1, 'it takes the longer answer, whatever is in it'
    if (own == longer).mean() < .05: return 1, 'it takes the shorter answer, whatever is in it'
    if agreed <= 40: return 1, f'it prefers what most people do not (it agrees in {agreed:.0f} %)'
    return 2, f'it agrees with most of the crowd in {agreed:.0f} %; a judge who reads WANTED in 65'


def measured(n: int, handed: dict, names: dict) -> np.ndarray | tuple:
    "The values of which a number is the mean, from what is handed in; of unit 7 the number itself."
    student, kept = int(handed['student']), handed['evidence']
    if n == 1:
        votes = [p['votes']['vote 1'] for p in names['voted_pairs'](student)]
        return 100*(1 - np.abs(np.array(kept['judge'], float) - votes))
    asked = [dict(instruction=i, input='') for i in kept['instructions']]
    references = [dict(r, output=o) for r, o in zip(asked, kept['references'], strict=True)]
    truth = names['sample_truth'](student)
    crowd = names['sample_crowd'](student, 'held_out_crowd', truth=truth)
    pool = names['sample_pool'](student, truth=truth)
    def rates(name, judge=crowd):
        rows = [dict(r, output=o) for r, o in zip(asked, kept[name], strict=True)]
        return names['win_rates'](rows, references, judge)
    if n == 2: return names['with_majority'](references, kept['scores'], crowd)
    if n == 6: return rates('free', pool) - rates('free')
    if n == 8: return rates('ppo') - rates('dpo')
    if n != 7: return rates({3: 'best_of_n', 4: 'ppo', 5: 'dpo'}[n])
    rows = [dict(r, output=o) for r, o in zip(asked, kept['free'], strict=True)]
    votes = names['some_votes'](rows, references, crowd, pool, student)
    mean, error, _ = names['ppi_mean'](*votes)
    return 100*mean, 100*(mean - 1.96*error), 100*(mean + 1.96*error)


def of_own_world(handed: dict) -> bool:
    "Whether the instructions are those of the student's world."
    cfg = WorldConfig(**read_sizes(handed['size']).get('world', {}), seed=int(handed['student']))
    asked = handed['evidence'].get('instructions', [])
    return asked == [r['instruction'] for r in sample_splits(cfg)['eval']][:len(asked)]


def three_numbers(said) -> list[float]:
    "An answer's value, low and high; empty if they are not three numbers, or not finite."
    if not isinstance(said, list) or len(said) != 3: return []
    try: numbers = [float(x) for x in said]
    except (TypeError, ValueError, OverflowError): return []
    return numbers if np.isfinite(numbers).all() else []


def grade_number(n: int, handed: dict, names: dict, own: bool) -> tuple[float, str]:
    "Points, of 3, and what is wrong."
    said = handed['found'].get(str(n))
    if said is None: return 0, 'not done yet'
    if n > 1 and not own:
        return 0, f'the requests are not those of the world of student {handed["student"]}'
    if not three_numbers(said): return 0, THREE
    value, low, high = three_numbers(said)
    truth = measured(n, handed, names)
    if n != 7: truth = bootstrap(truth)
    if not abs(value - truth[0]) <= .15 + .03*(n == 7)*(truth[2] - truth[1]):   # or it is nan
        return 0, f'the value is {value:.1f}, and the answers handed in have {truth[0]:.1f}'
    width = (high - low + 1e-9)/(truth[2] - truth[1] + 1e-9)   # 1 where no answer differs
    if .8 <= width <= 1.25 and low <= value <= high: return 3, ''
    about = 'one standard error is no 95 % interval' if .4 < width < .65 else (
        'is it the spread of single answers?' if width > 3 else 'how was it found?')
    return 2, f'the interval is {width:.2f} times as wide as it should be: {about}'


def handed_in(notebook: dict) -> dict:
    "What the last cell has kept; ValueError if it was not executed."
    for cell in reversed(notebook['cells']):
        for output in cell.get('outputs', []):
            found = output.get('data', {}).get('application/json')
            if isinstance(found, dict) and 'student' in found: return found
    raise ValueError('the last cell has no output: run it and save the notebook')


def grade_answer(name, source, handed, names, own) -> tuple[float, str]:
    "Points of an answer, and what is wrong; no source where there is no such cell."
    kind, _, n = name.partition('_')
    if source is None: return 0, 'its cell is missing: keep the cells of the assignment'
    if name == 'decision': return grade_decision(handed)
    if kind == 'found': return grade_number(int(n), handed, names, own)
    if kind != 'predicted':
        points, said = grade_function(name, source, names)
        if len(re.findall(rf'(?m)^def {name}\b', source)) > 1:
            said = f'{said} (it is defined more than once: the last one counts)'.strip()
        return points, said
    made = isinstance(handed['predicted'].get(n), (int, float))
    return int(made), '' if made else 'no number was predicted'


def read_submission(path: Path) -> dict:
    "Read a notebook that was handed in; ValueError says in a line why it cannot be graded."
    if not path.is_file(): raise ValueError(f'{path}: there is no such file')
    text = path.read_text(encoding='utf-8-sig', errors='replace')
    if not text.strip(): raise ValueError(f'{path}: the file is empty')
    try:
        notebook = dict(cells=[])
        for cell in json.loads(text)['cells']:
            notebook['cells'].append(dict(cell, metadata=cell.get('metadata', {})))
        given = answers(notebook)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f'{path}: it is not a notebook') from None
    if not given:
        raise ValueError(f'{path}: no cell is an answer. Is it the file of `make assignment`?')
    return notebook


@functools.cache
def solution() -> dict:
    "The names that the exercises define: the right functions, and what grading reads."
    with contextlib.redirect_stdout(io.StringIO()): return tiny.executed('exercises')


def grade(path) -> tuple[dict, list[str]]:
    "The student with the points of each answer, and a line for each; ValueError if unreadable."
    notebook = read_submission(Path(path))
    names = solution()
    given = answers(notebook)
    lines = []
    handed = dict(student='?', predicted={}, found={}, evidence={})
    own = False
    try:
        handed = handed_in(notebook)
        own = of_own_world(handed)
    except Exception as e: lines.append(f'{e}')
    lines.append(f'student {handed["student"]}')
    row = dict(student=handed['student'])
    for name in points_of_answers():
        try: points, said = grade_answer(name, given.get(name), handed, names, own)
        except Exception as e: points, said = 0, f'cannot be read ({type(e).__name__}: {e})'
        row[name] = points
        lines.append(f'{name:16} {points:3.1f} of {points_of_answers()[name]}  {said}'.rstrip())
    return row, lines


@functools.cache
def points_of_answers() -> dict[str, int]:
    "How many points each answer of the exercises can have."
    marks = [c['metadata'].get('nbgrader') for c in read_json(notebook_path('exercises'))['cells']]
    return {about['grade_id']: about['points'] for about in marks if about}


def total(row: dict) -> float:
    "The sum of a submission's points."
    return sum(row.get(name, 0) for name in points_of_answers())


def files_of_class(folder: Path) -> tuple[list[Path], list[str]]:
    "A folder's notebooks, and the names of other files, but for those that grading writes."
    found, others = [], []
    for path in sorted(folder.rglob('*')):
        name = path.relative_to(folder).as_posix()
        if path.parent.name == '.ipynb_checkpoints' or path.name.startswith('._'): continue
        if not path.is_file() or name == 'grades.csv' or name.endswith('.grade.txt'): continue
        if name.lower().endswith(NOTEBOOKS): found.append(path)
        else: others.append(name)
    return found, others


def grade_class(folder: Path) -> pd.DataFrame:
    "Grade each notebook of a folder, its lines beside it as text; a table by file."
    found, others = files_of_class(folder)
    if others: print('not graded:', textwrap.shorten(', '.join(others), 1000))
    if not found: raise ValueError(f'{folder}: there is no notebook in it')
    solution()   # what fails below is a student's
    rows = {}
    for path in found:
        try: row, lines = grade(path)
        except ValueError as e: row, lines = dict(student='?'), [f'{e}']
        except Exception as e:
            row = dict(student='?')
            lines = [f'{path}: it cannot be read ({type(e).__name__}: {e})']
        said = path.with_name(f'{path.name}.grade.txt')
        said.write_text('\n'.join(lines) + '\n', encoding='utf-8')
        rows[path.relative_to(folder).as_posix()] = dict(row, total=total(row))
    table = pd.DataFrame(rows).T.reindex(columns=['student', *points_of_answers(), 'total'])
    table = table.fillna(0).rename_axis('file')
    table.to_csv(folder/'grades.csv')
    return table


def grade_decision(handed: dict) -> tuple[float, str]:
    "Points of the decision, by the student's own interval."
    said = handed['found'].get('keep')
    if said is None: return 0, 'not done yet'
    word = str(said).strip().lower()
    if word not in DECISIONS: return 0, f'{said!r} is none of {", ".join(DECISIONS)}'
    interval = three_numbers(handed['found'].get('8'))
    if not interval: return 0, f'of found[8] {THREE}'
    _, low, high = interval
    right = 'ppo' if low > 0 else 'dpo' if high < 0 else 'undecided'
    if word == right: return 3, ''
    return 0, f'{word}, though the interval of the difference says {right}'


def main(words: list[str]):
    "Write the assignment, or print the grades of a file or a class."
    if len(words) != 2 or words[0] not in ('assignment', 'grade') or not words[1]:
        sys.exit('assignment FILE, or grade FILE or FOLDER: make grade FILE=runs/exercises.ipynb')
    todo, path = words[0], Path(os.path.expanduser(words[1]))
    whole = sum(points_of_answers().values())
    try:
        if todo == 'assignment': write_assignment(path)
        elif path.is_dir():
            table = grade_class(path)
            print(table[['student', 'total']].to_string())
            print(f'of {whole} points. By answer: {path}/grades.csv; '
                  'in words: .grade.txt beside each')
        else:
            row, lines = grade(path)
            print(*lines, f'{total(row):.1f} of {whole} points', sep='\n')
    except (ValueError, OSError) as e: sys.exit(f'{e}')


if __name__ == '__main__': main(sys.argv[1:])
