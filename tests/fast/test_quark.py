"""Quark: its terms against whole distributions, the reward tokens, and runs."""
import copy

import pytest
import torch

import tiny
from alpaca_farm import quark
from alpaca_farm.core.answers import AnswerConfig
from alpaca_farm.core.model.control import add_tokens, prepend_tokens
from alpaca_farm.core.model.generation import generate
from alpaca_farm.core.model.models import load_policy, load_tokenizer, logprobs
from alpaca_farm.core.run.runs import read_log, read_summary
from alpaca_farm.core.data.text import collate, encode_prompts
from alpaca_farm.quark import (_pool_answers, quantiles, QuarkConfig, response_terms,
    _add_reward_tokens, token_terms)
from tiny import randn

torch.set_num_threads(1)
BIRD = dict(instruction='Name a bird.')


def train(base, out, **more):
    "The log of a run, and its settings."
    cfg = tiny.run('quark', base, out, **more).cfg
    return read_log(out), cfg


def test_gradients_of_the_terms():
    logits = randn(3, 6).requires_grad_()
    ref = randn(3, 6, seed=1)
    tokens = torch.tensor([0, 3, 5])
    assert torch.autograd.gradcheck(lambda x: token_terms(x, ref, tokens), logits)
    assert token_terms(logits.bfloat16(), ref.bfloat16(), tokens)[1].dtype == torch.float32


@pytest.fixture(scope='module')
def pair(models):
    "A policy with reward tokens, its reference, a tokenizer, the tokens, the size without them."
    reference = copy.deepcopy(models.policy)
    policy = copy.deepcopy(models.policy)
    tokenizer = policy.tokenizer
    for m in (reference, policy):
        for p in m.model.parameters():
            p.data *= 3 if p.ndim == 2 else 1
    torch.manual_seed(0)
    for p in policy.model.parameters():
        p.data += .02*torch.randn_like(p)
    size = len(tokenizer)
    return policy, reference, tokenizer, add_tokens(policy, ['<a>', '<b>']), size


def batch_of(models, pair, rows, tokens=True, side='right'):
    _, _, tokenizer, ids, _ = pair
    prompts = [models.prompts[i] for i in rows]
    answers = [models.answers[i] for i in rows]
    if tokens:
        prompts = prepend_tokens(prompts, [ids[i % 2] for i in rows], tokenizer, 2)
    return collate(prompts, answers, tokenizer.pad_token_id, side)


def terms_of(*args, **kwargs):
    "`response_terms`, each a list of the responses' tokens."
    batch = args[2]
    return {k: [x[b.bool()] for x, b in zip(v, batch['response'])]
            for k, v in response_terms(*args, **kwargs).items()}


@pytest.mark.parametrize('side', ['left', 'right'])
@torch.no_grad()
def test_terms_are_those_of_whole_distributions(models, pair, side):
    "Of each answer alone, whatever it is padded with."
    policy, reference, _, _, size = pair
    batch, plain = (batch_of(models, pair, range(6), tokens, side) for tokens in (True, False))
    found = terms_of(policy, reference, batch, size, .7)
    def log_softmax(model, b, i, n):
        ids = b['ids'][i][b['mask'][i].bool()]
        return (model.model(ids[None]).logits[0, -n - 1:-1, :size].double()/.7).log_softmax(1)
    for i, answer in enumerate(models.answers[:6]):
        n = len(answer)
        logp = log_softmax(policy, batch, i, n)
        ref = log_softmax(reference, plain, i, n)
        want = dict(kl=(logp.exp()*(logp - ref)).sum(1), entropy=-(logp.exp()*logp).sum(1),
                    logp=logp[range(n), answer])
        for name, x in want.items():
            torch.testing.assert_close(found[name][i].double(), x, rtol=1e-4, atol=2e-5)
    assert min(k.min() for k in found['kl']) >= -1e-5
    assert max(k.max() for k in found['kl']) > .01


def test_untouched_vocabulary(models):
    policy = copy.deepcopy(models.policy)
    tokenizer = policy.tokenizer
    plain = models.tokenizer
    size = len(tokenizer)
    was = models.policy.model.get_input_embeddings().weight
    cfg = QuarkConfig(best_quantile_only=False, num_quantiles=3, jitter=.5, token_times=2)
    ids, words = _add_reward_tokens(policy, cfg)
    table = policy.model.get_input_embeddings().weight
    assert (ids, words, len(table)) == ([size, size + 1, size + 2], size, size + 3)
    assert torch.equal(table[:size], was)
    assert policy.model.generation_config.suppress_tokens == ids
    assert ((table[size:] - was.mean(0)).abs() < 3*was.std(0)).all()
    prompts = prepend_tokens(encode_prompts([BIRD], plain), ids[0], plain, 2)
    assert encode_prompts([BIRD], tokenizer) == prompts
    with pytest.raises(ValueError, match='control tokens'):
        _add_reward_tokens(policy, cfg)
    assert _add_reward_tokens(models.policy, QuarkConfig()) == ([], len(was))


@pytest.mark.slow
def test_run_with_tokens(base, tmp_path):
    out = tmp_path/'quark'
    log, _ = train(base, out, best_quantile_only=False, clear_pool=False,
                   annotators='alpaca_farm.world:pool')
    assert [r['pool'] for r in log] == [16, 32, 48]
    assert ['reward_worst' in r for r in log] == [False, True, True]
    assert abs(log[0]['kl']) < 1e-4 and abs(log[0]['reward']) < 1e-5, 'first asked without a token'
    assert all(r['lowest_0'] >= r['lowest_1'] >= r['lowest_3'] for r in log)
    assert log[-1]['token_kl'] > 0
    assert {'best_step', 'val_win_rate'} <= set(read_summary(out))
    policy = load_policy(str(out), AnswerConfig(**tiny.SAMPLING))
    tokenizer = policy.tokenizer
    plain = load_tokenizer(str(base/'sft'))
    token = tokenizer.convert_tokens_to_ids('<reward_0>')
    prompts = encode_prompts([BIRD], tokenizer)
    assert prompts == prepend_tokens(encode_prompts([BIRD], plain), token, plain, 2)
    written = generate(policy, prompts*64, max_new_tokens=30)
    assert max(t for s, in written for t in s.tokens) < len(plain), 'one is never written'
    again = quark.QuarkConfig(best_quantile_only=False)
    with pytest.raises(ValueError, match='control tokens'):
        quark._add_reward_tokens(policy, again)


def test_first_update_is_plain_imitation_of_the_best(base, tmp_path, monkeypatch):
    "No KL yet, and the loss is the mean -log p of the best quarter's tokens, EOS included."
    kept = {}
    real = quark._update_pool
    monkeypatch.setattr(quark, '_update_pool', lambda *a: kept.setdefault('pool', real(*a)))
    more = dict(steps=1, updates=1, batch_size=4, eval_split='', save_every=0)
    (first,), cfg = train(base, tmp_path/'quark', **more)
    policy = load_policy(cfg.policy, cfg)
    tokenizer = policy.tokenizer
    _, prompts, _ = quark.load_prompts(cfg, tokenizer)
    pool = kept['pool']
    answers = _pool_answers(kept['pool'])
    best = (quantiles(pool['score'], 4) == 0).nonzero()[:, 0].tolist()
    b = collate([prompts[pool['row'][i]] for i in best], [answers[i] for i in best], 0)
    with torch.no_grad():
        want = -(logprobs(policy, b).sum()/b['response'].sum()).item()
    assert len(best) == 4
    assert first['nll'] == pytest.approx(want, rel=1e-5) == first['loss']
    assert abs(first['token_kl']) < 1e-6
