"""Beam search by the book and beside transformers; all answers there are: see its notebook."""
import functools

import pytest
import torch

from alpaca_farm.model.beams import beam_search
from alpaca_farm.model.functional import token_logprobs
from alpaca_farm.model.policy import Policy
from tiny import family, ragged

torch.set_num_threads(1)


@torch.no_grad()
def score(model, prompt, answer):
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]
    return token_logprobs(logits, torch.tensor(answer))


def by_the_book(model, prompt, beams, groups, penalty, steps):
    "Diverse beam search, each continuation read anew from its beginning."
    size = beams//groups

    @functools.cache
    def total(answer): return score(model, prompt, list(answer)).sum().item()

    def advance(group, step, taken):
        "One step of a group: its best continuations live on or end, as transformers counts them."
        found = []
        for answer in group['alive']:
            for token in range(6):
                longer = (*answer, token)
                found.append((total(longer) - penalty*taken.count(token), longer))
        found.sort(key=lambda pair: -pair[0])
        alive = []
        chosen = []
        for rank, (_, answer) in enumerate(found[:2*size]):
            if answer[-1] == 2 or step == steps:
                if rank < size:
                    chosen.append(answer[-1])
                    group['done'].append((total(answer)/len(answer), answer))
            elif len(alive) < size:
                chosen.append(answer[-1])
                alive.append(answer)
        group['done'] = sorted(group['done'], reverse=True)[:size]
        best = max(map(total, alive), default=0)/step
        if len(group['done']) == size and best <= group['done'][-1][0]:
            alive = []
        group['alive'] = alive
        return chosen
    searches = [dict(alive=[()], done=[]) for _ in range(groups)]
    for step in range(1, steps + 1):
        taken = []
        for group in searches:
            taken += advance(group, step, taken)
    return sorted(sum([group['done'] for group in searches], []), reverse=True)


@pytest.mark.parametrize('beams, groups, penalty', [
    (3, 1, 0.), (4, 4, .5), (4, 2, .7), (6, 3, 2.), (4, 2, 50.)])
def test_diverse_beams_by_the_book(beams, groups, penalty):
    model = family('llama', vocab_size=6)
    for prompt in ([1, 5, 3], [4], [3, 5, 5, 4]):
        want = by_the_book(model, prompt, beams, groups, penalty, 5)
        found, = beam_search(Policy(model), [prompt], beams, groups, penalty, 5)
        assert sorted(s.tokens for s in found) == sorted(list(a) for _, a in want)
        got = [sum(s.logprobs)/len(s.tokens) for s in found]
        assert got == pytest.approx([w for w, _ in want], abs=1e-4)


def test_suppressed_tokens_and_several_ends():
    model = family('llama')
    model.generation_config.eos_token_id = [2, 17, 30]
    model.generation_config.suppress_tokens = list(range(40, 64))
    for x in beam_search(Policy(model), ragged(12), 4, 2, 1., 12):
        assert len(x) == 4
        for s in x:
            ends = [t in (2, 17, 30) for t in s.tokens]
            assert max(s.tokens) < 40
            assert ends == [False]*(len(s.tokens) - 1) + [s.ended]


def test_faults():
    model = family('llama').train()
    assert beam_search(Policy(model), []) == []
    for prompts, groups, message in (([[5]], 3, 'groups = 3'),
                                     ([[5], []], 1, 'prompt 1 is empty')):
        with pytest.raises(ValueError, match=message):
            beam_search(Policy(model), prompts, groups=groups, max_new_tokens=2)
    assert model.training
    model.lm_head.weight.data.fill_(float('nan'))
    with pytest.raises(ValueError, match='not finite'):
        beam_search(Policy(model), [[5]], max_new_tokens=2)
