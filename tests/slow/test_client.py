"The client: what belongs to a key, who waits for whom, what stops it, and what it never shows."
import re
import subprocess
import sys
import time

import openai   # takes a second or two the first time
import psutil
import pytest

import tiny
from alpaca_farm.annotators import run
from alpaca_farm.auto_annotations import PairwiseAutoAnnotator
from alpaca_farm.core.ask.api import ApiConfig
from alpaca_farm.core.ask.batches import _batch_text, _store_line
from alpaca_farm.core.ask.client import ApiClient
from alpaca_farm.core.ask.store import request_key, Store
from asking import annotation, KEY, key, prices, summary
from judge_server import judge_server


@pytest.fixture(scope='module')
def shared():
    with judge_server() as server: yield server


@pytest.fixture
def server(shared, monkeypatch, tmp_path):
    "One for all tests, as if new; and no store among the project's runs."
    monkeypatch.setattr('alpaca_farm.core.ask.client.at_root', lambda path: tmp_path/path)
    shared.set(faults={}, latency=0., template='Output ({letter})', batch_seconds=.1)
    return shared


def client_of(tmp_path, server, **more):
    usual = dict(base_url=server.url, store=str(tmp_path/'answers.sqlite'), tries=3)
    return ApiClient(ApiConfig(**usual | more))


def asked(n, **more):
    return [dict(model='judge', messages=[dict(role='user', content=f'Say word {i}.')], **more)
            for i in range(n)]


def texts(answers): return [a and a['choices'][0]['message']['content'] for a in answers]


@pytest.mark.parametrize('batch', [False, True])
def test_a_key_that_the_server_repeats_is_nowhere(tmp_path, server, capsys, batch):
    "In a refusal, a batch's errors, and an answer's text: neither printed nor in any file."
    server.set(faults={'echo': {'p': 0, 'always_for': 'Say word 3\\.'}},
               template='Output ({letter}) says %s' % KEY)
    cfg = annotation(tmp_path, server, n=8, batch=batch)
    run(cfg)
    assert summary(cfg)['labels'] == 7
    assert 'Bearer [key]' in (tmp_path/'run'/'unanswered.json').read_text()
    store = Store(cfg.store)
    store.run('pragma wal_checkpoint(truncate)')
    assert 'says [key]' in store.run('select answer from answers')[0][0]
    said, files = capsys.readouterr(), [p for p in tmp_path.rglob('*') if p.is_file()]
    assert KEY not in said.out + said.err
    assert not [p for p in files if KEY.encode() in p.read_bytes()]


def test_another_endpoint_is_asked_itself(tmp_path, server):
    "A model of the same name elsewhere gives its own answers; spellings of one address are one."
    client_of(tmp_path, server)(asked(3))
    with judge_server(template='Another') as other:
        for url in (other.url, other.url + '/', other.url.upper().replace('/V1', '/v1')):
            client = client_of(tmp_path, other, base_url=url)
            assert texts(client(asked(3))) == ['Another']*3
        assert len(other.requests()) == 3
        old = dict(choices=[dict(message=dict(content='Old'))])
        client.store.put(request_key(asked(1)[0], 7), asked(1)[0], old)   # of OpenAI, unnamed
        assert texts(client(asked(1), 7)) == ['Another']
    assert texts(client_of(tmp_path, server, base_url='')(asked(1), 7)) == ['Old']


@pytest.mark.parametrize('batch, name', [(False, 'batch_gone'), (True, 'batch_gone'), (False, '')])
def test_a_batch_that_is_gone_is_asked_again(tmp_path, server, capsys, batch, name):
    "Deleted or another project's; `''`: killed before the name was known, and its file is gone."
    client, requests = client_of(tmp_path, server, batch=batch), asked(3)
    client.store.note_batch('file', client.server, dict(zip(client.keys(requests), requests)))
    if name: client.store.name_batch('file', name)
    assert None not in client(requests) and client.tally.asked == 3 and not client.tally.failed
    assert f'the batch {name or "of file"} is gone' in capsys.readouterr().out
    assert not client.store.open_batches(client.server)


def test_a_refused_key_does_not_release_a_batch(tmp_path):
    with judge_server(key='right') as server:
        client, requests = client_of(tmp_path, server), asked(3)
        todo = dict(zip(client.keys(requests), requests))
        client.store.note_batch('file-1', client.server, todo)
        with pytest.raises(ValueError, match='the key is refused'): client(requests)
        assert client.store.open_batches(client.server)


ASKS = '''
import sys; sys.path[:0] = {tests!r}
from test_client import asked, ApiClient, ApiConfig
client = ApiClient(ApiConfig(base_url={url!r}, store={store!r}, concurrency=2, tries=3))
assert None not in client(asked(12))
print(client.tally.asked, client.tally.known)
'''


@pytest.mark.parametrize('killed', [False, True])
def test_two_processes_that_ask_the_same_pay_once(tmp_path, killed):
    "The second waits, and finds the answers; if the first is killed, it asks for the rest."
    with judge_server(latency=1.) as server:
        code = ASKS.format(tests=[f'{tiny.ROOT}/tests/slow', f'{tiny.ROOT}/tests'],
                           url=server.url, store=str(tmp_path/'a.sqlite'))
        def start():
            return subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE,
                                    text=True, env=tiny.environment(PYTHONPATH=str(tiny.ROOT)))
        with start() as one:
            while not server.requests(): time.sleep(.02)
            with start() as two:
                while killed and server.counts()['ok'] < 4: time.sleep(.02)
                if killed: one.kill()
                said = two.communicate(timeout=600)[0]
        asked_now, known = map(int, said.split()[-2:])
        assert asked_now + known == 12 and (asked_now > 0) == killed
        assert server.counts()['ok'] <= 12 + 2*killed


def test_processes_that_make_a_store_at_the_same_time_wait_for_each_other(tmp_path):
    code = """
import sys, time
from alpaca_farm.core.ask.store import Store
for i in range(60):
    while time.time() < float(sys.argv[2]) + .05*i: pass
    Store(f'{sys.argv[1]}/{i}.sqlite').close()
"""
    command = [sys.executable, '-c', code, tmp_path, str(time.time() + 5)]
    three = [subprocess.Popen(command, env=tiny.environment(PYTHONPATH=str(tiny.ROOT)))
             for _ in range(3)]
    assert [p.wait(timeout=120) for p in three] == [0, 0, 0]


def test_half_a_character_does_not_end_a_run(tmp_path, server):
    "A lone surrogate in what is sent, and one in an answer: replaced, the same each time."
    server.set(faults={'surrogate': {'p': 0, 'always_for': 'Say word 1\\.'}})
    requests = asked(3) + [dict(model='judge', prompt='half \ud83d')]
    client = client_of(tmp_path, server)
    first = client(requests)
    assert texts(first[:3])[1].endswith('\ufffd') and None not in first
    judge = PairwiseAutoAnnotator('chatgpt', models={'gpt-3.5-turbo-0301': 'judge'},
                                  base_url=server.url, caching_path=str(tmp_path/'labels.json'))
    pair = dict(instruction='Say it.', output_1='half \ud83d', output_2='b'*40)
    assert judge.annotate_pairs([pair])[0]['preference'] == 2
    assert client(requests) == first and client.tally.asked == 4
    stored = client.store.run('select group_concat(request) from requests')[0][0]
    assert 'half \ufffd' in stored


def test_a_budget_is_for_all_starts_of_a_run_folder(tmp_path, server):
    "Three starts spend what one may, since the store has counted; another folder has its own."
    def answered(out, n, budget):
        client = client_of(tmp_path, server, out=str(tmp_path/out), budget=budget, concurrency=1,
                           prices=prices(tmp_path, '[1000, 1000]'))
        return sum(a is not None for a in client(asked(9, seed=n, max_tokens=10)))
    got = [answered('one', n, .06) for n in range(3)]
    assert got[0] > 0 == got[1] == got[2]
    assert 0 < Store(tmp_path/'answers.sqlite').dollars_paid('one') <= .06
    assert answered('two', 9, .15) > 0


def test_the_forecast_counts_both_orders(tmp_path, server, capsys):
    def forecast(both):
        name = f'{tmp_path}/both_{both}'
        run(annotation(tmp_path, server, n=5, prices=prices(tmp_path, '[1000, 1000]'), out=name,
                       store=f'{name}.sqlite', both_orders=both))
        said = re.search(r'(\d+) requests to judge.*\$([\d.]+)', capsys.readouterr().out)
        return int(said[1]), float(said[2])
    (n, one), (twice, both) = forecast(False), forecast(True)
    assert (n, twice) == (5, 10) and both == pytest.approx(2*one, rel=.02)


def test_nothing_readable_stops_early(tmp_path, server):
    "Not after all pairs are paid for; one answer that can be read is enough to go on."
    server.set(template='I like the {letter} one.')
    cfg = annotation(tmp_path, server, n=60, concurrency=4)
    before = len(server.requests())
    for _ in range(2):   # what is stored is not paid for again
        with pytest.raises(ValueError, match='none of 20 answers.*I like the'): run(cfg)
        assert 20 <= len(server.requests()) - before < 30
    client = client_of(tmp_path, server)
    client(asked(1))
    assert None not in client(asked(30), readable=lambda i, answer: i == 0)


def test_what_a_batch_may_cost_counts_while_it_is_under_way(tmp_path, server):
    "A start that was killed has sent a batch; the next one does not send as much again."
    server.set(batch_seconds=3600.)
    client = client_of(tmp_path, server, out=str(tmp_path/'run'), budget=.3,
                       prices=prices(tmp_path, '[1000, 1000]'))
    requests = asked(18, max_tokens=10)
    part = dict(zip(client.keys(requests[:9]), requests[:9]))
    with openai.OpenAI(base_url=server.url, api_key=KEY) as account:
        file = account.files.create(file=('a.jsonl', _batch_text(part)), purpose='batch').id
        made = account.batches.create(input_file_id=file, endpoint='/v1/chat/completions',
                                      completion_window='24h')
    client.store.note_batch(file, client.server, part)
    client.store.name_batch(file, made.id)
    answers = client(requests)
    assert answers[:9] == [None]*9 and client.tally.stopped
    assert 0 < sum(a is not None for a in answers[9:]) < 6


def test_a_large_store_is_neither_loaded_nor_searched(tmp_path):
    "40,000 answers to requests of 2 kB: memory, and SQLite's operations for a few of them."
    store = Store(tmp_path/'a.sqlite')
    store.run('begin')
    store.db.executemany('insert into answers values (?, ?, 1., ?)',
                         [(b'%08d' % i, '{"text": "yes"}', i) for i in range(40_000)])
    store.db.executemany('insert into requests values (?, ?)',
                         [(b'%08d' % i, 'x'*2000) for i in range(40_000)])
    store.run('commit')
    store.close()
    me, thousands = psutil.Process(), []
    before = me.memory_info().rss
    store = Store(tmp_path/'a.sqlite')
    store.db.set_progress_handler(lambda: thousands.append(1), 1000)
    assert len(store.get([b'%08d' % i for i in range(0, 40_000, 400)])) == 100
    assert store.mean_seconds() == 1.
    assert len(thousands) < 10 and me.memory_info().rss - before < 20 * 2**20


def test_the_answer_of_a_batch_is_paid_for_once(tmp_path):
    "Two processes may read the same batch; a request that was sent twice was paid for twice."
    store = Store(tmp_path/'a.sqlite')
    for seconds, paid in ((None, 2.), (None, 2.), (.5, 4.)):
        store.put(b'key', dict(model='m'), dict(choices=[]), seconds, 'run', 2.)
        assert store.dollars_paid('run') == paid


@pytest.mark.parametrize('response', [dict(status_code=502, body='upstream error'),
                                      dict(status_code=500, body=[1]), None])
def test_a_line_of_a_batch_in_another_form_is_a_reason(tmp_path, server, response):
    client = client_of(tmp_path, server)
    client.begin({b'key': asked(1)[0]})
    _store_line(client, dict(custom_id=b'key'.hex(), response=response), client.todo)
    assert client.tally.failed[b'key']
