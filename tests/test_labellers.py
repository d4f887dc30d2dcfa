"The study over labellers: its runs fit together, its figures are those of the runs, and it refuses nonsense."
import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from alpaca_farm import labellers
from alpaca_farm.annotators import pair_samples
from alpaca_farm.core.comparisons import both_orders
from alpaca_farm.core.data import load_records
from alpaca_farm.core.models import load_policy
from alpaca_farm.core.rewards import reward
from alpaca_farm.core.runs import read_summary
from alpaca_farm.core.text import encode_prompts, encode_responses
from alpaca_farm.effects import win_probability
from alpaca_farm.eval import read_answers
from alpaca_farm.labellers import (ARMS, labeller_curves, labeller_differences, LabellersConfig, answer_values,
                                   labeller_study_jobs, value_row)
from alpaca_farm.people import read_population

ANYTHING = str(tiny.ROOT/'tests'/'data'/'task.yaml')


def test_arms_differ_in_what_they_say():
    "Every labeller answers the same prompts; where an arm judges another's answers, it reads them."
    jobs = {j.out.removeprefix('runs/labellers_study/'): j for j in labeller_study_jobs(LabellersConfig(replicates=2))}
    assert len(jobs) == 4 + 2*4*(1 + 5 + 4 + 2 + 4) + 2*4 and all({n.removeprefix('runs/labellers_study/') for n in j.needs} <= set(jobs) for j in jobs.values())
    for arm, settings in ARMS.items():
        given = [jobs[f'{k}/{n}/{arm}'].settings for k in (0, 1) for n in (8000, 16000)]
        assert {(s['method'], s['data'], s['max_instances'], s.get('both_orders', False)) for s in given} == {(
            settings['method'], 'runs/labellers_study/world', 2000, settings.get('both_orders', False))}
        assert [s.get('samples', '').rpartition('/')[2] for s in given] == [settings.get('samples', '')]*4
        assert [s['seed'] for s in given] == [0, 0, 1, 1]
    assert [jobs[f'0/{n}/labeller'].settings['dialogues'] for n in (8000, 96000)] == [8000, 96000]
    assert jobs['1/8000/labeller'].settings['seed'] == 1 and jobs['sft'].settings['seed'] == 0          # one SFT policy
    policies = {name.rpartition('/')[2] for name in jobs if name.startswith('0/8000/') and name.endswith(('_ppo', '_dpo'))}
    assert policies == {'rlcd_ppo', 'rlcd_dpo', 'rlaif_ppo', 'rlaif_dpo'} and '0/16000/rlcd_rescore_dpo' in jobs
    for arm in ('rlcd', 'rlaif_both'):
        assert jobs[f'0/16000/{arm}_ppo'].settings['reward_model'] == f'runs/labellers_study/0/16000/{arm}_reward_model'
        assert jobs[f'0/16000/{arm}_dpo'].settings['preferences'] == f'runs/labellers_study/0/16000/{arm}'


@pytest.mark.parametrize('given, said', [
    (dict(dialogues=[]), 'at least one number above 0'), (dict(dialogues=[0, 5]), 'above 0'), (dict(dialogues=[5, 5]), 'each once'), (dict(compared=[7]), 'compared: 7 is none of'),
    (dict(size='huge'), 'choose from'), (dict(replicates=0), 'replicates'), (dict(task='nowhere'), 'nowhere'), (dict(prompts=5), 'prompts')])
def test_settings_refuse_nonsense(given, said):
    with pytest.raises((ValueError, OSError), match=said): LabellersConfig(**given)


# What follows from values that are known

def values(rlcd, rlaif, rng, n=400):
    "Coin tosses with these means for all measures of two arms."
    arms = dict(rlcd=rlcd, rlaif=rlaif, rlaif_both=rlaif, rlcd_rescore=rlaif)
    return {(m, arm): (rng.random(n) < p).astype(float) for m in ('labels', 'reward_model', 'ppo', 'dpo') for arm, p in arms.items()}


def test_the_interaction_is_found():
    "A lead of .15 with the weak labeller and of .05 with the strong one; what is alike in a replicate cancels."
    rng, shift = np.random.default_rng(0), [.05, -.05, .0, .1, -.1]
    measured = {(n, k): values(a + shift[k], b + shift[k], rng, 4000) for k in range(5) for n, a, b in ((1000, .6, .45), (9000, .65, .6))}
    rows = {(r['measure'], r['over'], r['dialogues']): r for r in labeller_differences(measured)}
    for measure in ('labels', 'reward_model', 'ppo', 'dpo'):
        weak, strong, change = (rows[measure, 'rlaif', n] for n in (1000, 9000, 0))
        assert (weak['value'], strong['value']) == pytest.approx((.15, .05), abs=.02) and change['value'] == pytest.approx(strong['value'] - weak['value'])
        assert change['low'] - .005 < -.1 < change['high'] + .005 and change['high'] < 0   # four intervals: one may just miss
        assert weak['high'] - weak['low'] < .08
    curves = {(r['measure'], r['dialogues'], r['arm']): r for r in labeller_curves(measured)}
    assert curves['ppo', 1000, 'rlcd']['value'] == pytest.approx(.6, abs=.02) and curves['ppo', 1000, 'rlcd']['high'] - curves['ppo', 1000, 'rlcd']['low'] > .1


def test_pairs_that_differ_in_number_are_compared_by_their_means():
    rng = np.random.default_rng(1)
    measured = {(n, k): values(.7, .5, rng) for k in range(3) for n in (1, 2)}
    for found in measured.values(): found['labels', 'rlaif'] = found['labels', 'rlaif'][:-5]
    row = next(r for r in labeller_differences(measured) if (r['measure'], r['over'], r['dialogues']) == ('labels', 'rlaif', 1))
    each = [measured[1, k]['labels', 'rlcd'].mean() - measured[1, k]['labels', 'rlaif'].mean() for k in range(3)]
    assert row['value'] == pytest.approx(np.mean(each)) and row['low'] == pytest.approx(np.mean(each) - 4.3027*np.std(each, ddof=1)/3**.5, rel=1e-3)
    assert np.isnan(value_row([np.array([.5])], 0)['low']) and value_row([np.array([0., 1, 1])], 0)['low'] < .6   # one number says nothing of its error


def test_longer_answers_do_not_win_at_equal_length():
    "A judge who counts characters: a longer policy wins, and about half where lengths are alike."
    rng = np.random.default_rng(2)
    def text(mean): return 'a'*int(max(1, rng.normal(mean, 20)))
    def longer(pairs): return [1 + (len(p['output_2']) > len(p['output_1'])) for p in pairs]
    references = [dict(instruction=f'{i}', input='', output=[text(100) for _ in range(4)]) for i in range(300)]
    answers = [dict(instruction=r['instruction'], input='', output=text(115)) for r in references]
    found = answer_values(answers, references, longer)
    assert found['won'].mean() > .65 and abs(found['controlled'][0] - .5) < .1 and (found['words'] == 1).all()


# A tiny study

@pytest.fixture(scope='module')
def study(tmp_path_factory):
    "A study of one labeller and one replicate, made in this process: its settings, its runs, and whether a second start made none."
    folder = tmp_path_factory.mktemp('labellers')
    sizes = {k: v for k, v in tiny.SETTINGS.items() if k != 'annotators'} | dict(
        world=tiny.SETTINGS['world'] | dict(prose=200), ppo=tiny.SETTINGS['ppo'] | dict(steps=1, eval_every=1, temperature=1.),
        rlcd=dict(max_new_tokens=12), base=dict(n=1, max_instances=10), references=dict(n=4, max_instances=10),
        decoding=dict(max_instances=8, temperatures=[1., .5], **tiny.SAMPLING))
    for name in ('reward_model', 'dpo', 'sft'): sizes[name] = sizes[name] | dict(max_length=160)   # its answers seldom end
    (folder/'tiny.json').write_text(json.dumps(sizes))
    cfg = LabellersConfig(out=str(folder/'labellers'), size=str(folder/'tiny.json'), task=ANYTHING, dialogues=[40], compared=[], replicates=1,
                          prompts=24, pairs=20, device='cpu')

    return cfg, *tiny.make_study(labellers, cfg)


def sum_of_logprobs(policy, tokenizer, prompts, answers):
    "log p of each answer, one at a time."
    out = []
    for p, r in zip(prompts, encode_responses(answers, tokenizer)):
        with torch.no_grad(): logp = policy(torch.tensor([p + r])).logits[0].log_softmax(-1)
        out.append(sum(float(logp[len(p) + i - 1, token]) for i, token in enumerate(r)))
    return np.array(out)


def rows_of(cfg, name): return list(csv.DictReader(open(Path(cfg.out)/f'{name}.csv')))


def test_the_study_adds_up(study):
    cfg, made, nothing_left = study
    assert nothing_left and len(made) == len(labeller_study_jobs(cfg)) == read_summary(cfg.out)['runs']
    root, found = f'{cfg.out}_study', {(r['arm'], r['measure']): float(r['value']) for r in rows_of(cfg, 'results')}
    judge = read_population(f'{root}/world/held_out_people.json')
    references = read_answers(f'{root}/references', candidates=True)
    pairs = pair_samples(references, cfg.seed)[:cfg.pairs]
    majority = np.array(both_orders(pairs, judge)) > 1.5
    labels = load_records(f'{root}/0/40/rlcd', 'preferences', 'preference')
    right = (np.array([r['preference'] for r in labels]) > 1.5) == (np.array(both_orders(labels, judge)) > 1.5)
    assert found['rlcd', 'labels'] == pytest.approx(right.mean(), abs=.03)                               # ties are halves there
    shorter = [len(r['output_1'].split()) - len(r['output_2'].split()) for r in labels]
    rule = [.5 if d == 0 else float((d > 0) == m) for d, m in zip(shorter, np.array(both_orders(labels, judge)) > 1.5)]
    assert found['shorter_rlcd', 'labels'] == pytest.approx(np.mean(rule), abs=.03)
    model = reward(f'{root}/0/40/rlaif_reward_model', cfg)
    one, two = (np.array(model([dict(p, output=p[k]) for p in pairs])) for k in ('output_1', 'output_2'))
    assert found['rlaif', 'reward_model'] == pytest.approx(((two > one) == majority).mean(), abs=.06)
    policy, tokenizer = load_policy(f'{root}/sft', cfg)
    prompts = encode_prompts(pairs, tokenizer)
    one, two = (sum_of_logprobs(policy, tokenizer, prompts, [p[k] for p in pairs]) for k in ('output_1', 'output_2'))
    assert found['likelier', 'reward_model'] == pytest.approx(((two > one) == majority).mean(), abs=.06)
    won = win_probability(read_answers(f'{root}/0/40/rlcd_dpo'), references, judge).mean()
    assert found['rlcd', 'dpo'] == pytest.approx(won, abs=1e-4)
    assert found['context_distillation', 'sft_words'] > 0 and found['person', 'labels'] > .5
    assert {a for a, m in found if m == 'ppo'} == {'rlcd', 'rlaif'} and {a for a, m in found if m == 'reward_model'} == {*ARMS, 'shorter', 'likelier', 'person'} - {'context_distillation'}
    both, one = (load_records(f'{root}/0/40/{arm}', 'preferences', 'preference') for arm in ('rlaif_both', 'rlaif'))
    assert [r['output_1'] for r in both] == [r['output_1'] for r in one] and [r['preference'] for r in both] != [r['preference'] for r in one]
    assert (Path(cfg.out)/'labellers.png').stat().st_size > 5000
    assert len(rows_of(cfg, 'differences')) == 8*2 and all((r['low'] == '') == (r['measure'] == 'labels') for r in rows_of(cfg, 'differences'))


def test_policies_answer_at_one_temperature(study):
    cfg, _, _ = study
    chosen = read_summary(f'{cfg.out}_study/decoding')['sft_sampling_temperature']
    given = [j.settings.get('temperature' if j.out.endswith(('references', '_answers')) else 'eval_temperature') for j in labeller_study_jobs(cfg)
             if j.out.endswith(('references', '_answers', '_ppo', '_dpo'))]
    assert given == [chosen]*len(given) and len(given) == 1 + 1 + 2*2
