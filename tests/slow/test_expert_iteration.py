"""Expert iteration: a chain of runs of best_of_n and sft, here in one process."""
from pathlib import Path

import numpy as np
import pytest

import tiny
from alpaca_farm import best_of_n, expert_iteration
from alpaca_farm.data.records import load_records
from alpaca_farm.expert_iteration import _round_jobs, ExpertIterationConfig
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_log, read_summary


def config(base, **more):
    return ExpertIterationConfig(**tiny.settings('expert_iteration', base, **more))


def candidates(folder): return load_records(str(folder), 'candidates', 'candidates')


def outputs(folder): return load_records(str(folder), 'outputs', 'output')


@pytest.fixture(scope='module')
def chain(base, tmp_path_factory):
    "Two rounds of best of 3 on 12 prompts each."
    out = str(tmp_path_factory.mktemp('chain')/'expert')
    cfg = config(base, out=out, rounds=2, n=3, max_instances=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('alpaca_farm.run.jobs.run_jobs', tiny.run_here)
        expert_iteration.train(cfg)
    return cfg


def test_winners_are_what_sft_learned_from(chain):
    for r in (1, 2):
        best, learned = (j.out for j in _round_jobs(r, chain))
        drawn = candidates(best)
        winners = outputs(best)
        assert len(drawn) == 12
        assert all(len(c['output']) == len(c['scores']) == 3 for c in drawn)
        best_of = [c['output'][np.argmax(c['scores'])] for c in drawn]
        assert [w['output'] for w in winners] == best_of
        taught = load_records(f'{chain.out}/round_{r}/winners.json', '', 'output')
        assert taught == ([w for w in winners if w['ended']] or winners)
        assert read_summary(learned)['examples'] == len(taught)


def test_each_round_has_new_prompts_and_the_last_rounds_policy(base, chain):
    jobs = [_round_jobs(k, chain) for k in (1, 2)]
    asked = [[r['instruction'] for r in candidates(best.out)] for best, _ in jobs]
    every = [r['instruction'] for r in load_records(str(base/'world'), 'unlabeled')]
    assert asked == [every[:12], every[12:24]]
    assert [best.settings['policy'] for best, _ in jobs] == [chain.policy, jobs[0][1].out]


def test_what_it_leaves(chain):
    out = Path(chain.out)
    s = read_summary(chain.out)
    weights = {name: (out/name/'model.safetensors').read_bytes()
               for name in ('model', 'model-1', 'model-2', 'round_1/sft/model')}
    assert weights['model'] == weights['model-2']
    assert weights['model-1'] == weights['round_1/sft/model']
    assert [r['step'] for r in read_log(out)] == [1, 2]
    assert len(outputs(out)) == 10
    assert s['kl'] != 0
    assert s['labels'] == 48
    rewards = read_json(out/'rewards.json')
    assert [len(r['samples']) for r in rewards] == [36, 36]
    assert all(np.mean(r['winners']) > np.mean(r['samples']) for r in rewards)
    parts = [read_summary(j.out)['cpu_seconds'] for r in (1, 2) for j in _round_jobs(r, chain)]
    assert s['cpu_seconds'] > sum(parts) > 0
    assert not list(out.rglob('.*'))


def test_nothing_is_done_twice(chain, monkeypatch):
    monkeypatch.setattr('alpaca_farm.run.jobs.run_jobs', tiny.run_here)
    assert expert_iteration.train(chain).done
    Path(chain.out, 'summary.json').unlink()
    def state():
        jobs = _round_jobs(1, chain) + _round_jobs(2, chain)
        log = [{k: v for k, v in r.items() if k != 'wall'} for r in read_log(chain.out)]
        return [Path(j.out, 'summary.json').stat().st_mtime_ns for j in jobs], log
    before = state()
    expert_iteration.train(chain)
    assert state() == before


def test_a_failed_round_says_why(base, tmp_path, monkeypatch):
    "And no model stays loaded while a round's runs are made."
    loaded = []
    cfg = config(base, out=str(tmp_path/'e'))
    for name in ('reward', 'load_policy'):
        monkeypatch.setattr(expert_iteration, name, lambda *_: loaded.append(1))
    monkeypatch.setattr('alpaca_farm.run.jobs.run_jobs', lambda *_: ['round_1/sft: it broke'])
    with pytest.raises(RuntimeError, match='it broke'):
        expert_iteration.train(cfg)
    assert not read_summary(cfg.out)
    assert not loaded


def test_few_prompts_are_shared_by_the_rounds(base, tmp_path, monkeypatch):
    monkeypatch.setattr('alpaca_farm.run.jobs.run_jobs', lambda *_: ['it played'])
    prompts = len(load_records(str(base/'world'), 'unlabeled'))
    for rounds, share in (2, 20), (4, prompts//4):
        cfg = config(base, out=str(tmp_path/f'{rounds}'), rounds=rounds, max_instances=20)
        with pytest.raises(RuntimeError, match='it played'):
            expert_iteration.train(cfg)
        assert _round_jobs(1, cfg)[0].settings['max_instances'] == share
        assert read_json(Path(cfg.out)/'config.json')['settings']['max_instances'] == 20


def test_samples_of_another_run(base, tmp_path):
    "The first n of the other run's, no sampling."
    def run(name, **more):
        given = dict(samples=str(base/'samples'), split='preference', n=1, skip=2, max_instances=5)
        given = tiny.settings('best_of_n', base, out=str(tmp_path/name), **given) | more
        return best_of_n.run(best_of_n.BestOfNConfig(**given)).folder
    theirs = candidates(base/'samples')[2:7]
    ours = candidates(run('from'))
    assert [c['output'] for c in ours] == [c['output'][:1] for c in theirs]
    assert all(len(c['scores']) == 1 for c in ours)


def test_rounds_take_the_samples_of_their_own_requests(base, tmp_path):
    "Also of a run that has skipped some, whose first sample is not of the first request."
    bank = tmp_path/'bank'
    tiny.run('best_of_n', base, bank, split='preference', n=1, skip=3, max_instances=4, reward_model='')
    given = dict(samples=str(bank), split='preference', n=1, reward_model='', max_instances=5)
    requests = load_records(str(base/'world'), 'preference')
    out = tiny.run('best_of_n', base, tmp_path/'first', **given).folder
    assert [r['instruction'] for r in candidates(out)] == [r['instruction'] for r in requests[3:5]]
    with pytest.raises(ValueError, match='no samples of these requests'):
        tiny.run('best_of_n', base, tmp_path/'second', **given | dict(skip=20))
