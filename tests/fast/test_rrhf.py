"""RRHF: its step with each candidate read alone, candidates from anywhere, whole runs."""
import math
from itertools import permutations

import numpy as np
import pytest
import torch

import tiny
from alpaca_farm import rrhf
from alpaca_farm.data.records import LISTS
from alpaca_farm.data.text import collate, decode, encode_responses
from alpaca_farm.model.logprobs import load_policy, logprobs
from alpaca_farm.model.policy import Policy
from alpaca_farm.rrhf import rrhf_batch, rrhf_step, RRHFConfig
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_log, read_summary, Run
from tiny import write

torch.set_num_threads(1)


def config(base, **more): return RRHFConfig(**tiny.settings('rrhf', base) | more)


@torch.no_grad()
def by_hand(policy, query, prompt, cfg):
    "Equation 2 and 3 for one query, each candidate read alone and divided by its own length."
    sums = []
    means = []
    for ids in query['tokens']:
        sums.append(logprobs(policy, collate([prompt], [ids], 0)).sum().item())
        means.append(sums[-1]/len(ids)**cfg.length_penalty)
    scores = query['scores']
    leads = [means[i] - means[j] for i, j in permutations(range(len(means)), 2)
             if scores[i] < scores[j]]
    rank = sum(max(0., lead) for lead in leads)
    if cfg.rank_reduction == 'mean':
        rank /= max(1, len(leads))
    return dict(rank=rank, nll=-sums[scores.index(max(scores))])


@pytest.mark.parametrize('more', [
    {}, dict(rank_reduction='sum', length_penalty=0.),
    dict(length_penalty=.5, rrhf_weight=.5)], ids=str)
def test_step_is_every_candidate_read_alone(base, models, more):
    "Of two or three candidates of different lengths."
    rng = np.random.default_rng(0)
    queries = []
    for i, prompt in enumerate(models.prompts[:12]):
        k = 2 + i % 2
        tokens = [answer[:4 + 5*j] for j, answer in enumerate(models.answers[i:i + k])]
        scores = rng.normal(size=k).tolist()
        queries.append((dict(output=['']*k, tokens=tokens, ended=[True]*k, scores=scores), prompt))
    cfg = config(base, **more)
    found = rrhf_step(models.policy, rrhf_batch(queries, models.tokenizer), cfg)
    for i, (query, prompt) in enumerate(queries):
        want = by_hand(models.policy, query, prompt, cfg)
        for name, value in want.items():
            assert found[name][i].item() == pytest.approx(value, rel=1e-4, abs=1e-4)
    torch.testing.assert_close(found['loss'], cfg.rrhf_weight*found['rank'] + found['nll'])
    assert found['rank'].max() > 0


def run(base, out, **more):
    rrhf.train(config(base, out=str(out), **more))
    return read_log(out), read_summary(out)


def test_a_run_begins_with_the_losses_of_its_first_batch(base, models, tmp_path):
    log, summary = run(base, tmp_path/'rrhf')
    cfg = config(base)
    loaded, _ = rrhf._load_queries(Run(cfg, dict(settings={})), models.tokenizer, [])
    pool = read_json(tmp_path/'rrhf'/'candidates.json')
    assert [q['output'] for q in pool] == [q['output'] for q, _ in loaded]
    rows = rrhf._step_order(loaded, models.tokenizer, cfg)[0]
    first = rrhf_batch([(pool[i], loaded[i][1]) for i in rows], models.tokenizer)
    want = rrhf_step(load_policy(cfg.policy, models.cfg), first, cfg)
    for name in ('rank', 'nll'):
        assert log[0][name] == pytest.approx(want[name].mean().item(), rel=1e-3)
    assert {'kl', 'length', 'ended', 'reward', 'perplexity', 'sample_std'} <= set(summary)
    assert summary['labels'] == read_summary(base/'reward_model')['labels']
    assert summary['queries'] == len(pool)


def brevity(records): return [-float(len(r['output'].split())) for r in records]


@pytest.mark.slow
def test_ranks_are_learned(base, tmp_path):
    "By heart: pairs come into order."
    rows = read_json(base/'world'/'sft.json')
    pairs = []
    for i, (r, s) in enumerate(zip(rows, rows[1:])):
        if brevity([r]) != brevity([s]):
            pairs.append(dict(r, output_1=r['output'], output_2=s['output'], preference=1 + i % 2))
    more = dict(candidates=write(tmp_path/'pairs.json', pairs), max_instances=8, epochs=40,
                learning_rate=2e-3, eval_split='', reward_model='test_rrhf:brevity')
    log, _ = run(base, tmp_path/'ranked', rrhf_weight=1e4, **more)
    assert log[0]['accuracy'] < .8
    assert log[-1]['accuracy'] > .95
    assert log[-1]['rank'] < .01


def pools(folder, *steps):
    "The pools of candidates that a run has left: at first, and of some steps."
    names = ['candidates.json', *(f'candidates-{s}.json' for s in steps)]
    assert sorted(p.name for p in folder.glob('candidates*')) == sorted(names)
    return [read_json(folder/name) for name in names]


def texts(pool, own):
    "Candidates of the policy itself, or of the files."
    found = set()
    for query in pool:
        for text, source in zip(query['output'], query['source']):
            if (source == 'policy') == own:
                found.add(text)
    return found


def test_new_candidates_are_of_the_policy_as_it_has_become(base, tmp_path):
    run(base, tmp_path/'a', n=2, k=5, epochs=2, refresh_every=2, max_instances=16, eval_split='')
    first, second = pools(tmp_path/'a', 2)
    assert len(texts(first, True)) > 20
    assert not texts(first, True) & texts(second, True)
    assert texts(first, False) == texts(second, False)
    assert {len(q['output']) for q in first} == {5}


def test_online_is_refreshed_within_an_epoch(base, tmp_path):
    log, _ = run(base, tmp_path/'a', candidates='', n=3, k=3, refresh_every=2, max_instances=40,
                 eval_split='', missing_eos='')
    found = pools(tmp_path/'a', 2, 4)
    assert len(log) == 5
    assert [len(p) for p in found] == [16, 16, 8]   # of the coming steps alone
    assert not any(texts(p, False) for p in found)


@pytest.mark.parametrize('decoding, groups', [('sample', 1), ('beam', 1), ('beam', 4)])
def test_own_candidates(base, models, decoding, groups):
    "Temperature matters where it is said to, and groups are different answers."
    def drawn(**more):
        cfg = config(base, n=4, decoding=decoding, groups=groups, **more)
        made = rrhf._add_own_candidates(models.policy, [{}]*6, models.prompts[:6], cfg, 0)
        return [d['output'] for d in made]
    plain = drawn()
    assert {len(x) for x in plain} == {4}
    assert sum(len(set(x)) for x in plain) > 10
    assert (drawn(temperature=.5) == plain) == (decoding != 'sample')
    if groups > 1:
        assert {len(set(x)) for x in drawn(diversity_penalty=0.)} == {1}


def test_own_samples_are_learned_from_as_drawn(base, models, tmp_path):
    "Their tokens are kept, not those that their text is encoded to."
    run(base, tmp_path/'a', n=2, max_instances=16, eval_split='', temperature=1.5)
    anew = 0
    for query in read_json(tmp_path/'a'/'candidates.json'):
        own = [decode(t, models.tokenizer) for t in query['tokens']]
        assert len(own) == query['source'].count('policy')
        assert own == query['output'][:len(own)]
        encoded = encode_responses(own, models.tokenizer, query['ended'][:len(own)])
        anew += query['tokens'] != encoded
    assert anew > 0


@pytest.mark.parametrize('size, steps', [(1, range(1, 17)), (8, (1, 2))])
def test_queries_with_one_candidate_are_left_out(base, tmp_path, monkeypatch, size, steps):
    "Where all that was drawn is the same: counted, and not imitated; a step may have no other."
    draw = rrhf._add_own_candidates

    def every_second_alike(*given):
        made = draw(*given)
        for query in made[1::2]:
            for k in (*LISTS, 'tokens'):
                query[k] = query[k][:1]*2
        return made
    monkeypatch.setattr(rrhf, '_add_own_candidates', every_second_alike)
    log, summary = run(base, tmp_path/'a', batch_size=size, candidates='', n=2, k=2,
                       max_instances=16, eval_split='', missing_eos='')
    pool = read_json(tmp_path/'a'/'candidates.json')
    alone = sum(len(q['output']) == 1 for q in pool)
    assert summary['single'] == alone >= 8
    assert [r['step'] for r in log] == list(steps)   # a skipped step too
    assert sum('loss' in r for r in log) == (16 - alone if size == 1 else 2)


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


def test_perplexity_is_of_what_the_model_can_read():
    policy = Policy(tiny.family('gpt2', vocab_size=260), tiny.letters())
    text = 'ab'*100   # of 200 tokens; there are positions for 128 with the first one
    whole, cut = rrhf.perplexities(policy, [text, text[:127]])
    assert whole == pytest.approx(cut)
