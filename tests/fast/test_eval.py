"Evaluation: preferences, the board, judges behind an endpoint."
import json

import numpy as np
import pandas as pd
import pytest

import tiny
from alpaca_farm import annotators, eval as ev
from alpaca_farm.ask.client import ApiConfig
from alpaca_farm.ask.protocol import estimate_tokens
from alpaca_farm.boards import leaderboards
from alpaca_farm.boards.agreement import prefer_longer as longest
from alpaca_farm.boards.judged import judge_all
from alpaca_farm.data.records import load_records
from alpaca_farm.judging.judges import judge_request, load_annotators, load_evaluators
from alpaca_farm.judging.judges import parse_verdicts
from alpaca_farm.judging.parsers import PARSERS
from alpaca_farm.judging.pools import annotator_order, draw_annotator, mean_preferences, Pool
from alpaca_farm.run.runs import read_summary
from judge_server import judge_server

DATA = tiny.ROOT.parent/'shared'/'data'
MODELS = ['gpt-4-0314=judge', 'gpt-3.5-turbo-0301=judge', 'text-davinci-003=judge']


def read_board(path): return pd.read_csv(path, index_col=0)


def silent_on_three(pairs):
    found = longest(pairs)
    for i, p in enumerate(pairs):
        if p['instruction'] in ('Say 0.', 'Say 5.', 'Say 7.'):
            found[i] = np.nan
    return found


def test_an_outside_policy_samples_as_the_reference_did(monkeypatch):
    "Also one of another size, whose own defaults are others."
    same = dict(data='runs/world', temperature=1., top_p=.9, max_new_tokens=56, max_prompt=64)
    made = dict(notebook='best_of_n', given={}, settings=same | dict(policy='runs/sft'))
    asked = []
    monkeypatch.setattr(ev, 'run_config', lambda folder: made)
    monkeypatch.setattr(ev, 'run_or_fail', lambda jobs, *_: asked.extend(jobs))
    ev._answer_policies(ev.EvalConfig(policies=['my/large']))
    expected = same | dict(policy='my/large', reference='runs/sft')
    assert expected.items() <= asked[0].settings.items()


def answers(text, n=12, **more):
    return [dict(instruction=f'Say {i}.', input='' if i % 3 else str(i), output=text(i), **more)
            for i in range(n)]


REFERENCES = answers(lambda i: ['x'*(i + 1), 'y'*3])
MINE = answers(lambda i: 'o'*(2*i))


def test_no_verdict_is_no_tie_and_no_loss(capsys):
    "And its share is said, by judge."
    methods = dict(reference=REFERENCES, mine=answers(lambda i: 'o'*(2*i + 1)))
    pool = Pool('pool', [longest, silent_on_three])
    judged = judge_all(methods, REFERENCES, dict(shy=silent_on_three, pool=pool, bold=longest))
    notes = [line for line in capsys.readouterr().out.splitlines() if 'no label' in line]
    assert notes == [f'mine under {name}: no label on 3 of 12 requests (25.0 %)'
                     for name in ('shy', 'pool')]
    shy, pool, bold = (judged[name] for name in ('shy', 'pool', 'bold'))
    for found in (shy.expected, pool.expected, pool.votes):
        assert np.flatnonzero(np.isnan(found['mine'])).tolist() == [0, 5, 7]
    answered = ~np.isnan(shy.expected['mine'])
    board = leaderboards.leaderboard(judged, methods, 'x', n=50).set_index('method')
    assert board.shy_unanswered.to_dict() == dict(mine=3, reference=0)
    assert board.shy['mine'] == pytest.approx(100*(bold.expected['mine'][answered] - 1).mean())


def mute(pairs): return [np.nan]*len(pairs)


def test_a_board_needs_verdicts():
    methods = dict(reference=REFERENCES, mine=MINE)
    with pytest.raises(ValueError, match='mine under mute'):
        judge_all(methods, REFERENCES, dict(mute=mute))


@pytest.mark.skipif(not (DATA/'alpaca_eval').exists(), reason='the recorded verdicts are not here')
@pytest.mark.parametrize('board', ['ae1', 'ae2'])
def test_a_run_on_recorded_verdicts_is_the_shipped_leaderboard(board, tmp_path):
    """AlpacaEval's recorded annotations of two models, all 805 rows: rates and error to 1e-6.
    Length-controlled ones are near where lengths are alike (ae1), and else in the same order."""
    models = 'alpaca-7b', 'alpaca-farm-ppo-human'
    shipped = read_board(DATA/'alpaca_eval'/f'leaderboard_{board}.csv')
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
    ours = read_board(tmp_path/'out'/f'leaderboard_{board}.csv')
    columns = ['win_rate', 'standard_error', 'n_wins', 'n_wins_base', 'n_draws', 'n_total',
               'discrete_win_rate', 'avg_length']
    for m in models:
        mine, theirs = (list(map(float, table.loc[m, columns])) for table in (ours, shipped))
        assert mine == pytest.approx(theirs, abs=1e-6)
        assert ours.loc[m, ['n_unanswered', 'n_total', 'difficulty']].tolist() == [0, 805, 'no']
        row = ours.loc[m]
        published = shipped.loc[m].length_controlled_winrate
        if board == 'ae1':
            assert row.lc_low < published < row.lc_high
        else:
            assert row.win_rate < published < row.length_controlled_winrate < 50


@pytest.fixture
def endpoint():
    faults = {'unparseable': {'p': 0, 'always_for': 'Say 4\\.'}}
    with judge_server(faults=faults) as server:
        yield server


DIFFERENT = sum(a != 'o'*(2*i) for i in range(12) for a in ('x'*(i + 1), 'y'*3))


@pytest.mark.slow
def test_a_paid_judge_sees_both_orders_and_is_asked_once(tmp_path, endpoint):
    "Within a budget, after which the run goes on; greedy, it is asked once if not read either."
    (tmp_path/'prices.yaml').write_text('judge: [100, 100]')
    given = dict(
        outputs=[tiny.write(tmp_path/'mine.json', MINE)],
        reference=tiny.write(tmp_path/'references.json', REFERENCES), annotators=['chatgpt'],
        models=MODELS[1:2], base_url=endpoint.url, store=str(tmp_path/'a.sqlite'), tries=3,
        prices=str(tmp_path/'prices.yaml'))
    def run(out='out', **more): ev.run(ev.EvalConfig(out=str(tmp_path/out), **given, **more))
    with pytest.raises(ValueError, match='mine under chatgpt: the budget .* run again'):
        run(budget=.3)
    some = len(endpoint.requests())
    assert 0 < some < 40
    assert not read_summary(tmp_path/'out')
    run()
    summary = read_summary(tmp_path/'out')
    rows = read_board(tmp_path/'out'/'leaderboard_chatgpt.csv')
    requests = len(endpoint.requests())
    assert requests == 2*DIFFERENT
    assert summary['dollars'] > 0
    assert summary['chatgpt_unanswered'] == 1
    assert rows.loc['mine', ['n_total', 'n_unanswered']].tolist() == [11, 1]
    run('again')
    assert len(endpoint.requests()) == requests + 4, 'only what has no verdict is asked again'


def test_a_paid_pool_is_asked_for_one_vote(tmp_path, endpoint):
    cfg = ev.EvalConfig(annotators=['alpaca_farm'], models=MODELS, base_url=endpoint.url,
                        store=str(tmp_path/'a.sqlite'), tries=3, out=str(tmp_path/'unused'))
    pool = load_annotators('alpaca_farm', cfg)
    refs = answers(lambda i: ['x', 'yy'], 30)
    outputs = answers(lambda i: 'long enough', 30)
    judged = judge_all(dict(reference=refs, mine=outputs), refs, dict(pool=pool))
    expected = judged['pool'].expected
    assert not judged['pool'].votes and (expected['reference'] == 1.5).all()
    answered = expected['mine'][~np.isnan(expected['mine'])]
    assert len(answered) > 5 and (answered == 2).all()
    assert pool.annotators[0].client.tally.asked <= 3*30


LIGHT = [dict(instruction=f'Say {i}.', input='', output_1='a', output_2='b') for i in range(4000)]


def test_a_prompt_may_repeat_the_request(tmp_path):
    (tmp_path/'prompt.txt').write_text('{instruction} {output_1} or {output_2}? Again: {instruction}')
    entry = dict(prompt_template='prompt.txt', fn_completion_parser='letter_parser',
                 completions_kwargs=dict(model_name='judge'))
    tiny.write(tmp_path/'configs.yaml', dict(mine=entry))
    judge, = load_evaluators(str(tmp_path))
    message, = judge_request(judge, LIGHT[:1])['messages']
    assert message['content'] == 'Say 0. a or b? Again: Say 0.'
    text = ' '.join(['{output_1} {output_2}']*2)
    (tmp_path/'prompt.txt').write_text(text + ' {instruction}')
    tiny.write(tmp_path/'configs.yaml', dict(mine=entry | dict(batch_size=2)))
    with pytest.raises(ValueError, match='instruction must occur for each of 2 pairs'):
        load_evaluators(str(tmp_path))


def test_each_judge_of_a_pool_is_asked_at_its_own_endpoint(tmp_path):
    with judge_server() as one, judge_server() as other:
        members = []
        for server in (one, other):
            cfg = ApiConfig(base_url=server.url, store=str(tmp_path/'a.sqlite'))
            members.append(load_annotators('chatgpt', cfg))
        pool = Pool('mine', members)
        annotators.annotate_pairs(LIGHT[:12], pool)
        drawn = [draw_annotator(pool, pair) for pair in LIGHT[:12]]
        assert [len(s.requests()) for s in (one, other)] == [drawn.count(0), drawn.count(1)]


@pytest.mark.parametrize('scale', [1, 1e-4, 1e-9])
def test_weights_count_in_proportion_however_small(scale):
    "Of the judge drawn first, and of the second beside a judge of all the weight."
    orders = np.array([annotator_order(p, [scale, scale, 2*scale]) for p in LIGHT])
    firsts = np.bincount(orders[:, 0])/len(LIGHT)
    assert firsts == pytest.approx([.25, .25, .5], abs=.03)
    orders = np.array([annotator_order(p, [1, .0001*scale, .0003*scale]) for p in LIGHT])
    assert np.mean(orders[:, 1] == 2) == pytest.approx(.75, abs=.03)


def test_a_judge_of_weight_0_is_not_asked():
    def silent(pairs): raise AssertionError('asked')
    def first(pairs): return [1.2]*len(pairs)
    def second(pairs): return [1.8]*len(pairs)
    pool = Pool('some', [silent, first, second], [0, 1, 3])
    assert pool(LIGHT[:2]) == pytest.approx([1.65]*2)
    assert mean_preferences(pool, LIGHT[:2]) == pytest.approx([1.5]*2)
    references = [dict(instruction=p['instruction'], output='a') for p in LIGHT[:50]]
    outputs = [dict(r, output='b') for r in references]
    judged = judge_all(dict(mine=outputs), references, dict(pool=pool))['pool']
    assert {*judged.votes['mine']} == {1, 2}
    with pytest.raises(ValueError, match='at least one judge needs a weight above 0'):
        Pool('none', [first, second], [0, 0])


def test_a_missing_label_of_one_judge_is_one_of_the_pool():
    some = Pool('some', [lambda pairs: [None, 1], lambda pairs: [2, 2]], [1, 3])
    assert some([{}, {}]) == pytest.approx([np.nan, 1.75], nan_ok=True)


@pytest.mark.parametrize('weights', [[1.], [1, 2, 3], [2, -1], [1, np.nan], [1, np.inf]])
def test_weights_that_give_no_shares_are_refused(weights):
    "Negative ones gave preferences beyond 1 to 2; too few left the last judge out."
    assert Pool('two', [longest, longest], np.array([1., 3.]))(LIGHT[:1]) == [1.5]
    with pytest.raises(ValueError, match='each of 2 judges'):
        Pool('two', [longest, longest], weights)


def test_pairs_may_come_one_by_one_and_a_seed_from_numpy():
    "A generator gave no labels, and such a seed an error."
    labels = annotators.annotate_pairs(iter(LIGHT[:9]), longest, seed=np.int64(1))
    assert labels == annotators.annotate_pairs(LIGHT[:9], longest, seed=1)
    assert len(labels) == 9


@pytest.mark.parametrize('heading, read', [
    ('Less helpful:', False), ('**Worse**\n', False), ('Worse.', False), ('# Rejected answer', False),
    ('Which is not as good?', False), ('Better:', True), ('Here is my verdict:', True),
    ('The other answer is less helpful and partly wrong.', True)])
def test_what_stands_below_a_heading_of_the_worse_answer_is_no_verdict(heading, read):
    for letter, preference in (('A', 1), ('B', 2)):
        said = dict(choices=[dict(text=f'{heading}\n{letter}')])
        verdict, = PARSERS['letter_parser'](said, 1)
        assert verdict == preference if read else np.isnan(verdict)


def test_where_a_coin_labels_no_flip_is_counted(tmp_path):
    "Nobody knows what a judge would have said of the pairs that it was not asked about."
    equal = [dict(p, output_2='a') for p in LIGHT[:50]]
    pairs = tiny.write(tmp_path/'pairs.json', equal + LIGHT[50:100])
    summaries = {}
    for asked in (True, False):
        cfg = annotators.AnnotatorsConfig(
            out=str(tmp_path/str(asked)), outputs=pairs, label_flip=.25, ask_flipped=asked,
            annotators='alpaca_farm.boards.agreement:prefer_longer')
        annotators.run(cfg)
        summaries[asked] = read_summary(cfg.out)
    assert summaries[False]['unasked'] > 10
    assert not {'flip_rate', 'flip_low', 'flip_high'} & {*summaries[False]}
    assert 'flip_rate' in summaries[True]


def test_outside_policies_answer_the_requests_of_any_folder(base, monkeypatch):
    "Those of a run that was trained, as of one of best_of_n."
    asked = []
    monkeypatch.setattr(ev, 'run_or_fail', lambda jobs, *_: asked.extend(jobs))
    ev._answer_policies(ev.EvalConfig(reference=str(base/'sft'), policies=[str(base/'sft')]))
    assert load_records(asked[0].settings['data']) == load_records(str(base/'sft'), 'outputs')


def test_a_score_that_was_cut_off_is_no_score():
    "The 1 may be the beginning of 10."
    def read(text, reason):
        choice = dict(message=dict(content=text), finish_reason=reason)
        return PARSERS['lmsys_parser'](dict(choices=[choice]), 1)[0]
    assert np.isnan(read('8 1', 'length'))
    assert read('8 1', 'stop') == 1
    assert read('8 10\nThe second', 'length') == 2


def test_a_label_of_probability_zero_has_no_log_prob_in_json():
    "Servers write minus infinity as null, or as a word that becomes null in the store."
    top = [dict(token='a', logprob=0.), dict(token='b', logprob=None)]
    answer = dict(choices=[dict(logprobs=dict(content=[dict(top_logprobs=top)]))])
    assert PARSERS['logprob_parser'](answer, 1, 'a', ['a', 'b'], False) == [1.]


def test_a_model_that_reasons_without_a_limit_has_a_price_with_its_thoughts():
    "A budget held for its short answers only, of which many were under way."
    request = dict(messages=[dict(role='user', content='a')])
    most = [estimate_tokens(request | dict(model=model))[1] for model in ('gpt-4.1', 'gpt-5')]
    assert most[1] > 10*most[0]
    assert estimate_tokens(request | dict(model='gpt-5', max_completion_tokens=50))[1] == 50


def test_tool_calls_that_contradict_each_other_are_no_verdict():
    "The first was taken."
    judge, = load_evaluators('alpaca_eval_gpt4_fn')
    def call(rank):
        models = [dict(model='model_1', rank=rank), dict(model='model_2', rank=3 - rank)]
        return dict(function=dict(name='f', arguments=json.dumps(dict(ordered_models=models))))
    def read(*ranks):
        message = dict(content=None, tool_calls=[*map(call, ranks)])
        return parse_verdicts(judge, dict(choices=[dict(message=message)]))
    assert read(2) == read(2, 2) == [2.]
    assert np.isnan(read(1, 2)).all()


@pytest.mark.parametrize('limit', ['many', '1.5', '-1', 'true'])
def test_a_limit_of_tokens_is_a_number(limit):
    "A word ended in a traceback, and -1 made a request cheaper than nothing for the budget."
    cfg = ApiConfig(decoding=[f'max_tokens={limit}'], models=['gpt-4=gpt-4.1'])
    with pytest.raises(ValueError, match='^max_tokens = .* whole number'):
        load_annotators('alpaca_eval_gpt4', cfg)


@pytest.mark.parametrize('file', ['', '/outputs.json'])
def test_an_outside_policy_answers_as_a_training_did_at_its_end(base, monkeypatch, tmp_path, file):
    "Of which the reference is the run or the file of its answers."
    made = dict(eval_temperature=0., eval_top_p=.9, max_new_tokens=20, max_prompt=90, template='raw',
                template_arguments={}, temperature=.7)
    tiny.write(tmp_path/'dpo'/'config.json', dict(notebook='dpo', fingerprint='', settings=made))
    tiny.write(tmp_path/'dpo'/'outputs.json', answers(str))
    asked = []
    monkeypatch.setattr(ev, 'run_or_fail', lambda jobs, *_: asked.extend(jobs))
    ev._answer_policies(ev.EvalConfig(reference=f'{tmp_path}/dpo{file}', policies=[str(base/'sft')]))
    wanted = dict(temperature=0., top_p=.9, max_new_tokens=20, max_prompt=90, template='raw')
    assert wanted.items() <= asked[0].settings.items()
