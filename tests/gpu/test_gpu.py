"What a GPU computes is what the CPU computes; skipped where there is none."
import pytest
import tiny
import torch
from alpaca_farm import sft
from alpaca_farm.data.records import load_records
from alpaca_farm.data.text import encode_prompts
from alpaca_farm.model.generation import generate
from alpaca_farm.model.logprobs import load_policy
from alpaca_farm.run.execution import run_job, start_process
from alpaca_farm.run.paths import notebooks_folder
from alpaca_farm.run.runs import read_log, read_summary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='there is no GPU')
METHODS = 'sft', 'reward_model', 'dpo', 'ppo'


def run(name, base, out, **more):
    return tiny.run(name, base, out, **dict(device='cuda', dtype='float32') | more)


@pytest.mark.parametrize('name', ['sft', 'reward_model', 'dpo'])
def test_the_losses_are_those_of_the_cpu(base, tmp_path, name):
    logs = [read_log(run(name, base, tmp_path/device, device=device).folder)
            for device in ('cpu', 'cuda')]
    for a, b in zip(*logs, strict=True):
        assert a['loss'] == pytest.approx(b['loss'], rel=2e-3)


@pytest.mark.parametrize('more', [
    dict(dtype='bfloat16'), dict(dtype='bfloat16', lora_rank=4), dict(dtype='float16'),
    dict(gradient_checkpointing=True)], ids=str)
@pytest.mark.parametrize('name', METHODS)
def test_every_precision_trains(base, tmp_path, name, more):
    folder = run(name, base, tmp_path/'run', **more).folder
    assert all(r['loss'] == r['loss'] for r in read_log(folder))
    assert read_summary(folder)['device_memory_gb'] > 0


def test_greedy_answers_are_those_of_transformers(base):
    cfg = sft.SFTConfig(**tiny.settings('sft', base, device='cuda', dtype='float32'))
    policy = load_policy(cfg.policy, cfg)
    tokenizer = policy.tokenizer
    prompts = encode_prompts(load_records(str(base/'world'), 'eval', n=8), tokenizer)
    ours = generate(policy, prompts, max_new_tokens=20, temperature=0.)
    for prompt, (sample,) in zip(prompts, ours):
        ids = torch.tensor([prompt], device=policy.device)
        theirs = policy.model.generate(ids, max_new_tokens=20, do_sample=False,
                                 pad_token_id=tokenizer.pad_token_id)[0, len(prompt):]
        assert sample.tokens == theirs.tolist()[:len(sample.tokens)]


def test_a_run_of_a_farm_can_use_the_card(base, tmp_path):
    "It is forked from a process that has loaded the libraries."
    given = dict(tiny.settings('sft', base, device='cuda'), out=str(tmp_path/'run'))
    start_process(run_job, notebooks_folder()/'sft.ipynb', tmp_path/'run.ipynb', given,
                  tmp_path/'run.txt', tiny.ROOT, {}).result()
    assert read_summary(tmp_path/'run')['device_memory_gb'] > 0
