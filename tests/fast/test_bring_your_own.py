"A world of a user's model and data: forecast first, errors before any work, then the farm."
import dataclasses
import json
import shutil
import sys
from types import SimpleNamespace

import pytest

import tiny
from judge_server import judge_server
from alpaca_farm import bring_your_own, farm, real, rlcd
from alpaca_farm.bring_your_own import _read_own, BringYourOwnConfig, divide_prompts, forecast
from alpaca_farm.bring_your_own import METHODS, own_sizes, planned_runs
from alpaca_farm.data.records import load_records
from alpaca_farm.model.loading import model_config
from alpaca_farm.farm import farm_jobs, FarmConfig
from alpaca_farm.real import RealConfig
from alpaca_farm.rlcd import RLCDConfig
from alpaca_farm.run.runs import describe_run, Run

JUDGE = """
def longest(pairs): return [1 + (len(p['output_2']) > len(p['output_1'])) for p in pairs]
"""
SMALL = dict(reward_model=dict(held_out=4, batch_size=8), dpo=dict(batch_size=8),
             feedme=dict(held_out=4, batch_size=8, eval_every=9), sft=dict(batch_size=12))


@pytest.fixture
def mine(base, tmp_path, monkeypatch):
    "A user's own files, with names of columns of their own, beside a folder for the runs."
    pairs = load_records(str(base/'annotators'), 'preferences', 'preference')
    prompts = [dict(question=r['instruction'], context=r['input'], id=i)
               for i, r in enumerate(load_records(str(base/'world'), 'eval', n=24))]
    named = [dict(instruction=r['instruction'], input=r['input'], a=r['output_1'], b=r['output_2'],
                  preference=r['preference']) for r in pairs]
    for name, rows in (('prompts.json', prompts), ('pairs.json', named),
                       ('demos.json', load_records(str(base/'world'), 'sft', 'output', 24))):
        (tmp_path/name).write_text(json.dumps(rows))
    (tmp_path/'scripted_judge.py').write_text(JUDGE)
    (tmp_path/'small.yaml').write_text(json.dumps(SMALL))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(farm, 'run_jobs', lambda jobs, **_: tiny.run_here(jobs))
    yield dict(model=str(base/'sft'), prompts=str(tmp_path/'prompts.json'),
               preferences=str(tmp_path/'pairs.json'), judge='scripted_judge:longest',
               columns=['prompts: instruction=question,input=context',
                        'preferences: output_1=a,output_2=b'],
               out=str(tmp_path/'own'), recipe=str(tmp_path/'small.yaml'),
               store=str(tmp_path/'answers.sqlite'), n=2, max_new_tokens=12, max_prompt=110)
    sys.modules.pop('scripted_judge', None)


def test_a_judge_behind_an_endpoint_is_forecast_within_its_budget(mine, tmp_path, monkeypatch):
    with judge_server(latency=0.) as server:
        monkeypatch.setenv('OPENAI_API_KEY', 'k')
        given = mine | dict(judge='alpaca_eval_gpt4', base_url=server.url, methods=['dpo'],
                            budget=5.)
        def planned(**more):
            cfg = BringYourOwnConfig(**given | more)
            data, judges = _read_own(Run(cfg, dict(settings={})))
            return forecast(cfg, divide_prompts(cfg, data['prompts']), judges)
        found = planned()
        assert found['labels'] == found['requests'] == 9*10*2 + 12
        assert 0 < found['dollars'] < 5
        assert server.requests() == []
        assert not (tmp_path/'own').exists()
        with pytest.raises(ValueError, match='budget = 5.0'):
            planned(models=['gpt-4=nobody/knows'])


def test_runs_choose_for_their_size_and_the_users_file_counts_before(base, mine):
    cfg = BringYourOwnConfig(**mine | dict(methods=['dpo', 'rloo']))
    sizes = own_sizes(cfg)
    assert 'learning_rate' not in sizes['dpo']
    assert sizes['ppo'] is None
    assert sizes['rloo']['learning_rate'] is None   # not the one tuned for the embedded world
    assert sizes['dpo']['batch_size'] == SMALL['dpo']['batch_size']
    assert 1e3 < cfg.weights_counted < 1e6


def test_a_setting_brings_no_run_back_that_is_left_out(mine, tmp_path):
    "It holds for the other runs of its notebook."
    names = 'ppo', 'ppo_crowd', 'reward_model', 'dpo', 'best_of_n'
    file = tiny.write(tmp_path/'all.yaml', {name: dict(device='cpu') for name in names})
    sizes = own_sizes(BringYourOwnConfig(**mine | dict(methods=['dpo'], recipe=file)))
    assert {sizes.get(name) for name in names if name != 'dpo'} == {None}
    assert [sizes[name]['device'] for name in ('dpo', 'samples')] == ['cpu', 'cpu']
    sizes = own_sizes(BringYourOwnConfig(**mine | dict(methods=['rloo'], recipe=file)))
    assert sizes['ppo'] is None and sizes['rloo']['device'] == sizes['reward_model']['device']


def test_device_and_dtype_are_those_of_all_runs(mine):
    sizes = own_sizes(BringYourOwnConfig(**mine, device='cpu', dtype='bfloat16'))
    for name in ('references', 'dpo', 'reward_model'):
        assert (sizes[name]['device'], sizes[name]['dtype']) == ('cpu', 'bfloat16')


def test_an_edited_recipe_makes_another_run(base, tmp_path, monkeypatch):
    "A file of the user's, a task of RLCD, and the library's own files that the real world reads."
    marks = []
    def note(cfg, train, reads, several):
        marks.append(describe_run(cfg, train, reads)['fingerprint'])
        return SimpleNamespace(done=True)
    monkeypatch.setattr('alpaca_farm.run.runs.start', note)
    library = shutil.copytree(tiny.ROOT/'nbs'/'recipes', tmp_path/'recipes')
    monkeypatch.setattr(real, 'notebooks_folder', lambda: tmp_path)
    file = tmp_path/'recipe.yaml'
    task = tmp_path/'task.yaml'
    policy = str(base/'sft')
    def edited(path, text):
        def make():
            bring_your_own.run(BringYourOwnConfig(recipe=str(file)))
            real.run(RealConfig(sizes=str(file), model=policy))
            real.run(RealConfig(model=policy))
            rlcd.run(RLCDConfig(task=str(task), policy=policy, data=str(base/'world')))
            return [marks.pop() for _ in range(4)][::-1]
        before = make()
        path.write_text(text)
        return [one != other for one, other in zip(before, make())]
    file.write_text('dpo: {beta: .2}')
    own = (tiny.ROOT/'tests'/'data'/'task.yaml').read_text()
    task.write_text(own)
    topics = (library/'real_topics.txt').read_text()
    assert edited(file, 'dpo: {beta: .9}') == [True, True, False, False]
    assert edited(task, own + '\n# edited\n') == [False, False, False, True]
    assert edited(library/'real_topics.txt', f'{topics}Why?\n') == [False, True, True, False]
    assert edited(library/'real.yaml', 'dpo: {beta: .9}') == [False, False, True, False]


def test_a_setting_that_no_run_has_is_refused_first(mine, tmp_path):
    "In the recipe, under the name of a run or of its notebook."
    for name, wrong, right in (('dpo', 'betta', 'beta'), ('rloo', 'rolouts', 'rollouts'),
                               ('best_of_n', 'temprature', 'temperature')):
        file = tiny.write(tmp_path/'wrong.yaml', {name: {wrong: 1}})
        with pytest.raises(TypeError, match=f'(?:{name}.*{wrong}|{wrong}.*{name}).*mean {right}'):
            BringYourOwnConfig(**mine | dict(recipe=file))


def test_prompts_that_the_model_cannot_read_are_refused_first(mine):
    "By its positions, with the answer behind them; the limit itself is read."
    limit = model_config(mine['model']).max_position_embeddings
    def check(most):
        cfg = BringYourOwnConfig(**mine | dict(max_prompt=110, max_new_tokens=most))
        _read_own(Run(cfg, dict(settings={})))
    check(limit - 110)
    with pytest.raises(ValueError, match=f'{limit + 1} tokens, but .* reads at most {limit} '):
        check(limit - 109)


def test_a_judge_that_does_not_work_is_named_before_any_work(mine, tmp_path):
    "One that is written for a single pair, and a file that is not Python."
    (tmp_path/'single_judge.py').write_text("def one(pair): return 1 + (pair['output_1'] == 'x')")
    (tmp_path/'broken_judge.py').write_text('def one(pair) return 1')
    for judge, why in (('single_judge:one', 'failed on a first answer'), ('broken_judge:one', 'is not Python')):
        with pytest.raises(ValueError, match=f'judge = .*{why}'):
            _read_own(Run(BringYourOwnConfig(**mine | dict(judge=judge)), dict(settings={})))


def test_every_method_has_settings_that_exist(mine, tmp_path):
    "On its own settings, and with an adapter and a template."
    given = mine | dict(methods=[*METHODS], lora_rank=2, template='alpaca', max_prompt=140)
    world = bring_your_own.run(BringYourOwnConfig(**given)).folder
    jobs = farm_jobs(FarmConfig(world=str(world)))
    for job in jobs:
        known = {f.name for f in dataclasses.fields(tiny.config_class(job.notebook))}
        assert {*job.settings} <= known, job.out
    assert {job.out.rpartition('/')[2] for job in jobs} >= {
        *METHODS, *(f'{m}_crowd' for m in METHODS), 'references', 'candidates'}


@pytest.mark.parametrize('speed, said', [(1e9, 'GB on this machine'), (1e2, 'lower max_instances')])
def test_the_time_of_a_large_models_farm_is_said_before_it_starts(mine, monkeypatch, capsys,
                                                                 speed, said):
    "A model counts as large here; beyond a day the line says what to make smaller."
    monkeypatch.setattr(bring_your_own, 'LARGE', 0)
    monkeypatch.setattr('alpaca_farm.model.forecast.machine_speed', lambda *_: speed)
    bring_your_own.run(BringYourOwnConfig(**mine))
    line, = [x for x in capsys.readouterr().out.split('\n') if 'on this machine' in x]
    assert said in line


def test_runs_are_planned_as_the_farm_makes_them(mine):
    cfg = BringYourOwnConfig(**mine | dict(methods=['best_of_n', 'dpo', 'rloo']))
    world = bring_your_own.run(cfg).folder
    made = [job.notebook for job in farm_jobs(FarmConfig(world=str(world)))]
    assert sorted(job.notebook for job in planned_runs(cfg)) == sorted(made)


def test_prompts_longer_than_those_of_training_are_told(mine, monkeypatch, capsys):
    known = dict(settings=dict(max_prompt=3))
    monkeypatch.setattr(bring_your_own, 'run_config', lambda *_: known)
    _read_own(Run(BringYourOwnConfig(**mine), dict(settings={})))
    assert 'max_prompt = 3' in capsys.readouterr().out
