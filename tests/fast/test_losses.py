"""Losses against loops in float64, and what they must be at the first real updates."""
import copy
import dataclasses
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

import tiny
from alpaca_farm import best_of_n, ppo
from alpaca_farm.data.records import load_records
from alpaca_farm.model.functional import masked_mean, masked_var
from alpaca_farm.overoptimization import OverConfig, standard_marks, standard_reward
from alpaca_farm.run.runs import read_log
from alpaca_farm.train.online import OnlineConfig, rollout_scores, sample_rollout
from alpaca_farm.worlds.folder import World

torch.set_num_threads(1)


def config(base, kind, **more):
    "PPO with a value model of some kind, or with one of the other baselines."
    own = dict(advantage=kind) if kind in ppo.ADVANTAGES else {}
    if kind == 'policy': own = dict(reward_model='alpaca_farm.world:utility')
    return ppo.PPOConfig(**tiny.settings('ppo', base, **own, **more))


# the advantage of answer i of a group whose rewards are `own`, by its name in ADVANTAGES
TWINS = dict(rloo=lambda i, own: own[i] - mean(own[:i] + own[i + 1:]),
             grpo=lambda i, own: (own[i] - mean(own))/stdev(own),
             dr_grpo=lambda i, own: own[i] - mean(own))
GROUPS = [name for name, kind in ppo.ADVANTAGES.items() if kind.of_group]
each_group = pytest.mark.parametrize('kind', GROUPS)


def rollout(models, cfg):
    "The batch of one answer to each of 16 prompts."
    records = load_records(cfg.data, 'unlabeled', n=16)
    return sample_rollout(models.policy, records, models.prompts[:16], cfg, 3)[0]


def moved(policy):
    "A copy of a policy with other weights."
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.1)
    return other


@pytest.mark.parametrize('kind', ['policy', 'reward_model', 'reinforce++', *GROUPS])
def test_log_probs_of_sampling_are_those_of_a_pass(base, models, kind):
    "A rollout in 32 bits carries them; without them they are computed."
    cfg = config(base, kind, temperature=.7, kl_coef=.1)
    value = ppo.value_model(cfg, models.policy)
    reference = moved(models.policy)
    batch = rollout(models, cfg)
    assert 'old_logp' not in rollout(models, dataclasses.replace(cfg, dtype='bfloat16'))
    found = []
    for left_out in ('', 'old_logp'):
        part = {k: v for k, v in batch.items() if k != left_out}
        scores = torch.linspace(-1, 1, 16)
        found.append(ppo.experience(models.policy, reference, value, part, scores, cfg))
    (kept, figures), (plain, expected) = found
    torch.testing.assert_close(kept, plain, rtol=0, atol=1e-5)
    assert figures == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_policy_that_is_its_reference_has_no_kl(base, tmp_path, monkeypatch, dtype):
    "Whatever the precision: the KL is 0; with one reward at the end, returns are constant."
    seen = []
    experience = ppo.experience

    def watched(*given):
        seen.append(experience(*given))
        return seen[-1]
    monkeypatch.setattr(ppo, 'experience', watched)
    tiny.run('ppo', base, tmp_path/'ppo', dtype=dtype, temperature=.7, steps=1, eval_split='',
             save_every=0)
    batch, figures = seen[0]
    log, = read_log(tmp_path/'ppo')
    exact = dtype == 'float32'   # but for rounding
    assert figures['kl'] == pytest.approx(0, abs=1e-5 if exact else 0)
    assert log['first_ratio'] == pytest.approx(1, abs=1e-6 if exact else 1e-2)
    for k in ('advantages', 'returns', 'old_values', 'old_logp'):
        assert batch[k].dtype == torch.float32
    response = batch['response'].bool()
    for row, on in zip(batch['returns'], response):
        assert row[on].max() - row[on].min() < 1e-5
    plain = (batch['returns'] - batch['old_values'])[response].double()
    white = batch['advantages'][response].double()
    wanted = (plain - plain.mean())/plain.std(correction=0)
    torch.testing.assert_close(white, wanted, rtol=0, atol=1e-5)


@each_group
@given(size=st.integers(2, 17), value=st.floats(-1e5, 1e5, width=32))
def test_a_group_of_equal_rewards_has_no_advantage(kind, size, value):
    "Exactly none, whatever its size and its reward; nor has one whose rewards differ by rounding."
    equal = torch.full((size,), value)
    rounded = equal.clone()
    rounded[0] *= 1 + 2e-7
    assert not ppo.group_advantages(torch.cat([equal, rounded]), size, kind).any()


@each_group
def test_whitening_leaves_groups_of_equal_rewards_at_zero(base, models, kind):
    "It is over the tokens of the other groups."
    cfg = config(base, kind, kl_coef=0.)
    batch = rollout(models, cfg)
    scores = torch.linspace(-1, 1, 16)
    n = cfg.group_size
    scores[:n] = .1
    done, figures = ppo.experience(models.policy, models.policy, None, batch, scores, cfg)
    flat = done['advantages'][:n]
    others = done['advantages'][n:]
    assert not flat.any()
    assert figures['frac_reward_zero_std'] == n/16
    assert masked_mean(others, done['response'][n:]).abs() < 1e-5
    assert abs(masked_var(others, done['response'][n:]) - 1) < 1e-3


def test_scores_may_have_another_precision_than_log_probs():
    kl = torch.zeros(1, 2)
    found = ppo.token_rewards(torch.tensor([3], dtype=torch.double), kl, torch.ones(1, 2), .1)
    assert found.tolist() == [[0, 3]]


def test_the_weight_of_the_kl_follows_its_target(base, tmp_path):
    "A step's weight is in its rewards and its log; it falls while the KL is below the target."
    found = {}
    for target_kl in (0., 1e3):
        folder = tiny.run('ppo', base, tmp_path/str(target_kl), kl_coef=.5, target_kl=target_kl,
                          k_beta=1., eval_split='', save_every=0).folder
        found[target_kl] = read_log(folder)
    assert [r['kl_coef'] for r in found[0.]] == [.5]*3
    assert [r['kl_coef'] for r in found[1e3]] == pytest.approx([.5, .4, .32])
    returns = [[r['returns'] for r in log] for log in found.values()]
    assert returns[0][0] == returns[1][0]   # the first step has the same weight
    assert returns[0][1] != returns[1][1]


@pytest.mark.slow
@each_group
@pytest.mark.parametrize('flat, kl_coef', [(2, 0.), (1, .2)])   # at first all KL is rounding
def test_a_step_without_spread_changes_nothing(base, tmp_path, kind, flat, kl_coef, monkeypatch):
    "No update is made, so that weights and moments stay; the log says which steps are such."
    scores = ppo.rollout_scores
    steps = iter((1, 2, 3))

    def flat_at_one_step(*given):
        found, figures = scores(*given)
        if next(steps) == flat:
            found = torch.full_like(found, .1)
        return found, figures
    monkeypatch.setattr(ppo, 'rollout_scores', flat_at_one_step)
    folder = tiny.run('ppo', base, tmp_path/'ppo', advantage=kind, kl_coef=kl_coef, group_size=3,
                      rollouts=30, batch_size=15, save_every=1, eval_split='',
                      missing_eos='').folder
    old = load_file(base/'sft'/'model'/'model.safetensors')
    for step, row in enumerate(read_log(folder), 1):
        new = load_file(folder/f'model-{step}'/'model.safetensors')
        same = all(torch.equal(w, new[k]) for k, w in old.items())
        assert same == (step == flat)
        assert same == ('grad_norm' not in row)
        assert same == (row['frac_reward_zero_std'] == 1)
        old = new


def brute_advantages(kind, rewards, size):
    "Advantages of the tokens of answers, whose rewards are lists, that are `size` to a prompt."
    if kind == 'reinforce++':
        return [[sum(r[t:]) for t in range(len(r))] for r in rewards]
    totals = [sum(r) for r in rewards]
    groups = [totals[at:at + size] for at in range(0, len(totals), size)]
    return [[TWINS[kind](i % size, groups[i//size])]*len(r) for i, r in enumerate(rewards)]


@pytest.mark.parametrize('average', ['token', 'answer'])
@pytest.mark.parametrize('kind', ['reinforce++', *GROUPS])
def test_advantages_without_a_value_model(base, models, kind, average):
    "From the penalties of the tokens and the scores, and what each token weighs in the loss."
    cfg = config(base, kind, kl_coef=.3, whiten_advantages=False, average=average, lam=.5)
    batch = rollout(models, cfg)
    scores = torch.arange(16.).cos()
    reference = moved(models.policy)
    assert ppo.value_model(cfg, models.policy) is None
    done, _ = ppo.experience(models.policy, reference, None, batch, scores, cfg)
    on = batch['response'].bool()
    with torch.no_grad():
        ref = ppo.logprobs(reference, batch)
    rewards = [(-.3*(done['old_logp'] - ref)[i][on[i]]).tolist() for i in range(16)]
    for r, score in zip(rewards, scores.tolist()):
        r[-1] += score
    wanted = brute_advantages(kind, rewards, cfg.group_size)
    for i, answer in enumerate(wanted):
        assert done['advantages'][i][on[i]].tolist() == pytest.approx(answer, abs=1e-4)
        weight = 1/len(answer) if average == 'answer' else 1
        assert done['weight'][i][on[i]].tolist() == pytest.approx([weight]*len(answer))
    assert not done['advantages'][~on].any()
    assert not done['weight'][~on].any()


@pytest.mark.parametrize('value', [.1, 1000.1, -1e6/7])
def test_scores_without_spread_keep_their_unit(value):
    "In a rollout and on a bank: divided by rounding, the next score would be huge."
    answers = [dict(instruction='a', output='b', ended=True)]*15
    scale = {}
    def reward(records): return [value]*len(records)
    flat, _ = rollout_scores(reward, answers, scale, OnlineConfig())
    assert scale['reward_std'] == 1
    assert flat.abs().max() <= abs(value)*1e-6
    score, on_bank = standard_reward(reward, [dict(instruction='a', output=['b']*15)]*7)
    assert np.abs([*on_bank.flat, *score(answers)]).max() <= abs(value)*1e-6


def test_marks_are_parts_of_the_utility_in_its_unit():
    "The parts add up to the utility, also in the units of a bank; words have their own."
    world = World('', utility='test_losses:letters', marks='test_losses:letters_by_kind')
    bank = [dict(instruction='a', output=['b b', 'ccc', 'd']),
            dict(instruction='e', output=['', 'b', 'cc b'])]
    marks, on_bank = standard_marks(world, bank)
    assert on_bank['utility'].mean() == pytest.approx(0)
    assert on_bank['utility'].std() == pytest.approx(1)
    assert on_bank['words'].std() == pytest.approx(1)
    assert np.allclose(on_bank['b'] + on_bank['other'], on_bank['utility'])
    assert marks([dict(output='ccc')])['utility'] == pytest.approx(on_bank['utility'][0, 1])
    _, unmarked = standard_marks(World('', utility=world.utility), bank)
    assert [*unmarked] == ['utility', 'words']


def letters(records): return [len(r['output']) for r in records]


def letters_by_kind(records):
    b = [r['output'].count('b') for r in records]
    return dict(b=b, other=[n - k for n, k in zip(letters(records), b)])


def above_median(group): return group - group.median(1, keepdim=True).values


def test_an_advantage_of_one_s_own_is_named_in_place_of_the_table_s(base):
    cfg = config(base, '', advantage_function=f'{__name__}:above_median')
    kind = ppo.advantage_of(cfg)
    assert cfg.group == cfg.group_size and not kind.value_model
    found = ppo.group_advantages(torch.tensor([1., 2., 6., 9.]), 4, kind)
    assert found.tolist() == [-1, 0, 4, 7]


def test_no_kl_of_samples_from_a_nucleus():
    "Log-probs are of the whole vocabulary: from a nucleus all 16 samples may be one answer."
    same = dict(output=['a']*16, scores=[0.]*16, logprob=[-9.]*16)
    assert 'kl' in best_of_n._reward_figures([dict(same, top_p=1.)], 16)
    assert 'kl' not in best_of_n._reward_figures([dict(same, top_p=.1)], 16)
    with pytest.raises(ValueError, match='top_p = 0.1'):
        OverConfig(top_p=.1)


ABOVE_MEDIAN = ppo.Advantage('the median', above_median)


def test_an_advantage_of_a_module_is_one_in_a_notebook_too(base, monkeypatch):
    "Whose cell defines the class anew."
    monkeypatch.setattr(ppo, 'Advantage', type('Advantage', (ppo.Advantage,), {}))
    cfg = config(base, '', advantage_function=f'{__name__}:ABOVE_MEDIAN')
    assert ppo.advantage_of(cfg) is ABOVE_MEDIAN


def test_a_reward_that_is_named_twice_counts_twice(base):
    ours = [f'{__name__}:letters', f'{__name__}:no_letters', f'{__name__}:no_letters']
    score = ppo.reward(ours, config(base, '', ensemble='mean'))
    assert score([dict(output='nine let.')]) == pytest.approx([3])


def no_letters(records): return [0]*len(records)
