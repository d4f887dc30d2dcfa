"""A chain of runs on a user's model and data: forecast first, a board at the end, errors before any work."""
import json
import sys

import pytest

import tiny
from judge_server import judge_server
from alpaca_farm import bring_your_own
from alpaca_farm.bring_your_own import (BringYourOwnConfig, count_parameters, forecast, own_jobs,
                                        read_own, tuned_settings)
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.runs import read_log, read_summary

JUDGE = '''def longest(pairs): return [1 + (len(p['output_2']) > len(p['output_1'])) for p in pairs]
'''
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
               preferences=str(tmp_path/'pairs.json'),
               columns=['prompts: instruction=question,input=context', 'preferences: output_1=a,output_2=b'],
               judge='scripted_judge:longest', runs=str(tmp_path/'runs'),
               recipe=str(tmp_path/'small.yaml'),
               store=str(tmp_path/'answers.sqlite'), n=2, max_new_tokens=12, max_prompt=110)
    sys.modules.pop('scripted_judge', None)


def test_from_files_to_a_board(base, mine, tmp_path, capsys):
    cfg = BringYourOwnConfig(**mine, demonstrations=str(tmp_path/'demos.json'),
                             methods=['best_of_n', 'dpo', 'feedme'])
    run = bring_your_own.run(cfg)
    said = capsys.readouterr().out
    assert '8 prompts, 60 preferences, 24 demonstrations' in said
    assert '48 labels by scripted_judge:longest' in said
    board = (run.folder/'leaderboard.csv').read_text()
    assert all(name in board for name in ('reference', 'best_of_n', 'dpo', 'feedme'))
    assert (run.folder/'leaderboard.png').stat().st_size > 2000
    planned = read_json(run.folder/'forecast.json')
    assert planned == dict(labels=48, requests=0, dollars=0)
    assert [r['run'].rpartition('/')[2] for r in read_log(run.folder)] == [
        'sft', 'reference', 'reward_model', 'best_of_n', 'dpo', 'feedme', 'eval']
    assert read_json(tmp_path/'runs'/'dpo'/'config.json')['settings']['policy'] == f'{cfg.runs}/sft'
    assert read_summary(run.folder)['instructions'] == 8
    again = BringYourOwnConfig(**vars(cfg) | dict(methods=['dpo']))
    assert bring_your_own.run(again).folder == run.folder
    # a method can be added or left out without training the others again
    assert 'runs/dpo is finished already' in capsys.readouterr().out


def test_a_judge_behind_an_endpoint_is_forecast_within_its_budget(mine, tmp_path, monkeypatch,
                                                                  capsys):
    with judge_server(latency=0.) as server:
        monkeypatch.setenv('OPENAI_API_KEY', 'k')
        given = mine | dict(judge='alpaca_eval_gpt4', base_url=server.url, methods=['dpo'],
                            budget=5.)
        cfg = BringYourOwnConfig(**given)
        planned = forecast(cfg, *read_own(cfg)[:2])
        said = capsys.readouterr().out
        assert planned['labels'] == planned['requests'] == 16
        assert 0 < planned['dollars'] < 5
        assert '16 requests to gpt-4' in said
        assert 'at most about $' in said
        assert server.requests() == [] and not (tmp_path/'runs').exists()
        with pytest.raises(ValueError, match='budget = 5.0, but the price of .* is unknown'):
            cfg = BringYourOwnConfig(**given, models=['gpt-4=nobody/knows'])
            forecast(cfg, *read_own(cfg)[:2])


@pytest.mark.parametrize('setting, value, message', [
    ('preferences', [dict(instruction='a', a='b', b='c', preference=7)],
     "row 0: the field 'preference' is 7"),
    ('preferences', [dict(instruction='a', a='b', preference=1)], "columns names 'b'; it has"),
    ('prompts', [dict(question='', context='')], "row 0: the field 'instruction' is empty"),
    ('prompts', [dict(question='word '*400, context='')], 'longer than max_prompt = 110'),
    ('demonstrations', [dict(instruction='a')], "'output' is missing")])
def test_bad_data_are_refused_before_any_work(mine, tmp_path, setting, value, message):
    (tmp_path/'bad.json').write_text(json.dumps(value))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bring_your_own.run(BringYourOwnConfig(**mine | {setting: str(tmp_path/'bad.json')}))
    assert not (tmp_path/'runs').exists()


def test_bad_models_judges_and_recipes_are_refused_before_any_work(base, mine, tmp_path):
    (tmp_path/'broken_judge.py').write_text('def judge(pairs): raise OSError("no licence")\n')
    (tmp_path/'bad.yaml').write_text('dop: {beta: 1}\n')
    for given, message in ((dict(model=str(base/'reward_model')), 'it holds a reward model'),
                           (dict(judge='broken_judge:judge'), 'no licence'),
                           (dict(recipe=str(tmp_path/'bad.yaml')), 'dop is not a setting of recipe'),
                           (dict(model=str(tmp_path)), 'there is no model')):
        with pytest.raises((ValueError, OSError, TypeError), match=message):
            bring_your_own.run(BringYourOwnConfig(**mine | given))
    with pytest.raises(ValueError, match='dop'): BringYourOwnConfig(**mine, methods=['dop'])
    assert not (tmp_path/'runs').exists()


def test_a_large_model_gets_the_settings_of_large_models(base, mine):
    large, small = tuned_settings(7*10**9), tuned_settings(10**7)
    assert large['dpo']['learning_rate'] == 1e-6
    assert large['reward_model']['learning_rate'] == 3e-6
    assert small['dpo'] == dict(epochs=1)
    jobs = {j.notebook: j.settings for j in own_jobs(BringYourOwnConfig(**mine, lora_rank=0), 7*10**9)}
    assert jobs['dpo']['learning_rate'] == 1e-6
    assert jobs['dpo']['batch_size'] == SMALL['dpo']['batch_size'], "the user's file counts before the size"
    assert count_parameters(str(base/'sft')) < 1e6


def test_control_tokens_have_room_before_the_longest_prompt(base):
    cfg = BringYourOwnConfig(model=str(base/'sft'), prompts=str(base/'world'),
                             preferences=str(base/'annotators'),
                             methods=['feedme', 'reward_conditioning'],
                             max_prompt=90)
    most = {job.out.rpartition('/')[2]: job.settings.get('max_prompt') for job in own_jobs(cfg, 10**6)}
    assert most['reward_conditioning'] > most['feedme'] == most['reference'] == 90
