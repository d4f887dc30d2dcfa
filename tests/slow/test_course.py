"""The course: PPO in one file is the library's, and exercises are graded as they deserve."""
import torch

import tiny
from alpaca_farm import ppo
from alpaca_farm.core.model.models import load_policy
from alpaca_farm.core.run.files import read_json


def single(base, tmp_path):
    "The names that `ppo_single` defines when it is executed on the tiny world."
    names = {}
    given = dict(sft=str(base/'sft'/'model'), reward_model=str(base/'reward_model'/'model'),
                 prompts=str(base/'world'/'unlabeled.json'), out=str(tmp_path/'single'),
                 steps=2, rollouts=16, batch_size=8, max_new_tokens=12)
    for cell in read_json(tiny.ROOT/'nbs'/'ppo_single.ipynb')['cells']:
        if cell['cell_type'] != 'code' or 'axes' in ''.join(cell['source']): continue
        exec(''.join(cell['source']), names)
        if 'parameters' in cell['metadata'].get('tags', []): names.update(given)
    return names


def test_ppo_in_one_file_is_the_librarys(base, tmp_path):
    "On the same rollout of a trained policy: advantages, loss, and gradients of both models."
    its = single(base, tmp_path)
    policy, value = its['policy'], its['value']
    cfg = ppo.PPOConfig(**tiny.settings('ppo', base, kl_coef=its['kl_coef']))
    ours = load_policy(cfg.policy, cfg, train=True)
    reference = load_policy(cfg.policy, cfg, train=True, frozen=True)
    scalar = ppo.value_model(cfg, ours)
    ours.model.load_state_dict(policy.state_dict())
    scalar.model.base_model.load_state_dict(value.base_model.state_dict())
    scalar.score.load_state_dict(value.score.state_dict())
    batch = its['rollout'](its['instructions'][:12])
    score = (its['scores'](batch) - its['center'])/its['spread']
    mine, kl = its['experience'](batch, score)
    theirs, figures = ppo.experience(ours, reference, scalar, batch, score, cfg)
    assert abs(kl) > 1e-4 and abs(kl - figures['kl']) < 1e-4
    for name in ('old_logp', 'old_values', 'returns', 'advantages'):
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-4)
    for k in ('old_logp', 'old_values'):   # as if the models had moved, so that something is clipped
        moved = .3*torch.randn(theirs[k].shape)*theirs['response']
        mine[k] = mine[k] + moved
        theirs[k] = theirs[k] + moved
    loss = its['ppo_loss'](mine)
    loss.backward()
    other = ppo.ppo_loss(ours, scalar, theirs, cfg)['loss']
    other = (other*theirs['weight']).sum()/theirs['weight'].sum()
    other.backward()
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-6)
    pairs = [*zip(policy.parameters(), ours.model.parameters(), strict=True),
             (value.score.weight, scalar.score.weight)]
    for one, two in pairs:
        assert one.grad.norm() > 0 and (one.grad - two.grad).norm() < 1e-3*two.grad.norm()


def test_ppo_in_one_file_is_short_and_stands_alone():
    code = [''.join(c['source']) for c in read_json(tiny.ROOT/'nbs'/'ppo_single.ipynb')['cells']
            if c['cell_type'] == 'code']
    text = '\n'.join(code)
    assert 'alpaca_farm' not in text and len(text.splitlines()) < 250
