"""LoRA: one frozen model with several adapters, from training to files and back."""
import contextlib
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny
import torch
from peft import get_peft_model, LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from alpaca_farm import ppo, reward_model, sft
from alpaca_farm.data.text import collate
from alpaca_farm.model.loading import load_model, load_tokenizer
from alpaca_farm.model.logprobs import load_policy, load_reference, load_scalar
from alpaca_farm.model.logprobs import logprobs
from alpaca_farm.model.control import add_tokens
from alpaca_farm.model.packing import reads_packed
from alpaca_farm.model.policy import add_adapter, base_of, lora_config, merge, own_weights
from alpaca_farm.model.policy import save_adapter
from alpaca_farm.run.files import read_json
from alpaca_farm.run.settings import HardwareConfig as config_of
from alpaca_farm.train.trainer import Trainer

LORA = dict(lora_rank=4, device='cpu')


def config(notebook, base, **more):
    return tiny.config(notebook, **tiny.settings(notebook, base, **LORA | more))


def shake(model, seed=0, std=.05):
    "Give an adapter weights that matter."
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in own_weights(model).values():
            p.add_(std * torch.randn(p.shape, generator=g))
    return model


@pytest.fixture(scope='module')
def batch(models):
    prompts = [models.prompts[i // 2] for i in range(8)]   # each twice: a packed batch has it once
    return collate(prompts, [a[:3 + i] for i, a in enumerate(models.answers[:8])],
                   models.tokenizer.pad_token_id)


def test_control_tokens_that_are_there_already(base):
    cfg = config('sft', base, policy=str(base/'sft'))
    policy = load_policy(cfg.policy, cfg, train=True)
    ids = add_tokens(policy, ['<a>', '<b>'])
    assert add_tokens(policy, ['<a>', '<b>']) == ids
    assert policy.model(torch.tensor([ids])).logits.shape[-1] == ids[-1] + 1


def test_packed_rows_with_adapters(base, batch):
    cfg = config('sft', base, policy=str(base/'sft'))
    def gradient(packs):
        policy = shake(load_policy(cfg.policy, cfg, train=True))
        policy.packs = packs
        logp = logprobs(policy, batch)
        (logp * torch.linspace(-1, 1, logp.numel()).view_as(logp)).sum().backward()
        return logp.detach(), torch.cat([p.grad.flatten() for p in own_weights(policy).values()])
    policy = shake(load_policy(cfg.policy, cfg, train=True))
    assert reads_packed(policy)
    for a, b in zip(gradient(True), gradient(False)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_adapter_without_its_base(base, tmp_path):
    shutil.copytree(base/'world/model', tmp_path/'base')
    shutil.copytree(base/'world', tmp_path/'world')
    cfg = config('sft', base, policy=str(tmp_path/'base'), data=str(tmp_path/'world'),
                 out=str(tmp_path/'run'), eval_split='', val_split='')
    sft.train(cfg)
    assert base_of(tmp_path/'run/adapter') == str(tmp_path/'base')
    shutil.rmtree(tmp_path/'base')
    with pytest.raises(ValueError, match='which is gone'):
        load_policy(str(tmp_path/'run/adapter'), cfg)
    load_policy(str(tmp_path/'run'), cfg)   # the whole model needs no base


@pytest.fixture(scope='module')
def rewarded(base, tmp_path_factory):
    "A reward model trained with an adapter on the policy of the tests."
    cfg = config('reward_model', base, out=str(tmp_path_factory.mktemp('lora')/'reward_model'),
                 lora_rank=3)
    reward_model.train(cfg)
    return cfg.out


def embedding(model):
    "Where a model's first weights lie."
    return model.model.base_model.embed_tokens.weight.data_ptr()


def ppo_step(policy, value, batch, cfg):
    "Two updates of PPO on a batch; the loss's figures and all weights that were trained."
    weights = [p for m in (policy, value) for p in own_weights(m).values()]
    adam = torch.optim.AdamW(weights, lr=1e-2)
    losses = []
    for _ in range(2):
        figures = ppo.ppo_loss(policy, value, batch, cfg)
        losses.append((figures['loss'] * batch['weight']).sum() / batch['weight'].sum())
        losses[-1].backward()
        adam.step(), adam.zero_grad()
    return torch.stack(losses).detach(), [p.detach() for p in weights]


@pytest.mark.parametrize('checkpointed', [False, True])
def test_ppo_on_one_model_is_ppo_on_three(base, rewarded, batch, checkpointed):
    cfg = config('ppo', base, reward_model=rewarded, gradient_checkpointing=checkpointed)
    policy = load_policy(cfg.policy, cfg, train=True)
    tokenizer = policy.tokenizer
    value = ppo.value_model(cfg, policy)
    reward_of = ppo.reward_beside(policy, value, cfg)
    reference = load_reference(policy, cfg)
    assert embedding(value) == embedding(policy)
    separate = load_policy(cfg.policy, cfg, train=True)
    other = load_policy(cfg.policy, cfg, train=True)
    scalar = ppo.scalar_on(other, 'value', rewarded, cfg)
    own = replace(scalar, mean=value.mean, std=value.std)
    plain = load_policy(cfg.policy, cfg, train=True, frozen=True)
    # the merged reward model
    whole = ppo.reward(cfg.reward_model, tiny.config('ppo', **tiny.settings('ppo', base)),
                       cfg.template)
    records = [dict(instruction=f'say {w}', input='', output=w) for w in ('yes', 'no', 'perhaps')]
    assert reward_of(records) == pytest.approx(whole(records), abs=1e-4)
    shake(policy), shake(separate)
    scores = torch.linspace(-1, 1, 8)
    found = []
    for p, ref, v in ((policy, reference, value), (separate, plain, own)):
        given, figures = ppo.experience(p, ref, v, batch, scores, cfg)
        found.append((figures, *ppo_step(p, v, given, cfg)))
    (figures, losses, weights), (figures_3, losses_3, weights_3) = found
    assert figures == pytest.approx(figures_3, abs=1e-5)
    torch.testing.assert_close(losses, losses_3, rtol=1e-4, atol=1e-5)
    for x, y in zip(weights, weights_3, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    # the reward has not moved
    assert reward_of(records) == pytest.approx(whole(records), abs=1e-4)


@pytest.mark.parametrize('name', ['mixtral', 'qwen3_moe'])
def test_experts_with_adapters_are_merged(name):
    policy = shake(add_adapter(tiny.policy(name), 'policy', lora_config(config_of(lora_rank=3))),
                   std=.2)
    ids = torch.arange(3, 15)[None]
    assert any('experts' in n for n in own_weights(policy))
    with torch.no_grad():
        with policy.on():
            logits = policy.model(ids).logits
        merged = merge(policy)
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-4)
    assert merged.state_dict().keys() == tiny.family(name).state_dict().keys()


def test_all_linear_leaves_out_what_peft_cannot_adapt():
    policy = add_adapter(tiny.policy('falcon_h1'), 'policy', lora_config(config_of(lora_rank=3)))
    adapted = ' '.join(own_weights(policy))
    assert 'in_proj' in adapted
    assert 'out_proj' not in adapted


@pytest.mark.parametrize('family, targets, message', [
    ('llama', 'q_proj, embed_tokens', 'embed_tokens is no linear layer'),
    ('llama', 'q_proj, lm_head', 'lm_head is no linear layer'),
    ('llama', 'q_proj, v_prog', 'v_prog is no .* Did you mean v_proj?'),
    ('llama', 'v_prog', 'v_prog is no .* Did you mean v_proj?'),
    ('llama', 'q_proj, norm', 'RMSNorm.* not supported'), ('gpt2', 'c_attn, wte', 'wte is no'),
    ('mixtral', 'q_proj, w1', 'without also targeting w3'),
    ('mixtral', 'experts, q_proj', 'Experts')])
def test_targets_without_an_adapter_are_refused_by_name(family, targets, message):
    "In one line, and not passed over."
    config = lora_config(config_of(lora_rank=3, lora_targets=targets))
    with pytest.raises(ValueError, match=message) as e:
        add_adapter(tiny.policy(family), 'policy', config)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('family, targets, count', [
    ('llama', 'q_proj, layers.1.mlp.up_proj', 3), ('gpt2', 'c_attn', 2),
    ('mixtral', 'q_proj, w1, w2, w3', 6)])
def test_all_targets_are_trained(family, targets, count):
    "Those of experts as the two matrices that hold all of them."
    config = lora_config(config_of(lora_rank=3, lora_targets=targets))
    weights = own_weights(add_adapter(tiny.policy(family), 'policy', config))
    assert len(weights) == 2*count
    assert all(p.requires_grad for p in weights.values())


Q = 'model.layers.0.self_attn.q_proj'
ELSEWHERE = dict(   # settings, and what a refusal names
    names=dict(target_modules=['q_proj', 'query']), path=dict(target_modules=[Q, 'up_proj']),
    pattern=dict(target_modules=r'model\.layers\.1\..*_proj'), bias=dict(lora_bias=True),
    rank=dict(rank_pattern={Q: 2}), alpha=dict(alpha_pattern={f'^{Q}': 64, 'v_proj': 1}),
    scale=dict(use_rslora=True), layers=dict(layers_to_transform=[1], layers_pattern='layers'),
    without=dict(exclude_modules=[Q]), parameter=dict(target_parameters=['mlp.up_proj.weight']),
    principal=dict(init_lora_weights='pissa'))
REFUSED = dict(embed_tokens=dict(target_modules=['q_proj', 'embed_tokens']),
    lm_head=dict(target_modules=['q_proj', 'lm_head']), norm=dict(modules_to_save=['norm']),
    no_bias=dict(lora_bias=True, target_modules=['o_proj']), use_dora=dict(use_dora=True),
    bias=dict(bias='all'), trainable_token_indices=dict(trainable_token_indices=[3, 4]),
    layer_replication=dict(layer_replication=[[0, 2], [1, 2]]),
    alora_invocation_tokens=dict(alora_invocation_tokens=[3]), peft_type={}, of_tomorrow={})


@pytest.fixture
def elsewhere(tmp_path):
    "Makes an adapter with `peft`, on a model with biases, in `it`; returns what `peft` computes."
    tiny.family('qwen2', tie_word_embeddings=False).save_pretrained(tmp_path/'base')
    def load():
        return AutoModelForCausalLM.from_pretrained(tmp_path/'base', trust_remote_code=False)
    def make(**more):
        settings = dict(target_modules=['q_proj', 'v_proj'], init_lora_weights=False) | more
        made = get_peft_model(load(), LoraConfig(**settings))
        with torch.no_grad():
            for n, p in made.named_parameters():
                if 'lora_' in n:
                    p.add_(.1)
        made.save_pretrained(tmp_path/'it')
        shutil.copy(tmp_path/'base'/'config.json', tmp_path/'it')
        if more.get('layer_replication'):
            return
        peft = PeftModel.from_pretrained(load(), tmp_path/'it').eval()
        return peft(torch.arange(3, 15)[None]).logits
    return tmp_path/'it', make


@pytest.mark.parametrize('kind', ELSEWHERE)
def test_an_adapter_from_elsewhere_computes_what_it_does_in_peft(elsewhere, kind):
    folder, make = elsewhere
    want = make(**ELSEWHERE[kind])
    found = load_model(AutoModelForCausalLM, str(folder), torch.float32)(torch.arange(3, 15)[None])
    torch.testing.assert_close(found.logits, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('kind', REFUSED)
def test_what_an_adapter_asks_for_and_does_not_get_is_refused_by_name(elsewhere, kind):
    "In one line: another kind of adapter, and a setting of a later peft, among them."
    folder, make = elsewhere
    make(**REFUSED[kind])
    file = folder/'adapter_config.json'
    if kind == 'peft_type':
        tiny.write(file, read_json(file) | dict(peft_type='IA3'))
    if kind == 'of_tomorrow':
        tiny.write(file, read_json(file) | dict(of_tomorrow=.5))
    with pytest.raises(ValueError, match=f'{folder}.*{kind.replace("_", ".")}') as e:
        load_model(AutoModelForCausalLM, str(folder), torch.float32)
    assert '\n' not in str(e.value)


def test_a_reward_model_with_weights_of_its_own_is_read_once(base):
    cfg = config('ppo', base)
    policy = load_policy(cfg.policy, cfg, train=True)
    value = ppo.value_model(cfg, policy)
    reward_of = ppo.reward_beside(policy, value, cfg)
    plain = ppo.reward(cfg.reward_model, cfg, cfg.template)
    records = [dict(instruction=f'say {w}', input='', output=w) for w in ('yes', 'no', 'perhaps')]
    before = plain(records)
    shake(value)
    assert reward_of(records) == pytest.approx(before, abs=1e-5)
    assert embedding(value) != embedding(policy)


def count_words(records):
    return [float(len(r['output'].split())) for r in records]


@pytest.mark.parametrize('reward', ['function', 'of_another_vocabulary'])
def test_a_value_model_on_the_policys_weights_is_not_taken_for_the_reward(base, tmp_path, reward):
    spec = f'{__name__}:count_words'
    if reward == 'of_another_vocabulary':
        spec = str(tmp_path/'other')
        shutil.copytree(base/'reward_model'/'model', spec)
        tokenizer = load_tokenizer(spec)
        tokenizer.add_tokens(['<new>'])
        tokenizer.save_pretrained(spec)
    cfg = config('ppo', base, reward_model=spec)
    policy = load_policy(cfg.policy, cfg, train=True)
    value = ppo.value_model(cfg, policy)
    assert value.model is policy.model
    records = [dict(instruction='say it', input='', output=w) for w in ('yes', 'no no', 'perhaps')]
    found = ppo.reward_beside(policy, value, cfg)(records)
    assert found == pytest.approx(ppo.reward(spec, cfg, cfg.template)(records)) and len({*found}) > 1


@pytest.mark.parametrize('name', ['ppo', 'dpo', 'quark', 'rrhf', 'binary_feedback', 'reward_model',
                                  'sft'])
def test_resumed_with_adapters(base, rewarded, tmp_path, name, monkeypatch):
    "A run cut off after a checkpoint ends like one that was not; its files are read back."
    more = dict(ppo=dict(reward_model=rewarded), quark=dict(best_quantile_only=False),
                dpo=dict(max_instances=60), rrhf=dict(max_instances=60)).get(name, {})
    cfgs = [config(name, base, out=str(tmp_path/k/name), gradient_checkpointing=True,
                   checkpoint_every=2, **more) for k in 'ab']
    train = tiny.main(name)
    train(cfgs[0])
    log = Trainer.log
    def stop(self, **figures):
        log(self, **figures)
        if self.step == 3:
            raise KeyboardInterrupt
    with monkeypatch.context() as m, contextlib.suppress(KeyboardInterrupt):
        m.setattr(Trainer, 'log', stop)
        train(cfgs[1])
    train(cfgs[1])
    a, b = (load_file(tmp_path/k/name/'adapter/adapter_model.safetensors') for k in 'ab')
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(v.abs().max() > 0 for k, v in a.items() if 'lora_B' in k)
    load = load_scalar if name == 'reward_model' else load_policy
    whole, alone = (load(str(tmp_path/'a'/name/part), cfgs[0]).model.state_dict()
                    for part in ('', 'adapter'))
    assert whole.keys() == alone.keys()
    assert all(torch.equal(whole[k], alone[k]) for k in whole)
    if name in ('quark', 'binary_feedback'):
        assert any(k.endswith('rows') for k in a)
    assert sum(p.stat().st_size
               for p in (tmp_path/'a'/name).glob('model-*/adapter_model.safetensors')) < 500_000


def test_expert_iteration_trains_adapters(base, tmp_path, monkeypatch):
    from alpaca_farm import expert_iteration
    monkeypatch.setattr('alpaca_farm.run.jobs.run_jobs', tiny.run_here)
    cfg = config('expert_iteration', base, out=str(tmp_path/'expert'), rounds=2)
    expert_iteration.train(cfg)
    assert base_of(tmp_path/'expert/round_1/sft/adapter').endswith('sft/model')
    # a LoRA run on a LoRA run
    assert base_of(tmp_path/'expert/round_2/sft/adapter').endswith('round_1/sft/model')
    load_policy(cfg.out, cfg)


def test_an_adapters_folder_as_peft_writes_it_is_told_what_it_lacks(elsewhere):
    folder, make = elsewhere
    make()
    (folder/'config.json').unlink()
    with pytest.raises(FileNotFoundError, match='config.json'):
        load_model(AutoModelForCausalLM, str(folder), torch.float32)


WRITE = """
import sys, tiny
from alpaca_farm.model.policy import add_adapter, lora_config, save_adapter
from alpaca_farm.run.settings import HardwareConfig
policy = add_adapter(tiny.policy('llama'), 'policy', lora_config(HardwareConfig(lora_rank=3)))
save_adapter(policy, sys.argv[1])
"""


def test_equal_adapters_are_equal_bytes(tmp_path):
    "In every process, however it hashes."
    policy = add_adapter(tiny.policy('llama'), 'policy', lora_config(config_of(lora_rank=3)))
    save_adapter(policy, tmp_path/'0')
    env = tiny.environment(PYTHONPATH=tiny.PATHS)
    subprocess.run([sys.executable, '-c', WRITE, tmp_path/'1'], check=True, env=env)
    for name in ('adapter_model.safetensors', 'adapter_config.json', 'config.json'):
        assert (tmp_path/'0'/name).read_bytes() == (tmp_path/'1'/name).read_bytes(), name
