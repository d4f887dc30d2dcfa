"Agreement of judges with people: formats, joins, coefficients, and published anchors where the data is at hand."
import csv, gzip, json, math

import numpy as np
import pytest

import tiny
from alpaca_farm import agreement as A
from alpaca_farm.annotators import swapped
from alpaca_farm.core.runs import read_json, read_summary
from alpaca_farm.core.stats import agreement
from judge_server import judge_server

DATA = tiny.ROOT.parent/'shared'/'data'
with_data = pytest.mark.skipif(not DATA.is_dir(), reason='the public data is not here')
CFG = A.AgreementConfig()


def on(sets, judges, unanswered='tie', **more):
    sets = A.named_sets([str(DATA/s) for s in sets])
    table = A.board(sets, A.judged_by([str(DATA/j) for j in judges], sets, CFG), unanswered, **(dict(draws=20) | more))
    return sets, table.set_index(['set', 'judge'])


@with_data
def test_pandalm():
    sets, table = on(['pandalm/testset-v1.json'], ['pandalm/gpt-3.5-turbo-testset-v1.json'])
    r = table.loc['testset-v1', 'gpt-3.5-turbo-testset-v1']
    assert (r.n, r.n_decided, r.unanswered) == (999, 894, 25)
    assert r.accuracy == pytest.approx(.711, abs=5e-4) and r.decided == pytest.approx(.774, abs=5e-4)
    people = A.between(sets['testset-v1'], draws=20)
    assert [round(v.value, 3) for v in people.values()] == [.913, .929, .918] and all(v.low < v.value < v.high for v in people.values())


@with_data
def test_pandalm_without_what_could_not_be_read():
    "The published number counts 25 unreadable answers as ties; left out, as everywhere here, it is another."
    _, table = on(['pandalm/testset-v1.json'], ['pandalm/gpt-3.5-turbo-testset-v1.json'], 'out')
    r = table.loc['testset-v1', 'gpt-3.5-turbo-testset-v1']
    assert round(r.accuracy, 3) == .716 and round(r.decided, 3) == .785 and r.accuracy_low < r.accuracy < r.accuracy_high


@with_data
def test_llmbar():
    _, table = on(['llmbar/LLMBar_Natural.json', 'llmbar/LLMBar_Adversarial_*.json'], ['llmbar/judge_verdicts.csv#* Vanilla'])
    for name, published in (('LLMBar_Natural', (.955, .815, .805)), ('LLMBar_Adversarial', (.810, .270, .328))):
        found = [table.loc[(name, f'{j} Vanilla')].accuracy for j in ('GPT-4', 'ChatGPT', 'LLaMA2')]
        assert found == pytest.approx(published, abs=5e-4)
    assert table.loc[('LLMBar_Adversarial', 'LLaMA2 Vanilla')].unanswered == 2


@with_data
def test_llmbar_by_hand():
    "Consistency and the share of the first shown, counted from the file."
    with open(DATA/'llmbar'/'judge_verdicts.csv', newline='') as f:
        rows = [r for r in csv.DictReader(f) if (r['dataset'], r['judge'], r['strategy']) == ('LLMBar/Natural', 'ChatGPT', 'Vanilla')]
    by = {(int(r['item']), r['swapped']): r['winner'] for r in rows}
    same = np.mean([by[i, '0'] == by[i, '1'] for i in range(100)])
    first = np.mean([(by[i, '0'] == '1') + (by[i, '1'] == '2') for i in range(100)])/2
    _, table = on(['llmbar/LLMBar_Natural.json'], ['llmbar/judge_verdicts.csv#ChatGPT Vanilla'])
    r = table.loc['LLMBar_Natural', 'ChatGPT Vanilla']
    assert (r.consistency, r['first']) == pytest.approx((same, first))


@with_data
def test_alpaca_eval_annotations_are_read_on_both_sides():
    folder = DATA/'alpaca_eval'/'alpaca-7b'
    sets = A.named_sets([str(folder/'annotations_ae1.json')])
    assert sum(v == 1.5 for p in sets['annotations_ae1'] for v in p['votes'].values()) == 16       # stored as 0
    said = A.judged_by([str(folder/'annotations_ae1.json')], sets, CFG)['annotations_ae1', 'alpaca_eval_gpt4']
    rows = json.loads((folder/'annotations_ae1.json').read_text())
    assert said.price == pytest.approx(1000*np.mean([r['price_per_example'] for r in rows if r['price_per_example'] is not None])) and said.unanswered.sum() == 0
    assert A.board(sets, {('annotations_ae1', 'itself'): said}, draws=10).iloc[1].accuracy == 1
    with pytest.raises(ValueError, match='find no pair in'): A.judged_by([str(folder/'annotations_ae2.json')], sets, CFG)
    with pytest.raises(ValueError, match='Sample votes|A soft label'): A.named_sets([str(folder/'annotations_ae2.json')])


@with_data
def test_hh_rlhf():
    pairs = A.named_sets([str(DATA/'hh_rlhf'/'harmless-base_test.jsonl.gz')])['harmless-base_test']
    with gzip.open(DATA/'hh_rlhf'/'harmless-base_test.jsonl.gz', 'rt') as f: rows = [json.loads(l) for l in f]
    assert len(pairs) == len(rows) == 2312 and .45 < np.mean([p['votes']['gold'] == 1 for p in pairs]) < .55
    for p, r in zip(pairs, rows):
        chosen = p['output_1'] if p['votes']['gold'] == 1 else p['output_2']
        assert p['instruction'].endswith('Assistant:') and r['chosen'].endswith(chosen) if chosen else True


def test_the_world_is_like_noise_has_it():
    "The default run: people's leave-one-out agreement is core.stats', and a perfect copy of the majority is right."
    pairs = A.embedded(300)
    people = A.ballots(pairs)
    assert A.of_people(people, A.traits(pairs))['agreement'] == agreement(people)
    top = np.where((people == 1).sum(0) >= 2, 1., 2.)[None, None].repeat(2, 1)
    got = A.of_judge(top, people, A.traits(pairs))
    assert got['decided'] == 1 and got['consistency'] == 1 and got['first'] == .5 and got['variance'] == 0
    clear = (people == 1).sum(0) != 2
    assert got['accuracy'] == pytest.approx(np.where(clear, 1, .5).mean()) and got['bias'] == pytest.approx(1 - got['accuracy'])


def test_exchanged_pairs_change_nothing():
    pairs = A.embedded(80)
    other = [dict(swapped(p), votes={k: 3 - v for k, v in p['votes'].items()}, generator_1=p['generator_2'], generator_2=p['generator_1']) for p in pairs]
    pool = A.resolve('alpaca_farm.world:pool')
    one, two = (A.of_judge(A.cast(A.asked(pool, ps).preferences, ps), A.ballots(ps), A.traits(ps)) for ps in (pairs, other))
    for k in ('decided', 'accuracy', 'longer', 'spearman'): assert one[k] == pytest.approx(two[k], abs=.1), k
    sure = [A.of_judge(A.asked(A.longest, ps).preferences, A.ballots(ps), A.traits(ps)) for ps in (pairs, other)]
    for k, v in sure[0].items(): assert v == pytest.approx(sure[1][k], nan_ok=True), k


def test_a_judge_that_fails_is_counted_and_left_out():
    pairs = A.embedded(50)
    def shaky(shown): return [math.nan if len(p['output_1']) % 3 == 0 else 1. for p in shown]
    said = A.asked(shaky, pairs)
    assert said.unanswered.sum() == np.isnan(said.preferences).sum() > 0
    row = A.board(dict(s=pairs), {('s', 'shaky'): said}, draws=10).iloc[1]
    assert row.unanswered == said.unanswered.sum() and row['first'] == 1 and row.consistency == 0
    as_tie = A.board(dict(s=pairs), {('s', 'shaky'): said}, 'tie', draws=10).iloc[1]
    assert as_tie.decided < row.decided


def test_recorded_votes_of_an_annotation_run(tmp_path):
    "A judge's label file and the judge itself, asked in the same order, agree."
    pairs = A.embedded(40)
    rows = [dict({k: v for k, v in p.items() if k != 'votes'}, preference=y, annotator='longest') for p, y in zip(pairs, map(float, A.longest(pairs)))]
    (tmp_path/'preferences.json').write_text(json.dumps(rows))
    sets = dict(s=[dict(p, row=i) for i, p in enumerate(pairs)])
    live = A.judged_by(['alpaca_farm.agreement:longest'], sets, CFG)['s', 'longest'].preferences
    assert (A.judged_by([str(tmp_path)], sets, CFG)['s', 'longest'].preferences[0, 0] == live[0, 0]).all()
    assert [p['votes'] for p in A.read_set(str(tmp_path))] == [dict(longest=r['preference']) for r in rows]      # a run folder is a set, too
    with pytest.raises(ValueError, match='a second judge called longest'): A.judged_by(['alpaca_farm.agreement:longest', str(tmp_path)], sets, CFG)


def test_a_run(tmp_path):
    cfg = A.AgreementConfig(out=str(tmp_path/'out'), max_instances=60, draws=20)
    A.train(cfg)
    found = read_summary(tmp_path/'out')
    assert found['embedded_pool_n'] == 60 and found['embedded_longest_consistency'] == 1 and .4 < found['embedded_people_agreement'] < .9
    assert len(read_json(tmp_path/'out'/'people.json')['embedded']) == 6 and (tmp_path/'out'/'leaderboard.png').stat().st_size > 5000
    assert A.train(cfg).done


def test_a_judge_behind_an_endpoint_has_a_price_and_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv('OPENAI_API_KEY', 'test')
    pairs = A.embedded(12)
    (tmp_path/'prices.yaml').write_text('judge: [1000, 1000]')
    with judge_server(template='Output ({letter})') as server:
        cfg = A.AgreementConfig(base_url=server.url, store=str(tmp_path/'answers.sqlite'), prices=str(tmp_path/'prices.yaml'), models=['gpt-3.5-turbo-16k-0613=judge'])
        said = A.judged_by(['chatgpt'], dict(s=pairs), cfg)['s', 'chatgpt']
    assert said.how == 'live' and said.preferences.shape == (1, 2, 12) and said.unanswered.sum() == 0
    assert said.price > 0 and said.time > 0 and set(said.preferences.ravel()) <= {1., 2.}
