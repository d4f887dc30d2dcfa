"""The stand-in for a judge answers as OpenAI would and fails on demand, as seen by the real client."""
import json
import time
from collections import Counter
from enum import Enum

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from judge_server import DEFAULTS, FAULTS, Server, digest, judge_server, prompt_text, sha, verdict

SHORT, LONG = 'A cat.', 'A cat that sat on the mat.'
BETTER = dict(type='object', properties=dict(why=dict(type='string'), better=dict(enum=['one', 'two'])))
RANKED = dict(type='object', properties=dict(ordered_models=dict(type='array', items=dict(
    type='object', properties=dict(model=dict(type='string'), rank=dict(type='number'))))))


def body(a=SHORT, b=LONG, **more):
    text = f'### Instruction:\nSay.\n\n### Output (a):\n{a}\n\n### Output (b):\n{b}\n\n### Which is best, Output (a) or Output (b)?:'
    return dict(model='judge', messages=[dict(role='system', content='Judge.'), dict(role='user', content=text)]) | more


def connected(server, key): return OpenAI(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture(scope='module')
def running():
    with judge_server(batch_seconds=.1, hang=5, drip=.5) as server: yield server


@pytest.fixture
def server(running):
    running.set(**dict(DEFAULTS, batch_seconds=.1, hang=5, drip=.5))
    return running


@pytest.fixture
def client(server):
    with connected(server, 'test') as client: yield client


def ask(client, **more): return client.chat.completions.create(**body(**more))


def tool(parameters, name='judge'): return dict(type='function', function=dict(name=name, parameters=parameters))


def test_plain_text(client, server):
    answer = ask(client)
    assert answer.choices[0].message.content == 'Output (b)' and answer.choices[0].finish_reason == 'stop'
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 30
    assert ask(client, a=LONG).choices[0].message.content == 'Output (a)', 'the first wins ties'
    last = server.requests()[-1]
    assert last['label'] == verdict(body(a=LONG)) == 1 and last['sha256'] == sha(body(a=LONG)) and last['key'] == 'test'
    assert last['answered'] and last['fault'] is None and last['path'] == '/v1/chat/completions' and last['model'] == 'judge'
    server.set(template='{"first is better": {bool}, "n": {number}, "is": "{label}"}', labels='ab')
    assert json.loads(ask(client).choices[0].message.content) == {'first is better': False, 'n': 2, 'is': 'b'}
    assert client.models.list().data[0].id == 'judge'
    server.set(template='An answer to {hash}.')
    assert ask(client).choices[0].message.content == f'An answer to {digest(prompt_text(body()))[:8]}.', 'plain chat'


def test_verdict():
    def label_of(text, **options): return verdict(dict(prompt=text), options)
    shots = body(LONG, SHORT)['messages'][1]['content'] + '\nOutput (a)\n\nGood.\n\n' + body()['messages'][1]['content']
    assert label_of(shots) == 2 and label_of('<|output_a|>ab<|output_b|>a<|end|>') == 1 and label_of('Output (a)\nab\nOutput (b)\nabc') == 2
    assert label_of('{"output": """x"""},\n{"output": """xy"""}') == 2 and label_of('Output (a): ## x\n\n## y z\nOutput (b): w') == 1
    assert label_of('X: long\nY: s', regexes=['X: (.*?)\n', 'Y: (.*)']) == 1
    hashed = [label_of(f'prompt {i}') for i in range(100)]
    assert 20 < hashed.count(1) < 80 and hashed == [label_of(f'prompt {i}') for i in range(100)]
    assert verdict(dict(messages=[dict(role='user', content=[dict(type='text', text=shots)])])) == 2


def test_tools(client):
    call = ask(client, tools=[tool({}, 'no'), tool(BETTER)], tool_choice=dict(type='function', function=dict(name='judge')))
    assert call.choices[0].finish_reason == 'stop' and call.choices[0].message.content is None
    assert json.loads(call.choices[0].message.tool_calls[0].function.arguments)['better'] == 'two'
    call = ask(client, tools=[tool(RANKED)]).choices[0]
    assert call.finish_reason == 'tool_calls' and call.message.tool_calls[0].function.name == 'judge'
    ranks = json.loads(call.message.tool_calls[0].function.arguments)['ordered_models']
    assert ranks == [dict(model='M', rank=1), dict(model='m', rank=2)]
    assert ask(client, tools=[tool(RANKED)], max_tokens=5).choices[0].finish_reason == 'length'


def test_json(client):
    Choice = Enum('Choice', dict(a='first', b='second'), type=str)
    Verdict = type('Verdict', (BaseModel,), dict(__annotations__=dict(reason=str, choice=Choice, sure=bool)))
    parsed = client.chat.completions.parse(response_format=Verdict, **body()).choices[0].message.parsed
    assert parsed.choice.value == 'second' and parsed.sure is False
    schema = dict(type='json_schema', json_schema=dict(name='v', schema=dict(properties=dict(first=dict(type='boolean')))))
    assert json.loads(ask(client, a=LONG, response_format=schema).choices[0].message.content) == dict(first=True)
    free = ask(client, response_format=dict(type='json_object')).choices[0].message.content
    assert json.loads(free) == dict(better=2, choice='M')


def test_logprobs(client, server):
    choice = ask(client, logprobs=True, top_logprobs=5, max_tokens=1).choices[0]
    token, = choice.logprobs.content
    assert choice.message.content == token.token == 'M' and choice.finish_reason == 'length'
    assert [(t.token, round(t.logprob, 3)) for t in token.top_logprobs] == [('M', -.105), ('m', -2.303)]
    prompts = [body(*pair)['messages'][1]['content'] for pair in ((SHORT, LONG), (LONG, SHORT))]
    first, second = client.completions.create(model='judge', prompt=prompts, logprobs=2).choices
    assert (first.text, second.text) == ('M', 'm') and second.index == 1
    assert second.logprobs.tokens == ['m'] and round(second.logprobs.top_logprobs[0]['M'], 3) == -2.303
    assert server.requests()[-1]['label'] == [2, 1]
    assert client.completions.create(model='judge', prompt=prompts[1]).choices[0].text == 'Output (a)'


@pytest.mark.parametrize('fault, error, code', [
    ('429', openai.RateLimitError, 'rate_limit_exceeded'), ('500', openai.InternalServerError, None),
    ('503', openai.InternalServerError, None), ('context', openai.BadRequestError, 'context_length_exceeded'),
    ('reset', openai.APIConnectionError, None), ('truncated', openai.APIConnectionError, None),
    ('timeout', openai.APITimeoutError, None), ('badjson', json.JSONDecodeError, None)])
def test_errors(client, server, fault, error, code):
    server.set(faults={fault: 1}, retry_after=.25)
    with pytest.raises(error) as caught: client.with_options(timeout=.5).chat.completions.create(**body())
    assert getattr(caught.value, 'code', None) == code
    if fault.isdigit(): assert caught.value.status_code == int(fault)
    if fault == '429': assert caught.value.response.headers['retry-after'] == '0.25'
    assert isinstance(caught.value, openai.APITimeoutError) == (fault == 'timeout')
    last = server.requests()[-1]
    assert last['fault'] == fault and last['answered'] is False and last['label'] is None
    server.set(faults={})
    assert ask(client).choices[0].message.content == 'Output (b)', 'the client goes on'


def test_wrong_answers(client, server):
    def with_fault(name, **more):
        server.set(faults={name: 1})
        return ask(client, **more)
    assert with_fault('schema').choices is None
    choice = with_fault('nologprobs', logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is None and choice.message.content == 'M'
    message = with_fault('refusal').choices[0].message
    assert message.content is None and 'sorry' in message.refusal
    for more in ({}, dict(tools=[tool(BETTER)]), dict(logprobs=True, top_logprobs=2)):
        assert 'better' not in str(with_fault('unparseable', **more).choices[0]) and server.requests()[-1]['label'] is None
    assert with_fault('nologprobs').choices[0].message.content == 'Output (b)'
    assert server.requests()[-1]['fault'] is None, 'a fault that cannot show is none'


def test_slow(client, server):
    server.set(faults={'slowdrip': 1})
    start = time.monotonic()
    assert client.with_options(timeout=.3).chat.completions.create(**body()).choices[0].message.content == 'Output (b)'
    assert time.monotonic() - start > .45 and server.requests()[-1]['answered'], 'no single wait is long, the whole is'
    server.set(faults={}, latency=.3)
    with pytest.raises(openai.APITimeoutError): client.with_options(timeout=.1).chat.completions.create(**body())
    before = server.counts()
    time.sleep(.4)
    assert server.requests()[-1]['answered'] is False and server.counts() == before, 'a client that has disconnected gets no answer'


def test_shares():
    def met(bodies, **faults):
        server = Server(dict(faults=faults))
        return {b['messages'][1]['content']: server.arrived('POST', '/v1/completions', b, '')['fault'] for b in bodies}
    bodies = [body(f'{i}') for i in range(1000)]
    faults = met(bodies, **{'429': .3, '500': .2})
    counts = Counter(faults.values())
    assert abs(counts['429'] - 300) < 60 and abs(counts['500'] - 200) < 60 and abs(counts[None] - 500) < 60
    assert met(bodies[::-1], **{'429': .3, '500': .2}) == faults, 'the order of arrival plays no part'
    server, one = Server(dict(faults={'429': .5})), [bodies[0]]*200
    assert 60 < sum(server.arrived('POST', '/v1/completions', b, '')['fault'] == '429' for b in one) < 140, 'nor is it the same for ever'


def test_limited_faults(client, server):
    patient = client.with_options(max_retries=4)
    refusal = dict(always_for='Say no', times=1)
    server.set(faults={'500': dict(times=1), '429': dict(p=1, times=2), 'refusal': refusal}, retry_after=.01)
    count = len(server.requests())
    assert patient.chat.completions.create(**body('once')).choices[0].message.content == 'Output (b)'
    assert [r['fault'] for r in server.requests()[count:]] == ['500', '429', '429', None]
    assert ask(client, a='Say no').choices[0].message.refusal
    server.set(faults={'500': dict(p=1, on='/models')})
    with pytest.raises(openai.InternalServerError): client.models.list()
    assert ask(client).choices and set(server.counts()) <= {*FAULTS, 'ok', 'unanswered'}
    for wrong in (dict(faults={'nix': 1}), dict(faults={'429': dict(q=1)}), dict(faults={'429': 2}), dict(speed=1)):
        with pytest.raises(ValueError): server.set(**wrong)


def batch(client, lines):
    "The batch of these lines, at its end."
    file = client.files.create(file=('lines.jsonl', '\n'.join(map(json.dumps, lines)).encode()), purpose='batch')
    made = client.batches.create(input_file_id=file.id, endpoint='/v1/chat/completions', completion_window='24h')
    while (made := client.batches.retrieve(made.id)).status in ('validating', 'in_progress'): time.sleep(.02)
    return made


def lines_of(client, file_id): return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_batch(client, server):
    lines = [dict(custom_id=str(i), method='POST', url='/v1/chat/completions', body=body('x'*i, 'xxx')) for i in range(6)]
    server.set(faults={'429': dict(always_for='xxxxx'), 'timeout': dict(always_for='"seed":1')})
    lines[0]['body']['seed'] = 1
    made = batch(client, lines)
    assert made.status == 'completed' and dict(made.request_counts) == dict(total=6, completed=4, failed=2)
    good, bad = ({r['custom_id']: r for r in lines_of(client, f)} for f in (made.output_file_id, made.error_file_id))
    contents = {i: r['response']['body']['choices'][0]['message']['content'] for i, r in good.items()}
    assert contents == {'1': 'Output (b)', '2': 'Output (b)', '3': 'Output (a)', '4': 'Output (a)'}
    assert bad['5']['response']['status_code'] == 429 and bad['0']['error']['code'] == 'batch_expired'
    wrong = batch(client, [lines[1], lines[1], dict(custom_id='x')])
    assert wrong.status == 'failed' and [e.code for e in wrong.errors.data] == ['duplicate_custom_id', 'invalid_json_line']
    server.set(batch_seconds=30)
    going = client.batches.create(input_file_id=made.input_file_id, endpoint='/v1/chat/completions', completion_window='24h')
    assert going.status == 'validating' and client.batches.retrieve(going.id).status == 'validating'
    assert client.batches.cancel(going.id).status == 'cancelling' and client.batches.retrieve(going.id).status == 'cancelled'


def test_key_and_log(tmp_path):
    log = tmp_path/'log'
    with judge_server(key='right', log=log, faults={'500': 1}) as server, connected(server, 'wrong') as client:
        with pytest.raises(openai.AuthenticationError) as caught: ask(client)
        assert caught.value.code == 'invalid_api_key' and server.requests()[-1]['key'] == 'wrong'
        with pytest.raises(openai.InternalServerError): ask(client.with_options(api_key='right'))
        with pytest.raises(openai.NotFoundError): client.with_options(api_key='right').responses.create(model='judge', input='x')
        server.process.kill()
        with pytest.raises(openai.APIConnectionError): ask(client)
        assert server.counts() == {'500': 1, 'unanswered': 1} and [r['status'] for r in server.requests()] == [401, 500, 404]
    with judge_server(log=log) as server, connected(server, 'k') as client:
        assert ask(client).choices and [r['index'] for r in server.requests()] == [0, 1, 2, 3], 'the log goes on'
    with pytest.raises(ValueError, match='no such fault'), judge_server(faults={'nix': 1}): pass
