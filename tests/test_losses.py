"""Losses against loops in float64, and what they must be before and after the first real updates."""
import copy
import dataclasses
import math

import pytest
import torch

import tiny
from alpaca_farm import ppo
from alpaca_farm.core.model.generation import generate
from alpaca_farm.core.run.runs import read_log
from alpaca_farm.core.data.text import rollout_batch
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.model.models import logprobs
from alpaca_farm.core.online import end_scores, sample_rollout
from alpaca_farm.ppo import ppo_policy_loss, ppo_value_loss, token_rewards
from alpaca_farm.reward_model import pairwise_loss

torch.set_num_threads(1)


def randn(*shape, seed=0, scale=2.): return scale*torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(found, wanted): torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def log_sigmoid(z): return -math.log(1 + math.exp(-z))


def table(f, *tensors): return [[f(*x) for x in zip(*rows)] for rows in zip(*(t.tolist() for t in tensors))]


@pytest.mark.parametrize('target', [None, 0., .3, .5, 1., 'each'])
def test_pairwise_loss(target):
    chosen, rejected = randn(9), randn(9, seed=1)
    share = torch.linspace(0, 1, 9, dtype=torch.float64) if target == 'each' else target
    shares = share.tolist() if target == 'each' else [1. if target is None else target]*9
    want = [-(p*log_sigmoid(a - b) + (1 - p)*log_sigmoid(b - a)) for a, b, p in zip(chosen.tolist(), rejected.tolist(), shares)]
    same(pairwise_loss(chosen, rejected, share), want)


def test_pairwise_loss_of_huge_margins():
    far = torch.tensor([1000., -1000.], dtype=torch.float64)
    assert pairwise_loss(far, -far).tolist() == [0., 2000.]


@pytest.mark.parametrize('clip', [0., .1, .2, 10.])
def test_ppo_policy_loss(clip):
    def one(new, old, adv):
        ratio = math.exp(new - old)
        cut = min(max(ratio, 1 - clip), 1 + clip)
        return max(-ratio*adv, -cut*adv)
    new, old, adv = randn(4, 7, scale=.3), randn(4, 7, seed=1, scale=.3), randn(4, 7, seed=2)
    same(ppo_policy_loss(new, old, adv, clip), table(one, new, old, adv))


def test_ppo_policy_gradient_stops_where_clipped():
    new = torch.tensor([[.5, -.5, .5, -.5]], dtype=torch.float64, requires_grad=True)
    adv = torch.tensor([[1., -1., -1., 1.]], dtype=torch.float64)  # the first two have gone too far already
    ppo_policy_loss(new, torch.zeros(1, 4, dtype=torch.float64), adv, .2).sum().backward()
    same(new.grad, [[0., 0., math.exp(.5), -math.exp(-.5)]])


@pytest.mark.parametrize('clip', [0., .2, 10.])
def test_ppo_value_loss(clip):
    def one(v, old, target):
        cut = min(max(v, old - clip), old + clip)
        return .5*max((v - target)**2, (cut - target)**2)
    v, old, target = randn(4, 7), randn(4, 7, seed=1), randn(4, 7, seed=2)
    same(ppo_value_loss(v, old, target, clip), table(one, v, old, target))


def test_end_scores():
    scores, ended = torch.tensor([3., -4.]), torch.tensor([True, False])
    assert end_scores(scores, ended, 'replace', 1.).tolist() == [3., -1.]
    assert end_scores(scores, ended, 'subtract', 1.).tolist() == [3., -5.]
    assert end_scores(scores, ended, '', 1.).tolist() == [3., -4.]


def test_token_rewards():
    response = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]])
    kl, scores = randn(3, 6)*response, randn(3, seed=1)
    want = [[-.3*kl[b, t].item()*response[b, t].item() for t in range(6)] for b in range(3)]
    for b, last in enumerate((4, 2, 5)): want[b][last] += scores[b].item()
    same(token_rewards(scores, kl, response, .3), want)


@pytest.mark.parametrize('kind', ['policy', 'reward_model', 'shared'])
@pytest.mark.parametrize('temperature', [1., .7])
def test_first_ppo_minibatch_changes_nothing(base, models, kind, temperature):
    "Ratio 1, KL 0, nothing clipped; one forward pass of the same batch gives the ratio exactly."
    function = dict(reward_model='alpaca_farm.world:utility') if kind == 'policy' else {}  # the value model starts from the policy
    cfg = ppo.PPOConfig(**tiny.settings('ppo', base, temperature=temperature, shared_value=kind == 'shared', **function))
    policy, value = models.policy, ppo.value_model(cfg, models.policy)
    samples = [s for s, in generate(policy, models.tokenizer, models.prompts, max_new_tokens=12, temperature=temperature)]
    batch = rollout_batch(models.prompts, [s.tokens for s in samples], models.tokenizer.pad_token_id)
    done, figures = ppo.experience(policy, policy, value, batch, torch.arange(16.), .1, cfg)
    assert figures['kl'] == 0. and done['advantages'].abs().sum() > 0
    on, mask = done['response'].bool(), done['response']
    sampled = torch.tensor([p for s in samples for p in s.logprobs])
    torch.testing.assert_close(done['old_logp'][on], sampled, rtol=0, atol=1e-5)  # what was sampled is what is scored
    with torch.no_grad():
        whole = ppo.ppo_loss(policy, value, {k: v[:8] for k, v in done.items()}, cfg)   # as `experience` cut it
        other = ppo.ppo_loss(policy, value, {k: v[[1, 14, 7]] for k, v in done.items()}, cfg)
    assert (whole['ratio'] == 1).all() and (whole['approx_kl'] == 0).all()
    for parts, m in ((whole, mask[:8]), (other, mask[[1, 14, 7]])):
        assert (parts['ratio'] - 1).abs().max() < 1e-5 and parts['approx_kl'].abs().max() < 1e-5
        assert parts['clip_fraction'].sum() == 0 and parts['value_clip_fraction'].sum() == 0
        assert all((v.isfinite() & (v.abs() < 1e6)).all() for v in parts.values())
    torch.testing.assert_close(whole['policy_loss'], -done['advantages'][:8], rtol=0, atol=1e-6)


def moved(policy):
    "A copy of a policy with other weights."
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for p in other.parameters(): p.mul_(1.1)
    return other


@pytest.mark.parametrize('kind', ['policy', 'reward_model', 'shared', 'rloo', 'grpo'])
def test_log_probs_of_sampling_save_a_pass(base, models, kind, monkeypatch):
    "A rollout in 32 bits carries those of a forward pass; without them they are computed, with the values where the trunk is shared."
    more = dict(reward_model='alpaca_farm.world:utility') if kind == 'policy' else dict(advantage=kind) if kind in ('rloo', 'grpo') else {}
    cfg = ppo.PPOConfig(**tiny.settings('ppo', base, shared_value=kind == 'shared', temperature=.7, **more))
    value = ppo.value_model(cfg, models.policy)
    records = load_records(cfg.data, 'unlabeled', n=16)
    batch, _ = sample_rollout(models.policy, models.tokenizer, records, models.prompts[:len(records)], cfg, 3)
    assert batch['old_logp'].dtype == torch.float32 and (batch['old_logp'][batch['response'] == 0] == 0).all()
    half = dataclasses.replace(cfg, dtype='bfloat16')
    assert 'old_logp' not in sample_rollout(models.policy, models.tokenizer, records, models.prompts[:len(records)], half, 3)[0]
    reference = moved(models.policy)
    passes, forward = [], models.policy.base_model.forward
    monkeypatch.setattr(models.policy.base_model, 'forward', lambda *a, **k: passes.append(1) or forward(*a, **k))
    def counted(b, kl_coef=0.):
        passes.clear()
        found = ppo.experience(models.policy, reference, value, b, torch.linspace(-1, 1, 16), kl_coef, cfg)
        return *found, len(passes)
    (kept, figures, few), (plain, expected, many) = counted(batch), counted({k: v for k, v in batch.items() if k != 'old_logp'})
    torch.testing.assert_close(kept, plain, rtol=0, atol=1e-5)
    assert figures == pytest.approx(expected, abs=1e-5)
    parts = math.ceil(16/cfg.batch_size)
    assert (few, many) == ((parts, parts) if kind == 'shared' else (0, parts))
    assert counted(batch, .1)[2] == (parts if kind in ('shared', 'grpo') else 0)   # grpo compares policy and reference by one function


def test_without_a_penalty_the_kl_is_watched_on_a_quarter(base, models):
    cfg = ppo.PPOConfig(**tiny.settings('ppo', base, kl_coef=0., advantage='grpo', whiten_advantages=False))
    records = load_records(cfg.data, 'unlabeled', n=16)
    batch, _ = sample_rollout(models.policy, models.tokenizer, records, models.prompts[:16], cfg, 3)
    scores, reference = torch.linspace(-1, 1, 16), moved(models.policy)
    (plain, figures), (_, priced) = (ppo.experience(models.policy, reference, None, batch, scores, b, cfg) for b in (0., .1))
    first = {k: v[:4] for k, v in batch.items()}
    with torch.no_grad(): kl = logprobs(models.policy, first, cfg.temperature) - logprobs(reference, first, cfg.temperature)
    assert figures['kl'] == pytest.approx(kl.sum().item()/4, abs=1e-5) and figures['kl'] != priced['kl']
    each = ppo.group_advantages(scores, cfg.group_size, 'grpo')
    torch.testing.assert_close(plain['advantages'], each[:, None]*batch['response'])


def test_ppo_run_begins_with_ratio_one(base, tmp_path):
    ppo.train(ppo.PPOConfig(**tiny.settings('ppo', base, out=str(tmp_path/'ppo'), annotators='')))
    log = read_log(tmp_path/'ppo')
    assert all(abs(r['first_ratio'] - 1) < 1e-5 for r in log) and abs(log[0]['kl']) < 1e-5
    assert log[1]['kl'] != 0  # it does learn


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_policy_that_is_its_reference_has_no_kl(base, tmp_path, monkeypatch, dtype):
    "Whatever the precision: the KL is 0, and with one reward at the end, returns are constant within an answer."
    seen, experience = [], ppo.experience
    monkeypatch.setattr(ppo, 'experience', lambda *a: seen.append(experience(*a)) or seen[-1])
    given = tiny.settings('ppo', base, out=str(tmp_path/'ppo'), annotators='', dtype=dtype, steps=1, eval_split='', save_every=0)
    ppo.train(ppo.PPOConfig(**given))
    batch, figures = seen[0]
    assert figures['kl'] == pytest.approx(0, abs=1e-5 if dtype == 'float32' else 0) and read_log(tmp_path/'ppo')[0]['first_ratio'] == pytest.approx(1, abs=1e-6 if dtype == 'float32' else 1e-2)
    assert all(batch[k].dtype == torch.float32 for k in ('advantages', 'returns', 'old_values', 'old_logp'))
    for row, on in zip(batch['returns'], batch['response'].bool()): assert row[on].max() - row[on].min() < 1e-5
    plain = (batch['returns'] - batch['old_values'])[batch['response'].bool()].double()
    white = batch['advantages'][batch['response'].bool()].double()
    torch.testing.assert_close(white, (plain - plain.mean())/plain.std(correction=0), rtol=0, atol=1e-5)


def test_a_shared_trunk_is_read_once(models):
    "One pass for log-probs and values, with the same loss as two."
    cfg, answers = ppo.PPOConfig(device='cpu', shared_value=True), [a[:5] for a in models.answers[:4]]
    value = ppo.ValueHead(models.policy, torch.nn.Linear(models.policy.config.hidden_size, 1, bias=False), shared=True)
    batch = rollout_batch(models.prompts[:4], answers, models.tokenizer.pad_token_id)
    batch |= {k: torch.zeros(batch['ids'].shape) for k in ('old_logp', 'advantages', 'old_values', 'returns')}
    passes = []
    hook = models.policy.base_model.register_forward_hook(lambda *_: passes.append(1))
    once = ppo.ppo_loss(models.policy, value, batch, cfg)['loss']
    twice = ppo.ppo_loss(models.policy, value, batch, dataclasses.replace(cfg, shared_value=False))['loss']
    hook.remove()
    assert len(passes) == 1 + 2
    torch.testing.assert_close(once, twice, rtol=0, atol=0)
