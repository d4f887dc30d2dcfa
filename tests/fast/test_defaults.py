"""Settings left open follow one rule of size; what a run logs is looked at for signs of trouble."""
import json
import re
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from alpaca_farm import best_of_n, dpo
from alpaca_farm.boards.judged import read_answers
from alpaca_farm.data.records import load_records
from alpaca_farm.data.text import check_limit
from alpaca_farm.dpo import DPOConfig
from alpaca_farm.model.loading import load_tokenizer
from alpaca_farm.model.logprobs import load_policy
from alpaca_farm.ppo import PPOConfig
from alpaca_farm.reward_model import RewardModelConfig
from alpaca_farm.run.defaults import count_weights, default_of, fitted
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import CHECKS, few_steps, Health, is_fresh, read_summary, Run, start
from alpaca_farm.run.settings import from_args, sized_defaults
from alpaca_farm.sft import SFTConfig
from alpaca_farm.train import preflight
from alpaca_farm.train.answers import load_splits
from alpaca_farm.train.preflight import settle


def rate(cls, weights, lora=False):
    return default_of('learning_rate', *sized_defaults(cls)['learning_rate'], weights, lora)


@pytest.mark.parametrize('cls, toy, low, high', [
    (SFTConfig, 2e-3, 2e-5, 2e-5), (RewardModelConfig, 5e-4, 3e-6, 9e-6),
    (DPOConfig, 3e-4, 5e-7, 1e-6), (PPOConfig, 5e-4, 1e-6, 1e-5)])
def test_rates_are_the_worlds_and_the_literatures(cls, toy, low, high):
    "From the embedded world's half a million weights to 7 billion, and ten times that for LoRA."
    assert rate(cls, 5e5) == rate(cls, 5e5, lora=True) == toy
    assert low <= rate(cls, 7e9) <= high
    assert rate(cls, 7e9, lora=True) == pytest.approx(10*rate(cls, 7e9))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    "The folder of a model's snapshots in an empty cache of the hub."
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path/'hub'))
    return tmp_path/'hub'/'models--some--model'/'snapshots'


@given(examples=st.integers(1, 60_000))
def test_there_are_25_steps_where_there_can_be(examples):
    found = fitted(dict(batch_size=32, epochs=1), dict(batch_size=(), epochs=()), {}, examples)
    batch_size = found['batch_size']
    epochs = found['epochs']
    assert 4 <= batch_size <= 32
    assert 1 <= epochs <= 3
    assert epochs*-(-examples//batch_size) >= 25 or (batch_size, epochs) == (4, 3)
    assert examples < 10_000 or (batch_size, epochs) == (32, 1)


def of_size(folder, weights):
    "A model's folder, for who asks its size: its file's header only."
    folder.mkdir()
    header = json.dumps(dict(w=dict(dtype='U8', shape=[weights], data_offsets=[0, weights])))
    with open(folder/'model.safetensors', 'wb') as f:   # sparse
        f.write(len(header).to_bytes(8, 'little') + header.encode())
        f.truncate(8 + len(header) + weights)
    return str(folder)


def test_a_models_weights_are_counted_where_they_are(base, tmp_path, hub):
    policy = load_policy(str(base/'sft'), DPOConfig()).model
    count = sum(p.numel() for p in policy.parameters())
    assert count_weights(str(base/'sft')) == count_weights(str(base/'sft'/'model')) == count
    # of an adapter, those of its base
    tiny.write(tmp_path/'run'/'adapter_config.json',
               dict(base_model_name_or_path=of_size(tmp_path/'large', 10**9)))
    save_file(dict(a=torch.zeros(3)), tmp_path/'run'/'adapter_model.safetensors')
    assert count_weights(str(tmp_path/'run')) == 1e9
    # of a model on the hub, once it is here
    hub.mkdir(parents=True)
    of_size(hub/'abc', 2*10**7)
    assert count_weights('some/model') == count_weights('some/model@abc') == 2e7
    (hub/'abc'/'model.safetensors').write_bytes(b'cut off')
    assert count_weights('some/model') == 0   # who loads it says so


def test_the_weights_of_a_gguf_file_are_counted_once(tmp_path):
    "In any number of bits; none of a file that is cut off."
    file = tmp_path/'model.gguf'
    writer = gguf.GGUFWriter(file, 'llama')
    writer.add_tensor('a.weight', np.zeros((2, 64), np.float16))
    writer.add_tensor('b.weight', np.zeros((2, 96), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert count_weights(str(file)) == 320
    file.write_bytes(file.read_bytes()[:60])
    assert count_weights(str(file)) == 0


def test_settings_have_numbers_as_soon_as_they_are_made(base, tmp_path, capsys):
    toy = DPOConfig()
    real = DPOConfig(policy=of_size(tmp_path/'smol', 135*10**6))
    absent = DPOConfig(policy='some/model', lora_rank=8)
    assert (toy.learning_rate, toy.beta, toy.batch_size, toy.epochs) == (3e-4, .3, 32, 2)
    assert (toy.max_length, toy.max_prompt, toy.max_new_tokens) == (128, 64, 56)
    assert 5e-6 < real.learning_rate < 3e-5
    assert real.beta == .1
    assert real.eval_temperature == .8
    assert absent.learning_rate == 1e-5   # of 7 billion, with adapters
    assert RewardModelConfig().likelihood == .2
    assert RewardModelConfig(policy='some/model').likelihood == 0.
    with pytest.raises(SystemExit):
        from_args(DPOConfig, ['--help'])
    assert '(default: by size, 0.0003 for a toy,' in ' '.join(capsys.readouterr().out.split())


def test_a_model_of_the_hub_is_counted_before_its_rate_is_taken(base, tmp_path, hub, monkeypatch):
    "Not taken for 7 billion weights since its files are not here yet."
    hub.mkdir(parents=True)
    asked = []

    def download(spec):
        asked.append(spec)
        of_size(hub/'1', 135*10**6)
    monkeypatch.setattr(preflight, 'hub_snapshot', download)
    labels = str(base/'annotators')
    run = Run(RewardModelConfig(policy='some/model', preferences=labels), dict(settings={}))
    assert run.cfg.learning_rate == 5e-6
    tokenizer = load_tokenizer(str(base/'sft'))
    for _ in range(2):
        settle(run, tokenizer, load_records(labels, 'preferences', 'preference'))
    assert run.cfg.learning_rate == rate(RewardModelConfig, 135*10**6) > 3e-5
    assert asked == ['some/model']


def test_a_run_fits_what_was_left_open_to_its_data(base, tmp_path, capsys):
    given = dict(policy=of_size(tmp_path/'smol', 135*10**6), data=str(base/'world'),
                 preferences=str(base/'annotators'), out=str(tmp_path/'out'), warmup=.2)
    pairs = load_records(str(base/'annotators'), 'preferences', 'preference')
    long = [dict(r, instruction='please '*90 + r['instruction']) for r in pairs]
    tokenizer = load_tokenizer(str(base/'sft'))
    run = Run(DPOConfig(**given), dict(settings={}))
    settle(run, tokenizer, long)
    cfg = run.cfg
    assert len(pairs)*cfg.epochs/cfg.batch_size >= 25
    assert cfg.max_prompt > 256
    assert cfg.max_length >= cfg.max_prompt + cfg.max_new_tokens
    assert {*run.config['settings']} == {*cfg.left_open}
    assert cfg.warmup == .2
    said = capsys.readouterr().out
    assert said.startswith('the first of 60 records')
    assert '135M weights, 60 records, lora_rank 0' in said.splitlines()[-2]
    assert 'GB on this machine' in said.splitlines()[-1]
    assert f'learning_rate {cfg.learning_rate:g}' in said
    # what was set stays
    run = Run(DPOConfig(**given, batch_size=32, max_prompt=40), dict(settings={}))
    settle(run, tokenizer, long)
    assert (run.cfg.batch_size, run.cfg.max_prompt, run.cfg.epochs) == (32, 40, 3)


@pytest.mark.parametrize('seed', range(5))
def test_lengths_left_open_never_refuse_the_data_that_they_fit(base, tmp_path, seed):
    "However different what is learned, what a loss is measured on, and what is answered are."
    rng = np.random.default_rng(seed)
    sets = {}
    sizes = rng.permutation([4, 30, 200, 1500])
    for name, n, longest in zip(('sft', 'val', 'eval', 'apart'), sizes,
                                rng.permutation([20, 60, 300, 900])):
        rows = []
        for a, b in rng.integers(1, longest, (n, 2)):
            rows.append(dict(instruction='a '*int(a), output='b '*int(b)))
        sets[name] = rows
        tiny.write(tmp_path/'data'/f'{name}.json', rows)
    tokenizer = load_tokenizer(str(base/'sft'))
    cfg = SFTConfig(policy=str(base/'sft'), data=str(tmp_path/'data'))
    run = Run(cfg, dict(settings={}))
    settle(run, tokenizer, sets['sft'], sets['apart'], answered=[sets['val'], sets['eval']])
    for name, records in sets.items():
        lengths = preflight.count_tokens(records, tokenizer, closed=True)
        for limit in ('max_prompt', 'max_length'):
            if limit == 'max_length' and name in ('val', 'eval'): continue   # only answered
            check_limit(lengths[limit], getattr(run.cfg, limit), name, limit)


def test_a_split_that_nobody_reads_need_not_be_there(base, tmp_path):
    "PPO's val split without a judge, in a folder and in one file."
    rows = load_records(str(base/'world'), 'unlabeled', n=12)
    given = dict(policy=str(base/'sft'), reward_model=str(base/'reward_model'))
    for name in ('unlabeled', 'eval'): tiny.write(tmp_path/'data'/f'{name}.json', rows)
    cfg = PPOConfig(**given, data=str(tmp_path/'data'))
    assert len(load_splits(cfg, *cfg.splits)) == 2
    cfg = PPOConfig(**given, data=str(tmp_path/'data'/'eval.json'), eval_split='')
    assert len(load_splits(cfg, *cfg.splits)) == 1


def test_a_run_records_what_it_took_and_a_set_value_makes_another(base, tmp_path, capsys):
    given = tiny.settings('dpo', base, out=str(tmp_path/'dpo'))
    left_open = {'learning_rate', 'beta', 'epochs'}
    given = {k: v for k, v in given.items() if k not in left_open}
    cfg = DPOConfig(**given)
    dpo.train(cfg)
    config = read_json(tmp_path/'dpo'/'config.json')
    assert config['settings']['learning_rate'] == 3e-4
    assert config['settings']['epochs'] == cfg.epochs > 2   # of 60 pairs, eight a step
    assert left_open <= {*config['left_open']}
    assert not left_open & {*config['given']}
    assert dpo.train(cfg).done and dpo.train(DPOConfig(**given)).done
    assert start(DPOConfig(**given), dpo.train).cfg.epochs == cfg.epochs
    del given['out']
    assert is_fresh(cfg.out, given | dict(learning_rate=None))
    assert not is_fresh(cfg.out, given | dict(learning_rate=1e-4))
    assert not start(DPOConfig(**given, out=cfg.out, learning_rate=1e-4), dpo.train).done
    assert 'learning_rate = 0.0003' in capsys.readouterr().out


def test_best_of_n_takes_what_stored_samples_were_drawn_with(base, tmp_path):
    given = tiny.settings('best_of_n', base, samples=str(base/'samples'))
    del given['max_new_tokens']
    theirs = read_json(base/'samples'/'config.json')['settings']
    cfg = best_of_n.BestOfNConfig(**given, out=str(tmp_path/'best'), split=theirs['split'])
    run = best_of_n.run(cfg)
    assert run.config['settings']['max_new_tokens'] == theirs['max_new_tokens'] != 56


WELL = dict(same_tokens=1, loss=.69, val_loss=.69, nll_before=2., nll=1.9, chosen=-3., rejected=-5., kl=4.,
            clip_fraction=.1, reward_std=1., frac_reward_zero_std=.5, entropy=2., ended=.9,
            stuck=0., accuracy=.7, accuracy_low=.6, accuracy_high=.8, optimiser_steps=100,
            remedy='')


@pytest.mark.parametrize('later, warning', [
    (dict(loss=float('nan')), 'not a number'), (dict(loss=5.), 'has doubled'),
    (dict(val_loss=.8), 'a tenth above'), (dict(nll=4.95), 'from 2.00 to 4.95'),
    (dict(val_loss=.7, val_loss_before=.6), 'a tenth above'),
    (dict(stuck=.9), '90 % of the weights'),
    (dict(chosen=-19.5), 'over 10 nats'), (dict(rejected=-18.1), 'over 10 nats'),
    (dict(kl=-.5, kl_standard_error=.1), 'below zero'), (dict(kl=18.5), 'over 15 nats'),
    (dict(clip_fraction=.4), 'clipped'), (dict(reward_std=0.), 'the same reward'),
    (dict(frac_reward_zero_std=1.), 'no update'), (dict(entropy=.01), 'collapsed'),
    (dict(ended=.06), 'raise max_new_tokens'), (dict(accuracy_low=.45), '70 % [45 %, 80 %]'),
    (few_steps(SimpleNamespace(batch_size=4, epochs=3), 9), 'only 9 optimiser steps: it takes'),
    (few_steps(SimpleNamespace(batch_size=8, epochs=3), 9), 'only 9 optimiser steps: lower batch')])
def test_each_sign_of_trouble_is_told_once_and_only_then(later, warning, capsys):
    health = Health()
    health(WELL)
    health(WELL | dict(loss=.9, chosen=-9., val_loss=.72))
    health(WELL | dict(kl=-.22, kl_standard_error=.2))   # of eight answers
    assert not health.warnings
    for _ in range(2):
        health(dict(WELL, chosen=-9.) | later, 'step 3: ')
    found, = health.warnings.values()
    assert warning in found
    assert found.startswith('step 3: ')
    assert capsys.readouterr().out == found + '\n'
    figures = {re.sub('_(jump|ratio|rise|high)$', '', name) for name, *_ in CHECKS}
    assert figures <= {*WELL}


def test_a_held_out_loss_may_be_0_or_below():
    "As the hinge's where all pairs are in order, and robust's."
    health = Health()
    for loss in (.69, 0., 0., -.5, -.6, -.58): health(dict(val_loss=loss))
    assert not health.warnings
    health(dict(val_loss=-.5))
    assert health.warnings


def test_weights_in_16_bits_that_cannot_move_are_told(base, tmp_path):
    run = tiny.run('sft', base, tmp_path/'sft', dtype='bfloat16', eval_split='',
                   master_weights=False, learning_rate=1e-6)
    assert 'master_weights' in ' '.join(read_summary(run.folder)['warnings'])


def test_best_of_n_says_that_its_answers_are_cut_off(base, tmp_path, capsys):
    "So does a board with them, once."
    run = tiny.run('best_of_n', base, tmp_path/'best', max_new_tokens=2)
    warning, = read_summary(run.folder)['warnings']
    assert 'max_new_tokens' in warning
    assert warning in capsys.readouterr().out
    for _ in range(2):
        read_answers(run.cfg.out)
    assert capsys.readouterr().out.count(warning) == 1
