"""Quark: its terms against whole distributions, the reward tokens, and runs."""
import copy

import pytest
import torch

import tiny
from alpaca_farm import quark
from alpaca_farm.data.text import collate, encode_prompts
from alpaca_farm.model.control import add_tokens, prepend_tokens
from alpaca_farm.model.generation import generate
from alpaca_farm.model.loading import load_tokenizer
from alpaca_farm.model.logprobs import load_policy, logprobs
from alpaca_farm.quark import _add_reward_tokens, quantiles, QuarkConfig
from alpaca_farm.quark import response_terms, token_terms
from alpaca_farm.run.runs import read_log, read_summary
from alpaca_farm.train.answers import AnswerConfig, load_splits
from tiny import randn

torch.set_num_threads(1)
BIRD = dict(instruction='Name a bird.')


def train(base, out, **more):
    "The log of a run, and its settings."
    cfg = tiny.run('quark', base, out, **more).cfg
    return read_log(out), cfg


def test_gradients_of_the_terms():
    logits = randn(3, 6).requires_grad_()
    ref = randn(3, 6, seed=1)
    tokens = torch.tensor([0, 3, 5])
    assert torch.autograd.gradcheck(lambda x: token_terms(x, ref, tokens), logits)
    assert token_terms(logits.bfloat16(), ref.bfloat16(), tokens)[1].dtype == torch.float32


@pytest.fixture(scope='module')
def pair(models):
    "A policy with two reward tokens, its reference, and the tokens."
    reference = copy.deepcopy(models.policy)
    for p in reference.model.parameters():
        p.data *= 3 if p.ndim == 2 else 1
    policy = copy.deepcopy(reference)
    torch.manual_seed(0)
    for p in policy.model.parameters():
        p.data += .02*torch.randn_like(p)
    return policy, reference, add_tokens(policy, ['<a>', '<b>'])


@pytest.mark.parametrize('side', ['left', 'right'])
@torch.no_grad()
def test_terms_are_those_of_whole_distributions(models, pair, side):
    "Of each answer alone, whatever it is padded with; the reference reads no token."
    policy, reference, (token, _) = pair
    size = len(models.tokenizer)
    answers = models.answers[:6]
    plain = models.prompts[:6]
    asked = prepend_tokens(plain, token, models.tokenizer, 2)
    batch = collate(asked, answers, models.tokenizer.pad_token_id, side)
    found = response_terms(policy, reference, batch, size, .7)

    def log_softmax(model, prompt, answer):
        logits = model.model(torch.tensor([prompt + answer])).logits[0, :, :size].double()
        return (logits[len(prompt) - 1:-1]/.7).log_softmax(1)
    for i, answer in enumerate(answers):
        logp = log_softmax(policy, asked[i], answer)
        ref = log_softmax(reference, plain[i], answer)
        want = dict(kl=(logp.exp()*(logp - ref)).sum(1), entropy=-(logp.exp()*logp).sum(1),
                    logp=logp[range(len(answer)), answer])
        for name, x in want.items():
            own = found[name][i][batch['response'][i].bool()].double()
            torch.testing.assert_close(own, x, rtol=1e-4, atol=2e-5)
    assert found['kl'].max() > .01


def test_untouched_vocabulary(models):
    policy = copy.deepcopy(models.policy)
    plain = models.tokenizer
    size = len(plain)
    was = models.policy.model.get_input_embeddings().weight
    cfg = QuarkConfig(best_quantile_only=False, num_quantiles=3, jitter=.5, token_times=2)
    ids, words = _add_reward_tokens(policy, cfg)
    table = policy.model.get_input_embeddings().weight
    assert ids == [size, size + 1, size + 2]
    assert words == size
    assert len(table) == size + 3
    assert torch.equal(table[:size], was)
    assert policy.model.generation_config.suppress_tokens == ids
    prompts = prepend_tokens(encode_prompts([BIRD], plain), ids[0], plain, 2)
    assert encode_prompts([BIRD], policy.tokenizer) == prompts
    with pytest.raises(ValueError, match='control tokens'):
        _add_reward_tokens(policy, cfg)
    assert _add_reward_tokens(models.policy, QuarkConfig()) == ([], len(was))


@pytest.mark.slow
def test_run_with_tokens(base, tmp_path):
    out = tmp_path/'quark'
    log, _ = train(base, out, best_quantile_only=False, clear_pool=False,
                   annotators=str(base/'world'/'pool.json'))
    assert [r['pool'] for r in log] == [16, 32, 48]
    assert ['reward_worst' in r for r in log] == [False, True, True]
    assert abs(log[0]['kl']) < 1e-4   # first asked without a token
    assert log[-1]['token_kl'] > 0
    assert {'best_step', 'val_win_rate'} <= set(read_summary(out))
    policy = load_policy(str(out), AnswerConfig(**tiny.SAMPLING))
    plain = load_tokenizer(str(base/'sft'))
    token = policy.tokenizer.convert_tokens_to_ids('<reward_0>')
    prompts = encode_prompts([BIRD], policy.tokenizer)
    assert prompts == prepend_tokens(encode_prompts([BIRD], plain), token, plain, 2)
    written = generate(policy, prompts*64, max_new_tokens=30)
    assert max(max(s.tokens) for s, in written) < len(plain), 'one is never written'


def test_first_update_is_plain_imitation_of_the_best(base, tmp_path, monkeypatch):
    "No KL yet, and the loss is the mean -log p of the best quarter's tokens, EOS included."
    kept, real = {}, quark.rollout_pool
    monkeypatch.setattr(quark, 'rollout_pool', lambda *a: kept.setdefault('pool', real(*a)))
    more = dict(steps=1, updates=1, batch_size=4, eval_split='', save_every=0)
    (first,), cfg = train(base, tmp_path/'quark', **more)
    policy = load_policy(cfg.policy, cfg)
    tokenizer = policy.tokenizer
    asked, = load_splits(cfg, 'split')
    _, prompts = quark.fitting_prompts(asked, tokenizer, cfg)
    pool = kept['pool']
    answers = pool.answers()
    best = (quantiles(pool.scores, 4) == 0).nonzero()[:, 0].tolist()
    b = collate([prompts[pool.prompts[i]] for i in best], [answers[i] for i in best], 0)
    with torch.no_grad(): want = -(logprobs(policy, b).sum()/b['response'].sum()).item()
    assert len(best) == 4 and first['nll'] == pytest.approx(want, rel=1e-5) == first['loss']
    assert abs(first['token_kl']) < 1e-6
