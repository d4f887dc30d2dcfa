"The embedded world: its grammar inverts, its splits do not overlap, its people are as divided as AlpacaFarm's."
import random

import numpy as np
import pytest

from alpaca_farm import world
from alpaca_farm.grammar import parse, render, respond, sample_instruction, text


def pairs(n: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    specs = [sample_instruction(rng) for _ in range(n)]
    return [dict(render(s), output_1=respond(s, rng), output_2=respond(s, rng)) for s in specs]


def test_parse_inverts_render():
    rng = random.Random(1)
    for _ in range(3000):
        spec = sample_instruction(rng)
        assert parse(text(render(spec))) == spec


def test_a_foreign_instruction_is_refused():
    with pytest.raises(ValueError, match='Who are you'):
        parse('Who are you?')


def test_skill_pays():
    rng = random.Random(2)
    specs = [sample_instruction(rng) for _ in range(300)]
    careful, sloppy = ([dict(render(s), output=respond(s, rng, skill)) for s in specs] for skill in (1., 0.))
    assert np.mean(world.utility(careful)) > np.mean(world.utility(sloppy)) + 1


def test_agreement_is_near_what_alpacafarm_measured():
    agreement = world.two_votes_by_group([p for p in pairs(1500) if p['output_1'] != p['output_2']])
    assert abs(agreement['human_human'] - .66) < .02
    assert abs(agreement['pool_human'] - .65) < .02


def test_expected_preference_is_the_mean_over_annotators_and_orders():
    sample = pairs(20, seed=3)
    swapped = [dict(p, output_1=p['output_2'], output_2=p['output_1']) for p in sample]
    slow = np.mean([[a(sample), [3 - x for x in a(swapped)]] for a in world.pool.annotators], axis=(0, 1))
    assert np.allclose(world.pool(sample), slow)
    assert np.allclose(np.array(world.people(sample)) + world.people(swapped), 3)


def test_splits_do_not_overlap():
    cfg = world.WorldConfig(sft=200, preference=200, unlabeled=200, val=50, eval=50)
    splits = world.sample_splits(cfg)
    requests = [text(r) for rows in splits.values() for r in rows]
    assert len(requests) == len(set(requests)) == 700
    assert splits == world.sample_splits(cfg)
    assert splits['eval'] != world.sample_splits(world.WorldConfig(sft=200, preference=200, unlabeled=200, val=50, eval=50, seed=1))['eval']
