"""Do the defaults improve a real model's held-out figures? Five methods, all weights and adapters,
two sizes of data, three seeds; no setting of training is given but the number of online steps.

    python tools/defaults.py MODEL PREFERENCES DEMONSTRATIONS

PREFERENCES are labelled pairs; of those on the last third of the first questions 500 are held out.
DEMONSTRATIONS are records with an output, a quarter of them held out. Runs that are finished are
kept; what Ctrl-C leaves is tabulated, and made by the next call."""
import random
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from alpaca_farm.boards.judged import answers_to, read_answers
from alpaca_farm.data.records import load_records
from alpaca_farm.model.rewards import reward
from alpaca_farm.run.files import write_json
from alpaca_farm.run.jobs import Job, run_jobs
from alpaca_farm.run.runs import read_summary, run_config
from alpaca_farm.run.settings import HardwareConfig

OUT = 'runs/defaults'
FEW, MANY = 100, 1000
HELD_OUT = 500   # pairs
LORA = dict(all={}, LoRA=dict(lora_rank=16))
SCORER = f'{OUT}/reward_model-LoRA-{MANY}-0'
ONLINE = dict(ppo={}, rloo=dict(advantage='rloo'))


def opening(record: dict) -> str:
    "The first question of a prompt, which several dialogues can share."
    return record['messages'][0]['content'] if 'messages' in record else record['instruction']


def prompts_of(pairs: list[dict]) -> list[dict]:
    "The prompts of pairs, each once."
    found = [{k: r[k] for k in ('messages', 'instruction', 'input') if k in r} for r in pairs]
    return list({str(prompt): prompt for prompt in found}.values())


def make_data(preferences: str, demonstrations: str):
    "Write the data of each size: splits, and pairs whose last ones are held out."
    draw = random.Random(0).sample
    pairs = load_records(preferences, 'preferences')
    openings = list(dict.fromkeys(map(opening, pairs)))
    unseen = set(openings[-len(openings)//3:])
    apart = [r for r in pairs if opening(r) in unseen]
    learn = [r for r in pairs if opening(r) not in unseen]
    held_out = [dict(r, held_out=True) for r in draw(apart, HELD_OUT)]
    shown = load_records(demonstrations, 'sft')
    for size in (FEW, MANY):
        folder = f'{OUT}/data_{size}'
        some = draw(learn, size)
        write_json(f'{folder}/preferences.json', some + held_out)
        write_json(f'{folder}/sft.json', shown[:3*len(shown)//4][:size])
        write_json(f'{folder}/val.json', shown[3*len(shown)//4:])
        write_json(f'{folder}/unlabeled.json', prompts_of(some))
        write_json(f'{folder}/eval.json', prompts_of(apart)[:100])


def jobs_of(model: str) -> list[Job]:
    "All runs; those that are online read the reward model of the first seed with adapters."
    answers = dict(max_prompt=256, max_new_tokens=56)
    jobs = [Job(f'{OUT}/initial', 'best_of_n',
                answers | dict(policy=model, data=f'{OUT}/data_{MANY}', split='eval', n=1,
                               reward_model='', temperature=.8))]
    answers['eval_temperature'] = .8
    for size in (FEW, MANY):
        data = f'{OUT}/data_{size}'
        pairs = dict(preferences=f'{data}/preferences.json')
        kinds = dict(sft=dict(data=data, eval_split=''), reward_model=pairs,
                     dpo=pairs | answers | dict(data=data, held_out=HELD_OUT, eval_every=5))
        for name, own in ONLINE.items():
            kinds[name] = own | answers | dict(data=data, reward_model=SCORER, steps=16,
                                               save_every=0)
        for kind, how, seed in product(kinds, LORA, range(3)):
            settings = dict(policy=model, seed=seed) | kinds[kind] | LORA[how]
            job = Job(f'{OUT}/{kind}-{how}-{size}-{seed}', kind, settings)
            if kind in ONLINE: job = replace(job, notebook='ppo', needs=[SCORER])
            jobs.append(job)
    return jobs


def figures_of(out: str, score, initial: list[dict]) -> dict:
    "What a run has improved on held-out data: before, after."
    summary = read_summary(out)
    kind = Path(out).name.split('-')[0]
    if kind == 'sft': return dict(loss=summary['nll_before'], loss_after=summary['nll'])
    if kind == 'reward_model': return dict(accuracy=50, accuracy_after=100*summary['accuracy'])
    found = dict(kl=summary['kl'])
    if kind == 'dpo': found |= dict(loss=.693, loss_after=summary['val_loss'])
    own = answers_to(read_answers(out), initial)
    return found | dict(reward=np.mean(score(initial)), reward_after=np.mean(score(own)))


def main(model: str, preferences: str, demonstrations: str, workers: str = '0'):
    make_data(preferences, demonstrations)
    jobs = jobs_of(model)
    with suppress(KeyboardInterrupt): print(*run_jobs(jobs, int(workers), 'defaults'), sep='\n')
    initial = read_answers(f'{OUT}/initial')
    template = run_config(f'{OUT}/initial')['settings']['template']
    score = reward(SCORER, HardwareConfig(out=OUT), template)
    rows = []
    for job in jobs[1:]:
        if not read_summary(job.out): continue
        kind, how, size, seed = Path(job.out).name.split('-')
        taken = run_config(job.out)['settings']
        row = dict(method=kind, weights=how, examples=size, seed=seed,
                   learning_rate=taken['learning_rate'], batch_size=taken['batch_size'])
        rows.append(row | figures_of(job.out, score, initial))
    table = pd.DataFrame(rows)
    table.to_csv(f'{OUT}/defaults.csv', index=False)
    by = table.groupby(['method', 'weights', 'examples'], sort=False)
    print(by.mean(numeric_only=True).to_string(float_format='{:.4g}'.format))


if __name__ == '__main__':
    if len(sys.argv) not in (4, 5): sys.exit('name MODEL, PREFERENCES and DEMONSTRATIONS')
    main(*sys.argv[1:])
