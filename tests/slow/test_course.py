"""The course: PPO in one file is the library's, and exercises are graded as they deserve."""
import itertools
import json
import re
import shlex
import subprocess
import sys
from functools import cache

import pandas as pd
import pytest
import torch

import course
import tiny
from alpaca_farm import ppo
from alpaca_farm.model.logprobs import load_policy
from alpaca_farm.run.files import read_json


def single(base, tmp_path):
    "The names that `ppo_single` defines when it is executed on the tiny world."
    names = {}
    given = dict(sft=str(base/'sft'/'model'), reward_model=str(base/'reward_model'/'model'),
                 prompts=str(base/'world'/'unlabeled.json'), out=str(tmp_path/'single'),
                 steps=2, rollouts=16, batch_size=8, max_new_tokens=12)
    for cell in read_json(tiny.ROOT/'nbs'/'ppo_single.ipynb')['cells']:
        if cell['cell_type'] != 'code' or 'axes' in ''.join(cell['source']):
            continue
        exec(''.join(cell['source']), names)
        if 'parameters' in cell['metadata'].get('tags', []):
            names.update(given)
    return names


def test_ppo_in_one_file_is_the_librarys(base, tmp_path):
    "On the same rollout of a trained policy: advantages, loss, and gradients of both models."
    its = single(base, tmp_path)
    policy = its['policy']
    value = its['value']
    cfg = ppo.PPOConfig(**tiny.settings('ppo', base, kl_coef=its['kl_coef']))
    ours = load_policy(cfg.policy, cfg, train=True)
    reference = load_policy(cfg.policy, cfg, train=True, frozen=True)
    scalar = ppo.value_model(cfg, ours)
    ours.model.load_state_dict(policy.state_dict())
    scalar.model.base_model.load_state_dict(value.base_model.state_dict())
    scalar.score.load_state_dict(value.score.state_dict())
    batch = its['rollout'](its['instructions'][:12])
    score = (its['scores'](batch) - its['center'])/its['spread']
    mine, kl = its['experience'](batch, score)
    theirs, figures = ppo.experience(ours, reference, scalar, batch, score, cfg)
    assert abs(kl) > 1e-4
    assert abs(kl - figures['kl']) < 1e-4
    for name in ('old_logp', 'old_values', 'returns', 'advantages'):
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-4)
    for k in ('old_logp', 'old_values'):   # as if the models had moved: something is clipped
        moved = .3*torch.randn(theirs[k].shape)*theirs['response']
        mine[k] = mine[k] + moved
        theirs[k] = theirs[k] + moved
    loss = its['ppo_loss'](mine)
    loss.backward()
    other = ppo.ppo_loss(ours, scalar, theirs, cfg)['loss']
    other = (other*theirs['weight']).sum()/theirs['weight'].sum()
    other.backward()
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-6)
    pairs = [*zip(policy.parameters(), ours.model.parameters(), strict=True),
             (value.score.weight, scalar.score.weight)]
    for one, two in pairs:
        assert one.grad.norm() > 0
        assert (one.grad - two.grad).norm() < 1e-3*two.grad.norm()


def test_ppo_in_one_file_is_short_and_stands_alone():
    code = [''.join(c['source']) for c in read_json(tiny.ROOT/'nbs'/'ppo_single.ipynb')['cells']
            if c['cell_type'] == 'code']
    text = '\n'.join(code)
    assert 'alpaca_farm' not in text
    assert len(text.splitlines()) < 250


RIGHT = dict(   # what a good student writes
    pairwise_loss='def pairwise_loss(c, r): return torch.log1p((r - c).exp())',
    choose_best='''
def choose_best(rows):
    return [dict(output=r['output'][r['scores'].index(max(r['scores']))]) for r in rows]''',
    gae='''
def gae(rewards, values, mask, gamma=1., lam=1.):
    rewards, values = rewards*mask, values*mask
    advantages = torch.zeros_like(rewards)
    after = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        ahead = values[:, t + 1] if t + 1 < rewards.shape[1] else 0
        after = (rewards[:, t] + gamma*ahead - values[:, t] + gamma*lam*after)*mask[:, t]
        advantages[:, t] = after
    return advantages, (advantages + values)*mask''',
    ppo_policy_loss='''
def ppo_policy_loss(logp, old, a, clip=.2):
    rho = (logp - old).exp()
    return torch.max(-a*rho, -a*rho.clamp(1 - clip, 1 + clip))''',
    masked_mean='def masked_mean(x, mask): return (x*mask).sum()/mask.sum()',
    dpo_loss='def dpo_loss(a, b, c, d, beta): return F.softplus(-beta*(a - b - c + d))',
    best_of_n_value='''
def best_of_n_value(scores, values, n):
    found = []
    for s, v in zip(scores, values):
        some = [max(k, key=lambda i: s[i]) for k in itertools.combinations(range(len(s)), n)]
        found.append(np.mean([v[i] for i in some]))
    return np.array(found)''',
    ppi_mean='''
def ppi_mean(y, f, rest):
    n, M = len(y), len(rest)
    w = np.cov(y, f)[0, 1]/((1 + n/M)*np.var(np.concatenate([f, rest])))
    w = min(max(w, 0), 1)
    error = math.sqrt(w**2*rest.var(ddof=1)/M + (y - w*f).var(ddof=1)/n)
    return y.mean() + w*(rest.mean() - f.mean()), error, w''',
    difference='''
def difference(a, b):
    d = a - b
    half = 1.96*d.std(ddof=1)/math.sqrt(len(d))
    return d.mean(), d.mean() - half, d.mean() + half''',
    judge='''
def judge(pairs):
    said = []
    for p in pairs:
        who = next(a for a, firsts in ASKERS.items() if any(f in p['instruction'] for f in firsts))
        worth = []
        for text in (p['output_1'], p['output_2']):
            points = -sum(phrase in text for phrase in PHRASES['flattery'])
            for part in ('formal', 'source', 'caution', 'offer'):
                has = any(phrase in text for phrase in PHRASES[part])
                points += has if who in WANTED[part] else -has
            worth.append(points)
        said.append(1.5 + .5*np.sign(worth[1] - worth[0]))
    return said''')


# of a function, what is replaced in it by what, and words of the fault
WRONG = [
    ('pairwise_loss', 'return ', 'return -', 'minus sign'),
    ('pairwise_loss', '(r - c)', '(c - r)', 'changed places'),
    ('pairwise_loss', 'log1p((r - c).exp())', 'sigmoid(r - c)', 'probability of a wrong order'),
    ('pairwise_loss', '(r - c).exp())', '(r - c).exp()).sum()', 'one sum'),
    ('pairwise_loss', 'torch.log1p((r - c).exp())', '-(c.sigmoid() - r.sigmoid()).log()', 'nan'),
    ('pairwise_loss', 'torch.log1p((r - c).exp())', 'F.softplus(r - c)/math.log(2)', '1.44 times'),
    ('choose_best', 'max(', 'min(', 'worst'),
    ('choose_best', "r['scores'].index(max(r['scores']))", '0', 'first answer'),
    ('choose_best', "dict(output=r['output'][r['scores'].index(max(r['scores']))])",
     "r['output'][r['scores'].index(max(r['scores']))]", 'must return records'),
    ('choose_best', "r['scores'].index(max(r['scores']))",
     "rows[0]['scores'].index(max(rows[0]['scores']))", "first record's"),
    ('gae', 'reversed(range(rewards.shape[1]))', 'range(rewards.shape[1])', 'reversed'),
    ('gae', 'rewards, values = rewards*mask, values*mask', 'mask = torch.ones_like(mask)',
     'outside of the mask'),
    ('gae', '- values[:, t] ', '+ values[:, t] ', 'a minus sign is lost'),
    ('gae', '- values[:, t] ', '', 'value of this state is missing'),
    ('gae', 'gamma*ahead', '0*ahead', 'value of the next state is missing'),
    ('gae', '+ gamma*ahead', '- gamma*ahead', 'next state has the wrong sign'),
    ('gae', 'gamma*ahead - values[:, t]', '(values[:, t] - gamma*ahead)', 'both values'),
    ('gae', 'rewards, values = rewards*mask, values*mask', 'rewards = rewards*mask',
     "behind an answer's last token"),
    ('gae', 'advantages + values', 'advantages - values', 'a minus sign stands'),
    ('gae', '(advantages + values)*mask', 'advantages', 'missing in the returns'),
    ('gae', 'gamma*lam*after', '0*after', 'delta alone'),
    ('gae', 'gamma*lam*after', 'gamma*after', 'lambda is missing'),
    ('gae', 'return advantages, (advantages + values)*mask', 'return advantages',
     'returns are missing'),
    ('gae', 'gamma*lam*after', 'after', 'padding, gamma .9 and lambda .8'),
    ('ppo_policy_loss', '-a*rho, -a*', 'a*rho, a*', 'minus sign is lost, and the larger'),
    ('ppo_policy_loss', 'torch.max', 'torch.min', 'larger gain'),
    ('ppo_policy_loss', 'rho.clamp(1 - clip, 1 + clip)', 'rho', 'nothing is clipped'),
    ('ppo_policy_loss', '.clamp(1 - clip, 1 + clip)', '.clamp(max=1 + clip)', 'from above only'),
    ('ppo_policy_loss', 'logp - old', 'old - logp', 'upside down'),
    ('masked_mean', '(x*mask).sum()/mask.sum()', '(x*mask).mean()', 'divided by all places'),
    ('masked_mean', '(x*mask).sum()/mask.sum()', '(x*mask).sum()', 'it is a sum'),
    ('masked_mean', '(x*mask).sum()/mask.sum()', 'x.mean()', 'unmasked'),
    ('dpo_loss', '(a - b - c + d)', '(a - b - c + d).mean()', 'shape'),
    ('dpo_loss', 'softplus(-beta', 'softplus(beta', 'changed places'),
    ('dpo_loss', 'a - b - c + d', 'a + b - c - d', 'a minus sign is lost'),
    ('dpo_loss', 'a - b - c + d', 'a - b', 'reference is missing'),
    ('dpo_loss', '(-beta*(a - b - c + d))', '(-(a - b - c + d))*beta', 'beta multiplies the loss'),
    ('best_of_n_value', 'max(k', 'min(k', 'lowest'),
    ('best_of_n_value', 'key=lambda i: s[i]', 'key=lambda i: v[i]', 'nobody knows'),
    ('best_of_n_value', 'itertools.combinations(range(len(s)), n)',
     'itertools.product(range(len(s)), repeat=n)', 'with repetition'),
    ('best_of_n_value', 'v[i] for', 's[i] for', 'mean score'),
    ('best_of_n_value', 'np.mean', 'sum', 'sum over all choices'),
    ('ppi_mean', 'w*(rest.mean() - f.mean())', 'w*(f.mean() - rest.mean())', 'wrong sign'),
    ('ppi_mean', 'w = min(max(w, 0), 1)', 'w = 1', 'weight is 1'),
    ('ppi_mean', '((1 + n/M)*', '(', '1 + n/M is missing'),
    ('ppi_mean', 'math.sqrt(', '(', 'root is missing'),
    ('ppi_mean', 'error, w', 'w, error', 'before the error'),
    ('difference', 'a - b', 'b - a', 'second minus first'),
    ('difference', '1.96*', '', 'one standard error'),
    ('difference', '/math.sqrt(len(d))', '', 'spread is that of single answers'),
    ('difference', 'd.std(ddof=1)', '(a.var() + b.var())**.5', 'not paired'),
    ('difference', 'd.mean() - half, d.mean() + half', 'half, half', 'distance to the ends'),
    ('judge', 'worth[1] - worth[0]', 'worth[0] - worth[1]', 'what most people do not'),
    ('judge', 'np.sign(worth[1] - worth[0])', '1', 'position bias'),
    ('judge', 'np.sign(worth[1] - worth[0])', '0', 'never decides'),
    ('judge', 'said.append(', 'said.append(3*', '1, 1.5 or 2'),
    ('dpo_loss', 'def', 'raise KeyError(3)\ndef', 'KeyError'),
    ('dpo_loss', 'def', 'import os\ndef', 'imports os'),
    ('dpo_loss', 'def', 'from alpaca_farm.dpo import dpo_loss\ndef', "library's"),
    ('dpo_loss', 'def', 'open("x")\ndef', 'uses open'),
    ('dpo_loss', 'def', 'torch.os.system("x")\ndef', 'uses os'),
    ('dpo_loss', 'def', 'from torch import os\ndef', 'imports os'),
    ('dpo_loss', 'def', 'pd.eval("torch.os")\ndef', 'uses eval'),
    ('dpo_loss', 'def', 'input()\ndef', 'EOFError'),
    ('dpo_loss', 'F.softplus', 'softplus',
     "'softplus' is not defined: the grader does not have this name; see *What your functions"),
    ('dpo_loss', 'def', 'd e f', 'not Python'),
    ('dpo_loss', 'return ', 'return # ', 'returns nothing'),
    ('dpo_loss', 'def dpo_loss', 'def mine', 'no function dpo_loss'),
    ('gae', 'advantages = torch', 'while True: pass\n    advantages = torch', 'loop for ever')]


@cache
def solved(): return tiny.executed('exercises')


@pytest.mark.parametrize('name, right, wrong, said', WRONG, ids=lambda x: x[:20].strip())
def test_a_wrong_function_loses_points_by_a_sentence(name, right, wrong, said, monkeypatch):
    monkeypatch.setattr(course, 'SECONDS', 3)
    assert right in RIGHT[name]
    points, why = course.grade_function(name, RIGHT[name].replace(right, wrong), solved())
    assert points < 3
    assert said in why


@pytest.mark.parametrize('name', ['judge', 'difference'])
def test_what_the_solution_writes_out_has_full_marks(name):
    source = course.answers(read_json(tiny.ROOT/'nbs'/'exercises.ipynb'))[name]
    assert course.grade_function(name, source, solved()) == (4, '')


@pytest.mark.parametrize('more', [
    're.compile("a.c")', 'torch.nn.Linear(2, 2).eval()', 'input = [1, 2]',
    'display(pd.Series([1]))', 'plt.plot([1, 2])', '%%time', '%timeit dpo_loss', '!pip list', 'dpo_loss?', '?torch.max'])
def test_what_a_right_answer_may_have_beside_it(more):
    source = f'{more}\n{RIGHT["dpo_loss"]}'
    assert course.grade_function('dpo_loss', source, solved()) == (4, '')


def test_lines_that_only_jupyter_runs_are_left_out_where_they_stand():
    assert course.without_magic('if 1:\n    %time f()\nf?') == 'if 1:\n    pass\npass'
    for python in ('x = (5\n%n)', '"""\n!pip\n"""', 'x = (a\n!= b)'):
        assert course.without_magic(python) == python


def test_functions_are_graded_where_processes_are_not_forked(monkeypatch):
    "As on a Mac: what a function may use is there in a process that starts anew."
    monkeypatch.setattr(sys, 'platform', 'darwin')
    monkeypatch.setattr(course, 'SECONDS', 120)
    assert course.grade_function('judge', RIGHT['judge'], solved()) == (4, '')


def test_every_fault_differs_from_the_solution_and_from_the_others():
    "On the cases of its function, so that a sentence says what is wrong."
    for name, check in course.CHECKS.items():
        right = solved()[name]
        found = {'right': right} | {fault: make(right) for fault, make in check.faults.items()}
        found = {fault: [course.plain(f(*case)) for case in check.cases]
                 for fault, f in found.items()}
        for one, two in itertools.combinations(found, 2):
            alike = [course.same(a, b, check.tolerance) for a, b in zip(found[one], found[two])]
            assert not all(alike), (name, one, two)


@pytest.fixture(scope='module')
def submission(tmp_path_factory):
    "The solution, executed in a tiny world of student 7, and written as a good student would."
    folder = tmp_path_factory.mktemp('course')
    size = tiny.write(folder/'tiny.json', tiny.FARM)
    status, said = tiny.run_notebook(
        tiny.ROOT/'nbs'/'exercises.ipynb', folder/'handed.ipynb',
        dict(size=size, runs=str(folder/'runs'), student=7, instances=20), with_its_jobs=True)
    assert status == 0, said
    notebook = read_json(folder/'handed.ipynb')
    for cell in notebook['cells']:
        name = cell['metadata'].get('nbgrader', {}).get('grade_id')
        if name in RIGHT:
            cell['source'] = RIGHT[name]
    return notebook


def graded(notebook, path, change=None):
    "Points and lines of a submission, of which a part of what the last cell keeps is changed."
    notebook = json.loads(json.dumps(notebook))
    if change:
        change(course.handed_in(notebook))
    path.write_text(json.dumps(notebook))
    row, lines = course.grade(path)
    return course.total(row), '\n'.join(lines)


def test_a_submission_has_the_points_that_it_deserves(submission, tmp_path):
    path = tmp_path/'a.ipynb'
    whole = 75
    total, said = graded(submission, path)
    assert total == whole == sum(course.points_of_answers().values())
    assert 'student 7' in said
    def wide(handed):
        value, low, high = handed['found']['3']
        handed['found']['3'] = [value, value - 14*(value - low), value + 14*(high - value)]
    def other(handed): handed['student'] = 8
    def empty(handed):
        handed['found']['4'] = handed['predicted']['4'] = None
        handed['found']['5'] = 'seventy'
    def nan(handed): handed['found']['3'] = ['nan']*3
    def single(handed): handed['found'].update({'7': 50., '3': [50.]})
    def void(handed): handed['evidence']['judge'] = ['nan']*400
    def undecided(handed): handed['found'].update({'8': 4., 'keep': 'undecided'})
    def long(handed): handed['student'] = 2**32 + 7
    def off(handed): handed['found']['4'][0] += 5
    def against(handed): handed['found'].update({'8': [9., 8., 10.], 'keep': 'dpo'})
    def aside(handed): handed['found'].update({'8': [9., 8., 10.], 'keep': 'neither'})
    for change, lost, words in (
            (wide, 1, 'spread of single answers'), (off, 3, 'answers handed in have'),
            (other, 24, 'not those of the world of student 8'), (empty, 7, 'not done yet'),
            (nan, 3, 'three numbers are asked for: (value, low, high)'),
            (single, 6, 'three numbers are asked for: (value, low, high)'),
            (void, 3, 'answers handed in have nan'),
            (undecided, 6, 'of found[8] three numbers are asked for'),
            (against, 6, 'interval of the difference says ppo'),
            (aside, 6, "'neither' is none of ppo, dpo, undecided")):
        total, said = graded(submission, path, change)
        assert whole - total == pytest.approx(lost, abs=1.1) and words in said, said
    total, said = graded(submission, path, long)
    assert f'student {2**32 + 7}' in said
    assert re.search('^predicted_1 +1.0 of 1', said, re.M)
    assert re.search('^found_1 .*answers handed in have', said, re.M)   # they are read
    unsaved = dict(cells=[dict(c, outputs=[]) for c in submission['cells']])
    total, said = graded(unsaved, path)
    assert total == 40
    assert 'the last cell has no output' in said


def test_the_assignment_has_the_functions_without_their_bodies(tmp_path):
    course.write_assignment(tmp_path/'a.ipynb')
    notebook = read_json(tmp_path/'a.ipynb')
    blanked = course.answers(notebook)
    assert {*RIGHT} <= {*blanked} == {*course.answers(read_json(tiny.ROOT/'nbs'/'exercises.ipynb'))}
    for name, source in blanked.items():
        compile(source, name, 'exec')
        if name in RIGHT:
            assert f'def {name}(' in source
            assert source.endswith('raise NotImplementedError')
        else:
            assert re.fullmatch(r"(predicted|found)\[(\d|'keep')\] = None   # .*", source.strip())
    text = (tmp_path/'a.ipynb').read_text()
    assert 'logsigmoid' not in text
    assert not any(c.get('outputs') for c in notebook['cells'])
    row, lines = course.grade(tmp_path/'a.ipynb')
    assert course.total(row) == 0
    assert any('not done yet' in line for line in lines)


def test_an_assignment_with_answers_is_not_overwritten(tmp_path):
    path = tmp_path/'a.ipynb'
    for again in range(2): course.main(['assignment', str(path)])
    worked = path.read_text().replace('predicted[1] = None', 'predicted[1] = 70')
    for text in (worked, 'notes'):
        path.write_text(text)
        with pytest.raises(SystemExit, match='is there already: move it, or name another') as said:
            course.main(['assignment', str(path)])
        assert '\n' not in str(said.value)
        assert path.read_text() == text


def test_a_student_number_that_is_too_long_is_refused_before_unit_1():
    cells = [''.join(c['source']) for c in read_json(tiny.ROOT/'nbs'/'exercises.ipynb')['cells']]
    first = next(text for text in cells if text.startswith('assert'))
    for number in (2**32, 20261234567, -1):
        with pytest.raises(AssertionError, match=f'nine digits .*: student = {number % 10**9}$'):
            exec(first, dict(solved(), student=number))
    exec(first, dict(solved(), student=2**32 - 1))
    assert cells.index(first) < next(k for k, text in enumerate(cells) if '## 1.' in text)


@pytest.mark.parametrize('file', ['handed in/Ann Lee.ipynb', "O'Neil.ipynb", ''])
def test_make_grades_a_file_whatever_its_name(file):
    command = ['make', '-n', '--no-print-directory', '-o', '.venv/ready', 'grade', f'FILE={file}']
    said = subprocess.check_output(command, cwd=tiny.ROOT, text=True)
    assert shlex.split(said.splitlines()[-1])[-2:] == ['grade', file]


def test_make_opens_jupyter_in_a_folder_whatever_its_name(tmp_path):
    folder = tmp_path/'My files'
    folder.mkdir()
    command = ['make', '-n', '--no-print-directory', '-o', '.venv/ready', '-f', tiny.ROOT/'Makefile', 'lab']
    said = subprocess.check_output(command, cwd=folder, text=True)
    assert shlex.split(said)[0] == f'JUPYTER_CONFIG_PATH={folder}/.jupyter'


def test_a_decision_counts_however_it_is_written():
    for word in ('PPO', ' ppo '):
        assert course.grade_decision(dict(found={'8': [2., 1., 3.], 'keep': word})) == (3, '')


def test_the_words_of_the_decision_stand_in_its_question():
    source = course.answers(read_json(tiny.ROOT/'nbs'/'exercises.ipynb'))['decision']
    question = course.blank(source).partition('   #')[2]
    assert {*re.findall(r"'(\w+)'", question)} == {*course.DECISIONS}


def with_cells(notebook, name, *sources):
    "A submission that has an answer's cell once for each of some sources."
    cells = []
    for cell in notebook['cells']:
        if cell['metadata'].get('nbgrader', {}).get('grade_id') != name:
            cells.append(cell)
        else:
            cells += [dict(cell, source=source) for source in sources]
    return dict(cells=cells)


def test_a_missing_a_divided_and_a_copied_cell(submission, tmp_path):
    "One costs its points, one is read whole, of one the last counts; grades say what is odd."
    path = tmp_path/'a.ipynb'
    total, said = graded(with_cells(submission, 'gae'), path)
    assert total == 71
    assert re.search(r'^gae +0.0 of 4  its cell is missing', said, re.M)
    lines = 'def mean(x): return x.mean()', RIGHT['difference'].replace('d.mean()', 'mean(d)')
    total, said = graded(with_cells(submission, 'difference', *lines), path)
    assert total == 75
    assert 'more than once' not in said
    trial = RIGHT['difference'].replace('a - b', 'b - a')
    total, said = graded(with_cells(submission, 'difference', RIGHT['difference'], trial), path)
    assert total == 72
    assert re.search('^difference .*second minus first.* the last one counts', said, re.M)
    total, said = graded(with_cells(submission, 'difference', trial, RIGHT['difference']), path)
    assert total == 75
    assert 'the last one counts' in said


@pytest.mark.parametrize('text, words', [
    ('', 'the file is empty'), ('{"cells', 'not a notebook'), ('[]', 'not a notebook'),
    ('{"cells": null}', 'not a notebook'), ('{"cells": [1]}', 'not a notebook'),
    ('{"cells": [{"metadata": null, "source": "1"}]}', 'not a notebook'),
    ('{"cells": [{"metadata": {"nbgrader": {"grade_id": "gae"}}}]}', 'not a notebook'),
    ('{"cells": [{"cell_type": "code", "source": "1"}]}', 'no cell is an answer')])
def test_what_cannot_be_graded_is_said_in_a_line(tmp_path, text, words):
    (tmp_path/'a.ipynb').write_text(text)
    with pytest.raises(SystemExit, match=words) as refused:
        course.main(['grade', str(tmp_path/'a.ipynb')])
    assert '\n' not in str(refused.value)


def test_a_file_that_cannot_be_written_is_said_in_a_line(tmp_path):
    (tmp_path/'a').write_text('')
    with pytest.raises(SystemExit, match='Not a directory'):
        course.main(['assignment', str(tmp_path/'a'/'b.ipynb')])


def test_commands_that_are_incomplete_are_said_in_a_line(tmp_path):
    for words in (['grade'], ['grade', ''], [], ['grade', str(tmp_path/'none.ipynb')],
                  ['grade', str(tmp_path)]):
        with pytest.raises(SystemExit) as refused:
            course.main(words)
        assert str(refused.value)
        assert '\n' not in str(refused.value)


def test_a_class_gets_one_table(submission, tmp_path, capsys):
    text = json.dumps(submission)
    for name in ('ann.ipynb', 'bea.ipynb.json', 'DAN.IPYNB'): (tmp_path/name).write_text(text)
    (tmp_path/'cem.ipynb').write_text('')
    (tmp_path/'eve.ipynb.txt').write_text('{"cells": null}')
    (tmp_path/'__MACOSX').mkdir()
    (tmp_path/'__MACOSX'/'._ann.ipynb').write_text('x')
    (tmp_path/'ann.txt').write_text('her own')
    (tmp_path/'fay.zip').write_text('')
    for again in range(2):   # what grading writes is not handed in
        course.main(['grade', str(tmp_path)])
        printed = capsys.readouterr().out
        assert re.search('^not graded: ann.txt, fay.zip$', printed, re.M), printed
    points = {'DAN.IPYNB': 75, 'ann.ipynb': 75, 'bea.ipynb.json': 75, 'cem.ipynb': 0,
              'eve.ipynb.txt': 0}
    for name, n in points.items():
        assert re.search(rf'^{name} .* {n}(\.0)?$', printed, re.M), printed
    table = pd.read_csv(tmp_path/'grades.csv', index_col='file')
    assert dict(table.total) == points
    assert table.loc['ann.ipynb', 'gae'] == 4
    assert 'the file is empty' in (tmp_path/'cem.ipynb.grade.txt').read_text()
    assert 'not a notebook' in (tmp_path/'eve.ipynb.txt.grade.txt').read_text()
    assert 'student 7' in (tmp_path/'ann.ipynb.grade.txt').read_text()
    assert (tmp_path/'ann.txt').read_text() == 'her own'


def test_a_class_is_graded_whatever_one_file_does(tmp_path, monkeypatch, capsys):
    for name in ('ann', 'bea'): (tmp_path/f'{name}.ipynb').write_text('{}')
    def fails(path):
        if path.stem == 'ann': raise OSError('no more')
        return dict(student=7), ['read']
    monkeypatch.setattr(course, 'grade', fails)
    course.main(['grade', str(tmp_path)])
    assert 'cannot be read (OSError: no more)' in (tmp_path/'ann.ipynb.grade.txt').read_text()
    assert (tmp_path/'bea.ipynb.grade.txt').read_text() == 'read\n'
