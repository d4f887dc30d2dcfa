"Binary feedback: labels that are read, and whether the policy follows the token."

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import tiny
from alpaca_farm import binary_feedback
from alpaca_farm.binary_feedback import BAD, BinaryFeedbackConfig, GOOD
from alpaca_farm.data.records import load_records
from alpaca_farm.data.text import encode_prompts
from alpaca_farm.model.control import prepend_tokens
from alpaca_farm.model.logprobs import load_policy
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_summary
from alpaca_farm.train.answers import answering, log_ratios, sample

torch.set_num_threads(1)


def given(base, **more):
    return BinaryFeedbackConfig(**tiny.settings('binary_feedback', base, **more))


def test_feedme_without_a_step_is_the_policy_itself(base, tmp_path):
    cfg = given(base, out=str(tmp_path/'still'), method='feedme', learning_rate=0.)
    binary_feedback.train(cfg)
    s = read_summary(cfg.out)
    assert s['kl'] == pytest.approx(0, abs=1e-4)
    assert s['val_win_rate'] == 50
    assert s['labels'] == 48
    assert s['effect_good'] == s['effect_bad'] == 0
    assert s['accuracy'] == .5


PHRASES = ('A bear.', 'The duck.')


@pytest.fixture(scope='module')
def conditioned(base, tmp_path_factory):
    "A run whose label is in the text: of two phrases in answer to everything, one is always good."
    folder = tmp_path_factory.mktemp('conditioned')
    asked = {r['instruction'] for split in ('preference', 'unlabeled', 'sft')
             for r in load_records(str(base/'world'), split)}
    records = [dict(instruction=text, input='', output=output, label=label)
               for text in sorted(asked) for output, label in zip(PHRASES, (1, 0))]
    cfg = given(base, out=str(folder/'run'), preferences=tiny.write(folder/'clean.json', records),
                epochs=3, learning_rate=5e-3, token_times=4, held_out=20, eval_every=50)
    binary_feedback.train(cfg)
    return cfg


def test_the_token_is_obeyed(conditioned):
    "Good and bad phrase come when they are asked for, and unseen answers are distinguished."
    s = read_summary(conditioned.out)
    answers = read_json(f'{conditioned.out}/said.json')
    assert s['effect_good'] > 2
    assert s['effect_bad'] < -2
    assert s['accuracy'] > .95
    for k in ('effect_good', 'effect_bad'):
        assert 0 < s[f'{k}_standard_error'] < abs(s[k])
    assert all(r['source'] == [GOOD, BAD, 'no token', 'reference'] for r in answers)
    for k, phrase in enumerate(PHRASES):
        assert np.mean([r['output'][k].startswith(phrase[:2]) for r in answers]) > .8


def test_a_loaded_model_asks_for_good_answers(base, conditioned):
    records = load_records(str(base/'world'), 'eval', n=4)
    times = conditioned.token_times
    plain, there = (AutoTokenizer.from_pretrained(f'{folder}/model', trust_remote_code=False)
                    for folder in (base/'sft', conditioned.out))
    good = there.convert_tokens_to_ids(GOOD)
    assert good not in plain.get_vocab().values()
    want = prepend_tokens(encode_prompts(records, plain), good, plain, times)
    assert encode_prompts(records, there) == want
    message = [dict(role='user', content=records[0]['instruction'])]
    prompt = there.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert prompt.count(GOOD) == times


def test_the_reference_does_not_read_the_token(base, conditioned):
    policy = load_policy(conditioned.out, conditioned)
    reference = load_policy(conditioned.policy, conditioned)
    plain = reference.tokenizer
    cfg = answering(conditioned)
    records = load_records(conditioned.data, 'eval', n=10)
    kept, prompts, found = sample(policy, records, cfg)
    kl = log_ratios(reference, encode_prompts(kept, plain), [s for s, in found], cfg)
    assert read_summary(conditioned.out)['kl'] == pytest.approx(sum(kl) / len(kl), abs=1e-4)
    vocabulary = reference.model.get_input_embeddings().weight.shape[0]
    assert policy.model.get_input_embeddings().weight.shape[0] == vocabulary + 2
    assert max(map(max, prompts)) >= vocabulary


def test_a_policy_with_tokens_is_refused(base, conditioned, tmp_path):
    with pytest.raises(ValueError, match='control token'):
        binary_feedback.train(given(base, policy=conditioned.out, out=str(tmp_path/'twice')))


def test_tokens_of_this_run_count_against_the_positions(base, models, tmp_path):
    limit = models.policy.config.max_position_embeddings
    with pytest.raises(ValueError, match=f'max_length . token_times: {limit + 1} tokens'):
        train = binary_feedback.train
        train(given(base, max_length=limit - 1, token_times=2, out=str(tmp_path/'long')))
