"A decision on a tiny world of one's own: from files to the page, and what is refused."
import json
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
    prompts = [dict(instruction=r['instruction'], input=r['input'])
               for r in load_records(str(base/'world'), 'eval', n=24)]
    for name, rows in (('prompts.json', prompts), ('small.json', SMALL)):
        (folder/name).write_text(json.dumps(rows))
    (folder/'two_judges.py').write_text(JUDGE)
    sys.path.insert(0, str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('alpaca_farm.run.jobs.run_jobs', tiny.run_here)
        yield dict(model=str(base/'sft'), prompts=str(folder/'prompts.json'),
                   judge='two_judges:longest', labels='two_judges:longest', budget=60,
                   methods=['best_of_n', 'dpo'], out=str(folder/'decide'),
                   size=str(folder/'small.json'), device='cpu')
    sys.path.remove(str(folder))
    sys.modules.pop('two_judges', None)


def test_from_files_to_what_to_keep(mine, capsys):
    folder = decide.run(DecideConfig(**mine)).folder
    said = capsys.readouterr().out
    assert '100 % [' in said
    assert 'the judge may label' in said
    table = pd.read_csv(folder/'win_rates.csv')
    candidates = {'best_of_n', 'dpo', 'greedy SFT', 'likeliest of 8', 'longest of 8',
                  'bag of words'}
    assert {*table.second} == candidates | {'sft'}
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
    # each half of the prompts is judged by what has learned from the other
    runs = mine['out'] + '_runs'
    halves = [{r['instruction'] for r in read_json(f'{runs}{k}/world/eval.json')}
              for k in ('', '/again_1')]
    learned = [{r['instruction'] for r in read_json(f'{runs}{k}/world/preference.json')}
               for k in ('', '/again_1')]
    assert len(halves[0] | halves[1]) == 24
    assert not halves[0] & learned[0]
    assert learned[0] <= halves[1]
    assert learned[1] <= halves[0]
    # nothing is made twice, and the page can be shown
    decide.run(DecideConfig(**mine))
    said = capsys.readouterr().out
    assert f'{runs}/dpo is finished already' in said
    assert f'{mine["out"]} is finished' in said
    assert tiny.show_results('decide', DecideConfig(**mine))


def test_people_are_asked_in_rounds_and_other_pairs_only_check(mine, tmp_path, capsys):
    "Without labels it stops with the file to be labelled; the same command goes on with them."
    labels = tmp_path/'labels.json'
    other = [dict(instruction='Say.', input='', output_1=f'{k}', output_2=f'{k} and more',
                  preference=2, annotator='Ann') for k in range(5)]
    write_json(labels, other)
    cfg = DecideConfig(**mine | dict(labels=str(labels)))
    asked = []
    for _ in range(9):
        folder = decide.run(cfg).folder
        if read_summary(folder):
            break
        pairs = read_json(folder/'to_label.json')
        assert pairs[:len(asked)] == asked[:len(pairs)] or len(pairs) >= len(asked)
        assert 'labels are missing' in capsys.readouterr().out
        asked = pairs
        labelled = [dict(p, preference=1 + (len(p['output_2']) > len(p['output_1'])),
                         annotator='Ann') for p in pairs]
        write_json(labels, other + labelled)
    summary = read_summary(folder)
    assert summary['others'] == 5
    assert summary['labels'] == len(asked) <= 60
    assert {p['drawn'] for p in asked} == {'random'}
    assert {p['generator_1'] for p in asked} == {'sft'}
    table = pd.read_csv(folder/'win_rates.csv')
    by_method = pd.Series([p['generator_2'] for p in asked]).value_counts()
    counts = table.set_index('second').n_labels
    assert all(by_method[m] == n for m, n in counts.items() if m != 'sft' and n)
    assert counts.nunique() > 2, 'all candidates have as many labels'


def test_an_instruction_counts_once_however_many_seeds_have_answered_it(monkeypatch):
    "By the mean of its verdicts and an answer of either seed; two halves of prompts add up."
    def boards(prompts, verdicts):   # of each seed
        made = []
        for k, (asked, verdict) in enumerate(zip(prompts, verdicts)):
            answers = {}
            for row, text in (('sft', 'I.'), ('dpo', f'seed {k}')):
                answers[row] = [dict(instruction=f'{i}?', output=text) for i in asked]
            facts = pd.DataFrame(dict(method=['dpo'], length=[2.], kl=[1.]))
            made.append((answers, dict(pool=dict(dpo=1 + verdict)), facts))
        monkeypatch.setattr(decide, 'farm_board', lambda *_: made.pop(0))
        monkeypatch.setattr(decide, 'farm_world', lambda farm: World(farm.world))
        return decide.read_board(DecideConfig(seeds=len(prompts)), ['dpo'], None)

    same = range(60)
    verdict = np.random.default_rng(0).random(60)
    one = boards([same], [verdict])
    two = boards([same]*2, [verdict]*2)
    assert (one.judge == two.judge).all()
    tables = [decide._decision_table(b, np.full(b.judge.shape, np.nan)) for b in (one, two)]
    pd.testing.assert_frame_equal(*tables)   # no interval is narrower
    asked = [p['instruction'] for p in two.pairs['dpo']]
    assert sorted(asked) == sorted(f'{i}?' for i in same)
    assert {p['output_2'] for p in two.pairs['dpo']} == {'seed 0', 'seed 1'}
    mean = boards([same]*2, [verdict, 1 - verdict])
    assert mean.judge == pytest.approx(np.full((60, 1), .5))
    halves = boards([range(30), range(30, 60)], [verdict[:30], verdict[30:]])
    by_prompt = dict(zip((p['instruction'] for p in halves.pairs['dpo']), halves.judge[:, 0]))
    assert [by_prompt[f'{i}?'] for i in same] == pytest.approx(verdict)


def test_a_judge_that_fails_stops_it_unless_forced(mine):
    failing = mine | dict(labels='two_judges:shortest', seeds=1)
    with pytest.raises(ValueError, match='no better than a coin. Name another, or use force'):
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


@pytest.mark.parametrize('given, message', [
    (dict(prompts=''), 'name prompts and judge'), (dict(labels='no/such/labels.json'), 'labels'),
    (dict(methods=['dop']), 'dop')])
def test_what_is_bad_is_refused(mine, given, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        decide.run(DecideConfig(**mine | dict(seeds=1) | given))


def test_a_model_that_answers_nothing_is_refused(mine, monkeypatch):
    read = decide.read_answers
    monkeypatch.setattr(decide, 'read_answers', lambda *a, **k: [
        dict(r, output=['']*len(r['output'])) for r in read(*a, **k)])
    with pytest.raises(ValueError, match='answers nothing to 12 of 12 prompts'):
        decide.run(DecideConfig(**mine | dict(seeds=1)))


def test_its_samples_do_not_take_the_place_of_another_run():
    "The farm's folder may hold runs of other notebooks, such as the bank of overoptimization."
    names = {Path(j.out).name for j in decide.candidate_jobs(DecideConfig(), 0, ['dpo'])}
    others = {name for name, row in recipes().items() if not row['farm']}
    assert 'forecast_bank' in names
    assert 'bank' in others
    assert not names & others
