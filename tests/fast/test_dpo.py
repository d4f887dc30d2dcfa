"""The preference losses against loops in float64, their first step, and runs."""
import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import tiny
from alpaca_farm import dpo
from alpaca_farm.dpo import dpo_loss, DPOConfig, kto_loss, Loss, loss_of, LOSSES, simpo_loss
from alpaca_farm.model.control import set_control_prefix
from alpaca_farm.model.logprobs import _learned_from, load_policy
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_log, read_summary
from alpaca_farm.train import labelled
from alpaca_farm.train.labelled import LabelledAnswers, mismatched_rows, read_labels
from alpaca_farm.train.labelled import reference_logprobs
from alpaca_farm.train.preflight import preflight
from alpaca_farm.train.trainer import Trainer
from tiny import sigmoid

torch.set_num_threads(1)


def nll(z): return -math.log(sigmoid(z))


# the losses of a margin, written down from the papers, by their names in LOSSES
TWINS = dict(
    sigmoid=lambda h, beta, eps=0.: (1 - eps)*nll(beta*h) + eps*nll(-beta*h),
    robust=lambda h, beta, eps: ((1 - eps)*nll(beta*h) - eps*nll(-beta*h)) / (1 - 2*eps),
    ipo=lambda h, beta: (h - 1 / (2*beta))**2,
    hinge=lambda h, beta: max(0., 1 - beta*h),
    simpo=lambda h, beta, gamma: nll(beta*h - gamma))
SETTINGS = {name: dict(loss_type=name) for name in LOSSES} | dict(
    cdpo=dict(label_smoothing=.25), robust=dict(loss_type='robust', label_smoothing=.25),
    simpo=dict(loss_type='simpo', beta=2.),
    kto=dict(loss_type='kto', beta=.5, desirable_weight=1.3, undesirable_weight=.6))
each_loss = pytest.mark.parametrize('name', SETTINGS)


def same(found, wanted):
    wanted = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def config(base, out, **more):
    given = tiny.settings('dpo', base, out=str(out)) | dict(eval_split='', held_out=0)
    return DPOConfig(**given | more)


def twin_of(cfg):
    "The twin of a loss with its settings, as a function of the margin."
    own = [getattr(cfg, name) for name in LOSSES[cfg.loss_type].settings]
    return lambda h: TWINS[cfg.loss_type](h, cfg.beta, *own)


def test_huge_margins_stay_finite():
    far = torch.tensor([1e4, -1e4], dtype=torch.float64)
    o = torch.zeros(2, dtype=torch.float64)
    same(dpo_loss(far, o, o, o, 1.), [0., 1e4])
    same(dpo_loss(far, o, o, o, 1., 'robust', label_smoothing=.25), [-.5e4, 1.5e4])
    same(simpo_loss(far, 1., 1.), [0., 1e4 + 1])


def test_labels_of_kto_may_be_truth_values():
    o = torch.zeros(2)
    lead = torch.tensor([3., 1.])
    good = torch.tensor([True, False])
    assert kto_loss(lead, o, good, 0.).equal(kto_loss(lead, o, good.float(), 0.))


@pytest.fixture(scope='module')
def preferences(base, tmp_path_factory):
    "The first 24 labels, one of them soft and one a tie."
    records = read_json(base/'annotators'/'preferences.json')[:24]
    records[3]['preference'], records[5]['preference'] = 1.7, 1.5
    return tiny.write(tmp_path_factory.mktemp('labels')/'preferences.json', records)


def first_batch(cfg):
    "The policy, all answers, and the batch of the first step."
    policy = load_policy(cfg.policy, cfg)
    tokenizer = policy.tokenizer
    data = LabelledAnswers(cfg, tokenizer, *read_labels(cfg))
    data.add_reference(policy)
    return policy, data, data.labelled_batch(data.order[0])


def brute(policy, prompt, answer):
    "The summed log-prob of an answer, token by token, alone in its batch."
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + answer])).logits[0].double()
    logp = logits[len(prompt) - 1:].log_softmax(-1)
    return sum(logp[k, token].item() for k, token in enumerate(answer))


@pytest.fixture(scope='module')
def moved(base, tmp_path_factory):
    "A policy that is no longer its reference."
    cfg = config(base, tmp_path_factory.mktemp('moved')/'dpo')
    policy = load_policy(cfg.policy, cfg)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.ndim == 2:
                p += .05 * torch.randn(p.shape, generator=g)
    return policy


@pytest.mark.slow
@each_loss
def test_a_step_is_the_loss_of_whole_answers(base, preferences, moved, tmp_path, name):
    "Every loss from log-probs of answers one by one, soft labels and the tie included."
    cfg = config(base, tmp_path/'dpo', preferences=preferences, batch_size=24, **SETTINGS[name])
    reference, data, batch = first_batch(cfg)
    baseline = 0.
    if name == 'kto':
        baseline = dpo.kto_baseline(moved, [data.mismatched_batch(1)]).item()
        batch['baseline'] += baseline

    def loss_of(ratio, other, means):
        "With the first answer as the better one; ratios to the reference, means of tokens."
        if name == 'kto':
            good = 1.3*(1 - sigmoid(.5*(ratio - baseline)))
            return .5*(good + .6*sigmoid(.5*(other - baseline)))
        return twin_of(cfg)(means if name == 'simpo' else ratio - other)
    want = []
    for i in data.order[0]:
        ratios = []
        means = []
        for answers in data.answers:
            logp = brute(moved, data.prompts[i], answers[i])
            ratios.append(logp - brute(reference, data.prompts[i], answers[i]))
            means.append(logp/len(answers[i]))
        lead = means[0] - means[1]
        sure = data.good[i, 0].item()
        right = loss_of(*ratios, lead)
        wrong = loss_of(*ratios[::-1], -lead)
        want.append(sure*right + (1 - sure)*wrong)
    with torch.no_grad():
        found = dpo.dpo_step(moved, batch, cfg)['loss'].double()
    wanted = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert found.std() > 1e-3   # the policy has moved


def test_kto_baseline_is_that_of_mismatched_answers(base, preferences, moved, tmp_path):
    "By brute force, and the same however the batch is cut; never below 0."
    cfg = config(base, tmp_path/'dpo', preferences=preferences, batch_size=24, loss_type='kto')
    reference, data, _ = first_batch(cfg)
    rows = data.order[0]
    batch = data.mismatched_batch(1)
    ratios = []
    for i, j in zip(rows, mismatched_rows(rows, data.prompts)):
        prompt = data.prompts[i]
        assert prompt != data.prompts[j]
        for a in data.answers:
            ratios.append(brute(moved, prompt, a[j]) - brute(reference, prompt, a[j]))
    mean = sum(ratios)/len(ratios)
    low = dict(batch, reference=batch['reference'] + 40)
    assert dpo.kto_baseline(moved, [low]).item() == 0.
    high = dict(batch, reference=batch['reference'] - 40)
    parts = [{k: v[at:at + 7] for k, v in high.items()} for at in range(0, 24, 7)]
    assert dpo.kto_baseline(moved, parts).item() == pytest.approx(mean + 40, abs=1e-3)
    several = config(base, tmp_path/'dpo', preferences=preferences, batch_size=9, epochs=2,
                     loss_type='kto')
    reference, data, _ = first_batch(several)
    for step in (1, 3, 5):   # each has mismatched answers of its own
        rows = data.order[step - 1]
        i, j = rows[-1], mismatched_rows(rows, data.prompts)[-1]
        want = [brute(reference, data.prompts[i], a[j]) for a in data.answers]
        found = data.mismatched_batch(step)['reference'][-1].tolist()
        assert found == pytest.approx(want, abs=1e-3)


def test_mismatched_answers_are_cut_to_length(base, tmp_path):
    "A long request with another's long answer is no longer than a sequence may be."
    rows = [dict(instruction='Please ' * 9, output_1='ok', output_2='no', preference=1),
            dict(instruction='Go', output_1='very ' * 12, output_2='well ' * 12, preference=2)]
    given = dict(preferences=tiny.write(tmp_path/'rows.json', rows), batch_size=2, loss_type='kto')
    _, data, batch = first_batch(config(base, tmp_path/'a', **given))
    longest = batch['ids'].shape[-1]
    assert data.mismatched_batch(1)['ids'].shape[-1] > longest
    _, data, batch = first_batch(config(base, tmp_path/'b', max_length=longest, **given))
    assert batch['ids'].shape[-1] == longest == data.mismatched_batch(1)['ids'].shape[-1]


def test_a_last_batch_with_one_record_takes_its_mismatched_answer_from_another(base, tmp_path):
    rows = [dict(instruction=f'Go {i}', output=f'a{i}', label=i % 2) for i in range(5)]
    cfg = config(base, tmp_path/'a', preferences=tiny.write(tmp_path/'rows.json', rows),
                 batch_size=2, loss_type='kto')
    _, data, _ = first_batch(cfg)
    own = dict(zip(map(tuple, data.answers[0]), data.prompts))
    for prompt, answer in zip(data.mixed_prompts, data.mixed_answers[0]):
        assert own[tuple(answer)] != prompt


@pytest.mark.slow
@each_loss
def test_learns_its_labels(base, preferences, tmp_path, name):
    "On pairs learned by heart the preferred answers rise above the others, measured afresh."
    more = dict(beta=.5) | SETTINGS[name]
    cfg = config(base, tmp_path/'dpo', preferences=preferences, max_instances=3, batch_size=3,
                 epochs=12, **more)
    dpo.train(cfg)
    after = load_policy(cfg.out, cfg)
    _, data, _ = first_batch(cfg)
    rise = reference_logprobs(after, data.prompts, data.answers) - data.reference
    assert (rise[:, 0] - rise[:, 1]).mean() > .2
    log = read_log(cfg.out)
    assert log[-1]['loss'] < log[0]['loss']
    assert log[-1]['margin'] > log[0]['margin']


@pytest.mark.slow
def test_kto_of_answers_judged_alone(base, tmp_path):
    "Which only KTO takes, and with a label each."
    rows = []
    for r in read_json(base/'annotators'/'preferences.json')[:24]:
        for k in (1, 2):
            rows.append(dict(instruction=r['instruction'], input=r['input'],
                             output=r[f'output_{k}'], label=r['preference'] == k))
    cfg = config(base, tmp_path/'dpo', batch_size=8, epochs=6, beta=.5, loss_type='kto',
                 preferences=tiny.write(tmp_path/'labels.json', rows))
    dpo.train(cfg)
    tokenizer = load_policy(cfg.policy, cfg).tokenizer
    data = LabelledAnswers(cfg, tokenizer, *read_labels(cfg))
    assert data.good.flatten().tolist() == [float(r['label']) for r in rows]
    log = read_log(cfg.out)
    assert log[0]['loss'] == pytest.approx(.5, abs=1e-6)
    assert read_summary(cfg.out)['labels'] == 48
    assert sum(r['chosen'] - r['rejected'] for r in log[-6:])/6 > .2


def test_a_fifth_is_held_out_and_measured_before_within_and_after_training(base, tmp_path):
    "Whole prompts, of which nothing is learned; the loss is that over all of their pairs."
    cfg = config(base, tmp_path/'a', held_out=-1, eval_every=3, save_every=1, save_total_limit=2)
    folder = dpo.train(cfg).folder
    _, data, _ = first_batch(cfg)
    learned = {tuple(data.prompts[i]) for i in sum(data.order, [])}
    apart = {tuple(data.prompts[i]) for i in data.held_out}
    assert len(data.held_out) >= 12
    assert not learned & apart
    log = read_log(folder)
    n = len(log)
    assert {r['step'] for r in log if 'val_loss' in r} == {*range(3, n + 1, 3), n}
    trained = load_policy(str(folder), cfg, train=True)
    with torch.no_grad():
        wanted = dpo.dpo_step(trained, data.labelled_batch(data.held_out), cfg)
    assert log[-1]['val_loss'] == pytest.approx(wanted['loss'].mean().item(), rel=1e-5)
    figures = read_summary(folder)
    assert figures['val_accuracy'] == pytest.approx(wanted['accuracy'].mean().item())
    assert figures['val_loss_before'] == pytest.approx(math.log(2), rel=1e-5)
    assert figures['val_loss'] != figures['val_loss_before']
    assert figures['held_out'] == len(data.held_out)
    assert figures['labels'] == len(read_labels(cfg)[0]) - figures['held_out']
    assert {p.name for p in folder.glob('model-*')} == {f'model-{n - 1}', f'model-{n}'}


def softplus(h, beta): return torch.nn.functional.softplus(-beta * h)


OF_LEAD = Loss('of mean log-probs', lambda h, beta, target_margin: (target_margin - beta*h)**2,
               ('target_margin',), mean=True)


def test_a_loss_of_one_s_own_is_named_in_place_of_the_table_s(base, tmp_path):
    "The softplus of -beta h is DPO's loss."
    ours, theirs = (dpo.train(config(base, tmp_path/name, **given)) for name, given in
                    dict(table={}, own=dict(loss_function=f'{__name__}:softplus')).items())
    assert [r['loss'] for r in read_log(ours.folder)] == pytest.approx(
        [r['loss'] for r in read_log(theirs.folder)], abs=1e-5)
    assert loss_of(DPOConfig(loss_function=f'{__name__}:OF_LEAD', target_margin=2.)).mean
    assert loss_of(DPOConfig(loss_type='ipo')) is LOSSES['ipo']


def test_a_loss_of_a_module_is_one_in_a_notebook_too(monkeypatch):
    "Whose cell defines the class anew."
    monkeypatch.setattr(dpo, 'Loss', type('Loss', (Loss,), {}))
    assert loss_of(DPOConfig(loss_function=f'{__name__}:OF_LEAD')) is OF_LEAD


@pytest.mark.parametrize('notebook, more, learned', [
    ('dpo', {}, False), ('sft', {}, True), ('rrhf', {}, False),
    ('rrhf', dict(candidates='', n=2), True)])
def test_a_card_says_of_data_only_if_it_was_learned_from(base, notebook, more, learned):
    "And not if its eval split was answered at the end."
    cfg = tiny.config(notebook, **tiny.settings(notebook, base) | more)
    assert ('data `' in _learned_from(cfg)) == learned


def test_a_restart_reads_the_references_log_probs(base, tmp_path, monkeypatch):
    "An interrupted run scores nothing again."
    cfg = config(base, tmp_path/'killed', loss_type='kto', checkpoint_every=1)
    log = Trainer.log
    def interrupted(self, **figures):
        log(self, **figures)
        if self.step == 2: raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(Trainer, 'log', interrupted)
        with pytest.raises(KeyboardInterrupt):
            dpo.train(cfg)
    def scored(*_): raise AssertionError('the answers were scored again')
    monkeypatch.setattr(labelled, 'reference_logprobs', scored)
    assert dpo.train(cfg).done


def test_an_empty_answer_that_was_cut_off_leaves_the_weights_numbers(base, tmp_path):
    "As of a thought without an end: none of its tokens is learned."
    pairs = read_json(base/'annotators'/'preferences.json')[:8]
    pairs[0] |= dict(output_1='', ended_1=False)
    rows = read_json(base/'world'/'sft.json')[:4]
    rows[1] |= dict(output='', ended=False)
    learned = dict(preferences=tiny.write(tmp_path/'pairs.json', pairs), held_out=2)
    runs = dict(dpo=learned | dict(loss_type='simpo'), reward_model=learned | dict(pooling='mean'),
                sft=dict(data=tiny.write(tmp_path/'sft.json', rows), batch_size=1, val_split='',
                         eval_split=''))
    for name, settings in runs.items():
        out = tmp_path/name
        tiny.run(name, base, out, **settings)
        assert all(math.isfinite(row['loss']) for row in read_log(out))
        for weight in load_file(out/'model'/'model.safetensors').values():
            assert weight.isfinite().all()


@pytest.mark.parametrize('losses, best, ends', [
    ([2., 1., math.nan, 3.], 2, True), ([math.nan, 2., 1.], 3, False)])
def test_a_held_out_loss_that_is_no_number_is_never_the_lowest(losses, best, ends):
    weight = torch.nn.Parameter(torch.zeros(1))
    cfg = SimpleNamespace(load_best_model_at_end=True, early_stopping_patience=2)
    trainer = SimpleNamespace(cfg=cfg, extra={}, parameters=[weight])
    for step, loss in enumerate(losses, 1):
        trainer.step = step
        weight.data.fill_(step)
        Trainer.keep_best(trainer, dict(val_loss=loss))
    assert Trainer.ends_early(trainer) == ends
    assert Trainer.load_best(trainer)['best_step'] == best == weight.item()


def test_it_ends_early_with_the_weights_of_the_lowest_held_out_loss(base, tmp_path, monkeypatch):
    "As uninterrupted; with a rate so high that the loss on unseen pairs soon rises."
    more = dict(held_out=12, eval_every=1, save_every=1, checkpoint_every=1, epochs=4,
                learning_rate=3e-2, load_best_model_at_end=True, early_stopping_patience=2)
    dpo.train(config(base, tmp_path/'whole', **more))
    log = read_log(tmp_path/'whole')
    losses = [r['val_loss'] for r in log]
    best = 1 + losses.index(min(losses))
    assert len(log) == best + 2 < read_json(tmp_path/'whole'/'config.json')['steps']
    summary = read_summary(tmp_path/'whole')
    assert (summary['best_step'], summary['val_loss']) == (best, min(losses))
    def weights(place): return (tmp_path/place/'model.safetensors').read_bytes()
    assert weights('whole/model') == weights(f'whole/model-{best}')
    assert weights('whole/model') != weights(f'whole/model-{best + 2}')
    save = Trainer.save
    def killed(self):
        save(self)
        if self.step == best + 2: raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(Trainer, 'save', killed)
        with pytest.raises(KeyboardInterrupt):
            dpo.train(config(base, tmp_path/'killed', **more))
    dpo.train(config(base, tmp_path/'killed', **more))
    assert weights('killed/model') == weights('whole/model')
    assert len(read_log(tmp_path/'killed')) == best + 2


def test_control_tokens_count_once_against_the_positions(base, models):
    "Of a policy that has them: `max_length` is of the prompt with them and the answer."
    tokenizer = copy.deepcopy(models.tokenizer)
    set_control_prefix(tokenizer, '<good>', 8)
    policy = replace(models.policy, tokenizer=tokenizer)
    limit = policy.config.max_position_embeddings
    def check(length): preflight(DPOConfig(**tiny.settings('dpo', base, max_length=length)), [], policy)
    check(limit)
    with pytest.raises(ValueError, match=f'max_length: {limit + 1} tokens'):
        check(limit + 1)
