"The client: what belongs to a key, who waits for whom, what stops it, and what it never shows."
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai   # takes a second or two the first time
import pytest

import tiny
from alpaca_farm.annotators import run
from alpaca_farm.ask.client import ApiClient, ApiConfig, ask
from alpaca_farm.ask.store import request_key, Store
from alpaca_farm.auto_annotations import PairwiseAutoAnnotator
from asking import annotation, KEY, key, prices, summary
from judge_server import judge_server


@pytest.fixture
def server(monkeypatch, tmp_path):
    "And no store among the project's runs."
    monkeypatch.setattr('alpaca_farm.ask.client.at_root', lambda path: tmp_path/path)
    with judge_server() as server:
        yield server


def client_of(tmp_path, server, **more):
    usual = dict(base_url=server.url, store=str(tmp_path/'answers.sqlite'), tries=3)
    return ApiClient(ApiConfig(**usual | more))


def asked(n, **more):
    requests = []
    for i in range(n):
        messages = [dict(role='user', content=f'Say word {i}.')]
        requests.append(dict(model='judge', messages=messages, **more))
    return requests


def texts(answers): return [a and a['choices'][0]['message']['content'] for a in answers]


def test_a_key_that_the_server_repeats_is_nowhere(tmp_path, server, capsys):
    "In a refusal, and an answer's text: neither printed nor in any file."
    server.set(faults={'echo': 'Say word 3\\.'},
               template='It says %s.\nOutput ({letter})' % KEY)
    cfg = annotation(tmp_path, server, n=8)
    run(cfg)
    assert summary(cfg)['labels'] == 7
    assert 'Bearer [key]' in (tmp_path/'run'/'unanswered.json').read_text()
    store = Store(cfg.store)
    store.run('pragma wal_checkpoint(truncate)')
    assert 'says [key]' in store.run('select answer from answers')[0][0]
    said = capsys.readouterr()
    files = [p for p in tmp_path.rglob('*') if p.is_file()]
    assert KEY not in said.out + said.err
    assert not [p for p in files if KEY.encode() in p.read_bytes()]


def test_another_endpoint_is_asked_itself(tmp_path, server):
    "A model of the same name elsewhere gives its own answers."
    client_of(tmp_path, server)(asked(3))
    with judge_server(template='Another') as other:
        client = client_of(tmp_path, other)
        assert texts(client(asked(3))) == ['Another']*3
        old = dict(choices=[dict(message=dict(content='Old'))])
        client.store.put(request_key(asked(1)[0], 7), asked(1)[0], old)   # of OpenAI, unnamed
        assert texts(client(asked(1), [7])) == ['Another']
    assert texts(client_of(tmp_path, server, base_url='')(asked(1), [7])) == ['Old']


ASKS = '''
import sys; sys.path.insert(0, {tests!r})
from test_client import asked, ApiClient, ApiConfig
client = ApiClient(ApiConfig(base_url={url!r}, store={store!r}, concurrency={at_a_time}, tries=3,
                             timeout=1e6))
assert None not in client(asked({n}))
print(client.tally.asked, client.tally.known)
'''


def code_of(tmp_path, server, n=12, at_a_time=2):
    return ASKS.format(tests=f'{tiny.ROOT}/tests/slow', url=server.url,
                       store=str(tmp_path/'a.sqlite'), n=n, at_a_time=at_a_time)


HERE = tiny.environment(PYTHONPATH=tiny.PATHS)


def start(code, *args):
    return subprocess.Popen([sys.executable, '-uc', code, *map(str, args)], text=True, env=HERE,
                            stdout=subprocess.PIPE)


def wait_for(server, n):
    "Until a server has received n requests."
    while len(server.requests()) < n:
        time.sleep(.02)


def wait_for_line(process, text):
    assert any(text in line for line in process.stdout), text


@pytest.mark.parametrize('killed', [False, True])
def test_two_processes_that_ask_the_same_pay_once(tmp_path, killed):
    "The second waits, and finds the answers; if the first is killed, it asks for the rest."
    with judge_server(hold=4) as server:
        code = code_of(tmp_path, server)
        with start(code) as one:
            wait_for(server, 4 + 2)
            with start(code) as two:
                wait_for_line(two, 'another process asks this endpoint')
                if killed:
                    one.kill()
                server.set(hold=12 + 2)
                said = two.communicate()[0]
        assert said.split()[-2:] == (['8', '4'] if killed else ['0', '12'])
        assert server.counts()['ok'] <= 12 + 2*killed


def test_processes_that_make_a_store_at_the_same_time_wait_for_each_other(tmp_path):
    code = """
import sys, time
from alpaca_farm.ask.store import Store
for i in range(60):
    while time.time() < float(sys.argv[2]) + .05*i: pass   # all at the same time
    Store(f'{sys.argv[1]}/{i}.sqlite')
"""
    begin = time.time() + 5
    three = [start(code, tmp_path, begin) for _ in range(3)]
    assert [p.wait() for p in three] == [0, 0, 0]


def test_half_a_character_does_not_end_a_run(tmp_path, server):
    "A lone surrogate in what is sent, and one in an answer: replaced, the same each time."
    server.set(faults={'surrogate': 'Say word 1\\.'})
    requests = asked(3) + [dict(model='judge', prompt='half \ud83d')]
    client = client_of(tmp_path, server)
    first = client(requests)
    assert texts(first[:3])[1].endswith('\ufffd')
    assert None not in first
    judge = PairwiseAutoAnnotator('chatgpt', models={'gpt-3.5-turbo-0301': 'judge'},
                                  base_url=server.url, caching_path=str(tmp_path/'labels.sqlite'))
    pair = dict(instruction='Say it.', output_1='half \ud83d', output_2='b'*40)
    assert judge.annotate_pairs([pair])[0]['preference'] == 2
    assert client(requests) == first
    assert client.tally.asked == 4
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
    n, one = forecast(False)
    twice, both = forecast(True)
    assert n == 5
    assert twice == 10
    assert both == pytest.approx(2*one, rel=.02)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_what_is_under_way_and_nothing_is_paid_twice(tmp_path, number):
    with judge_server(hold=0) as server:
        code = code_of(tmp_path, server, 40, 16)
        with start(code) as one:
            wait_for(server, 16)
            one.send_signal(number)
            wait_for_line(one, 'waiting for 16 answers under way')
            server.set(hold=40)
        assert one.returncode == -number
        assert len(Store(tmp_path/'a.sqlite')) == len(server.requests()) == 16
        with start(code) as two:
            said = two.communicate()[0]
        assert said.split()[-2:] == ['24', '16']
        assert server.counts()['ok'] == 40


def test_a_closed_terminal_and_a_signal_that_comes_twice_pay_nothing_twice(tmp_path):
    "The shell and the system both tell a process; what it prints then goes nowhere."
    with judge_server(latency=3.) as server:
        pid, terminal = pty.fork()
        if not pid:
            os.execve(sys.executable, [sys.executable, '-c', code_of(tmp_path, server, 40, 16)],
                      HERE)
        wait_for(server, 16)
        os.close(terminal)
        for _ in range(3):
            time.sleep(.2)
            os.kill(pid, signal.SIGHUP)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGHUP
        assert len(Store(tmp_path/'a.sqlite')) == len(server.requests()) == 16


def test_signals_are_those_of_before_after_a_call_and_in_a_thread(tmp_path, server):
    client = client_of(tmp_path, server, concurrency=4)
    seen = []
    def seen_here(number, frame): seen.append(number)
    def send(number, received):
        wait_for(server, received)
        os.kill(os.getpid(), number)
        while not client.ending:
            time.sleep(.02)
        server.set(hold=1000)
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.signal(number, seen_here)
        try:
            received = len(server.requests()) + 2
            server.set(hold=received)
            threading.Thread(target=send, args=[number, received + 4]).start()
            with pytest.raises(KeyboardInterrupt):
                client(asked(40, seed=int(number)))
            assert signal.getsignal(number) is seen_here
            assert seen.pop() == number
        finally:
            signal.signal(number, before)
    with ThreadPoolExecutor(1) as thread:
        assert None not in thread.submit(client, asked(2, seed=1)).result()


def test_the_interrupt_button_of_a_notebook_waits_too(tmp_path):
    from jupyter_client.manager import start_new_kernel
    with judge_server(hold=0) as server:
        kernel, client = start_new_kernel(env=HERE, startup_timeout=tiny.LONG)
        try:
            client.execute(code_of(tmp_path, server, 40, 16))
            wait_for(server, 16)
            kernel.interrupt_kernel()
            said = ''
            error = ''
            while not error:
                content = client.get_iopub_msg()['content']
                said += content.get('text', '')
                error = content.get('ename', '')
                if 'waiting for 16 answers under way' in said:
                    server.set(hold=40)
        finally:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)
        assert error == 'KeyboardInterrupt'
        assert len(Store(tmp_path/'a.sqlite')) == len(server.requests()) == 16


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_waits_for_what_it_has_paid_for(tmp_path, number):
    "A run that this one needs, in a process of its own, which may outlive this one for that."
    code = """
import sys; from alpaca_farm.run.runs import build
build('annotators', **eval(sys.argv[1]))
"""
    with judge_server(hold=0) as server:
        cfg = annotation(tmp_path, server, n=9, concurrency=8)
        names = 'out outputs annotators label_flip base_url store models concurrency'.split()
        given = repr({name: getattr(cfg, name) for name in names})
        with start(code, given) as one:
            wait_for(server, 8)
            one.send_signal(number)
            time.sleep(1)   # until that process has it, of which nothing is seen
            server.set(hold=9)
        while len(Store(cfg.store)) < 8:
            time.sleep(.1)
        assert len(server.requests()) == 8


def test_a_full_disk_names_the_remedy(tmp_path, server):
    client = client_of(tmp_path, server)
    client(asked(1))
    (pages,), = client.store.run('pragma page_count')
    client.store.run(f'pragma max_page_count = {pages + 2}')
    with pytest.raises(ValueError, match=r'answers\.sqlite: .*free some space'):
        client(asked(300))


def test_nothing_readable_stops_early(tmp_path, server):
    "Not after all pairs are paid for, and not once the server is mended."
    server.set(template='I like the {letter} one.')
    cfg = annotation(tmp_path, server, n=100, concurrency=4)
    for times in (1, 2):
        with pytest.raises(ValueError, match='none of 20 answers.*I like the'):
            run(cfg)
        assert 20*times <= len(server.requests()) < 30*times
    server.set(template='Output ({letter})')
    run(cfg)
    assert summary(cfg)['labels'] == summary(cfg)['asked'] == 100


def test_one_readable_answer_is_enough_to_go_on(tmp_path, server):
    client = client_of(tmp_path, server)
    said, answers = ask(client, asked(30), lambda i, answer: i or None)
    assert said == [None, *range(1, 30)]
    assert [] not in answers


def test_an_error_of_who_reads_keeps_what_is_paid_for(tmp_path, server):
    "What was under way is stored, and the error names what went wrong."
    server.set(latency=.3)
    client = client_of(tmp_path, server, concurrency=8)
    with pytest.raises(ValueError, match='division by zero'):
        ask(client, asked(20), lambda i, answer: 1/0 if i == 3 else 'yes')
    assert len(client.store) == len(server.requests())


def test_a_minute_is_waited_for_by_default():
    "The package's shortest waits between as many tries, which halve and are at most 8 seconds."
    waits = [min(openai._base_client.INITIAL_RETRY_DELAY * 2**k, 8.) * .75
             for k in range(ApiConfig().tries - 1)]
    assert 60 < sum(waits) < 75


def test_an_outage_costs_no_label(tmp_path, server):
    "As long as the package's tries; nothing is paid twice."
    server.set(faults={'503': dict(p=1., times=5)})
    assert None not in client_of(tmp_path, server, tries=8)(asked(50))
    assert server.counts()['ok'] == 50


def test_an_answer_of_the_wrong_shape_is_asked_for_again_after_a_wait(tmp_path, server):
    "Half a second at first, then a second, as after an error that the server tells."
    server.set(faults={'schema': dict(p=1., times=2)})
    assert None not in client_of(tmp_path, server)(asked(1))
    first, second, third = [r['time'] for r in server.requests()]
    assert second - first > .4
    assert third - second > .9


def test_a_request_that_always_fails_is_left_behind(tmp_path, server):
    server.set(faults={'500': 'Say word 2?0\\.', 'badjson': 'Say word 7\\.'})
    client = client_of(tmp_path, server, concurrency=1)
    missing = [i for i, answer in enumerate(client(asked(40))) if answer is None]
    assert missing == [0, 7, 20]
    assert '3 requests failed' in client.tally.open


@pytest.mark.parametrize('fault', ['timeout', '503', 'badjson'])
def test_a_dead_endpoint_ends_the_run_and_the_next_start_goes_on(tmp_path, server, fault):
    client = client_of(tmp_path, server)
    client(asked(5))
    server.set(faults={fault: 1.})
    with pytest.raises(ValueError, match='no answer from .*Run again when'):
        client_of(tmp_path, server, timeout=1., tries=2, concurrency=8)(asked(500))
    assert len(server.requests()) <= 5 + 2*(8 + 3)
    server.set(faults={})
    again = client_of(tmp_path, server)
    assert None not in again(asked(9))
    assert again.tally.known == 5
    assert again.tally.asked == 4


def test_a_second_interrupt_ends_at_once(tmp_path, server):
    server.set(faults={'timeout': 1.})
    with start(code_of(tmp_path, server, 20, 8)) as one:
        wait_for(server, 8)
        one.send_signal(signal.SIGINT)
        wait_for_line(one, 'waiting for 8')
        one.send_signal(signal.SIGINT)
        one.communicate()   # without waiting for its time-out


def test_empty_and_damaged_answers_are_named_with_how_to_drop_them(tmp_path, server, capsys):
    server.set(faults={'empty': 'Say word [12]\\.'})
    def drop(said):
        command = re.search(r'drop them first: python -c "(.*)"', said)[1]
        assert start(command).wait() == 0
    client = client_of(tmp_path, server)
    for _ in range(2):
        assert texts(client_of(tmp_path, server)(asked(4))).count(None) == 2
        said = capsys.readouterr().out
        assert '2 answers are empty (finish_reason content_filter)' in said
    server.set(faults={})
    drop(said)
    assert len(client.store) == 2
    assert None not in texts(client(asked(4)))
    client.store.run('update answers set answer = ? where key = ?',
                     '{"choi', client.keys(asked(1))[0])
    with pytest.raises(ValueError, match='1 stored answers are damaged') as e:
        client(asked(4))
    drop(str(e.value))
    assert None not in client(asked(4))
