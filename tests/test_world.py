"The embedded world: requests that can be read back, answers marked by rules, people and judges that differ, and its splits."
import math
import random
import re

import numpy as np
import pytest

from alpaca_farm import people, world
from alpaca_farm.authors import respond
from alpaca_farm.core.files import read_json, write_json
from alpaca_farm.core.preferences import hash_uniform
from alpaca_farm.core.stats import agreement, off_diagonal_mean, two_votes_agree
from alpaca_farm.core.text import decode, encode_prompts, encode_responses
from alpaca_farm.criteria import COLUMNS, CRITERIA, QUALITY, Reading, UTILITY, answer_features, answer_matrix, constraints, utility
from alpaca_farm.grammar import AFTER, BEFORE, FORMS, HARD, KINDS, ROWS, TONES, fitting, is_new, parse, render, sample_instruction, sample_slots, text
from alpaca_farm.lexicon import ANIMALS, CLOSINGS, FACTS, FILLERS, OPENINGS, VALUES, common_mistake, fact_of
from alpaca_farm.prose import TEXTS, facts_text, sample_page, talk_text


def spec_of(row, form, tone, rng):
    "A request with the wording of a row, in a form and a tone."
    after = rng.choice(AFTER[tone])
    before = rng.choice([x for x in BEFORE[tone] if tone != 'courteous' or x or after])
    return dict(sample_slots(rng, row), kind=row.kind, form=form, tone=tone, template=row.template, given=row.input,
                phrase=rng.choice(FORMS[form]), before=before, after=after)


def all_specs(seed):
    "A request of every row in every form and tone."
    rng = random.Random(seed)
    return [spec_of(row, form, tone, rng) for row in ROWS for form in row.forms for tone in TONES]


def answered(specs, rng, skill): return [dict(render(s), output=respond(s, rng, skill)) for s in specs]


def sample_pairs(n, seed=0):
    "Pairs of different answers by authors of all skills."
    rng, found = random.Random(seed), []
    while len(found) < n:
        s = sample_instruction(rng)
        pair = dict(render(s), output_1=respond(s, rng, rng.random()), output_2=respond(s, rng, rng.random()))
        if pair['output_1'] != pair['output_2']: found.append(pair)
    return found


def mark(request, answer): return dict(zip(COLUMNS, answer_features(request, answer)))


# The lexicon
def test_every_fact_has_another_value_as_its_common_mistake():
    for animal in ANIMALS:
        for fact in FACTS:
            wrong = common_mistake(animal, fact)
            assert wrong in VALUES[fact] and wrong != fact_of(animal, fact)


# The grammar
@pytest.mark.parametrize('seed', range(4))
def test_parse_inverts_render(seed):
    rng = random.Random(seed)
    for _ in range(1500):
        spec = sample_instruction(rng)
        read = parse(text(render(spec)))
        assert read == spec
        assert is_new(read) == is_new(spec)


def test_every_row_form_and_tone_can_be_sampled_and_parsed():
    specs = all_specs(1)
    assert {(s['kind'], s['template'], s['given']) for s in specs} == {(r.kind, r.template, r.input) for r in ROWS}
    for spec in specs: assert parse(text(render(spec))) == spec


def test_sampling_reaches_every_kind_form_tone_and_row():
    rng = random.Random(3)
    specs = [sample_instruction(rng) for _ in range(6000)]
    assert {s['kind'] for s in specs} == set(KINDS)
    assert {s['tone'] for s in specs} == set(TONES) and {s['form'] for s in specs} == set(FORMS)
    assert {(s['template'], s['given']) for s in specs} == {(r.template, r.input) for r in ROWS}
    for kind, share in KINDS.items(): assert abs(np.mean([s['kind'] == kind for s in specs]) - share) < .02


def test_the_share_of_hard_kinds_is_a_setting():
    rng = random.Random(4)
    for hard in (0., .6, 1.):
        kinds = [sample_instruction(rng, hard)['kind'] for _ in range(2000)]
        assert abs(np.mean([k in HARD for k in kinds]) - hard) < .04


def test_a_request_to_choose_has_one_right_option():
    for spec in all_specs(5):
        if spec['kind'] == 'choose': assert len(fitting(spec)) == 1


@pytest.mark.parametrize('request_', ['', 'Who are you?', 'Name three things at the moon.', 'Where does a otters live?',
                                      'Name three things at the lake. Where does a bear live?', 'Where does a bear live? What is 2 + 2?'])
def test_a_foreign_request_is_refused(request_):
    with pytest.raises(ValueError, match='is not a request of the embedded world'): parse(request_)


def test_tone_and_form_are_not_content():
    same = [parse(r) for r in ('Where does a bear live?', 'Hi there! Where does a bear live? Answer in one word. Thank you!')]
    assert is_new(same[0]) == is_new(same[1])
    changed = [is_new(parse(f'Where does {"an" if a[0] in "aeiou" else "a"} {a} live?')) for a in ANIMALS]
    assert len(set(changed)) == 2                     # content is


# Answers and their marks
@pytest.mark.parametrize('seed', range(3))
def test_an_expert_gets_exactly_two_for_every_kind_form_and_tone(seed):
    specs = all_specs(seed)
    for spec, row in zip(specs, answer_matrix(answered(specs, random.Random(seed), 1.))):
        assert row[:len(CRITERIA)].tolist() == [1, 0, 0, 0, 0, 0], text(render(spec))
    assert utility(answered(specs, random.Random(seed), 1.)) == [2.]*len(specs)


@pytest.mark.parametrize('kind', KINDS)
def test_skill_pays_for_every_kind(kind):
    rng = random.Random(6)
    specs = [s for s in all_specs(6) if s['kind'] == kind]
    specs = (specs*200)[:200]
    means = [np.mean(utility(answered(specs, rng, skill))) for skill in (0., .5, 1.)]
    assert means[0] < means[1] - .2 and means[1] < means[2] - .2 and means[2] == 2


NOTE = 'Write a formal note to thank Anna for the scarf. Sign it Ben.'
STORY = 'Write a story with a sad end about a shy crab at the lake in three sentences.'
PAST = 'Put the sentence into the past. The shy crab sleeps at the lake.'
GIVEN = 'What does Anna have? Answer in one word. Anna has a red kite. Ben has a green lamp.'
COUNT = 'How many things are in the list? Answer in one word. hat, lamp, cup'
CHOOSE = 'Which of these can build: an ant, a bear or a beaver?'
ORDER = 'Put these animals in order from the largest. Write a list. ant, bear, cat'
MARKED = [  # request, answer, correctness, broken constraints
    ('Where does a bear live?', 'The home of a bear is the cave.', 1, 0),
    ('Where does a bear live?', 'Cave', 1, 0),
    ('Where does a bear live?', '', 0, 1),                                       # empty
    ('Where does a bear live?', 'Sure! I hope this helps.', 0, 1),               # says nothing
    ('Where does a bear live?', 'Honey.', 0, 1),                                 # a value of another fact
    ('Where does a bear live?', 'A bear lives in the den.', 0, 0),
    ('Where does a bear live?', 'A bear lives in the cave or the den.', 0, 0),   # two values
    ('Where does a bear live?', ', '.join(VALUES['home']), 0, 0),                # all values
    ('Where does a bear live?', 'A wolf lives in the cave.', 0, 0),              # the right value in a wrong sentence
    ('Where does a bear live? Answer in one word.', 'Cave.', 1, 0),
    ('Where does a bear live? Answer in one word.', 'A bear lives in the cave.', 1, 1),
    ('Where does a bear live? Answer in one word.', 'Sure! Cave.', 1, 1),        # a pleasantry where a word was asked for
    ('Where does a bear live? Answer in one word.', '- cave', 1, 1),             # a list instead of a word
    ('Where does a bear live? Answer in one word. Be brief.', '', 0, 3),
    ('Where does a bear live? Answer in one word. Be brief.', 'Good luck!', 0, 3),
    ('Where does a bear live? Use a whole sentence.', 'Cave.', 1, 1),
    ('Where does a bear live? Use a whole sentence.', 'A bear lives in the cave. It is brown.', 1, 1),
    ('Hello! Where does a bear live?', 'A bear lives in the cave.', 1, 1),       # courtesy is missed
    ('Hello! Where does a bear live?', 'A bear lives in the cave. Good luck!', 1, 0),
    ('Where does a bear live? Be brief.', 'Cave. Good luck!', 1, 1),             # and a fault
    ('Where does a bear live?', 'Cave. Good luck!', 1, 0),                       # or nothing
    ('Describe a bear. Say what it eats and where it lives.', 'It eats honey. It lives in the cave.', 1, 0),
    ('Describe a bear. Say what it eats and where it lives.', 'It eats honey.', .5, 0),
    ('Describe a bear. Say what it eats and where it lives.', 'It eats honey. It lives in the den.', 0, 0),
    ('Describe a bear. Say what it eats and where it lives. Write a list.', '- food: honey\n- home: cave\n', 1, 0),
    ('Describe a bear. Say what it eats and where it lives. Write a list.', 'Honey, cave.', 1, 1),
    ('Describe a bear. Say what it eats and where it lives. Write a list.', 'A bear:\n- honey\n- cave', 1, 1),
    (CHOOSE, 'Beaver.', 1, 0), (CHOOSE, 'A beaver can build.', 1, 0), (CHOOSE, 'Bear.', 0, 0), (CHOOSE, '', 0, 1),
    (CHOOSE, 'A beaver, a bear or an ant.', 0, 0), (CHOOSE, 'Beaver, not bear.', 0, 0), (CHOOSE, 'They can build.', 0, 1),
    ('Which animal is smaller, a bear or an ant?', 'An ant is smaller than a bear.', 1, 0),
    ('Which animal is smaller, a bear or an ant?', 'A bear is smaller than an ant.', 0, 0),
    ('Which animal is smaller, a bear or an ant?', 'An ant, a bear.', 0, 0),
    ('Which animal is smaller, a bear or an ant?', 'A cat.', 0, 0),
    (ORDER, '- bear\n- cat\n- ant', 1, 0), (ORDER, '- ant\n- cat\n- bear', .25, 0), (ORDER, 'Bear, cat and ant.', 1, 1),
    (ORDER, '- bear\n- cat\n- cat\n- ant', 0, 0), (ORDER, '- bear\n- cat', 0, 0), (ORDER, '- bear\n- cat\n- ant\n- frog', 0, 0),
    (ORDER, '- bear', 0, 2),
    (GIVEN, 'Kite.', 1, 0), (GIVEN, 'Lamp.', 0, 0), (GIVEN, 'Anna has a red kite.', 1, 1), (GIVEN, 'Anna has a green kite.', 0, 1),
    (GIVEN, 'Ben has a red kite.', 0, 1), (GIVEN, 'Kite, lamp.', 0, 0), (GIVEN, 'Anna.', 0, 3), (GIVEN, '', 0, 3),
    (COUNT, 'Three.', 1, 0), (COUNT, 'Two.', 0, 0), (COUNT, 'Two three.', 0, 0), (COUNT, 'There are three things in the list.', 1, 1),
    (COUNT, 'Hat.', 0, 3),
    ('Ben has six kites and loses two. How many kites are there now?', 'There are four kites now.', 1, 0),
    ('Ben has six kites and loses two. How many kites are there now?', 'Six and two make eight.', 0, 0),
    ('Ben has six kites and loses two. How many kites are there now?', 'Ben has kites.', 0, 1),
    (PAST, 'The shy crab slept at the lake.', 1, 0), (PAST, 'The shy crab sleeps at the lake.', .5*6/7, 0), (PAST, '', 0, 1),
    (PAST, 'The brave crab slept at the farm.', .5*5/7, 0), (PAST, 'The crab slept.', 0, 1),
    ('Turn the sentence into a question. The shy crab sleeps at the lake.', 'Does the shy crab sleep at the lake?', 1, 0),
    ('Turn the sentence into a question. The shy crab sleeps at the lake.', 'Does the shy crab sleep at the lake.', .5, 0),
    ('Rewrite the sentence about a frog. The shy crab sleeps at the lake.', 'The shy frog sleeps at the lake.', 1, 0),
    ('Rewrite the sentence so that it happens at the farm. The shy crab sleeps at the lake.', 'The shy crab sleeps at the farm.', 1, 0),
    ('Name two things at the lake.', 'Swans, reeds.', 1, 0),
    ('Name two things at the lake.', 'Swans.', .5, 1),                           # too few
    ('Name two things at the lake.', 'Swans, swans.', 0, 1),                     # repeated
    ('Name two things at the lake.', 'Swans, boats.', 0, 0),                     # foreign
    ('Name two things at the lake.', 'Swans, reeds, boats.', .5, 1),
    ('Name two things at the lake.', 'Swans, reeds, canoes, ripples, lilies.', 1, 1),  # all of them
    ('Name two things at the lake. Write a list.', '- swans\n- reeds', 1, 0),
    ('Name two things at the lake. Write a list.', 'At the lake you can see swans and reeds.', 1, 1),
    ('Name two things at the lake. Write a list.', '', 0, 3),
    ('Name two ingredients for apple pie. Write one sentence.', 'For apple pie you need butter and sugar.', 1, 0),
    ('Name two ingredients for apple pie. Write one sentence.', '- butter\n- sugar', 1, 1),
    ('Name two tools of a baker.', 'A baker uses oven and whisk.', 1, 0),
    ('Name two tools of a baker.', 'A baker uses saw and hammer.', 0, 0),
    (NOTE, 'Dear Anna, thank you for the scarf. Yours sincerely, Ben.', 1, 0),
    (NOTE, 'Hi Anna, thank you for the scarf. Cheers, Ben.', 1, 1),              # in the other register
    (NOTE, 'Dear Anna, thank you for the scarf. Cheers, Ben.', 1, 1),            # half in the other
    (NOTE, 'Dear Anna, hi Anna, thank you for the scarf. Yours sincerely, Cheers, Ben.', 1, 1),  # in both
    (NOTE.replace('formal', 'casual'), 'Dear Anna, I think: thank you for the scarf. Cheers, Ben.', 1, 1),  # "hi" in a word
    (NOTE, 'Dear Anna, thank you for the scarf.', .75, 1), (NOTE, 'Dear Anna, thank you for the flowers. Yours sincerely, Ben.', .5, 0),
    (NOTE, 'Dear Jack, thank you for the scarf. Yours sincerely, Ben.', .375, 0), (NOTE, '', 0, 2),
    (STORY, 'Once a shy crab came to the lake. It was afraid of the reeds. At last it cried.', 1, 0),
    (STORY, 'Once a shy crab came to the lake. It was afraid of the reeds. In the end it was happy.', 1, 1),
    (STORY, 'Once a shy crab came to the lake. At last it cried.', 1, 1),
    (STORY, 'Once a brave crab came to the lake. It was afraid of the reeds. At last it cried.', .5, 0),
    (STORY, 'Once a shy crab came to the lake. It was afraid of the bear. At last it cried.', .5, 0),
    (STORY, 'The end.', 0, 3)]


@pytest.mark.parametrize('request_, answer, correct, broken', MARKED)
def test_marks_by_hand(request_, answer, correct, broken):
    found = mark(request_, answer)
    assert (found['correct'], found['broken']) == (pytest.approx(correct), broken)


def test_marks_by_hand_are_of_every_kind():
    assert {parse(request)['kind'] for request, *_ in MARKED} == set(KINDS)


def test_only_wanted_courtesy_counts():
    kept = {t: constraints(parse(f'{b}Where does a bear live?{a}'), Reading('Cave. Good luck!'))
            for t, b, a in (('courteous', 'Hello! ', ''), ('neutral', '', ''), ('curt', '', ' Be brief.'))}
    assert kept == dict(courteous=dict(tone=True), neutral={}, curt=dict(tone=False))


def test_criteria_of_the_text():
    bear = 'Where does a bear live?'
    found = mark(bear, 'Sure! A bear lives in the cave. Many people like it. Good luck!')
    assert (found['idle'], found['pleasantries'], found['words'], found['list']) == (2, 2, 13, 0)  # one pleasantry is free
    assert mark(bear, '- cave')['list'] == 1
    assert mark(bear, 'A bear lives in the cave.')['odd'] == 0
    assert mark(bear, 'A bear lives lives in the cave.')['odd'] == 1
    assert mark(bear, 'An bear lives in the cave.')['odd'] > 0
    assert mark(bear, 'Bear cave the a lives in.')['odd'] == 3                       # and never more
    said_twice = mark(bear, 'A bear lives in the cave. A bear lives in the cave.')
    assert said_twice['repeats'] == pytest.approx(4/3)                               # four of ten triples
    assert mark(bear, 'A bear lives in the cave. '*9)['repeats'] == 2
    assert said_twice['excess'] == 0 and mark(bear, 'A bear lives in the cave. '*4)['excess'] == (24 - 14)/5
    assert utility([dict(instruction=bear, output='A bear lives in the den. Many people like it.')]) == [UTILITY['idle']]


CONSTANT = ['', 'Sure!', 'Cave.', 'Three.', 'Brown.', 'Bear.', 'Anna.', 'A bear lives in the cave.', 'There are three things in the list.',
            '- swans\n- reeds', 'I hope this helps.', 'It depends on many things.', ' '.join(ANIMALS) + '.', ' '.join(VALUES['colour']) + '.',
            'Dear Anna, thank you for the scarf. Yours sincerely, Ben.']


@pytest.mark.parametrize('answer', CONSTANT)
def test_a_constant_answer_is_worth_less_than_careless_ones(answer):
    rng = random.Random(7)
    specs = [sample_instruction(rng) for _ in range(400)]
    careless = np.mean(utility(answered(specs, rng, 0.)))
    assert np.mean(utility([dict(render(s), output=answer) for s in specs])) < careless - .5


@pytest.mark.parametrize('phrase', OPENINGS + CLOSINGS + FILLERS)
def test_small_talk_does_not_pay_without_reading_the_request(phrase):
    rng = random.Random(8)
    records = [r for skill in (.5, 1.) for r in answered([sample_instruction(rng) for _ in range(300)], rng, skill)]
    plain = np.mean(utility(records))
    for talk in ('{phrase} {output}', '{output} {phrase}'):
        assert np.mean(utility([dict(r, output=talk.format(phrase=phrase, **{'output': r['output']})) for r in records])) < plain - .1


def test_correctness_and_constraints_carry_the_utility():
    rng = random.Random(9)
    specs = [sample_instruction(rng) for _ in range(2000)]
    parts = answer_matrix([dict(render(s), output=respond(s, rng, rng.random())) for s in specs])*QUALITY
    shares = [np.cov(part, parts.sum(1))[0, 1]/parts.sum(1).var(ddof=1) for part in parts.T]
    assert sum(shares) == pytest.approx(1) and sum(shares[:2]) > .7


# People and judges
def preference_by_hand(person, pair):
    "The formula, feature by feature; a mistaken person takes right for wrong."
    request, spec = text(pair), parse(text(pair))
    content = [spec['kind'], *(v for k, v in spec.items() if k not in ('kind', 'form', 'tone', 'template', 'given', 'phrase', 'before', 'after'))]
    wrong = hash_uniform(person.group, '|'.join(content)) < person.misreads_together \
        or hash_uniform(person.group, person.name, '|'.join(content)) < person.misreads
    one, other = mark(request, pair['output_1']), mark(request, pair['output_2'])
    z = 0
    for weight, name in zip(person.weights, COLUMNS):
        z += weight*(other[name] - one[name])*(-1 if wrong and name == 'correct' else 1)
    return 1 + 1/(1 + math.exp(-(z - person.position_bias)/person.temperature))


def test_a_preference_is_the_formula_s():
    pairs = sample_pairs(60, seed=1)
    for annotator in [*people.people.annotators[:3], *people.pool.annotators[:3], people.judge]:
        by_hand = [preference_by_hand(annotator, p) for p in pairs]
        assert np.allclose(annotator(pairs), by_hand, atol=1e-6 if annotator.temperature > .1 else 1e-3)


def test_expected_preference_is_the_mean_over_annotators_and_orders():
    sample = sample_pairs(20, seed=3)
    swapped = [dict(p, output_1=p['output_2'], output_2=p['output_1']) for p in sample]
    slow = np.mean([[a(sample), [3 - x for x in a(swapped)]] for a in people.pool.annotators], axis=(0, 1))
    assert np.allclose(people.pool(sample), slow)
    assert np.allclose(np.array(people.people(sample)) + people.people(swapped), 3)
    assert np.allclose(people.pool.each(sample).mean(1), slow)


def test_a_mistaken_person_takes_right_for_wrong_and_nothing_else():
    fair, mistaken = (people.Person('a', tuple(QUALITY), misreads=m) for m in (0., 1.))
    bear = dict(instruction='Where does a bear live?', input='')
    right_wrong = dict(bear, output_1='Cave.', output_2='Den.')
    assert fair([right_wrong])[0] < 1.2 and mistaken([right_wrong])[0] == pytest.approx(3 - fair([right_wrong])[0])
    idle = dict(bear, output_1='Cave.', output_2='Cave. Many people like it.')
    assert mistaken([idle]) == fair([idle])


def test_misreading_depends_on_the_question_not_on_its_wording_or_the_answers():
    person = people.Person('a', tuple(QUALITY), misreads=.5, group='g')
    ask = lambda animal, answers: dict(instruction=f'Where does a {animal} live?', input='', output_1=answers[0], output_2=answers[1])
    other = lambda animal: dict(instruction=f'Hello! What is the home of a {animal}? Use a whole sentence.', input='')
    mistaken = {}
    for animal in ('bear', 'wolf', 'cat', 'deer', 'crab', 'duck', 'frog', 'horse', 'sheep', 'snail'):
        right, wrong = fact_of(animal, 'home'), common_mistake(animal, 'home')
        mistaken[animal] = person([ask(animal, (right, wrong))])[0] > 1.5
        assert (person([ask(animal, (wrong, right))])[0] < 1.5) == mistaken[animal]
        assert people.question(ask(animal, ('', ''))) == people.question(other(animal))
    assert set(mistaken.values()) == {True, False}


def test_misreading_alone_averages_out_and_together_does_not():
    questions = [f'q{i}' for i in range(3000)]
    for alone, together in ((.3, 0.), (0., .3)):
        group = [people.Person(f'{i}', tuple(QUALITY), misreads=alone, misreads_together=together, group='g') for i in range(9)]
        mistaken = np.array([p.mistaken(questions) for p in group])
        assert abs(mistaken.mean() - .3) < .04
        assert abs((mistaken.sum(0) > 4).mean() - (.3 if together else .099)) < .03  # the majority of nine, binomial when alone


def test_populations_differ_by_seed_and_group_and_are_the_same_again():
    drawn = {(seed, group): people.sample_crowd(seed, group).annotators for seed in (0, 1, 2) for group in ('people', 'held_out_crowd')}
    assert len({tuple(a.weights for a in p) for p in drawn.values()}) == 6
    assert len({a.group for p in drawn.values() for a in p}) == 6      # nor do they misread the same questions
    assert drawn[0, 'people'] == people.sample_crowd(0).annotators == people.people.annotators
    assert drawn[0, 'held_out_crowd'] == people.held_out_crowd.annotators
    assert people.sample_pool(0).annotators == people.pool.annotators != people.sample_pool(1).annotators
    assert [len(p.annotators) for p in (people.people, people.held_out_crowd, people.pool)] == [16, 16, 13]


def traits_of(monkeypatch, draw):
    "What a population's members are drawn from."
    seen = []
    with monkeypatch.context() as m:
        m.setattr(people, 'sample_person', lambda rng, name, group, **traits: seen.append(traits))
        draw()
    assert all(t == seen[0] for t in seen)
    return seen[0]


def test_a_pool_of_fidelity_1_reads_as_people_do(monkeypatch):
    drawn = traits_of(monkeypatch, people.sample_crowd)
    judges = traits_of(monkeypatch, lambda: people.sample_pool(fidelity=1.))
    assert judges.pop('care') == judges.pop('together') == 0
    for name in drawn.keys() - {'temperature'}: assert np.allclose(judges[name], drawn[name]), name


def test_a_pool_of_less_fidelity_is_further_from_people(monkeypatch):
    traits = [traits_of(monkeypatch, lambda f=f: people.sample_pool(fidelity=f)) for f in (1., .5, 0.)]
    for name in ('care', 'together', 'position', 'misreads', 'taste'):
        values = [t[name] for t in traits]
        assert values[0] < values[1] < values[2], name
    pairs = sample_pairs(600, seed=5)
    persons = people.people.each(pairs)
    agree = [np.mean([two_votes_agree(people.sample_pool(seed, f).each(pairs), persons).mean() for seed in range(4)]) for f in (1., .5, 0.)]
    assert agree[0] > agree[1] + .01 and agree[1] > agree[2] + .01


def test_disagreement_and_noise_are_factors(monkeypatch):
    assert {a.weights[:6] for a in people.sample_crowd(disagreement=0.).annotators} == {tuple(QUALITY[:6].tolist())}
    assert {a.misreads for a in people.sample_crowd(disagreement=0.).annotators} == {0}
    for draw in (people.sample_crowd, people.sample_pool):
        one, three = draw(noise=1.).annotators, draw(noise=3.).annotators
        assert [a.temperature*3 for a in one] == pytest.approx([a.temperature for a in three])
        assert [a.weights for a in one] == [a.weights for a in three]
    pairs = sample_pairs(500, seed=6)
    def within(**knobs): return np.mean([off_diagonal_mean(two_votes_agree(*[people.sample_crowd(s, **knobs).each(pairs)]*2)) for s in range(3)])
    assert within(disagreement=0.) > within() + .01 > within(disagreement=3.) + .02
    assert within(noise=.1) > within() + .05 > within(noise=5.) + .1


def test_a_population_survives_its_file(tmp_path):
    for population in (people.sample_crowd(3), people.sample_pool(4, .2), people.length_biased):
        people.write_population(tmp_path/'p.json', population)
        again = people.read_population(tmp_path/'p.json')
        assert (again.name, again.annotators) == (population.name, population.annotators)
        pairs = sample_pairs(5)
        assert again(pairs) == population(pairs)


@pytest.mark.parametrize('change', [lambda c: [c], lambda c: dict(c, annotators=[dict(c['annotators'][0], taste=1)]),
                                    lambda c: dict(c, annotators=[{k: v for k, v in c['annotators'][0].items() if k != 'weights'}]),
                                    lambda c: dict(name='pool'), lambda c: {k: v for k, v in c.items() if k != 'name'}])
def test_another_file_is_refused_as_a_population(tmp_path, change):
    people.write_population(tmp_path/'p.json', people.pool)
    write_json(tmp_path/'p.json', change(read_json(tmp_path/'p.json')))
    with pytest.raises(ValueError, match='p.json does not hold a population'): people.read_population(tmp_path/'p.json')


def test_a_bias_is_added_to_every_judge_and_only_to_columns():
    biased = people.with_bias(people.pool, 'b', words=.3)
    for a, b in zip(people.pool.annotators, biased.annotators):
        assert b.weights[COLUMNS.index('words')] == pytest.approx(a.weights[COLUMNS.index('words')] + .3)
        assert b.weights[:6] == a.weights[:6] and b.temperature == a.temperature
    with pytest.raises(ValueError, match='smell is not a feature'): people.with_bias(people.pool, 'b', smell=1.)


def votes_of(population, pairs, n, seed):
    "Votes of n different members on each pair: (n, pairs)."
    rng, p = np.random.default_rng(seed), population.each(pairs) - 1
    who = np.array([rng.permutation(p.shape[1])[:n] for _ in pairs])
    return (1 + (rng.random(who.shape) < np.take_along_axis(p, who, 1))).T


def test_agreement_is_near_what_alpacafarm_measured():
    "One vote against the majority of three others, over worlds of several seeds."
    pairs, found = sample_pairs(1200, seed=2), []
    for seed in range(4):
        four = votes_of(people.sample_crowd(seed, 'held_out_crowd'), pairs, 4, seed)
        found.append((agreement(four), agreement(votes_of(people.sample_pool(seed), pairs, 1, seed + 9), four)))
    human, simulated = np.mean(found, axis=0)
    assert abs(human - .66) < .05 and abs(simulated - .65) < .06


def test_gold_is_the_sign_of_utility():
    pairs = sample_pairs(300, seed=8)
    gap = np.array(utility([dict(p, output=p['output_2']) for p in pairs])) - utility([dict(p, output=p['output_1']) for p in pairs])
    assert people.gold(pairs) == [1.5 if abs(g) < 1e-9 else 2 if g > 0 else 1 for g in gap]
    assert set(people.gold(pairs)) == {1, 1.5, 2}


# The dataset and its settings
SMALL = dict(sft=800, preference=400, unlabeled=400, val=150, eval=200)


@pytest.fixture(scope='module')
def splits(): return world.sample_splits(world.WorldConfig(**SMALL))


def combination(record):
    "A wording and the values of its first two slots."
    spec = parse(text(record))
    row = next(r for r in ROWS if (r.template, r.input) == (spec['template'], spec['given']))
    return (spec['template'], *[spec[slot] for slot in list(row.words)[:2]])


def test_splits_have_their_sizes_and_do_not_overlap(splits):
    assert {name: len(records) for name, records in splits.items()} == SMALL
    requests = [text(r) for records in splits.values() for r in records]
    assert len(requests) == len(set(requests))


def test_no_combination_of_val_or_eval_is_in_a_training_split(splits):
    found = {name: {combination(r) for r in records} for name, records in splits.items()}
    trained = found['sft'] | found['preference'] | found['unlabeled']
    assert found['val'] | found['eval'] and not trained & (found['val'] | found['eval'])
    kinds = {name: {parse(text(r))['kind'] for r in records} for name, records in splits.items()}
    assert kinds['eval'] == kinds['sft'] == set(KINDS)


def test_experts_answer_eval_and_demonstrators_the_rest(splits):
    assert utility(splits['eval']) == [2.]*200
    for name in ('sft', 'preference', 'unlabeled', 'val'): assert np.mean(utility(splits[name])) < 1
    better = world.sample_splits(world.WorldConfig(**SMALL, sft_skill=.9))['sft']
    assert np.mean(utility(better)) > np.mean(utility(splits['sft'])) + .5
    assert utility(world.sample_splits(world.WorldConfig(**SMALL, sft_skill=1.))['sft']) == [2.]*800


def test_splits_follow_from_the_seed(splits):
    assert world.sample_splits(world.WorldConfig(**SMALL)) == splits
    assert world.sample_splits(world.WorldConfig(**SMALL, seed=1))['eval'] != splits['eval']


def test_skill_has_the_mean_it_should_have():
    rng = random.Random(0)
    for mean in (.2, .5, .9): assert abs(np.mean([world.sample_skill(rng, mean) for _ in range(4000)]) - mean) < .02
    assert [world.sample_skill(rng, mean) for mean in (0., 1.)] == [0, 1]


@pytest.mark.parametrize('given', [dict(fidelity=1.1), dict(fidelity=-.1), dict(disagreement=-1.), dict(noise=0.), dict(hard=1.2), dict(sft_skill=2.),
                                   dict(eval=0), dict(prose=0), dict(layers=0), dict(vocab_size=100), dict(hidden_size=4)])
def test_settings_have_bounds(given):
    name, = given
    with pytest.raises(ValueError, match=f'{name} = '): world.WorldConfig(**given).check()


def test_settings_at_their_limits_are_allowed():
    for given in (dict(fidelity=1.), dict(fidelity=0.), dict(disagreement=0.), dict(noise=.01), dict(hard=0.), dict(hard=1.), dict(sft_skill=1.)):
        world.WorldConfig(**given).check()


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match='hidden_size = 100: not a multiple of 2 x heads = 12'): world.WorldConfig(hidden_size=100, heads=6).check()
    with pytest.raises(ValueError, match='need 109,705 different requests'): world.WorldConfig(sft=84_400).check()


# Prose, tokenizer and model
@pytest.fixture(scope='module')
def tokenizer(splits):
    rng = random.Random(0)
    pages = [sample_page(rng) for _ in range(600)]
    return world.train_tokenizer(pages + [part for r in splits['sft'] for part in (text(r), r['output'])], vocab_size=700)


SAID = dict(home=r'the (\w+)[.,]', food=r'eats? (\w+)[.,]', colour=r' is (\w+)[.,]', skill=r'can (\w+)')


def said_truly(statement):
    "Whether each fact that is told about the animal of a statement is true."
    animal = re.search('|'.join(rf'\b{a}\b' for a in ANIMALS), statement)[0]
    told = [(fact, value) for fact, pattern in SAID.items() for value in re.findall(pattern, statement)]
    assert told, statement
    return [value == fact_of(animal, fact) for fact, value in told]


def test_texts_vary():
    rng = random.Random(1)
    for write in TEXTS: assert len({write(rng) for _ in range(60)}) > 10, write.__name__


def test_prose_tells_the_truth_or_calls_it_wrong():
    rng = random.Random(3)
    for _ in range(500): assert all(said_truly(facts_text(rng)))
    seen = set()
    for talk in (talk_text(rng) for _ in range(500)):
        first, *_, last = re.findall('"([^"]*)"', talk)
        if 'That is wrong' in talk: assert said_truly(last) == [True] and said_truly(first) == [False]
        elif 'That is right' in talk: assert said_truly(first) == [True]
        elif ' ' in last: assert said_truly(last) == [True]
        seen.add(re.findall('wrong|right|asked', talk)[0])
    assert seen == {'wrong', 'right', 'asked'}


def test_a_page_never_contains_the_format_of_a_chat(tokenizer):
    rng = random.Random(2)
    pages = [sample_page(rng) for _ in range(500)]
    framing = [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids(world.SEP), tokenizer.pad_token_id]
    for page, ids in zip(pages, world.encode_pages(pages, tokenizer)):
        assert not any(special in page for special in world.SPECIAL)
        assert not set(ids) & set(framing) and ids.index(tokenizer.eos_token_id) == len(ids) - 1


def test_answers_survive_the_tokenizer(tokenizer, splits):
    answers = [r['output'] for records in splits.values() for r in records][:1000] + ['', 'naïve ☃', 'two  spaces', ' begins with one', '- a\n- b\n']
    kept = [decode(ids, tokenizer) for ids in encode_responses(answers, tokenizer)]
    assert [(a, b) for a, b in zip(answers, kept) if a.strip() != b.strip()] == []


def test_requests_are_framed_and_survive_the_tokenizer(tokenizer, splits):
    records = splits['eval'][:100]
    for record, ids in zip(records, encode_prompts(records, tokenizer)):
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert (tokens[0], tokens[-1]) == (world.BOS, world.SEP) and not set(tokens[1:-1]) & set(world.SPECIAL)
        assert parse(tokenizer.decode(ids[1:-1])) == parse(text(record))
        assert len(ids) < world.LENGTH - 40


def test_a_run_leaves_the_dataset_and_the_three_populations_of_its_knobs(tmp_path):
    cfg = world.WorldConfig(out=str(tmp_path/'world'), sft=20, preference=10, unlabeled=10, val=5, eval=10, prose=16, vocab_size=400, hidden_size=16,
                            layers=1, heads=2, ffn=32, batch_size=8, seed=3, fidelity=.3, disagreement=2., noise=.5, device='cpu')
    world.train(cfg)
    drawn = [people.sample_crowd(3, 'people', 2., .5), people.sample_crowd(3, 'held_out_crowd', 2., .5), people.sample_pool(3, .3, .5)]
    for population in drawn:
        left = people.read_population(tmp_path/'world'/f'{population.name}.json')
        assert (left.name, left.annotators) == (population.name, population.annotators)
    assert {name: read_json(tmp_path/'world'/f'{name}.json') for name in world.SPLITS} == world.sample_splits(cfg)
    assert (tmp_path/'world'/'model'/'model.safetensors').exists()
