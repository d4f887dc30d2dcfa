"What the tests of judges behind an endpoint share: a key of their own, pairs and settings."
import json

import numpy as np
import pytest

from alpaca_farm.annotators import AnnotatorsConfig
from alpaca_farm.data.records import load_records
from alpaca_farm.judging.prompts import entry_model, judge_config_file, read_judge_config
from alpaca_farm.run.runs import read_summary

KEY = 'sk-a-key-of-the-tests'


@pytest.fixture(autouse=True)
def key(monkeypatch):
    for name in ('OPENAI_BASE_URL', 'OPENAI_API_BASE', 'OPENAI_ORG_ID'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('OPENAI_API_KEY', KEY)
    monkeypatch.setattr('openai._base_client.MAX_RETRY_DELAY', .05)


def pairs(n, least=41):
    "Pairs whose second answer is the longer one; with `least=1`, of some of them."
    rng = np.random.default_rng(1)
    return [dict(instruction=f'Say word {i}.', input='now' if i % 2 else '',
                 output_1='a' * int(rng.integers(1, 40)),
                 output_2='b' * int(rng.integers(least, least + 39))) for i in range(n)]


def longer(pairs): return [1. + (len(p['output_2']) > len(p['output_1'])) for p in pairs]


def models_of(spec):
    "The setting that puts the server's judge in the place of all models of a configuration."
    file = judge_config_file(spec)
    asked = {entry_model(e) for e in read_judge_config(file).values()} if file else ()
    return [f'{model}=judge' for model in asked]


def weights_of(spec, *names):
    "The setting by which only the named annotators of a pool are drawn."
    return [f'{n}={int(n in names)}' for n in read_judge_config(judge_config_file(spec))]


def prices(tmp_path, each='[1, 2]'):
    "A file of prices."
    file = tmp_path/'prices.yaml'
    file.write_text(''.join(f'{model}: {each}\n' for model in ('judge', 'other', 'my-instruct')))
    return str(file)


def annotation(tmp_path, server, n=40, **more):
    "Settings of an annotation run on n pairs."
    file = tmp_path/f'pairs_{n}.json'
    file.write_text(json.dumps(pairs(n)))
    usual = dict(out=str(tmp_path/'run'), outputs=str(file), annotators='chatgpt', label_flip=0.,
                 base_url=server.url if server else '', store=str(tmp_path/'answers.sqlite'),
                 tries=3, models=models_of(more.get('annotators', 'chatgpt')))
    return AnnotatorsConfig(**usual | more)


def labels(cfg): return load_records(cfg.out, 'preferences', 'preference')


def summary(cfg): return read_summary(cfg.out)
