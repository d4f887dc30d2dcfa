"""RRHF: its loss against loops in float64, candidates from anywhere, whole runs."""
import itertools
import math

import numpy as np
import pytest
import torch

import tiny
from alpaca_farm import rrhf
from alpaca_farm.core.data.records import (LISTS, select_candidates)
from alpaca_farm.core.model.models import load_policy, logprobs
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.runs import read_log, read_summary, Run
from alpaca_farm.core.data.text import collate, decode, encode_responses
from alpaca_farm.rrhf import rrhf_batch, rrhf_loss, rrhf_step, RRHFConfig
from tiny import randn, write

torch.set_num_threads(1)


def config(base, **more): return RRHFConfig(**tiny.settings('rrhf', base) | more)


def brute(p, r, reduction):
    "Equation 2, pair by pair, for one query."
    pairs = itertools.permutations(range(len(p)), 2)
    costs = [max(0., p[i] - p[j]) for i, j in pairs if r[i] < r[j]]
    return sum(costs)/(max(1, len(costs)) if reduction == 'mean' else 1)


@pytest.mark.parametrize('reduction', ['sum', 'mean'])
@pytest.mark.parametrize('ties', [False, True])
def test_rank_loss(reduction, ties):
    p = randn(7, 6)
    r = randn(7, 6, seed=1)
    sizes = [6, 1, 2, 5, 6, 3, 4]
    if ties:
        r = r.round()
    mask = torch.tensor([[i < n for i in range(6)] for n in sizes])
    want = [brute(a[:n], b[:n], reduction) for a, b, n in zip(p.tolist(), r.tolist(), sizes)]
    wanted = torch.tensor(want, dtype=torch.float64)
    for hidden in (0., 1e6, float('nan'), float('inf')):  # what the mask hides does not matter
        found = rrhf_loss(p.masked_fill(~mask, hidden), r.masked_fill(~mask, 7.), mask, reduction)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert want[1] == 0
    assert sum(want) > 0
    order = torch.randperm(6)
    again = rrhf_loss(p[:, order], r[:, order], mask[:, order], reduction)
    torch.testing.assert_close(again, found)


@pytest.fixture(scope='module')
def some(base, models):
    "Twelve queries of two or three scored candidates, their prompts, and a configuration."
    cfg = config(base)
    rng = np.random.default_rng(0)
    loaded, left_out = rrhf._load_queries(Run(cfg, dict(settings={})), models.tokenizer)
    queries, prompts = zip(*loaded)
    queries = [select_candidates(q, [0, 1] if i % 3 else range(len(q['output'])))
               for i, q in enumerate(queries[:12])]
    assert left_out < 10
    assert {len(q['output']) for q in queries} == {2, 3}
    # a small reward model's scores are mostly the policy's own likelihoods, all in order
    queries = [dict(q, scores=rng.normal(size=len(q['output'])).tolist()) for q in queries]
    return queries, prompts[:12], cfg


@pytest.fixture(scope='module')
def policy(base, models): return load_policy(str(base/'sft'), models.cfg)


@torch.no_grad()
def by_hand(policy, models, query, prompt, cfg):
    "One query's losses, each candidate read alone, and divided by its own length."
    tokens = rrhf._candidate_tokens(query, models.tokenizer)
    sums = [logprobs(policy, collate([prompt], [ids], 0)).sum().item() for ids in tokens]
    p = [s/len(ids)**cfg.length_penalty for s, ids in zip(sums, tokens)]
    best = query['scores'].index(max(query['scores']))
    return dict(rank=brute(p, query['scores'], cfg.rank_reduction), nll=-sums[best])


@pytest.mark.parametrize('more', [
    {}, dict(rank_reduction='sum', length_penalty=0.),
    dict(length_penalty=.5, rrhf_weight=.5)], ids=str)
def test_step_is_every_candidate_read_alone(base, models, some, more):
    "Ragged k, batches of any size, any padding: the same losses."
    (queries, prompts, _), cfg = some, config(base, **more)
    want = [by_hand(models.policy, models, q, p, cfg) for q, p in zip(queries, prompts)]
    whole = rrhf_batch([*zip(queries, prompts)], models.tokenizer)
    pad = torch.nn.functional.pad
    wider = {k: pad(v, (0, 9)) if v.ndim == 3 else v for k, v in whole.items()}
    def room(v): return (0, 0)*(v.ndim - 2) + (0, 2)
    wider = {k: pad(v, room(v)) if v.ndim > 1 else v for k, v in wider.items()}
    for batch in (whole, wider):
        found = rrhf_step(models.policy, batch, cfg)
        for name in ('rank', 'nll'):
            each = torch.tensor([w[name] for w in want])
            torch.testing.assert_close(found[name].float(), each, rtol=1e-4, atol=1e-4)
        total = cfg.rrhf_weight*found['rank'] + found['nll']
        torch.testing.assert_close(found['loss'], total)
    assert found['rank'].max() > 0
    assert ((0 <= found['accuracy']) & (found['accuracy'] <= 1)).all()


def run(base, out, **more):
    rrhf.train(config(base, out=str(out), **more))
    return read_log(out), read_summary(out)


def test_a_run_begins_with_the_losses_of_its_first_batch(base, models, tmp_path):
    (log, summary), cfg = run(base, tmp_path/'rrhf'), config(base)
    policy = load_policy(str(base/'sft'), models.cfg)
    queries, prompts = zip(*rrhf._load_queries(Run(cfg, dict(settings={})), models.tokenizer)[0])
    pool = read_json(tmp_path/'rrhf'/'candidates.json')
    assert [q['output'] for q in pool] == [q['output'] for q in queries]
    tokens = [rrhf._candidate_tokens(q, models.tokenizer) for q in queries]
    longest = [len(p) + max(map(len, ts)) for p, ts in zip(prompts, tokens)]
    rows = rrhf.batches(longest, cfg.batch_size, cfg.epochs, cfg.seed)[0]
    want = [by_hand(policy, models, pool[i], prompts[i], cfg) for i in rows]
    for name in ('rank', 'nll'):
        mean = sum(w[name] for w in want)/len(want)
        assert log[0][name] == pytest.approx(mean, rel=1e-3)
    assert log[0]['loss'] == pytest.approx(log[0]['rank'] + log[0]['nll'], rel=1e-5)
    assert {'kl', 'length', 'ended', 'reward', 'perplexity', 'sample_std'} <= set(summary)
    assert summary['labels'] == read_summary(base/'reward_model')['labels']
    assert summary['sample_mean'] < summary['sample_max']
    assert summary['queries'] == len(pool)


def brevity(records): return [-float(len(r['output'].split())) for r in records]


@pytest.mark.slow
def test_ranks_are_learned(base, tmp_path):
    "By heart: pairs come into order. Imitation holds the likelihood of the best."
    rows = read_json(base/'world'/'sft.json')
    file = tmp_path/'pairs.json'
    pairs = [dict(r, output_1=r['output'], output_2=s['output'], preference=1 + i % 2)
             for i, (r, s) in enumerate(zip(rows, rows[1:])) if brevity([r]) != brevity([s])]
    more = dict(candidates=write(file, pairs), max_instances=8, epochs=40, learning_rate=2e-3,
                eval_split='', reward_model='test_rrhf:brevity')
    ranked, _ = run(base, tmp_path/'ranked', rrhf_weight=1e4, **more)
    both, _ = run(base, tmp_path/'both', rrhf_weight=10., **more)
    assert ranked[0]['accuracy'] < .8
    assert ranked[-1]['accuracy'] > .95
    assert ranked[-1]['rank'] < .01
    assert both[-1]['accuracy'] > .9
    assert both[-1]['nll'] < min(both[0]['nll'], ranked[-1]['nll'])


def pools(folder, *steps):
    names = ['candidates.json', *(f'candidates-{s}.json' for s in steps)]
    assert sorted(p.name for p in folder.glob('candidates*')) == sorted(names)
    return [read_json(folder/name) for name in names]


def test_new_candidates_are_of_the_policy_as_it_has_become(base, tmp_path):
    run(base, tmp_path/'a', n=2, k=5, epochs=2, refresh_every=2, max_instances=16, eval_split='')
    first, second = pools(tmp_path/'a', 2)
    of = lambda pool, own: [t for q in pool for t, s in zip(q['output'], q['source'])
                            if (s == 'policy') == own]
    assert len(of(first, True)) > 20
    assert not set(of(first, True)) & set(of(second, True))
    assert set(of(first, False)) == set(of(second, False))
    assert all(q['source'].index('policy') == 0 and len(q['output']) == 5 for q in first)


def test_online_is_refreshed_within_an_epoch(base, tmp_path):
    log, _ = run(base, tmp_path/'a', candidates='', n=3, k=3, refresh_every=2, max_instances=40,
                 eval_split='', missing_eos='')
    found = pools(tmp_path/'a', 2, 4)
    assert len(log) == 5 and [len(p) for p in found] == [16, 16, 8]  # of the coming steps alone
    assert {s for p in found for q in p for s in q['source']} == {'policy'}


@pytest.mark.parametrize('decoding, groups', [('sample', 1), ('beam', 1), ('beam', 4)])
def test_own_candidates(base, models, decoding, groups):
    "Temperature matters where it is said to, and groups are different answers."
    def drawn(**more):
        cfg = config(base, n=4, decoding=decoding, groups=groups, **more)
        given = models.policy, [{}]*6, models.prompts[:6]
        return [d['output'] for d in rrhf._add_own_candidates(*given, cfg, 0)]
    plain = drawn()
    assert all(len(x) == 4 for x in plain)
    assert sum(len(set(x)) for x in plain) > 18
    assert (drawn(temperature=.5) == plain) == (decoding != 'sample')
    if groups > 1:
        assert all(len(set(x)) == 1 for x in drawn(diversity_penalty=0.))


def test_own_samples_are_learned_from_as_drawn(base, models, tmp_path):
    "Their tokens are kept, not those that their text is encoded to."
    run(base, tmp_path/'a', n=2, max_instances=16, eval_split='', temperature=1.5)
    anew = 0
    for q in read_json(tmp_path/'a'/'candidates.json'):
        own = [decode(t, models.tokenizer) for t in q['tokens']]
        assert len(own) == q['source'].count('policy')
        assert own == q['output'][:len(own)]
        ids = encode_responses(own, models.tokenizer, q['ended'][:len(own)])
        batch = rrhf_batch([(q, [5]*4)], models.tokenizer)
        for k, drawn in enumerate(q['tokens']):
            assert batch['ids'][0, k][batch['response'][0, k].bool()].tolist() == drawn
            anew += drawn != ids[k]
    assert anew > 0


@pytest.mark.parametrize('size, steps', [(1, range(1, 17)), (8, (1, 2))])
def test_queries_with_one_candidate_are_left_out(base, tmp_path, monkeypatch, size, steps):
    "Where all that was drawn is the same: counted, and not imitated; a step may have no other."
    draw = rrhf._add_own_candidates
    batch = rrhf.rrhf_batch
    shown = []
    def equal(*args):
        def twice(q): return q | {k: q[k][:1]*2 for k in (*LISTS, 'tokens')}
        return [twice(q) if i % 2 else q for i, q in enumerate(draw(*args))]
    def watched(queries, *args): return shown.extend(queries) or batch(queries, *args)
    monkeypatch.setattr(rrhf, '_add_own_candidates', equal)
    monkeypatch.setattr(rrhf, 'rrhf_batch', watched)
    log, summary = run(base, tmp_path/'a', batch_size=size, candidates='', n=2, k=2,
                       max_instances=16, eval_split='', missing_eos='')
    pool = read_json(tmp_path/'a'/'candidates.json')
    assert summary['single'] == sum(len(q['output']) == 1 for q in pool) >= 8
    assert {len(q['output']) for q, _ in shown} == {2}
    assert len(shown) == 16 - summary['single']
    assert [r['step'] for r in log] == list(steps)   # a skipped step too
    assert sum('loss' in r for r in log) == (len(shown) if size == 1 else 2)


def test_perplexity(models):
    "Text by itself after the start token; newlines are spaces, nothing is one space."
    texts = ['A snail can hide.', 'Good luck!', 'Go.\nGo.', '']
    tokenizer = models.tokenizer
    for text, ppl in zip(texts, rrhf.perplexities(models.policy, texts)):
        shown = text.replace('\n', ' ') or ' '
        ids = [tokenizer.bos_token_id, *tokenizer(shown, add_special_tokens=False)['input_ids']]
        with torch.no_grad():
            logits = models.policy.model(torch.tensor([ids])).logits[0]
        logp = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        assert ppl == pytest.approx(math.exp(-logp.mean().item()), rel=1e-4)
