"""RRHF: its loss against loops in float64, candidates from anywhere, and the defects of the released code, each shut out."""
import itertools
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny
from alpaca_farm import rrhf
from alpaca_farm.core.data.candidates import LISTS, merge_candidates, read_candidates, select_candidates, to_rrhf, write_rrhf
from alpaca_farm.core.data.formats import as_records, default_sources
from alpaca_farm.core.model.models import load_policy, logprobs
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.runs import read_log, read_summary
from alpaca_farm.core.data.text import collate, decode, encode_prompts, encode_responses
from alpaca_farm.rrhf import imitation_weights, rrhf_batch, rrhf_loss, rrhf_step, RRHFConfig

torch.set_num_threads(1)


def randn(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def brute(p, r, reduction):
    "Equation 2, pair by pair, for one query."
    costs = [max(0., p[i] - p[j]) for i, j in itertools.permutations(range(len(p)), 2) if r[i] < r[j]]
    return sum(costs)/(max(1, len(costs)) if reduction == 'mean' else 1)


@pytest.mark.parametrize('reduction', ['sum', 'mean'])
@pytest.mark.parametrize('ties', [False, True])
def test_rank_loss(reduction, ties):
    p, r, sizes = randn(7, 6), randn(7, 6, seed=1), [6, 1, 2, 5, 6, 3, 4]
    if ties: r = r.round()
    mask = torch.tensor([[i < n for i in range(6)] for n in sizes])
    want = [brute(a[:n], b[:n], reduction) for a, b, n in zip(p.tolist(), r.tolist(), sizes)]
    for hidden in (0., 1e6, float('nan'), float('inf')):  # what the mask hides does not matter
        found = rrhf_loss(p.masked_fill(~mask, hidden), r.masked_fill(~mask, 7.), mask, reduction)
        torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert want[1] == 0 and sum(want) > 0
    order = torch.randperm(6)
    torch.testing.assert_close(rrhf_loss(p[:, order], r[:, order], mask[:, order], reduction), found)


def test_rank_loss_by_hand_and_its_gradient():
    p = torch.tensor([[-1., -2., -4., -3.]], requires_grad=True)
    r = torch.tensor([[1., 2., 3., 4.]])  # differences 1, 3, 2, 2, 1, and one pair that is right
    every = torch.ones(1, 4, dtype=torch.bool)
    assert rrhf_loss(p, r, every).tolist() == [9.] and rrhf_loss(p, r, every, 'mean').tolist() == [1.5]
    rrhf_loss(p, r, every).sum().backward()
    assert p.grad.tolist() == [[3., 1., -2., -2.]]  # the worst falls, the best rise


def test_ties_cost_nothing_and_their_best_is_a_setting():
    scores, lengths = [2., 5., 5., 5.], [9, 4, 6, 5]
    share = lambda ties, u=0.: imitation_weights(scores, lengths, ties, u)
    assert share('first') == [0, 1, 0, 0] and share('longest') == [0, 0, 1, 0] and share('skip') == [0]*4
    assert share('average') == [0, 1/3, 1/3, 1/3]
    assert [share('random', u) for u in (0., .4, .99)] == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    for ties in ('first', 'random', 'longest', 'average', 'skip'): assert imitation_weights([1., 3., 2.], [1]*3, ties, .9) == [0, 1, 0]


# --- batches ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def some(base, models):
    "Twelve queries of two or three scored candidates, their prompts, and a configuration."
    cfg = RRHFConfig(**tiny.settings('rrhf', base))
    queries, prompts, left_out = rrhf.load_queries(cfg, models.tokenizer)
    queries = [select_candidates(q, [0, 1] if i % 3 else range(len(q['output']))) for i, q in enumerate(queries[:12])]
    assert left_out < 10 and {len(q['output']) for q in queries} == {2, 3}
    rng = np.random.default_rng(0)   # a small reward model's scores are mostly the policy's own likelihoods, all in order
    return [dict(q, scores=rng.normal(size=len(q['output'])).tolist()) for q in queries], prompts[:12], cfg


@pytest.fixture(scope='module')
def policy(base, models): return load_policy(str(base/'sft'), models.cfg)[0]


@torch.no_grad()
def by_hand(policy, models, query, prompt, cfg):
    "One query's losses, each candidate read alone."
    tokens = rrhf.candidate_tokens(query, models.tokenizer)
    sums = [logprobs(policy, collate([prompt], [ids], 0)).sum().item() for ids in tokens]
    p = [s/len(ids)**(cfg.length_penalty if cfg.length_norm == 'power' else cfg.length_norm == 'token') for s, ids in zip(sums, tokens)]
    best = query['scores'].index(max(query['scores']))
    nll = -sums[best]/(len(tokens[best]) if cfg.sft_reduction == 'token_mean' else 1)
    return dict(rank=brute(p, query['scores'], cfg.rank_reduction), nll=nll)


@pytest.mark.parametrize('more', [{}, dict(rank_reduction='sum', sft_reduction='token_mean'), dict(length_norm='none', rrhf_weight=.5),
                                  dict(length_norm='power', length_penalty=.5, sft_weight=3.)], ids=str)
def test_step_is_every_candidate_read_alone(base, models, some, more):
    "Ragged k, batches of any size, any padding: the same losses."
    queries, prompts, _ = some
    cfg = RRHFConfig(**tiny.settings('rrhf', base, **more))
    want = [by_hand(models.policy, models, q, p, cfg) for q, p in zip(queries, prompts)]
    whole = rrhf_batch(queries, prompts, models.tokenizer, cfg)
    wider = {k: torch.nn.functional.pad(v, (0, 9)) if v.ndim == 3 else v for k, v in whole.items()}
    wider = {k: torch.nn.functional.pad(v, (0, 0)*(v.ndim - 2) + (0, 2)) if v.ndim > 1 else v for k, v in wider.items()}
    for batch in (whole, wider):
        found = rrhf_step(models.policy, batch, cfg)
        for name in ('rank', 'nll'): torch.testing.assert_close(found[name].double(), torch.tensor([w[name] for w in want]).double(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found['loss'], cfg.rrhf_weight*found['rank'] + cfg.sft_weight*found['nll'])
    assert found['rank'].max() > 0 and ((0 <= found['accuracy']) & (found['accuracy'] <= 1)).all()


def test_gradients_do_not_depend_on_company(models, some):
    queries, prompts, cfg = some
    def gradient(rows):
        models.policy.zero_grad()
        rrhf_step(models.policy, rrhf_batch([queries[i] for i in rows], [prompts[i] for i in rows], models.tokenizer, cfg), cfg)['loss'].sum().backward()
        return torch.cat([p.grad.flatten() for p in models.policy.parameters()])
    together, apart = gradient(range(6)), sum(gradient([i]) for i in range(6))
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4*apart.abs().max().item())
    models.policy.zero_grad()


def test_rows_are_prompt_response_eos_and_nothing_else(models, some):
    "Defect 7: no special token between query and response; EOS once, at the end, and only where the answer has ended."
    queries, prompts, cfg = some
    queries = [dict(queries[0], ended=[True, False, True][:len(queries[0]['ended'])]), *queries[1:]]
    batch = rrhf_batch(queries, prompts, models.tokenizer, cfg)
    eos, special = models.tokenizer.eos_token_id, set(models.tokenizer.all_special_ids)
    for b, (q, p) in enumerate(zip(queries, prompts)):
        assert batch['present'][b].sum() == len(q['output'])
        for c, (text, ended) in enumerate(zip(q['output'], q['ended'])):
            ids, on = batch['ids'][b, c], batch['response'][b, c].bool()
            assert ids[:len(p)].tolist() == p and not on[:len(p)].any() and batch['mask'][b, c].sum() == len(p) + on.sum()
            answer = ids[on].tolist()
            assert (answer[-1] == eos) == ended and not special & set(answer[:-1] if ended else answer)
            assert models.tokenizer.decode(answer, skip_special_tokens=True) == text


def test_nothing_is_longer_than_allowed(base, models, capsys):
    "Defect 6: prompt and response are within max_length; nothing is cut, and what is left out is counted."
    given = tiny.settings('rrhf', base)
    free, lengths = RRHFConfig(**given), []
    for q, p in zip(*rrhf.load_queries(free, models.tokenizer)[:2]): lengths += [len(p) + len(ids) for ids in rrhf.candidate_tokens(q, models.tokenizer)]
    limit = sorted(lengths)[len(lengths)//2]
    cfg = RRHFConfig(**given | dict(max_length=limit))
    queries, prompts, left_out = rrhf.load_queries(cfg, models.tokenizer)
    sizes = [len(p) + len(ids) for q, p in zip(queries, prompts) for ids in rrhf.candidate_tokens(q, models.tokenizer)]
    assert max(sizes) <= limit and left_out == 60 - len(queries) > 0 and 'left out' in capsys.readouterr().out
    texts = {t for q in merge_candidates(cfg.candidates) for t in q['output']}
    assert all(set(q['output']) <= texts and len(q['output']) > 1 for q in queries)
    with pytest.raises(ValueError, match='two different candidates within max_length = 12'):
        rrhf.load_queries(RRHFConfig(**given | dict(max_length=12)), models.tokenizer)


# --- candidates ------------------------------------------------------------------------------------------------------------------

def write(path, rows, lines=False):
    path.write_text('\n'.join(map(json.dumps, rows)) + '\n' if lines else json.dumps(rows))
    return str(path)


ROWS = [dict(query='\n\nHuman: Hi\n\nAssistant:', responses=['Yes?', 'Hello.', 'Hi!', 'No.'], scores=[.1, .3, .9, -2]),
        dict(query='Name a colour.\nA dark one.', responses=['Blue\u2028.', 'Red.'], scores=[2, 1], origin_scores=[[5, 5], [1, 2]])]


def test_rrhf_files_round_trip(tmp_path):
    for name in ('train_data.json', 'train_data.jsonl'):  # theirs are JSON lines under the name .json
        found = read_candidates(write(tmp_path/name, ROWS, lines=True))
        assert found[0]['messages'] == [dict(role='user', content='Hi')] and found[1]['instruction'] == ROWS[1]['query']
        assert found[0]['source'] == ['sample', 'sample', 'chosen', 'rejected'] and found[1]['source'] == ['chosen', 'rejected']
        assert found[1]['origin_scores'] == ROWS[1]['origin_scores']
        write_rrhf(tmp_path/'again.json', found)
        again = [json.loads(l) for l in (tmp_path/'again.json').read_text(encoding='utf-8').rstrip('\n').split('\n')]
        assert [{k: v for k, v in r.items() if k != 'ended'} for r in again] == ROWS
        assert read_candidates(str(tmp_path/'again.json')) == found
    ours = dict(instruction='Sort.', input='3 1 2', output=['1 2 3', 'no', '1'], source=['chosen', 'rejected', 'gpt'], scores=[3., 1., 2.],
                ended=[True, True, False], difficulty=4)
    row = to_rrhf(ours)
    assert row['query'] == 'Sort.\n3 1 2' and row['responses'] == ['1', '1 2 3', 'no'] and row['scores'] == [2., 3., 1.]
    back, = as_records([row], 'a.json', ['candidates'])
    order = [2, 0, 1]
    assert back == ours | {k: [ours[k][i] for i in order] for k in LISTS}
    assert [default_sources(n) for n in (1, 2, 3)] == [['sample'], ['chosen', 'rejected'], ['sample', 'chosen', 'rejected']]


def test_sources_are_views(tmp_path):
    path = write(tmp_path/'a.json', ROWS, lines=True)
    assert [q['output'] for q in merge_candidates(path, ['chosen', 'rejected'])] == [['Hi!', 'No.'], ['Blue\u2028.', 'Red.']]
    assert [q['output'] for q in merge_candidates(path, ['sample'])] == [['Yes?', 'Hello.'], []]
    with pytest.raises(ValueError, match="sources = 'gpt': the candidates are from chosen, rejected, sample"): merge_candidates(path, ['gpt'])


def test_kinds_are_merged_by_instruction(tmp_path):
    ask = dict(instruction='Greet me.', input='')
    specs = [write(tmp_path/'mine.json', [dict(ask, output=['Hello!', 'Go'], ended=[True, False])]),
             write(tmp_path/'gpt.json', [dict(ask, output='Hail.', generator='gpt'), dict(instruction='Bye.', output='Bye.')]),
             write(tmp_path/'pairs.jsonl', [dict(ask, output_1='Hm.', output_2='Good day!', preference=1.8)], lines=True),
             write(tmp_path/'trl.json', [dict(prompt='Greet me.', chosen='Servus.', rejected='Bah.')])]
    first, second = merge_candidates(specs)
    assert first['output'] == ['Hello!', 'Go', 'Hail.', 'Good day!', 'Hm.', 'Servus.', 'Bah.']
    assert first['source'] == ['mine', 'mine', 'gpt', 'chosen', 'rejected', 'chosen', 'rejected']
    assert first['scores'][:3] == [None]*3 and first['scores'][3:] == pytest.approx([.8, .2, 1., 0.])
    assert first['ended'] == [True, False] + [True]*5 and second['output'] == ['Bye.'] and second['source'] == ['gpt']
    folder = tmp_path/'run'; folder.mkdir()
    write(folder/'outputs.json', [dict(ask, output='a')])
    assert read_candidates(str(folder))[0]['output'] == ['a']
    write(folder/'candidates.json', [dict(ask, output=['a', 'b'])])
    assert read_candidates(str(folder))[0]['output'] == ['a', 'b']


@pytest.mark.parametrize('rows, message', [
    ([dict(query='x', responses='y')], 'row 0: `responses` is not a list'),
    ([dict(query='x', responses=['y', 'z'], scores=[1.])], "row 0: 'scores' has not one value for each of 2 answers"),
    ([dict(query='x', responses=['y', 3])], "row 0: the field 'output' is"), ([], 'holds no records'),
    ([dict(prompt='x', chosen='y', rejected='z'), dict(prompt='x')], "row 1: the field 'output_1' is missing"),
    ([dict(instruction='x', output=['y', 'z'], ended=True)], "row 0: 'ended' has not one value"), ([1], 'a record is expected')])
def test_bad_files(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message): read_candidates(write(tmp_path/'bad.json', rows))


def test_the_first_k_different_ones(base, models):
    cfg = RRHFConfig(**tiny.settings('rrhf', base, k=3))
    query = dict(output=['a b', 'c', 'a b', '', 'd', 'e'], source=list('123456'), scores=[None]*6, ended=[True, True, True, False, True, True])
    found = rrhf.limit_candidates(query, [5]*4, models.tokenizer, cfg)
    assert found['output'] == ['a b', 'c', 'd'] and found['source'] == ['1', '2', '5']  # an empty answer that never ended is none


# --- scores ----------------------------------------------------------------------------------------------------------------------

def longer(pairs): return [1.5 if len(p['output_1']) == len(p['output_2']) else 1. + (len(p['output_2']) > len(p['output_1'])) for p in pairs]


def first_is_better(pairs): return [1.2]*len(pairs)


def not_a_number(records): return [float('nan')]*len(records)


def indifferent(records): return [3.]*len(records)


def test_scores_by_an_annotator():
    ask = [dict(instruction=i, output=o) for i, o in (('x', 'aaa'), ('y', 'b'), ('x', 'a'), ('x', 'aa'), ('y', 'bb'))]
    assert rrhf.comparison_scores(longer, ask) == [1., 0., 0., .5, 1.]
    assert rrhf.comparison_scores(first_is_better, ask) == pytest.approx([.5]*5)  # a taste for a place cancels


@pytest.mark.parametrize('more, error, message', [
    (dict(k=1), ValueError, 'k = 1: it must be at least 2'), (dict(n=7), ValueError, 'n = 7: it must be between 0 and 4'),
    (dict(candidates='', n=1), ValueError, 'no candidates: a query needs two'), (dict(rounds=2), ValueError, 'set n'),
    (dict(refresh_every=3), ValueError, 'set n'), (dict(decoding='beam'), ValueError, 'is for n > 0'),
    (dict(n=3, decoding='diverse_beam'), ValueError, 'n = 3 beams cannot be split into groups = 4'),
    (dict(n=2, temperature=0), ValueError, 'temperature = 0 draws the same answer'), (dict(kl_coef=.1), ValueError, 'kl_coef needs rounds'),
    (dict(annotators='alpaca_farm.world:pool'), ValueError, 'both reward_model and annotators are named'),
    (dict(reward_model='', n=2), ValueError, 'answers have no scores'), (dict(rrhf_weight=0, sft_weight=0), ValueError, 'nothing to learn'),
    (dict(ties='best'), ValueError, "ties = 'best': choose from"), (dict(length_norm='char'), ValueError, 'length_norm'),
    (dict(rank_reduction='avg'), ValueError, 'rank_reduction'), (dict(decoding='diverse'), ValueError, "Did you mean 'diverse_beam'"),
    (dict(rrhf_weight=-1), ValueError, 'rrhf_weight = -1'), (dict(candidates='no/such/file.json'), FileNotFoundError, 'no/such/file.json'),
    (dict(epochs=0), ValueError, 'epochs = 0'), (dict(length_penalty=-1), ValueError, 'length_penalty'),
    (dict(length_penalty=.5), ValueError, 'length_penalty = 0.5 has an effect only with length_norm = power'),
    (dict(n=2, groups=2), ValueError, 'groups = 2 has an effect only with decoding = diverse_beam'), (dict(top_p=.9), ValueError, 'top_p = 0.9'),
    (dict(candidates='', n=4, sources=['policy']), ValueError, r"sources = \['policy'\] has an effect only on candidates")], ids=str)
def test_bad_settings(base, more, error, message):
    with pytest.raises(error, match=message): RRHFConfig(**tiny.settings('rrhf', base) | more)


@pytest.mark.parametrize('more, message', [
    (dict(reward_model=''), 'its score is None'), (dict(sources=['gpt']), "sources = 'gpt'"),
    (dict(reward_model='test_rrhf:not_a_number'), 'gave a score that is not a finite number'),
    (dict(reward_model='', annotators='test_rrhf:not_a_number'), 'its score is nan'), (dict(reward_model='test_rrhf:indifferent', missing_eos=''), 'nothing to rank')], ids=str)
def test_what_cannot_be_learned_from(base, tmp_path, more, message):
    cfg = RRHFConfig(**tiny.settings('rrhf', base, out=str(tmp_path/'rrhf')) | more)
    with pytest.raises(ValueError, match=message): rrhf.train(cfg)
    assert not (tmp_path/'rrhf'/'candidates.json').exists() and not read_summary(tmp_path/'rrhf')


# --- runs ------------------------------------------------------------------------------------------------------------------------

def run(base, out, **more):
    cfg = RRHFConfig(**tiny.settings('rrhf', base, out=str(out)) | more)
    rrhf.train(cfg)
    return read_log(out), read_summary(out)


def test_a_run_begins_with_the_losses_of_its_first_batch(base, models, policy, tmp_path):
    log, summary = run(base, tmp_path/'rrhf')
    cfg = RRHFConfig(**tiny.settings('rrhf', base))
    assert cfg.rrhf_weight == cfg.sft_weight == 1
    queries, prompts, _ = rrhf.load_queries(cfg, models.tokenizer)
    pool = read_json(tmp_path/'rrhf'/'candidates.json')
    assert [q['output'] for q in pool] == [q['output'] for q in queries] and all('samples' in q['source'] for q in pool)
    longest = [len(p) + max(len(ids) for ids in rrhf.candidate_tokens(q, models.tokenizer)) for q, p in zip(queries, prompts)]
    rows = rrhf.batches(longest, cfg.batch_size, cfg.epochs, cfg.seed)[0]
    want = [by_hand(policy, models, pool[i], prompts[i], cfg) for i in rows]
    for name in ('rank', 'nll'): assert log[0][name] == pytest.approx(sum(w[name] for w in want)/len(want), rel=1e-3)
    assert log[0]['loss'] == pytest.approx(log[0]['rank'] + log[0]['nll'], rel=1e-5)  # both are logged
    keys = {'labels', 'kl', 'length', 'ended', 'reward', 'perplexity', 'perplexity_median', 'accuracy', 'sample_mean', 'sample_std', 'sample_max'}
    assert keys <= set(summary) and summary['labels'] == read_summary(base/'reward_model')['labels']
    assert summary['sample_mean'] < summary['sample_max'] and summary['queries'] == len(pool)


def test_accumulation(base, tmp_path):
    "A batch of 8 at once, one query at a time, and in threes: the same losses and weights."
    more = dict(max_instances=24, eval_split='', adam_eps=1e-4, n=2, rank_reduction='sum')
    logs, weights = [], []
    for micro in (0, 1, 3):
        logs.append(run(base, tmp_path/f'{micro}', micro_batch_size=micro, **more)[0])
        weights.append(load_file(tmp_path/f'{micro}'/'model'/'model.safetensors'))
    for log, w in zip(logs[1:], weights[1:]):
        for a, b in zip(log, logs[0]):
            for name in ('loss', 'rank', 'nll', 'accuracy', 'grad_norm'): assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-4)
        assert max((w[k] - weights[0][k]).abs().max().item() for k in w) < 1e-4


def brevity(records): return [-float(len(r['output'].split())) for r in records]


def test_ranks_are_learned(base, tmp_path):
    "By heart, without imitation: pairs come into order. Ranking alone lets the likelihood of the best go; imitation holds it."
    rows = read_json(base/'world'/'sft.json')
    pairs = [dict(r, output_1=r['output'], output_2=s['output'], preference=1 + i % 2) for i, (r, s) in enumerate(zip(rows, rows[1:]))
             if len(r['output'].split()) != len(s['output'].split())]
    (tmp_path/'pairs.json').write_text(json.dumps(pairs))
    more = dict(candidates=str(tmp_path/'pairs.json'), max_instances=8, epochs=40, learning_rate=2e-3, eval_split='',
                reward_model='test_rrhf:brevity')
    ranked, _ = run(base, tmp_path/'ranked', sft_weight=0., **more)
    both, _ = run(base, tmp_path/'both', sft_weight=.3, **more)
    assert ranked[0]['accuracy'] < .8 and ranked[-1]['accuracy'] > .95 and ranked[-1]['rank'] < .01 and both[-1]['accuracy'] > .9
    assert both[-1]['nll'] < both[0]['nll'] and both[-1]['nll'] < ranked[-1]['nll']


def test_rounds_draw_from_the_policy_as_it_has_become(base, tmp_path):
    run(base, tmp_path/'a', n=2, k=5, rounds=2, max_instances=16, eval_split='')
    first, second = (read_json(tmp_path/'a'/name) for name in ('candidates.json', 'candidates-2.json'))
    own = lambda pool: [t for q in pool for t, s in zip(q['output'], q['source']) if s == 'policy']
    given = lambda pool: {t for q in pool for t, s in zip(q['output'], q['source']) if s != 'policy'}
    assert len(own(first)) > 20 and not set(own(first)) & set(own(second)) and given(first) == given(second)
    assert sorted(p.name for p in (tmp_path/'a').glob('candidates*')) == ['candidates-2.json', 'candidates.json']
    assert all(q['source'].index('policy') == 0 and len(q['output']) == 5 for q in first)


def test_online_is_refreshed_within_an_epoch(base, tmp_path):
    log, _ = run(base, tmp_path/'a', candidates='', n=3, k=3, refresh_every=2, max_instances=40, eval_split='', missing_eos='')
    assert len(log) == 5 and sorted(p.name for p in (tmp_path/'a').glob('candidates*')) == ['candidates-2.json', 'candidates-4.json', 'candidates.json']
    pools = [read_json(tmp_path/'a'/f'candidates{k}.json') for k in ('', '-2', '-4')]
    assert [len(p) for p in pools] == [16, 16, 8]  # the queries of the coming steps, and no others
    assert {s for p in pools for q in p for s in q['source']} == {'policy'}


def test_own_answers_have_space(base, models, tmp_path, capsys):
    "Queries whose prompt leaves no space for an answer are left out before any work."
    sizes = sorted(len(p) for p in rrhf.load_queries(RRHFConfig(**tiny.settings('rrhf', base, candidates='', n=2)), models.tokenizer)[1])
    more = dict(candidates='', n=2, k=2, eval_split='', missing_eos='', batch_size=4, micro_batch_size=1)
    log, summary = run(base, tmp_path/'a', max_length=sizes[len(sizes)//2] + 12, **more)
    assert summary['left_out'] == 60 - summary['queries'] > 0 and 'do not have space for max_new_tokens' in capsys.readouterr().out
    assert all(math.isfinite(r['loss']) for r in log) and all(q['output'] for q in read_json(tmp_path/'a'/'candidates.json'))
    with pytest.raises(ValueError, match='none of the 60 queries has'): run(base, tmp_path/'b', max_length=sizes[0] + 2, **more)


@pytest.mark.parametrize('decoding', ['sample', 'beam', 'diverse_beam'])
def test_own_candidates(base, models, decoding):
    "Defect 8: temperature matters where it is said to, and groups are different answers."
    prompts = models.prompts[:6]
    def drawn(**more):
        cfg = RRHFConfig(**tiny.settings('rrhf', base) | dict(n=4, decoding=decoding) | more)
        return [d['output'] for d in rrhf.policy_candidates(models.policy, models.tokenizer, [{}]*6, prompts, cfg, 0)]
    plain = drawn()
    assert all(len(x) == 4 for x in plain) and (drawn(temperature=.5) == plain) == (decoding != 'sample')
    assert sum(len(set(x)) for x in plain) > 18
    if decoding == 'diverse_beam': assert all(len(set(x)) == 1 for x in drawn(diversity_penalty=0.))


@pytest.mark.parametrize('shift', [0., -5., 5.])
def test_cut_off_answers_score_by_the_rule(base, shift):
    "`replace` ranks them last in any unit of reward; -1 would be the best where rewards are about -5."
    query = dict(instruction='x', output=['aaa', 'aa', 'a'], source=['policy']*3, scores=[None]*3, ended=[False, True, True])
    def scores(query, **more):
        cfg = RRHFConfig(**tiny.settings('rrhf', base, **more))
        score_of = lambda records: [len(r['output']) + shift for r in records]
        return rrhf.score_pool([query], score_of, cfg)[0]['scores']
    for rule, want in (('replace', [-1., 2., 1.]), ('subtract', [1., 2., 1.]), ('', [3., 2., 1.])):
        assert scores(query, missing_eos=rule, missing_eos_value=2.) == [w + shift for w in want]
    assert scores(query | dict(ended=[False]*3)) == [-1.]*3  # none whole: a tie


def test_own_samples_are_learned_from_as_drawn(base, models, policy, tmp_path):
    "Their tokens are kept, not those that their text is encoded to."
    letters = [models.tokenizer.convert_tokens_to_ids(c) for c in 'snail']
    query = dict(instruction='x', output=['snail', 'snail', 'Good luck!'], source=['policy', 'policy', 'gpt'], scores=[2., 2., 1.],
                 ended=[False, True, True], tokens=[letters, [*letters, 2]])
    assert models.tokenizer.decode(letters) == 'snail' and encode_responses(['snail'], models.tokenizer, ended=False) != [letters]
    cfg = RRHFConfig(**tiny.settings('rrhf', base))
    kept = rrhf.limit_candidates(query, [5]*4, models.tokenizer, cfg)
    assert kept['output'] == ['snail', 'Good luck!'] and kept['tokens'] == [letters]
    batch = rrhf_batch([kept], [[5]*4], models.tokenizer, cfg)
    assert batch['ids'][0, 0][batch['response'][0, 0].bool()].tolist() == letters
    run(base, tmp_path/'a', n=2, max_instances=16, eval_split='', temperature=1.5)
    for q in read_json(tmp_path/'a'/'candidates.json'):
        assert len(q['tokens']) == q['source'].count('policy') and [decode(t, models.tokenizer) for t in q['tokens']] == q['output'][:len(q['tokens'])]


def test_queries_with_one_candidate_are_left_out(base, tmp_path, monkeypatch):
    "Where all that was drawn is the same; counted, and not imitated."
    draw, batch, shown = rrhf.policy_candidates, rrhf.rrhf_batch, []
    monkeypatch.setattr(rrhf, 'policy_candidates', lambda *a: [{k: v[:1]*2 for k, v in d.items()} if i % 2 else d for i, d in enumerate(draw(*a))])
    monkeypatch.setattr(rrhf, 'rrhf_batch', lambda queries, *a: shown.extend(queries) or batch(queries, *a))
    more = dict(candidates='', n=2, k=2, max_instances=16, eval_split='', missing_eos='')
    for size in (1, 8):  # with 1 whole steps are
        shown.clear()
        log, summary = run(base, tmp_path/f'{size}', batch_size=size, **more)
        pool = read_json(tmp_path/f'{size}'/'candidates.json')
        assert summary['single'] == sum(len(q['output']) == 1 for q in pool) >= 8
        assert {len(q['output']) for q in shown} == {2} and len(shown) == 16 - summary['single']
        assert [r['step'] for r in log] == ([*range(1, 17)] if size == 1 else [1, 2])   # a step that was skipped has a row too: a resumed run wants all
        assert sum('loss' in r for r in log) == (len(shown) if size == 1 else 2)


def test_scores_of_the_files_and_of_annotators(base, tmp_path):
    "Preferences alone, as `only_use_provide`: two candidates a query; or everything, compared by an annotator."
    log, summary = run(base, tmp_path/'given', candidates=str(base/'annotators'), reward_model='', eval_split='')
    pool = read_json(tmp_path/'given'/'candidates.json')
    assert all(q['source'] == ['chosen', 'rejected'] and q['scores'][0] >= q['scores'][1] for q in pool)
    assert summary['labels'] == read_summary(base/'annotators')['labels'] and 'reward' not in summary
    log, summary = run(base, tmp_path/'asked', annotators='test_rrhf:longer', reward_model='', eval_split='', max_instances=20, missing_eos='')
    pool = read_json(tmp_path/'asked'/'candidates.json')
    assert all(q['scores'][0] > q['scores'][1] for q in pool if len(q['output'][0]) > len(q['output'][1]))
    assert summary['labels'] == sum(math.perm(len(q['output']), 2) for q in pool)  # both orders


def test_perplexity(models):
    "Text by itself after the start token; newlines are spaces, nothing is one space."
    texts = ['A snail can hide.', 'Good luck!', 'Go.\nGo.', '']
    found = rrhf.perplexities(models.policy, models.tokenizer, texts)
    with torch.no_grad():
        for text, ppl in zip(texts, found):
            ids = [models.tokenizer.bos_token_id, *models.tokenizer(text.replace('\n', ' ') or ' ', add_special_tokens=False)['input_ids']]
            logp = models.policy(torch.tensor([ids])).logits[0].log_softmax(-1)
            assert ppl == pytest.approx(math.exp(-sum(logp[t, ids[t + 1]].item() for t in range(len(ids) - 1))/(len(ids) - 1)), rel=1e-4)
    assert encode_prompts([dict(instruction='x')], models.tokenizer)  # the tokenizer is as it was
