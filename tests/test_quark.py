"""Quark: quantiles, pool, exact KL and loss against loops in float64; what the reference must not see; tokens that are obeyed."""
import copy
import math
import random

import pytest
import torch

import tiny
from alpaca_farm import quark
from alpaca_farm.core.answers import AnswerConfig
from alpaca_farm.core.model.control import add_tokens, prepend_tokens
from alpaca_farm.core.model.generation import generate
from alpaca_farm.core.model.models import load_policy, load_tokenizer, logits_of, logprobs
from alpaca_farm.core.run.files import load_state
from alpaca_farm.core.run.runs import read_log, read_summary
from alpaca_farm.core.data.text import collate, encode_prompts
from alpaca_farm.quark import (pool_answers, pool_batch, quantiles, quark_loss,
    QuarkConfig, response_terms, reward_tokens, token_terms, update_indices,
    update_pool)

torch.set_num_threads(1)


def randn(*shape, seed=0, scale=2.): return scale*torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(found, wanted): torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('K', [2, 3, 4, 7])
@pytest.mark.parametrize('levels', [1, 2, 5, 1000])
def test_quantiles(K, levels):
    rng = random.Random(K*levels)
    r = [float(rng.randrange(levels)) for _ in range(60)]
    found = quantiles(torch.tensor(r), K).tolist()
    assert found == [K*sum(b > a for b in r)//60 for a in r]
    assert 0 in found and max(found) < K
    for a, b, k, l in ((a, b, k, l) for a, k in zip(r, found) for b, l in zip(r, found)):
        assert k == l if a == b else k <= l if a > b else k >= l, 'ties together, and no worse answer in a better quantile'
    order = rng.sample(range(60), 60)
    assert quantiles(torch.tensor([r[i] for i in order]), K).tolist() == [found[i] for i in order]


def test_quantiles_are_of_equal_size_where_nothing_is_tied():
    r = torch.randperm(40, generator=torch.Generator().manual_seed(0)).float()
    assert quantiles(r, 4).bincount().tolist() == [10]*4
    assert (quantiles(r, 4) == 0).nonzero()[:, 0].tolist() == sorted(r.argsort(descending=True)[:10].tolist())


def test_token_terms():
    logits, ref, tokens = randn(5, 9), randn(5, 9, seed=1), torch.tensor([0, 3, 8, 3, 2])
    def log_softmax(row): m = max(row); z = m + math.log(sum(math.exp(x - m) for x in row)); return [x - z for x in row]
    logp, kl, entropy = [], [], []
    for a, b, t in zip(logits.tolist(), ref.tolist(), tokens.tolist()):
        p, q = log_softmax(a), log_softmax(b)
        logp.append(p[t]); kl.append(sum(math.exp(x)*(x - y) for x, y in zip(p, q))); entropy.append(-sum(math.exp(x)*x for x in p))
    for found, wanted in zip(token_terms(logits, ref, tokens), (logp, kl, entropy)): same(found, wanted)
    assert token_terms(logits.bfloat16(), ref.bfloat16(), tokens)[1].dtype == torch.float32


def test_gradients_of_the_terms():
    "Of KL: p (log p/q - KL); of the entropy: -p (log p + H); by formula and by finite differences."
    logits, ref, tokens = randn(3, 6).requires_grad_(), randn(3, 6, seed=1), torch.tensor([0, 3, 5])
    _, kl, entropy = token_terms(logits, ref, tokens)
    p, logp, q = logits.softmax(1), logits.log_softmax(1), ref.log_softmax(1)
    same(torch.autograd.grad(kl.sum(), logits, retain_graph=True)[0], (p*(logp - q - kl[:, None])).detach())
    same(torch.autograd.grad(entropy.sum(), logits)[0], (-p*(logp + entropy[:, None])).detach())
    assert torch.autograd.gradcheck(lambda x: token_terms(x, ref, tokens), logits)


@pytest.mark.parametrize('beta, alpha', [(0., 0.), (.05, 0.), (.3, .02)])
def test_quark_loss(beta, alpha):
    logp, kl, entropy = (randn(3, 4, seed=s) for s in range(3))
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]])
    want = [[-a + beta*b - alpha*c if on else 0. for a, b, c, on in zip(*rows)] for rows in zip(*(x.tolist() for x in (logp, kl, entropy, mask)))]
    same(quark_loss(logp, kl, entropy, mask, beta, alpha), want)
    assert quark_loss(torch.full((1, 1), torch.nan), kl[:1, :1], entropy[:1, :1], torch.zeros(1, 1)).item() == 0.


@pytest.fixture(scope='module')
def pair(models):
    "A policy with reward tokens, its reference, a tokenizer that puts none into prompts."
    reference, policy, tokenizer = copy.deepcopy(models.policy), copy.deepcopy(models.policy), copy.deepcopy(models.tokenizer)
    for m in (reference, policy):
        for p in m.parameters(): p.data *= 3 if p.ndim == 2 else 1
    torch.manual_seed(0)
    for p in policy.parameters(): p.data += .02*torch.randn_like(p)
    size = len(tokenizer)
    return policy, reference, tokenizer, add_tokens(policy, tokenizer, ['<reward_0>', '<reward_1>']), size


def batch_of(models, pair, rows, tokens=True, side='right', times=2):
    _, _, tokenizer, ids, _ = pair
    prompts = [models.prompts[i] for i in rows]
    if tokens: prompts = prepend_tokens(prompts, [ids[i % 2] for i in rows], tokenizer, times)
    return collate(prompts, [models.answers[i] for i in rows], tokenizer.pad_token_id, side)


def on(found, batch): return {k: [x[b.bool()] for x, b in zip(v, batch['response'])] for k, v in found.items()}


@torch.no_grad()
def test_terms_are_those_of_whole_distributions(models, pair):
    policy, reference, _, _, size = pair
    batch, plain = batch_of(models, pair, range(6)), batch_of(models, pair, range(6), tokens=False)
    found = on(response_terms(policy, reference, batch, size, .7), batch)
    for i in range(6):
        n, at = len(models.answers[i]), int(batch['response'][i].argmax())
        ids = batch['ids'][i:i + 1, :at + n]
        logp = (policy(ids).logits[0, at - 1:-1, :size].double()/.7).log_softmax(1)
        ref = (reference(plain['ids'][i:i + 1, :at - 2 + n]).logits[0, at - 3:-1].double()/.7).log_softmax(1)
        for name, want in (('kl', (logp.exp()*(logp - ref)).sum(1)), ('entropy', -(logp.exp()*logp).sum(1)),
                           ('logp', logp.gather(1, ids[0, at:, None])[:, 0])):
            torch.testing.assert_close(found[name][i].double(), want, rtol=1e-4, atol=2e-5)
    assert min(k.min() for k in found['kl']) >= -1e-5 and max(k.max() for k in found['kl']) > .01


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('rows', [[0, 5], [3, 2, 1, 4], [0]])
def test_neither_padding_nor_batch_matters(models, pair, rows, side):
    policy, reference, _, _, size = pair
    with torch.no_grad():
        b, alone = batch_of(models, pair, rows, side=side), [batch_of(models, pair, [i]) for i in rows]
        found = on(response_terms(policy, reference, b, size), b)
        for k, a in enumerate(alone):
            for name, x in on(response_terms(policy, reference, a, size), a).items():
                torch.testing.assert_close(found[name][k], x[0], rtol=1e-4, atol=1e-5)


def test_chunks_change_nothing(models, pair):
    policy, reference, _, _, size = pair
    b, seen = batch_of(models, pair, range(8)), []
    for chunk in (0, 7, 1000):
        policy.zero_grad()
        t = response_terms(policy, reference, b, size, chunk=chunk)
        quark_loss(**t, mask=b['response'], kl_coef=.3, entropy_coef=.1).sum().backward()
        seen.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    for other in seen[1:]: torch.testing.assert_close(other, seen[0], rtol=1e-4, atol=1e-5*seen[0].abs().max().item())
    assert all(p.grad is None for p in reference.parameters())
    policy.zero_grad()


def test_logits_are_made_for_response_positions_only(models, pair, monkeypatch):
    policy, reference, _, _, size = pair
    rows = []
    monkeypatch.setattr(quark, 'logits_of', lambda model, states: rows.append(len(states)) or logits_of(model, states))
    b = batch_of(models, pair, range(8))
    with torch.no_grad(): response_terms(policy, reference, b, size, chunk=16)
    assert sum(rows) == 2*b['response'].sum() and max(rows) == 16


@torch.no_grad()
def test_the_reference_knows_nothing_of_tokens(models, pair):
    _, reference, tokenizer, ids, size = pair
    assert reference.get_input_embeddings().weight.shape[0] == size == ids[0]
    plain, conditioned = batch_of(models, pair, range(8), tokens=False), batch_of(models, pair, range(8))
    same_kl = on(response_terms(reference, reference, plain, size), plain)['kl']
    assert max(k.abs().max() for k in same_kl) < 1e-5, 'a policy is no distance from itself'
    policy = pair[0]
    rest = [prepend_tokens([p], ids[1], tokenizer, 2)[0] for p in models.prompts[:8]]
    other = collate(rest, models.answers[:8], tokenizer.pad_token_id)
    a, b = (on(response_terms(policy, policy, x, size), x)['kl'] for x in (conditioned, other))  # the second policy reads no token
    assert max((x - y).abs().max() for x, y in zip(a[1::2], b[1::2])) < 1e-6 and max(x.max() for x in a) > 1e-4


def test_untouched_vocabulary(models):
    policy, tokenizer = copy.deepcopy(models.policy), copy.deepcopy(models.tokenizer)
    size, was = len(tokenizer), models.policy.get_input_embeddings().weight
    ids, words = reward_tokens(policy, tokenizer, QuarkConfig(best_quantile_only=False, num_quantiles=3, jitter=.5, token_times=2))
    table = policy.get_input_embeddings().weight
    assert (ids, words, len(table)) == ([size, size + 1, size + 2], size, size + 3) and torch.equal(table[:size], was)
    assert ((table[size:] - was.mean(0)).abs() < 3*was.std(0)).all() and policy.generation_config.suppress_tokens == ids
    prompts = encode_prompts([dict(instruction='Name a bird.')], tokenizer)
    assert prompts == prepend_tokens(encode_prompts([dict(instruction='Name a bird.')], models.tokenizer), ids[0], models.tokenizer, 2)
    with pytest.raises(ValueError, match='has control tokens already'): reward_tokens(policy, tokenizer, QuarkConfig(best_quantile_only=False))
    assert reward_tokens(models.policy, models.tokenizer, QuarkConfig()) == ([], len(was))


def test_pool():
    responses = [[5, 2], [6, 7, 2], [8]]
    b = collate([[1], [1, 4], [1]], responses, 0)
    pool = update_pool({}, b, [4, 9, 2], torch.tensor([1., 3., 2.]), False)
    assert pool_answers(pool) == responses and pool['row'].tolist() == [4, 9, 2]
    more = update_pool(pool, b, [1, 1, 1], torch.tensor([9., 8., 7.]), False)
    assert pool_answers(more) == responses*2 and quantiles(more['score'], 2).tolist() == [1, 1, 1, 0, 0, 0]
    assert pool_answers(update_pool(pool, b, [1, 1, 1], torch.zeros(3), True)) == responses
    batch = pool_batch([[1], [1, 4], [1]], responses, [], type('T', (), dict(pad_token_id=0)))
    assert batch['ids'].tolist() == [[1, 5, 2, 0, 0], [1, 4, 6, 7, 2], [1, 8, 0, 0, 0]]
    assert batch['weight'].tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]], 'EOS is learned, padding is not'


def test_every_answer_is_learned_from_once_before_any_comes_again():
    cfg = QuarkConfig(updates=5, batch_size=8)
    rows = sum(update_indices(10, 3, cfg), [])
    assert len(rows) == 40 and all(sorted(rows[i:i + 10]) == list(range(10)) for i in range(0, 40, 10))
    assert update_indices(10, 3, cfg) == update_indices(10, 3, cfg) != update_indices(10, 4, cfg)


@pytest.mark.parametrize('bad, message', [
    (dict(num_quantiles=1), 'num_quantiles = 1'), (dict(num_quantiles=9, rollouts=8), 'cannot be cut'), (dict(updates=0), 'updates = 0'),
    (dict(kl_coef=-.1), 'kl_coef'), (dict(entropy_coef=-1.), 'entropy_coef'), (dict(jitter=-1.), 'jitter'), (dict(token_times=0), 'token_times'),
    (dict(temperature=0.), 'temperature'), (dict(kl_coef=math.nan), 'kl_coef'), (dict(rollouts=1), 'rollouts')])
def test_nonsense_is_refused(bad, message):
    with pytest.raises(ValueError, match=message): QuarkConfig(**bad)
    with pytest.raises(TypeError): QuarkConfig(num_quantiles=2.5)


@pytest.fixture(scope='module')
def token_run(base, tmp_path_factory):
    "A run with tokens and a kept pool."
    out = str(tmp_path_factory.mktemp('tokens')/'quark')
    quark.train(QuarkConfig(**tiny.settings('quark', base, out=out, best_quantile_only=False, clear_pool=False,
                                           annotators='alpaca_farm.world:pool')))
    return out


def test_run_with_tokens(base, token_run):
    log, summary = read_log(token_run), read_summary(token_run)
    assert [r['pool'] for r in log] == [16, 32, 48] and ['reward_worst' in r for r in log] == [False, True, True]
    assert abs(log[0]['kl']) < 1e-4 and abs(log[0]['reward']) < 1e-5, 'the first rollout is the SFT policy, asked without a token'
    assert all(r['lowest_0'] >= r['lowest_1'] >= r['lowest_3'] for r in log) and log[-1]['token_kl'] > 0
    assert {'labels', 'kl', 'length', 'ended', 'best_step', 'val_win_rate'} <= set(summary)
    cfg = AnswerConfig(**{k: v for k, v in tiny.SAMPLING.items()})
    policy, tokenizer = load_policy(token_run, cfg)
    plain, token = load_tokenizer(str(base/'sft')), tokenizer.convert_tokens_to_ids('<reward_0>')
    record = dict(instruction='Name a bird.')
    assert encode_prompts([record], tokenizer) == prepend_tokens(encode_prompts([record], plain), token, plain, 2)
    written = [t for s, in generate(policy, tokenizer, encode_prompts([record]*64, tokenizer), max_new_tokens=30) for t in s.tokens]
    assert max(written) < len(plain), 'a reward token is never written'


def test_the_pool_is_in_the_checkpoint(base, tmp_path, monkeypatch):
    cfg = QuarkConfig(**tiny.settings('quark', base, out=str(tmp_path/'quark'), clear_pool=False))
    def stop(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr(quark, 'finish_run', stop)
    with pytest.raises(KeyboardInterrupt): quark.train(cfg)
    pool = load_state(tmp_path/'quark'/'checkpoint'/'state.safetensors')['extra']['pool']
    assert len(pool['score']) == 32 and len(pool_answers(pool)) == 32 and pool['length'].sum() == len(pool['answers'])


@pytest.mark.parametrize('tokens', [False, True])
def test_micro_batches_change_nothing(base, tmp_path, tokens):
    logs = []
    for micro in (0, 3):
        given = tiny.settings('quark', base, out=str(tmp_path/f'{micro}'), steps=1, best_quantile_only=not tokens, annotators='', eval_split='',
                              micro_batch_size=micro, kl_coef=.2, entropy_coef=.01)
        quark.train(QuarkConfig(**given))
        logs.append(read_log(given['out']))
    for a, b in zip(*logs): assert all(abs(a[k] - b[k]) < 1e-4 for k in ('loss', 'nll', 'kl', 'token_kl', 'reward', 'grad_norm', 'entropy'))


def test_first_update_is_plain_imitation_of_the_best(base, tmp_path):
    "Before any update the policy is the reference: no KL, and the loss is the mean -log p of the best quarter's tokens, EOS included."
    given = tiny.settings('quark', base, out=str(tmp_path/'quark'), steps=1, updates=1, batch_size=4, annotators='', eval_split='', save_every=0)
    kept = {}
    real = quark.update_pool
    quark.update_pool = lambda *a: kept.setdefault('pool', real(*a))
    try: quark.train(cfg := QuarkConfig(**given))
    finally: quark.update_pool = real
    first, pool = read_log(given['out'])[0], kept['pool']
    policy, tokenizer = load_policy(cfg.policy, cfg)
    _, prompts, _ = quark.load_prompts(cfg, tokenizer)
    best = (quantiles(pool['score'], 4) == 0).nonzero()[:, 0].tolist()
    answers = pool_answers(pool)
    assert len(best) == 4
    b = collate([prompts[pool['row'][i]] for i in best], [answers[i] for i in best], 0)
    with torch.no_grad(): want = -(logprobs(policy, b).sum()/b['response'].sum()).item()
    assert first['nll'] == pytest.approx(want, rel=1e-5) == first['loss'] and abs(first['token_kl']) < 1e-6


def test_a_token_is_obeyed(models):
    "Answers that open with one of two words, and the rest alike: after a few updates the token decides which."
    policy, tokenizer = copy.deepcopy(models.policy), copy.deepcopy(models.tokenizer)
    ids, size = reward_tokens(policy, tokenizer, QuarkConfig(best_quantile_only=False, num_quantiles=2, jitter=3., token_times=2))
    a, b = (encode_prompts([dict(instruction=w)], models.tokenizer)[0][-2] for w in ('bear', 'duck'))
    rng, answers = random.Random(0), []
    for i in range(64): answers.append([rng.choice([a, b]), rng.randrange(20, size), models.tokenizer.eos_token_id])
    of = quantiles(torch.tensor([float(x[0] == a) for x in answers]), 2).tolist()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.)
    for step in range(60):
        rows = rng.sample(range(64), 16)
        batch = pool_batch([models.prompts[i % 16] for i in rows], [answers[i] for i in rows], [ids[of[i]] for i in rows], models.tokenizer, 2)
        t = response_terms(policy, models.policy, batch, size)
        (quark_loss(**t, mask=batch['response'], kl_coef=.01).sum()/batch['response'].sum()).backward()
        optimizer.step(); optimizer.zero_grad()
    opened = [[s.tokens[0] == a for s, in generate(policy, tokenizer, prepend_tokens(models.prompts, k, models.tokenizer, 2), max_new_tokens=2)] for k in ids]
    assert sum(opened[0]) >= 13 and sum(opened[1]) <= 3


def test_the_papers_recipe():
    import yaml
    paper = yaml.safe_load((tiny.ROOT/'nbs'/'recipes'/'llama_7b'/'quark.yaml').read_text())
    assert ((paper['num_quantiles'], paper['kl_coef'], paper['rollouts'], paper['steps'], paper['learning_rate'], paper['adam_eps'])
            == (4, .05, 512, 390, 3e-6, 1e-5))
