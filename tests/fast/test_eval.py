"Evaluation: preferences, the board, judges behind an endpoint; the choice of a temperature."
import json

import numpy as np
import pytest

import tiny
from alpaca_farm import eval as ev
from alpaca_farm.annotators import load_annotators
from alpaca_farm.boards import decoding, leaderboards, rankings
from alpaca_farm.core.data import comparisons
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.runs import read_log, read_summary
from alpaca_farm.core.stats import bootstrap
from alpaca_farm.judging.agreement import prefer_longer as longest
from asking import key
from judge_server import judge_server

DATA = tiny.ROOT.parent/'shared'/'data'
MODELS = ['gpt-4-0314=judge', 'gpt-3.5-turbo-0301=judge', 'text-davinci-003=judge']


def first(pairs): return [1.2 for _ in pairs]


def silent_on_three(pairs):
    return [np.nan if p['instruction'] in ('Say 0.', 'Say 5.', 'Say 7.') else f
            for p, f in zip(pairs, longest(pairs))]


class Pool:
    name = 'pool'
    annotators = (longest, first)
    def __call__(self, pairs):
        each = [comparisons.both_orders(pairs, f) for f in self.annotators]
        return np.mean(each, axis=0).tolist()


class Undecided(Pool): annotators = (longest, silent_on_three)


def answers(text, n=12, **more):
    return [dict(instruction=f'Say {i}.', input='' if i % 3 else str(i), output=text(i), **more)
            for i in range(n)]


REFERENCES = answers(lambda i: ['x'*(i + 1), 'y'*3])
MINE = answers(lambda i: 'o'*(2*i))


@pytest.mark.skipif(not (DATA/'alpaca_farm_examples').exists(), reason='no public outputs')
def test_no_row_is_lost_on_alpaca_farms_files():
    "252 instructions, most with an input, which is not merged into the instruction on one side."
    sft, base = (json.loads((DATA/'alpaca_farm_examples'/f'outputs_{n}.json').read_text())
                 for n in ('sft', 'baseline'))
    pairs = comparisons.pair_up(sft, base)
    assert len(pairs) == len(sft) == 252 and sum(p['input'] != '' for p in pairs) == 208


@pytest.mark.parametrize('judge', [longest, first, Pool()])
def test_preferences_equal_the_loop(judge):
    want = []
    for r, mine in zip(REFERENCES, MINE):
        def prefers(f, a, b): return f([dict(r, output_1=a, output_2=b)])[0]
        want.append(np.mean([(prefers(f, a, mine['output']) + 3 - prefers(f, mine['output'], a))/2
                             for a in r['output'] for f in getattr(judge, 'annotators', [judge])]))
    assert ev.complete_preferences(MINE[::-1], REFERENCES, judge) == pytest.approx(want)


def test_identical_answers_are_not_asked_about():
    judged = []
    def judge(pairs): judged.extend(pairs); return [2.]*len(pairs)
    refs, outputs = answers(lambda i: 'yes'), answers(lambda i: 'yes' if i % 2 else 'no')
    assert comparisons.preferences_over(outputs, refs, judge).tolist() == [1.5]*12
    assert len(judged) == 12 and all(p['output_1'] != p['output_2'] for p in judged)


def test_board_columns_and_intervals():
    methods = dict(sft=REFERENCES, long=answers(lambda i: 'word '*i), short=answers(lambda i: 'a'))
    judged = ev.judge_all(methods, REFERENCES, dict(people=Pool(), gold=longest))
    board = leaderboards.leaderboard(judged, methods, 'runs/references', n=200, seed=5)
    assert board.people.is_monotonic_decreasing
    ends = ['people', 'people_low', 'people_high']
    rows = board.set_index('method')
    assert rows.loc['sft', ends].tolist() == [50]*3
    want = bootstrap(100*(judged['people']['long'] - 1), n=200, seed=5)
    assert rows.loc['long', ends].tolist() == pytest.approx(list(want))
    assert rows.loc['long', 'length'] == pytest.approx(np.mean(range(12)))


def test_no_verdict_is_no_tie_and_no_loss(capsys):
    "And its share is said, by judge."
    methods = dict(reference=REFERENCES, mine=answers(lambda i: 'o'*(2*i + 1)))
    judged = ev.judge_all(methods, REFERENCES,
                          dict(shy=silent_on_three, pool=Undecided(), bold=longest))
    notes = [line for line in capsys.readouterr().out.splitlines() if 'no verdict' in line]
    assert notes == [f'mine under {name}: no verdict on 3 of 12 instructions (25.0%)'
                     for name in ('shy', 'pool')]
    for name in ('shy', 'pool', 'pool_votes'):
        assert np.flatnonzero(np.isnan(judged[name]['mine'])).tolist() == [0, 5, 7], name
    answered = ~np.isnan(judged['shy']['mine'])
    board = leaderboards.leaderboard(judged, methods, 'x', n=50).set_index('method')
    assert board.shy_unanswered.to_dict() == dict(mine=3, reference=0)
    won = board.shy['mine']
    assert won == pytest.approx(100*(judged['bold']['mine'][answered] - 1).mean())
    row = leaderboards.alpaca_eval_rows(judged['shy'], methods, REFERENCES, 'shy', 'x').loc['mine']
    assert (row.n_total, row.n_unanswered, row.win_rate) == (9, 3, pytest.approx(won))
    def lazy(pairs): return [1]
    for judge, message in ((silent_on_three, 'row 0 is nan'), (lazy, 'lazy gave 1 preferences')):
        with pytest.raises(ValueError, match=message):
            ev.complete_preferences(methods['mine'], REFERENCES, judge)
    with pytest.raises(ValueError, match='mine under mute: there is no verdict'):
        ev.judge_all(methods, REFERENCES, dict(mute=lambda pairs: [np.nan]*len(pairs)))


def test_head_to_head_is_every_pair_judged(capsys):
    methods = dict(reference=REFERENCES, a=answers(lambda i: 'a'*i)[::-1],
                   b=answers(lambda i: 'b'*(12 - i)))
    known = ev.judge_all(methods, REFERENCES, dict(j=longest))['j']
    def tables(judge):
        return rankings.head_to_head(ev._play_all_pairs(methods, REFERENCES, judge, known))
    rates, wins = tables(longest)['win_rate'], [(1 + np.sign(12 - 2*i))/2 for i in range(12)]
    assert rates.loc['b', 'a'] == pytest.approx(100*np.mean(wins))
    assert rates.loc['a', 'reference'] == pytest.approx(100*(known['a'] - 1).mean())
    def shy(pairs): return [np.nan if p['instruction'] == 'Say 3.' else 2. for p in pairs]
    assert tables(shy)['n'].loc['a', 'b'] == 11
    note = 'b against a under shy: no verdict on 1 of 12 instructions (8.3%)'
    assert note in capsys.readouterr().out
    assert len(comparisons.verdicts_over(MINE, REFERENCES, silent_on_three)) == 9
    assert capsys.readouterr().out == 'silent_on_three: no verdict on 3 of 12 instructions (25.0%)\n'


def run(folder, **settings):
    twice = MINE + [dict(MINE[0], output='z')]
    for name, rows in dict(references=REFERENCES, mine=MINE, twice=twice).items():
        (folder/f'{name}.json').write_text(json.dumps(rows))
    defaults = dict(out=str(folder/'out'), outputs=[str(folder/'mine.json')],
                    reference=str(folder/'references.json'), annotators=[f'{__name__}:longest'])
    cfg = ev.EvalConfig(**(defaults | settings))
    ev.run(cfg)
    return cfg


def test_a_run_leaves_what_it_promises(tmp_path):
    "Board, votes and figures; a table, ratings and a matrix of each judge, never ranked together."
    cfg = run(tmp_path, head_to_head=True, annotators=[f'{__name__}:longest', f'{__name__}:first'])
    summary, values = read_summary(cfg.out), read_json(tmp_path/'out'/'preferences.json')
    assert (summary['instructions'], summary['references_per_instruction']) == (12, 2)
    assert summary['reference_longest'] == 50 and summary['reference_longest_elo'] == 1000
    assert summary['longest_unanswered'] == 0 and 'mine_longest_length_controlled' in summary
    won = 100*(np.mean(values['longest']['mine']) - 1)
    assert summary['mine_longest'] == pytest.approx(won, abs=1e-3)
    assert [r['method'] for r in read_log(cfg.out)] == ['mine', 'reference']
    files = [tmp_path/'out'/f'leaderboard_{judge}.csv' for judge in ('longest', 'first')]
    rows = rankings.read_leaderboard(files[0])
    assert set(rows.annotator) == {'longest'} and set(rows.reference) == {cfg.reference}
    with pytest.raises(ValueError, match='different annotators'): rankings.read_leaderboard(*files)


@pytest.mark.parametrize('given, message', [
    (dict(outputs=['no/such.json']), 'no/such.json'), (dict(outputs=[]), 'outputs'),
    (dict(outputs=['twice.json']), 'rows 0 and 12'), (dict(reference='no/such'), 'no/such'),
    (dict(max_instances=-1), 'max_instances'),
    (dict(weights=['gpt4']), 'weights'), (dict(annotators=['nobody:judge']), 'nobody'),
    (dict(annotators=['alpaca_eval_gtp4']), 'Did you mean alpaca_eval_gpt4'),
    (dict(annotators=[f'{__name__}:longest', f'x.{__name__}:longest_low']), 'longest_low'),
    (dict(difficulty=['nothing.json']), 'difficulty')])
def test_faults_are_refused_before_anybody_is_asked(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=message): run(tmp_path, **given)
    assert not (tmp_path/'out'/'leaderboard.csv').exists()


def test_difficulty_from_files_of_other_models(tmp_path):
    "A run on one model says `no`; with the verdicts on five others it says `files`."
    rng = np.random.default_rng(0)
    for k in range(5):
        rows = [dict(instruction=f'Say {i}.' + ('' if i % 3 else f'\n\n{i}'), output_1='x'*(i + 1),
                     output_2='z'*(k + 5), generator_2=f'other {k}',
                     preference=float(rng.integers(1, 3))) for i in range(12)]
        (tmp_path/f'annotations_{k}.json').write_text(json.dumps(rows))
    for name, files in dict(no=[], files=[str(tmp_path/'annotations_*.json')]).items():
        run(tmp_path, out=str(tmp_path/name), difficulty=files)
        found = rankings.read_leaderboard(next((tmp_path/name).glob('leaderboard_*.csv')))
        assert set(found.difficulty) == {name}


@pytest.mark.skipif(not (DATA/'alpaca_eval').exists(), reason='the recorded verdicts are not here')
@pytest.mark.parametrize('board', ['ae1', 'ae2'])
def test_a_run_on_recorded_verdicts_is_the_shipped_leaderboard(board, tmp_path):
    "AlpacaEval's recorded annotations of two models, all 805 rows: rates and error to 1e-6."
    models = 'alpaca-7b', 'alpaca-farm-ppo-human'
    shipped = rankings.read_leaderboard(DATA/'alpaca_eval'/f'leaderboard_{board}.csv')
    labels = [r for m in models
              for r in json.loads((DATA/'alpaca_eval'/m/f'annotations_{board}.json').read_text())]
    base = {r['instruction']: r['output_1'] for r in labels}
    references = [dict(instruction=text, output=output) for text, output in base.items()]
    (tmp_path/'reference.json').write_text(json.dumps(references))
    (tmp_path/f'{board}.json').write_text(json.dumps(labels))
    ev.run(ev.EvalConfig(
        out=str(tmp_path/'out'), reference=str(tmp_path/'reference.json'),
        outputs=[str(DATA/'alpaca_eval'/m/'model_outputs.json') for m in models],
        annotators=[str(tmp_path/f'{board}.json')]))
    ours = rankings.read_leaderboard(tmp_path/'out'/f'leaderboard_{board}.csv')
    columns = ['win_rate', 'standard_error', 'n_wins', 'n_wins_base', 'n_draws', 'n_total',
               'discrete_win_rate', 'avg_length']
    for m in models:
        mine, theirs = (list(map(float, table.loc[m, columns])) for table in (ours, shipped))
        assert mine == pytest.approx(theirs, abs=1e-6)
        # two models: how near the published value this comes is test_length_control's matter
        assert ours.loc[m, ['n_unanswered', 'n_total', 'difficulty']].tolist() == [0, 805, 'no']


@pytest.fixture
def endpoint():
    faults = {'unparseable': {'p': 0, 'always_for': 'Say 4\\.'}}
    with judge_server(faults=faults) as server: yield server


DIFFERENT = sum(a != 'o'*(2*i) for i in range(12) for a in ('x'*(i + 1), 'y'*3))


def test_a_paid_judge_sees_both_orders_and_is_asked_once(tmp_path, endpoint):
    "Within a budget, after which the run goes on; greedy, it is asked once if not read either."
    (tmp_path/'prices.yaml').write_text('judge: [100, 100]')
    more = dict(annotators=['chatgpt'], models=MODELS[1:2], base_url=endpoint.url,
                store=str(tmp_path/'a.sqlite'), tries=3, prices=str(tmp_path/'prices.yaml'))
    with pytest.raises(ValueError, match='mine under chatgpt: the budget .* run again'):
        run(tmp_path, **more, budget=.3)
    some = len(endpoint.requests())
    assert 0 < some < 40 and not read_summary(tmp_path/'out')
    summary = read_summary(run(tmp_path, **more).out)
    rows = rankings.read_leaderboard(tmp_path/'out'/'leaderboard_chatgpt.csv')
    requests = len(endpoint.requests())
    assert requests == 2*DIFFERENT and summary['dollars'] > 0
    assert summary['chatgpt_unanswered'] == 1
    assert rows.loc['mine', ['n_total', 'n_unanswered']].tolist() == [11, 1]
    run(tmp_path, **more, out=str(tmp_path/'again'), head_to_head=True)
    assert len(endpoint.requests()) == requests + 4, 'only what has no verdict is asked again'


def test_a_paid_pool_is_asked_for_one_vote(tmp_path, endpoint):
    cfg = ev.EvalConfig(annotators=['alpaca_farm'], models=MODELS, base_url=endpoint.url,
                        store=str(tmp_path/'a.sqlite'), tries=3, out=str(tmp_path/'unused'))
    pool = load_annotators('alpaca_farm', cfg)
    refs, outputs = answers(lambda i: ['x', 'yy'], 30), answers(lambda i: 'long enough', 30)
    judged = ev.judge_all(dict(reference=refs, mine=outputs), refs, dict(pool=pool))
    assert set(judged) == {'pool'} and (judged['pool']['reference'] == 1.5).all()
    answered = judged['pool']['mine'][~np.isnan(judged['pool']['mine'])]
    assert len(answered) > 5 and (answered == 2).all()
    assert pool.annotators[0].client.tally.asked <= 3*30


# decoding: at which temperature a policy answers best

def shortest(pairs): return [3 - p for p in longest(pairs)]


@pytest.fixture(scope='module')
def best_of_two(base, tmp_path_factory):
    "A run of best-of-2."
    from alpaca_farm import best_of_n
    out = str(tmp_path_factory.mktemp('runs')/'best_of_n')
    best_of_n.run(best_of_n.BestOfNConfig(**tiny.settings('best_of_n', base, out=out)))
    return out


def decode(base, folder, **more):
    "The configuration of a finished run of decoding."
    given = dict(out=str(folder/'decoding'), policies=[str(base/'sft')], reference=str(base/'sft'),
                 data=str(base/'world'), annotators=f'{__name__}:shortest',
                 temperatures=[1., .5, 0.], max_new_tokens=12, max_prompt=110) | more
    cfg = decoding.DecodingConfig(**given)
    decoding.run(cfg)
    return cfg


def test_each_policy_answers_at_the_temperature_that_wins_on_val(base, best_of_two, tmp_path):
    "The rows by hand; the answers to eval are those at the best; best-of-n is not tried greedily."
    import pandas as pd
    from alpaca_farm.core.answers import sample_answers
    from alpaca_farm.core.data.records import load_records
    cfg = decode(base, tmp_path, policies=[str(base/'sft'), best_of_two])
    table = pd.read_csv(tmp_path/'decoding'/'temperatures.csv')
    assert list(zip(table.policy, table.temperature)) == [
        *(('sft', t) for t in (1, .5, 0)), ('best_of_n', 1), ('best_of_n', .5)]
    val, chosen = load_records(str(base/'world'), 'val'), read_summary(cfg.out)
    policy = decoding.load_policy(str(base/'sft'), cfg)
    references = sample_answers(*policy, val, cfg, n=4, seed=cfg.seed + 1000)
    answer = decoding._load_answerer(decoding._sampling_of(str(base/'sft'), cfg))
    for row in table[table.policy == 'sft'].itertuples():
        wins = [np.mean([1.5 - .5*np.sign(len(a['output']) - len(o)) for o in r['output']])
                for a, r in zip(answer(val, row.temperature), references)]
        assert row.win_rate == pytest.approx(100*(np.mean(wins) - 1), abs=1e-3)
        assert row.low <= row.win_rate <= row.high
    for name, rows in table.groupby('policy'):
        best = chosen[f'{name}_temperature']
        assert best == rows.temperature[rows.win_rate.idxmax()]
        written = read_json(tmp_path/'decoding'/'outputs'/f'{name}.json')
        assert len(written) == 30
        assert {(r['temperature'], r['generator']) for r in written} == {(best, name)}
    two = sample_answers(*policy, val, cfg, n=2)
    best = decoding._load_answerer(decoding._sampling_of(best_of_two, cfg))(val, 1.)
    assert all(b['output'] in t['output'] for b, t in zip(best, two))
    assert any(b['output'] != t['output'][0] for b, t in zip(best, two))


def test_an_interrupted_choice_goes_on_with_the_next(base, best_of_two, tmp_path, monkeypatch):
    more = dict(policies=[str(base/'sft'), best_of_two])
    decode(base, tmp_path, out=str(tmp_path/'whole'), **more)
    def killed(self, *args): raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(decoding.Progress, '__call__', killed)
        decode(base, tmp_path, **more)
    first_policy = tmp_path/'decoding'/'outputs'/'sft.json'
    written = first_policy.stat().st_mtime_ns
    decode(base, tmp_path, **more)
    assert not (tmp_path/'decoding~1').exists() and first_policy.stat().st_mtime_ns == written
    for file in ('temperatures.csv', 'outputs/sft.json', 'outputs/best_of_n.json'):
        assert (tmp_path/'decoding'/file).read_text() == (tmp_path/'whole'/file).read_text(), file


@pytest.mark.parametrize('given, message', [
    (dict(temperatures=[.5, .5]), 'temperatures'), (dict(temperatures=[]), 'temperatures'),
    (dict(policies=['no/such/run']), 'no/such/run'), (dict(split='vall'), 'vall'),
    (dict(eval_split='evl'), 'eval_split')])
def test_a_choice_without_sense_is_refused(base, tmp_path, given, message):
    with pytest.raises((ValueError, OSError), match=message): decode(base, tmp_path, **given)
    assert not (tmp_path/'decoding'/'temperatures.csv').exists()
