"A decision on a tiny world of one's own: from files to the page, and what is refused."
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tiny
from alpaca_farm import decide
from alpaca_farm.data.records import load_records
from alpaca_farm.decide import DecideConfig
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.runs import read_summary, recipes
from alpaca_farm.worlds.folder import World

JUDGE = """
def longest(pairs): return [1 + (len(p['output_2']) > len(p['output_1'])) for p in pairs]
def shortest(pairs): return [1 + (len(p['output_2']) < len(p['output_1'])) for p in pairs]
"""
SMALL = dict(reward_model=dict(held_out=2, batch_size=4, epochs=1), dpo=dict(batch_size=4))


@pytest.fixture(scope='module')
def mine(base, tmp_path_factory):
    "A user's settings; all tests share the runs of the first."
    folder = tmp_path_factory.mktemp('decide')
    eval_split = load_records(str(base/'world'), 'eval', n=24)
    prompts = [dict(instruction=r['instruction'], input=r['input']) for r in eval_split]
    given = dict(
        model=str(base/'sft'), prompts=tiny.write(folder/'prompts.json', prompts),
        judge='two_judges:longest', labels='two_judges:longest', budget=60,
        methods=['best_of_n', 'dpo'], out=str(folder/'decide'),
        size=tiny.write(folder/'small.json', SMALL), device='cpu')
    (folder/'two_judges.py').write_text(JUDGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr('alpaca_farm.run.jobs.run_jobs', tiny.run_here)
        yield given
    sys.modules.pop('two_judges', None)


def asked(path): return {r['instruction'] for r in read_json(path)}


def test_from_files_to_what_to_keep(mine, capsys):
    folder = decide.run(DecideConfig(**mine)).folder
    said = capsys.readouterr().out
    assert '100 % [' in said
    assert 'the judge may label' in said
    table = pd.read_csv(folder/'win_rates.csv')
    assert {*table.second} == {'sft', 'best_of_n', 'dpo', 'greedy SFT', 'likeliest of 8',
                               'longest of 8', 'bag of words', 'words x asker'}
    assert {'first', 'win_rate', 'instructions', 'corrected_low'} < {*table}
    # people are the judge, who likes what is long
    assert table.second[0] in ('longest of 8', 'best_of_n', 'greedy SFT')
    assert table.chance.sum() == pytest.approx(100, abs=.1)
    assert table.loss.is_monotonic_increasing
    assert (table.chance_low <= table.chance + 9).all()
    assert table.instructions[0] == 24
    assert {'mark', 'error', 'error_low'} < {*pd.read_csv(folder/'forecast.csv')}
    summary = read_summary(folder)
    assert summary['kept'] == table.second[0]
    assert summary['corrected']
    assert 40 < summary['labels'] <= 60
    assert 0 <= summary['loss_with_300'] <= table.loss[0] + .5


def test_each_half_of_the_prompts_is_judged_by_what_has_learned_from_the_other(mine):
    decide.run(DecideConfig(**mine))
    one = f'{mine["out"]}_runs/world'
    two = f'{mine["out"]}_runs/again_1/world'
    measured = asked(f'{one}/eval.json')
    others = asked(f'{two}/eval.json')
    learned = asked(f'{one}/preference.json')
    assert len(measured | others) == 24
    assert not measured & learned
    assert learned <= others
    assert asked(f'{two}/preference.json') <= measured


def test_nothing_is_made_twice_and_the_page_can_be_shown(mine, capsys):
    cfg = DecideConfig(**mine)
    decide.run(cfg)
    capsys.readouterr()
    decide.run(cfg)
    said = capsys.readouterr().out
    assert f'{mine["out"]}_runs/dpo is finished already' in said
    assert f'{mine["out"]} is finished' in said
    assert tiny.show_results('decide', cfg)


def longer(pairs):
    "What Ann says: the longer one."
    rows = []
    for p in pairs:
        second = len(p['output_2']) > len(p['output_1'])
        rows.append(dict(p, preference=1 + second, annotator='Ann'))
    return rows


def test_people_are_asked_in_rounds_and_other_pairs_only_check(mine, tmp_path, capsys):
    "Without labels it stops with the file to be labelled; the same command goes on with them."
    labels = tmp_path/'labels.json'
    pair = dict(instruction='Say.', input='')
    other = longer([dict(pair, output_1=f'{k}', output_2=f'{k} and more') for k in range(5)])
    write_json(labels, other)
    cfg = DecideConfig(**mine | dict(labels=str(labels)))
    pairs = []
    for _ in range(9):
        folder = decide.run(cfg).folder
        if read_summary(folder):
            break
        assert 'labels are missing' in capsys.readouterr().out
        pairs = read_json(folder/'to_label.json')
        write_json(labels, other + longer(pairs))
    summary = read_summary(folder)
    assert summary['others'] == 5
    assert summary['labels'] == len(pairs) <= 60
    assert [p['drawn'] for p in pairs] == ['random']*12 + ['duel']*(len(pairs) - 12)
    duels = pairs[12:]
    assert {p['generator_1'] for p in pairs[:12]} == {'sft'}
    assert 'sft' in {p['generator_2'] for p in duels} | {p['generator_1'] for p in duels}
    table = pd.read_csv(folder/'win_rates.csv')
    by_method = pd.Series([p[name] for p in duels for name in ('generator_1', 'generator_2')])
    counts = table.set_index('second').n_labels
    for method, n in by_method.value_counts().items():   # a vote on equal texts is of several duels
        assert counts[method] >= n
    assert counts.nunique() > 2, 'all candidates have as many labels'
    decide.run(cfg)
    assert 'labels have changed' not in capsys.readouterr().out
    write_json(labels, other + [dict(p, preference=3 - p['preference']) for p in longer(pairs)])
    with pytest.raises(ValueError, match='may not label'):   # by the labels as they are now
        decide.run(cfg)
    said = ''
    for _ in range(9):   # people like the long answer in the check, and the short one in duels
        duels = [dict(p, preference=3 - p['preference']) for p in longer(pairs[12:])]
        write_json(labels, other + longer(pairs[:12]) + duels)
        decide.run(cfg)
        said += capsys.readouterr().out
        if read_summary(folder): break
        pairs = read_json(folder/'to_label.json')
    assert 'labels have changed' in said
    assert not pd.read_csv(folder/'win_rates.csv').equals(table)


@pytest.fixture
def boards(monkeypatch):
    "A board of as many seeds as there are lists of prompts, with the judge's verdicts on each."
    made = []
    monkeypatch.setattr(decide, 'farm_board', lambda *_: made.pop(0))
    monkeypatch.setattr(decide, 'farm_world', lambda farm: World(farm.world))
    facts = pd.DataFrame(dict(method=['dpo'], length=[2.], kl=[1.]))
    def board(prompts, verdicts):
        for seed, (numbers, verdict) in enumerate(zip(prompts, verdicts)):
            answers = {}
            for row, text in (('sft', 'I.'), ('dpo', f'seed {seed}')):
                answers[row] = [dict(instruction=f'{i}?', input='', output=text) for i in numbers]
            made.append((answers, dict(pool=dict(dpo=1 + verdict)), facts))
        return decide.read_board(DecideConfig(seeds=len(prompts)), ['dpo'], None)
    return board


SAME = range(60)
VERDICT = np.random.default_rng(0).random(60)


def test_an_instruction_counts_once_however_many_seeds_have_answered_it(boards):
    "By the mean of its verdicts and an answer of either seed."
    one = boards([SAME], [VERDICT])
    two = boards([SAME]*2, [VERDICT]*2)
    assert (one.judge == two.judge).all()
    unlabelled = [decide._ask_duels(board, 0, None, 0)[0] for board in (one, two)]
    tables = [decide._decision_table(*both)[0] for both in zip((one, two), unlabelled)]
    pd.testing.assert_frame_equal(*tables)   # no interval is narrower
    said = [r['instruction'] for r in two.answers['dpo']]
    assert sorted(said) == sorted(f'{i}?' for i in SAME)
    assert {r['output'] for r in two.answers['dpo']} == {'seed 0', 'seed 1'}
    mean = boards([SAME]*2, [VERDICT, 1 - VERDICT])
    assert mean.judge == pytest.approx(np.full((60, 1), .5))


def test_two_halves_of_prompts_add_up(boards):
    halves = boards([SAME[:30], SAME[30:]], [VERDICT[:30], VERDICT[30:]])
    said = [r['instruction'] for r in halves.answers['dpo']]
    by_prompt = dict(zip(said, halves.judge[:, 0]))
    assert [by_prompt[f'{i}?'] for i in SAME] == pytest.approx(VERDICT)


def test_a_judge_that_fails_stops_it_unless_forced(mine):
    failing = mine | dict(labels='two_judges:shortest', seeds=1)
    with pytest.raises(ValueError, match='no better than a coin.*force'):
        decide.run(DecideConfig(**failing))
    table = pd.read_csv(decide.run(DecideConfig(**failing, force=True)).folder/'win_rates.csv')
    favourite = table.loc[table.win_rate.idxmax()]   # of a judge whom people contradict
    assert favourite.corrected < favourite.win_rate - 20


def test_few_labels_check_the_judge_and_correct_nothing(mine):
    folder = decide.run(DecideConfig(**mine | dict(budget=20, seeds=1))).folder
    table = pd.read_csv(folder/'win_rates.csv')
    assert not read_summary(folder)['corrected']
    assert (table.n_labels == 0).all()
    assert table.corrected.tolist() == pytest.approx(table.win_rate.tolist(), abs=.001)


@pytest.mark.parametrize('given, name', [
    (dict(prompts=''), 'prompts'), (dict(labels='no/such/labels.json'), 'labels'),
    (dict(methods=['dop']), 'dop')])
def test_what_is_bad_is_refused(mine, given, name):
    with pytest.raises((ValueError, FileNotFoundError), match=name):
        decide.run(DecideConfig(**mine | dict(seeds=1) | given))


def test_a_model_that_answers_nothing_is_refused(mine, monkeypatch):
    read = decide.read_answers
    def nothing(*args, **more):
        return [dict(r, output=['']*len(r['output'])) for r in read(*args, **more)]
    monkeypatch.setattr(decide, 'read_answers', nothing)
    with pytest.raises(ValueError, match='12 of 12 prompts'):
        decide.run(DecideConfig(**mine | dict(seeds=1)))


def test_its_samples_do_not_take_the_place_of_another_run():
    "The farm's folder may hold runs of other notebooks, such as the bank of overoptimization."
    names = {Path(j.out).name for j in decide.candidate_jobs(DecideConfig(), 0, ['dpo'])}
    others = {name for name, row in recipes().items() if not row['farm']}
    assert 'forecast_bank' in names
    assert 'bank' in others
    assert not names & others
