"The base model's verdict: what is approved, and which sample is chosen."
import math

import pytest

from alpaca_farm.model import logprobs
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
