"Numbers that must not depend on micro-batches; padding is the matter of test_families."
import pytest
import torch
from safetensors.torch import load_file

import tiny
from alpaca_farm.run.runs import read_log

torch.set_num_threads(1)


# Adam divides by the size of a gradient: keep rounding noise below what it divides by
STEADY = dict(adam_eps=1e-4)
SHORT = dict(sft=dict(max_instances=40, val_split='', eval_split=''), reward_model={},
             dpo=dict(max_instances=40, eval_split=''),
             # with seed 0, rounding changes one sampled token
             ppo=dict(annotators='', ppo_epochs=2, save_every=0, seed=1))
SHORT |= {'dpo kto': SHORT['dpo'] | dict(loss_type='kto'),
          'dpo simpo': SHORT['dpo'] | dict(loss_type='simpo', beta=2.)}
SHORT |= {f'ppo {name}': SHORT['ppo'] | dict(advantage=name, group_size=4, missing_eos='')
          for name in ('grpo', 'rloo')}
SHORT['quark'] = dict(eval_split='', entropy_coef=.01, best_quantile_only=False)
SHORT['binary_feedback'] = dict(max_instances=24, epochs=1, val_split='', eval_split='')


@pytest.mark.parametrize('name', SHORT)
def test_accumulation(base, tmp_path, name):
    "A batch of 8 in one pass, in eight, and in uneven parts: the same losses and weights."
    notebook = name.split()[0]
    runs = []
    for micro in (8, 1, 3):
        more = SHORT[name] | STEADY | dict(batch_size=8, micro_batch_size=micro)
        out = tiny.run(notebook, base, tmp_path/str(micro)/notebook, **more).folder
        runs.append((read_log(out), load_file(out/'model'/'model.safetensors')))
    whole, weights = runs[0]
    assert len(whole) >= 3
    start = load_file(base/('world' if notebook == 'sft' else 'sft')/'model'/'model.safetensors')
    moved = 0
    for k, w in start.items():   # tokens of control are no part of what it starts from
        if k in weights:
            moved = max(moved, (weights[k][:len(w)] - w).abs().max().item())
    assert moved > 5e-4
    for log, others in runs[1:]:
        for k, w in weights.items():
            torch.testing.assert_close(others[k], w, rtol=0, atol=1e-5)
        for a, b in zip(whole, log, strict=True):
            assert a.keys() == b.keys()
            for k in a.keys() - {'wall'}:
                # DPO starts at its reference: the first margins are 0, with either sign by rounding
                if (notebook, k, a['step']) == ('dpo', 'accuracy', 1): continue
                assert a[k] == pytest.approx(b[k], rel=2e-4, abs=2e-5), (a['step'], k)
