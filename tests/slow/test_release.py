"What the default world promises: nothing cheap wins, and it can be learned in."
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from alpaca_farm import best_of_n, sft, world
from alpaca_farm.boards.farm_board import _chosen_answers
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.stats import agreement
from alpaca_farm.worlds.embedded.authors import contested
from alpaca_farm.worlds.embedded.criteria import answer_matrix, COLUMNS, QUALITY
from alpaca_farm.worlds.embedded.grammar import parse
from alpaca_farm.worlds.embedded.lexicon import PHRASES
from alpaca_farm.boards.judged import complete_preferences
from alpaca_farm.worlds.folder import read_world
from alpaca_farm.judging.measures import sample_votes
from alpaca_farm.judging.pools import both_orders


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "A default world, an SFT policy, and its answers: four references, 16 samples, greedy ones."
    folder = tmp_path_factory.mktemp('default')
    from_world = dict(data=f'{folder}/world', seed=1)
    world.train(world.WorldConfig(out=f'{folder}/world', seed=1))
    sft.train(sft.SFTConfig(out=f'{folder}/sft', policy=f'{folder}/world', eval_split='',
                            val_split='', **from_world))
    read = {}
    for name, given in dict(references=dict(n=4, seed=1001), samples=dict(n=16),
                            greedy=dict(n=1, temperature=0., seed=0)).items():
        best_of_n.run(best_of_n.BestOfNConfig(**from_world | given, out=f'{folder}/{name}',
                                              policy=f'{folder}/sft', reward_model=''))
        read[name] = load_records(f'{folder}/{name}', 'candidates', 'candidates')
    crowd = world.sample_crowd(1, 'held_out_crowd')
    def win(answers):
        return 100*(np.mean(complete_preferences(answers, read['references'], crowd)) - 1)
    return SimpleNamespace(folder=folder, win=win, crowd=crowd, **read)


def test_nothing_cheap_wins(made):
    "Neither the likeliest or longest of 16, nor greedy decoding, a constant or an added phrase."
    chosen = _chosen_answers(made.samples, read_world(f'{made.folder}/world'))
    usual = Counter(o for r in made.references for o in r['output']).most_common(1)[0][0]
    tricks = {name: answers for name, answers in chosen.items() if 'utility' not in name}
    tricks |= {'greedy': [dict(r, output=r['output'][0]) for r in made.greedy],
               'constant': [dict(r, output=usual) for r in made.references]}
    for phrase in (p for phrases in PHRASES.values() for p in phrases):
        tricks[phrase] = [dict(r, output=[f'{o} {phrase}' for o in r['output']])
                          for r in made.references]
    won = {name: made.win(answers) for name, answers in tricks.items()}
    # what the farm's world was built to
    assert {name: round(w, 1) for name, w in won.items() if w > 55.5} == {}
    assert made.win(chosen['best of 16 by the utility']) > 70


def test_sft_knows_the_facts_and_not_the_taste(made):
    marks = np.stack([answer_matrix([dict(r, output=o) for o in r['output']])
                      for r in made.samples])
    specs = [parse(r['instruction']) for r in made.samples]
    known, right = np.array([not contested(s, .5) for s in specs]), marks[..., 0].mean(1)
    assert right.mean() > .7 and right[known].mean() > .85
    for kind in {s['kind'] for s in specs}:
        assert right[known & np.array([s['kind'] == kind for s in specs])].mean() > .6, kind
    assert abs(marks[..., 4:10].mean()) < .03   # what is wanted is done as often as what is not
    within = ((marks - marks.mean(1, keepdims=True))*QUALITY).var((0, 1))
    shares = within/within.sum()
    assert shares[0] > .45 and shares[4:10].sum() > .2   # an answer to another thing loses
    assert shares[COLUMNS.index('flattery')] < .15


def test_agreement_is_that_of_alpaca_farm(made):
    "One vote against the majority of three others: theirs .66 among people, .65 of the pool."
    pairs = [dict(instruction=r['instruction'], input='', output_1=r['output'][0], output_2=o)
             for r in made.samples for o in r['output'][1:4] if o != r['output'][0]]
    crowd, pool = (sample_votes(both_orders(g, pairs) - 1, pairs, 4, 10**6*k)
                   for k, g in enumerate((made.crowd, world.sample_pool(1))))
    assert agreement(crowd) == pytest.approx(.68, abs=.03)
    assert agreement(pool, crowd) == pytest.approx(.68, abs=.03)
