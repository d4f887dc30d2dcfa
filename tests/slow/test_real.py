"""The real farm, tiny, on the tiny policy of the tests."""
import json

import numpy as np
import pytest

import tiny
from alpaca_farm import real
from alpaca_farm.core.run.files import read_json

COMMON = dict(lora_rank=2, learning_rate=1e-3, batch_size=8)
ANSWERS = dict(max_prompt=120, max_new_tokens=16)
POLICY = COMMON | ANSWERS | dict(max_length=150, eval_instances=20)
SIZES = dict(best_of_n=dict(ANSWERS, max_instances=20), samples=dict(max_instances=24),
             eval_samples=dict(n=3), reward_model=COMMON | dict(max_length=150, held_out=4),
             dpo=POLICY, binary_feedback=POLICY | dict(held_out=4, val_split=''),
             expert_iteration=POLICY | dict(n=2, max_instances=8, val_instances=4),
             ppo=COMMON | ANSWERS | dict(eval_instances=20, steps=2, rollouts=8, group_size=2, save_every=0),
             rloo_free=dict(save_every=1))


def test_the_real_farm(base, tmp_path, monkeypatch):
    made = []
    def run_here(jobs, *_):
        todo = [j for j in jobs if j.out not in made]
        made.extend(j.out for j in todo)
        tiny.run_here(todo)
    monkeypatch.setattr(real, 'run_or_fail', run_here)
    (tmp_path/'tiny.yaml').write_text(json.dumps(SIZES))
    cfg = real.RealConfig(out=str(tmp_path/'real'), runs=str(tmp_path/'runs'),
                          model=str(base/'sft'), size=str(tmp_path/'tiny.yaml'))
    folder = real.run(cfg).folder
    import pandas as pd
    board = pd.read_csv(folder/'leaderboard.csv', index_col='method')
    assert {*real.METHODS, 'initial policy', 'likeliest of 3'} < {*board.index}
    assert board.loc['initial policy', 'crowd'] == 50
    best = board.loc['best of 3 by the utility']
    assert best.utility >= board.loc[['likeliest of 3', 'shortest of 3', 'best_of_n']].utility.max()
    assert board[['crowd', 'crowd_low', 'crowd_high', 'kept', 'utility', 'words']].notna().all(None)
    labels = read_json(tmp_path/'runs'/'labels'/'pool.json')
    crowd = read_json(tmp_path/'runs'/'labels'/'crowd.json')
    assert [p['instruction'] for p in labels] == [p['instruction'] for p in crowd]
    assert {p['annotator'].rpartition(' ')[0] for p in labels} == {'pool'}
    steps = read_json(folder/'rloo_free.json')
    assert [s['step'] for s in steps] == [0, 1, 2] and (folder/'rloo_free.png').exists()
    assert real.run(cfg).done


def test_a_crowd_sees_what_the_pool_overlooks():
    words = real.WordModel(['the cat sat on the mat', 'the dog ran'])
    right, wrong = 'The cat sat.', 'The cat sat on the mat and the dog ran there. ' * 3
    pairs = [dict(instruction=f'Why? {real.CONDITIONS[c][0]}', output_1=wrong, output_2=right) for c in ('short', 'sentence')]
    crowd, pool = (real.sample_judges(n, words, seed=3) for n in ('crowd', 'pool'))
    assert np.mean(crowd(pairs)) > np.mean(pool(pairs)) > 1
    assert real.sample_judges('crowd', words, 3)(pairs) == crowd(pairs)


@pytest.mark.parametrize('text, error', [('dppo: {}', 'Did you mean dpo'), ('', 'real_none')])
def test_bad_sizes_are_refused(tmp_path, text, error):
    file = tmp_path/'real_none.yaml'
    if text: file.write_text(text)
    with pytest.raises((TypeError, FileNotFoundError), match=error):
        real.RealConfig(size=str(file))
