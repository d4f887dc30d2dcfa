"Every method on every family of models: small random weights, one batch or a short run."
import functools
import logging
import tempfile

import pytest
import torch
from tokenizers import processors

import tiny
from alpaca_farm import dpo, ppo, reward_model, sft
from alpaca_farm.data.text import collate, encode, rollout_batch
from alpaca_farm.model.functional import token_logprobs
from alpaca_farm.model.generation import generate
from alpaca_farm.model.logprobs import load_policy, load_scalar, sequence_scores, values
from alpaca_farm.model.policy import Policy
from alpaca_farm.model.rewards import reward
from alpaca_farm.train.trainer import answer_batch

torch.set_num_threads(1)
logging.getLogger('transformers').setLevel(logging.ERROR)
RECORDS = [dict(instruction=f'{i}?' + 'x' * (i % 3), output=f'{i}!' + 'y' * (i % 2), other='no')
           for i in range(6)]
CFG = sft.SFTConfig(device='cpu', dtype='float32')
near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@functools.cache
def data():
    rows = [{k: r[k] for k in ('instruction', 'output')} for r in RECORDS]
    return tiny.splits(tempfile.mkdtemp(), rows)


@functools.cache
def checkpoint(name):
    "The folder of a random policy with a tokenizer."
    folder = tempfile.mkdtemp()
    tiny.family(name, vocab_size=260).save_pretrained(folder)
    tiny.letters().save_pretrained(folder)
    return folder


def encoded(tokenizer):
    _, prompts, (answers, others) = encode(RECORDS, ('output', 'other'), tokenizer, 100)
    return prompts, answers, others


def both_sides(prompts, answers):
    "Batches of the same rows: padded right, left, as rollouts and more; and each row alone."
    right = collate(prompts, answers, 0)
    left = collate(prompts, answers, 0, 'left')
    rollout = rollout_batch(prompts, answers, 0)
    wide = {k: torch.nn.functional.pad(v, (0, 5)) for k, v in right.items()}
    return [right, left, rollout, wide], [collate([p], [a], 0) for p, a in zip(prompts, answers)]


@pytest.mark.parametrize('name', tiny.FAMILIES)
def test_samples(name):
    "Greedy answers are those of `model.generate`; log-probs are those of the model's own logits."
    policy = load_policy(checkpoint(name), CFG)
    prompts = encoded(policy.tokenizer)[0]
    for p in prompts:   # one BOS, then the template's text
        assert p.count(1) == 1
        assert (p[0], p[-1]) == (1, 3)
    policy.forward_batch = 4
    samples = generate(policy, prompts, max_new_tokens=8, temperature=0)
    for p, (sample,) in zip(prompts, samples):
        ids = torch.tensor([p])
        rows = policy.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids),
                                     max_new_tokens=8, do_sample=False, pad_token_id=0)
        whole = rows[0, len(p):].tolist()
        if 2 in whole:
            whole = whole[:whole.index(2) + 1]
        assert sample.tokens == whole
        with torch.no_grad():
            logits = policy.model(torch.tensor([p + whole])).logits[0, len(p) - 1:-1]
        near(torch.tensor(sample.logprobs), token_logprobs(logits, torch.tensor(whole)))


@pytest.mark.parametrize('name', tiny.FAMILIES)
def test_sft(name):
    "The loss of transformers, whatever the padding; a few steps write the answers with EOS."
    policy = load_policy(checkpoint(name), CFG, train=True)
    prompts, answers, _ = encoded(policy.tokenizer)
    for a in answers:
        assert a.index(2) == len(a) - 1
        assert 0 not in a
    batches, alone = both_sides(prompts, answers)
    with torch.no_grad():
        rows = []
        for b in alone:
            learned = torch.where(b['response'] > 0, b['ids'], -100)
            rows.append(policy.model(b['ids'], labels=learned).loss)
        for b in batches:
            loss = sft.sft_loss(policy, b)['loss']
            near(loss.sum(1)/b['response'].sum(1), torch.stack(rows))
            assert not loss[b['response'] == 0].any()
    optimizer = torch.optim.Adam(policy.model.parameters(), 1e-2)
    for _ in range(60):
        loss = sft.sft_loss(policy, batches[0])['loss'].sum()/batches[0]['response'].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < .05:
            break
    samples = generate(policy, prompts, max_new_tokens=8, temperature=0)
    assert [s.tokens for s, in samples] == answers


@pytest.mark.parametrize('name', tiny.FAMILIES)
def test_reward_model(name, tmp_path):
    "Scores do not depend on padding and are those of the saved model and its class."
    model = load_scalar(checkpoint(name), CFG, 'normal', train=True)
    prompts, answers, others = encoded(model.tokenizer)
    batches, alone = both_sides(prompts, answers)
    for part in (model.model, model.tokenizer):
        part.save_pretrained(tmp_path)
    again = load_scalar(str(tmp_path), CFG)
    with torch.no_grad():
        rows = torch.cat([sequence_scores(model, b['ids'], b['mask']) for b in alone])
        assert rows.std() > 1e-3
        for b in batches:
            near(sequence_scores(again, b['ids'], b['mask'], b['response']), rows)
        near(model.model(input_ids=alone[0]['ids']).logits[0, 0], rows[0])
    batch = answer_batch(prompts, (answers, others), range(6), 0)
    batch |= dict(label=torch.zeros(6), margin=torch.zeros(6))
    reward_model.reward_loss(model, batch)['loss'].sum().backward()
    for weight in (model.score.weight, model.model.get_input_embeddings().weight):
        assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize('name', tiny.FAMILIES)
def test_dpo(name, tmp_path):
    "Loss log 2 before a step that prefers the chosen answers."
    cfg = dpo.DPOConfig(policy=checkpoint(name), preferences=data(), data=data(),
                        out=str(tmp_path/'dpo'), device='cpu', batch_size=6, epochs=1,
                        beta=.1, max_length=128, held_out=0)
    policy = load_policy(cfg.policy, cfg, train=True)
    labelled = dpo.LabelledAnswers(cfg, policy.tokenizer, *dpo.read_labels(cfg))
    labelled.add_reference(policy)
    batch = labelled.labelled_batch(labelled.order[0])
    figures = dpo.dpo_step(policy, batch, cfg)
    near(figures['loss'], torch.full((6,), 2.).log())
    figures['loss'].sum().backward()
    with torch.no_grad():
        for p in policy.model.parameters():
            p -= 0 if p.grad is None else 1e-3 * p.grad
        assert (dpo.dpo_step(policy, batch, cfg)['loss']).mean() < figures['loss'].mean()


@pytest.mark.parametrize('name', tiny.FAMILIES)
def test_ppo(name):
    "Ratios of 1 and values whatever the padding; gradients reach the policy and the value model."
    cfg = ppo.PPOConfig(policy=checkpoint(name), reward_model='tiny:letters', data=data(),
                        device='cpu', rollouts=6, batch_size=6, kl_coef=0., temperature=1.)
    policy = load_policy(cfg.policy, cfg, train=True)
    tokenizer = policy.tokenizer
    value = ppo.value_model(cfg, policy)
    torch.nn.init.normal_(value.score.weight)
    prompts, answers, _ = encoded(tokenizer)
    batches, alone = both_sides(prompts, answers)
    batch, _ = ppo.experience(policy, policy, value, batches[2], torch.arange(6.), cfg)
    with torch.no_grad():
        rows = torch.cat([values(value, b)[b['response'] > 0] for b in alone])
        for b in batches:
            near(values(value, b)[b['response'] > 0], rows)
    near(batch['old_values'][batch['response'] > 0], rows)
    figures = ppo.ppo_loss(policy, value, batch, cfg)
    near(figures['ratio'], torch.ones_like(figures['ratio']))
    (figures['loss'] * batch['weight']).sum().backward()
    for m in (policy.model.base_model, value.model.base_model):
        assert m.get_input_embeddings().weight.grad.abs().sum() > 0


def encoder(folder, name='bert'):
    from transformers import AutoConfig, AutoModelForSequenceClassification
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **tiny.SIZE | dict(vocab_size=260), num_labels=1,
                                  **dict(relative_attention=True, pos_att_type=['p2c', 'c2p'])
                                  if 'deberta' in name else {})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for p in model.parameters():
        p.data.normal_(std=.3)
    model.save_pretrained(folder)
    tokenizer = tiny.letters(None, '<mask>')
    pair = dict(single='<s> $A </s>', pair='<s> $A </s> $B:1 </s>:1',
                special_tokens=[('<s>', 1), ('</s>', 2)])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**pair)
    tokenizer.eos_token, tokenizer.sep_token = None, '</s>'
    tokenizer.save_pretrained(folder)
    return str(folder), model, tokenizer


@pytest.mark.parametrize('name', ['bert', 'deberta-v2'])
def test_an_encoder_scores(name, tmp_path, capsys):
    "Each score is that of the pair alone; special tokens in a text are text."
    folder, model, tokenizer = encoder(tmp_path, name)
    records = RECORDS + [dict(instruction='say </s>', input='x', output='<s> y' * 5)]
    for r, score in zip(records, reward(folder, CFG)(records)):
        text = '\n\n'.join(filter(None, (r['instruction'], r.get('input'))))
        with torch.no_grad():
            near(model(**tokenizer(text, r['output'], split_special_tokens=True,
                                   return_tensors='pt',
                                   return_token_type_ids=True)).logits[0, 0].item(), score)
    cfg = ppo.PPOConfig(policy=checkpoint('llama'), reward_model=folder, data=data(), device='cpu')
    value = ppo.value_model(cfg, Policy(torch.nn.Module()))
    assert 'another vocabulary than the policy' in capsys.readouterr().out
    assert value.config.model_type == 'llama'


def test_a_model_of_another_kind_is_refused_by_name(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration
    T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, num_layers=1, num_heads=2,
                                        d_ff=16)).save_pretrained(tmp_path/'t5')
    with pytest.raises(ValueError, match='t5: .*T5Config'):
        load_policy(str(tmp_path/'t5'), CFG)


def test_a_model_that_cannot_be_sampled_is_refused_before_training(tmp_path, monkeypatch):
    "Mamba's cache is another; it can be read, so that it can become a reward model."
    monkeypatch.setattr('alpaca_farm.train.trainer.Trainer.update', lambda *_: 1/0)
    for name, more in dict(sft={}, dpo=dict(preferences=f'{data()}/preferences.json')).items():
        cfg = tiny.config(name, policy=checkpoint('mamba'), data=data(), out=str(tmp_path/'out'),
                          device='cpu', max_new_tokens=8, **more)
        with pytest.raises(ValueError, match='MambaForCausalLM'):
            tiny.main(name)(cfg)
    assert not (tmp_path/'out').exists()
    model = load_scalar(checkpoint('mamba'), CFG, 'normal')
    batches, alone = both_sides(*encoded(model.tokenizer)[:2])
    with torch.no_grad():
        rows = torch.cat([sequence_scores(model, b['ids'], b['mask']) for b in alone])
        near(sequence_scores(model, batches[0]['ids'], batches[0]['mask']), rows)
