"Features of texts, variety by brute force, the planted bias, amplification, and the experiment with runs that are made up."
import csv
import dataclasses
import importlib
import json
import math
import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from alpaca_farm.core import launch
from alpaca_farm import effects, hybrid, overoptimization, text_measures, world
from alpaca_farm.annotators import annotate_pairs
from alpaca_farm.authors import respond
from alpaca_farm.core.launch import Job
from alpaca_farm.core.runs import read_summary
from alpaca_farm.core.stats import two_votes_agree
from alpaca_farm.core.settings import resolve
from alpaca_farm.criteria import COLUMNS, answer_matrix
from alpaca_farm.effects import EffectsConfig
from alpaca_farm.grammar import render, sample_instruction
from alpaca_farm.lexicon import CLOSINGS, FILLERS, MOODS, OPENINGS
from alpaca_farm.noise import feature_preference
from alpaca_farm.people import feature_contrast, with_bias


def sample_records(n, seed=0, each=2):
    "Requests with answers of all kinds of authors."
    rng = random.Random(seed)
    specs = [sample_instruction(rng) for _ in range(n)]
    return [dict(render(s), output=[respond(s, rng, rng.random()) for _ in range(each)]) for s in specs]


def pairs_of(records): return [dict(r, output_1=r['output'][0], output_2=r['output'][1]) for r in records if len(set(r['output'])) > 1]


# Features

@pytest.mark.parametrize('text, wanted', [
    ('', (0, 0, 0, 0, 0.)), ('Cows.', (1, 5, 0, 0, 0.)), ('- cows\n- barns', (4, 14, 1, 0, 0.)),
    ('Sure! You need:\n1. eggs\n2. ham\nGood luck!', (9, 41, 1, 2, 0.)),
    ('a b c a b c', (6, 11, 0, 0, 1/4)), ('no no no no no', (5, 14, 0, 0, 2/3)), ('A b c. a B c!', (6, 13, 0, 0, 1/4))])
def test_features_of_a_text(text, wanted):
    assert tuple(text_measures.text_features(text).values()) == pytest.approx(wanted)


@pytest.mark.parametrize('text, n', [
    *((s, 1) for s in OPENINGS + CLOSINGS), *((s, 0) for s in FILLERS + sum(MOODS.values(), ())),
    ("I'd be happy to help! Here are two.", 1), ("That's a great question. It rains.", 1), ('Thank you for your question.', 1),
    ('I hope this helps! Please feel free to ask.', 2), ('Do not hesitate to write.', 1), ('You are welcome.', 1), ('SURE, why not?', 1),
    ('Sure enough, it rained.', 0), ('I am sure.', 0), ('The course is long, of course.', 0), ('Surely not.', 0), ('I hope it rains.', 0),
    ('Thank you for the flowers.', 0), ('If you have eggs, use them.', 0), ('Be kind. Good luck!', 1), ('What a day.', 0)])
def test_pleasantries(text, n): assert text_measures.count_pleasantries(text) == n


def test_pleasantries_are_the_worlds():
    records = [dict(r, output=o) for r in sample_records(800, each=1) for o in r['output']]
    theirs = answer_matrix(records)[:, COLUMNS.index('pleasantries')]
    assert np.mean([text_measures.count_pleasantries(r['output']) == t for r, t in zip(records, theirs)]) > .99


@pytest.mark.parametrize('n', [1, 2])
@pytest.mark.parametrize('answers', [['a b a', 'b c'], ['a a a a b'], ['x y', 'x y', 'y x z'], ['A, b! a', "don't do it", '']])
def test_distinct_by_brute_force(answers, n):
    words = [a.lower().replace(',', '').replace('!', '').split() for a in answers]
    grams = [tuple(w[i:i + n]) for w in words for i in range(len(w) - n + 1)]
    assert text_measures.distinct(answers, n) == pytest.approx(len(set(grams))/len(grams))
    for m in range(1, len(grams) + 1):
        every = [len({grams[i] for i in rows})/m for rows in combinations(range(len(grams)), m)]
        assert text_measures.distinct(answers, n, m) == pytest.approx(np.mean(every), abs=1e-12)


def test_variety_does_not_depend_on_the_size_of_the_set():
    answers = [o for r in sample_records(1200) for o in r['output']]
    few, many = random.Random(0).sample(answers, 300), answers
    assert text_measures.distinct(few) > 2*text_measures.distinct(many)
    assert text_measures.distinct(few, tokens=1000) == pytest.approx(text_measures.distinct(many, tokens=1000), abs=.02)
    same = [answers[0]]*300
    assert text_measures.distinct(same, tokens=1000) < .02


def test_describe():
    answers = [o for r in sample_records(200) for o in r['output']]
    found = text_measures.describe_answers(answers)
    assert found['words'] == pytest.approx(np.mean([len(a.split()) for a in answers]))
    half = 1.96*np.std([len(a.split()) for a in answers])/len(answers)**.5
    assert found['words_high'] - found['words_low'] == pytest.approx(2*half, rel=.15)
    for k in ('words', 'characters', 'list', 'pleasantries', 'repetition', 'distinct_1', 'distinct_2'):
        assert found[f'{k}_low'] <= found[k] <= found[f'{k}_high']
    assert text_measures.describe_answers(answers) == found                                  # the same again
    assert text_measures.describe_answers([dict(output=a) for a in answers]) == found
    two = text_measures.describe_answers([dict(output=answers[i:i + 2]) for i in range(0, 400, 2)])
    assert two['words'] == pytest.approx(found['words']) and two['distinct_1'] == pytest.approx(found['distinct_1'])
    shuffled = text_measures.describe_answers(random.Random(1).sample(answers, len(answers)))
    means = [k for k in found if not k.endswith(('_low', '_high'))]
    assert [shuffled[k] for k in means] == pytest.approx([found[k] for k in means])
    assert math.isnan(text_measures.describe_answers(answers[:3])['distinct_1'])


@pytest.mark.parametrize('f, message', [
    (lambda: text_measures.describe_answers([]), 'no answers'), (lambda: text_measures.describe_answers([dict(instruction='a')]), 'record 0 has no output'),
    (lambda: text_measures.describe_answers(['a', dict(output=[])]), 'record 1 has no output'),
    (lambda: text_measures.distinct(['']), 'no 1-gram'), (lambda: text_measures.distinct(['a'], 2), 'no 2-gram'),
    (lambda: text_measures.distinct(['a b'], tokens=3), '3 n-grams cannot be drawn from 2'),
    (lambda: text_measures.rarefied([1], 0), '0 n-grams cannot be drawn'),
    (lambda: text_measures.reward_per_word([dict(output_1='a', output_2='b')], [0.], [1.]), 'no slope to fit'),
    (lambda: text_measures.bias_amplification([1.], [1.], [dict(output_1='a', output_2='b', preference=1)]*2,
                                   [dict(output_1='a', output_2='b', preference=2)]*2), 'no bias to amplify')])
def test_bad_input_is_refused(f, message):
    with pytest.raises(ValueError, match=message): f()


# The planted bias

FOND_OF_WORDS = with_bias(world.pool, 'fond of words', words=.3)


def test_the_planted_bias_is_a_weight_on_words():
    pairs = pairs_of(sample_records(1500))
    apart = feature_contrast(pairs)[:, COLUMNS.index('words')]
    for one, other in zip(world.pool.annotators, world.length_biased.annotators):
        p, q = (np.clip(np.array(f(pairs[:300])) - 1, 1e-12, 1 - 1e-12) for f in (one, other))
        grown = np.log(q/(1 - q)) - np.log(p/(1 - p))
        assert np.allclose(grown, .2*apart[:300]/one.temperature, atol=1e-4)     # in logits, per word
        assert dataclasses.replace(other, weights=one.weights) == one            # and nothing else
    before, after = (feature_preference(f(pairs), text_measures.length_difference(pairs)) for f in (world.pool, world.length_biased))
    assert before < .5 < .55 < after
    people = world.people.each(pairs)
    agree = [two_votes_agree(f.each(pairs), people).mean() for f in (world.pool, world.length_biased)]
    assert abs(agree[0] - agree[1]) < (after - before)/2                         # agreement tells less


def test_with_bias():
    polite = with_bias(world.people, 'polite', pleasantries=.5, words=-.01)
    d = np.array([a.weights for a in polite.annotators]) - np.array([a.weights for a in world.people.annotators])
    wanted = [dict(pleasantries=.5, words=-.01).get(c, 0.) for c in COLUMNS]
    assert polite.name == 'polite' and np.allclose(d, wanted)
    with pytest.raises(ValueError, match='colour is not a feature of answers: choose from correct'): with_bias(world.people, 'x', colour=1.)


# Amplification and remedies

def test_doing_what_the_labels_say_is_amplification_one():
    pairs = pairs_of(sample_records(600))
    labels = {who.name: annotate_pairs(pairs, who) for who in (world.length_biased, world.pool)}
    words = {name: [len(p[f'output_{int(p["preference"])}'].split()) for p in of] for name, of in labels.items()}
    biased, unbiased = labels['length_biased'], labels['pool']
    found = text_measures.bias_amplification(words['length_biased'], words['pool'], biased, unbiased)
    assert found.value == pytest.approx(1) and found.low < 1 < found.high
    thrice = text_measures.bias_amplification(3*np.array(words['length_biased']), 3*np.array(words['pool']), biased, unbiased)
    assert thrice.value == pytest.approx(3) and thrice.low == pytest.approx(3*found.low)
    still = text_measures.bias_amplification(words['pool'], words['pool'], biased, unbiased)
    assert still == (0, 0, 0)
    swapped = [[dict(p, output_1=p['output_2'], output_2=p['output_1'], preference=3 - p['preference']) for p in of] for of in (biased, unbiased)]
    assert text_measures.bias_amplification(words['length_biased'], words['pool'], *swapped) == found


def test_balanced_pairs():
    labels = annotate_pairs(pairs_of(sample_records(1500)), FOND_OF_WORDS)
    fair, apart = text_measures.balance_lengths(labels), text_measures.length_difference(labels)
    gains = text_measures.preferred_length_gain(fair)
    assert (gains > 0).sum() == (gains < 0).sum() > 100
    assert abs(gains.mean()) < .1 < .4 < text_measures.preferred_length_gain(labels).mean()
    assert sum(w == 0 for w in text_measures.length_difference(fair)) == (apart == 0).sum()
    texts = lambda rows: {json.dumps(r) for r in rows}
    assert texts(fair) < texts(labels) and texts(text_measures.balance_lengths(labels[::-1])) <= texts(labels)
    assert text_measures.balance_lengths(labels) == fair != text_measures.balance_lengths(labels, seed=1)
    assert texts(text_measures.balance_lengths(fair)) <= texts(fair)
    alone = [dict(instruction='a', output_1='x', output_2='x y', preference=2.)]
    assert text_measures.balance_lengths(alone) == [] and text_measures.balance_lengths(alone, alone*3) == []
    assert text_measures.balance_lengths([dict(alone[0], output_2='z')]) == [dict(alone[0], output_2='z')]


def test_matched_pairs_have_the_taste_of_the_audit():
    pairs = pairs_of(sample_records(1500))
    labels, others = annotate_pairs(pairs, FOND_OF_WORDS), pairs_of(sample_records(1200, seed=5))
    audit, nearer = annotate_pairs(others, world.pool), annotate_pairs(others, with_bias(world.pool, 'nearer', words=.15))
    liking = lambda rows: feature_preference([r['preference'] for r in rows], text_measures.length_difference(rows))
    matched = text_measures.balance_lengths(labels, audit)
    assert liking(labels) > liking(audit) + .05 and liking(matched) == pytest.approx(liking(audit), abs=.02)
    assert len(matched) < len(text_measures.balance_lengths(labels, nearer)) < len(labels)
    opposite = [dict(r, preference=3 - r['preference']) for r in labels]              # too few longer ones: shorter ones go
    assert liking(text_measures.balance_lengths(opposite, audit)) == pytest.approx(liking(audit), abs=.02)


def test_a_price_for_words_takes_length_out_of_a_reward():
    pairs, rng = pairs_of(sample_records(1500)), np.random.default_rng(0)
    words = lambda k: text_measures.count_words(p[k] for p in pairs)
    fixed = rng.normal(size=len(pairs), scale=9)                                  # what all answers to a request share does not matter
    one, other = (fixed + .2*words(k) + rng.normal(size=len(pairs)) for k in ('output_1', 'output_2'))
    a = text_measures.reward_per_word(pairs, one, other)
    assert a == pytest.approx(.2, abs=.02)
    cost = resolve(f'alpaca_farm.text_measures:words_cost_{a}')
    paid = [np.array(cost([dict(output=p[k]) for p in pairs])) for k in ('output_1', 'output_2')]
    assert text_measures.reward_per_word(pairs, one + paid[0], other + paid[1]) == pytest.approx(0, abs=1e-12)
    trusted = 1/(1 + np.exp(-(other - .15*words('output_2') - one + .15*words('output_1'))))   # .05 would be right
    audit = [dict(p, preference=1 + float(v)) for p, v in zip(pairs, trusted)]
    assert text_measures.excess_per_word(audit, one, other) == pytest.approx(.15, abs=1e-6)                  # soft labels: exactly
    assert text_measures.excess_per_word(audit, 5*one, 5*other) == pytest.approx(.75, abs=1e-5)              # in the reward's units
    with pytest.raises(ValueError, match='do not follow the scores'): text_measures.excess_per_word(audit, -one, -other)
    for wrong in ('words_cost_', 'words_cost_x', 'words_cost_1.2.3', 'nothing'):
        with pytest.raises(ValueError, match='has no'): resolve(f'alpaca_farm.text_measures:{wrong}')


# The experiment

@pytest.mark.parametrize('given, message', [
    (dict(outputs=[]), 'outputs is empty'), (dict(tokens=0), 'tokens = 0'), (dict(pairs=10), 'pairs = 10: it must be at least 400'),
    (dict(held_out=0), 'held_out = 0'), (dict(label_flip=.6), 'label_flip = 0.6'), (dict(workers=-1), 'workers = -1'),
    (dict(biased='alpaca_farm.world:pool'), 'the same as annotators'), (dict(biased='alpaca_farm.world:nobody'), 'has no nobody')])
def test_settings_refuse_nonsense(given, message):
    with pytest.raises(ValueError, match=message): EffectsConfig(**given)


def test_without_the_study_nothing_else_is_read():
    assert EffectsConfig().inputs == EffectsConfig.inputs and list(EffectsConfig(study=False).inputs) == ['outputs', 'data']
    with pytest.raises(FileNotFoundError, match='nowhere/runs'): EffectsConfig(study=False, outputs=['nowhere/runs/sft'])


def test_jobs_set_only_settings_of_their_notebooks():
    jobs = effects.effect_jobs(EffectsConfig())
    assert len({j.out for j in jobs}) == len(jobs) and sum(j.cost for j in jobs) < 60*len(jobs)
    made = {j.out for j in jobs}
    for j in jobs:
        module = importlib.import_module(f'alpaca_farm.{j.notebook}')
        cls = next(v for k, v in vars(module).items() if k.endswith('Config') and getattr(v, '__module__', '') == module.__name__)
        assert set(j.settings) <= {f.name for f in dataclasses.fields(cls)}, j.out
        assert set(j.needs) <= made
    of = {Path(j.out).name: j.settings for j in jobs}
    for method in effects.effect_methods():                                                 # two arms differ in their labels only
        a, b = of[f'{method}_unbiased'], of[f'{method}_biased']
        differ = {k for k in a if a[k] != b[k]}
        assert differ in ({'preferences'}, {'reward_model'}) and set(a) == set(b)
    assert {j.settings.get('eval_temperature') for j in jobs if j.notebook not in ('annotators', 'reward_model')} == {1.}
    assert {k for k, v in of['annotators_biased'].items() if v != of['annotators_unbiased'][k]} == {'annotators'}


def test_policies_answer_as_warm_as_what_they_are_compared_with(tmp_path):
    for name, t in dict(bank=.5, references=.5, warm=1.).items():
        write(tmp_path/name/'config.json', dict(notebook='best_of_n', fingerprint='', settings=dict(temperature=t)))
        write(tmp_path/name/'candidates.json', [dict(instruction='Say.', output=['a', 'b'])])
    at = lambda bank: EffectsConfig(bank=str(tmp_path/bank), references=str(tmp_path/'references'))
    for job in effects.arm_jobs(at('bank'), 'biased', ('dpo', 'rloo', 'feedme'))[1:]: assert job.settings['eval_temperature'] == .5
    with pytest.raises(ValueError, match='at one temperature'): effects.effect_jobs(at('warm'))
    given = dict(bank=str(tmp_path/'bank'), references=str(tmp_path/'references'))
    dpo = hybrid.point_jobs(hybrid.HybridConfig(**given), 'in place', 0., 0)[1]
    assert (dpo.notebook, dpo.settings['eval_temperature']) == ('dpo', .5)
    with pytest.raises(ValueError, match='at one temperature'): hybrid.load_bank(hybrid.HybridConfig(**given | dict(bank=str(tmp_path/'warm'))))
    over = overoptimization.OverConfig(**given)
    with pytest.raises(ValueError, match='temperature = 1.0: bank and references were sampled at 0.5'): overoptimization.bank_and_references(over)


GROWN = dict(unbiased=0, biased=4, balanced=1, matched=3, priced=2)  # words by which every made-up policy is longer


@pytest.fixture(scope='module')
def experiment(tmp_path_factory):
    "The experiment with made-up runs: (its settings, how many jobs were asked for)."
    folder, asked_for = tmp_path_factory.mktemp('effects'), []
    records = sample_records(500, seed=1)
    questions = [dict(r, output=r['output'] + [o + ' and more' for o in r['output']]) for r in sample_records(40, seed=2)]
    write(folder/'world'/'eval.json', [dict(r, output=r['output'][0]) for r in questions])
    for name in ('bank', 'references', 'candidates'): write(folder/name/'candidates.json', questions)
    for name in ('sft', 'samples'): write(folder/name/'outputs.json', [dict(r, output=r['output'][0]) for r in questions])

    def run_jobs(jobs: list[Job], workers, name):
        for j in jobs:
            asked_for.append(j.out)
            arm = j.out.rpartition('_')[2]
            if j.notebook == 'annotators': write(Path(j.out)/'preferences.json', annotate_pairs(pairs_of(records), resolve(j.settings['annotators'])))
            elif 'data' in j.settings: write(Path(j.out)/'outputs.json', [dict(r, output=r['output'][0] + ' cow'*GROWN[arm]) for r in questions])
            write(Path(j.out)/'config.json', dict(notebook=j.notebook, fingerprint=j.out, core='', exported='', given={}, settings={}))
            write(Path(j.out)/'summary.json', dict(kl=1.))
        return []

    def reward(spec, cfg):
        per_word = dict(unbiased=0., biased=.3, balanced=-.1, matched=.1)[spec.rpartition('_')[2]]
        return lambda rs: [per_word*len(r['output'].split()) + u for r, u in zip(rs, world.utility(rs))]

    from alpaca_farm.core import rewards
    with pytest.MonkeyPatch.context() as m:
        m.setattr(launch, 'run_jobs', run_jobs); m.setattr(rewards, 'reward', reward)
        at = {k: str(folder/k) for k in ('samples', 'bank', 'references', 'candidates')} | dict(policy=str(folder/'sft'), data=str(folder/'world'))
        cfg = EffectsConfig(out=str(folder/'effects'), outputs=[str(folder/'sft')], pairs=400, held_out=80, **at)
        effects.run(cfg)
        return cfg, list(asked_for), effects.run(cfg).done


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def rows_of(cfg, name): return list(csv.DictReader(open(Path(cfg.out)/name)))


def test_experiment_makes_each_run_once_in_order(experiment):
    cfg, jobs, done = experiment
    assert done and len(jobs) == len(set(jobs)) == len(effects.effect_jobs(cfg))
    assert [Path(j).name for j in jobs[:2]] == ['annotators_unbiased', 'annotators_biased'] and jobs[-1].endswith('rloo_priced')


def test_experiment_measures_what_was_made_up(experiment):
    cfg, _, _ = experiment
    labels = {arm: effects.arm_labels(cfg, arm)[:400] for arm in ('unbiased', 'biased', 'balanced', 'matched')}
    unit = (text_measures.preferred_length_gain(labels['biased']) - text_measures.preferred_length_gain(labels['unbiased'])).mean()
    rows = {(r['method'], r['arm']): r for r in rows_of(cfg, 'policies.csv')}
    arms = {'best_of_n': {*GROWN, 'neutral'}, 'dpo': {'unbiased', 'biased', 'balanced', 'matched'}, 'rloo': {'unbiased', 'biased', 'priced'}}
    assert {m: {a for n, a in rows if n == m} for m in arms} == arms and len(rows) == 6 + 4 + 3 + 2*(len(effects.effect_methods()) - 2)
    assert list(dict.fromkeys(m for m, _ in rows)) == ['best_of_n', *effects.effect_methods()]
    for (method, arm), r in rows.items():
        assert (r['amplification'] == '') == (arm == 'unbiased')
        assert float(r['people_low']) <= float(r['people']) <= float(r['people_high'])
        if method == 'best_of_n' or arm == 'unbiased': continue
        assert float(r['amplification']) == pytest.approx(GROWN[arm]/unit, rel=1e-3)
        assert float(r['amplification_low']) <= float(r['amplification']) <= float(r['amplification_high'])
    words = {arm: float(r['words']) for (method, arm), r in rows.items() if method == 'best_of_n'}
    assert words['balanced'] < words['unbiased'] < words['matched'] < words['biased'] and words['neutral'] < words['biased'] > words['priced']
    of = {(r['of'], r['arm']): r for r in rows_of(cfg, 'feedback.csv')}
    pays = {arm: float(r['per_word']) for (what, arm), r in of.items() if what == 'reward'}
    assert pays['biased'] - pays['unbiased'] == pytest.approx(.3, abs=1e-4) and abs(pays['neutral']) < .1
    assert pays['priced'] == pytest.approx(pays['biased'] - float(of['reward', 'priced']['price']), abs=1e-4)
    assert float(of['reward', 'biased']['longer']) > float(of['reward', 'unbiased']['longer']) + .1
    assert float(of['labels', 'biased']['longer']) > float(of['labels', 'unbiased']['longer']) + .05
    assert int(of['labels', 'balanced']['pairs']) < 400 and abs(float(of['labels', 'balanced']['longer']) - .5) < .07
    assert read_summary(cfg.out)['amplification_dpo_biased'] == pytest.approx(GROWN['biased']/unit)


def test_answers_are_compared_with_all_references():
    records = sample_records(30, seed=3, each=3)
    mine, theirs = [dict(r, output=r['output'][0]) for r in records], [dict(r, output=r['output'][1:]) for r in records]
    slowly = [np.mean([world.people([dict(m, output_1=o, output_2=m['output'])])[0] - 1 for o in t['output']]) for m, t in zip(mine, theirs)]
    assert effects.win_probability(mine, theirs[::-1], world.people) == pytest.approx(slowly)
