"TRL trains on a world, by its own examples; skipped where TRL cannot be imported (PYTHONPATH)."
import re
from contextlib import nullcontext
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import tiny
from alpaca_farm import with_trl
from alpaca_farm.data.records import load_records
from alpaca_farm.model.rewards import reward
from alpaca_farm.ppo import PPOConfig
from alpaca_farm.train.online import load_prompts, rollout_scores, sample_rollout
from alpaca_farm.with_trl import reward_function, to_datasets, TruthCallback, WorldEnvironment

needs_trl = pytest.mark.skipif(not find_spec('trl'), reason='no TRL here')
COMMON = dict(use_cpu=True, bf16=False, report_to='none', save_strategy='no', disable_tqdm=True,
              logging_steps=1, max_steps=2, per_device_train_batch_size=8, seed=0)


@pytest.fixture
def world(base): return str(base/'world')


@pytest.fixture
def data(base, world): return to_datasets(world, str(base/'annotators'))


def changed_example(trainer, changes):
    "The example in a trainer's documentation, with some lines exchanged for others."
    example = re.search(r'```python\n(.*?)```', trainer.__doc__, re.DOTALL)[1]
    lines = [re.sub(r'^\s*(>>>|\.\.\.) ?', '', line) for line in example.splitlines()]
    for start, new in changes.items():
        at, = [i for i, line in enumerate(lines) if line.strip().startswith(start)]
        lines[at] = new
    assert sum(new.count('\n') + 1 for new in changes.values()) <= 5
    return '\n'.join(lines)


@needs_trl
def test_dpo_by_trls_example(base, world, tmp_path):
    import trl
    code = changed_example(trl.DPOTrainer, {
        'from datasets': 'from alpaca_farm.with_trl import to_datasets',
        'dataset =': 'dataset = to_datasets(world, labels)["preference"]',
        'model=': 'model=policy,',
        'train_dataset': 'train_dataset=dataset, args=args,'})
    args = trl.DPOConfig(output_dir=str(tmp_path), **COMMON)
    names = dict(world=world, labels=str(base/'annotators'), policy=str(base/'sft'/'model'), args=args)
    exec(code, names)
    losses = [r['loss'] for r in names['trainer'].state.log_history if 'loss' in r]
    assert len(losses) == 2 and losses[0] == pytest.approx(np.log(2), abs=.01)


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
    args = trl.GRPOConfig(output_dir=str(tmp_path), num_generations=4, max_completion_length=8, **COMMON)
    names = dict(world=world, labels=str(base/'annotators'), policy=str(base/'sft'/'model'),
                 reward_model=str(base/'reward_model'), args=args)
    exec(code, names)
    log = names['trainer'].state.log_history
    assert all(np.isfinite(r['rewards/reward_model/mean']) for r in log if 'loss' in r)
    assert sum('loss' in r for r in log) == 2


def test_rewards_are_those_of_ppo(base, world, models):
    "On the same answers, some cut off: prompts and completions as TRL hands them over."
    cfg = PPOConfig(**tiny.settings('ppo', base, standardise=False, missing_eos=''))
    records, prompts, _ = load_prompts(cfg, models.tokenizer)
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
        args=trl.GRPOConfig(output_dir=str(tmp_path), num_generations=4, max_completion_length=8, **COMMON))
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
        trainer = trl.DPOTrainer(str(base/'sft'/'model'), train_dataset=data['preference'],
                                 args=trl.DPOConfig(output_dir=str(tmp_path), learning_rate=1e-2, **COMMON))
        if callback:
            trainer.add_callback(TruthCallback(trainer, world, every=1, requests=8, max_new_tokens=12))
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


@pytest.mark.parametrize('found, refused', [('1.11.0', True), ('1.12.0', False), (None, False)])
def test_an_old_trl_is_named(found, refused, monkeypatch):
    def version(_):
        if found: return found
        raise with_trl.PackageNotFoundError
    monkeypatch.setattr(with_trl, 'version', version)
    with pytest.raises(ImportError, match='TRL 1.11.0.*1.12.0') if refused else nullcontext():
        with_trl.check_trl()
