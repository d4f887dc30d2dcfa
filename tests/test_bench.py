"The comparison of speed: its bound computes what the library computes, its rounds are interleaved, its table is right; none of the others is needed."
import csv

import pytest
import torch

from alpaca_farm import bench, bench_peers, bench_rows, growth
from alpaca_farm.bench_bound import pack_rows, packed_dpo_loss, packed_reward_loss, packed_sft_loss
from alpaca_farm.core.files import read_json
from alpaca_farm.core.models import load_policy, load_scalar
from alpaca_farm.core.settings import TrainConfig
from alpaca_farm.core.text import encode
from alpaca_farm.dpo import answer_batch, dpo_step, DPOConfig, reference_logprobs
from alpaca_farm.reward_model import pair_batch, reward_loss
from alpaca_farm.sft import sft_batch, sft_loss


@pytest.fixture(scope='module')
def material(tmp_path_factory): return bench_rows.new_material('tiny', tmp_path_factory.mktemp('bench'), 3)


@pytest.mark.parametrize('kind', ['sft', 'reward_model', 'dpo'])
def test_the_bound_has_our_loss_and_gradient(material, kind):
    m, n, cfg = material, 4, TrainConfig(device='cpu')
    fields = ('output',) if kind == 'sft' else ('output_1', 'output_2')
    load, folder = (load_scalar, 'reward') if kind == 'reward_model' else (load_policy, 'policy')
    model, pad = load(str(m.folder/folder), cfg, train=True)[0], m.tokenizer.pad_token_id
    _, prompts, answers = encode(m.records[:n], fields, m.tokenizer, 2048, 'raw')
    rows, bound = pack_rows(prompts, list(zip(*answers))), bench_rows.bound_model(m, folder)
    if kind == 'sft':
        batch = sft_batch(prompts, *answers, range(n), pad)
        loss, fast = (sft_loss(model, batch)['loss']*batch['weight']).sum()/batch['weight'].sum(), packed_sft_loss(bound, rows)
    elif kind == 'reward_model':
        loss, fast = reward_loss(model, pair_batch(prompts, *answers, [1.]*n, range(n), pad))['loss'].mean(), packed_reward_loss(bound, rows)
    else:
        known, ones = reference_logprobs(model, prompts, answers, pad) + torch.arange(2.*n).view(n, 2), torch.ones(n)
        batch = dict(answer_batch(prompts, answers, list(range(n)), pad), reference=known, good=torch.tensor([[1., 0.]]*n),
                     baseline=ones*0, share=ones, other_share=ones)
        loss, fast = dpo_step(model, batch, DPOConfig(beta=.1))['loss'].mean(), packed_dpo_loss(bound, rows, known.flatten(), .1)
    assert loss.item() == pytest.approx(fast.item(), abs=1e-5) and loss.item() > .1
    loss.backward(); fast.backward()
    assert torch.allclose(model.base_model.embed_tokens.weight.grad, bound.embed.grad, atol=1e-5) and bound.embed.grad.abs().max() > 1e-4


def test_sampled_rows_have_the_models_distribution(material):
    torch.manual_seed(0)
    bound, prompt = bench_rows.bound_model(material), [5, 9, 7]
    tokens, logps = bound.sample_rows([prompt, [8]], 2000, 2)
    with torch.no_grad(): p = load_policy(str(material.folder/'policy'), TrainConfig(device='cpu'))[0](torch.tensor([prompt])).logits[0, -1].softmax(-1)
    seen = torch.bincount(tokens[:2000, 0], minlength=len(p))/2000
    assert (seen - p).abs().max() < .05 and torch.allclose(logps[:2000, 0].exp(), p[tokens[:2000, 0]], atol=1e-5)


def test_every_contender_of_ours_reports_the_same_work(material):
    "Ours in the order of the data and the bound; sorted, the same in sum."
    for name in ('sft', 'reward_model', 'dpo', 'dpo_cached'):
        row = bench.ROWS[name]
        there, by_hand, by_length = list(row.ours(material, ordered=True)), list(row.bound(material)), list(row.ours(material))
        assert there == by_hand and sum(by_length) == sum(there) and len(there) == 3, name
    for name in ('ppo', 'grpo', 'rloo', 'sampling_64', 'best_of_16', 'tokenizing_sft'):
        row = bench.ROWS[name]
        assert list(row.ours(material)) == list(row.bound(material)) and len(list(row.bound(material))) == 3, name


def test_labels_are_asked_for_at_the_given_delay(material):
    from dataclasses import replace
    import time
    few = replace(material, records=material.records[:4], rounds=2)
    for judging in (bench_peers.our_judging, bench_peers.bound_judging):
        steps, began = judging(few), time.perf_counter()
        assert next(steps) == 4 and time.perf_counter() - began > .05 and next(steps) == 4


def test_table_and_its_text():
    steps = lambda seconds: [(s, 2) for s in seconds]
    times = dict(ours=steps([1, 2, 3]), peer=steps([2, 4, 6]), data_order=steps([4, 4, 4]), bound=steps([1, 1, 1]))
    found = dict(times=times, memory=dict(ours=1., data_order=2., peer=3.), clock='cpu', device='a processor')
    row = bench.table_row('dpo', 'T', found)
    assert row['seconds'] == 2 and row['peer_ours'] == row['peer_ours_low'] == row['peer_ours_high'] == 2  # round by round
    assert row['peer_data_order'] == 1 and row['peer_bound'] == 4 and row['ours_bound'] == 2
    assert (row['peer_bound_low'], row['peer_bound_high']) == (2, 6) and row['memory_mb'] == 2
    import pandas as pd
    about = dict(date='1 May 2026', device='a processor', versions=dict(torch='2', trl='1.16.0'))
    text = bench.bench_text(pd.DataFrame([row, dict(row, work='judging', peer_bound=float('nan'))]), about)
    assert '| dpo | T | 2 | 2.00 (2.00–2.00) | 1.00 (0.50–1.50) | 4.00 (2.00–6.00) | 2.00 (1.00–3.00) | 2, 3 |' in text
    assert '| judging | T | 2 | 2.00 (2.00–2.00) | 1.00 (0.50–1.50) |  |' in text and 'trl 1.16.0' in text


def test_unknown_row_and_size():
    with pytest.raises(ValueError, match="work: there is no row 'dop'. Choose from sft, reward_model"): bench.BenchConfig(work=['dpo', 'dop'])
    with pytest.raises(ValueError, match='size'): bench.BenchConfig(size='huge')


def test_without_the_others_there_are_no_ratios_to_them(tmp_path, capsys):
    cfg = bench.BenchConfig(out=str(tmp_path/'bench'), size='tiny', work=['sft'], venvs=str(tmp_path/'none'), device='cpu')
    bench.run(cfg)
    table = list(csv.DictReader(open(tmp_path/'bench'/'bench.csv')))
    assert 'peer_ours' not in table[0] and float(table[0]['ours_bound']) > 0 and 100 < float(table[0]['memory_mb']) < 5000
    assert 'has no trl==1.16.0' in capsys.readouterr().out
    found = read_json(tmp_path/'bench'/'sft-tiny.json')
    assert sorted(found['times']) == ['bound', 'data_order', 'ours'] and len(found['times']['ours']) == 3 and 'torch' in found['versions']
    (tmp_path/'bench'/'summary.json').unlink()
    bench.run(cfg)  # a row that is there is not measured again
    assert read_json(tmp_path/'bench'/'sft-tiny.json') == found


def test_a_row_that_fails_says_why(tmp_path, monkeypatch):
    from types import SimpleNamespace
    monkeypatch.setattr(bench.subprocess, 'run', lambda *_, **__: SimpleNamespace(stdout="No module named 'trl'"))
    cfg = bench.BenchConfig(out=str(tmp_path/'bench'), size='tiny', work=['sft'], device='cpu')
    with pytest.raises(RuntimeError, match="(?s)sft tiny failed.*No module named 'trl'"): bench.run_row('sft', 'tiny', 3, 1., cfg, tmp_path)


def test_growth_is_measured_and_named(tmp_path, monkeypatch):
    monkeypatch.setitem(growth.AMOUNTS, 'annotations', growth.AMOUNTS['annotations']._replace(quick=(500, 1000, 2000)))
    made = growth.run(growth.GrowthConfig(out=str(tmp_path/'growth'), work=['annotations', 'strengths'], device='cpu'))
    rows = list(csv.DictReader(open(made.folder/'growth.csv')))
    assert [int(r['amount']) for r in rows] == [500, 1000, 2000, 8, 16, 32, 64]
    assert all(float(r['seconds']) > 0 for r in rows) and (made.folder/'growth.png').exists()
    text = (made.folder/'growth.md').read_text()
    assert '| annotations | 500 to 2,000 labelled pairs |' in text and 'Faster than expected: nothing.' in text


def test_growth_names_what_is_unknown_or_fails(tmp_path):
    with pytest.raises(ValueError, match="there is no 'width'. Choose from batch"): growth.GrowthConfig(work=['width'])
    def fails(n, m): raise MemoryError
    with pytest.raises(RuntimeError, match='amount 3'): growth.time_and_memory(fails, 3, None)


def test_memory_of_growth_leaves_out_what_was_prepared(material):
    reading = [growth.time_and_memory(growth.read_annotations, n, material)['mb'] for n in (10, 40_000)]
    prepared = growth.time_and_memory(lambda n, m: growth.read_annotations(n, m) and (lambda: None), 40_000, material)['mb']
    assert prepared < 10 and reading[1] > 2*prepared and reading[0] >= 1   # a large process has free memory to use first


def test_a_measured_row_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path/'temporary'))
    (tmp_path/'temporary').mkdir()
    cfg = bench.BenchConfig(out=str(tmp_path/'bench'), venvs=str(tmp_path/'none'), device='cpu')
    bench.run_row('sft', 'tiny', 3, 1., cfg, tmp_path)
    assert not list((tmp_path/'temporary').iterdir())
