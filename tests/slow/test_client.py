"""The client of judges behind an API: what belongs to a key, who waits for whom, what stops it, and what it never shows."""
import json
import re
import subprocess
import sys
import time

import openai   # takes a second or two the first time
import pytest

import tiny
from alpaca_farm import annotators
from alpaca_farm.annotators import AnnotatorsConfig
from alpaca_farm.auto_annotations import PairwiseAutoAnnotator
from alpaca_farm.core.ask.api import ApiConfig
from alpaca_farm.core.ask.batches import _batch_text, _store_line
from alpaca_farm.core.ask.client import ApiClient
from alpaca_farm.core.run.runs import read_summary
from alpaca_farm.core.ask.store import Store, request_key
from judge_server import judge_server

KEY = 'sk-a-key-of-the-tests'


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in ('OPENAI_BASE_URL', 'OPENAI_API_BASE', 'OPENAI_ORG_ID'): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('OPENAI_API_KEY', KEY)
    monkeypatch.setattr('alpaca_farm.core.ask.client.at_root', lambda path: tmp_path/path)   # no store among the project's runs


@pytest.fixture(scope='module')
def shared():
    with judge_server() as server: yield server


@pytest.fixture
def server(shared):
    shared.set(faults={}, latency=0., template='Output ({letter})', retry_after=.05, batch_seconds=.1)
    return shared


def settings(tmp_path, server, **more):
    return ApiConfig(**dict(dict(base_url=server.url, store=str(tmp_path/'answers.sqlite'), tries=3, timeout=5.), **more))


def asked(n, **more): return [dict(model='judge', messages=[dict(role='user', content=f'Say word {i}.')]) | more for i in range(n)]


def texts(answers): return [a and a['choices'][0]['message']['content'] for a in answers]


def labelling(tmp_path, server, n=30, **more):
    "Settings of a run with a judge that is asked about n pairs."
    file = tmp_path/'pairs.json'
    if not file.exists():
        file.write_text(json.dumps([dict(instruction=f'Say word {i}.', input='', output_1='a'*(i + 1), output_2='b'*40) for i in range(n)]))
    return AnnotatorsConfig(**dict(dict(out=str(tmp_path/'run'), outputs=str(file), annotators='chatgpt', models=['gpt-3.5-turbo-0301=judge'], base_url=server.url,
                                        store=str(tmp_path/'answers.sqlite'), label_flip=0., tries=3, timeout=5.), **more))


def test_no_key_in_the_address():
    for url in ('http://me:hidden@localhost/v1', 'http://localhost/v1?api_key=hidden', 'http://localhost/v1?access_token=hidden'):
        with pytest.raises(ValueError, match='base_url .*password.* environment') as caught: ApiConfig(base_url=url)
        assert 'hidden' not in str(caught.value)
    with pytest.raises(ValueError, match='like http://localhost:8000/v1: Port'): ApiConfig(base_url='http://localhost:port/v1')


@pytest.mark.parametrize('batch', [False, True])
def test_a_key_that_the_server_repeats_is_nowhere(tmp_path, server, capsys, batch):
    "In the reason of a refusal, in a batch's errors, and in an answer's text: neither printed nor in any file."
    server.set(faults={'echo': {'p': 0, 'always_for': 'Say word 3\\.'}}, template='Output ({letter}) says %s' % KEY)
    cfg = labelling(tmp_path, server, n=8, batch=batch)
    annotators.run(cfg)
    assert read_summary(cfg.out)['labels'] == 7 and 'Bearer [key]' in (tmp_path/'run'/'unanswered.json').read_text()
    Store(cfg.store).run('pragma wal_checkpoint(truncate)')
    assert not [p for p in tmp_path.rglob('*') if p.is_file() and KEY.encode() in p.read_bytes()]
    said = capsys.readouterr()
    assert KEY not in said.out + said.err and 'says [key]' in Store(cfg.store).run('select answer from answers')[0][0]


def test_another_endpoint_is_asked_itself(tmp_path, server):
    "A model of the same name elsewhere gives its own answers; spellings of one address are one."
    ApiClient(settings(tmp_path, server))(asked(3))
    with judge_server(template='Another answer') as other:
        for url in (other.url, other.url + '/', other.url.upper().replace('/V1', '/v1')):
            client = ApiClient(settings(tmp_path, other, base_url=url))
            assert texts(client(asked(3))) == ['Another answer']*3
        assert len(other.requests()) == 3
        old = dict(choices=[dict(message=dict(content='Old'))])
        client.store.put(request_key(asked(1)[0], 7), asked(1)[0], old)   # of OpenAI, without a name
        assert texts(client(asked(1), 7)) == ['Another answer']
    assert texts(ApiClient(settings(tmp_path, server, base_url=''))(asked(1), 7)) == ['Old']



def test_a_batch_that_is_gone_is_asked_again(tmp_path, server, capsys):
    "With and without the Batch API; whatever the reason, deleted or another project's."
    for n, batch in enumerate((False, True)):
        cfg = settings(tmp_path, server, batch=batch)
        client, requests = ApiClient(cfg), asked(3, seed=n)
        client.store.note_batch(f'file-gone-{n}', client.server, dict(zip(client.keys(requests), requests)))
        client.store.name_batch(f'file-gone-{n}', 'batch_gone')
        assert None not in client(requests) and client.tally.asked == 3 and not client.tally.failed
        assert 'the batch batch_gone is gone' in capsys.readouterr().out and not client.store.open_batches(client.server)
    nameless, requests = ApiClient(settings(tmp_path, server)), asked(3, seed=2)      # killed before its name was known; its file is gone, too
    nameless.store.note_batch('file-gone', nameless.server, dict(zip(nameless.keys(requests), requests)))
    assert None not in nameless(requests) and 'the batch of file-gone is gone' in capsys.readouterr().out


def test_a_refused_key_does_not_release_a_batch(tmp_path):
    with judge_server(key='right') as server:
        client, requests = ApiClient(settings(tmp_path, server)), asked(3)
        client.store.note_batch('file-1', client.server, dict(zip(client.keys(requests), requests)))
        with pytest.raises(ValueError, match='the key is refused'): client(requests)
        assert client.store.open_batches(client.server)


ASKS = '''
import sys; sys.path[:0] = {tests!r}
from test_client import asked, ApiClient, ApiConfig
client = ApiClient(ApiConfig(base_url={url!r}, store={store!r}, concurrency=2, tries=3), sys.argv[1])
assert None not in client(asked(12))
print(client.tally.asked, client.tally.known)
'''


@pytest.mark.parametrize('killed', [False, True])
def test_two_processes_that_ask_the_same_pay_once(tmp_path, killed):
    "One asks; the other waits, and finds the answers. If the first is killed, it asks for the rest."
    with judge_server(latency=1.) as server:
        code = ASKS.format(tests=[f'{tiny.ROOT}/tests/slow', f'{tiny.ROOT}/tests'], url=server.url, store=str(tmp_path/'a.sqlite'))
        env = {**tiny.environment(), 'OPENAI_API_KEY': 'test', 'PYTHONPATH': str(tiny.ROOT)}
        def start(name): return subprocess.Popen([sys.executable, '-c', code, name], stdout=subprocess.PIPE, text=True, env=env)
        with start('one') as one:
            while not server.requests(): time.sleep(.02)
            with start('two') as two:
                while killed and server.counts()['ok'] < 4: time.sleep(.02)
                if killed: one.kill()
                said = two.communicate(timeout=60)[0]
        asked_now, known = map(int, said.split()[-2:])
        assert asked_now + known == 12 and (asked_now > 0) == killed and server.counts()['ok'] <= 12 + 2*killed


def test_processes_that_make_a_store_at_the_same_time_wait_for_each_other(tmp_path):
    "The switch to a write-ahead log fails at once where another process makes it: tried again."
    code = """
import sys, time
from alpaca_farm.core.ask.store import Store
for i in range(60):
    while time.time() < float(sys.argv[2]) + .05*i: pass
    Store(f'{sys.argv[1]}/{i}.sqlite').close()
"""
    env = {**tiny.environment(), 'PYTHONPATH': str(tiny.ROOT)}
    three = [subprocess.Popen([sys.executable, '-c', code, tmp_path, str(time.time() + 5)], env=env) for _ in range(3)]
    assert [p.wait(timeout=120) for p in three] == [0, 0, 0]


def test_half_a_character_does_not_end_a_run(tmp_path, server):
    "A lone surrogate in what is sent, and one in an answer: replaced, the same each time."
    server.set(faults={'surrogate': {'p': 0, 'always_for': 'Say word 1\\.'}})
    requests = asked(3) + [dict(model='judge', messages=[dict(role='user', content='half \ud83d')])]
    client = ApiClient(settings(tmp_path, server), 'halves')
    first = client(requests)
    assert texts(first)[1].endswith('\ufffd') and None not in first
    judge = PairwiseAutoAnnotator('chatgpt', models={'gpt-3.5-turbo-0301': 'judge'}, base_url=server.url, caching_path=str(tmp_path/'annotations.json'))
    assert judge.annotate_pairs([dict(instruction='Say it.', output_1='half \ud83d', output_2='b'*40)])[0]['preference'] == 2
    assert client(requests) == first and client.tally.asked == 4 and 'half \ufffd' in Store(client.cfg.store).run('select group_concat(request) from requests')[0][0]


def test_a_budget_is_for_all_starts_of_a_run_folder(tmp_path, server, capsys):
    "Three starts spend what one may, since the store has counted; another folder has its own."
    (tmp_path/'prices.yaml').write_text('judge: [1000, 1000]')
    def run(out, n, **more):
        client = ApiClient(settings(tmp_path, server, out=str(tmp_path/out), prices=str(tmp_path/'prices.yaml'), concurrency=1, **more))
        return sum(a is not None for a in client(asked(9, seed=n, max_tokens=10)))
    got = [run('one', n, budget=.06) for n in range(3)]
    spent = Store(tmp_path/'answers.sqlite').dollars_paid('one')
    assert got[0] > 0 == got[1] == got[2] and 0 < spent <= .06 and f'in all its starts, {tmp_path/"one"} has cost $0.{spent*100:02.0f}' in capsys.readouterr().out
    assert run('two', 9, budget=.15) > 0, 'another folder has its own'


def test_the_forecast_counts_both_orders(tmp_path, server, capsys):
    (tmp_path/'prices.yaml').write_text('judge: [1000, 1000]')
    def forecast(both):
        name = str(tmp_path/f'both_{both}')
        annotators.run(labelling(tmp_path, server, n=5, prices=str(tmp_path/'prices.yaml'), out=name,
                                 store=f'{name}.sqlite', both_orders=both))
        said = re.search(r'(\d+) requests to judge; at most about \$([\d.]+)', capsys.readouterr().out)
        return int(said[1]), float(said[2])
    (n, one), (twice, both) = forecast(False), forecast(True)
    assert (n, twice) == (5, 10) and both == pytest.approx(2*one, rel=.02)


def test_nothing_readable_stops_early(tmp_path, server):
    "Not after all pairs are paid for; what is stored serves a judge that can read it, and the same one does not pay again."
    server.set(template='I like the {letter} one.')
    cfg = labelling(tmp_path, server, n=60, concurrency=4)
    before = len(server.requests())
    with pytest.raises(ValueError, match='none of 20 answers of chatgpt can be read.*I like the'): annotators.run(cfg)
    assert 20 <= len(server.requests()) - before < 30
    paid = len(server.requests())
    with pytest.raises(ValueError, match='none of 20 answers'): annotators.run(cfg)
    assert len(server.requests()) == paid
    client = ApiClient(settings(tmp_path, server))
    client(asked(1))
    assert None not in client(asked(30), readable=lambda i, answer: i == 0), 'one that could be read is enough to go on'


def test_what_a_batch_may_cost_counts_while_it_is_under_way(tmp_path, server):
    "A start that was killed has sent a batch; the next one, with the same budget, does not send as much again."
    (tmp_path/'prices.yaml').write_text('judge: [1000, 1000]')
    server.set(batch_seconds=60.)
    cfg = settings(tmp_path, server, out=str(tmp_path/'run'), prices=str(tmp_path/'prices.yaml'), budget=.3)
    client, requests = ApiClient(cfg), asked(18, max_tokens=10)
    part = dict(zip(client.keys(requests[:9]), requests[:9]))
    with openai.OpenAI(base_url=server.url, api_key=KEY) as account:
        file = account.files.create(file=('requests.jsonl', _batch_text(part)), purpose='batch').id
        made = account.batches.create(input_file_id=file, endpoint='/v1/chat/completions', completion_window='24h')
    client.store.note_batch(file, client.server, part)
    client.store.name_batch(file, made.id)
    answers = client(requests)
    assert answers[:9] == [None]*9 and 0 < sum(a is not None for a in answers[9:]) < 6 and client.tally.stopped


def test_the_answer_of_a_batch_is_paid_for_once(tmp_path):
    "Two processes may read the same batch; a request that was sent twice was paid for twice."
    store, answer = Store(tmp_path/'a.sqlite'), dict(choices=[])
    for seconds, paid in ((None, 2.), (None, 2.), (.5, 4.)):
        store.put(b'key', dict(model='m'), answer, seconds, 'run', 2.)
        assert store.dollars_paid('run') == paid


@pytest.mark.parametrize('response', [dict(status_code=502, body='upstream error'), dict(status_code=500, body=dict(error='busy')), dict(status_code=500, body=[1]), None])
def test_a_line_of_a_batch_in_another_form_is_a_reason(tmp_path, server, response):
    client = ApiClient(settings(tmp_path, server))
    client.begin({b'key': asked(1)[0]})
    _store_line(client, dict(custom_id=b'key'.hex(), response=response), client.todo)
    assert client.tally.failed[b'key']
