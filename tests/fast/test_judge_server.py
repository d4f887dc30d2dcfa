"""The stand-in for a judge answers as OpenAI would, and fails on demand."""
import json

import openai
import pytest
from openai import OpenAI

from judge_server import judge_server, verdict

SHORT, LONG = 'A cat.', 'A cat that sat on the mat.'


def body(a=SHORT, b=LONG, **more):
    text = f'### Output (a):\n{a}\n\n### Output (b):\n{b}\n\n### Which is best?'
    return dict(model='judge', messages=[dict(role='user', content=text)]) | more


@pytest.fixture(scope='module')
def server():
    with judge_server(batch_seconds=.1) as server: yield server


@pytest.fixture
def client(server):
    with OpenAI(base_url=server.url, api_key='test', max_retries=0) as client: yield client


def test_texts_and_log_probs(client, server):
    create = client.chat.completions.create
    assert create(**body()).choices[0].message.content == 'Output (b)'
    assert verdict(body(LONG, LONG)) == 1 and server.requests()[-1]['answered']
    token, = create(**body(logprobs=True, top_logprobs=2)).choices[0].logprobs.content
    assert {t.token: round(t.logprob, 3) for t in token.top_logprobs} == dict(M=-.105, m=-2.303)
    prompt = '<|output_a|>ab<|output_b|>a'
    text = client.completions.create(model='judge', prompt=prompt, max_tokens=1)
    assert text.choices[0].text == 'Output' and text.choices[0].finish_reason == 'length'


@pytest.mark.parametrize('fault, error', [
    ('429', openai.RateLimitError), ('500', openai.InternalServerError),
    ('context', openai.BadRequestError), ('reset', openai.APIConnectionError),
    ('truncated', openai.APIConnectionError), ('timeout', openai.APITimeoutError),
    ('badjson', json.JSONDecodeError)])
def test_faults(client, server, fault, error):
    server.set(faults={fault: dict(p=1, times=1)})
    with pytest.raises(error): client.with_options(timeout=.5).chat.completions.create(**body())
    last = server.requests()[-1]
    assert last['fault'] == fault and not last['answered']
    assert client.chat.completions.create(**body()).choices, 'the server goes on'
