"""The client of judges behind an API: what belongs to a key, who waits for whom, what stops it, and what it never shows."""
import json

import pytest

from alpaca_farm import annotators
from alpaca_farm.annotators import AnnotatorsConfig
from alpaca_farm.core.api import ApiConfig
from alpaca_farm.core.batches import ApiClient
from alpaca_farm.core.store import Store
from alpaca_farm.core.runs import read_summary
from judge_server import judge_server

KEY = 'sk-a-key-of-the-tests'


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ('OPENAI_BASE_URL', 'OPENAI_API_BASE', 'OPENAI_ORG_ID'): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('OPENAI_API_KEY', KEY)


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
        with pytest.raises(ValueError, match='base_url holds a user, password or key') as caught: ApiConfig(base_url=url)
        assert 'hidden' not in str(caught.value)
    with pytest.raises(ValueError, match='base_url: Port'): ApiConfig(base_url='http://localhost:port/v1')


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
    assert KEY not in said.out + said.err and 'says [key]' in Store(cfg.store).run('select answer from answers').fetchone()[0]
