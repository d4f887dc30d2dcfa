"""Losses and calibration against plain Python; scores, their units and the likelihood in them."""
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import tiny
from alpaca_farm import reward_model as rm
from alpaca_farm.binary_feedback import _effect_figures
from alpaca_farm.data.pairs import answer_of
from alpaca_farm.data.records import load_records
from alpaca_farm.data.text import collate, encode_prompts, encode_responses
from alpaca_farm.judging.judges import RewardJudge
from alpaca_farm.model.loading import layer_count
from alpaca_farm.model.logprobs import hidden_states, load_policy, load_scalar, scalar_on
from alpaca_farm.model.logprobs import values
from alpaca_farm.model.policy import Policy, save_adapter
from alpaca_farm.model.rewards import label_count, reward, score_records
from alpaca_farm.ppo import PPOConfig, value_model
from alpaca_farm.reward_model import pairwise_loss, RewardModelConfig
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_log, Run
from alpaca_farm.run.settings import Config
from tiny import sigmoid

torch.set_num_threads(1)
SMALL = dict(likelihood=0., max_instances=40, held_out=10)
C = .3   # the weight of a likelihood


def config(base, out, **more):
    return RewardModelConfig(**tiny.settings('reward_model', base, out=str(out), **SMALL | more))


def test_huge_leads_stay_finite():
    far = torch.tensor([500., -500.], requires_grad=True)
    for more in (dict(flip_rate=.1), dict(margin=3.), {}):
        loss = pairwise_loss(far, -far, **more)
        slope, = torch.autograd.grad(loss.sum(), far)
        assert loss.isfinite().all()
        assert slope.isfinite().all()


@pytest.fixture(scope='module')
def likely(base, tmp_path_factory):
    "A run whose scores count the likelihood, and answers: its held-out ones."
    cfg = config(base, tmp_path_factory.mktemp('likely')/'reward_model', likelihood=C)
    rm.train(cfg)
    return cfg.out, held_out(cfg, 1) + held_out(cfg, 2)


def test_pairs_on_one_request_are_not_as_many_independent_pairs():
    "Ten copies of a pair make no interval narrower."
    pairs = [dict(instruction=f'Say {i}.', input='', preference=2.) for i in range(40)]
    lead = np.where(np.arange(40) % 4, 1., -1.)
    once = rm._accuracies(lead, pairs)
    copied = rm._accuracies(np.tile(lead, 10), pairs*10)
    assert copied['accuracy'] == once['accuracy'] == .75
    assert copied['accuracy_low'] <= once['accuracy_low'] < once['accuracy_high']
    assert copied['accuracy_high'] == pytest.approx(once['accuracy_high'], abs=.005)
    good = lead > 0
    requests = [p['instruction'] for p in pairs]
    effects = np.random.default_rng(0).normal(size=40)
    errors = []
    for n in (1, 10):
        found = _effect_figures(np.tile(effects, n), np.tile(good, n).astype(float), requests*n)
        errors.append(found['effect_good_standard_error'])
    assert errors[1] == pytest.approx(errors[0], rel=.01)


def held_out(cfg, k):
    "The answers in the first or second place of a run's held-out pairs."
    apart = rm.load_preference_pairs(Run(cfg, dict(settings={})))[1]
    return [answer_of(r, k) for r in apart]


def as_tokens(records, tokenizer):
    texts = [r['output'] for r in records]
    ended = [r.get('ended', True) for r in records]
    responses = encode_responses(texts, tokenizer, ended)
    return encode_prompts(records, tokenizer, 'auto'), responses


@torch.no_grad()
def both_parts(policy, record):
    "Head and log-likelihood of one answer, token by token, without padding."
    (prompt,), (answer,) = as_tokens([record], policy.tokenizer)
    model = policy.model
    states = model.base_model(torch.tensor([prompt + answer])).last_hidden_state[0]
    logp = (states @ model.get_input_embeddings().weight.T).log_softmax(-1)[len(prompt) - 1:]
    head = (states[-1] @ model.score.weight[0]).item()
    return head, sum(logp[i, token].item() for i, token in enumerate(answer))


def test_likelihood_is_a_part_of_the_score(base, likely):
    "As it was saved; in its unit, and as a judge; without it a score is the head."
    folder, answers = likely
    cfg = config(base, folder)
    model = load_scalar(folder, cfg)
    assert model.config.likelihood == C
    parts = np.array([both_parts(model, r) for r in answers])
    heads = parts[:, 0]
    wanted = heads + C*parts[:, 1]

    def scores(): return score_records(model, answers, standardise=False)
    assert scores() == pytest.approx(wanted, abs=1e-4)
    unit = (wanted - wanted.mean())/wanted.std()
    assert reward(folder, cfg)(answers) == pytest.approx(unit, abs=1e-3)
    first, second = wanted.reshape(2, -1)
    assert read_json(Path(folder)/'leads.json') == pytest.approx(second - first, abs=1e-4)
    pairs = []
    for a, b in zip(answers, answers[len(first):]):
        pairs.append(dict(a, output_1=a['output'], output_2=b['output']))
    want = [1 + sigmoid(d) for d in second - first]
    assert RewardJudge(folder, cfg)(pairs) == pytest.approx(want, abs=1e-4)
    del model.config.likelihood   # as in models trained elsewhere
    assert scores() == pytest.approx(heads, abs=1e-5)


def test_several_reward_models(base, likely):
    "The same labels may be those of each; one that diverged is refused."
    specs = [likely[0], str(base/'reward_model')]
    cfg = config(base, specs[0])
    assert [label_count(spec) for spec in (*specs, specs)] == [30, 48, 48]
    loaded = {s: load_scalar(s, cfg) for s in specs}
    with torch.no_grad():
        loaded[specs[1]].score.weight.fill_(float('nan'))
    with pytest.raises(ValueError, match='finite'):
        reward(specs, cfg, loaded=loaded)(likely[1])


def test_values_are_those_of_the_head_alone(base, likely):
    "And not moved by the mean of the likelihoods: they start near the mean of the rewards, 0."
    out, answers = likely
    cfg = PPOConfig(**tiny.settings('ppo', base, out=f'{out}_ppo', reward_model=out))
    model = load_scalar(out, cfg)
    tokenizer = model.tokenizer
    batch = collate(*as_tokens(answers[:4], tokenizer), tokenizer.pad_token_id)
    with torch.no_grad():
        found = values(value_model(cfg, Policy(torch.nn.Module())), batch)
        head = model.score(hidden_states(model, batch['ids'], batch['mask'])).squeeze(-1)
    chosen = batch['response'][:, 1:].bool()
    want = head[:, :-1] / model.config.reward_std
    torch.testing.assert_close(found[:, 1:][chosen], want[chosen], atol=1e-5, rtol=0)
    assert model.config.reward_mean < -1
    assert found.abs().max() < .5


def saved(folder, *parts):
    "The folder that a model and its tokenizer are saved in."
    for part in parts:
        part.save_pretrained(folder)
    return str(folder)


def test_a_classifier_of_two_classes_is_no_reward_model(base, tmp_path):
    "It is told so; a policy's states are taken from it as from any other model."
    policy = load_policy(str(base/'sft'), config(base, tmp_path))
    two = AutoModelForSequenceClassification.from_pretrained(
        base/'sft'/'model', num_labels=2, trust_remote_code=False)
    folder = saved(tmp_path/'two', two, policy.tokenizer)
    with pytest.raises(ValueError, match=r'score.weight is \(2, 32\) .* not one for each class$'):
        load_scalar(folder, config(base, tmp_path))
    assert load_scalar(folder, config(base, tmp_path), 'zero').score.weight.shape == (1, 32)


@pytest.mark.slow
@pytest.mark.parametrize('says', [False, True])
def test_likelihood_needs_tied_embeddings(base, tmp_path, says):
    "In the files, whatever the configuration says; the policy has the head that it has there."
    policy = load_policy(str(base/'sft'), config(base, tmp_path))
    head = policy.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().roll(1, 0))
    policy.config.tie_word_embeddings = says
    untied = saved(tmp_path/'untied', policy.model, policy.tokenizer)
    with pytest.raises(ValueError, match='likelihood = 0.3: .*untied'):
        rm.train(config(base, tmp_path/'rm', likelihood=C, policy=untied))
    assert read_log(tmp_path/'rm') == []
    rm.train(config(base, tmp_path/'head', policy=untied))
    again = load_policy(untied, config(base, tmp_path))
    assert torch.equal(again.model.lm_head.weight, head.weight)


def test_a_head_that_is_in_the_files_twice_is_no_other_one(base, tmp_path):
    policy = load_policy(str(base/'sft'), config(base, tmp_path))
    tied = saved(tmp_path/'tied', policy.model, policy.tokenizer)
    weights = load_file(f'{tied}/model.safetensors')
    weights['lm_head.weight'] = weights['model.embed_tokens.weight'].clone()
    save_file(weights, f'{tied}/model.safetensors', dict(format='pt'))
    folder = rm.train(config(base, tmp_path/'rm', likelihood=C, policy=tied)).folder
    assert read_json(folder/'model'/'config.json')['likelihood'] == C


ROUNDED = dict(all=dict(), small=dict(master_weights=False), lora=dict(lora_rank=4),
               mean=dict(pooling='mean'))


@pytest.mark.parametrize('kind', ROUNDED)
def test_scores_of_a_trunk_in_bfloat16_are_in_float32(base, tmp_path, kind):
    "In the files and read again: as many as there are texts."
    cfg = config(base, tmp_path/'rm', head='normal', dtype='bfloat16', **ROUNDED[kind])
    rm.train(cfg)
    model = load_scalar(cfg.out, cfg)
    head = load_file(tmp_path/'rm'/'model'/'model.safetensors')['score.weight']
    assert model.model.dtype == torch.bfloat16
    assert torch.equal(model.score.weight, head)
    words = load_records(str(base/'world'), 'unlabeled')
    answers = [dict(r, output=f'{i} is it') for i, r in enumerate(words)]
    assert len(set(score_records(model, answers))) == len(answers) == 60


@pytest.mark.parametrize('rank', [0, 4])
def test_first_layers(base, tmp_path, rank):
    "The first layers of a deeper policy become what a policy of them alone becomes."
    cfg = config(base, tmp_path)
    policy = load_policy(cfg.policy, cfg)
    more = policy.config.to_dict() | dict(num_hidden_layers=2)
    deep = type(policy.model)(type(policy.config)(**more))
    deep.load_state_dict(policy.model.state_dict(), strict=False)
    folder = saved(tmp_path/'deep', deep, policy.tokenizer)
    scores = []
    for given in ({}, dict(layers=1, policy=folder)):
        out = str(tmp_path/str(len(scores)))
        rm.train(config(base, out, lora_rank=rank, head='normal', **given))
        scores.append(reward(out, cfg)(held_out(cfg, 1)))
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_answers_in_several_pairs_are_read_once(base, tmp_path, monkeypatch):
    "Their losses are those of the pairs one by one."
    model = load_scalar(str(base/'sft'), config(base, tmp_path), 'normal', train=True)
    answers = [[5, 6, 2], [7, 2], [8, 9, 5, 2]]
    pairs = [(0, 1), (0, 2), (1, 2), (2, 0)]
    labels = torch.tensor([0., 1., .5, .3])
    read = []
    scores = rm.sequence_scores

    def watched(model, ids, *rest):
        read.append(len(ids))
        return scores(model, ids, *rest)
    monkeypatch.setattr(rm, 'sequence_scores', watched)

    def losses(rows):
        both = [[answers[p[k]] for p in pairs] for k in (0, 1)]
        batch = rm.answer_batch([[4, 3]]*4, both, rows, model.tokenizer.pad_token_id)
        batch |= dict(label=labels[rows], margin=torch.zeros(len(rows)))
        return rm.reward_loss(model, batch)['loss']
    loss = losses([0, 1, 2, 3])
    assert read == [3]
    torch.testing.assert_close(loss, torch.cat([losses([i]) for i in range(4)]))


def test_a_card_says_what_plain_transformers_leaves_out(base, tmp_path):
    "It loads such a model without a word, and scores by the last state alone."
    run = tiny.run('reward_model', base, tmp_path/'out', max_instances=40, likelihood=.2)
    card = (run.folder/'model'/'README.md').read_text()
    assert 'leaves out likelihood 0.2' in card
    assert f'preferences `{run.cfg.preferences}`. No person has judged' in card


def family(folder, name):
    "The folder of a random policy of a family."
    policy = tiny.family(name, vocab_size=260, tie_word_embeddings=True)
    return saved(folder, policy, tiny.letters())


@pytest.mark.parametrize('rank', [0, 2])
@pytest.mark.parametrize('name', ['qwen3', 'gemma3_text', 'lfm2', 'gpt2', 'gemma3'])
def test_fewer_layers_of_any_family(tmp_path, name, rank):
    "One may list their kinds, count them under a name of its own, or hold a model of images too."
    folder = family(tmp_path/'policy', name)
    cfg = rm.RewardModelConfig(policy=folder, layers=1, lora_rank=rank, device='cpu')
    model = load_scalar(folder, cfg, 'normal', train=True)
    model.tokenizer.save_pretrained(tmp_path/'scalar')
    if rank: save_adapter(model, tmp_path/'scalar')
    else: model.model.save_pretrained(tmp_path/'scalar')
    again = load_scalar(str(tmp_path/'scalar'), Config(device='cpu'))
    assert layer_count(again.config) == 1
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        found, want = (rm.sequence_scores(m, ids, ids > 0) for m in (again, model))
    torch.testing.assert_close(found, want)


def test_fewer_layers_than_an_adapter_has_are_refused(tmp_path):
    "They were passed over."
    folder = family(tmp_path/'policy', 'llama')
    cfg = rm.RewardModelConfig(policy=folder, lora_rank=2, device='cpu')
    policy = load_policy(folder, cfg, train=True)
    policy.tokenizer.save_pretrained(tmp_path/'adapter')
    save_adapter(policy, tmp_path/'adapter')
    cfg.layers = 1
    with pytest.raises(ValueError, match='layers: .*adapter is an adapter on 2 layers'):
        load_scalar(str(tmp_path/'adapter'), cfg, 'zero')


@pytest.mark.parametrize('name, shared', [('gemma3', True), ('qwen3_5', False)])
def test_a_reward_model_beside_a_policy_of_a_model_that_sees(tmp_path, name, shared):
    "It shares the policy's weights if they have the same names in both."
    cfg = rm.RewardModelConfig(policy=family(tmp_path/'policy', name), lora_rank=2, device='cpu')
    save_adapter(load_scalar(cfg.policy, cfg, 'normal', train=True), tmp_path/'reward')
    policy = load_policy(cfg.policy, cfg, train=True)
    found = scalar_on(policy, 'reward', str(tmp_path/'reward'), cfg)
    assert bool(found) == shared
    assert scalar_on(policy, 'value', '', cfg).model is policy.model
