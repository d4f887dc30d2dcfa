"""The course's assignment, and its grades.

    python tools/course.py assignment runs/exercises.ipynb   # make assignment
    python tools/course.py grade runs/exercises.ipynb        # make grade FILE=runs/exercises.ipynb

`nbs/exercises.ipynb` is the solution: cells with nbgrader's metadata are answers, and functions in
them are the library's. A submitted function runs in a process of its own with a time limit, beside
the solution and beside wrong ones, each with the sentence that names its fault. Numbers are found
anew from the answers in the last cell, whose requests must be those of the student's own world.
That is no protection from malice: grade strangers' files in a container.
"""
import ast
import contextlib
import importlib
import inspect
import io
import json
import math
import multiprocessing
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]/'tests'))
import tiny
from alpaca_farm.farm import read_sizes
from alpaca_farm.judging.stats import bootstrap
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.paths import notebook_path
from alpaca_farm.world import sample_splits, WorldConfig

SECONDS = 20   # that a function may take for all its cases
ALLOWED = {'torch', 'numpy', 'math', 'itertools', 'statistics', 'random', 're', 'collections',
           'functools'}
REFUSED = {'open', 'exec', 'eval', 'compile', 'input', '__import__', 'globals', 'getattr'}


def answers(notebook: dict) -> dict[str, str]:
    "The source of each answer of a notebook, by its name."
    found = {}
    for cell in notebook['cells']:
        name = cell['metadata'].get('nbgrader', {}).get('grade_id')
        if name: found[name] = ''.join(cell['source'])
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
    "Write the exercises with their answers blanked, and without outputs."
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
    write_json(Path(path), notebook)


def randn(*shape, seed=0): return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def masks():
    "Answers of differing length behind prompts of differing length."
    mask = torch.zeros(4, 9)
    for row, (start, end) in enumerate([(0, 9), (2, 6), (1, 8), (3, 4)]): mask[row, start:end] = 1
    return mask


def gae_cases():
    rewards, values = randn(4, 9), randn(4, 9, seed=1)
    whole = torch.ones(4, 9)
    return [(rewards, values, whole, 1., 1.), (rewards, values, masks(), 1., 1.),
            (rewards, values, masks(), .9, .8)]


def reversed_gae(f):
    def wrong(r, v, m, gamma, lam):
        delta = (r + gamma*F.pad((v*m)[:, 1:], (0, 1)) - v)*m
        advantages = f(delta.flip(1), 0*v, m.flip(1), gamma, lam)[0].flip(1)
        return advantages, advantages + v*m
    return wrong


def ratio(new, old): return (new - old).exp()


def undivided(y, f, rest, w): return math.sqrt(w**2*rest.var() + (y - w*f).var())


def ends(scale):
    "The mean difference, and ends that are too near or too far."
    def wrong(a, b):
        mean, low, high = bootstrap(a - b)
        return mean, mean - scale*(mean - low), mean + scale*(high - mean)
    return wrong


def ppi_cases():
    cases = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        y = 1.*(rng.random(60) < .5)
        f, rest = .2*y + .8*rng.random(60), .1 + .8*rng.random(200)
        cases.append((y, f, rest))
    return cases


def paired(seed=0):
    rng = np.random.default_rng(seed)
    easy = 30*rng.random(200)
    return easy + 40 + 10*rng.random(200), easy + 38 + 10*rng.random(200)


SIGN = 'a minus sign is lost: what training makes small would have to be made large'
# of each function: cases, tolerance, and by their fault wrong functions, made from the right one
CHECKS = dict(
    pairwise_loss=([(randn(6), randn(6, seed=1)), (randn(3)*20, randn(3, seed=1)*20)], 1e-3, {
        SIGN: lambda f: lambda c, r: -f(c, r),
        'chosen and rejected have changed places': lambda f: lambda c, r: f(r, c),
        'the logarithm is missing': lambda f: lambda c, r: -torch.sigmoid(c - r),
        'it is one mean, and each pair has a loss of its own': lambda f: lambda *x: f(*x).mean()}),
    choose_best=([([dict(instruction=f'{k}', output=list('abcdef'), ended=[True]*6,
                         scores=randn(6, seed=k).tolist()) for k in range(5)],)], 0, {
        'it takes the worst answer': lambda f: lambda rows: f(
            [dict(r, scores=[-s for s in r['scores']]) for r in rows]),
        'it takes the first answer, whatever the scores': lambda f: lambda rows: [
            dict(output=r['output'][0]) for r in rows]}),
    gae=(gae_cases(), 1e-3, {
        'it is reversed: the sum runs from the first token to each, not from each to the last':
            reversed_gae,
        'padding and prompts count: nothing outside of the mask may': lambda f: (
            lambda r, v, m, g, l: f(r, v, torch.ones_like(m), g, l)),
        'the value of the next state is missing in delta': lambda f: lambda r, v, m, g, l: f(
            r - g*F.pad((v*m)[:, 1:], (0, 1)), v, m, g, l),
        'lambda is missing': lambda f: lambda r, v, m, g, l: f(r, v, m, g, 1.),
        'gamma is missing': lambda f: lambda r, v, m, g, l: f(r, v, m, 1., l),
        'a minus sign is lost: the value is what was expected, and is taken away': lambda f: (
            lambda r, v, m, g, l: f(r, -v, m, g, l)),
        'advantages and returns have changed places': lambda f: lambda *x: f(*x)[::-1]}),
    ppo_policy_loss=([(randn(3, 5), randn(3, 5, seed=1), randn(3, 5, seed=2), .2)], 1e-3, {
        SIGN: lambda f: lambda *x: -f(*x),
        'it takes the larger gain, and must take the smaller one': lambda f: (
            lambda n, o, a, e: -torch.maximum(ratio(n, o)*a, ratio(n, o).clamp(1 - e, 1 + e)*a)),
        'nothing is clipped': lambda f: lambda n, o, a, e: -ratio(n, o)*a,
        'the unclipped gain is missing, so that a wrong step is never taken back': lambda f: (
            lambda n, o, a, e: -ratio(n, o).clamp(1 - e, 1 + e)*a),
        'the ratio is upside down': lambda f: lambda n, o, a, e: f(o, n, a, e),
        'the ratio is the exponential of the difference of log-probs': lambda f: (
            lambda n, o, a, e: -torch.minimum((n - o)*a, (n - o).clamp(1 - e, 1 + e)*a)),
        'it is one mean, and each token has a loss of its own': lambda f: lambda *x: f(*x).mean()}),
    masked_mean=([(randn(4, 9), masks())], 1e-3, {
        'it is unmasked: padding counts': lambda f: lambda x, m: x.mean(),
        'the sum is masked, but divided by all places': lambda f: lambda x, m: (x*m).mean(),
        'it is the mean of the rows\' means: each place that counts weighs the same': lambda f: (
            lambda x, m: ((x*m).sum(1)/m.sum(1)).mean())}),
    dpo_loss=([(randn(6), randn(6, seed=1), randn(6, seed=2), randn(6, seed=3), .3)], 1e-3, {
        SIGN: lambda f: lambda *x: -f(*x),
        'chosen and rejected have changed places': lambda f: lambda a, b, c, d, t: f(b, a, d, c, t),
        'the reference is missing': lambda f: lambda a, b, c, d, t: f(a, b, 0*c, 0*d, t),
        'the reference has the wrong sign': lambda f: lambda a, b, c, d, t: f(a, b, -c, -d, t),
        'beta is missing': lambda f: lambda a, b, c, d, t: f(a, b, c, d, 1.),
        'the logarithm is missing': lambda f: (
            lambda a, b, c, d, t: -torch.sigmoid(t*(a - c - b + d))),
        'it is one mean, and each pair has a loss of its own': lambda f: lambda *x: f(*x).mean()}),
    best_of_n_value=([(randn(3, 6).double().numpy(), randn(3, 6, seed=1).double().numpy(), n)
                      for n in (1, 2, 4)], 1e-3, {
        'it takes the best value, which nobody knows, not that of the best score':
            lambda f: lambda s, v, n: f(v, v, n),
        'it takes the lowest score': lambda f: lambda s, v, n: f(-s, v, n),
        'it looks at the first n samples only': lambda f: (
            lambda s, v, n: [b[:n][a[:n].argmax()] for a, b in zip(s, v)]),
        'n is missing: it takes the best of all samples': lambda f: (
            lambda s, v, n: f(s, v, s.shape[-1])),
        'it is the mean score, not the mean value': lambda f: lambda s, v, n: f(s, s, n)}),
    ppi_mean=(ppi_cases(), .04, {
        'the correction has the wrong sign': lambda f: lambda y, j, rest: (
            2*y.mean() - f(y, j, rest)[0], *f(y, j, rest)[1:]),
        'the judge is not used: these are the labels alone': lambda f: (
            lambda y, j, rest: f(y, j, rest[:0])),
        'the error is that of one instruction: its variance is not divided by their number':
            lambda f: lambda y, j, rest: (f(y, j, rest)[0], undivided(y, j, rest, f(y, j, rest)[2]),
                                          f(y, j, rest)[2])}),
    difference=([paired(seed) for seed in range(2)], .2, {
        'it is second minus first': lambda f: lambda a, b: f(b, a),
        'it is not paired: the spread is that of two independent means': lambda f: (
            lambda a, b: (a.mean() - b.mean(), *(a.mean() - b.mean() + z*math.sqrt(
                (a.var() + b.var())/len(a)) for z in (-1.96, 1.96)))),
        'the ends are one standard error away, which is 68 %': lambda f: ends(1/1.96),
        'the spread is that of single answers, not of their mean': lambda f: (
            lambda a, b: ends(math.sqrt(len(a)))(a, b))}))


def plain(x):
    "Lists and numbers of a result; of a record its output."
    if isinstance(x, dict): return x.get('output')
    if isinstance(x, (list, tuple)): return [plain(y) for y in x]
    return x.tolist() if hasattr(x, 'tolist') else x


def same(one, two, tolerance: float) -> bool:
    "Whether two results are equal up to a share of their size."
    try:
        a, b = np.array(one), np.array(two)
        if a.shape != b.shape: return False
        if tolerance == 0: return bool((a == b).all())
        if tolerance == .2: scale = max(np.ptp(b[1:]), 1e-9)   # of an interval: its width
        else: scale = np.abs(b) + 1e-2
        return bool((np.abs(a - b) <= tolerance*scale).all())
    except (TypeError, ValueError): return False


def refusal(source: str) -> str:
    "Why a cell is not executed; empty if it may be."
    try: tree = ast.parse(source)
    except SyntaxError as e: return f'it is not Python (line {e.lineno}: {e.msg})'
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom): names = [node.module or '.']
        odd = [n for n in names if n.split('.')[0] not in ALLOWED]
        if odd and odd[0].startswith('alpaca_farm'): return "it is the library's"
        if odd: return f'it imports {odd[0]}, which no exercise needs: not executed'
        used = getattr(node, 'id', getattr(node, 'attr', ''))
        if used in REFUSED or used.startswith('__'):
            return f'it uses {used}, which no exercise needs: not executed'
    return ''


def _child(source, name, cases, known, pipe):
    torch.set_num_threads(1)
    try:
        exec(source, known)
        found = []
        for case in cases: found.append(plain(known[name](*case)))
        pipe.send(json.dumps(dict(found=found)))
    except NotImplementedError: pipe.send(json.dumps(dict(error='not done yet')))
    except BaseException as e:
        pipe.send(json.dumps(dict(error=f'it fails with {type(e).__name__}: {e}'[:200])))


def results(source: str, name: str, cases: list, known: dict):
    "What a submitted function returns for each case, or a text that says why nothing."
    if why := refusal(source): return why
    context = multiprocessing.get_context('fork' if sys.platform == 'linux' else 'spawn')
    here, there = context.Pipe(False)
    process = context.Process(target=_child, args=(source, name, cases, dict(known), there))
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
    known = {k: names[k] for k in ('torch', 'F', 'np', 'math', 'itertools', 're')}
    if name == 'judge': return grade_judge(source, names, known)
    cases, tolerance, faults = CHECKS[name]
    found = results(source, name, cases, known)
    if isinstance(found, str): return 0, found
    right = [plain(names[name](*case)) for case in cases]
    pairs = [same(a, b, tolerance) for a, b in zip(found, right)]
    if all(pairs): return 4, ''
    for fault, make in faults.items():
        wrong = [plain(make(names[name])(*case)) for case in cases]
        if all(same(a, b, tolerance) for a, b in zip(found, wrong)): return 1, fault
    k = pairs.index(False)
    if shape(found[k]) != shape(right[k]):
        return 0, f'it returns the shape {shape(found[k])}, and {shape(right[k])} is asked for'
    one, two = (textwrap.shorten(f'{x[k]}', 80) for x in (found, right))
    return sum(pairs)/len(pairs), f'case {k + 1} of {len(cases)}: {one}, where {two} is right'


def shape(x):
    "The shape of a result, or what it is instead."
    try: return np.shape(x)
    except ValueError: return 'ragged'


def grade_judge(source: str, names: dict, known: dict) -> tuple[float, str]:
    "Points of a judge, by other pairs than the student's own."
    truth = names['sample_truth'](987_654)   # of the world of these pairs
    known |= {k: names[k] for k in ('ASKERS', 'PHRASES')} | dict(WANTED=truth.wanted)
    pairs = [{k: p[k] for k in ('instruction', 'input', 'output_1', 'output_2')}
             for p in names['voted_pairs'](987_654)]
    turned = [dict(p, output_1=p['output_2'], output_2=p['output_1']) for p in pairs]
    found = results(source, 'judge', [(pairs,), (turned,)], known)
    if isinstance(found, str): return 0, found
    if any(np.shape(x) != (len(pairs),) or not np.isin(x, (1, 1.5, 2)).all() for x in found):
        return 0, 'it must return 1, 1.5 or 2 for each pair'
    own, other = map(np.array, found)
    if (own + other != 3).mean() > .01:
        return 1, 'it prefers another answer when the two change places: it has a position bias'
    crowd = names['sample_crowd'](987_654, 'held_out_crowd', truth=truth)
    majority = 1.5 + np.sign(np.array(crowd(pairs)) - 1.5)/2
    agreed = 100*(1 - np.abs(own - majority)).mean()
    if agreed >= 60: return 4, ''
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


def grade_number(n: int, handed: dict, names: dict, own: bool) -> tuple[float, str]:
    "Points, of 3, and what is wrong."
    said = handed['found'].get(str(n))
    if said is None: return 0, 'not done yet'
    if n > 1 and not own:
        return 0, f'the requests are not those of the world of student {handed["student"]}'
    value, low, high = map(float, said)
    truth = measured(n, handed, names)
    if n != 7: truth = bootstrap(truth)
    if abs(value - truth[0]) > .15 + .03*(n == 7)*(truth[2] - truth[1]):
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
            if found: return found
    raise ValueError('the last cell has no output: run it and save the notebook')


def grade_answer(name, source, handed, names, own) -> tuple[float, str]:
    "Points of an answer, and what is wrong."
    kind, _, n = name.partition('_')
    if name == 'decision': return grade_decision(handed)
    if kind == 'found': return grade_number(int(n), handed, names, own)
    if kind != 'predicted': return grade_function(name, source, names)
    made = isinstance(handed['predicted'].get(n), (int, float))
    return int(made), '' if made else 'no number was predicted'


def grade(path) -> tuple[float, float, list[str]]:
    "Points, of how many, and a line for each answer."
    with contextlib.redirect_stdout(io.StringIO()): names = tiny.executed('exercises')
    notebook = read_json(Path(path))
    given = answers(notebook)
    lines = []
    try:
        handed = handed_in(notebook)
        own = of_own_world(handed)
    except Exception as e:
        lines.append(f'{e}')
        handed = dict(student='?', predicted={}, found={}, evidence={})
        own = False
    lines.append(f'student {handed["student"]}')
    total = whole = 0
    for cell in read_json(notebook_path('exercises'))['cells']:
        if not (about := cell['metadata'].get('nbgrader')): continue
        name = about['grade_id']
        try: points, said = grade_answer(name, given.get(name, ''), handed, names, own)
        except Exception as e: points, said = 0, f'cannot be read ({type(e).__name__}: {e})'
        total += points
        whole += about['points']
        lines.append(f'{name:16} {points:3.1f} of {about["points"]}  {said}'.rstrip())
    return total, whole, lines


def grade_decision(handed: dict) -> tuple[float, str]:
    "Points of the decision, by the student's own interval."
    _, low, high = handed['found'].get('8') or (0, 0, 0)
    right = 'ppo' if low > 0 else 'dpo' if high < 0 else 'undecided'
    said = handed['found'].get('keep')
    if said is None: return 0, 'not done yet'
    if said == right: return 3, ''
    return 0, f'{said}, though the interval of the difference says {right}'


if __name__ == '__main__':
    todo, file = sys.argv[1:]
    if todo == 'assignment': write_assignment(file)
    else:
        total, whole, lines = grade(file)
        print(*lines, f'{total:.1f} of {whole} points', sep='\n')
