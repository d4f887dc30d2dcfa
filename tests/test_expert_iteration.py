"""Expert iteration: a chain of runs of best_of_n and sft, here in one process."""
import json
from pathlib import Path

import numpy as np
import pytest

import tiny
from alpaca_farm import best_of_n, expert_iteration
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.run.inputs import is_fresh
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.runs import read_log, read_summary
from alpaca_farm.expert_iteration import ExpertIterationConfig, round_jobs
from alpaca_farm.sft import SFTConfig


@pytest.fixture(scope='module')
def chain(base, tmp_path_factory):
    "Two rounds of best of 3 on 12 prompts each."
    out = str(tmp_path_factory.mktemp('chain')/'expert')
    cfg = ExpertIterationConfig(**tiny.settings('expert_iteration', base, out=out, rounds=2, n=3, max_instances=12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_iteration, 'run_jobs', tiny.run_here)
        expert_iteration.train(cfg)
    return cfg


def test_winners_are_what_sft_learned_from(chain):
    for r in (1, 2):
        best, learned = (j.out for j in round_jobs(r, chain))
        candidates, winners = load_records(best, 'candidates', 'candidates'), load_records(best, 'outputs', 'output')
        assert len(candidates) == 12 and all(len(c['output']) == len(c['scores']) == 3 for c in candidates)
        assert [w['output'] for w in winners] == [c['output'][int(np.argmax(c['scores']))] for c in candidates]
        taught = load_records(f'{chain.out}/round_{r}/winners.json', '', 'output')
        assert taught == ([w for w in winners if w['ended']] or winners)
        assert read_json(f'{learned}/config.json')['settings']['data'].endswith(f'round_{r}/winners.json') and read_summary(learned)['examples'] == len(taught)
        assert not list(Path(chain.out).rglob('.*'))


def test_each_round_has_new_prompts_and_the_last_rounds_policy(base, chain):
    asked = [[r['instruction'] for r in load_records(round_jobs(k, chain)[0].out, 'candidates', 'candidates')] for k in (1, 2)]
    every = [r['instruction'] for r in load_records(str(base/'world'), 'unlabeled')]
    assert asked[0] == every[:12] and asked[1] == every[12:24]
    assert [round_jobs(k, chain)[0].settings['policy'] for k in (1, 2)] == [chain.policy, round_jobs(1, chain)[1].out]


def test_what_it_leaves(chain):
    out, s = Path(chain.out), read_summary(chain.out)
    assert (out/'model'/'model.safetensors').read_bytes() == (out/'model-2'/'model.safetensors').read_bytes()
    assert (out/'model-1'/'model.safetensors').read_bytes() == (out/'round_1'/'sft'/'model'/'model.safetensors').read_bytes()
    assert [r['step'] for r in read_log(out)] == [1, 2] and s['kl'] != 0 and s['labels'] == 48 and len(load_records(str(out), 'outputs', 'output')) == 10
    rewards = read_json(out/'rewards.json')
    assert [len(r['samples']) for r in rewards] == [36, 36] and all(np.mean(r['winners']) > np.mean(r['samples']) for r in rewards)
    parts = sum(read_summary(j.out)['cpu_seconds'] for r in (1, 2) for j in round_jobs(r, chain))
    assert s['cpu_seconds'] > parts > 0


def test_nothing_is_done_twice(chain, monkeypatch):
    monkeypatch.setattr(expert_iteration, 'run_jobs', tiny.run_here)
    assert expert_iteration.train(chain).done
    Path(chain.out, 'summary.json').unlink()
    before = {j.out: Path(j.out, 'summary.json').stat().st_mtime_ns for r in (1, 2) for j in round_jobs(r, chain)}
    log = [{k: v for k, v in r.items() if k != 'wall'} for r in read_log(chain.out)]
    expert_iteration.train(chain)
    assert {out: Path(out, 'summary.json').stat().st_mtime_ns for out in before} == before
    assert [{k: v for k, v in r.items() if k != 'wall'} for r in read_log(chain.out)] == log


def test_a_failed_round_says_why(base, tmp_path, monkeypatch):
    "And no model stays loaded while a round's runs are made."
    loaded = []
    for name in ('reward', 'load_policy'): monkeypatch.setattr(expert_iteration, name, lambda *_: loaded.append(1))
    monkeypatch.setattr(expert_iteration, 'run_jobs', lambda *_: ['round_1/sft: it broke'])
    cfg = ExpertIterationConfig(**tiny.settings('expert_iteration', base, out=str(tmp_path/'e')))
    with pytest.raises(RuntimeError, match='it broke'): expert_iteration.train(cfg)
    assert not read_summary(cfg.out) and not loaded


def test_more_rounds_than_prompts_are_refused_at_once(base, tmp_path, monkeypatch):
    monkeypatch.setattr(expert_iteration, 'run_jobs', lambda *_: ['it played'])
    cfg = lambda n: ExpertIterationConfig(**tiny.settings('expert_iteration', base, out=str(tmp_path/'e'), rounds=4, max_instances=n))
    with pytest.raises(ValueError, match='rounds = 4.* use 60 .*max_instances = 20'): expert_iteration.train(cfg(20))
    with pytest.raises(RuntimeError, match='it played'): expert_iteration.train(cfg(19))


def test_optimisation_is_the_sft_runs(base, chain):
    "Its settings reach sft, whose defaults they share."
    more = dict(micro_batch_size=2, lr_schedule='constant', warmup=.2, weight_decay=.1, betas=[.9, .999], adam_eps=1e-6,
                max_grad_norm=.5, checkpoint_every=7, learning_rate=2e-5, batch_size=128)
    learn = round_jobs(1, ExpertIterationConfig(**more))[1].settings
    assert {k: learn[k] for k in more} == more
    default = SFTConfig()
    own = ('learning_rate', 'batch_size')
    assert all(getattr(ExpertIterationConfig(), k) == getattr(default, k) for k in more if k not in own)
    assert read_json(f'{round_jobs(2, chain)[1].out}/config.json')['settings']['batch_size'] == chain.batch_size


def test_samples_of_another_run(base, tmp_path):
    "The first n of the other run's, no sampling; asking for more than there are is refused."
    given = tiny.settings('best_of_n', base, out=str(tmp_path/'from'), samples=str(base/'samples'), split='preference', n=1, skip=2, max_instances=5)
    best_of_n.run(best_of_n.BestOfNConfig(**given))
    theirs, ours = load_records(str(base/'samples'), 'candidates', 'candidates')[2:7], load_records(given['out'], 'candidates', 'candidates')
    assert [c['output'] for c in ours] == [c['output'][:1] for c in theirs] and all(len(c['scores']) == 1 for c in ours)
    with pytest.raises(ValueError, match='n = 3, but .* only 2'):
        best_of_n.run(best_of_n.BestOfNConfig(**given | dict(out=str(tmp_path/'more'), n=3)))
    with pytest.raises(ValueError, match='skip = 60: there are only 60'):
        best_of_n.run(best_of_n.BestOfNConfig(**given | dict(out=str(tmp_path/'none'), skip=60)))
    for name, value, theirs in (('split', 'eval', 'preference'), ('temperature', .25, '1.0'), ('policy', str(base/'world'), '.*sft')):
        with pytest.raises(ValueError, match=f'sampled with {name} = {theirs}; here {name} = {value}'):
            best_of_n.run(best_of_n.BestOfNConfig(**given | dict(out=str(tmp_path/name), **{name: value})))


@pytest.mark.parametrize('given, message', [
    (dict(n=1), 'n = 1'), (dict(max_prompt=100, max_new_tokens=100), 'max_length'), (dict(rounds=0), 'rounds'), (dict(epochs=0), 'epochs'), (dict(max_instances=0), 'max_instances'),
    (dict(reward_model=''), 'reward_model'), (dict(temperature=0.), 'temperature'),
    (dict(learning_rate=-1.), 'learning_rate = -1.0'), (dict(batch_size=0), 'batch_size'), (dict(micro_batch_size=-1), 'micro_batch_size'), (dict(warmup=2.), 'warmup')])
def test_nonsense_is_refused(given, message):
    with pytest.raises(ValueError, match=message): ExpertIterationConfig(**given)
