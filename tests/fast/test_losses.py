"""Losses against loops in float64, and what they must be at the first real updates."""
import copy
import dataclasses
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny
from alpaca_farm import ppo
from alpaca_farm.core.functional import masked_mean, masked_var
from alpaca_farm.core.model.generation import generate
from alpaca_farm.core.model.packing import reads_packed
from alpaca_farm.core.run.runs import read_log
from alpaca_farm.core.data.text import rollout_batch
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.online import OnlineConfig, rollout_scores, sample_rollout
from alpaca_farm.core.training import Trainer
from alpaca_farm.overoptimization import standard_marks, standard_reward
from alpaca_farm.worlds.folder import World

torch.set_num_threads(1)


def config(base, kind, **more):
    "PPO with a value model of some kind, or with one of the other baselines."
    kinds = dict(policy=dict(reward_model='alpaca_farm.world:utility'),
                 shared=dict(shared_value=True))
    own = dict(advantage=kind) if kind in ppo.ADVANTAGES else kinds.get(kind, {})
    return ppo.PPOConfig(**tiny.settings('ppo', base, **own, **more))


# the advantage of answer i of a group whose rewards are `own`, by its name in ADVANTAGES
TWINS = dict(rloo=lambda i, own: own[i] - mean(own[:i] + own[i + 1:]),
             grpo=lambda i, own: (own[i] - mean(own))/stdev(own),
             dr_grpo=lambda i, own: own[i] - mean(own))
GROUPS = [name for name, kind in ppo.ADVANTAGES.items() if kind.of_group]
each_group = pytest.mark.parametrize('kind', GROUPS)


@pytest.mark.parametrize('kind', ['policy', 'reward_model', 'shared'])
@pytest.mark.parametrize('temperature', [1., .7])
def test_first_ppo_minibatch_changes_nothing(base, models, kind, temperature):
    "Ratio 1, KL 0, nothing clipped; one forward pass of the same batch gives the ratio exactly."
    cfg = config(base, kind, temperature=temperature, kl_coef=.1)
    policy = models.policy
    value = ppo.value_model(cfg, models.policy)
    samples = generate(policy, models.prompts, max_new_tokens=12,
                       temperature=temperature)
    tokens = [s.tokens for s, in samples]
    batch = rollout_batch(models.prompts, tokens, models.tokenizer.pad_token_id)
    done, figures = ppo.experience(policy, policy, value, batch, torch.arange(16.), cfg)
    assert figures['kl'] == 0.
    assert done['advantages'].abs().sum() > 0
    on = done['response'].bool()
    mask = done['response']
    sampled = torch.tensor([p for s, in samples for p in s.logprobs])
    torch.testing.assert_close(done['old_logp'][on], sampled, rtol=0, atol=1e-5)
    with torch.no_grad():
        whole, other = (ppo.ppo_loss(policy, value, {k: v[rows] for k, v in done.items()}, cfg)
                        for rows in (range(8), [1, 14, 7]))   # the first as `experience` cut it
    assert (whole['ratio'] == 1).all()
    assert (whole['approx_kl'] == 0).all()
    for parts, m in ((whole, mask[:8]), (other, mask[[1, 14, 7]])):
        assert (parts['ratio'] - 1).abs().max() < 1e-5
        assert parts['approx_kl'].abs().max() < 1e-5
        assert parts['clip_fraction'].sum() == 0
        assert parts['value_clip_fraction'].sum() == 0
        assert all((v.isfinite() & (v.abs() < 1e6)).all() for v in parts.values())
    torch.testing.assert_close(whole['policy_loss'], -done['advantages'][:8], rtol=0, atol=1e-6)


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


@pytest.mark.parametrize('kind', ['policy', 'reward_model', 'shared', 'reinforce++', *GROUPS])
def test_log_probs_of_sampling_save_a_pass(base, models, kind, monkeypatch):
    "A rollout in 32 bits carries those of a forward pass; without them they are computed."
    cfg = config(base, kind, temperature=.7)
    value = ppo.value_model(cfg, models.policy)
    batch = rollout(models, cfg)
    assert batch['old_logp'].dtype == torch.float32
    assert (batch['old_logp'][batch['response'] == 0] == 0).all()
    assert 'old_logp' not in rollout(models, dataclasses.replace(cfg, dtype='bfloat16'))
    reference = moved(models.policy)
    assert reads_packed(models.policy)   # which takes passes when it is asked first
    passes = []
    trunk = models.policy.model.base_model
    scores = torch.linspace(-1, 1, 16)
    forward = trunk.forward
    monkeypatch.setattr(trunk, 'forward', lambda *a, **k: passes.append(1) or forward(*a, **k))
    def counted(b, kl_coef=0.):
        passes.clear()
        settings = dataclasses.replace(cfg, kl_coef=kl_coef)
        found = ppo.experience(models.policy, reference, value, b, scores, settings)
        return *found, len(passes)
    kept, figures, few = counted(batch)
    plain, expected, many = counted({k: v for k, v in batch.items() if k != 'old_logp'})
    torch.testing.assert_close(kept, plain, rtol=0, atol=1e-5)
    assert figures == pytest.approx(expected, abs=1e-5)
    assert (few, many) == ((1, 1) if kind == 'shared' else (0, 1))   # all rows fit into one
    # grpo compares policy and reference by one function
    assert counted(batch, .1)[2] == (kind in ('shared', 'grpo'))


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_policy_that_is_its_reference_has_no_kl(base, tmp_path, monkeypatch, dtype):
    "Whatever the precision: the KL is 0; with one reward at the end, returns are constant."
    seen = []
    experience = ppo.experience
    monkeypatch.setattr(ppo, 'experience', lambda *a: seen.append(experience(*a)) or seen[-1])
    ppo.train(config(base, '', out=str(tmp_path/'ppo'), dtype=dtype, steps=1, eval_split='',
                     save_every=0))
    (batch, figures), (log,) = seen[0], read_log(tmp_path/'ppo')
    kl, ratio = (1e-5, 1e-6) if dtype == 'float32' else (0, 1e-2)   # what rounding may do
    assert figures['kl'] == pytest.approx(0, abs=kl)
    assert log['first_ratio'] == pytest.approx(1, abs=ratio)
    for k in ('advantages', 'returns', 'old_values', 'old_logp'):
        assert batch[k].dtype == torch.float32
    for row, on in zip(batch['returns'], batch['response'].bool()):
        assert row[on].max() - row[on].min() < 1e-5
    plain = (batch['returns'] - batch['old_values'])[batch['response'].bool()].double()
    white = batch['advantages'][batch['response'].bool()].double()
    wanted = (plain - plain.mean())/plain.std(correction=0)
    torch.testing.assert_close(white, wanted, rtol=0, atol=1e-5)


@each_group
def test_a_group_of_equal_rewards_has_no_advantage(kind):
    "Exactly none, whatever its size and its reward; nor has one whose rewards differ by rounding."
    for size in range(2, 18):
        for value in (.1, -1/3, .7, 3e-5, 1e5/7):
            equal = torch.full((size,), value)
            rounded = torch.where(torch.arange(size) < 1, equal*(1 + 2e-7), equal)
            totals = torch.cat([equal, rounded, torch.arange(size) + equal])
            found = ppo.group_advantages(totals, size, kind)
            assert not found[:2*size].any(), (size, value)
            own = [float(i) for i in range(size)]
            wanted = torch.tensor([TWINS[kind](i, own) for i in range(size)])
            torch.testing.assert_close(found[2*size:], wanted, rtol=1e-2, atol=1e-2)


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


@pytest.mark.slow
@each_group
@pytest.mark.parametrize('flat, kl_coef', [(2, 0.), (1, .2)])   # at first all KL is rounding
def test_a_step_without_spread_changes_nothing(base, tmp_path, kind, flat, kl_coef, monkeypatch):
    "No update is made, so that weights and moments stay; the log says which steps are such."
    scores = ppo.rollout_scores
    update = Trainer.update
    updates = []
    seen = []
    def flat_at_one_step(*given):
        found, figures = scores(*given)
        seen.append(found)
        return torch.full_like(found, .1) if len(seen) == flat else found, figures
    def counted(trainer, *given):
        updates.append(trainer.step)
        return update(trainer, *given)
    monkeypatch.setattr(ppo, 'rollout_scores', flat_at_one_step)
    monkeypatch.setattr(Trainer, 'update', counted)
    folder = tiny.run('ppo', base, tmp_path/'ppo', advantage=kind, kl_coef=kl_coef, group_size=3,
                      rollouts=30, batch_size=15, save_every=1, eval_split='',
                      missing_eos='').folder
    models = base/'sft'/'model', *(folder/f'model-{k}' for k in (1, 2, 3))
    weights = [load_file(p/'model.safetensors') for p in models]
    for step, (old, new, r) in enumerate(zip(weights, weights[1:], read_log(folder)), 1):
        same = all(torch.equal(w, new[k]) for k, w in old.items())
        assert same == (step == flat) == ('grad_norm' not in r)
        assert (r['frac_reward_zero_std'] == 1) == same
    assert updates == [k for k in (1, 2, 3) if k != flat for _ in range(4)]


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
    cfg = config(base, kind, kl_coef=.3, whiten_advantages=False, average=average)
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
    world = World('', utility='test_losses:_letters', marks='test_losses:_parts')
    bank = [dict(instruction='a', output=['b b', 'ccc', 'd']), dict(instruction='e', output=['', 'b', 'cc b'])]
    marks, on_bank = standard_marks(world, bank)
    assert on_bank['utility'].mean() == pytest.approx(0)
    assert on_bank['utility'].std() == pytest.approx(1)
    assert on_bank['words'].std() == pytest.approx(1)
    assert np.allclose(on_bank['b'] + on_bank['other'], on_bank['utility'])
    assert marks([dict(output='ccc')])['utility'] == pytest.approx(on_bank['utility'][0, 1])
    assert [*standard_marks(World('', utility=world.utility), bank)[1]] == ['utility', 'words']   # no marks


def _letters(records): return [len(r['output']) for r in records]
def _parts(records):
    b = [r['output'].count('b') for r in records]
    return dict(b=b, other=[len(r['output']) - n for r, n in zip(records, b)])
