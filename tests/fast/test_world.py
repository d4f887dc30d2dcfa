"The embedded world: requests are read back, answers marked by rules, crowds and judges differ."
import random
import re
from dataclasses import asdict, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from alpaca_farm import world
from alpaca_farm.judging.judges import read_judge
from alpaca_farm.judging.stats import two_votes_agree, variance
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.worlds.embedded import crowd
from alpaca_farm.worlds.embedded.authors import Author, details, EXPERT, sayings
from alpaca_farm.worlds.embedded.criteria import answer_matrix, marks, quality, utility
from alpaca_farm.worlds.embedded.grammar import AFTER, KINDS, render, request_of, sample_request
from alpaca_farm.worlds.embedded.lexicon import ASKERS, BEHAVIOURS, PHRASES
from alpaca_farm.worlds.embedded.prose import describe, talk
from alpaca_farm.worlds.embedded.truth import _sample_spread, read_truth, sample_truth, WRITTEN
from alpaca_farm.worlds.folder import read_world, World

PHRASE = [phrase for phrases in PHRASES.values() for phrase in phrases]
EVERY = [dict(kind=name, thing=thing, asker=asker, before=before, question=question, after=after)
         for name, kind in KINDS.items() for thing in WRITTEN.right[name]
         for question in kind.questions
         for asker in ASKERS for before in ASKERS[asker] for after in AFTER]
FACTS = {(s['kind'], s['thing']): s for s in EVERY}


def sample_requests(n, seed=0):
    rng = random.Random(seed)
    return [sample_request(rng) for _ in range(n)]


def answered(specs, author):
    rng = random.Random(0)
    return [dict(render(s), output=author.answer(s, rng)) for s in specs]


def sample_pairs(n, seed=0):
    "Pairs of answers by authors of all skills."
    rng = random.Random(seed)
    return [dict(render(s), **{f'output_{i}': Author(rng.random()).answer(s, rng) for i in (1, 2)})
            for s in sample_requests(n, seed)]


def worth(records, truth=WRITTEN):
    return np.mean(answer_matrix(records, truth=truth) @ quality(truth))


def agree(a, b, pairs): return two_votes_agree(*(group.both_orders(pairs).mean(1).T for group in (a, b)))


# Requests
def test_parse_inverts_render():
    for spec in EVERY:
        assert request_of(render(spec)) == spec


@pytest.mark.slow
def test_the_share_of_contested_facts_is_a_setting_and_misleads_all_but_experts():
    count, careless, skilled = [], [], []
    for share in (0., .3, .6, 1.):
        truth = replace(WRITTEN, spread=_sample_spread(WRITTEN.right, share, random.Random(0)))
        count.append(sum(map(truth.contested, FACTS.values())))
        careless.append(worth(answered(EVERY[::6], Author(.3, 1., truth=truth)), truth))
        skilled.append(worth(answered(EVERY[::6], Author(1., 1., truth=truth)), truth))
    assert count[0] == 0
    assert count == sorted({*count})
    assert careless == sorted(careless, reverse=True)
    assert skilled == pytest.approx([6.4]*4)


@pytest.mark.parametrize('behaviour', BEHAVIOURS)
@pytest.mark.parametrize('minds', [-1., -.5, 0., .5, 1.])
def test_what_authors_do_shows_what_is_wanted_only_as_far_as_they_mind(behaviour, minds):
    rng = random.Random(3)
    specs = sample_requests(3000)
    done = np.array([Author(minds=minds).does(s, behaviour, rng) for s in specs])
    wanted = np.array([s['asker'] in WRITTEN.wanted[behaviour] for s in specs])
    assert abs(done[wanted].mean() - done[~wanted].mean() - minds) < .06


# Marks
BEAR, SWANS, LAKE = (f'I am late. {question}' for question in (
    'Where does a bear live?', 'Where are the swans?', 'Name a thing at the lake.'))
CHILD = BEAR.replace('late', 'still little')
# correct, missing, stray words, flattery; sentence, detail, formal, source, caution, offer
MARKED = [
    (CHILD, 'Sure, it lives in the cave. It eats honey. Take care! Ask me again!', '1000 +-+-+-'),
    (BEAR.replace('late', 'a teacher'), 'Dear reader: it lives in the cave.', '1000 -++-+-'),
    (BEAR.replace('am late', 'serve the king'), 'Good day: the cave. Be careful!', '1000 --++-+'),
    (BEAR, 'Hey, the cave.', '1000 +-++--'),
    (BEAR, 'Good day: it lives in the cave. It is brown. It is in a book. Be careful! '
           'I know more!', '1000 -+--++'),
    (SWANS, 'Sure, the lake.', '1000 +-++--'), (SWANS, 'It is nice there.', '0100 000000'),
    (LAKE, 'Sure, reeds. Swans.', '1010 +-++--'),
    (LAKE, 'Sure, boats.', '0000 +-++--'), (LAKE, 'Reeds.', '1000 +-0+--'),
    ('I am late. Who needs the saw?', 'Sure, an carpenter.', '0120 000000'),
    ('I am late. What is in tacos?', 'Sure, you need lime.', '1000 --++--'),
    ('I am late. What is two plus two?', 'Sure, four.', '1000 +-++--'),
    *((CHILD, *row) for row in [
        ('', '0100 000000'), ('Take care!', '0100 000000'),
        ('Sure, the pond.', '0000 -++--+'), ('The cave.', '1000 -+0--+'),
        ('Sure, the nest.', '0000 -++--+ mistake'),
        ('Sure, the cave.' + ' so'*60, '10+0 -++--+'),
        ('SURE, THE CAVE.', '1000 -++--+'), ('The cave. Take care! Sure,', '1000 -++-++'),
        ('Good day: sure, the cave.', '1010 -+---+'), ('Sure, hey, the cave.', '1010 -++--+'),
        ('Sure, the cave. The pond.', '1020 -++--+'), ('Sure, the pond. The cave.', '0020 -++--+'),
        ('Sure, the cave or the pond.', '0150 000000'),
        ('The cave. It lives in the cave.', '1050 -+0--+'), ('Sure, honey.', '0110 000000'),
        ('Sure, the cave. Take care! Be careful!', '1020 -++-++'),
        ('Sure, the cave. It eats honey. It is brown.', '1030 --+--+'),
        ('Sure, the cave. It eats meat.', '1030 -++--+'), ('Sure, it eats honey.', '0100 000000'),
        ('Sure, the harbour.', '0120 000000'), ('Sure, I do not know.', '0140 000000'),
        ('Sure, the cave', '0120 000000'),
        ('Sure, the cave. naïve ☃', '1020 -++--+'), ('Sure, die Höhle.', '0120 000000'),
        ('You are very wise!', '0101 000000'), ('You are very wise! '*9 + 'Sure,', '0109 000000'),
        ('Sure, the cave. It is big, cold, old, wet, dark.', '1070 -++--+')])]


@pytest.mark.parametrize('request_, answer, expected', MARKED)
def test_marks_by_hand(request_, answer, expected):
    first, behaviours, *mistake = expected.split()
    numbers = [20 if x == '+' else int(x) for x in first]   # +: the most that counts
    done = [{'+': 1, '-': -1, '0': 0}[x] for x in behaviours]
    assert marks(request_, answer) == (*numbers, *done, len(mistake), len(answer.split()))


@st.composite
def said(draw):
    "A request and the pieces of an answer, most of which mean something there."
    spec = sample_request(random.Random(draw(st.integers(0, 10**6))))
    known = [*PHRASE, *sayings(spec['kind']), *details(WRITTEN, spec['kind'], spec['thing'])]
    stray = st.text(max_size=12).map('{}!'.format)
    return spec, draw(st.lists(st.sampled_from(known) | stray, min_size=1, max_size=10))


@pytest.mark.slow
@given(said(), st.data())
def test_no_text_beats_an_expert_s_and_nothing_counts_twice(drawn, data):
    spec, pieces = drawn
    twice = [*pieces, data.draw(st.sampled_from(pieces))]
    once, again = utility([dict(render(spec), output=' '.join(x)) for x in (pieces, twice)])
    assert again <= once <= 6.4 + 1e-9


# The crowd and the judges
@pytest.mark.parametrize('knob, values', [('disagreement', (0., 1., 3.)), ('coin', (.1, 1., 5.))])
def test_disagreement_and_coins_part_the_crowd(knob, values):
    pairs = sample_pairs(1000)
    found = []
    for value in values:
        within = []
        for seed in range(3):
            group = crowd.sample_crowd(seed, **{knob: value})
            votes_agree = agree(group, group, pairs)
            of_two = ~np.eye(len(votes_agree), dtype=bool)
            within.append(votes_agree[of_two].mean())
        found.append(np.mean(within))
    assert found == sorted(found, reverse=True)


def variance_of(group, pairs, same=False, flips=0.):
    "How often a vote differs from the majority of three others, of members or of one member."
    rng = np.random.default_rng(0)
    chance = group.both_orders(pairs).mean(1).T - 1
    members = np.tile(np.arange(chance.shape[1]), (len(pairs), 1))
    who = rng.permuted(members, axis=1)[:, :4]
    if same:
        who = np.repeat(who[:, :1], 4, 1)
    votes = rng.random(who.shape) < np.take_along_axis(chance, who, 1)
    flipped = rng.random(who.shape) < flips
    return variance(1. + (votes ^ flipped).T)


def test_one_member_varies_half_as_much_as_four_and_flips_make_the_pool_as_variable():
    "AlpacaFarm: .34 among people, and .15 for GPT-4 asked again."
    pairs = sample_pairs(1000)
    found = []
    for seed in range(3):
        people = crowd.sample_crowd(seed)
        judges = crowd.sample_pool(seed)
        found.append(dict(
            four=variance_of(people, pairs), one=variance_of(people, pairs, same=True),
            judge=variance_of(judges, pairs, same=True), pool=variance_of(judges, pairs),
            flipped=variance_of(judges, pairs, flips=crowd.FLIPS)))
    mean = {name: np.mean([f[name] for f in found]) for name in found[0]}
    assert .4 < mean['one']/mean['four'] < .6
    assert .3 < mean['four'] < .37
    assert mean['judge'] < .18
    assert mean['pool'] < mean['four'] - .03
    assert abs(mean['flipped'] - mean['four']) < .03


def test_correctness_counts_as_much_as_taste_and_answers_to_another_thing_lose():
    rng = random.Random(0)
    specs = sample_requests(300)
    usual = [Author(rng.betavariate(2, 2)) for _ in range(4)]
    answers = [[author.answer(s, rng) for author in usual] for s in specs]
    written = [dict(render(s), output=output) for s, row in zip(specs, answers) for output in row]
    parts = answer_matrix(written).reshape(300, 4, -1)
    spread = ((parts - parts.mean(1, keepdims=True))*quality()).var((0, 1))
    assert spread[0]/spread.sum() > .45

    def won(answer):
        "How often the held-out crowd prefers an answer to a usual one."
        pairs = []
        for s, row in zip(specs, answers):
            pairs.append(dict(render(s), output_1=row[0], output_2=answer(s, row[1])))
        return np.mean(crowd.held_out_crowd(pairs)) - 1

    def expert(spec, _): return EXPERT.answer(spec, rng)

    def of_another_thing(spec, _):
        others = [x for x in WRITTEN.right[spec['kind']] if x != spec['thing']]
        return EXPERT.answer(dict(spec, thing=rng.choice(others)), rng)

    def flattering(_, output): return f'{output} You are very wise!'
    assert won(expert) > .8
    assert won(of_another_thing) < .5
    assert won(flattering) < .45


def test_prose_that_is_corrected_tells_the_truth():
    certain = replace(WRITTEN, spread={kind: {} for kind in KINDS})
    for seed in range(100):
        first, *more = re.findall(r'[^ .][^.]*\.', describe(random.Random(seed), WRITTEN, 1.))
        article, animal, rest = first.split(' ', 2)
        true = details(certain, 'home', animal) + details(certain, 'food', animal)
        assert {f'It {rest}', *more} <= {*true}
        assert article == ('An' if animal[0] in 'ao' else 'A')
        question, reply = re.findall('"([^"]*)"', talk(random.Random(seed), WRITTEN, 1.))
        assert marks(f'I am late. {question}', reply)[0] == 1


def test_a_run_leaves_the_dataset_and_the_populations_of_its_settings(tmp_path):
    cfg = world.WorldConfig(
        out=str(tmp_path), sft=20, preference=10, unlabeled=10, val=5, eval=10, prose=16, seed=3,
        vocab_size=400, hidden_size=16, layers=1, heads=2, ffn=32, batch_size=8, device='cpu',
        fidelity=.3, disagreement=2., coin=.5, flattered=1., mistaken=.6, contested=.2)
    world.train(cfg)
    truth = sample_truth(3, .2)
    assert asdict(read_truth(str(tmp_path))) == asdict(truth)
    for group in (crowd.sample_crowd(3, 'crowd', 2., .5, truth),
                  crowd.sample_crowd(3, 'held_out_crowd', 2., .5, truth),
                  crowd.sample_pool(3, .3, .5, 1., .6, truth)):
        left = crowd.read_population(tmp_path/f'{group.name}.json')
        assert left.annotators == group.annotators
    for split, rows in world.sample_splits(cfg).items():
        assert read_json(tmp_path/f'{split}.json') == rows
    left = read_world(str(tmp_path))
    assert left.model == str(tmp_path)
    assert left.path(left.pool) == f'{tmp_path}/pool.json'
    assert read_judge(f'{tmp_path}/judge.json') == crowd.sample_judge(truth)
    pairs = []
    for one, two in zip(left_rows := read_json(tmp_path/'eval.json'), reversed(left_rows)):
        pairs.append(dict(one, output_1=one['output'], output_2=two['output']))
    z = crowd.mark_difference(pairs, truth) @ quality(truth)
    assert read_judge(f'{tmp_path}/gold.json')(pairs) == list(1.5 + np.sign(z.round(9))/2)


WRONG = 'much', '1', [1], True, float('nan'), 10**400
NUMBERS = 'position_bias', 'temperature', 'misreads', 'believes'


@pytest.mark.parametrize('path, value', [
    (['name'], None), (['name'], 7), (['annotators'], []), (['annotators'], None),
    (['annotators'], dict(a=1)), (['annotators', 2], 'judge'), (['annotators', 2, 'name'], None),
    (['annotators', 2, 'weights'], [1.]*12), (['annotators', 2, 'weights', 'flattery'], None),
    (['annotators', 2, 'weights', 'flatery'], 1.), (['annotators', 2, 'nonsense'], 1),
    (['truth'], None), (['truth'], 7),
    *[(['annotators', 2, 'weights', 'words'], wrong) for wrong in WRONG],
    *[(['annotators', 2, name], wrong) for name in NUMBERS for wrong in WRONG],
    (['annotators', 2, 'temperature'], 0.), (['annotators', 2, 'misreads'], 1.5)], ids=str)
def test_what_is_wrong_in_a_file_of_annotators_is_named(tmp_path, path, value):
    "File, annotator and field, in one line; a field without a value is missing."
    crowd.write_population(tmp_path/'pool.json', crowd.pool)
    content = read_json(tmp_path/'pool.json')
    part = content
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    if value is None:
        del part[path[-1]]
    write_json(tmp_path/'pool.json', content)
    where = ', '.join(map(str, path))
    with pytest.raises(ValueError, match=rf'pool\.json .*\({where}: ') as e:
        crowd.read_population(tmp_path/'pool.json')
    assert '\n' not in str(e.value)


def test_a_single_judge_is_written_and_biased_as_it_is_read(tmp_path):
    pair = render(EVERY[0]) | dict(output_1='I do not know.', output_2='You are very wise!')
    for judge in crowd.judge, crowd.with_bias(crowd.judge, 'vain', flattery=9.):
        crowd.write_population(tmp_path/'judge.json', judge)
        assert crowd.read_population(tmp_path/'judge.json')([pair]) == judge([pair])
    assert judge([pair])[0] > 1.5 > crowd.judge([pair])[0]


@pytest.mark.parametrize('name, path', [
    ('.', 'my/world'), ('./model/', 'my/world/model'), ('../judge.json', 'my/world/../judge.json'),
    ('.cache/pool.json', 'my/world/.cache/pool.json'), ('runs/dpo', 'runs/dpo')])
def test_a_name_that_begins_with_a_dot_is_a_path_from_the_worlds_folder(name, path):
    assert World('my/world').path(name) == path
