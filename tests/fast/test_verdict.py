"The base model's verdict: what is approved, and which sample is chosen."
import math
from types import SimpleNamespace

import numpy as np
import pytest

from alpaca_farm.model import logprobs
from alpaca_farm.model.rewards import reward
from alpaca_farm.worlds.embedded import verdict

ASKED = 'I am late. Where does a frog live? Thanks!'


def answers(*texts, asked=ASKED): return [dict(instruction=asked, output=text) for text in texts]


@pytest.fixture
def pages(monkeypatch):
    "A base model that has read `pond` in three pages of four, and `sea` in the fourth."
    read = {'the pond.': .5, 'it lives in the pond.': .25, 'the sea.': .25}
    asked = []

    class Encoder:
        bos_token_id = 0
        def __call__(self, text, **_): return dict(input_ids=[ord(c) for c in text])

    class Base: tokenizer = Encoder()

    def response_logprobs(policy, prompts, answers):
        asked.extend(prompts)
        texts = [''.join(map(chr, a)).removesuffix('" said') for a in answers]
        return Numbers(math.log(read.get(t[0].lower() + t[1:], 1e-9)) for t in texts)

    class Numbers(list):
        def tolist(self): return self

    monkeypatch.setattr(logprobs, 'load_policy', lambda *_: Base())
    monkeypatch.setattr(logprobs, 'response_logprobs', response_logprobs)
    return asked


def test_what_the_pages_say_is_approved_in_a_word_and_in_a_sentence(pages):
    approve = verdict.base_verifier('')
    texts = ['Hey, the pond.', 'Sure, it lives in the pond. I read it.', 'Good day: the sea.',
             'Hey, the den.', 'Hey, I do not know.', '']
    assert approve(answers(*texts)).tolist() == [True, True, True, False, False, False]
    once = len(pages)
    approve(answers(*texts))
    assert len(pages) == once   # a question is put once


def test_the_first_approved_sample_of_each_request_is_chosen(pages):
    later = 'I am late. Where does a frog live?'
    samples = answers('Hey, the den.', 'Hey, the pond.', 'Hey, the sea.')
    samples += answers('Hey, the den.', 'Hey, the cave.', 'Hey, the nest.', asked=later)
    assert verdict.base_verdict(samples, '') == [0, 1, 0, 1, 0, 0]


def in_folder(records, folder): return [float(len(folder))]*len(records)


def test_a_reward_with_a_folder_gets_that_of_the_data():
    score = reward(f'{__name__}:in_folder', SimpleNamespace(data='runs/world'))
    assert score(answers('a', 'b')) == [10, 10]


def test_scattered_errors_are_as_many_of_either_kind(monkeypatch):
    "The wrong statement that the verdict approves is refused as often as any other."
    samples = answers(*['Hey, the pond.']*60, *['Hey, the sea.']*20, *['Hey, the den.']*20)
    systematic = np.array([1.]*60 + [1.]*20 + [0.]*20)
    monkeypatch.setattr(verdict, 'approval', lambda records, folder: systematic.tolist())
    scattered = np.array(verdict.scattered_approval(samples, ''))
    assert scattered[:60].all()
    assert scattered[60:].sum() == 20
    assert 5 <= scattered[60:80].sum() <= 15
