"""Labels per second at default settings: beside what servers can give, and beside alpaca-eval.

PAIRS=5000 python -m pytest -s tests/slow/test_speed.py makes the measurement at full size, on a
machine that does nothing else; alpaca-eval has the same server in the same run."""
import json
import os
import time

import pytest

from alpaca_farm.annotators import load_annotators
from alpaca_farm.core.ask.api import ApiConfig
from alpaca_farm.core.ask.store import Store, request_key
from fast_server import fast_server

pytestmark = pytest.mark.alone
N = int(os.environ.get('PAIRS', 200))
FULL = N >= 1000
SERVERS = {   # the most labels a second, and options
    '64 at a time': (640, dict(latency=.1, slots=64)),
    '429 above 32': (200, dict(latency=.16, most=32))}


def pairs(n):
    return [dict(instruction=f'Say word {i}.', input='', output_1='a'*(i % 30 + 1),
                 output_2='b'*(i % 17 + 1)) for i in range(n)]


def ours(server, folder, n):
    "Labels a second: all in all, and while requests were under way; CPU seconds for each."
    cfg = ApiConfig(base_url=server.url, store=str(folder/'ours.sqlite'))
    judge = load_annotators('alpaca_eval_gpt4', cfg)
    began, cpu = time.perf_counter(), time.process_time()
    assert all(v in (1, 2) for v in judge(pairs(n)))
    counts, cpu = server.counts(), (time.process_time() - cpu)/n
    return n/(time.perf_counter() - began), n/(counts['last'] - counts['first']), cpu


def theirs(url, folder, n, monkeypatch):
    monkeypatch.setenv('OPENAI_BASE_URL', url)
    from alpaca_eval.annotators import PairwiseAnnotator
    annotator = PairwiseAnnotator(
        annotators_config='alpaca_eval_gpt4', caching_path=str(folder/'theirs.json'),
        is_avoid_reannotations=False)
    began = time.perf_counter()
    given = [{k: v for k, v in p.items() if k != 'input'} for p in pairs(n)]
    assert len(annotator.annotate_pairs(given)) == n
    return n/(time.perf_counter() - began)


@pytest.fixture(autouse=True)
def key(monkeypatch): monkeypatch.setenv('OPENAI_API_KEY', 'test')


def test_labels_per_second(tmp_path, monkeypatch, capsys):
    "A server for 64 at 50 ms: 10 times alpaca-eval's pace; 4 times on few, for a busy machine."
    n, options = 1000 if FULL else 60, dict(latency=.05, slots=64)
    with fast_server(**options) as server: they = theirs(server.url, tmp_path, n, monkeypatch)
    with fast_server(**options) as server: we, _, cpu = ours(server, tmp_path, N)
    with capsys.disabled():
        print(f'\n{N} pairs, 50 ms: ours {we:.0f}/s, {cpu*1e3:.2f} ms of CPU each; '
              f'alpaca-eval {they:.1f}/s on {n} (1/{we/they:.1f})')
    assert we > (10 if FULL else 4)*they


@pytest.mark.parametrize('most, options', SERVERS.values(), ids=SERVERS)
def test_what_a_server_gives(tmp_path, capsys, most, options):
    "While requests are under way; where half of them are refused as too many, all labels come."
    with fast_server(**options) as server: _, rate, cpu = ours(server, tmp_path, N)
    with capsys.disabled():
        print(f'\n{N} pairs, {options}: {rate:.0f}/s of {most} ({rate/most:.0%}), '
              f'{cpu*1e3:.2f} ms of CPU each')
    assert rate > (.5 if FULL else .1)*most


def test_a_large_store_opens_and_answers_at_once(tmp_path, capsys):
    "100,000 labels of 2 kB requests are looked up; memory does not grow with what is stored."
    import psutil
    store = Store(tmp_path/'large.sqlite')
    request = dict(model='judge', messages=[dict(role='user', content='x'*2000)])
    choice = dict(index=0, message=dict(role='assistant', content='Output (a)'),
                  finish_reason='stop')
    usage = dict(prompt_tokens=500, completion_tokens=4, total_tokens=504)
    answer = json.dumps(dict(id='chatcmpl-1', model='judge', choices=[choice], usage=usage))
    keys, me = [request_key(dict(request, seed=i)) for i in range(100_000)], psutil.Process()
    # written in an instant; in another order it takes half a minute
    in_order = sorted((k, i) for i, k in enumerate(keys))
    answers = ((k, answer, .1, float(i)) for k, i in in_order)
    requests = ((k, json.dumps(dict(request, seed=i))) for k, i in in_order)
    for pragma in ('journal_mode', 'synchronous'):   # so as not to write it twice
        store.run(f'pragma {pragma} = off')
    store.db.execute('begin')
    store.db.executemany('insert into answers values (?, ?, ?, ?)', answers)
    store.db.executemany('insert into requests values (?, ?)', requests)
    store.run('commit'); store.close()
    opened = []
    for _ in range(3):   # the disk may still be busy with what was written
        before, began = me.memory_info().rss, time.perf_counter()
        store = Store(tmp_path/'large.sqlite')
        few = store.get(keys[:1000])
        pace = store.mean_seconds()
        opened.append((time.perf_counter() - began, (me.memory_info().rss - before)/2**20))
        del few
    opened, grown = min(seconds for seconds, _ in opened), opened[0][1]
    began = time.perf_counter()
    found, took = len(store.get(keys)), time.perf_counter() - began
    with capsys.disabled():
        print(f'\nopened and 1,000 found in {opened:.3f} s with {grown:.0f} MiB, '
              f'all 100,000 looked up in {took:.2f} s')
    assert found == 100_000 and pace and opened < .5 and grown < 30 and took < 3
