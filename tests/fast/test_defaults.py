"""Settings left open follow one rule of size; what a run logs is looked at for signs of trouble."""
import dataclasses
import json

import pytest
import tiny
import torch
from safetensors.torch import save_file

from alpaca_farm import best_of_n, dpo
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.defaults import default_of, schedule, settle
from alpaca_farm.core.model.loading import load_tokenizer
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.health import CHECKS, Health
from alpaca_farm.core.run.runs import read_summary, Run
from alpaca_farm.core.run.settings import sized_defaults
from alpaca_farm.dpo import DPOConfig
from alpaca_farm.ppo import PPOConfig
from alpaca_farm.reward_model import RewardModelConfig
from alpaca_farm.sft import SFTConfig

SMOL = dict(architectures=['LlamaForCausalLM'], model_type='llama', hidden_size=576,
            intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True)


def rate(cls, weights, lora=False):
    return default_of('learning_rate', *sized_defaults(cls)['learning_rate'], weights, lora)


@pytest.mark.parametrize('cls, toy, low, high', [
    (SFTConfig, 2e-3, 2e-5, 2e-5), (RewardModelConfig, 5e-4, 3e-6, 9e-6),
    (DPOConfig, 3e-4, 5e-7, 1e-6), (PPOConfig, 1e-3, 1e-6, 1e-5)])
def test_rates_are_the_worlds_and_the_literatures(cls, toy, low, high):
    "From the embedded world's half a million weights to 7 billion, and ten times that for LoRA."
    assert rate(cls, 5e5) == rate(cls, 5e5, lora=True) == toy
    assert low <= rate(cls, 7e9) <= high
    assert rate(cls, 7e9, lora=True) == pytest.approx(10*rate(cls, 7e9))
    rates = [rate(cls, n) for n in (1e6, 1e7, 1.35e8, 1e9, 8e9)]
    assert rates == sorted(rates, reverse=True) and len({*rates}) == 5


def test_only_a_toy_reads_likelihoods():
    toy, large = sized_defaults(RewardModelConfig)['likelihood']
    assert (toy, large) == (.2, 0.)
    assert [default_of('likelihood', toy, large, n) for n in (5e5, 1.35e8)] == [.2, 0.]


@pytest.mark.parametrize('examples', [7, 34, 60, 100, 300, 1000, 60_000])
def test_there_are_25_steps_where_there_can_be(examples):
    batch_size, epochs = schedule(examples, 32, 1)
    steps = epochs*-(-examples//batch_size)
    assert 4 <= batch_size <= 32 and 1 <= epochs <= 3
    assert steps >= 25 or (batch_size, epochs) == (4, 3)
    assert examples < 10_000 or (batch_size, epochs) == (32, 1)


def real_size(folder):
    "A folder with the configuration of SmolLM2-135M, without its weights."
    folder.mkdir()
    (folder/'config.json').write_text(json.dumps(SMOL))
    save_file(dict(none=torch.zeros(1)), folder/'model.safetensors')
    return str(folder)


def test_dpo_of_a_real_model_takes_what_suits_its_size_and_data(base, tmp_path, capsys):
    given = dict(policy=real_size(tmp_path/'smol'), data=str(base/'world'),
                 preferences=str(base/'annotators'), out=str(tmp_path/'out'), warmup=.2)
    run = Run(DPOConfig(**given), dict(settings={}))
    tokenizer = load_tokenizer(str(base/'sft'))
    pairs = load_records(str(base/'annotators'), 'preferences', 'preference')
    long = [dict(r, instruction='please '*90 + r['instruction']) for r in pairs]
    settle(run, run.cfg.policy, tokenizer, long)
    cfg = run.cfg
    assert 5e-6 < cfg.learning_rate < 3e-5 and cfg.beta == .1 and cfg.eval_temperature == .8
    assert len(pairs)*cfg.epochs/cfg.batch_size >= 25
    assert cfg.max_prompt > 90 and cfg.max_length >= cfg.max_prompt + cfg.max_new_tokens
    assert run.config['settings'] == run.config['derived'] and 'warmup' not in run.config['derived']
    said = capsys.readouterr().out
    assert '135M weights, 60 records, all trained' in said and f'{cfg.learning_rate:g}' in said


def test_a_run_records_what_it_took_and_a_set_value_makes_another(base, tmp_path):
    given = {k: v for k, v in tiny.settings('dpo', base, out=str(tmp_path/'dpo')).items()
             if k not in ('learning_rate', 'beta')}
    cfg = DPOConfig(**given)
    dpo.train(cfg)
    config = read_json(tmp_path/'dpo'/'config.json')
    assert config['settings']['learning_rate'] == config['derived']['learning_rate'] == 3e-4
    assert not {'learning_rate', 'beta'} & {*config['given']}
    assert dpo.train(cfg).answered and dpo.train(DPOConfig(**given)).answered
    again = DPOConfig(**given)
    assert dpo.start(again, dpo.train).cfg.beta == .3   # those of the run that is there
    assert not dpo.start(DPOConfig(**given, learning_rate=1e-4), dpo.train).done


WELL = dict(loss=.69, val_loss=.69, nll_before=2., nll=1.9, chosen=-3., rejected=-5., kl=4.,
            clip_fraction=.1, reward_std=1., frac_reward_zero_std=.5, entropy=2., ended=.9,
            accuracy=.7, accuracy_low=.6, accuracy_high=.8)


@pytest.mark.parametrize('later, warning', [
    (dict(loss=float('nan')), 'not a number'), (dict(loss=5.), 'has doubled'),
    (dict(val_loss=.8), 'a tenth above'), (dict(nll=4.95), 'from 2.00 to 4.95'),
    (dict(chosen=-19.5), 'over 10 nats'), (dict(rejected=-18.1), 'over 10 nats'),
    (dict(kl=-.5), 'below zero'), (dict(kl=18.5), 'over 15 nats'),
    (dict(clip_fraction=.4), 'clipped'), (dict(reward_std=0.), 'the same reward'),
    (dict(frac_reward_zero_std=1.), 'no update'), (dict(entropy=.01), 'collapsed'),
    (dict(ended=.06), 'raise max_new_tokens'), (dict(accuracy_low=.45), '70% [45%, 80%]')])
def test_each_sign_of_trouble_is_told_once_and_only_then(later, warning):
    health = Health()
    assert health(WELL) == health(WELL | dict(loss=.9, chosen=-9., val_loss=.72)) == []
    found = health(dict(WELL, chosen=-9.) | later, 'step 3: ')
    assert len(found) == 1 and warning in found[0] and found[0].startswith('step 3: ')
    assert health(dict(WELL, chosen=-9.) | later) == [] and health.warnings == found
    assert {c.figure.partition('_j')[0].partition('_r')[0] for c in CHECKS} <= {'frac', 'reward', *WELL}


def test_best_of_n_says_that_its_answers_are_cut_off(base, tmp_path, capsys):
    given = tiny.settings('best_of_n', base, out=str(tmp_path/'best'), max_new_tokens=2)
    summary = read_summary(best_of_n.run(best_of_n.BestOfNConfig(**given)).folder)
    assert summary['ended'] < .5 and any('raise max_new_tokens' in w for w in summary['warnings'])
    assert 'raise max_new_tokens' in capsys.readouterr().out


def test_no_default_by_size_is_set_in_its_class():
    for name in ('sft', 'dpo', 'reward_model', 'ppo', 'quark', 'rrhf', 'expert_iteration',
                 'binary_feedback', 'best_of_n'):
        cls = tiny.config_class(name)
        open_ = {f.name for f in dataclasses.fields(cls) if f.default is None}
        assert open_ <= {*sized_defaults(cls)}, name
