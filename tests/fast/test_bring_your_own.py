"A chain of runs on a user's model and data: forecast first, errors before any work."
import json
import sys

import pytest

import tiny
from judge_server import judge_server
from alpaca_farm import bring_your_own
from alpaca_farm.bring_your_own import (
    _count_parameters, _own_jobs, _read_own, BringYourOwnConfig, forecast)
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.data.dialogues import full_instruction
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.runs import read_log, read_summary

JUDGE = """
def longest(pairs): return [1 + (len(p['output_2']) > len(p['output_1'])) for p in pairs]
"""
SMALL = dict(reward_model=dict(held_out=12, batch_size=8), dpo=dict(batch_size=8),
             feedme=dict(held_out=12, batch_size=8, eval_every=9), sft=dict(batch_size=12))


@pytest.fixture
def mine(base, tmp_path, monkeypatch):
    "A user's own files, with names of columns of their own, beside a folder for the runs."
    pairs = load_records(str(base/'annotators'), 'preferences', 'preference')
    prompts = [dict(question=r['instruction'], context=r['input'], id=i)
               for i, r in enumerate(load_records(str(base/'world'), 'eval', n=8))]
    named = [dict(instruction=r['instruction'], input=r['input'], a=r['output_1'], b=r['output_2'],
                  preference=r['preference']) for r in pairs]
    for name, rows in (('prompts.json', prompts), ('pairs.json', named),
                       ('demos.json', load_records(str(base/'world'), 'sft', 'output', 24))):
        (tmp_path/name).write_text(json.dumps(rows))
    (tmp_path/'scripted_judge.py').write_text(JUDGE)
    (tmp_path/'small.yaml').write_text(json.dumps(SMALL))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bring_your_own, 'run_or_fail', tiny.run_here)
    yield dict(model=str(base/'sft'), prompts=str(tmp_path/'prompts.json'),
               preferences=str(tmp_path/'pairs.json'), judge='scripted_judge:longest',
               columns=['prompts: instruction=question,input=context',
                        'preferences: output_1=a,output_2=b'],
               runs=str(tmp_path/'runs'), recipe=str(tmp_path/'small.yaml'),
               store=str(tmp_path/'answers.sqlite'), n=2, max_new_tokens=12, max_prompt=110)
    sys.modules.pop('scripted_judge', None)


def test_from_files_to_a_board(base, mine, tmp_path, capsys):
    # the preferences as an arena has them
    pairs = load_records(mine['preferences'], columns='output_1=a,output_2=b', kind='preference')
    winner = {1: 'model_a', 2: 'model_b', 1.5: 'tie'}
    votes = [dict(winner=winner[r['preference']], model_a='a', model_b='b', **{
        f'conversation_{side}': [dict(role='user', content=full_instruction(r)),
                                 dict(role='assistant', content=r[f'output_{k}'])]
        for k, side in enumerate('ab', 1)}) for r in pairs]
    (tmp_path/'votes.json').write_text(json.dumps(votes))
    mine |= dict(preferences=str(tmp_path/'votes.json'), columns=mine['columns'][:1])
    cfg = BringYourOwnConfig(**mine, demonstrations=str(tmp_path/'demos.json'),
                             methods=['best_of_n', 'dpo', 'feedme'])
    run = bring_your_own.run(cfg)
    said = capsys.readouterr().out
    assert '8 prompts, 60 preferences, 24 demonstrations; 48 labels' in said
    board = (run.folder/'leaderboard.csv').read_text()
    assert all(name in board for name in ('reference', 'best_of_n', 'dpo', 'feedme'))
    assert read_json(run.folder/'forecast.json') == dict(labels=48, requests=0, dollars=0)
    assert [r['run'].rpartition('/')[2] for r in read_log(run.folder)] == [
        'sft', 'reference', 'reward_model', 'best_of_n', 'dpo', 'feedme', 'eval']
    given = read_json(tmp_path/'runs'/'dpo'/'config.json')['settings']
    assert given['policy'] == f'{cfg.runs}/sft'
    assert read_summary(run.folder)['instructions'] == 8
    bring_your_own.run(BringYourOwnConfig(**vars(cfg) | dict(methods=['dpo'])))
    # a method can be added or left out without training the others again
    assert 'runs/dpo is finished already' in capsys.readouterr().out


def test_a_judge_behind_an_endpoint_is_forecast_within_its_budget(mine, tmp_path, monkeypatch):
    with judge_server(latency=0.) as server:
        monkeypatch.setenv('OPENAI_API_KEY', 'k')
        given = mine | dict(judge='alpaca_eval_gpt4', base_url=server.url, methods=['dpo'],
                            budget=5.)
        cfg = BringYourOwnConfig(**given)
        planned = forecast(cfg, *_read_own(cfg)[:2])
        assert planned['labels'] == planned['requests'] == 16
        assert 0 < planned['dollars'] < 5
        assert server.requests() == [] and not (tmp_path/'runs').exists()
        with pytest.raises(ValueError, match='budget = 5.0'):
            cfg = BringYourOwnConfig(**given, models=['gpt-4=nobody/knows'])
            forecast(cfg, *_read_own(cfg)[:2])


BROKEN = dict(instruction='a', a='b', b='c', preference=7)


@pytest.mark.parametrize('setting, value, message', [
    ('preferences', [BROKEN], "row 0: the field 'preference'"),
    ('preferences', [dict(instruction='a', a='b', preference=1)], "columns names 'b'"),
    ('prompts', [dict(question='word '*400, context='')], 'longer than max_prompt'),
    ('demonstrations', [dict(instruction='a')], "'output' is missing"),
    ('recipe', dict(dop=dict(beta=1)), 'dop is not a setting'),
    ('judge', 'broken_judge:judge', 'no licence'), ('model', 'reward_model', 'a reward model'),
    ('model', '.', 'there is no model'), ('methods', ['dop'], 'dop')])
def test_what_is_bad_is_refused_before_any_work(base, mine, tmp_path, setting, value, message):
    (tmp_path/'broken_judge.py').write_text('def judge(pairs): raise OSError("no licence")\n')
    (tmp_path/'bad.json').write_text(json.dumps(value))
    if setting == 'model': value = str(base/value)
    elif setting not in ('judge', 'methods'): value = str(tmp_path/'bad.json')
    with pytest.raises((ValueError, OSError, TypeError), match=message):
        bring_your_own.run(BringYourOwnConfig(**mine | {setting: value}))
    assert not (tmp_path/'runs').exists()


def test_a_large_model_gets_the_settings_of_large_models(base, mine):
    jobs = {j.notebook: j.settings for j in _own_jobs(BringYourOwnConfig(**mine), 7*10**9)}
    assert jobs['dpo']['learning_rate'] == 1e-6
    # the user's file counts before the size
    assert jobs['dpo']['batch_size'] == SMALL['dpo']['batch_size']
    assert _count_parameters(str(base/'sft')) < 1e6


def test_control_tokens_have_room_before_the_longest_prompt(mine):
    methods = ['feedme', 'reward_conditioning']
    cfg = BringYourOwnConfig(**mine | dict(methods=methods, max_prompt=90))
    most = {job.out.rpartition('/')[2]: job.settings.get('max_prompt')
            for job in _own_jobs(cfg, 10**6)}
    assert most['reward_conditioning'] > most['feedme'] == most['reference'] == 90
