"""Memory and speed of large models on a GPU, beside TRL's, as a table that grows while it is made.

    python tools/measure.py                  # within eight minutes, on a card with 80 GB or more
    python tools/measure.py sft_7b dpo_7b    # some of the rows
    python tools/measure.py --small          # small shapes, on any machine
    python tools/measure.py --wheels DIR     # without a network: install what it lacks from there

Weights and texts are random, and nothing is read from a network. Each row is a process of its own
with a limit; it is printed and kept in OUT/measured.json when it ends, also when it fails, and is
not measured again. What no time is left for is measured by the next call. Beside torch,
transformers, accelerate and peft, which such machines have, the library needs pydantic,
pydantic_core, annotated-types, typing-inspection and fastcore, TRL's rows trl, datasets, dill and
multiprocess, the rows in 8 and 4 bits bitsandbytes (`pip download --no-deps ...`)."""
import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))   # of this checkout
PACKAGES = str(Path('runs/measured/packages').absolute())   # what is installed from wheels
sys.path.append(PACKAGES)
import torch

SHAPES = {  # width, layers, heads, width of the feed-forward layer, words
    '7b': (4096, 32, 32, 11008, 32000), '1b': (2048, 16, 32, 8192, 32000),
    'small': (64, 2, 4, 128, 500)}
PROMPT, ANSWER, BATCH, STEPS = 192, 300, 32, 5   # tokens as in AlpacaFarm; pairs or texts
LORA = dict(lora_rank=16)
ROWS = {  # library, method, shape, settings
    'sample_7b': ('ours', 'sample', '7b', LORA),
    'ppo_7b': ('ours', 'ppo', '7b', LORA),
    'dpo_7b': ('ours', 'dpo', '7b', LORA),
    'trl_dpo_7b': ('trl', 'dpo', '7b', dict(LORA, checkpointing=True, rows=8)),
    'reward_model_1b': ('ours', 'reward_model', '1b', {}),
    'trl_reward_model_1b': ('trl', 'reward_model', '1b', dict(rows=16)),
    'sft_7b': ('ours', 'sft', '7b', LORA),
    'dpo_7b_checkpointed': ('ours', 'dpo', '7b', dict(LORA, gradient_checkpointing=True)),
    'reward_model_7b': ('ours', 'reward_model', '7b', LORA),
    'reward_model_1b_bfloat16': ('ours', 'reward_model', '1b', dict(master_weights=False)),
    'reward_model_1b_8bit': ('ours', 'reward_model', '1b', dict(optimizer='adamw_8bit')),
    'sft_7b_4bit': ('ours', 'sft', '7b', dict(LORA, quantize=True)),
    'attention_sdpa': ('ours', 'attention', '1b', dict(attention='sdpa')),
    'attention_flash_4': ('ours', 'attention', '1b', dict(attention='flash_attention_4')),
    'dpo_7b_flash_4': ('ours', 'dpo', '7b', dict(LORA, attention='flash_attention_4'))}


def random_model(shape: str, device: str, attention: str = 'sdpa', **ends):
    "A Llama with random weights in bfloat16; `ends` are the tokens at the ends of texts."
    from transformers import LlamaConfig, LlamaForCausalLM
    width, layers, heads, inner, words = SHAPES[shape]
    config = LlamaConfig(vocab_size=words, hidden_size=width, intermediate_size=inner,
                         num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=heads, max_position_embeddings=8192,
                         **dict(eos_token_id=None) | ends)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16,
                                             attn_implementation=attention)


def make_model(folder: Path, shape: str, device: str):
    "A Llama with random weights, a tokenizer of words w0, w1, ..., and an adapter with a head."
    from tokenizers import models, pre_tokenizers, Tokenizer
    from transformers import PreTrainedTokenizerFast
    words = SHAPES[shape][-1]
    vocabulary = {w: i for i, w in enumerate(['<pad>', '<s>', '</s>', '<unk>'])}
    vocabulary |= {f'w{i}': i for i in range(4, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, '<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token='<pad>',
                                        bos_token='<s>', eos_token='</s>', unk_token='<unk>')
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model = random_model(shape, device, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    from alpaca_farm.model.policy import save_adapter
    from alpaca_farm.model.logprobs import load_scalar
    from alpaca_farm.reward_model import RewardModelConfig
    cfg = RewardModelConfig(policy=str(folder), device=device, dtype='bfloat16', **LORA)
    model = load_scalar(str(folder), cfg, 'normal', train=True)
    tokenizer = model.tokenizer
    reward = folder.with_name(f'reward-{shape}')
    reward.mkdir()
    save_adapter(model, reward)
    tokenizer.save_pretrained(reward)


def make_data(folder: Path, small: bool):
    "Instructions of PROMPT words with two answers of ANSWER words each, at random."
    rng, words = random.Random(0), SHAPES['small' if small else '7b'][-1]
    prompt, answer = (12, 8) if small else (PROMPT, ANSWER)
    text = lambda k: ' '.join(f'w{rng.randrange(4, words)}' for _ in range(k))
    rows = [dict(instruction=text(prompt - 2), output=text(answer - 2), output_1=text(answer - 2),
                 output_2=text(answer - 2), preference=rng.choice([1, 2]))
            for _ in range(BATCH * STEPS + 8)]
    folder.mkdir(parents=True, exist_ok=True)
    for split in ('sft', 'preferences', 'unlabeled', 'eval'):
        (folder/f'{split}.json').write_text(json.dumps(rows))


class Measured(Exception):
    "Ends a run that has made its steps: its answers and files are not measured."


def measure_ours(method: str, shape: str, more: dict, out: Path, small: bool, device: str) -> dict:
    "Seconds a step, from the second on, and for PPO of its parts."
    from alpaca_farm import dpo, ppo, reward_model, sft
    from alpaca_farm.train.trainer import Trainer
    prompt, answer, batch = (12, 8, 4) if small else (PROMPT, ANSWER, BATCH)
    data, steps = str(out/'data'), 2 if method == 'ppo' else STEPS
    cfg = dict(policy=str(out/f'model-{shape}'), out=str(out/f'{method}_{shape}'), device=device,
               dtype='float32' if small else 'bfloat16', batch_size=batch, learning_rate=1e-5,
               max_length=prompt + answer, **more)
    pairs = dict(preferences=f'{data}/preferences.json', max_instances=batch * steps + 8)
    answering = dict(data=data, eval_split='', max_prompt=prompt, max_new_tokens=answer)
    online = dict(reward_model=str(out/f'reward-{shape}'), steps=steps, rollouts=4 * batch,
                  value_learning_rate=1e-5, save_every=0, missing_eos='', val_split='')
    if method == 'ppo': del cfg['max_length']
    module, kind, more = dict(
        sft=(sft, sft.SFTConfig, dict(answering, val_split='', max_instances=batch * steps)),
        dpo=(dpo, dpo.DPOConfig, dict(answering, epochs=1, held_out=0, **pairs)),
        reward_model=(reward_model, reward_model.RewardModelConfig,
                      dict(pairs, held_out=8, epochs=1, likelihood=0.)),
        ppo=(ppo, ppo.PPOConfig, answering | online))[method]
    times, parts = [], {}

    def timed(name):
        f = getattr(module, name)
        def g(*args, **given):
            began = time.time()
            try: return f(*args, **given)
            finally: parts[name] = time.time() - began
        setattr(module, name, g)
    for name in ('sample_rollout', 'experience', '_ppo_update') if method == 'ppo' else ():
        timed(name)

    def log(trainer, **figures):
        if device != 'cpu': torch.cuda.synchronize()
        times.append(time.time())
        print(f'step {trainer.step}: {times[-1]:.1f}', figures.get('loss'), parts, flush=True)
        if len(times) == steps: raise Measured
    Trainer.log, began = log, time.time()
    try: module.train(kind(**cfg, **more))
    except Measured: pass
    each = (times[-1] - times[0]) / (len(times) - 1)
    found = dict(seconds_a_step=round(each, 2), start=round(times[0] - began - each, 1))
    if method == 'ppo': return found | {k.strip('_'): round(v, 1) for k, v in parts.items()}
    return found | dict(examples_a_second=round(batch / each, 2))


def measure_attention(shape: str, more: dict, small: bool, device: str) -> dict:
    "How far packed states are from those in float32, and seconds of passes over 16,384 tokens."
    import copy
    from alpaca_farm.data.text import collate
    from alpaca_farm.model.logprobs import hidden_states
    from alpaca_farm.model.packing import reads_packed
    from alpaca_farm.model.policy import Policy
    model = random_model(shape, device, more['attention'])
    rng, words = random.Random(0), SHAPES[shape][-1]

    def texts(count, length):
        return [[rng.randrange(4, words) for _ in range(length)] for _ in range(count)]
    prompts = [p for p in texts(4, 192 if not small else 12) for _ in range(2)]
    batch = collate(prompts, texts(8, 300 if not small else 8), 0)
    batch = {k: v.to(device) for k, v in batch.items()}
    policy = Policy(model.eval(), dtype=torch.bfloat16)
    found = dict(packed=reads_packed(policy))
    with torch.no_grad():
        states = hidden_states(policy, **batch).float()
        plain = copy.deepcopy(model).float()
        plain.set_attn_implementation('sdpa')
        exact = hidden_states(Policy(plain, dtype=torch.float32), **batch)
    del plain
    answer = batch['mask'].bool()
    error = (states - exact)[answer]
    found['differs'] = round((error.norm() / exact[answer].norm()).item(), 5)
    model.train()
    for length in (512, 4096):
        ids = torch.tensor(texts(16384 // length if not small else 1, length), device=device)
        times = []
        for _ in range(4):
            if device != 'cpu': torch.cuda.synchronize()
            began = time.time()
            model.base_model(input_ids=ids).last_hidden_state.float().square().mean().backward()
            if device != 'cpu': torch.cuda.synchronize()
            times.append(time.time() - began)
            model.zero_grad()
        found[f'seconds_{length}'] = round(min(times[1:]), 3)
    return found


def measure_sampling(shape: str, more: dict, out: Path, small: bool, device: str) -> dict:
    "Tokens a second of 128 answers to as many prompts, with an adapter that is not merged."
    from alpaca_farm.model.policy import add_adapter, lora_config, own_weights, Policy
    from alpaca_farm.model.generation import generate
    from alpaca_farm.model.logprobs import response_logprobs
    from alpaca_farm.sft import SFTConfig
    words = SHAPES[shape][-1]
    prompt, answer, rows = (12, 8, 4) if small else (PROMPT, ANSWER, 128)
    model = random_model(shape, device)
    policy = Policy(model.eval(), dtype=torch.bfloat16)
    policy = add_adapter(policy, 'policy', lora_config(SFTConfig(**more)))
    for name, w in own_weights(policy).items():
        if 'lora_B' in name: torch.nn.init.normal_(w, std=.002)
    rng = random.Random(0)
    prompts = [[rng.randrange(4, words) for _ in range(prompt)] for _ in range(rows)]
    generate(policy, prompts[:4], max_new_tokens=4)
    began = time.time()
    answers = [samples[0] for samples in generate(policy, prompts, max_new_tokens=answer)]
    each = time.time() - began
    again = response_logprobs(policy, prompts[:16], [s.tokens for s in answers[:16]]).tolist()
    differs = max(abs(sum(s.logprobs) - x) / answer for s, x in zip(answers, again))
    return dict(seconds=round(each, 2), tokens_a_second=round(rows * answer / each),
                logprob_differs=round(differs, 4))


def measure_trl(method: str, shape: str, more: dict, out: Path, small: bool, device: str) -> dict:
    "Seconds a step, from the second on, of TRL's trainer with the same model, texts and batches."
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification,
                              AutoTokenizer, TrainerCallback)
    import trl
    batch, folder, times = 4 if small else BATCH, str(out/f'model-{shape}'), []
    rows = json.loads((out/'data'/'preferences.json').read_text())[:batch * STEPS]
    pairs = [dict(prompt=r['instruction'], chosen=' ' + r[f'output_{r["preference"]}'],
                  rejected=' ' + r[f'output_{3 - r["preference"]}']) for r in rows]

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **given):
            if device != 'cpu': torch.cuda.synchronize()
            times.append(time.time())
    config, trainer, kind = dict(
        dpo=(trl.DPOConfig, trl.DPOTrainer, AutoModelForCausalLM),
        reward_model=(trl.RewardConfig, trl.RewardTrainer, AutoModelForSequenceClassification))[
            method]
    head = dict(num_labels=1) if method == 'reward_model' else {}
    dtype = torch.float32 if small else torch.bfloat16
    model = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False, **head)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.chat_template = None
    micro = min(batch, more['rows'])
    args = config(output_dir=str(out/'trl'), learning_rate=1e-5, num_train_epochs=1, seed=0,
                  per_device_train_batch_size=micro, max_length=512, bf16=not small,
                  gradient_accumulation_steps=batch // micro, save_strategy='no', report_to='none',
                  gradient_checkpointing=more.get('checkpointing', False), disable_tqdm=True,
                  logging_strategy='no', use_cpu=device == 'cpu')
    lora = LoraConfig(r=16, lora_alpha=32, target_modules='all-linear', task_type='CAUSAL_LM')
    trainer(model, args=args, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer,
            peft_config=lora if 'lora_rank' in more else None, callbacks=[Clock()]).train()
    each = (times[-1] - times[0]) / (len(times) - 1)
    return dict(seconds_a_step=round(each, 2), examples_a_second=round(batch / each, 2))


def measure(name: str, out: Path, small: bool) -> dict:
    "One row, in this process."
    library, method, shape, more = ROWS[name]
    device, shape = 'cuda' if torch.cuda.is_available() else 'cpu', 'small' if small else shape
    if small: more = dict(more, **{k: 4 for k in ('lora_rank',) if k in more})
    if method == 'sample': found = measure_sampling(shape, more, out, small, device)
    elif method == 'attention': found = measure_attention(shape, more, small, device)
    elif library == 'trl': found = measure_trl(method, shape, more, out, small, device)
    else: found = measure_ours(method, shape, more, out, small, device)
    if device == 'cpu': return found
    return found | dict(memory_gb=round(torch.cuda.max_memory_allocated() / 1e9, 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('rows', nargs='*', help='rows of the table; none: all')
    parser.add_argument('--small', action='store_true', help='small shapes')
    parser.add_argument('--wheels', default='', help='folder of wheels to install first')
    parser.add_argument('--out', type=Path, default=Path('runs/measured'))
    parser.add_argument('--limit', type=float, default=150, help='seconds that a row may take')
    parser.add_argument('--total', type=float, default=480, help='seconds for all rows')
    parser.add_argument('--child', default='', help=argparse.SUPPRESS)
    given = parser.parse_args()
    out, small, began = given.out.absolute(), given.small, time.time()
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if given.child.startswith('model-'):
        return make_model(out/given.child, given.child[6:], device)
    if given.child: return print('ROW', json.dumps(measure(given.child, out, small)), flush=True)
    if unknown := sorted({*given.rows} - {*ROWS}):
        parser.error(f'{unknown[0]} is none of {", ".join(ROWS)}')
    if given.wheels:
        subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', '--no-index', '--no-deps',
                        '--upgrade', '--target', PACKAGES,
                        *map(str, Path(given.wheels).glob('*.whl'))], check=True)
    make_data(out/'data', small)
    card = torch.cuda.get_device_name() if device == 'cuda' else 'CPU'
    print(f'{card}, torch {torch.__version__}, {time.strftime("%Y-%m-%d")}', flush=True)
    file = out/'measured.json'
    found = json.loads(file.read_text()) if file.exists() else {}

    def child(name: str) -> dict:
        command = [sys.executable, __file__, '--child', name, '--out', str(out)]
        limit = min(given.limit, given.total - (time.time() - began))
        if limit < 10: return dict(failed='no time is left')
        try:
            done = subprocess.run(command + ['--small'] * small, capture_output=True, text=True,
                                  timeout=limit)
        except subprocess.TimeoutExpired as e:
            said = (e.stdout or b'').decode().splitlines()[-3:]
            return dict(failed=f'over {limit:.0f} s', said=said)
        rows = [line[4:] for line in done.stdout.splitlines() if line.startswith('ROW ')]
        if rows: return json.loads(rows[-1])
        return {} if not done.returncode else dict(failed=done.stderr.strip()[-700:])
    for name in [r for r in given.rows or ROWS if r not in found]:
        shape = 'small' if small else ROWS[name][2]
        if ROWS[name][1] not in ('sample', 'attention') and not (out/f'reward-{shape}').exists():
            at = time.time()
            print('model', shape, child(f'model-{shape}'), f'{time.time() - at:.0f} s', flush=True)
        at = time.time()
        row = child(name) | dict(whole=round(time.time() - at, 1))
        print(name, row, flush=True)
        if row.get('failed') == 'no time is left': break
        found[name] = row
        file.write_text(json.dumps(found, indent=1))
    columns = list(dict.fromkeys(k for row in found.values() for k in row))
    print('| row | ' + ' | '.join(columns) + ' |\n|' + '---|' * (len(columns) + 1))
    for name, row in found.items():
        print(f'| {name} | ' + ' | '.join(str(row.get(c, '')) for c in columns) + ' |')


if __name__ == '__main__': main()
