"""Quark: its terms against whole distributions, the reward tokens, and runs."""
import copy
import shutil
from dataclasses import replace

import pytest
import torch

import tiny
from alpaca_farm import quark
from alpaca_farm.data.records import load_records
from alpaca_farm.data.text import collate, encode_prompts
from alpaca_farm.model.control import add_tokens, prepend_tokens
from alpaca_farm.model.generation import generate
from alpaca_farm.model.loading import load_tokenizer
from alpaca_farm.model.logprobs import load_policy, logprobs
from alpaca_farm.model.policy import Policy
from alpaca_farm.quark import _add_reward_tokens, quantiles, QuarkConfig
from alpaca_farm.quark import response_terms, token_terms
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_log, read_summary
from alpaca_farm.train.answers import AnswerConfig, log_ratios, SampleConfig
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


@torch.no_grad()
def test_kl_is_that_of_whole_distributions(models):
    "Of each answer alone, though padded on the left; the reference reads no token."
    reference = models.policy
    policy = copy.deepcopy(reference)
    for p in policy.model.parameters():
        p *= 1.3
    token, = add_tokens(policy, ['<a>'])
    size = len(models.tokenizer)
    answers = models.answers[:6]
    plain = models.prompts[:6]
    asked = prepend_tokens(plain, token, models.tokenizer, 2)
    batch = collate(asked, answers, models.tokenizer.pad_token_id, 'left')
    found = response_terms(policy, reference, batch, size, .7)['kl']

    def log_softmax(model, prompt, answer):
        logits = model.model(torch.tensor([prompt + answer])).logits[0, :, :size].double()
        return (logits[len(prompt) - 1:-1]/.7).log_softmax(1)
    for i, answer in enumerate(answers):
        logp = log_softmax(policy, asked[i], answer)
        ref = log_softmax(reference, plain[i], answer)
        own = found[i][batch['response'][i].bool()].double()
        torch.testing.assert_close(own, (logp.exp()*(logp - ref)).sum(1), rtol=1e-4, atol=2e-5)
    assert found.max() > .01


def test_each_quantile_has_a_token_behind_the_vocabulary(models):
    policy = copy.deepcopy(models.policy)
    size = len(models.tokenizer)
    cfg = QuarkConfig(best_quantile_only=False, num_quantiles=3)
    assert _add_reward_tokens(policy, cfg) == ([size, size + 1, size + 2], size)
    with pytest.raises(ValueError, match='control tokens'):
        _add_reward_tokens(policy, cfg)
    assert _add_reward_tokens(models.policy, QuarkConfig()) == ([], size)


def test_a_policy_with_reward_tokens_is_no_nat_from_itself(models):
    "Its tokens are left out of what it samples, and of its log-probs."
    policy = replace(models.policy, model=copy.deepcopy(models.policy.model),
                     tokenizer=copy.deepcopy(models.tokenizer))
    ids = add_tokens(policy, ['<a>', '<b>', '<c>'])
    cfg = SampleConfig(max_new_tokens=12)
    samples = [s for s, in generate(policy, models.prompts, max_new_tokens=12)]
    assert log_ratios(policy, models.prompts, samples, cfg) == pytest.approx([0.]*16, abs=1e-4)
    batch = collate(models.prompts[:1], [ids], models.tokenizer.pad_token_id)
    assert logprobs(policy, batch).isfinite().all()   # of an answer that has them nevertheless
    pad = models.tokenizer.pad_token_id
    alone = collate(models.prompts[:1], [samples[0].tokens], pad)
    beside = collate(models.prompts[:2], [samples[0].tokens, ids], pad)
    one, other = (logprobs(policy, b)[0].sum().item() for b in (alone, beside))
    assert one == pytest.approx(other, abs=1e-4)   # whatever else is in the batch


@pytest.mark.slow
def test_reward_tokens_do_not_count_against_max_prompt_but_against_positions(base, tmp_path):
    tokenizer = load_tokenizer(str(base/'sft'))
    asked = []
    for split in ('unlabeled', 'eval'):
        asked += encode_prompts(load_records(str(base/'world'), split), tokenizer)
    more = dict(best_quantile_only=False, token_times=8, max_prompt=max(map(len, asked)))
    train(base, tmp_path/'quark', **more)
    assert read_summary(tmp_path/'quark')['too_long'] == 0
    assert len(read_json(tmp_path/'quark'/'outputs.json')) == tiny.SAMPLING['eval_instances']
    short = tmp_path/'short'   # a model that reads a prompt and its answer, but no token more
    shutil.copytree(base/'sft'/'model', short)
    config = read_json(short/'config.json')
    config['max_position_embeddings'] = more['max_prompt'] + 12
    tiny.write(short/'config.json', config)
    with pytest.raises(ValueError, match='max_prompt . max_new_tokens'):
        train(base, tmp_path/'refused', policy=str(short), max_new_tokens=12, **more)
    assert not (tmp_path/'refused'/'log.jsonl').exists()


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
    more = dict(steps=1, updates=1, batch_size=4, temperature=.7, eval_split='', save_every=0)
    (first,), cfg = train(base, tmp_path/'quark', **more)
    policy = load_policy(cfg.policy, cfg)
    tokenizer = policy.tokenizer
    splits = quark.load_splits(cfg, *cfg.splits)
    _, prompts = quark.fitting_prompts(splits[0], tokenizer, cfg)
    pool = kept['pool']
    answers = pool.answers()
    best = (quantiles(pool.scores, 4) == 0).nonzero()[:, 0].tolist()
    b = collate([prompts[pool.prompts[i]] for i in best], [answers[i] for i in best], 0)
    with torch.no_grad():
        want = -(logprobs(policy, b, .7).sum()/b['response'].sum()).item()
    assert len(best) == 4 and first['nll'] == pytest.approx(want, rel=1e-5) == first['loss']
    assert abs(first['token_kl']) < 1e-6


def test_terms_leave_out_tokens_that_the_policy_never_writes():
    "As sampling does, where a policy has control tokens already."
    policy = Policy(tiny.family('llama', vocab_size=260), tiny.letters())
    add_tokens(policy, ['<good>', '<bad>'], 0, 3.)
    samples = [group[0] for group in generate(policy, [[1, 5, 6]]*4, max_new_tokens=6)]
    batch = collate([[1, 5, 6]]*4, [s.tokens for s in samples], 0)
    size = len(policy.model.get_output_embeddings().weight)
    with torch.no_grad():
        found = response_terms(policy, policy, batch, size)
    drawn = torch.tensor([sum(s.logprobs) for s in samples])
    torch.testing.assert_close(found['logp'].sum(1), drawn, atol=1e-3, rtol=0)
    assert abs(found['kl']).max() < 1e-5
    assert found['entropy'].isfinite().all()


def test_rows_that_pad_a_table_are_never_written():
    "A reward token's id is the length of the tokenizer, and rows of the table go on behind it."
    policy = Policy(tiny.family('llama', vocab_size=320), tiny.letters())
    ids = add_tokens(policy, ['<reward_0>', '<reward_1>'], 0, 3.)
    group, = generate(policy, [[1, 5, 6]], n=8, max_new_tokens=6)
    assert all(token < ids[0] for sample in group for token in sample.tokens)
