"""The seconds that others take over those that we take. `make bench` prints them.

Both sides have the same small Llama with random weights, the same texts, batches and numbers of
optimiser steps, which both return, float32, one thread and no gradient checkpointing. They take
turns in one process, where the first round warms up. The seconds of a step are the CPU's for a
whole run, without those of a run of one step: loading and saving do not count. Labels count by the
clock: they wait for a server that takes 50 ms for each."""
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]/'tests'))
import tiny
from alpaca_farm.run.runs import read_log
from bench_texts import make_material
from judge_server import judge_server

FOLDER = tiny.ROOT/'runs'/'bench'
MATERIAL, WORK = FOLDER/'material', FOLDER/'work'
LATEST, WITH_PPO = 'trl-1.16.0', 'trl-1.12.0'   # folders that `make bench` fills
ROUNDS, BATCH, PAIRS, ROLLOUTS, TOKENS, LONGEST = 3, 8, 4, 16, 48, 512
numbers = itertools.count()


def new_folder(): return str(WORK/str(next(numbers)))


def records(n): return json.loads((MATERIAL/'records.json').read_text())[:n]


def answer_reward(answered):
    "A reward that costs nothing: the share of a's."
    return [r['output'].count('a')/(len(r['output']) + 1) for r in answered]


# TRL and transformers, as their documentation has them

PAIR = dict(prompt='instruction', chosen='output_1', rejected='output_2')
COLUMNS = dict(SFT=dict(prompt='instruction', completion='output'), Reward=PAIR, DPO=PAIR,
               GRPO=dict(prompt='instruction'))


def model_of(name):
    import torch
    import transformers
    kind = dict(policy='CausalLM', reward='SequenceClassification')[name]
    auto = getattr(transformers, f'AutoModelFor{kind}')
    return auto.from_pretrained(MATERIAL/name, dtype=torch.float32, trust_remote_code=False)


def tokenizer_of(side='right'):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(MATERIAL/'policy', padding_side=side,
                                         trust_remote_code=False)


def trl_settings(batch, steps):
    return dict(output_dir=new_folder(), per_device_train_batch_size=batch, max_steps=steps,
                learning_rate=1e-5, lr_scheduler_type='constant', bf16=False, use_cpu=True,
                gradient_checkpointing=False, report_to='none', save_strategy='no', seed=0,
                disable_tqdm=True, dataloader_pin_memory=False)


def trl_trainer(name, batch, steps, given={}, **settings):
    "A trainer, which has tokenized its texts."
    import datasets
    import trl
    datasets.disable_caching()
    rows = [{k: r[v] for k, v in COLUMNS[name].items()} for r in records(batch*steps)]
    args = getattr(trl, f'{name}Config')(**trl_settings(batch, steps), **settings)
    return getattr(trl, f'{name}Trainer')(
        model_of('reward' if name == 'Reward' else 'policy'), args=args,
        train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer_of(), **given)


def trained(trainer):
    "The number of optimiser steps that a trainer makes."
    trainer.train()
    return trainer.state.global_step


def trl(name, batch, steps):
    return trained(trl_trainer(name, batch, steps, max_length=LONGEST))


def trl_grpo(steps):
    def reward(completions, **_): return answer_reward([dict(output=c) for c in completions])
    return trained(trl_trainer('GRPO', ROLLOUTS, steps, dict(reward_funcs=reward), beta=0.,
                               num_generations=8, max_completion_length=TOKENS, top_k=0))


def trl_ppo(steps):
    import datasets
    from trl.experimental.ppo import PPOConfig, PPOTrainer
    tokenizer = tokenizer_of('left')
    rows = [dict(input_ids=tokenizer.encode(r['instruction'])) for r in records(ROLLOUTS*steps)]
    args = PPOConfig(**trl_settings(ROLLOUTS, steps), total_episodes=ROLLOUTS*steps,
                     num_mini_batches=1, num_ppo_epochs=4, response_length=TOKENS, kl_coef=.05,
                     local_rollout_forward_batch_size=ROLLOUTS, num_sample_generations=0,
                     temperature=1.)
    return trained(PPOTrainer(
        args, tokenizer, model_of('policy'), model_of('policy'), model_of('reward'),
        datasets.Dataset.from_list(rows), model_of('reward')))


def trl_tokenizing(name, thousands):
    return len(trl_trainer(name, 1000, thousands, max_length=LONGEST).train_dataset)//1000


def transformers_sampling(times):
    policy, tokenizer = model_of('policy'), tokenizer_of('left')
    batch = tokenizer([r['instruction'] for r in records(64)], padding=True, return_tensors='pt')
    for _ in range(times):
        policy.generate(batch['input_ids'], attention_mask=batch['attention_mask'],
                        do_sample=True, top_k=0, max_new_tokens=TOKENS)
    return times


# the same here

def ours(method, batch, answers=True, **more):
    "The number of steps of a method's run."
    if answers: more |= dict(eval_split='', max_prompt=LONGEST, max_new_tokens=TOKENS)
    run = tiny.main(method)(tiny.config(
        method, out=new_folder(), policy=str(MATERIAL/'policy'), template='raw', batch_size=batch,
        learning_rate=1e-5, lr_schedule='constant', checkpoint_every=10**6, device='cpu',
        dtype='float32', **more))
    return len(read_log(run.folder))


def our_sft(steps):
    return ours('sft', BATCH, data=str(MATERIAL/'records.json'), val_split='', epochs=1,
                max_instances=BATCH*steps, max_length=LONGEST)


def our_reward_model(steps):
    return ours('reward_model', PAIRS, answers=False, preferences=str(MATERIAL/'records.json'),
                epochs=1, held_out=1, likelihood=0., max_instances=PAIRS*steps + 1,
                max_length=LONGEST)


def our_dpo(steps):
    return ours('dpo', PAIRS, preferences=str(MATERIAL/'records.json'), epochs=1, held_out=0,
                beta=.1, max_instances=PAIRS*steps, max_length=LONGEST)


def our_ppo(steps, **more):
    given = dict(reward_model=str(MATERIAL/'reward'), ppo_epochs=4, kl_coef=.05) | more
    return ours('ppo', ROLLOUTS, data=str(MATERIAL/'records.json'), val_split='', steps=steps,
                rollouts=ROLLOUTS, missing_eos='', value_learning_rate=1e-5, save_every=0, **given)


def our_grpo(steps):
    return our_ppo(steps, reward_model='bench:answer_reward', advantage='grpo', group_size=8,
                   ppo_epochs=1, kl_coef=0., whiten_advantages=False)


def our_tokenizing(fields, thousands):
    from alpaca_farm.data.text import encode
    rows, *_ = encode(records(1000*thousands), fields, tokenizer_of(), LONGEST, 'raw')
    return len(rows)//1000


def our_sampling(times):
    from alpaca_farm.data.text import encode_prompts
    from alpaca_farm.model.generation import generate
    from alpaca_farm.model.logprobs import load_policy
    policy = load_policy(str(MATERIAL/'policy'), tiny.config('sft', device='cpu'))
    tokenizer = policy.tokenizer
    prompts = encode_prompts(records(64), tokenizer, 'raw')
    for seed in range(times): generate(policy, prompts, 1, TOKENS, seed=seed)
    return times


# labels

def alpaca_eval_judge(url):
    os.environ['OPENAI_BASE_URL'] = url
    from alpaca_eval.annotators import PairwiseAnnotator
    return PairwiseAnnotator(annotators_config='alpaca_eval_gpt4', is_avoid_reannotations=False,
                             caching_path=f'{new_folder()}.json').annotate_pairs


RANKING = "[{'model': 'model_1', 'rank': {number}}, {'model': 'model_2', 'rank': {other}}]"


def our_judge(url):
    from alpaca_farm.judging.judges import load_annotators
    from alpaca_farm.ask.client import ApiConfig
    return load_annotators('alpaca_eval_gpt4',
                           ApiConfig(base_url=url, store=f'{new_folder()}.sqlite'))


# the comparison

def step_seconds(side, steps):
    "CPU seconds of one step more."
    taken = []
    for n in (1, steps):
        began = time.process_time()
        made = side(n)
        assert made == n, f'{made} steps, where the other side makes {n}'
        taken.append(time.process_time() - began)
    return (taken[1] - taken[0])/(steps - 1)


def label_seconds(side, n):
    "Seconds of one label of many."
    pairs = [dict(instruction=f'Say word {i}.', output_1='a'*(i % 30 + 1),
                  output_2='b'*(i % 17 + 1)) for i in range(n)]
    with judge_server(latency=.05, template=RANKING) as server:
        judge = side(server.url)
        began = time.perf_counter()
        assert len(judge(pairs)) == n
        return (time.perf_counter() - began)/n


def tokenizing(name, *fields):
    unit = f'1000 for {name}'
    return unit, LATEST, partial(trl_tokenizing, name), partial(our_tokenizing, fields), 11


ROWS = {   # what is timed, the other's package, its side and ours, and the number of steps
    'SFT': (f'{BATCH} answers', LATEST, partial(trl, 'SFT', BATCH), our_sft, 8),
    'reward model': (f'{PAIRS} pairs', LATEST, partial(trl, 'Reward', PAIRS), our_reward_model, 10),
    'DPO': (f'{PAIRS} pairs', LATEST, partial(trl, 'DPO', PAIRS), our_dpo, 8),
    'PPO': (f'{ROLLOUTS} rollouts', WITH_PPO, trl_ppo, our_ppo, 2),
    'GRPO': (f'{ROLLOUTS} rollouts', LATEST, trl_grpo, our_grpo, 6),
    'sampling': ('64 answers', 'transformers', transformers_sampling, our_sampling, 4),
    'tokenizing': tokenizing('SFT', 'output'),
    'tokenizing of pairs': tokenizing('DPO', 'output_1', 'output_2'),
    'labels': ('one', 'alpaca-eval', alpaca_eval_judge, our_judge, 300)}


def measure(name):
    "Write both sides' seconds in each round into a file."
    _, _, theirs, we, n = ROWS[name]
    seconds = label_seconds if name == 'labels' else step_seconds
    found = [(seconds(theirs, n), seconds(we, n)) for _ in range(1 + ROUNDS)]
    (WORK/f'{name}.json').write_text(json.dumps(found[1:]))


def compared(name):
    "A row of the table, measured in a process of its own; None if the other cannot run here."
    unit, package, _, _, n = ROWS[name]
    log, file = WORK/f'{name}.txt', WORK/f'{name}.json'
    path = os.pathsep.join([str(FOLDER/package), str(tiny.ROOT)])
    env = tiny.environment(PYTHONPATH=path, HF_HUB_DISABLE_TELEMETRY='1', OPENAI_API_KEY='none')
    with open(log, 'w') as f:
        subprocess.run([sys.executable, __file__, name], env=env, stdout=f, stderr=f)
    if not file.exists():
        last = (log.read_text().strip() or 'it was killed').splitlines()[-1]
        return print(f'{name}: {package} does not run here: {last}', flush=True)
    found = json.loads(file.read_text())
    theirs, we = map(statistics.median, zip(*found))
    ratios = [a/b for a, b in found]
    row = (name, unit, n, package, f'{theirs:.3g}', f'{we:.3g}',
           f'{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]')
    print('{}, {}, {} steps: {} {} s, ours {} s, ratio {}'.format(*row), flush=True)
    return row


def processor():
    file = Path('/proc/cpuinfo')
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.processor()


if __name__ == '__main__':
    if sys.argv[1:]: measure(sys.argv[1])
    else:
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        make_material(MATERIAL)
        rows = [row for row in map(compared, ROWS) if row]
        shutil.rmtree(WORK)
        packages = 'torch', 'transformers', 'alpaca-eval'
        print(f'\n{processor()}, one thread, float32, without gradient checkpointing;',
              *(f'{p} {version(p)},' for p in packages), time.strftime('%Y-%m-%d'), '\n')
        print('| work | of | steps of both | other | its seconds | ours | ratio: median [least, '
              f'most] of {ROUNDS} |\n|---|---|---|---|---|---|---|')
        for row in rows: print(f'| {" | ".join(map(str, row))} |')
