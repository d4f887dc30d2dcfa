"Agreement of judges with people: formats, joins, coefficients, and published anchors where the data is at hand."
import csv, gzip, json, math

import numpy as np
import pytest

import tiny
from alpaca_farm import world
from alpaca_farm.judging import agreement as A, measures as M
from alpaca_farm.core.data.dialogues import dialogue_text
from alpaca_farm.core.data.preferences import hash_uniform, swap_outputs
from alpaca_farm.core.run.runs import read_summary
from judge_server import judge_server

DATA = tiny.ROOT.parent/'shared'/'data'
with_data = pytest.mark.skipif(not DATA.is_dir(), reason='the public data is not here')
CFG = A.AgreementConfig()


@with_data
def test_pandalm():
    "Left out, its 25 unreadable answers give another number than counted as ties, as published."
    sets = A.load_sets([str(DATA/'pandalm/testset-v1.json')])
    said = A.verdicts_of_judges([str(DATA/'pandalm/gpt-3.5-turbo-testset-v1.json')], sets, CFG)
    people, out = A.agreement_board(sets, said, draws=20).itertuples()
    assert (out.n, out.n_decided, out.n_unanswered) == (999, 894, 25)
    assert [round(x, 3) for x in (out.accuracy, out.decided, people.pairwise)] == [.716, .785, .92]
    ties = {k: v._replace(preferences=np.where(np.isnan(v.preferences) & v.shown, 1.5,
                                               v.preferences)) for k, v in said.items()}
    as_tie = A.agreement_board(sets, ties, draws=10).iloc[1]
    assert [round(x, 3) for x in (as_tie.accuracy, as_tie.decided)] == [.711, .774]


@with_data
def test_llmbar():
    sets = A.load_sets([f'{DATA}/llmbar/LLMBar_{s}.json' for s in ('Natural', 'Adversarial_*')])
    said = A.verdicts_of_judges([f'{DATA}/llmbar/judge_verdicts.csv#* Vanilla'], sets, CFG)
    table = A.agreement_board(sets, said, draws=10).set_index(['set', 'judge'])
    for name, published in (('LLMBar_Natural', (.955, .815, .805)), ('LLMBar_Adversarial', (.810, .270, .329))):
        found = [table.loc[(name, f'{j} Vanilla')].accuracy for j in ('GPT-4', 'ChatGPT', 'LLaMA2')]
        assert found == pytest.approx(published, abs=5e-4)
    assert table.loc[('LLMBar_Adversarial', 'LLaMA2 Vanilla')].n_unanswered == 2


@with_data
def test_alpaca_eval_annotations_are_read_on_both_sides(capsys):
    folder = DATA/'alpaca_eval'/'alpaca-7b'
    sets = A.load_sets([str(folder/'annotations_ae1.json')])
    assert sum(v == 1.5 for p in sets['annotations_ae1'] for v in p['votes'].values()) == 16       # stored as 0
    said = A.verdicts_of_judges([str(folder/'annotations_ae1.json')], sets, CFG)['annotations_ae1', 'alpaca_eval_gpt4']
    rows = json.loads((folder/'annotations_ae1.json').read_text())
    assert said.price == pytest.approx(1000*np.mean([r['price_per_example'] for r in rows if r['price_per_example'] is not None])) and said.unanswered.sum() == 0
    assert A.agreement_board(sets, {('annotations_ae1', 'itself'): said}, draws=10).iloc[1].accuracy == 1
    other, = A.verdicts_of_judges([str(folder/'annotations_ae2.json')], sets, CFG).values()      # another baseline: few pairs in common, and said
    assert other.shown.any(0).sum() == 5 and '5 of 805 labelled pairs have a verdict, and 5 of 805 verdicts are on them' in capsys.readouterr().out
    with pytest.raises(ValueError, match='Sample votes|A soft label'): A.load_sets([str(folder/'annotations_ae2.json')])


@with_data
def test_hh_rlhf():
    pairs = A.load_sets([str(DATA/'hh_rlhf'/'harmless-base_test.jsonl.gz')])['harmless-base_test']
    with gzip.open(DATA/'hh_rlhf'/'harmless-base_test.jsonl.gz', 'rt') as f: rows = [json.loads(l) for l in f]
    assert len(pairs) == len(rows) == 2312 and .45 < np.mean([p['votes']['gold'] == 1 for p in pairs]) < .55
    for p, r in zip(pairs, rows):
        both = [p['output_1'], p['output_2']]
        chosen, rejected = both if p['votes']['gold'] == 1 else both[::-1]
        shown = dialogue_text(p['messages']).strip()
        assert shown.endswith('Assistant:') and chosen != rejected
        assert [r[k].strip().removeprefix(shown).strip() for k in ('chosen', 'rejected')] == [chosen.strip(), rejected.strip()]


def share_of_mode(v, votes):
    "The share of a vote in the mode of others', by counting."
    counts = {c: sum(w == c for w in votes) for c in (1, 1.5, 2)}
    top = [c for c in counts if counts[c] == max(counts.values())]
    return (v in top)/len(top)


def test_the_numbers_of_people_and_judges_by_loops():
    "Votes with gaps and ties; each measure from its words, pair by pair."
    pairs, rng = A.embedded_pairs(120), np.random.default_rng(0)
    people, votes = rng.choice([1, 1.5, 2, 2], (4, 120)), rng.choice([1, 1.5, 2, np.nan], (1, 2, 120))
    t, N = M.pair_traits(pairs), range(120)
    alone = [share_of_mode(people[k, i], np.delete(people[:, i], k)) for i in N for k in range(4)]
    assert M.people_measures(people, t)['agreement'] == pytest.approx(np.mean(alone))
    got, there = M.judge_measures(votes, people, t), [[v for v in votes[0, :, i] if v == v] for i in N]
    assert got['accuracy'] == pytest.approx(np.mean([np.mean([share_of_mode(v, people[:, i]) for v in there[i]]) for i in N if there[i]]))
    assert got['agreement'] == pytest.approx(np.mean([share_of_mode(v, np.delete(people[:, i], k)) for i in N for v in there[i] for k in range(4)]))
    four = [[v for v in votes[0, t.orders[i], i] if v == v] for i in N]
    assert got['variance'] == pytest.approx(1 - np.mean([share_of_mode(v, f[:k] + f[k + 1:]) for f in four if len(f) > 1 for k, v in enumerate(f)]))
    assert got['consistency'] == pytest.approx(np.mean([a == b for a, b in votes[0].T if a + b == a + b]))
    shown = [(v, o) for ab in votes[0].T for o, v in enumerate(ab) if v in (1, 2) and not np.isnan(ab).any()]
    assert got['first'] == pytest.approx(np.mean([v == 1 + o for v, o in shown]))


@pytest.mark.parametrize('judge', ['alpaca_farm.world:pool', 'alpaca_farm.world:judge', 'alpaca_farm.judging.agreement:prefer_longer'])
def test_exchanged_pairs_change_nothing(judge):
    pairs = A.embedded_pairs(80)
    other = [dict(swap_outputs(p), votes={k: 3 - v for k, v in p['votes'].items()}, generator_1=p['generator_2'], generator_2=p['generator_1']) for p in pairs]
    one, two = (M.judge_measures(M.cast_votes(A.ask_judge(A.resolve(judge), ps).preferences, ps), M.people_votes(ps), M.pair_traits(ps)) for ps in (pairs, other))
    for k, v in one.items(): assert v == pytest.approx(two[k], nan_ok=True), k


def test_order_and_chance_are_told_apart():
    "A probability that does not depend on the order is consistent, and varies; verdicts by a coin of their own for each order vary half as much as coins."
    pairs = A.embedded_pairs(400)
    def soft(shown): return [1.7 if p['output_1'] < p['output_2'] else 1.3 for p in shown]
    def coins(shown): return [1. + (hash_uniform('z', p['instruction'], p['output_1'], p['output_2']) < .5) for p in shown]
    said = [M.judge_measures(M.cast_votes(A.ask_judge(f, pairs).preferences, pairs), M.people_votes(pairs), M.pair_traits(pairs)) for f in (soft, coins, lambda s: [1.]*len(s))]
    assert said[0]['consistency'] == 1 and .3 < said[0]['variance'] < .45
    assert [said[1][k] for k in ('consistency', 'variance')] == pytest.approx([.5, .25], abs=.06)
    assert said[2]['consistency'] == 0 and said[2]['first'] == 1 and .4 < said[2]['variance'] < .6


def test_a_missing_verdict_is_counted_and_left_out():
    "Of some, one or all pairs; the other judges have their rows."
    pairs = A.embedded_pairs(50)
    def shaky(shown): return [math.nan if len(p['output_1']) % 3 == 0 else 1. for p in shown]
    def mute(shown): return [math.nan]*len(shown)
    def nearly(shown): return [1.] + mute(shown[1:])
    judged = {('s', f.__name__): A.ask_judge(f, pairs)
              for f in (shaky, mute, nearly, A.prefer_longer)}
    said, table = judged['s', 'shaky'], A.agreement_board(dict(s=pairs), judged, draws=10)
    row = table.set_index('judge').loc
    assert said.unanswered.sum() == np.isnan(said.preferences).sum() == row['shaky'].n_unanswered > 0
    assert row['shaky']['first'] == 1 and row['shaky'].consistency == 0
    assert [row[k].n_unanswered for k in ('mute', 'nearly')] == [100, 98]
    assert [math.isnan(row[k].accuracy) for k in ('mute', 'nearly')] == [True, False]
    assert math.isnan(row['nearly'].spearman) and row['prefer_longer'].consistency == 1


def test_recorded_votes_of_an_annotation_run(tmp_path):
    "A judge's label file and the judge itself, asked in the same order, agree."
    pairs = A.embedded_pairs(40)
    rows = [dict({k: v for k, v in p.items() if k != 'votes'}, preference=y, annotator='longest') for p, y in zip(pairs, map(float, A.prefer_longer(pairs)))]
    (tmp_path/'preferences.json').write_text(json.dumps(rows))
    sets = dict(s=[dict(p, row=i) for i, p in enumerate(pairs)])
    live = A.verdicts_of_judges(['alpaca_farm.judging.agreement:prefer_longer'], sets, CFG)['s', 'longest'].preferences
    assert (A.verdicts_of_judges([str(tmp_path)], sets, CFG)['s', 'longest'].preferences[0, 0] == live[0, 0]).all()
    assert [p['votes'] for p in A.load_sets([str(tmp_path)])[tmp_path.name]] == [dict(longest=r['preference']) for r in rows]      # a run folder is a set, too
    with pytest.raises(ValueError, match='a second judge called longest'): A.verdicts_of_judges(['alpaca_farm.judging.agreement:prefer_longer', str(tmp_path)], sets, CFG)


def test_agreement_counts_pairs_with_two_votes_and_says_how_many(tmp_path, capsys):
    "A file of one vote per pair with two duplicate rows: agreement is of one pair, and says so; it has no interval, and the figure does not show it."
    pairs = A.embedded_pairs(60)
    rows = [dict({k: v for k, v in p.items() if k != 'votes'}, preference=p['votes']['vote 1']) for p in pairs]
    (tmp_path/'labels.json').write_text(json.dumps(rows + rows[:2]))
    A.run(A.AgreementConfig(out=str(tmp_path/'out'), sets=[str(tmp_path/'labels.json')], judges=['alpaca_farm.judging.agreement:prefer_longer'], draws=20))
    assert 'labels: 2 of 60 pairs have two votes or more' in capsys.readouterr().out
    found = read_summary(tmp_path/'out')
    for who in ('people', 'longest'): assert (found[f'labels_{who}_n'], found[f'labels_{who}_n_agreement']) == (60, 2)
    with open(tmp_path/'out'/'leaderboard.csv', newline='') as f: people, judge = csv.DictReader(f)
    assert people['agreement'] == '1.0000' and people['agreement_low'] == people['variance_high'] == judge['agreement_low'] == '' != judge['accuracy_low']
    full = A.agreement_board(dict(s=pairs), {}, draws=20).iloc[0]
    assert full.n_agreement == 60 and full.agreement_low < full.agreement


def test_partial_overlap_is_used_and_counted(tmp_path, capsys):
    "Labels of a pool's run on 60 pairs, people's on 30, 20 of them in common, some in the other order: the measures are those of the 20, and nothing else is counted."
    pairs = A.embedded_pairs(70)
    def rows(some, name, label): return [dict({k: v for k, v in p.items() if k != 'votes'}, preference=label(p), annotator=name(i)) for i, p in enumerate(some)]
    said = rows(pairs[:60], lambda i: f'judge {i % 3}', lambda p: float(A.prefer_longer([p])[0]))
    voted = [swap_outputs(r) | dict(preference=3 - r['preference']) if i % 2 else r for i, r in enumerate(rows(pairs[40:], lambda i: 'Ann', lambda p: p['votes']['vote 1']))]
    for name, records in (('annotators', said), ('labelling', voted)):
        (tmp_path/name).mkdir()
        (tmp_path/name/'preferences.json').write_text(json.dumps(records))
    cfg = A.AgreementConfig(out=str(tmp_path/'out'), sets=[str(tmp_path/'labelling')], judges=[str(tmp_path/'annotators')], draws=20)
    A.run(cfg)
    assert 'annotators on labelling: 20 of 30 labelled pairs have a verdict, and 20 of 60 verdicts are on them' in capsys.readouterr().out
    found, common = read_summary(cfg.out), pairs[40:60]
    right = [float(A.prefer_longer([p])[0]) == p['votes']['vote 1'] for p in common]
    assert found['labelling_people_n'] == 30 and found['labelling_annotators_n'] == 20 and found['labelling_annotators_n_unanswered'] == 0
    assert found['labelling_annotators_accuracy'] == pytest.approx(np.mean(right))
    each = A.verdicts_of_judges([f'{tmp_path}/annotators#judge*'], A.load_sets(cfg.sets), CFG)      # by name, every annotator of the pool is a judge
    assert [int(v.shown.any(0).sum()) for v in each.values()] == [6, 7, 7]
    full, _ = A.load_sets(cfg.sets), capsys.readouterr()
    one = A.verdicts_of_judges([str(tmp_path/'annotators')], full, CFG)['labelling', 'annotators']
    sub = dict(labelling=[p for p, s in zip(full['labelling'], one.shown.any(0)) if s])
    alone = A.agreement_board(sub, {('labelling', 'annotators'): one._replace(**{k: getattr(one, k)[..., one.shown.any(0)] for k in ('preferences', 'unanswered', 'shown')})}, draws=20)
    both = A.agreement_board(full, {('labelling', 'annotators'): one}, draws=20)
    for k in ('accuracy', 'alpha', 'longer', 'longer_diff', 'spearman', 'accuracy_low', 'n', 'n_decided'): assert both[k][1] == pytest.approx(alone[k][1], nan_ok=True), k
    (tmp_path/'annotators'/'preferences.json').write_text(json.dumps(said[:40]))
    with pytest.raises(ValueError, match='its 40 verdicts match no pair in labelling'): A.verdicts_of_judges([str(tmp_path/'annotators')], full, CFG)


def test_a_run(tmp_path):
    cfg = A.AgreementConfig(out=str(tmp_path/'out'), max_instances=60, draws=20)
    A.run(cfg)
    found = read_summary(tmp_path/'out')
    assert found['embedded_pairs_pool_n'] == 60 and found['embedded_pairs_longest_consistency'] == 1 and .4 < found['embedded_pairs_people_agreement'] < .9
    assert (tmp_path/'out'/'leaderboard.png').stat().st_size > 5000
    assert A.run(cfg).done


def paid(tmp_path, server, **more):
    (tmp_path/'prices.yaml').write_text('judge: [1000, 1000]')
    return dict(judges=['chatgpt'], base_url=server.url, store=str(tmp_path/'answers.sqlite'), prices=str(tmp_path/'prices.yaml'),
                models=['gpt-3.5-turbo-0301=judge'], **more)


def test_a_judge_behind_an_endpoint_has_a_price_and_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv('OPENAI_API_KEY', 'test')
    pairs = A.embedded_pairs(12)
    with judge_server(template='Output ({letter})') as server:
        said = A.verdicts_of_judges(['chatgpt'], dict(s=pairs), A.AgreementConfig(**paid(tmp_path, server)))['s', 'chatgpt']
    assert said.how == 'live' and said.preferences.shape == (1, 2, 12) and said.unanswered.sum() == 0
    assert said.price > 0 and said.time > 0 and set(said.preferences.ravel()) <= {1., 2.}
    with pytest.raises(ValueError, match='models: gpt-4 is none of'): A.AgreementConfig(judges=['chatgpt'], models=['gpt-4=x'])


def test_a_reached_budget_is_no_result(tmp_path, monkeypatch):
    "The run stops, what was answered is stored, and the next run asks for the rest alone."
    monkeypatch.setenv('OPENAI_API_KEY', 'test')
    with judge_server(template='Output ({letter})') as server:
        run = dict(out=str(tmp_path/'out'), max_instances=20, draws=10, **paid(tmp_path, server))
        with pytest.raises(ValueError, match='chatgpt, 20 pairs in both orders: .*budget.* is reached.*run again'): A.run(A.AgreementConfig(budget=1., **run))
        sent = len(server.requests())
        assert 0 < sent < 40 and not (tmp_path/'out'/'leaderboard.csv').exists()
        A.run(A.AgreementConfig(**run))
        assert len(server.requests()) == 40 and read_summary(tmp_path/'out')['embedded_pairs_chatgpt_n_unanswered'] == 0


def test_a_judge_without_a_pair_is_left_out(capsys, monkeypatch):
    "Here since it has learned from all of them, or from one."
    pairs = A.embedded_pairs(12)
    prompts = {A.prompt_key(p) for p in pairs}
    monkeypatch.setattr(A, 'load_annotators', lambda spec, cfg: world.judge if spec == 'world' else A.prefer_longer)
    monkeypatch.setattr(A, '_learned_prompts', lambda spec: {A.prompt_key(pairs[0])} if spec == 'world' else prompts)
    found = A.verdicts_of_judges(['world', 'longer'], dict(s=pairs), CFG)
    assert list(found) == [('s', world.judge.name)]
    left = [A.prompt_key(p) != A.prompt_key(pairs[0]) for p in pairs]
    assert found['s', world.judge.name].shown.all(0).tolist() == left
    said = capsys.readouterr().out
    assert 'longest on s: there is no pair to measure it on' in said and '12 of 12 pairs are left out' in said
    with pytest.raises(ValueError, match='no pair to measure any of them'): A.verdicts_of_judges(['longer'], dict(s=pairs), CFG)
