"Evaluation: joins, preferences, the board."
import json
from pathlib import Path

import numpy as np
import pytest

from alpaca_farm import eval as ev
from alpaca_farm.core.runs import read_json, read_log, read_summary
from alpaca_farm.core.stats import bootstrap

DATA = Path(__file__).parents[2]/'shared'/'data'


def longest(pairs): return [1.5 + .5*np.sign(len(p['output_2']) - len(p['output_1'])) for p in pairs]


def first(pairs): return [1.2 for _ in pairs]


class Pool:
    name = 'pool'
    annotators = (longest, first)
    def __call__(self, pairs): return np.mean([ev.both_orders(pairs, f) for f in self.annotators], axis=0).tolist()


def answers(text, n=12, **more):
    return [dict(instruction=f'Say {i}.', input='' if i % 3 else str(i), output=text(i), **more) for i in range(n)]


@pytest.fixture
def references(): return answers(lambda i: ['x'*(i + 1), 'y'*3])


def test_join_errors_name_rows(references):
    outputs = answers(lambda i: 'ok')
    assert len(ev.pair_up(outputs[::-1], references)) == 24
    with pytest.raises(ValueError, match=r'2 of 12 references have no output: rows 3, 5'):
        ev.pair_up(outputs[:3] + outputs[4:5] + outputs[6:], references)
    with pytest.raises(ValueError, match=r'1 of 12 outputs have no reference: rows 0 '):
        ev.pair_up([dict(outputs[0], input='another')] + outputs[1:], references)
    with pytest.raises(ValueError, match='outputs: rows 2 and 12 answer the same'): ev.pair_up(outputs + outputs[2:3], references)
    with pytest.raises(ValueError, match='references: rows 0 and 12'): ev.pair_up(outputs, references + references[:1])


def test_preferences_equal_the_loop(references):
    outputs = answers(lambda i: 'o'*(2*i))[::-1]
    for judge in (longest, first, Pool()):
        members = getattr(judge, 'annotators', [judge])
        want = []
        for r in references:
            mine = next(o for o in outputs if (o['instruction'], o['input']) == (r['instruction'], r['input']))
            pair = lambda a, b: [dict(r, output_1=a, output_2=b)]
            want.append(np.mean([(f(pair(a, mine['output']))[0] + 3 - f(pair(mine['output'], a))[0])/2
                                 for a in r['output'] for f in members]))
        assert ev.preferences(outputs, references, judge) == pytest.approx(want)


def test_the_reference_is_at_fifty_exactly(references):
    assert (ev.preferences(references[::-1], references, longest) == 1.5).all()
    board = ev.leaderboard(ev.judge_all(dict(sft=references), references, dict(pool=Pool())), dict(sft=references), 'sft', n=50)
    assert board.loc[0, ['pool', 'pool_low', 'pool_high']].tolist() == [50]*3


def test_votes_do_not_depend_on_the_company(references):
    outputs = answers(lambda i: 'o'*(2*i))
    v = ev.votes(outputs, references, Pool())
    assert set(v.tolist()) <= {1, 1.5, 2}
    assert (ev.votes(outputs[:5], references[:5], Pool()) == v[:5]).all()
    many = answers(lambda i: ['a', 'b'], 3000)
    assert ev.votes(answers(lambda i: 'long', 3000), many, Pool()).mean() - 1 == pytest.approx(.75, abs=.03)


def test_board_columns_and_intervals(references):
    methods = dict(sft=references, long=answers(lambda i: 'word '*i), short=answers(lambda i: 'a'))
    judged = ev.judge_all(methods, references, dict(people=Pool(), gold=longest))
    board = ev.leaderboard(judged, methods, 'runs/references', n=200, seed=5)
    row = board.set_index('method').loc['long']
    want = bootstrap(100*(judged['people']['long'] - 1), n=200, seed=5)
    assert (row.people, row.people_low, row.people_high) == pytest.approx(tuple(want))
    assert row.length == pytest.approx(np.mean(range(12))) and row.reference == 'runs/references'
    assert board.people.is_monotonic_decreasing and len(ev.figure(board).axes) == 1
    assert set(ev.rank_agreement(judged, n=20)) == {f'spearman_people_gold{s}' for s in ('', '_low', '_high')}


def test_bad_judges_are_named(references):
    outputs = answers(lambda i: 'ok')
    with pytest.raises(ValueError, match='lazy gave 1 preferences for 24 pairs'):
        def lazy(pairs): return [1]
        ev.preferences(outputs, references, lazy)
    with pytest.raises(ValueError, match='row 0 is nan'): ev.preferences(outputs, references, lambda p: [float('nan')]*len(p))


def run(folder, **settings):
    for name, rows in (('references', answers(lambda i: ['x'*(i + 1), 'y'*3])), ('mine', answers(lambda i: 'o'*(2*i)))):
        (folder/f'{name}.json').write_text(json.dumps(rows))
    defaults = dict(out=str(folder/'out'), outputs=[str(folder/'mine.json')], reference=str(folder/'references.json'),
                    annotators=[f'{__name__}:longest'])
    cfg = ev.EvalConfig(**(defaults | settings))
    ev.train(cfg)
    return cfg


def test_a_run_leaves_what_it_promises(tmp_path):
    cfg = run(tmp_path)
    assert {p.name for p in (tmp_path/'out').iterdir()} >= {'config.json', 'log.jsonl', 'summary.json', 'leaderboard.csv',
                                                            'leaderboard.png', 'preferences.json'}
    summary, values = read_summary(cfg.out), read_json(tmp_path/'out'/'preferences.json')
    assert summary['reference_longest'] == 50 and summary['instructions'] == 12 and summary['references_per_instruction'] == 2
    assert summary['mine_longest'] == pytest.approx(100*(np.mean(values['longest']['mine']) - 1), abs=1e-3)
    assert [r['method'] for r in read_log(cfg.out)] == ['mine', 'reference']
    assert len(read_json(tmp_path/'out'/'preferences.json')['longest']['mine']) == 12


def test_max_instances_and_faults(tmp_path):
    assert read_summary(run(tmp_path, max_instances=5).out)['instructions'] == 5
    with pytest.raises(FileNotFoundError, match='no/such.json'): run(tmp_path, outputs=['no/such.json'])
    with pytest.raises(FileNotFoundError, match='reference'): run(tmp_path, reference='no/such/folder')
    with pytest.raises(ValueError, match='outputs is empty'): run(tmp_path, outputs=[])
    with pytest.raises(ValueError, match='max_instances'): run(tmp_path, max_instances=-1)
    with pytest.raises(ValueError, match='no module nobody'): run(tmp_path, annotators=['nobody:judge'])


@pytest.mark.skipif(not (DATA/'alpaca_farm_examples').exists(), reason='the public outputs are not here')
def test_no_row_is_lost_on_alpaca_farms_files():
    "252 instructions, most with an input: merging instruction and input on one side only once lost those."
    sft, base = (json.loads((DATA/'alpaca_farm_examples'/f'outputs_{n}.json').read_text()) for n in ('sft', 'baseline'))
    pairs = ev.pair_up(sft, base)
    assert len(pairs) == len(sft) == 252 and sum(p['input'] != '' for p in pairs) == 208
    merged = [dict(r, instruction=r['instruction'] + '\n\n' + r['input'], input='') if r['input'] else r for r in sft]
    with pytest.raises(ValueError, match='208 of 252 outputs have no reference'): ev.pair_up(merged, base)
