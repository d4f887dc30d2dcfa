"Hybrid feedback: what is planted is found, nothing is looked at that was not bought, and the study adds up."
import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest

from alpaca_farm.core import launch
from alpaca_farm import calibration
from alpaca_farm import hybrid, label_budget, world
from alpaca_farm.annotators import annotate_pairs, pair_samples
from alpaca_farm.authors import respond
from alpaca_farm.core.preferences import shown_swapped
from alpaca_farm.core.data import full_instruction, prompt_key
from alpaca_farm.core.runs import read_summary
from alpaca_farm.core.settings import resolve
from alpaca_farm.core.stats import sigmoid
from alpaca_farm.core.store import Store
from alpaca_farm.grammar import render, sample_instruction
from alpaca_farm.hybrid import HybridConfig
from alpaca_farm.labelling import LabellingPage, LabellingQueue, person_labels, simulate_person
from alpaca_farm.core.preferences import pair_identity


def planted(n, flip=.1, length=0., place=0., seed=0, annotators=1, liked=0.):
    "Labels of annotators with a known flip rate, liking for ten words and for the first place, and votes of people who like `liked` for ten words."
    rng, rows = np.random.default_rng(seed), []
    words, first, value = rng.integers(1, 21, (n, 2)), rng.integers(1, 3, n), 2*rng.normal(size=n)
    z = value + length*(words[:, 1] - words[:, 0])/10 + place*(2*first - 3)
    label = 1 + ((rng.random(n) < sigmoid(z)) ^ (rng.random(n) < flip))
    votes = 1. + (rng.random(n) < sigmoid(value + liked*(words[:, 1] - words[:, 0])/10))
    for i in range(n):
        rows.append(dict(instruction=f'{seed} {i}', input='', output_1='x '*words[i, 0], output_2='y '*words[i, 1], preference=float(label[i]),
                         annotator=f'{rng.integers(annotators)}', shown_first=int(first[i]), lead=value[i] + rng.normal()))
    return rows, votes


def swapped(rows):
    return [dict(r, output_1=r['output_2'], output_2=r['output_1'], preference=3 - r['preference'], shown_first=3 - r['shown_first'], lead=-r['lead']) for r in rows]


# Calibration

def test_a_flip_rate_and_a_length_bias_are_recovered():
    parts = [planted(4000, flip, length, place, seed) for seed, (flip, length, place) in enumerate([(0., 0, 0), (.2, 0, 0), (.1, 4., 0), (.2, 0, 2.), (.5, 0, 0)])]
    rows = [dict(r, annotator=f'{k}') for k, (part, _) in enumerate(parts) for r in part]
    votes = np.concatenate([v for _, v in parts])
    found = calibration.calibrate_labels(rows, votes)
    w = {k: dict(zip(found.features, found.common + u)) for k, u in found.own.items()}
    for k, (part, v) in enumerate(parts[:2]):                                     # of those without a liking: by counting
        agreed = np.mean([r['preference'] == y for r, y in zip(part, v)])
        assert sigmoid(w[f'{k}']['label']) == pytest.approx(agreed, abs=.02)
    assert w['0']['label'] > w['1']['label'] + .3 and abs(w['4']['label']) < .1
    assert w['2']['length'] < -.13 and abs(w['1']['length']) < .12 and w['3']['position'] < -.05 and w['3']['position'] == min(v['position'] for v in w.values())
    aside, wanted = planted(12_000, .1, 4., 0., seed=9)
    aside = [dict(r, annotator='2') for r in aside]
    loss = lambda p: -np.mean(np.where(wanted == 2, np.log(p), np.log(1 - p)))
    alone = calibration.calibrate_labels(rows, votes, ('label',))
    assert loss(found(aside) - 1) < loss(alone(aside) - 1) < loss(np.where(known_labels(aside) == 2, .8, .2))


def known_labels(rows): return np.array([r['preference'] for r in rows])


def test_annotators_that_cannot_be_told_apart_are_treated_alike():
    taus = [calibration.calibrate_labels(*planted(100, .35, annotators=13, seed=seed), prior=.2).tau for seed in range(12)]
    assert sum(tau > .1 for tau in taus) <= 2                                     # a hundred votes cannot tell thirteen apart
    rows, votes = planted(400, annotators=13)
    found = calibration.calibrate_labels(rows, votes)
    stranger = dict(rows[0], annotator='somebody else')
    assert found([stranger])[0] == pytest.approx(1 + sigmoid(calibration.label_features([stranger]) @ found.common)[0])
    alone = calibration.calibrate_labels([dict(r, annotator='one') for r in rows], votes)
    assert not alone.own and alone(rows) == pytest.approx(calibration.calibrate_labels([dict(r, annotator=None) for r in rows], votes)(rows))


def test_without_votes_there_is_the_prior():
    rows, votes = planted(50)
    before = calibration.calibrate_labels(rows, np.full(50, np.nan), prior=calibration.person_weight(.66, .25))
    assert before(rows) == pytest.approx(np.where(known_labels(rows) == 2, 1.58, 1.42))
    assert calibration.vote_scale(before(rows), .66) == pytest.approx(np.where(known_labels(rows) == 2, 1.75, 1.25))
    assert calibration.vote_scale(np.array([1.9, 1.1, 1.5]), .66).tolist() == [2, 1, 1.5]
    sure = calibration.calibrate_labels(rows, votes, prior_sd=1e-3, other_sd=1e-3, prior=.4, taus=(1e-3,))       # a narrow prior wins
    assert sure.common == pytest.approx([.4, 0, 0], abs=1e-3)


def test_order_in_the_file_means_nothing():
    rows, votes = planted(600, .2, 1., .5, annotators=3)
    leaning = calibration.calibrate_labels(rows, known_labels(rows), ('length', 'position'))
    one, other = calibration.calibrate_labels(rows, votes), calibration.calibrate_labels(swapped(rows), 3 - votes)
    assert one(rows) == pytest.approx(other(rows)) and one(swapped(rows)) == pytest.approx(3 - one(rows))
    assert calibration.label_evidence(swapped(rows), one, leaning) == pytest.approx(3 - calibration.label_evidence(rows, one, leaning))
    assert label_budget.contradicted(swapped(rows)) == pytest.approx(label_budget.contradicted(rows))
    assert label_budget.vote_uncertainty(swapped(rows), 3 - votes) == pytest.approx(label_budget.vote_uncertainty(rows, votes))


def test_evidence_is_the_likelihood_ratio():
    "Of pairs of which one answer is longer by as much, counted: P(label | people prefer 2) over P(label | people prefer 1)."
    rng, n = np.random.default_rng(0), 60_000
    long, label = rng.integers(0, 2, n), np.zeros(n)
    label = 1. + (rng.random(n) < np.where(long, .7, .3))                          # annotators like length
    vote = 1. + (rng.random(n) < sigmoid(.8*(2*label - 3) + .4*(2*long - 1)))
    texts = {0: ('x '*12, 'y '*2), 1: ('x '*2, 'y '*12)}
    rows = [dict(instruction=f'{i}', output_1=texts[l][0], output_2=texts[l][1], preference=s, annotator='a') for i, (l, s) in enumerate(zip(long, label))]
    people, leaning = calibration.calibrate_labels(rows, vote), calibration.calibrate_labels(rows, label, ('length', 'position'))
    said = calibration.label_evidence(rows, people, leaning)
    for l in (0, 1):
        for s in (1., 2.):
            counted = np.mean(label[(long == l) & (vote == 2)] == s)/np.mean(label[(long == l) & (vote == 1)] == s)
            assert said[(long == l) & (label == s)][0] - 1 == pytest.approx(counted/(1 + counted), abs=.015)
    nothing = 1. + (rng.random(n) < .5)                                            # labels that mean nothing say nothing, whatever people like
    rows = [dict(r, preference=float(s)) for r, s in zip(rows, nothing)]
    vote = 1. + (rng.random(n) < sigmoid(1.2*(2*long - 1)))
    people, leaning = calibration.calibrate_labels(rows, vote), calibration.calibrate_labels(rows, nothing, ('length', 'position'))
    assert np.abs(calibration.label_evidence(rows[:500], people, leaning) - 1.5).max() < .02 < np.abs(people(rows[:500]) - 1.5).min()


# Choice

def test_choice():
    rows, votes = planted(1000)
    score = label_budget.contradicted(rows)
    drawn, picked, alike = label_budget.choose_pairs(rows, 200, score, 50)
    assert {*alike} == {i for i in drawn if score[i] <= score[picked].min()} and 0 < len(alike) < 50
    assert [len(x) for x in label_budget.choose_pairs(rows, 30, score, 50)] == [30, 0, 30] and [len(x) for x in label_budget.choose_pairs(rows, 0, score)] == [0, 0, 0]
    assert len(drawn) == 50 and len(picked) == 150 and not {*drawn} & {*picked}
    assert {*drawn} < {*label_budget.choose_pairs(rows, 200)[0]}                              # the random part is that of any other way to choose
    left = [i for i in range(1000) if i not in {*drawn, *picked}]
    assert score[picked].min() >= score[left].max()
    back = label_budget.choose_pairs(rows[::-1], 200)[0]
    assert {rows[i]['instruction'] for i in drawn} < {rows[::-1][i]['instruction'] for i in back}   # whatever the order of the file
    assert len(label_budget.choose_pairs(rows, 1000)[0]) == 1000
    with pytest.raises(ValueError, match='not that many'): label_budget.choose_pairs(rows, 1001)


def test_the_fit_is_on_pairs_like_those_left_over():
    rows, votes = planted(12_000, .2)
    drawn, picked, alike = label_budget.choose_pairs(rows, 6000, label_budget.contradicted(rows), 3000)
    weight = lambda at: calibration.calibrate_labels(rows, label_budget.bought_votes(votes, at), ('label',), prior_sd=10.).common[0]
    left = weight(np.setdiff1d(range(12_000), [*drawn, *picked]))
    assert weight(alike) == pytest.approx(left, abs=.12)
    assert weight(picked) < weight(drawn) - .3 and weight(drawn) < left - .2


@pytest.mark.parametrize('arm', label_budget.LABEL_ARMS)
def test_votes_that_were_not_bought_are_not_looked_at(arm):
    rows, votes = planted(400, annotators=3)
    rows = [dict(r, vote=v) for r, v in zip(rows, votes)]
    records, about = label_budget.spend_budget(HybridConfig(), arm, .2, rows, 1)
    bought = {r['instruction'] for r in records if r['annotator'] == 'people'}
    assert len(bought) == about['humans'] == 80
    assert label_budget.spend_budget(HybridConfig(), arm, .2, [dict(r, vote=r['vote'] if r['instruction'] in bought else 3 - r['vote']) for r in rows], 1)[0] == records
    assert all(set(r) == {'instruction', 'input', 'output_1', 'output_2', 'preference', 'annotator'} for r in records)
    told = {r['instruction']: r for r in rows}
    for r in records:
        if r['annotator'] == 'people': assert r['preference'] == told[r['instruction']]['vote']
        if arm == 'in place' and r['annotator'] != 'people': assert r['preference'] == told[r['instruction']]['preference']
    assert about['dollars'] == pytest.approx(.3*80 + .006*{'in place': 320, 'people': 0}.get(arm, 400))


# Settings

@pytest.mark.parametrize('given, said', [
    (dict(budgets=[0, 1.2]), 'budgets: 1.2'), (dict(budgets=[], policies=[]), 'budgets = '), (dict(budgets=[.1, .1]), 'each once'), (dict(agree=.5), 'agree = 0.5'),
    (dict(arms=['people', 'people']), 'each once'), (dict(budgets=[0, .2]), 'policies: 0.1 is none of 0.0, 0.2'), (dict(random_part=1), 'random_part'),
    (dict(annotators='alpaca_eval_gpt4'), 'label with it in annotators.ipynb'),
    (dict(pairs=20), 'less than 5 labels'), (dict(arms=['nonsense']), 'nonsense is none of in place'), (dict(people='nobody'), 'people = '),
    (dict(judge='my/labels.json'), 'module:name'), (dict(random_part=0), 'random_part'), (dict(replicates=0), 'replicates')])
def test_settings_refuse_nonsense(given, said):
    with pytest.raises((ValueError, FileNotFoundError), match=said): HybridConfig(**given)


def test_points():
    cfg = HybridConfig(budgets=[1., 0, .1], arms=['people', 'contested'])
    assert hybrid.study_points(cfg) == [('in place', 0.), ('people', .1), ('contested', .1), ('people', 1.)]
    assert hybrid.trained_points(cfg) == [('first half', 0.), ('second half', 0.), *hybrid.study_points(cfg)]
    alone = HybridConfig(budgets=[.1], arms=['people'], policies=[])
    assert hybrid.trained_points(alone) == hybrid.study_points(alone) == [('people', .1)]
    assert not any(hybrid.has_policy(HybridConfig(judge=''), *p, 0) for p in hybrid.study_points(cfg))
    first, second = ([(j.cost, j.settings['epochs']) for j in hybrid.point_jobs(HybridConfig(pairs=1000), half, 0, 0)] for half in hybrid.HALVES)
    assert first == second == [(15 + .011*500, 4)]
    assert [hybrid.epochs_for(n) for n in (50, 100, 400, 800, 4000)] == [6, 6, 4, 2, 2]


# The study

def asked(n, seed=0, each=2):
    rng = random.Random(seed)
    specs = [sample_instruction(rng) for _ in range(n)]
    return list({prompt_key(r): r for r in (dict(render(s), output=[respond(s, rng, rng.random()) for _ in range(each)]) for s in specs)}.values())


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A study's settings and the runs it asks for, which are made up: labels are real, a reward model likes what is good or, without people's labels, what is bad."
    folder, made = tmp_path_factory.mktemp('hybrid'), []
    questions = asked(30, seed=2, each=3)
    write(folder/'samples'/'candidates.json', asked(420, seed=1))
    for name in ('bank', 'references'): write(folder/name/'candidates.json', questions)
    write(folder/'policy'/'x.json', []); write(folder/'data'/'x.json', [])

    def run_jobs(jobs, workers, name):
        for j in jobs:
            if Path(j.out, 'summary.json').exists() and j.notebook == 'annotators': continue
            made.append(j)
            if j.notebook == 'annotators':
                rows = annotate_pairs(json.loads(Path(j.settings['outputs']).read_text()), resolve(j.settings['annotators']), j.settings['seed'], j.settings['label_flip'])
                write(Path(j.out)/'preferences.json', rows[:-1] if 'people' in j.out else rows)   # people leave one out
            else:
                assert len(json.loads(Path(j.settings['preferences']).read_text())) > 10
                if j.notebook == 'dpo': write(Path(j.out)/'outputs.json', [dict(r, output=r['output'][0]) for r in questions])
            write(Path(j.out)/'config.json', dict(notebook=j.notebook, fingerprint=j.out, core='', given={}, settings={}))
            write(Path(j.out)/'summary.json', {})
        return []

    from alpaca_farm.core import rewards
    with pytest.MonkeyPatch.context() as m:
        m.setattr(launch, 'run_jobs', run_jobs)
        m.setattr(rewards, 'reward', lambda spec, cfg: (lambda rs: [u*(1 if '_people_' in spec else -1) for u in world.utility(rs)]))
        yield folder, made, dict(out=str(folder/'out'), outputs=str(folder/'samples'), policy=str(folder/'policy'), data=str(folder/'data'), bank=str(folder/'bank'),
                                 references=str(folder/'references'), pairs=200, held_out=100, budgets=[0, .2, 1], policies=[.2], replicates=2)


@pytest.fixture(scope='module')
def study(place):
    folder, made, given = place
    cfg = HybridConfig(**given)
    hybrid.run(cfg)
    return cfg, list(made), hybrid.run(cfg).done


def rows_of(cfg, name): return list(csv.DictReader(open(Path(cfg.out)/name)))


def test_study_makes_its_runs_in_order(study):
    cfg, made, done = study
    names = [Path(j.out).name for j in made]
    assert done and len(names) == len({*names}) == 4 + 2*(2 + 1 + 6 + 1) + 6
    assert max(names.index(f'reward_model_{h}_half_0_{k}') for h in ('first', 'second') for k in (0, 1)) < names.index('reward_model_in_place_0_0')
    seeds = {Path(j.out).name: j.settings['seed'] for j in made}
    assert (seeds['simulated_0'], seeds['simulated_1'], seeds['people_0'], seeds['people_1']) == (0, 1000, 500, 1500)
    assert seeds['reward_model_people_20_1'] == 1000 and all(j.settings['label_flip'] == .25*('simulated' in j.out) for j in made if j.notebook == 'annotators')


def test_the_first_models_have_not_seen_the_labels_they_are_asked_about(study):
    cfg, _, _ = study
    halves = [{tuple(pair_identity(r)) for r in json.loads(Path(f'{cfg.out}_study/labels_{h}_half_0_0.json').read_text())} for h in ('first', 'second')]
    learn, _ = hybrid.labels_and_votes(cfg, 0)
    assert not halves[0] & halves[1] and halves[0] | halves[1] == {tuple(pair_identity(r)) for r in learn} and min(map(len, halves)) > 70
    asked_about = {}
    with pytest.MonkeyPatch.context() as m:
        from alpaca_farm.core import rewards
        m.setattr(rewards, 'reward', lambda spec, cfg: (lambda rs: asked_about.setdefault('first' in spec, {(r['instruction'], r['input']) for r in rs}) and [float(len(r['output'])) for r in rs]))
        leads = hybrid.with_leads(cfg, 0, learn)
    for first, of in ((True, halves[0]), (False, halves[1])):
        assert not asked_about[first] & {(r['instruction'], r['input']) for r in learn if tuple(pair_identity(r)) in of}
    assert all(np.sign(r['lead']) == np.sign(len(r['output_2']) - len(r['output_1'])) for r in leads)


def test_study_adds_up(study):
    cfg, _, _ = study
    rows = rows_of(cfg, 'results.csv')
    assert len(rows) == 16 and {r['replicate'] for r in rows} == {'0', '1'}
    good, bad = (next(r for r in rows if r['arm'] == arm and r['share'].startswith('0.2')) for arm in ('people', 'in place'))
    assert float(good['majority']) > .8 > .3 > float(bad['majority']) and float(good['majority']) + float(bad['majority']) == pytest.approx(1, abs=.1)
    assert float(good['best_of_n']) > .5 > float(bad['best_of_n'])
    across = rows_of(cfg, 'curves.csv')
    for r in across:
        of = [float(q[r['measure']]) for q in rows if (q['arm'], q['share']) == (r['arm'], r['share']) and q[r['measure']]]
        assert float(r['value']) == pytest.approx(np.mean(of), abs=1e-4) and float(r['low']) <= float(r['value']) <= float(r['high'])
        assert len(of) == int(r['replicates']) == 2 - (r['measure'] == 'dpo')
        if len(of) == 2: assert float(r['sd']) == pytest.approx(np.std(of, ddof=1), abs=1e-4)
    apart = next(r for r in rows_of(cfg, 'differences.csv') if (r['measure'], r['arm'], r['share'], r['over']) == ('majority', 'people', '0.20000', '0.20000'))
    assert float(apart['difference']) == pytest.approx(float(good['majority']) - float(bad['majority']), abs=.02) and float(apart['low']) > 0
    assert int(apart['replicates']) == 2 and float(apart['sd']) < .05
    points = {(r['arm'], r['share'], r['over']) for r in rows_of(cfg, 'differences.csv')}
    assert ('in place', '0.20000', '0.00000') in points and ('people', '1.00000', '0.00000') in points and not any(a == 'in place' and b == c for a, b, c in points)
    assert read_summary(cfg.out)['models'] == 4 + 20 + 6


def test_intervals_contain_the_spread_of_replicates():
    "Three replicates that differ by far more than their pairs do, on common pairs and on pairs of their own; one replicate has the interval over its pairs."
    from alpaca_farm.core.stats import bootstrap
    from alpaca_farm.hybrid_measures import arm_differences, budget_curves
    rng = np.random.default_rng(0)
    for sizes in ((200, 200, 200), (200, 190, 180)):
        points = {(arm, .1, k): (k*.1 if arm == 'people' else 0) + .01*rng.normal(size=n) for arm in ('in place', 'people') for k, n in enumerate(sizes)}
        bought = [dict(arm=a, share=s, humans=1, simulated=1, dollars=3.) for a, s, _ in points]
        curve = next(r for r in budget_curves(dict(agrees=points), bought) if r['arm'] == 'people')
        apart, = arm_differences(dict(agrees=points))
        for row in (curve, apart): assert row['replicates'] == 3 and row['high'] - row['low'] == pytest.approx(2*4.3027*row['sd']/3**.5, rel=.01)
    alone = {p: v for p, v in points.items() if p[2] == 1}
    row = next(r for r in budget_curves(dict(agrees=alone), bought) if r['arm'] == 'people')
    assert row['replicates'] == 1 and (row['low'], row['high']) == bootstrap(alone['people', .1, 1])[1:]


def test_calibration_table(study):
    cfg, _, _ = study
    rows = rows_of(cfg, 'calibration.csv')
    assert [int(r['votes']) for r in rows] == [0, 0] + [40]*3 + [200]*3 and all(.4 < float(r['log_loss']) < 1.2 for r in rows)
    naive, before, few = rows[:3]
    losses = []
    for k in (0, 1):
        for r in hybrid.labels_and_votes(cfg, k)[1]: losses.append(-np.log(.58 if r['vote'] == r['preference'] else .42))
    assert float(before['log_loss']) == pytest.approx(np.mean(losses), abs=1e-4) and float(before['difference']) == 0
    assert float(naive['log_loss']) - float(before['log_loss']) == pytest.approx(float(naive['difference']), abs=2e-5)
    assert float(few['sd']) > 0 and rows[-1]['sd'] == ''                          # of all votes there is one draw


def test_pairs_are_joined_whatever_their_order(study, capsys):
    cfg, _, _ = study
    learn, aside = hybrid.labels_and_votes(cfg, 0)
    assert len(learn) + len(aside) == 299 and '1 of 300 pairs lack a label' in capsys.readouterr().out
    simulated, human = (Path(f'{cfg.out}_study/{n}_0/preferences.json') for n in ('simulated', 'people'))
    kept = human.read_text()
    human.write_text(json.dumps([dict(r, output_1=r['output_2'], output_2=r['output_1'], preference=3 - r['preference']) for r in json.loads(kept)]))
    assert hybrid.labels_and_votes(cfg, 0)[0] == learn
    human.write_text(kept)
    pairs = hybrid.study_pairs(cfg)
    assert [r['shown_first'] for r in learn] == (1 + shown_swapped(pairs, 0)).tolist()[:200]
    assert not {'expected', 'flipped'} & {*learn[0]}                               # what no user knows


def test_labels_from_files(place):
    "Pairs that a person has labelled on the page, and recorded labels with the order they were shown in: read as they are, and people's votes have the last word."
    folder, made, given = place
    pairs, book = hybrid.study_pairs(HybridConfig(**given)), Store(f'{folder}/answers.sqlite')
    simulate_person(LabellingPage(LabellingQueue(pairs[::-1][:90], book, 'Ann'), key_delay=0), world.people.annotators[0], 90)
    ann = person_labels(book, pairs, 'Ann')
    sim = [dict(r, shown_first=1 + i % 2) for i, r in enumerate(annotate_pairs(pairs, world.pool, 5, .25))]
    other = [dict(r, output_1=r['output_2'], output_2=r['output_1'], preference=3 - r['preference'], shown_first=3 - r['shown_first']) for r in sim]
    write(folder/'ann.json', ann)
    write(folder/'sim.json', other)
    mine = given | dict(annotators=f'{folder}/sim.json', people=f'{folder}/ann.json', judge='', out=f'{folder}/ours', policies=[])
    with pytest.raises(ValueError, match='60 labelled pairs to learn from and 30 others; lower'): hybrid.run(HybridConfig(**mine | dict(pairs=60, held_out=40)))
    cfg = HybridConfig(**mine | dict(pairs=60, held_out=30))
    before = len(made)
    hybrid.run(cfg)
    assert not [j for j in made[before:] if j.notebook in ('annotators', 'dpo')]
    learn, aside = hybrid.labels_and_votes(cfg, 0)
    by = {tuple(pair_identity(r)): r for r in sim}
    for r in learn + aside:
        told = by[tuple(pair_identity(r))]
        same = told['output_1'] == r['output_1']
        assert r['annotator'] == told['annotator'] and r['preference'] == (told['preference'] if same else 3 - told['preference'])
        assert r['shown_first'] == (told['shown_first'] if same else 3 - told['shown_first'])
    assert {r['measure'] for r in rows_of(cfg, 'curves.csv')} == {'agrees'}
    lead = np.diff([[u for u in world.utility([dict(r, output=r[k]) for r in aside])] for k in ('output_1', 'output_2')], axis=0)[0]
    right = np.mean(np.where(lead == 0, .5, (lead > 0) == (np.array([r['vote'] for r in aside]) == 2)))
    row = next(r for r in rows_of(cfg, 'curves.csv') if r['arm'] == 'people' and float(r['share']) == 1)
    assert float(row['value']) == pytest.approx(right, abs=1e-4)
    write(folder/'strangers.json', [dict(ann[0], instruction='Else?')])
    with pytest.raises(ValueError, match='no label for any pair'): hybrid.study_pairs(HybridConfig(**mine | dict(people=f'{folder}/strangers.json')))
    merged = [dict(r, instruction=full_instruction(r), input='') for r in other]             # as AlpacaEval writes them
    write(folder/'sim.json', merged)
    assert any(r['input'] for r in learn) and hybrid.labels_and_votes(cfg, 0) == (learn, aside)


def never(pairs): return [float('nan')]*len(pairs)


def test_what_would_fail_late_is_refused_first(place):
    folder, made, given = place
    write(folder/'elsewhere'/'candidates.json', [dict(instruction='Else?', input='', output=['a', 'b'])])
    write(folder/'ragged'/'candidates.json', [dict(r, output=r['output'][:1 + i % 2]) for i, r in enumerate(asked(30, seed=2, each=3))])
    before = len(made)
    for wrong, said in [(dict(held_out=5000), 'lower one of them'), (dict(judge=f'{__name__}:never'), 'no verdict|nan'),
                        (dict(bank=f'{folder}/elsewhere'), 'no instruction in common'), (dict(bank=f'{folder}/ragged'), 'same number of answers')]:
        with pytest.raises(ValueError, match=said): hybrid.run(HybridConfig(**given | wrong | dict(out=f'{folder}/refused')))
    assert len(made) == before


def test_no_instruction_is_on_both_sides(place):
    folder, _, given = place
    write(folder/'several'/'pairs.json', [dict(bare, output_2=f'{bare["output_2"]} {k}') for bare in hybrid.study_pairs(HybridConfig(**given)) for k in 'abc'])
    pairs = hybrid.study_pairs(HybridConfig(**given | dict(outputs=f'{folder}/several/pairs.json', pairs=100, held_out=100)))
    assert len(pairs) == 200 and not {prompt_key(r) for r in pairs[:100]} & {prompt_key(r) for r in pairs[100:]}
