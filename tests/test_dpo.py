"""The preference losses against loops in float64, what each is before the first update, and the reference kept on disk."""
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from alpaca_farm import dpo
from alpaca_farm.core.model.models import load_policy
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.runs import read_log, read_summary
from alpaca_farm.dpo import DPOConfig, dpo_loss, kto_loss, simpo_loss

torch.set_num_threads(1)
PAIRWISE = [('sigmoid', 0.), ('sigmoid', .1), ('robust', 0.), ('robust', .1), ('robust', .4), ('ipo', 0.), ('hinge', 0.)]
SETTINGS = dict(sigmoid={}, cdpo=dict(label_smoothing=.25), robust=dict(loss_type='robust', label_smoothing=.25),
                ipo=dict(loss_type='ipo'), hinge=dict(loss_type='hinge'), simpo=dict(loss_type='simpo', beta=2.), kto=dict(loss_type='kto'))
FIRST = dict(sigmoid=math.log(2), cdpo=math.log(2), robust=math.log(2), ipo=25., hinge=1., kto=.5)  # beta .1
each_loss = pytest.mark.parametrize('name', SETTINGS)


def randn(*shape, seed=0, scale=2.): return scale*torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(n=9, scale=2.): return [randn(n, seed=s, scale=scale) for s in range(4)]


def same(found, wanted): torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def log_sigmoid(z): return -math.log(1 + math.exp(-z))


def config(base, out, **more): return DPOConfig(**tiny.settings('dpo', base, out=str(out), **dict(dict(eval_split=''), **more)))


def one_pair(pc, pr, rc, rr, beta, kind, eps):
    "The loss of a pair, written down from the papers."
    h = (pc - rc) - (pr - rr)
    if kind == 'ipo': return (h - 1/(2*beta))**2
    if kind == 'hinge': return max(0., 1 - beta*h)
    right, wrong = -log_sigmoid(beta*h), -log_sigmoid(-beta*h)
    if kind == 'robust': return ((1 - eps)*right - eps*wrong)/(1 - 2*eps)
    return (1 - eps)*right + eps*wrong


@pytest.mark.parametrize('beta', [.1, .5, 2.])
@pytest.mark.parametrize('kind, eps', PAIRWISE)
def test_dpo_loss(kind, eps, beta):
    rows = zip(*(p.tolist() for p in parts()))
    found = dpo_loss(*parts(), beta, kind, eps)
    same(found, [one_pair(*x, beta, kind, eps) for x in rows])
    assert found.shape == (9,) and found.dtype == torch.float64


@pytest.mark.parametrize('beta, gamma', [(2., 1.), (10., 0.), (2.5, 3.)])
def test_simpo_loss(beta, gamma):
    chosen, rejected = -randn(9).abs()*10, -randn(9, seed=1).abs()*10
    long, short = torch.arange(3, 12), torch.arange(20, 2, -2)
    want = [-log_sigmoid(beta*c/n - beta*r/m - gamma) for c, r, n, m in zip(*(x.tolist() for x in (chosen, rejected, long, short)))]
    same(simpo_loss(chosen, rejected, long, short, beta, gamma), want)


@pytest.mark.parametrize('beta, desirable, undesirable', [(.1, 1., 1.), (.5, 1.33, 1.), (2., 1., 0.)])
def test_kto_loss(beta, desirable, undesirable):
    def one(p, r, good):
        r = p - r
        if good == 1: return desirable*(1 - 1/(1 + math.exp(-beta*(r - .7))))
        if good == 0: return undesirable*(1 - 1/(1 + math.exp(-beta*(.7 - r))))
        return good*one(p, p - r, 1) + (1 - good)*one(p, p - r, 0)
    policy, reference = randn(8), randn(8, seed=1)
    good = [1., 0., 1., 1., 0., .5, .8, 0.]
    want = [one(*x) for x in zip(policy.tolist(), reference.tolist(), good)]
    same(kto_loss(policy, reference, torch.tensor(good, dtype=torch.float64), torch.tensor(.7, dtype=torch.float64), beta,
                  desirable, undesirable), want)


@pytest.mark.parametrize('kind, eps', PAIRWISE)
def test_soft_labels_and_ties(kind, eps):
    "A tie has no gradient where chosen and rejected stand level, whichever is called chosen."
    if kind == 'hinge' or eps == .5: return
    z = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    o = torch.zeros(1, dtype=torch.float64)
    (.5*dpo_loss(z, o, o, o, .1, kind, eps) + .5*dpo_loss(o, z, o, o, .1, kind, eps)).sum().backward()
    assert abs(z.grad.item()) < 1e-12


@pytest.mark.parametrize('kind, eps', [p for p in PAIRWISE if p[1] < .5])
def test_gradient_of_the_first_step(kind, eps):
    "Towards the chosen answer and away from the rejected one, by as much; the reference's log-probs are constants."
    same_lp = torch.full((3,), -20., dtype=torch.float64)
    chosen, rejected = same_lp.clone().requires_grad_(), same_lp.clone().requires_grad_()
    dpo_loss(chosen, rejected, same_lp, same_lp, .1, kind, eps).sum().backward()
    slope = dict(sigmoid=.1*(.5 - eps), robust=.05/(1 - 2*eps), ipo=10., hinge=.1)[kind]
    same(chosen.grad, [-slope]*3); same(rejected.grad, [slope]*3)


def test_gradients_of_simpo_and_kto():
    lp = [(-randn(5, seed=s).abs()*9).requires_grad_() for s in range(2)]
    n = torch.tensor([5, 6, 7, 8, 9])
    simpo_loss(*lp, n, n + 3, 2., 1.).sum().backward()
    assert (lp[0].grad < 0).all() and (lp[1].grad > 0).all()
    torch.testing.assert_close(lp[0].grad*n, -lp[1].grad*(n + 3))  # a token counts by the length of its own answer
    policy = randn(6).requires_grad_()
    kto_loss(policy, randn(6), torch.tensor([1., 1., 1., 0., 0., 0.], dtype=torch.float64), torch.tensor(.3), .1).sum().backward()
    assert (policy.grad[:3] < 0).all() and (policy.grad[3:] > 0).all()
    far = torch.tensor([500., -500.], dtype=torch.float64, requires_grad=True)  # on its side, hopeless: both let go
    kto_loss(far, torch.zeros(2), torch.ones(2), torch.zeros(()), .1).sum().backward()
    assert far.grad.abs().max() < 1e-12


def test_huge_margins_stay_finite():
    far, o = torch.tensor([1e4, -1e4], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    same(dpo_loss(far, o, o, o, 1.), [0., 1e4])
    same(dpo_loss(far, o, o, o, 1., 'robust', .25), [-.5*1e4, 1.5*1e4])
    same(simpo_loss(far, o, torch.ones(2), torch.ones(2), 1., 1.), [0., 1e4 + 1])


@pytest.mark.parametrize('kind, eps, message', [
    ('kto', 0., 'choose from'), ('sigmod', 0., 'choose from'), ('ipo', .1, 'no label_smoothing'), ('hinge', .1, 'no label_smoothing'),
    ('robust', .5, 'below 0.5'), ('robust', .6, 'below 0.5'), ('sigmoid', .5, 'below 0.5'), ('sigmoid', .7, 'below 0.5'), ('sigmoid', -.1, 'below 0.5')])
def test_dpo_loss_refuses(kind, eps, message):
    with pytest.raises(ValueError, match=message): dpo_loss(*parts(), .1, kind, eps)


@pytest.mark.parametrize('eps', [.1, .25, .4])
@pytest.mark.parametrize('p', [.55, .7, .9])
def test_robust_is_unbiased_under_flips(p, eps):
    "Its expectation over flipped labels is the sigmoid's over clean ones, everywhere; so is its gradient. cDPO's is not."
    z = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    o, q = torch.zeros(101, dtype=torch.float64), (1 - eps)*p + eps*(1 - p)
    expected = lambda share, **how: share*dpo_loss(z, o, o, o, 1., **how) + (1 - share)*dpo_loss(-z, o, o, o, 1., **how)
    clean, robust = expected(p), expected(q, loss_type='robust', label_smoothing=eps)
    torch.testing.assert_close(robust, clean, rtol=1e-12, atol=1e-12)
    slope = lambda v: torch.autograd.grad(v.sum(), z, retain_graph=True)[0]
    torch.testing.assert_close(slope(robust), slope(clean), rtol=1e-10, atol=1e-12)
    at = lambda v: torch.sigmoid(z[v.argmin()]).item()
    fine = torch.linspace(-6, 6, 12001, dtype=torch.float64)
    z, o = fine, torch.zeros(12001, dtype=torch.float64)
    assert at(expected(q, loss_type='robust', label_smoothing=eps)) == pytest.approx(p, abs=1e-3)
    assert at(expected(q)) == pytest.approx(q, abs=1e-3)
    assert at(expected(q, label_smoothing=eps)) == pytest.approx((1 - eps)*q + eps*(1 - q), abs=1e-3)


@pytest.mark.parametrize('given, message', [
    (dict(beta=0.), 'beta = 0.0'), (dict(beta=-.1), 'beta = -0.1'), (dict(loss_type='cdpo'), "loss_type = 'cdpo'"),
    (dict(label_smoothing=.6), 'label_smoothing = 0.6'), (dict(label_smoothing=-.1), 'label_smoothing = -0.1'),
    *[(dict(loss_type=k, label_smoothing=.1), f'label_smoothing = 0.1 has no effect with loss_type = {k}') for k in ('ipo', 'hinge', 'simpo', 'kto')],
    (dict(target_margin=2.), 'or choose simpo'), (dict(loss_type='kto', target_margin=2.), 'or choose simpo'),
    (dict(loss_type='simpo', target_margin=-1.), 'target_margin = -1.0'), (dict(desirable_weight=2.), 'or choose kto'),
    (dict(loss_type='kto', desirable_weight=-1.), 'desirable_weight = -1.0'), (dict(undesirable_weight=2., loss_type='simpo'), 'or choose kto'),
    (dict(loss_type='robust'), 'robust needs the share'), (dict(loss_type='robust', label_smoothing=.5), 'label_smoothing = 0.5'),
    (dict(loss_type='kto', batch_size=1), 'batch_size = 1'), (dict(temperature=0.), 'temperature = 0.0'), (dict(save_every=-1), 'save_every = -1')])
def test_settings_refuse(given, message):
    with pytest.raises(ValueError, match=message): DPOConfig(**given)


def test_settings_that_apply_are_taken():
    for given in SETTINGS.values(): DPOConfig(**given)
    DPOConfig(loss_type='kto', desirable_weight=1.3, undesirable_weight=.9)
    DPOConfig(loss_type='simpo', target_margin=.5)


@pytest.fixture(scope='module')
def preferences(base, tmp_path_factory):
    "The first 24 labels, one of them soft and one a tie."
    records = read_json(base/'annotators'/'preferences.json')[:24]
    records[3]['preference'], records[5]['preference'] = 1.7, 1.5
    path = tmp_path_factory.mktemp('labels')/'preferences.json'
    path.write_text(json.dumps(records))
    return str(path)


def whole_batch(cfg):
    "The policy, all answers as one batch of the first step, and for each record (prompt, answers, certainty)."
    policy, tokenizer = load_policy(cfg.policy, cfg)
    data = dpo.LabelledAnswers(cfg, tokenizer)
    data.add_reference(policy)
    return policy, data, data.labelled_batch(1)


def brute(policy, prompt, answer):
    "The summed log-prob of an answer, token by token, alone in its batch."
    with torch.no_grad(): logits = policy(torch.tensor([prompt + answer])).logits[0].double()
    return sum(logits[len(prompt) + k - 1].log_softmax(-1)[t].item() for k, t in enumerate(answer))


@pytest.fixture(scope='module')
def moved(base, tmp_path_factory):
    "A policy that is no longer its reference."
    policy, _ = load_policy(str(base/'sft'), config(base, tmp_path_factory.mktemp('moved')/'dpo'))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            if p.ndim == 2: p += .05*torch.randn(p.shape, generator=g)
    return policy


@each_loss
def test_a_step_is_the_loss_of_whole_answers(base, preferences, moved, tmp_path, name):
    "Every figure from log-probs of answers one by one, soft labels and the tie included."
    cfg = config(base, tmp_path/'dpo', preferences=preferences, batch_size=24, **SETTINGS[name])
    reference, data, batch = whole_batch(cfg)
    rows = data.order[0]
    if name == 'kto': batch['baseline'] += (z0 := dpo.kto_baseline(moved, [data.mismatched_batch(1)]))
    with torch.no_grad(): found = dpo.dpo_step(moved, batch, cfg)
    want, certainty = [], []
    for i in rows:
        (c, r), p, (sure, _) = [a[i] for a in data.answers], data.prompts[i], data.good[i].tolist()
        lps = [brute(m, p, a) for m in (moved, reference) for a in (c, r)]
        if name == 'simpo': one = lambda c, r, n, m: -log_sigmoid(2*c/n - 2*r/m - 1)
        if name == 'simpo': value = sure*one(lps[0], lps[1], len(c), len(r)) + (1 - sure)*one(lps[1], lps[0], len(r), len(c))
        elif name == 'kto':
            a, b = (1/(1 + math.exp(-.1*(lps[k] - lps[k + 2] - z0.item()))) for k in (0, 1))
            value = .5*(sure*(1 - a) + (1 - sure)*a + (1 - sure)*(1 - b) + sure*b)
        else:
            kind, eps = SETTINGS[name].get('loss_type', 'sigmoid'), SETTINGS[name].get('label_smoothing', 0.)
            value = sure*one_pair(*lps, .1, kind, eps) + (1 - sure)*one_pair(lps[1], lps[0], lps[3], lps[2], .1, kind, eps)
        want.append(value); certainty.append(sure)
    assert sorted(certainty)[:2] == pytest.approx([.5, .7]) and certainty.count(1.) == 22
    torch.testing.assert_close(found['loss'].double(), torch.tensor(want, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    if name != 'simpo': assert (found['loss'] - FIRST[name]).abs().max() > 1e-3


def test_kto_baseline_is_that_of_mismatched_answers(base, preferences, moved, tmp_path):
    "By brute force; the same however the batch is cut; never below 0."
    cfg = config(base, tmp_path/'dpo', preferences=preferences, batch_size=24, loss_type='kto')
    reference, data, _ = whole_batch(cfg)
    rows, batch = data.order[0], data.mismatched_batch(1)
    whose = dpo.mismatched_rows(rows, data.prompts)
    assert all(data.prompts[i] != data.prompts[j] for i, j in zip(rows, whose))
    ratios = [brute(moved, data.prompts[i], a[j]) - brute(reference, data.prompts[i], a[j]) for i, j in zip(rows, whose) for a in data.answers]
    z0, mean = dpo.kto_baseline(moved, [batch]).item(), sum(ratios)/len(ratios)
    assert z0 == pytest.approx(max(0., mean), abs=1e-3)
    downside, upside = (dict(batch, reference=batch['reference'] + shift) for shift in (40, -40))
    assert dpo.kto_baseline(moved, [downside]).item() == 0.
    cut = [{k: v[at:at + 7] for k, v in upside.items()} for at in range(0, 24, 7)]
    assert dpo.kto_baseline(moved, cut).item() == pytest.approx(mean + 40, abs=1e-3) == dpo.kto_baseline(moved, [upside]).item()


def test_each_step_has_its_own_mismatched_answers(base, preferences, tmp_path):
    assert dpo.mismatched_rows([0, 1, 2, 3], [[1], [2], [2], [3]]) == [1, 3, 3, 0] and dpo.mismatched_rows([1, 2], [[1], [2], [2]]) == [1, 2]
    reference, data, _ = whole_batch(config(base, tmp_path/'dpo', preferences=preferences, batch_size=9, epochs=2, loss_type='kto'))
    assert len(data.order) == 6
    for step in (1, 3, 5):
        rows = data.order[step - 1]
        i, j = rows[-1], dpo.mismatched_rows(rows, data.prompts)[-1]
        found = data.mismatched_batch(step)['reference']
        assert found.shape == (len(rows), 2)
        assert found[-1].tolist() == pytest.approx([brute(reference, data.prompts[i], a[j]) for a in data.answers], abs=1e-3)


def test_mismatched_answers_are_cut_to_length(base, tmp_path):
    "A long request and another one's long answer do not make a sequence that is longer than any may be."
    rows = [dict(instruction='Please '*9, input='', output_1='ok', output_2='no', preference=1),
            dict(instruction='Go', input='', output_1='very '*12, output_2='well '*12, preference=2)]
    (tmp_path/'rows.json').write_text(json.dumps(rows))
    given = dict(preferences=str(tmp_path/'rows.json'), batch_size=2, loss_type='kto')
    _, data, batch = whole_batch(config(base, tmp_path/'a', **given))
    longest = batch['ids'].shape[-1]
    assert data.mismatched_batch(1)['ids'].shape[-1] > longest
    _, data, batch = whole_batch(config(base, tmp_path/'b', max_length=longest, **given))
    assert batch['ids'].shape[-1] == longest == data.mismatched_batch(1)['ids'].shape[-1] and (data.mismatched_batch(1)['response'].sum(-1) > 0).all()


def test_the_baseline_reaches_the_loss(base, preferences, tmp_path, monkeypatch):
    "Where it is high, no answer is good enough: good ones gain by rising, bad ones are let alone."
    monkeypatch.setattr(dpo, 'kto_baseline', lambda *args: torch.tensor(30.))
    cfg = config(base, tmp_path/'dpo', preferences=preferences, loss_type='kto', beta=.5, batch_size=24, undesirable_weight=0., max_instances=3)
    dpo.train(cfg)
    first = read_log(cfg.out)[0]
    assert first['baseline'] == 30. and first['loss'] == pytest.approx(.5/(1 + math.exp(-15)), abs=1e-6)


@pytest.mark.parametrize('batch_size, micro', [(1, 0), (7, 0), (8, 3), (24, 0)])
@each_loss
def test_first_step(base, preferences, tmp_path, name, batch_size, micro):
    "Whatever is padded with whatever: before the first update policy and reference are one."
    if name == 'kto': batch_size = max(batch_size, 2)
    cfg = config(base, tmp_path/'dpo', preferences=preferences, batch_size=batch_size, micro_batch_size=micro,
                 max_instances=24 if batch_size == 24 else 8, **SETTINGS[name])
    dpo.train(cfg)
    first = read_log(cfg.out)[0]
    if name == 'simpo': assert abs(first['loss'] - math.log(2)) > 1e-3  # it knows no reference
    else: assert abs(first['loss'] - FIRST[name]) < 1e-6*max(1, 200*(name == 'ipo')) and abs(first['margin']) < 1e-5
    assert abs(first['chosen']) < 1e-5 and abs(first['rejected']) < 1e-5 and ('baseline' in first) == (name == 'kto')
    if name == 'kto': assert 0 <= first['baseline'] < 1e-5


@pytest.mark.parametrize('name', ['simpo', 'kto', 'robust'])
def test_accumulation(base, preferences, tmp_path, name):
    "A batch of 8 in one pass and in uneven parts: the same losses, baseline and weights."
    logs, weights = [], []
    for micro in (0, 3):
        cfg = config(base, tmp_path/str(micro)/'dpo', preferences=preferences, batch_size=8, micro_batch_size=micro, adam_eps=1e-4, epochs=2,
                     **SETTINGS[name])
        dpo.train(cfg)
        logs.append(read_log(cfg.out)); weights.append(load_file(Path(cfg.out)/'model'/'model.safetensors'))
    for k, w in weights[0].items(): torch.testing.assert_close(weights[1][k], w, rtol=0, atol=1e-5)
    for a, b in zip(*logs, strict=True):
        for k in a.keys() - {'wall', 'accuracy'}: assert a[k] == pytest.approx(b[k], rel=5e-4, abs=5e-5), (a['step'], k)  # margins of 0 have any sign


def test_the_chosen_is_the_preferred_one(base, preferences, tmp_path):
    records = read_json(preferences)
    pairs, certainty = dpo.chosen_first(records)
    for r, p, sure in zip(records, pairs, certainty):
        if r['preference'] == 1.5: assert sure == .5 and {p['chosen'], p['rejected']} == {r['output_1'], r['output_2']}
        else: assert (p['chosen'], p['rejected']) == ((r['output_1'], r['output_2']) if r['preference'] < 1.5 else (r['output_2'], r['output_1']))
    assert certainty[3] == pytest.approx(.7) and min(certainty) == certainty[5] == .5 and sum(c == 1 for c in certainty) == 22
    _, data, _ = whole_batch(config(base, tmp_path/'dpo', preferences=preferences))
    tokenizer = load_policy(str(base/'sft'), DPOConfig(policy=str(base/'sft')))[1]
    tokens = lambda text: tokenizer(text, add_special_tokens=False)['input_ids'] + [tokenizer.eos_token_id]
    assert data.answers == [[tokens(p[k]) for p in pairs] for k in ('chosen', 'rejected')]


@each_loss
def test_learns_its_labels(base, preferences, tmp_path, name):
    "On pairs that are learned by heart the chosen answers rise above the rejected ones, measured afresh."
    more = SETTINGS[name] | ({} if name == 'simpo' else dict(beta=.5))
    cfg = config(base, tmp_path/'dpo', preferences=preferences, max_instances=3, batch_size=3, epochs=12, **more)
    dpo.train(cfg)
    after, tokenizer = load_policy(cfg.out, cfg)
    data = dpo.LabelledAnswers(cfg, tokenizer)
    data.add_reference(load_policy(cfg.policy, cfg)[0])
    rise = dpo.reference_logprobs(after, data.prompts, data.answers, tokenizer.pad_token_id) - data.reference
    assert (rise[:, 0] - rise[:, 1]).mean() > .2
    log = read_log(cfg.out)
    assert log[-1]['loss'] < log[0]['loss'] and log[-1]['margin'] > log[0]['margin']
    if name != 'simpo': assert (log[-1]['chosen'] - log[-1]['rejected']) > .2


def singles(base, folder, n=24):
    "Answers judged alone, made of pairs."
    records = read_json(base/'annotators'/'preferences.json')[:n]
    rows = [dict(instruction=r['instruction'], input=r['input'], output=r[f'output_{k}'], label=r['preference'] == k)
            for r in records for k in (1, 2)]
    (folder/'labels.json').write_text(json.dumps(rows))
    return rows, str(folder/'labels.json')


def test_kto_of_answers_judged_alone(base, tmp_path):
    rows, path = singles(base, tmp_path)
    cfg = config(base, tmp_path/'dpo', preferences=path, loss_type='kto', batch_size=8, epochs=6, beta=.5)
    dpo.train(cfg)
    data, log = dpo.LabelledAnswers(cfg, load_policy(cfg.policy, cfg)[1]), read_log(cfg.out)
    assert data.good.flatten().tolist() == [float(r['label']) for r in rows] and len(data.answers) == 1
    assert log[0]['loss'] == pytest.approx(.5, abs=1e-6) and read_summary(cfg.out)['labels'] == 48
    assert sum(r['chosen'] - r['rejected'] for r in log[-6:])/6 > .2 and sum(r['accuracy'] for r in log[-6:])/6 > .6


def test_answers_judged_alone_need_kto_and_labels(base, tmp_path):
    rows, path = singles(base, tmp_path, 4)
    with pytest.raises(ValueError, match="the field 'output_1' is missing"): dpo.train(config(base, tmp_path/'a', preferences=path))
    for wrong in ('yes', None, 2, float('nan')):
        Path(path).write_text(json.dumps(rows[:5] + [dict(rows[5], label=wrong)]))
        with pytest.raises(ValueError, match="row 5: the field 'label' is .*not true or false"):
            dpo.train(config(base, tmp_path/'b', preferences=path, loss_type='kto'))


def test_a_run_cut_short_ends_as_a_whole_one(base, preferences, tmp_path, monkeypatch):
    "KTO, whose baseline is measured on the way; checkpoints for those who study them are kept."
    given = lambda out: config(base, out, preferences=preferences, loss_type='kto', batch_size=8, epochs=3, checkpoint_every=2, save_every=4,
                               eval_split='eval', eval_instances=4)
    dpo.train(given(tmp_path/'whole'/'dpo'))
    step, seen = dpo.dpo_step, []
    def dies(*args):
        seen.append(1)
        if len(seen) == 6: raise KeyboardInterrupt
        return step(*args)
    monkeypatch.setattr(dpo, 'dpo_step', dies)
    with pytest.raises(KeyboardInterrupt): dpo.train(given(tmp_path/'cut'/'dpo'))
    monkeypatch.setattr(dpo, 'dpo_step', step)
    dpo.train(given(tmp_path/'cut'/'dpo'))
    a, b = tmp_path/'whole'/'dpo', tmp_path/'cut'/'dpo'
    strip = lambda f: [{k: v for k, v in r.items() if k != 'wall'} for r in read_log(f)]
    assert strip(a) == strip(b) and len(strip(a)) == 9
    for name in ('model', 'model-4', 'model-8'):
        assert (a/name/'model.safetensors').read_bytes() == (b/name/'model.safetensors').read_bytes()
    assert {p.name for p in a.iterdir()} == {p.name for p in b.iterdir()} and not (a/'model-6').exists()


class ReferenceCalls:
    "Counts how often the reference computes its log-probs."
    def __init__(self, monkeypatch):
        self.n, real = 0, dpo.reference_logprobs
        def counted(*args, **kwargs):
            self.n += 1
            return real(*args, **kwargs)
        monkeypatch.setattr(dpo, 'code_hash', lambda f: 'code')
        monkeypatch.setattr(dpo, 'reference_logprobs', counted)

    def __call__(self, cfg):
        before = self.n
        dpo.train(cfg)
        return self.n - before


@pytest.fixture
def calls(monkeypatch): return ReferenceCalls(monkeypatch)


def weights(out): return (Path(out)/'model'/'model.safetensors').read_bytes()


def test_the_reference_is_computed_once(base, preferences, tmp_path, calls):
    "Another beta, loss, learning rate or seed finds its numbers; what comes out is what would have come out."
    given = lambda name, **more: config(base, tmp_path/name, preferences=preferences, **more)
    assert calls(given('a')) == 1
    assert calls(given('b', beta=.5)) == calls(given('c', loss_type='ipo')) == calls(given('d', seed=1)) == calls(given('e', learning_rate=1e-4)) == 0
    assert calls(config(base, tmp_path/'elsewhere'/'b', preferences=preferences, beta=.5)) == 1
    assert weights(tmp_path/'b') == weights(tmp_path/'elsewhere'/'b')
    assert calls(given('f', loss_type='kto')) == 1 and calls(given('g', loss_type='kto', beta=.5)) == 0  # its mismatched answers
    assert len(list((tmp_path/'cache').iterdir())) == 2
    assert not list((tmp_path/'cache').glob('.*'))
    shutil.rmtree(tmp_path/'cache')
    assert calls(given('h')) == 1 and weights(tmp_path/'h') == weights(tmp_path/'a')


def test_no_stale_reference(base, preferences, tmp_path, calls):
    "Other weights under the same name, other labels, lengths, templates and temperatures are other questions."
    shutil.copytree(base/'sft', tmp_path/'sft')
    given = lambda name, **more: config(base, tmp_path/name, **dict(dict(preferences=preferences, policy=str(tmp_path/'sft')), **more))
    assert calls(given('a')) == 1
    assert calls(config(base, tmp_path/'copy', preferences=preferences, beta=.2)) == 0  # the same weights in another place
    path = tmp_path/'sft'/'model'/'model.safetensors'
    changed, stat = load_file(path), path.stat()
    name = next(k for k in changed if 'down_proj' in k)
    changed[name][0, 0] += 1e-3
    save_file(changed, path, metadata=dict(format='pt'))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert calls(given('b', beta=.2)) == 1
    assert calls(given('c', temperature=.7)) == 1
    records = read_json(preferences)
    records[0]['output_1'] += ' indeed'
    (tmp_path/'other.json').write_text(json.dumps(records))
    assert calls(given('e', preferences=str(tmp_path/'other.json'))) == 1
    assert calls(given('f', preferences=str(tmp_path/'other.json'), max_instances=9)) == 1


@pytest.mark.parametrize('damage', ['cut', 'empty', 'noise', 'bit', 'other'])
def test_a_damaged_file_is_made_again(base, preferences, tmp_path, calls, capsys, damage):
    given = lambda name: config(base, tmp_path/name, preferences=preferences, beta=.1 if name == 'a' else .2)
    assert calls(given('a')) == 1
    path, = (tmp_path/'cache').iterdir()
    whole = path.read_bytes()
    path.write_bytes(dict(cut=whole[:-20], empty=b'', noise=b'x'*len(whole), bit=whole[:-1] + bytes([whole[-1] ^ 1]), other=b'')[damage])
    if damage == 'other': save_file(dict(a=torch.zeros(3)), path)
    assert calls(given('b')) == 1 and 'is damaged' in capsys.readouterr().out
    assert path.read_bytes() == whole and calls(given('c')) == 0


def test_a_place_that_cannot_be_written_costs_nothing_but_time(base, preferences, tmp_path, calls, capsys):
    (tmp_path/'cache').write_text('in the way')
    given = lambda name: config(base, tmp_path/name, preferences=preferences)
    assert calls(given('a')) == calls(given('b')) == 1
    assert 'cannot be written' in capsys.readouterr().out and read_summary(tmp_path/'b')


def test_two_at_once(base, preferences, tmp_path):
    "Two processes that want the same numbers write one whole file and end alike."
    def child(name):
        pid = os.fork()
        if pid: return pid
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            dpo.train(config(base, tmp_path/name, preferences=preferences))
            os._exit(0)
        finally: os._exit(1)
    assert [os.waitpid(pid, 0)[1] for pid in [child('a'), child('b')]] == [0, 0]
    assert weights(tmp_path/'a') == weights(tmp_path/'b')
    assert [p.name.split('-')[0] for p in (tmp_path/'cache').iterdir()] == ['reference']


def test_held_out_pairs_are_measured_and_not_learned_from(base, tmp_path):
    "The figures are those of the loss over all held-out pairs; with nothing held out, nothing changes."
    cfg = config(base, tmp_path/'a', held_out=12, eval_every=3, save_every=1, save_total_limit=2)
    run = dpo.train(cfg)
    policy, tokenizer = load_policy(cfg.policy, cfg, train=True)
    data, log = dpo.LabelledAnswers(cfg, tokenizer), read_log(run.folder)
    learned = {tuple(data.prompts[i]) for batch in data.order for i in batch}
    assert len(data.held_out) >= 12 and not learned & {tuple(data.prompts[i]) for i in data.held_out}
    assert [r['step'] for r in log if 'val_loss' in r] == [k for k in range(1, len(log) + 1) if k % 3 == 0 or k == len(log)]
    data.add_reference(policy)
    trained, _ = load_policy(str(run.folder), cfg, train=True)
    with torch.no_grad(): wanted = dpo.dpo_step(trained, data.labelled_batch(rows=data.held_out), cfg)
    assert log[-1]['val_loss'] == pytest.approx(wanted['loss'].mean().item(), rel=1e-5)
    assert read_summary(run.folder)['val_accuracy'] == log[-1]['val_accuracy'] == pytest.approx(wanted['accuracy'].mean().item())
    assert sorted(p.name for p in run.folder.glob('model-*')) == sorted(f'model-{k}' for k in (len(log) - 1, len(log)))
    with pytest.raises(ValueError, match='held_out = 0, eval_every = 3: set both'): config(base, tmp_path/'b', eval_every=3)
    with pytest.raises(ValueError, match="held_out = 9, eval_every = 0: set both"): config(base, tmp_path/"b", held_out=9)
    with pytest.raises(ValueError, match="held_out = 1000 leaves none"): dpo.LabelledAnswers(config(base, tmp_path/"b", held_out=1000, eval_every=3), tokenizer)


def test_sft_logs_the_loss_on_val(base, tmp_path):
    from alpaca_farm import sft
    given = tiny.settings('sft', base, eval_split='')
    plain = sft.train(sft.SFTConfig(**given, out=str(tmp_path/'plain')))
    run = sft.train(sft.SFTConfig(**given, out=str(tmp_path/'a'), eval_every=2))
    log = read_log(run.folder)
    assert [r['step'] for r in log if 'val_loss' in r] == sorted({*range(2, len(log) + 1, 2), len(log)})
    assert log[-1]['val_loss'] == pytest.approx(read_summary(run.folder)['nll'], rel=1e-5) and log[-1]['val_loss'] < read_summary(run.folder)['nll_before']
    assert [r['loss'] for r in log] == [r['loss'] for r in read_log(plain.folder)]
    with pytest.raises(ValueError, match='eval_every = 2 measures val_split'): sft.SFTConfig(eval_every=2, val_split='')
