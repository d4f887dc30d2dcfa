"""Time and memory of runs before they start: against counts by hand, and defaults against settings."""
from dataclasses import fields
from types import SimpleNamespace

import pytest

import tiny
from alpaca_farm import rrhf
from alpaca_farm.data.records import load_records
from alpaca_farm.model.forecast import _RUNS, forecast_jobs, forecast_run, text_passes
from alpaca_farm.model.loading import load_tokenizer
from alpaca_farm.train import preflight


def test_a_run_takes_six_operations_and_sixteen_bytes_a_weight():
    "Two steps of 50 tokens on 3 million weights, then the same with adapters."
    found = forecast_run(3e6, 3e6, tokens=50, steps=2, passes=3, size=4, speed=1e9)
    assert found.seconds == pytest.approx(6*3e6*100/1e9)
    least = forecast_run(3e6, 0, tokens=50, steps=2, passes=2, size=2, speed=1e9)
    assert least.seconds == pytest.approx(4*3e6*100/1e9)
    assert found.memory - least.memory == pytest.approx(16*3e6 - 2*3e6)


@pytest.mark.parametrize('notebook, settings, passes', [
    ('sft', dict(epochs=2), 2*40*3 + 5*3),
    ('reward_model', dict(epochs=1), 2*30*3),
    ('dpo', dict(epochs=1, lora_rank=8), 2*30*(2 + 1) + 5*3),
    ('dpo', dict(epochs=1, max_instances=10), 2*10*(3 + 1) + 5*3),
    ('rrhf', dict(k=4, epochs=1), 20*4*(3 + 1) + 5*3),
    ('best_of_n', dict(n=4, reward_model=''), 5*4*2),
    ('ppo', dict(steps=2, rollouts=8, ppo_epochs=2), 16*(2*2*3 + 5) + 5*3),
    ('ppo', dict(steps=2, rollouts=8, ppo_epochs=2, advantage='rloo'), 16*(2*3 + 4) + 5*3),
    ('ppo', dict(steps=2, rollouts=8, ppo_epochs=2, advantage_function='my:own'),
     16*(2*3 + 4) + 5*3),
    ('quark', dict(steps=2, rollouts=8), 16*(3 + 4) + 5*3),
    ('expert_iteration', dict(n=4, rounds=1, epochs=1, max_instances=10), 40*3 + 10*3 + 5*3)])
def test_the_texts_of_a_run_are_counted(notebook, settings, passes):
    counts = dict(sft=40, preference=30, unlabeled=20, eval=5)
    assert text_passes(notebook, settings, counts) == pytest.approx(passes)


def test_defaults_are_those_of_the_settings_for_a_large_model():
    for notebook, own in _RUNS.items():
        for field in fields(tiny.config_class(notebook)):
            if field.name not in own: continue
            default = field.metadata['by_size'][1] if field.metadata else field.default
            assert own[field.name] == default, (notebook, field.name)


def test_runs_add_up_and_the_largest_needs_the_memory():
    jobs = [SimpleNamespace(notebook=name, settings={}) for name in ('best_of_n', 'annotators')]
    one = forecast_jobs(jobs, dict(eval=10), 1e9, 2, 1e12)
    two = forecast_jobs(jobs*2, dict(eval=10), 1e9, 2, 1e12)
    assert one.seconds == pytest.approx(2*1e9*(128 + 256)*160*2/1e12)
    assert (two.seconds, two.memory) == (pytest.approx(2*one.seconds), one.memory)


@pytest.mark.parametrize('split', ['sft', 'train'])
def test_a_run_on_any_split_is_foretold(base, monkeypatch, split):
    found = []
    monkeypatch.setattr(preflight, 'count_weights', lambda spec: 7e9)
    monkeypatch.setattr(preflight, 'print_time', lambda cfg, jobs, counts, *_: found.append(text_passes('sft', jobs[0].settings, counts)))
    cfg = tiny.config('sft', **tiny.settings('sft', base, split=split, eval_split='', epochs=3))
    records = load_records(str(base/'world'), 'sft', 'output', 20)
    preflight._foretell_time(SimpleNamespace(cfg=cfg), load_tokenizer(str(base/'sft')), records, 0, False)
    assert found == [20*3*3]


def test_rrhf_without_candidates_is_foretold_by_the_answers_it_will_sample(base, monkeypatch):
    tokens = []
    monkeypatch.setattr(preflight, 'LARGE', 1)
    monkeypatch.setattr(preflight, 'print_time', lambda *given: tokens.append(given[-1]))
    cfg = tiny.config('rrhf', **tiny.settings('rrhf', base, candidates=[], n=2))
    run = SimpleNamespace(cfg=cfg, adjust=lambda values: None)
    rrhf._load_queries(run, load_tokenizer(str(base/'sft')), [])
    assert tokens[0] > cfg.max_new_tokens
