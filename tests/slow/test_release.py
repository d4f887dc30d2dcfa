"What the default world promises: nothing cheap wins, and it can be learned in."
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from alpaca_farm import best_of_n, sft, world
from alpaca_farm.boards.farm_board import _chosen_answers
from alpaca_farm.data.records import load_records
from alpaca_farm.judging.measures import sample_votes
from alpaca_farm.judging.pools import both_orders, preferences_over
from alpaca_farm.judging.stats import agreement
from alpaca_farm.worlds.embedded.criteria import answer_matrix, COLUMNS, quality
from alpaca_farm.worlds.embedded.grammar import parse
from alpaca_farm.worlds.embedded.lexicon import PHRASES
from alpaca_farm.worlds.embedded.truth import sample_truth
from alpaca_farm.worlds.folder import read_world


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "A default world, an SFT policy, and its answers: four references, 16 samples, greedy ones."
    folder = str(tmp_path_factory.mktemp('default'))
    world.train(world.WorldConfig(out=f'{folder}/world', seed=1))
    sft.train(sft.SFTConfig(out=f'{folder}/sft', policy=f'{folder}/world', eval_split='',
                            val_split='', data=f'{folder}/world', seed=1))

    def sampled(name, **given):
        best_of_n.run(best_of_n.BestOfNConfig(
            out=f'{folder}/{name}', data=f'{folder}/world', policy=f'{folder}/sft',
            reward_model='', **given))
        return load_records(f'{folder}/{name}', 'candidates', 'candidates')
    references = sampled('references', n=4, seed=1001)
    truth = sample_truth(1)
    crowd = world.sample_crowd(1, 'held_out_crowd', truth=truth)

    def win(answers):
        return 100*(np.mean(preferences_over(answers, references, crowd)) - 1)
    return SimpleNamespace(folder=folder, truth=truth, win=win, crowd=crowd, references=references,
                           samples=sampled('samples', n=16, seed=1),
                           greedy=sampled('greedy', n=1, temperature=0., seed=0))


def test_nothing_cheap_wins(made):
    "Neither the likeliest or longest of 16, nor greedy decoding, a constant or an added phrase."
    chosen = _chosen_answers(made.samples, read_world(f'{made.folder}/world'))
    tricks = {name: rows for name, rows in chosen.items() if 'utility' not in name}
    tricks['greedy'] = [dict(r, output=r['output'][0]) for r in made.greedy]
    said = Counter()
    for r in made.references:
        said.update(r['output'])
    usual = said.most_common(1)[0][0]
    tricks['constant'] = [dict(r, output=usual) for r in made.references]
    for phrase in sum(map(list, PHRASES.values()), []):
        rows = []
        for r in made.references:
            rows.append(dict(r, output=[f'{output} {phrase}' for output in r['output']]))
        tricks[phrase] = rows
    for name, rows in tricks.items():
        assert made.win(rows) < 55.5, name   # what the farm's world was built to
    assert made.win(chosen['best of 16 by the utility']) > 70


def test_sft_knows_the_facts_and_not_the_taste(made):
    marks = []
    for r in made.samples:
        marks.append(answer_matrix([dict(r, output=output) for output in r['output']],
                                   truth=made.truth))
    marks = np.stack(marks)
    specs = [parse(r['instruction']) for r in made.samples]
    known = np.array([not made.truth.contested(s) for s in specs])
    kinds = np.array([s['kind'] for s in specs])
    right = marks[..., 0].mean(1)
    assert right.mean() > .7
    assert right[known].mean() > .85
    for kind in {*kinds}:
        assert right[known & (kinds == kind)].mean() > .6, kind
    assert abs(marks[..., 4:10].mean()) < .03   # what is wanted is done as often as what is not
    within = ((marks - marks.mean(1, keepdims=True))*quality(made.truth)).var((0, 1))
    shares = within/within.sum()
    assert shares[0] > .45   # an answer to another thing loses
    assert shares[4:10].sum() > .2
    assert shares[COLUMNS.index('flattery')] < .15


def test_agreement_is_that_of_alpaca_farm(made):
    "One vote against the majority of three others: theirs .66 among people, .65 of the pool."
    pairs = []
    for r in made.samples:
        first, *others = r['output'][:4]
        for other in others:
            if other != first:
                pairs.append(dict(instruction=r['instruction'], input='', output_1=first,
                                  output_2=other))

    def votes(group, seed):
        return sample_votes(both_orders(group, pairs) - 1, pairs, 4, seed)
    crowd = votes(made.crowd, 0)
    assert agreement(crowd) == pytest.approx(.68, abs=.03)
    pool = votes(world.sample_pool(1, truth=made.truth), 10**6)
    assert agreement(pool, crowd) == pytest.approx(.68, abs=.03)
