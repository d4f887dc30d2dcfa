"TRL trains on a world, by its own examples; skipped without TRL, which `.ci/run` installs."
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch

import tiny
from alpaca_farm import eval as evaluation, with_trl
from alpaca_farm.boards.farm_board import farm_board
from alpaca_farm.data.records import load_records
from alpaca_farm.farm import farm_jobs, FarmConfig
from alpaca_farm.judging.judges import load_annotators
from alpaca_farm.model.rewards import reward
from alpaca_farm.ppo import PPOConfig
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.runs import read_summary
from alpaca_farm.train.answers import fitting_prompts, load_splits
from alpaca_farm.train.online import rollout_scores, sample_rollout
from alpaca_farm.with_trl import reward_function, to_datasets, TruthCallback, WorldEnvironment
from alpaca_farm.worlds.folder import read_world

needs_trl = pytest.mark.skipif(not find_spec('trl'), reason='no TRL here')
COMMON = dict(use_cpu=True, bf16=False, report_to='none', save_strategy='no', disable_tqdm=True,
              logging_steps=1, max_steps=2, per_device_train_batch_size=8, seed=0)
SAMPLED = dict(COMMON, num_generations=4, max_completion_length=8)


@pytest.fixture
def world(base): return str(base/'world')


@pytest.fixture
def data(base, world): return to_datasets(world, str(base/'annotators'))


def test_the_labels_are_those_of_the_world(base, world, data, tmp_path):
    "Of its farm, or those that it has; without any the world is refused."
    assert to_datasets(world)['preference'].to_list() == data['preference'].to_list()
    own = shutil.copytree(world, tmp_path/'own')
    with pytest.raises(ValueError, match=r"world = .*own: its labels are not in .*own_runs/ann"):
        to_datasets(str(own))
    labelled = read_json(base/'annotators'/'preferences.json')[:9]
    write_json(own/'preferences.json', labelled)
    write_json(own/'world.json', read_json(own/'world.json') | dict(preferences='./preferences.json'))
    decided = [r for r in labelled if r['preference'] != 1.5]
    assert len(to_datasets(str(own))['preference']) == len(decided)


def changed_example(trainer, changes):
    "The example in a trainer's documentation, with some lines exchanged for others."
    example = re.search(r'```python\n(.*?)```', trainer.__doc__, re.DOTALL)[1]
    lines = [re.sub(r'^\s*(>>>|\.\.\.) ?', '', line) for line in example.splitlines()]
    for start, new in changes.items():
        at, = [i for i, line in enumerate(lines) if line.strip().startswith(start)]
        lines[at] = new
    assert sum(new.count('\n') + 1 for new in changes.values()) <= 5
    return '\n'.join(lines)


@pytest.fixture(scope='module')
def farm_folder(base, tmp_path_factory):
    "A folder of runs that a board needs, and a model saved as TRL saves it."
    folder = tmp_path_factory.mktemp('farm')
    for name, n in (('references', 2), ('eval_samples', 2)):
        tiny.run('best_of_n', base, folder/name, n=n, reward_model='', max_instances=0)
    shutil.copytree(base/'sft'/'model', folder/'my'/'trl_dpo')
    return folder


def outside_board(policy, world, farm_folder, monkeypatch):
    "The board of `eval`, with a row for a policy from elsewhere."
    monkeypatch.setattr(evaluation, 'run_or_fail', tiny.run_here)
    folder = evaluation.run(evaluation.EvalConfig(
        out=str(farm_folder/f'eval_{policy.name}'), outputs=[], policies=[str(policy)],
        reference=str(farm_folder/'references'), annotators=[f'{world}/pool.json'])).folder
    return pd.read_csv(folder/'leaderboard.csv', index_col='method')


@needs_trl
def test_dpo_by_trls_example_stands_on_the_board(base, world, farm_folder, tmp_path, monkeypatch):
    import trl
    code = changed_example(trl.DPOTrainer, {
        'from datasets': 'from alpaca_farm.with_trl import to_datasets',
        'dataset =': 'dataset = to_datasets(world, labels)["preference"]',
        'model=': 'model=policy,',
        'train_dataset': 'train_dataset=dataset, args=args,'})
    args = trl.DPOConfig(output_dir=str(tmp_path), learning_rate=1e-2, **COMMON)
    names = dict(world=world, labels=str(base/'annotators'), policy=str(base/'sft'/'model'),
                 args=args)
    exec(code, names)
    losses = [r['loss'] for r in names['trainer'].state.log_history if 'loss' in r]
    assert len(losses) == 2 and losses[0] == pytest.approx(np.log(2), abs=.01)
    trained = tmp_path/'trained_by_trl'
    names['trainer'].save_model(str(trained))
    board = outside_board(trained, world, farm_folder, monkeypatch)
    assert board.kl['trained_by_trl'] > .01 and board.length['trained_by_trl'] > 0


@needs_trl
def test_grpo_by_trls_example(base, world, tmp_path):
    "Its rewards are those of `reward_function` on the completions that it sampled."
    import trl
    code = changed_example(trl.GRPOTrainer, {
        'from trl.rewards': 'from alpaca_farm.with_trl import reward_function, to_datasets',
        'dataset =': 'dataset = to_datasets(world, labels)["unlabeled"]',
        'model=': 'model=policy,',
        'reward_funcs': 'reward_funcs=reward_function(reward_model, policy, world),',
        'train_dataset': 'train_dataset=dataset, args=args,'})
    args = trl.GRPOConfig(output_dir=str(tmp_path), **SAMPLED)
    names = dict(world=world, labels=str(base/'annotators'), policy=str(base/'sft'/'model'),
                 reward_model=str(base/'reward_model'), args=args)
    exec(code, names)
    log = names['trainer'].state.log_history
    assert all(np.isfinite(r['rewards/reward_model/mean']) for r in log if 'loss' in r)
    assert sum('loss' in r for r in log) == 2


def test_rewards_are_those_of_ppo(base, world, models):
    "On the same answers, some cut off: prompts and completions as TRL hands them over."
    cfg = PPOConfig(**tiny.settings('ppo', base, standardise=False, missing_eos=''))
    splits = load_splits(cfg, *cfg.splits)
    records, prompts = fitting_prompts(splits[0], models.tokenizer, cfg)
    batch, answered = sample_rollout(models.policy, records[:24], prompts[:24], cfg, seed=0)
    expected, _ = rollout_scores(reward(cfg.reward_model, cfg), answered, {}, cfg)
    ids = [row[on.bool()].tolist() for row, on in zip(batch['ids'][:, -batch['response'].shape[1]:],
                                                      batch['response'])]
    assert len({r['ended'] for r in answered}) == 2
    chats = [[dict(role='user', content=r['instruction'])] for r in answered]
    texts = [models.tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    said = [[dict(role='assistant', content=text)] for text in texts]
    score = reward_function(cfg.reward_model, cfg.policy, world)
    found = score(prompts=chats, completions=said, completion_ids=ids, trainer_state=None)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_judge_rewards_by_the_wins_in_a_group(base, world, data):
    pairs = data['preference'][:6]
    score = reward_function(f'{world}/pool.json', str(base/'sft'), world)
    found = np.array(score(pairs['prompt']*2, pairs['chosen'] + pairs['rejected']))
    assert found[:6] + found[6:] == pytest.approx(np.ones(6))   # of two, each has the rest
    utility = reward_function('alpaca_farm.world:utility', str(base/'sft'), world)
    assert utility(pairs['prompt'], pairs['chosen']) == pytest.approx(list(pairs['utility_chosen']))


@needs_trl
def test_an_environment_owns_requests_and_reward(base, world, tmp_path):
    import trl
    policy = str(base/'sft'/'model')
    environment = WorldEnvironment(f'{world}/crowd.json', world, policy=policy)
    seen = []
    score = environment.score
    environment.score = lambda prompts, *rest: seen.append(prompts) or score(prompts, *rest)
    trainer = trl.GRPOTrainer(
        policy, environment.reward, environment_factory=environment,
        train_dataset=environment.rows, processing_class=with_trl.tool_tokenizer(policy),
        args=trl.GRPOConfig(output_dir=str(tmp_path), **SAMPLED))
    trainer.train()
    known = {r['instruction'] for r in load_records(world, 'unlabeled')}
    for prompts in seen:   # groups of four answers to one request
        asked = [prompt[0]['content'] for prompt in prompts]
        assert {*asked} <= known and [len({*asked[:4]}), len({*asked[4:]})] == [1, 1]
    means = [r['reward'] for r in trainer.state.log_history if 'reward' in r]
    assert means == pytest.approx([.5]*len(means)) and means   # wins in a group


@needs_trl
def test_the_truth_is_logged_and_changes_no_training(base, world, data, tmp_path):
    import trl
    def train(callback):
        args = trl.DPOConfig(output_dir=str(tmp_path), learning_rate=1e-2, **COMMON)
        trainer = trl.DPOTrainer(str(base/'sft'/'model'), args=args,
                                 train_dataset=data['preference'])
        if callback:
            trainer.add_callback(TruthCallback(trainer, world, 1, requests=8, max_new_tokens=12))
        trainer.train()
        return trainer
    plain, told = train(False), train(True)
    for a, b in zip(plain.model.parameters(), told.model.parameters(), strict=True):
        assert torch.equal(a, b)
    rows = [r for r in told.state.log_history if 'truth/gap' in r]
    assert [r['step'] for r in rows] == [0, 1, 2]
    assert rows[0]['truth/pool'] == rows[0]['truth/held_out_crowd'] == 50
    assert rows[2]['truth/pool'] != 50 and np.isfinite(rows[2]['truth/utility'])
    for r in rows: assert r['truth/gap'] == r['truth/pool'] - r['truth/held_out_crowd']


@needs_trl
def test_the_truth_of_an_adapter_is_that_of_its_policy(base, world, data, tmp_path):
    import peft
    import trl
    trainer = trl.DPOTrainer(str(base/'sft'/'model'), train_dataset=data['preference'],
                             args=trl.DPOConfig(output_dir=str(tmp_path), **COMMON),
                             peft_config=peft.LoraConfig(task_type='CAUSAL_LM'))
    told = TruthCallback(trainer, world, requests=8, max_new_tokens=12)
    before = [r['output'] for r in told.answer()]
    for name, weight in trainer.model.named_parameters():
        if 'lora_B' in name: torch.nn.init.normal_(weight)
    assert [r['output'] for r in told.answer()] != before


@pytest.mark.parametrize('found, refused', [('1.11.0', True), ('1.12.0', False), (None, False)])
def test_an_old_trl_is_named(found, refused, monkeypatch):
    def version(_):
        if found: return found
        raise with_trl.PackageNotFoundError
    monkeypatch.setattr(with_trl, 'version', version)
    with pytest.raises(ImportError, match='TRL 1.11.0.*1.12.0') if refused else nullcontext():
        with_trl.check_trl()


def other_tokens(folder, target):
    "Copy a model, with the ids of two tokens exchanged."
    shutil.copytree(folder, target)
    file = target/'tokenizer.json'
    content = read_json(file)
    vocab = content['model']['vocab']
    one, two = sorted(vocab, key=vocab.get)[300:302]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    write_json(file, content)
    return str(target)


def test_eval_gives_an_outside_policy_a_row(world, farm_folder, monkeypatch):
    board = outside_board(farm_folder/'my'/'trl_dpo', world, farm_folder, monkeypatch)
    assert {*board.index} == {'reference', 'trl_dpo'}
    assert board.kl['trl_dpo'] == pytest.approx(0, abs=1e-4)   # it is the policy of the reference
    answers, references = (read_json(farm_folder/run/'candidates.json')
                           for run in ('answers_trl_dpo', 'references'))
    for name in ('instruction', 'temperature', 'top_p'):
        assert [r[name] for r in answers] == [r[name] for r in references]


def test_the_farms_board_has_an_outside_policy(base, world, farm_folder):
    cfg = FarmConfig(runs=str(farm_folder), world=world, policies=[str(farm_folder/'my'/'trl_dpo')])
    job = farm_jobs(cfg)[-1]
    assert job.out == str(farm_folder/'answers_trl_dpo') and job.needs == [f'{farm_folder}/sft']
    assert not any('answers_trl_dpo' in job.out for job in farm_jobs(cfg, 1))
    cooler = tiny.write(farm_folder/'cooler.json', dict(references=dict(temperature=.5)))
    assert farm_jobs(replace(cfg, size=cooler))[-1].settings['temperature'] == .5   # as SFT answers
    short = {k: tiny.SETTINGS['best_of_n'][k] for k in ('max_new_tokens', 'max_prompt')}
    tiny.run_here([replace(job, settings=job.settings | dict(short, reference=str(base/'sft')))])
    judges = dict(crowd=load_annotators(f'{world}/held_out_crowd.json', cfg))
    _, _, board = farm_board(str(farm_folder), read_world(world), judges, 0, [],
                             policies=dict(trl_dpo=job.out))
    row = board.set_index('method').loc['trl_dpo']
    assert row.kind == 'outside' and row.kl == pytest.approx(0, abs=1e-4)
    assert row[['crowd', 'length', 'repetition']].notna().all()


def test_a_kl_of_other_tokens_is_not_comparable(base, tmp_path, capsys):
    policy = other_tokens(base/'sft'/'model', tmp_path/'other')
    out = tiny.run('best_of_n', base, tmp_path/'answers', n=1, reward_model='', policy=policy,
                   reference=str(base/'sft')).folder
    summary = read_summary(out)
    assert 'kl' not in summary
    assert any('not comparable' in said and policy in said for said in summary['warnings'])
