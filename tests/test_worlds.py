"Simulation against people over worlds: the statistics find what is planted, the card refuses nonsense, and the study shares its runs and adds up."
import csv
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import tiny
from alpaca_farm import card as cards
from alpaca_farm import worlds
from alpaca_farm.card import card, label_figures, matched_tables, page_table, vote_figures
from alpaca_farm.core import launch
from alpaca_farm.core.runs import read_summary
from alpaca_farm.core.stats import agreement, spearman
from alpaca_farm.people import read_population, sample_people, sample_pool
from alpaca_farm.prediction_measures import (correlation_over_worlds, FIGURES, jackknife, order_model, order_probability, prediction_figures,
                                             regrets, replicates_for_order)
from alpaca_farm.world import WorldConfig
from alpaca_farm.worlds import human_elsewhere, owner, PARTS_OF_WORLD, read_worlds, study_jobs, worlds_table, WorldsConfig

TRUTH = np.array([50., 52, 54, 56, 58, 60])


def experiments(human, simulated, sd, n, rng, shared=.5):
    "Win rates of n replicates on both sides, with noise of their own and some that they share (the same base model and instructions)."
    common = shared*sd*rng.normal(size=(n, len(human)))
    return tuple(np.array(v) + common + sd*rng.normal(size=common.shape) for v in (simulated, human))


# Statistics

def brute_regrets(s, h):
    "By loops: the best of the other replicates against the choice of each other replicate, measured in this one."
    R, M = h.shape
    best = lambda v: max(range(M), key=lambda m: v[m])
    simulation = [h[j, best(np.delete(h, j, 0).mean(0))] - h[j, best(s[i])] for j in range(R) for i in range(R) if i != j]
    people = [h[j, best(np.delete(h, j, 0).mean(0))] - h[j, best(h[i])] for j in range(R) for i in range(R) if i != j]
    chance = [h[j, best(np.delete(h, j, 0).mean(0))] - h[j, m] for j in range(R) for m in range(M)]
    return [np.mean(v) for v in (simulation, people, chance)]


def test_figures_by_hand():
    rng = np.random.default_rng(0)
    s, h = experiments(TRUTH, TRUTH[[2, 0, 1, 4, 5, 3]], 2, 4, rng)
    assert regrets(s, h)[[0, 1, 3]] == pytest.approx(brute_regrets(s, h)) and np.isnan(regrets(s, h)[2])
    found = prediction_figures(s, h, elsewhere=h[:, ::-1])
    each = [float(spearman(a, b)) for a, b in zip(s, h)]
    half = 3.1824*np.std(each, ddof=1)/2                                            # Student's, three degrees of freedom
    assert found['correlation'] == pytest.approx(np.mean(each)) and found['correlation_low'] == pytest.approx(np.mean(each) - half, abs=1e-3)
    assert found['ceiling'] == pytest.approx(np.mean([spearman(h[i], h[j]) for i in range(4) for j in range(4) if i != j]))
    assert found['correlation_of_means'] == pytest.approx(float(spearman(s.mean(0), h.mean(0))))
    assert set(found) == {f + e for f in FIGURES for e in ('', '_low', '_high')} and found['regret_elsewhere'] > 0
    two = prediction_figures(s[:2], h[:2])
    assert np.isfinite(two['regret']) and np.isnan(two['regret_low']) and np.isnan(prediction_figures(s[:1], h[:1])['regret'])


def test_no_regret_where_the_orders_agree():
    same = np.tile(TRUTH, (5, 1))
    found = prediction_figures(np.exp(same/20), same)
    assert (found['correlation'], found['regret'], found['regret_low'], found['regret_high']) == (1, 0, 0, 0)
    opposite = prediction_figures(-same, same)
    assert (opposite['correlation'], opposite['regret']) == (-1, 10)
    tied = prediction_figures(np.full_like(same, 50), same)                          # a simulation that says nothing chooses at random
    assert tied['regret'] == pytest.approx(tied['regret_random']) == pytest.approx(5)


@pytest.mark.parametrize('simulated', [TRUTH, TRUTH[[0, 1, 2, 3, 5, 4]], TRUTH[[3, 1, 5, 0, 2, 4]]], ids=['right', 'two swapped', 'wrong'])
def test_the_regret_is_unbiased(simulated):
    "Its mean over many studies is what the chosen method loses, by its true value, against the choice of people's other replicates."
    rng, sd, found, lost = np.random.default_rng(1), 2., [], []
    for _ in range(1500):
        s, h = experiments(TRUTH, simulated, sd, 4, rng)
        found.append(regrets(s, h)[0])
        first = h[:3].mean(0).argmax()                                               # people's choice by three replicates, and simulation's by one
        lost.append(TRUTH[first] - TRUTH[s[0].argmax()])
    assert np.mean(found) == pytest.approx(np.mean(lost), abs=4*np.std(found)/1500**.5 + 4*np.std(lost)/1500**.5)


def test_luck_is_no_regret():
    "Six methods that are all the same: the best by the same data seems better, the split finds nothing."
    rng = np.random.default_rng(2)
    found = [(regrets(s, h)[0], h.mean(0).max() - h.mean(0)[s.mean(0).argmax()]) for s, h in
             (experiments(TRUTH*0 + 50, TRUTH*0 + 50, 2, 5, rng, 0) for _ in range(800))]
    split, same_data = np.mean(found, 0)
    assert abs(split) < .15 and same_data > .8


@pytest.mark.parametrize('sd', [.7, 2.])
def test_intervals_cover(sd):
    "In about 95 % of studies of five replicates, of correlations and regrets, what the same study finds on average."
    rng, values, ends = np.random.default_rng(3), [], []
    for _ in range(300):
        found = prediction_figures(*experiments(TRUTH, TRUTH[[3, 1, 5, 0, 2, 4]], sd, 5, rng))
        names = 'correlation', 'regret', 'regret_random'
        values.append([found[n] for n in names])
        ends.append([[found[n + e] for n in names] for e in ('_low', '_high')])
    mean, ends = np.mean(values, 0), np.array(ends)
    slack = [.03, 0, 0]                                                              # a rank correlation takes few values: five may be equal
    covered = ((ends[:, 0] - slack <= mean) & (mean <= ends[:, 1] + slack)).mean(0)
    assert (covered > .9).all(), covered


def test_jackknife_of_a_mean_is_students():
    x = np.random.default_rng(4).normal(size=6)
    v, low, high = jackknife(lambda i: x[i].mean(), 6)
    assert (v, high - v, v - low) == pytest.approx((x.mean(), *[2.5706*x.std(ddof=1)/6**.5]*2), rel=1e-3)


def test_correlation_over_worlds_covers():
    rng, n, r = np.random.default_rng(5), 12, .6
    big = rng.multivariate_normal([0, 0], [[1, r], [r, 1]], 200_000).T
    rho, hit = float(np.corrcoef(*(v.argsort().argsort() for v in big))[0, 1]), []
    for _ in range(1000):
        (value, low, high), worlds_used = correlation_over_worlds(*rng.multivariate_normal([0, 0], [[1, r], [r, 1]], n).T)
        hit.append(low <= rho <= high)
    assert .93 < np.mean(hit) < .98 and worlds_used == n
    assert np.isnan(correlation_over_worlds([1, 2, 3], [1, 2, 4])[0].low) and correlation_over_worlds([1, np.nan, 3], [1, 2, 3])[1] == 2


def test_how_many_replicates_an_order_needs():
    "The planted noise, slope and bias are found; the curve agrees with counting at any number of replicates."
    rng, tables, truths = np.random.default_rng(6), [], []
    for _ in range(300):
        h = 3*rng.normal(size=6)
        s = 1.6*h + 2*rng.normal(size=6)
        common = .8*rng.normal(size=(5, 6))
        tables.append((s + common + 2*rng.normal(size=(5, 6)), h + common + 1.2*rng.normal(size=(5, 6))))
        truths.append(h)
    m = order_model(tables)
    wanted = dict(slope=1.6, bias=2*2**.5/1.6, people=(2*(.8**2 + 1.2**2))**.5, simulated=(2*(.8**2 + 4))**.5/1.6, differences=3*2**.5)
    for name, value in wanted.items(): assert getattr(m, name) == pytest.approx(value, rel=.1), name
    for k in (1, 3, 5):
        right, said = [], []
        for h, (s, people) in zip(truths, tables):
            for a in range(6):
                for b in range(a):
                    right.append([(v[:k].mean(0)[a] > v[:k].mean(0)[b]) == (h[a] > h[b]) for v in (s, people)])
                    d = abs(h[a] - h[b])
                    said.append([order_probability(d, k, m.simulated, m.bias), order_probability(d, k, m.people)])
        assert np.mean(right, 0) == pytest.approx(np.mean(said, 0), abs=.02)
    k = replicates_for_order(2, m.people)
    assert order_probability(2, k, m.people) >= .95 > order_probability(2, k - 1, m.people)
    assert replicates_for_order(1, m.simulated, m.bias) == np.inf
    nonsense = order_model([(-h, h) for _, h in tables])
    assert nonsense.slope < 0 and order_probability(5, 20, nonsense.simulated, nonsense.bias) == .5
    with pytest.raises(ValueError, match='at least 2 replicates'): order_model([(tables[0][0][:1], tables[0][1][:1])])


# The card

def result(side, replicates=4, sd=.5, methods=6, instructions=0, seed=0):
    rng, rows = np.random.default_rng(seed), []
    for r in range(replicates):
        for m in range(methods):
            won = TRUTH[m] + sd*rng.normal()
            if not instructions: rows.append(dict(method=f'm{m}', replicate=r, win_rate=won))
            for i in range(instructions):
                rows.append(dict(generator_2=f'm{m}', replicate=r, instruction=f'{i}', preference=1 + float(rng.random() < won/100)))
    return rows


def test_a_card_from_replicates(tmp_path):
    import pandas as pd
    simulated, human = result('s', seed=1), result('h', seed=2)
    page = card(simulated, human, out=str(tmp_path/'out'))
    tables = [np.array([[r['win_rate'] for r in rows if r['replicate'] == k] for k in range(4)]) for rows in (simulated, human)]
    assert {k: page.numbers[k] for k in ('regret', 'correlation', 'ceiling_low')} == pytest.approx({k: prediction_figures(*tables)[k] for k in ('regret', 'correlation', 'ceiling_low')})
    assert page.numbers['best'] == 'm5' and page.numbers['order_people'] > 0 and 'cannot be said' not in page.text
    saved = json.loads((tmp_path/'out'/'card.json').read_text())
    assert saved['regret'] == page.numbers['regret'] and (tmp_path/'out'/'card.md').read_text().startswith(page.text) and (tmp_path/'out'/'card.png').stat().st_size > 5000
    pd.DataFrame(simulated).to_csv(tmp_path/'s.csv', index=False)
    (tmp_path/'h.json').write_text(json.dumps(human[::-1]))                           # whatever the order of the rows
    for again in (card(str(tmp_path/'s.csv'), str(tmp_path/'h.json')), card(pd.DataFrame(simulated), human)):
        assert {k: again.numbers[k] for k in FIGURES if k != 'regret_elsewhere'} == pytest.approx({k: page.numbers[k] for k in FIGURES if k != 'regret_elsewhere'})


def test_a_card_from_one_replicate_says_what_it_cannot_say():
    page = card(*(result(s, 1, 0, instructions=300, seed=k) for k, s in enumerate('sh')))
    assert page.numbers['replicates'] == 1 and page.numbers['instructions'] == 300
    assert 'nothing is said about other training runs' in page.text and 'how many replicates an order needs' in page.text
    n = page.numbers
    assert n['regret_low'] <= n['regret'] <= n['regret_high'] and n['correlation_low'] < n['correlation'] and np.isnan(n['regret_people'])
    alone = card({f'm{k}': v for k, v in enumerate(TRUTH)}, {f'm{k}': v for k, v in enumerate(TRUTH[::-1])})
    assert alone.numbers['correlation'] == -1 and np.isnan(alone.numbers['regret']) and 'there is no interval' in alone.text


def test_sides_are_matched_by_name():
    simulated, human = result('s', 2, instructions=60, seed=1), result('h', 2, instructions=60, seed=2)
    found = matched_tables(simulated, [r for r in human if int(r['instruction']) % 2])
    assert [t.shape for t in found.human] == [t.shape for t in found.simulated] == [(30, 6)]*2     # people judged half of them
    kept = [100*(r['preference'] - 1) for r in simulated if r['generator_2'] == 'm3' and r['replicate'] == 1 and int(r['instruction']) % 2]
    assert found.simulated[1][:, 3].tolist() == kept
    one = matched_tables(result('s', 3), result('h', 1))                                           # three simulated replicates, one with people
    assert [len(one.simulated), one.simulated[0].shape] == [1, (1, 6)]
    assert one.simulated[0][0, 2] == pytest.approx(np.mean([r['win_rate'] for r in result('s', 3) if r['method'] == 'm2']))


@pytest.mark.parametrize('simulated, human, said', [
    (result('s', methods=2), result('h', methods=2), r'2 methods \(m0, m1\): an order needs at least 3'),
    (result('s', methods=5), result('h'), 'simulated has no m5'), (result('s'), result('h', methods=5), 'human has no m5'),
    ([], result('h'), 'simulated: there are no rows'), (result('s')[:-1], result('h'), 'simulated: replicate 3 has no m5'),
    (result('s') + result('s')[:1], result('h'), 'row 25: m0 has this replicate'), ([dict(win_rate=5)], result('h'), 'row 1: there is no method'),
    ([dict(method='a', win_rate=101)], result('h'), 'win_rate is 101, not a number from 0 to 100'),
    ([dict(method='a', preference=0)], result('h'), 'preference is 0, not a number from 1 to 2'), ([dict(method='a')], result('h'), 'preference is None')])
def test_bad_tables_are_refused(simulated, human, said):
    with pytest.raises(ValueError, match=said): card(simulated, human)


def test_labels_on_a_card(tmp_path):
    rng = np.random.default_rng(7)
    pairs = [dict(instruction=f'{i}', input='', output_1='a'*rng.integers(1, 99), output_2='b'*rng.integers(1, 99)) for i in range(60)]
    def labels(votes): return [dict(p, preference=float(v), annotator=f'{n}') for n, row in enumerate(votes) for p, v in zip(pairs, row)]
    people, pool = rng.integers(1, 3, (4, 60)), rng.integers(1, 3, (2, 60))
    found = label_figures(labels(pool), labels(people))
    assert found['human_agreement'] == pytest.approx(agreement(people)) and found['pool_agreement'] == pytest.approx(agreement(pool, people))
    assert found['pool_disagreement'] == pytest.approx(np.mean(pool[0] != pool[1])) and found == pytest.approx(vote_figures(pool, people, pairs))
    for name, rows in (('pool', pool), ('people', people)): (tmp_path/f'{name}.json').write_text(json.dumps(labels(rows)))
    tables = result('s', seed=1), result('h', seed=2)
    page = card(*tables, pool_labels=str(tmp_path/'pool.json'), human_labels=str(tmp_path/'people.json'))
    assert page.numbers['pool_agreement'] == pytest.approx(found['pool_agreement']) and '| pool agreement |' in page.text
    single = label_figures(labels(pool[:1]), labels(people[:1]))
    assert np.isnan(single['human_agreement']) and np.isfinite(single['length_bias'])
    with pytest.raises(ValueError, match='both or neither'): card(*tables, pool_labels=labels(pool))


# The family of worlds

def test_the_recipe_names_settings_of_the_world():
    rows = read_worlds()
    known = {f.name for f in fields(WorldConfig)} | {'about', 'labels', 'label_flip'}
    assert len(rows) >= 12 and not {k for row in rows.values() for k in row} - known and set(rows['default']) == {'about'}
    for name, row in rows.items():
        made = worlds.world_config(row)
        assert name == 'default' or any(v != getattr(WorldConfig(), k, None) for k, v in row.items() if k != 'about')
        assert all(getattr(made, k) == v for k, v in row.items() if hasattr(made, k)) and not row['about'].endswith('.')
    settings = [json.dumps({k: v for k, v in row.items() if k != 'about'}, sort_keys=True) for row in rows.values()]
    assert len(set(settings)) == len(settings)


def test_what_a_run_depends_on_decides_whose_it_is():
    rows, cfg = read_worlds(), WorldsConfig(replicates=1)
    jobs = {j.out: j for j in study_jobs(cfg)}
    folder = f'{cfg.out}_study/0'
    assert jobs[f'{folder}/careless_pool/dpo'].settings['policy'] == f'{folder}/default/sft'
    assert jobs[f'{folder}/careless_pool/dpo'].settings['preferences'] == f'{folder}/careless_pool/annotators'
    assert f'{folder}/careless_pool/dpo_people' not in jobs and f'{folder}/careless_pool/world' not in jobs
    assert f'{folder}/divided/dpo_people' in jobs and f'{folder}/divided/dpo' not in jobs and f'{folder}/careless_divided/dpo' not in jobs
    few = jobs[f'{folder}/few_labels/annotators_people'].settings
    assert (few['max_instances'], few['label_flip'], few['outputs']) == (1000, 0, f'{folder}/default/samples')
    assert few['annotators'] == f'{folder}/few_labels/people.json' and jobs[f'{folder}/default/feedme_people'].settings['annotators'] == f'{folder}/default/people.json'
    assert [jobs[f'{folder}/{w}/annotators'].settings['label_flip'] for w in ('default', 'clean_labels')] == [.25, 0]
    assert jobs[f'{folder}/small_model/world'].settings['hidden_size'] == rows['small_model']['hidden_size'] and 'fidelity' not in jobs[f'{folder}/default/world'].settings
    assert all(set(j.needs) <= set(jobs) for j in jobs.values())
    for world in rows:                                                                # no run reads what a neighbour differs in
        for part in PARTS_OF_WORLD: assert worlds.part_settings(rows[owner(rows, world, part)], part) == worlds.part_settings(rows[world], part)
    two = [j for j in study_jobs(WorldsConfig(replicates=2, worlds=['few_labels']))]
    again = {j.out: j.settings['seed'] for j in two}
    assert len(two) == len(again) == 2*(7 + 7 + 7) and all(again[o.replace('_study/0', '_study/1')] == s + 1 for o, s in again.items() if '_study/0' in o)


@pytest.mark.parametrize('given, said', [
    (dict(worlds=['nowhere']), 'worlds: nowhere is none of default'), (dict(methods=['dpo', 'pppo']), 'methods: pppo is none of'), (dict(methods=['dpo']), 'at least two'),
    (dict(worlds=['default']*2), 'name each once'), (dict(size='huge'), 'choose from'), (dict(family='no.yaml'), 'no such file'), (dict(replicates=-1), 'replicates'),
    (dict(labels=0), 'labels')])
def test_settings_of_the_study_refuse_nonsense(given, said):
    with pytest.raises((ValueError, OSError), match=said): WorldsConfig(**given)


def test_a_family_of_ones_own(tmp_path):
    file = tmp_path/'mine.yaml'
    file.write_text('plain: {about: "as it is"}\ngood: {about: "a good pool", fidelity: 1.0}')
    assert {Path(j.out).parent.name for j in study_jobs(WorldsConfig(family=str(file)))} == {'plain', 'good'}
    for text, said in (('plain: {about: x, fidelty: 1}', 'fidelty is not a setting of world. Did you mean fidelity'), ('plain: {fidelity: 1}', 'plain: a world is a row'),
                       ('[1]', 'as a whole'), ('plain: {about: x, fidelity: 2}', 'fidelity = 2')):
        file.write_text(text)
        with pytest.raises((TypeError, ValueError), match=said): WorldsConfig(family=str(file))


def test_the_best_elsewhere_is_of_other_runs():
    a, b, c = (np.tile(v, (3, 1)) for v in ([50., 60, 55], [50., 55, 65], [50., 70, 55]))
    found = human_elsewhere(dict(x=(a, a), x_pool=(b, a), y=(a, b), z=(a, c)), dict(x='x', x_pool='x', y='y', z='z'))
    assert (found['x'] == (b + c)/2).all() and (found['x_pool'] == found['x']).all() and (found['y'] == (a + c)/2).all()   # x counts once
    assert human_elsewhere(dict(x=(a, a), x_pool=(b, a)), dict(x='x', x_pool='x'))['x'] is None
    rng = np.random.default_rng(8)
    tables = {w: experiments(TRUTH, TRUTH, 1, 4, rng) for w in 'xyz'}
    known = [dict(world=w, replicate=k, **dict.fromkeys(worlds.KNOWN, .1*k)) for w in tables for k in range(4)]
    rows = worlds_table(tables, {w: w for w in tables}, known, [f'm{k}' for k in range(6)])
    assert [r['world'] for r in rows] == ['all worlds', *'xyz'] and rows[1]['human_agreement'] == pytest.approx(.15)
    for name in ('correlation', 'regret', 'regret_elsewhere'): assert rows[0][name] == pytest.approx(np.mean([r[name] for r in rows[1:]]))
    assert rows[0]['regret_high'] - rows[0]['regret_low'] < max([r['regret_high'] - r['regret_low'] for r in rows[1:]])
    assert page_table(rows).loc['all worlds', 'best'] == '–'


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    "A tiny study of two worlds and one replicate, made in this process: its settings, its runs, and whether a second start made none."
    folder = tmp_path_factory.mktemp('worlds')
    (folder/'tiny.json').write_text(json.dumps(tiny.SETTINGS | dict(samples=dict(max_instances=0), best_of_n=tiny.SETTINGS['best_of_n'] | dict(max_instances=10),
                                                         decoding=dict(max_instances=8, temperatures=[1., .5], **tiny.SAMPLING))))
    cfg = WorldsConfig(out=str(folder/'worlds'), size=str(folder/'tiny.json'), worlds=['default', 'careless_divided'], replicates=1,
                       methods=['best_of_n', 'dpo'], labels=40, pairs=30, device='cpu')

    return cfg, *tiny.make_study(worlds, cfg)


def rows_of(cfg, name): return list(csv.DictReader(open(Path(cfg.out)/f'{name}.csv')))


def test_the_study_adds_up(study):
    cfg, made, nothing_left = study
    assert nothing_left and len(made) == 6 + 4*4                                   # a base, and two parts of each world
    found = rows_of(cfg, 'win_rates')
    chosen = read_summary(f'{cfg.out}_study/0/default/decoding')['sft_sampling_temperature']      # all policies answer alike
    answering = [j.settings.get('temperature', j.settings.get('eval_temperature')) for j in made if Path(j.out).name.startswith(('best_of_n', 'dpo', 'references'))]
    assert answering == [chosen]*9
    assert len(found) == 2*3 and {(r['world'], r['replicate']) for r in found} == {(w, '0') for w in cfg.worlds}
    assert all(float(r[c]) == 50 for r in found if r['method'] == 'sft' for c in ('simulated', 'human', 'transfer'))
    from alpaca_farm.eval import complete_preferences, read_answers
    folder = f'{cfg.out}_study/0'
    references = read_answers(f'{folder}/default/references', candidates=True)
    row = next(r for r in found if (r['world'], r['method']) == ('careless_divided', 'dpo'))
    for column, run, judge in (('simulated', 'careless_pool/dpo', 'careless_pool/pool'), ('human', 'divided/dpo_people', 'divided/held_out_people'),
                               ('transfer', 'careless_pool/dpo', 'divided/held_out_people')):
        judged = complete_preferences(read_answers(f'{folder}/{run}'), references, read_population(f'{folder}/{judge}.json'))
        assert float(row[column]) == pytest.approx(100*(judged.mean() - 1), abs=1e-4), column
    table = rows_of(cfg, 'worlds')
    assert [r['world'] for r in table] == ['all worlds', *cfg.worlds] and all(r['correlation'] or r['chosen'] for r in table) and not any(r['regret'] for r in table)
    assert len(rows_of(cfg, 'known')) == 2 and all(0 <= float(r['reward_model_accuracy']) <= 1 and r['human_agreement'] for r in rows_of(cfg, 'known'))
    assert len(rows_of(cfg, 'predictors')) == 10 and not (Path(cfg.out)/'orders.csv').exists()
    summary = read_summary(cfg.out)
    assert summary['runs'] == len(made) and summary['human_agreement'] == pytest.approx(float(table[0]['human_agreement']), abs=1e-4)
    assert (Path(cfg.out)/'page.png').stat().st_size > 5000 and '| careless_divided |' in (Path(cfg.out)/'page.md').read_text()


def test_people_are_drawn_anew_and_judges_of_the_board_did_not_label(study):
    cfg, made, _ = study
    for world in cfg.worlds: worlds.draw_populations(cfg, read_worlds(), world, 1)
    def weights(k, world, name): return [a.weights for a in read_population(f'{cfg.out}_study/{k}/{world}/{name}.json').annotators]
    drawn = {(k, w, n): weights(k, w, n) for k in (0, 1) for w, n in (('default', 'people'), ('default', 'held_out_people'), ('default', 'pool'), ('divided', 'people'),
                                                                      ('careless_pool', 'pool'))}
    assert len({json.dumps(v) for v in drawn.values()}) == len(drawn)
    assert drawn[1, 'divided', 'people'] == [a.weights for a in sample_people(1, 'people', disagreement=2.).annotators]
    assert drawn[0, 'careless_pool', 'pool'] == [a.weights for a in sample_pool(0, fidelity=.2).annotators]
    assert not any('held_out' in str(j.settings.get('annotators')) for j in made)


def test_the_cost_is_said_first(study, capsys):
    cfg, _, _ = study
    jobs = study_jobs(cfg)
    assert '0 of 22 runs are missing, about 0 CPU' in launch.announced_cost(jobs, 'the study')
    more = WorldsConfig(**{f.name: getattr(cfg, f.name) for f in fields(cfg)} | dict(replicates=2))
    missing = [j for j in study_jobs(more) if '_study/1' in j.out]
    assert f'22 of 44 runs are missing, about {sum(j.cost for j in missing):,.0f} CPU seconds' in launch.announced_cost(study_jobs(more), 'more')


def test_costs_follow_labels_and_size():
    row = read_worlds()['large_model']
    assert worlds.run_cost('dpo', 50, {}, 16000, False) == 50 and worlds.run_cost('dpo_people', 50, {}, 1000, False) < 20 and worlds.run_cost('rrhf', 50, {}, 1000, True) == 10
    assert worlds.run_cost('sft', 10, row, 8000, False) > 20 and worlds.run_cost('annotators', 8, row, 8000, False) == 8


def test_orders_by_number_of_labels():
    "Worlds that differ in nothing but their labels are compared with each other; all of them together."
    rng, rows, cfg = np.random.default_rng(9), read_worlds(), WorldsConfig(replicates=1)
    tables = {w: experiments(TRUTH, TRUTH, sd, 5, rng) for w, sd in (('default', 1), ('few_labels', 4), ('many_labels', .5), ('divided', 1))}
    models = worlds.order_models(cfg, rows, tables)
    assert list(models) == ['', ', 1,000 labels', ', 4,000 labels', ', 8,000 labels']
    spreads = [m.people for m in models.values()][1:]
    assert spreads == sorted(spreads, reverse=True) and models['']  == order_model(list(tables.values()))
    found = {(r['labels'], r['difference']): r['people_need'] for r in worlds.orders_table(models)}
    assert found['1,000 labels', 2.] > found['4,000 labels', 2.] > found['8,000 labels', 2.] and found['all worlds', 1.] > found['all worlds', 5.]
    assert worlds.order_models(cfg, rows, {w: (s[:1], h[:1]) for w, (s, h) in tables.items()}) == {}


# Several machines

def part(folder, seed, replicates=1, methods=('sft', 'best_of_n', 'dpo'), chosen=('default', 'careless_pool')):
    "A folder with the tables of a finished study."
    rng, rows, known = np.random.default_rng(seed), [], []
    for k in range(seed, seed + replicates):
        for w in chosen:
            for m, v in zip(methods, (50, 54, 57)):
                rows.append(dict(world=w, replicate=k, method=m, simulated=v + rng.normal(), human=v + rng.normal(), transfer=v))
            known.append(dict(world=w, replicate=k, **dict.fromkeys(worlds.KNOWN, rng.random())))
    folder.mkdir()
    for name, table in (('win_rates', rows), ('known', known)):
        with open(folder/f'{name}.csv', 'w', newline='') as f:
            table_of = csv.DictWriter(f, table[0])
            table_of.writeheader()
            table_of.writerows(table)
    return str(folder)


def test_parts_of_several_machines_are_joined(tmp_path):
    "The page of parts is that of one study with all replicates, and nothing is run."
    chosen = dict(worlds=['default', 'careless_pool'], methods=['best_of_n', 'dpo'])
    parts = [part(tmp_path/f'{k}', k) for k in range(3)]
    joined = worlds.run(WorldsConfig(out=str(tmp_path/'joined'), parts=parts, **chosen))
    assert read_summary(joined.folder)['replicates'] == 3 and read_summary(joined.folder)['runs'] == 0 and not (tmp_path/'joined_study').exists()
    one = part(tmp_path/'all', 9, 3)                                                 # the same rows in one file
    for name in ('win_rates', 'known'):
        lines = [(Path(p)/f'{name}.csv').read_text().splitlines(True) for p in parts]
        (Path(one)/f'{name}.csv').write_text(''.join([lines[0][0], *(row for table in lines for row in table[1:])]))
    alone = worlds.run(WorldsConfig(out=str(tmp_path/'alone'), parts=[one], **chosen))
    for name in ('worlds', 'predictors', 'orders', 'win_rates'):
        assert (alone.folder/f'{name}.csv').read_text() == (joined.folder/f'{name}.csv').read_text()
    assert worlds.run(WorldsConfig(out=str(tmp_path/'joined'), parts=parts, **chosen)).done
    halves = [part(tmp_path/f'half_{w}', 0, chosen=(w,)) for w in chosen['worlds']]         # or each machine with worlds of its own
    assert [len(table) for table in worlds.read_parts(WorldsConfig(parts=halves, **chosen))] == [6, 2]
    for given, said in ((parts[:1]*2, 'replicate 0 of the world careless_pool is in .*0 and in .*0'), (halves[:1], 'replicate 0 of the world careless_pool is missing'),
                        ([part(tmp_path/'few', 7, methods=('sft', 'dpo'))], 'replicate 7 of the world careless_pool in .*few has no best_of_n')):
        with pytest.raises(ValueError, match=said): worlds.run(WorldsConfig(out=str(tmp_path/'no'), parts=given, **chosen))
    (Path(halves[0])/'known.csv').write_text(lines[0][0])
    with pytest.raises(ValueError, match='replicate 0 of the world default is not in known.csv of .*half_default'):
        worlds.read_parts(WorldsConfig(parts=halves, **chosen))
    with pytest.raises(FileNotFoundError, match='no win_rates'): worlds.run(WorldsConfig(out=str(tmp_path/'no'), parts=[str(tmp_path)], **chosen))
    with pytest.raises(ValueError, match='joined as they are'): WorldsConfig(parts=parts, replicates=2)
    assert not (tmp_path/'no').exists()
