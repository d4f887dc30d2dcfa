"""The course: PPO in one file is the library's, and exercises are graded as they deserve."""
import json
import re
from functools import cache

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
    return advantages, advantages + values''',
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


# a function, what is replaced in it by what, and words of the fault; CHECKS has the others
WRONG = [
    ('pairwise_loss', 'return ', 'return -', 'minus sign'),
    ('gae', 'reversed(range(rewards.shape[1]))', 'range(rewards.shape[1])', 'reversed'),
    ('gae', 'rewards, values = rewards*mask, values*mask', 'mask = torch.ones_like(mask)',
     'outside of the mask'),
    ('gae', '- values[:, t] ', '+ 0 ', 'case 1 of 3'),
    ('ppo_policy_loss', '-a*rho, -a*', 'a*rho, a*', 'case 1 of 1'),
    ('dpo_loss', '(a - b - c + d)', '(a - b - c + d).mean()', 'shape'),
    ('judge', 'worth[1] - worth[0]', 'worth[0] - worth[1]', 'what most people do not'),
    ('judge', 'np.sign(worth[1] - worth[0])', '1', 'position bias'),
    ('judge', 'said.append(', 'said.append(3*', '1, 1.5 or 2'),
    ('dpo_loss', 'def', 'raise KeyError(3)\ndef', 'KeyError'),
    ('dpo_loss', 'def', 'import os\ndef', 'imports os'),
    ('dpo_loss', 'def', 'from alpaca_farm.dpo import dpo_loss\ndef', "library's"),
    ('dpo_loss', 'def', 'open("x")\ndef', 'uses open'),
    ('dpo_loss', 'def', 'd e f', 'not Python'),
    ('dpo_loss', 'return ', 'return # ', 'shape'),
    ('dpo_loss', 'def dpo_loss', 'def mine', 'KeyError'),
    ('gae', 'advantages = torch', 'while True: pass\n    advantages = torch', 'loop for ever')]


@cache
def solved(): return tiny.executed('exercises')


@pytest.mark.parametrize('name', RIGHT)
def test_a_right_function_has_all_points(name):
    assert course.grade_function(name, RIGHT[name], solved()) == (4, '')


@pytest.mark.parametrize('name, right, wrong, said', WRONG, ids=lambda x: x[:20].strip())
def test_a_wrong_function_loses_points_by_a_sentence(name, right, wrong, said, monkeypatch):
    monkeypatch.setattr(course, 'SECONDS', 3)
    assert right in RIGHT[name]
    points, why = course.grade_function(name, RIGHT[name].replace(right, wrong), solved())
    assert points < 3
    assert said in why


def test_every_fault_differs_from_the_solution_and_from_the_others():
    "On the cases of its function, so that a sentence says what is wrong."
    for name, (cases, tolerance, faults) in course.CHECKS.items():
        right = solved()[name]
        found = [[course.plain(f(*case)) for case in cases]
                 for f in (right, *(make(right) for make in faults.values()))]
        for i, one in enumerate(found):
            for two in found[:i]:
                assert not all(course.same(a, b, tolerance) for a, b in zip(one, two)), name


@pytest.fixture(scope='module')
def submission(tmp_path_factory):
    "The solution, executed in a tiny world of student 7, and written as a good student would."
    folder = tmp_path_factory.mktemp('course')
    size = tiny.write(folder/'tiny.json', tiny.FARM)
    status, said = tiny.run_notebook(
        tiny.ROOT/'nbs'/'exercises.ipynb', folder/'handed.ipynb',
        dict(size=size, runs=str(folder/'runs'), student=7, instances=20))
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
    total, whole, lines = course.grade(path)
    return total, whole, '\n'.join(lines)


def test_a_submission_has_the_points_that_it_deserves(submission, tmp_path):
    path = tmp_path/'a.ipynb'
    total, whole, said = graded(submission, path)
    assert total == whole == 75
    assert 'student 7' in said
    def wide(handed):
        value, low, high = handed['found']['3']
        handed['found']['3'] = [value, value - 14*(value - low), value + 14*(high - value)]
    def other(handed): handed['student'] = 8
    def empty(handed):
        handed['found']['4'] = handed['predicted']['4'] = None
        handed['found']['5'] = 'seventy'
    def off(handed): handed['found']['4'][0] += 5
    def against(handed): handed['found'].update({'8': [9., 8., 10.], 'keep': 'dpo'})
    for change, lost, words in (
            (wide, 1, 'spread of single answers'), (off, 3, 'answers handed in have'),
            (other, 24, 'not those of the world of student 8'), (empty, 7, 'not done yet'),
            (against, 6, 'interval of the difference says ppo')):
        total, _, said = graded(submission, path, change)
        assert whole - total == pytest.approx(lost, abs=1.1) and words in said, said
    for cell in submission['cells']:
        cell['outputs'] = []
    total, _, said = graded(submission, path)
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
    total, _, lines = course.grade(tmp_path/'a.ipynb')
    assert total == 0
    assert any('not done yet' in line for line in lines)
