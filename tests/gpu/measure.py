"""Memory, speed and share of a GPU's ceiling of the training runs of large models, as a table.

    python tests/gpu/measure.py                  # on a GPU with 80 GB or more; not run on one yet
    python tests/gpu/measure.py sft_7b dpo_7b    # some of the rows
    python tests/gpu/measure.py --small          # small shapes, on any machine

Weights are random, texts are random words, and nothing is read from a network. The row `real` is
the real farm; it needs the model's folder: --model PATH. Rows are kept in OUT/measured.json and
are not measured again. Beside torch, transformers, accelerate and peft the
library needs pydantic, tyro, filelock and fastcore: where they are not installed, put them on
PYTHONPATH (python -m pip install --target DIR pydantic tyro filelock fastcore)."""
import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))   # of this checkout
from alpaca_farm import dpo, ppo, reward_model, sft
from alpaca_farm.core.run.runs import read_log, read_summary

SHAPES = {  # width, layers, heads, width of the feed-forward layer, words
    '7b': (4096, 32, 32, 11008, 32000), '1b': (2048, 16, 32, 8192, 32000),
    'small': (64, 2, 4, 128, 500)}
PROMPT, ANSWER = 192, 300   # tokens, as in AlpacaFarm
LORA = dict(lora_rank=16, gradient_checkpointing=True)


def ceiling(device: str, size: int = 8192) -> float:
    "Floating-point operations per second of a product of matrices, on a GPU in bfloat16."
    dtype = torch.bfloat16
    if device == 'cpu': size, dtype = 1024, torch.float32   # few have instructions for 16 bits
    x = torch.randn(size, size, device=device, dtype=dtype)
    for rounds in (3, 20):
        if device != 'cpu': torch.cuda.synchronize()
        began = time.time()
        for _ in range(rounds): x @ x
        if device != 'cpu': torch.cuda.synchronize()
    return 20 * 2 * size**3 / (time.time() - began)


def make_model(folder: Path, shape: str, device: str):
    "A Llama with random weights, and a tokenizer whose tokens are the words w0, w1, ..."
    from tokenizers import models, pre_tokenizers, Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    if (folder/'config.json').exists(): return
    width, layers, heads, inner, words = SHAPES[shape]
    vocabulary = {w: i for i, w in enumerate(['<pad>', '<s>', '</s>', '<unk>'])}
    vocabulary |= {f'w{i}': i for i in range(4, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, '<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token='<pad>',
                                        bos_token='<s>', eos_token='</s>', unk_token='<unk>')
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=words, hidden_size=width, intermediate_size=inner,
                         num_hidden_layers=layers, num_attention_heads=heads, bos_token_id=1,
                         num_key_value_heads=heads, max_position_embeddings=2048, eos_token_id=2)
    with torch.device(device): model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_data(folder: Path, n: int, small: bool):
    "Instructions of PROMPT words with two answers of ANSWER words each, at random."
    rng, words = random.Random(0), SHAPES['small' if small else '7b'][-1]
    prompt, answer = (12, 8) if small else (PROMPT, ANSWER)
    text = lambda k: ' '.join(f'w{rng.randrange(4, words)}' for _ in range(k))
    rows = [dict(instruction=text(prompt - 2), output=text(answer - 2), output_1=text(answer - 2),
                 output_2=text(answer - 2), preference=rng.choice([1, 2])) for _ in range(n)]
    folder.mkdir(parents=True, exist_ok=True)
    for split in ('sft', 'preferences', 'unlabeled', 'eval'):
        (folder/f'{split}.json').write_text(json.dumps(rows))


def rows_of(out: Path, small: bool, model: str) -> dict:
    "By row of the table: the module, its shape, settings, and the tokens of an example."
    steps, batch, dtype = (3, 4, 'float32') if small else (6, 32, 'bfloat16')
    data, shape = str(out/'data'), {s: 'small' if small else s for s in ('7b', '1b')}
    at = lambda name: str(out/name)
    prompt, answer = (12, 8) if small else (PROMPT, ANSWER)
    learning = dict(learning_rate=1e-5, batch_size=batch, dtype=dtype, max_length=prompt + answer)
    answering = dict(eval_split='', max_prompt=prompt, max_new_tokens=answer)
    pairs = dict(preferences=f'{data}/preferences.json', max_instances=batch * steps + 8)
    scored = dict(pairs, held_out=8, epochs=1, likelihood=0.)   # the embeddings are not tied
    online = dict(data=data, steps=2, rollouts=batch * (1 if small else 4), batch_size=batch,
                  dtype=dtype, learning_rate=1e-5, value_learning_rate=1e-5, save_every=0,
                  missing_eos='', **answering)

    def row(module, size, tokens, **settings):
        return module, shape[size], dict(policy=at(f'model-{shape[size]}'), **settings), tokens
    rows = dict(
        sft_7b=row(sft, '7b', prompt + answer, data=data, val_split='',
                   max_instances=batch * steps, **LORA, **learning, **answering),
        reward_model_7b=row(reward_model, '7b', prompt + 2*answer, **scored,
                            **LORA, **learning),
        dpo_7b=row(dpo, '7b', prompt + 2*answer, data=data, epochs=1, **pairs, **LORA, **learning,
                   **answering),
        ppo_7b=row(ppo, '7b', prompt + answer, reward_model=at('reward_model_7b'), **LORA,
                   **online),
        reward_model_1b=row(reward_model, '1b', prompt + 2*answer, **scored,
                            **learning),
        ppo_1b=row(ppo, '1b', prompt + answer, reward_model=at('reward_model_1b'), **online))
    if model:
        from alpaca_farm import farm, real
        real.run(real.RealConfig(out=at('real_world'), model=model))
        rows['real'] = farm, '', dict(world=at('real_world')), 0
    return rows


def measure(name: str, row: tuple, out: Path, device: str, most: float) -> dict:
    "One row: seconds, peak memory, and tokens per second beside the ceiling."
    module, shape, settings, tokens = row
    if device != 'cpu': torch.cuda.reset_peak_memory_stats()
    make = getattr(module, 'train', None) or module.run
    config = next(v for k, v in vars(module).items()
                  if k.endswith('Config') and v.__module__ == module.__name__)
    folder = make(config(out=str(out/name), device=device, **settings)).folder
    log, summary = read_log(folder), read_summary(folder)
    found = dict(row=name, shape=shape, seconds=round(summary['seconds'], 1),
                 memory_gb=summary.get('device_memory_gb', summary['peak_memory_gb']))
    if not tokens: return found
    width, layers, _, inner, words = SHAPES[shape]
    weights = layers * (4 * width**2 + 3 * width * inner) + words * width
    examples = settings.get('rollouts', settings['batch_size'])
    each = (log[-1]['wall'] - log[0]['wall']) / (len(log) - 1)   # the first step warms up
    speed = examples * tokens / each
    # of a token: forward and backward, without the gradients of frozen weights
    work = (4 if settings.get('lora_rank') else 6) * weights
    share = round(speed * work / most, 3)
    return found | dict(tokens_per_second=round(speed), ceiling_share=share)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('rows', nargs='*', help='rows of the table; none: all')
    parser.add_argument('--small', action='store_true', help='small shapes')
    parser.add_argument('--model', default='', help='folder of the model of the row `real`')
    parser.add_argument('--out', type=Path, default=Path('runs/measured'))
    given = parser.parse_args()
    device, out = 'cuda' if torch.cuda.is_available() else 'cpu', given.out.absolute()
    rows = rows_of(out, given.small, given.model)
    if unknown := sorted({*given.rows} - {*rows}):
        parser.error(f'{unknown[0]} is none of {", ".join(rows)}')
    make_data(out/'data', 64 if given.small else 256, given.small)
    card = torch.cuda.get_device_name() if device == 'cuda' else 'CPU'
    file, most = out/'measured.json', ceiling(device)
    found = json.loads(file.read_text()) if file.exists() else {}
    print(f'{card}, torch {torch.__version__}, {time.strftime("%Y-%m-%d")}: a product of matrices '
          f'makes {most/1e12:.2f} TFLOP/s', flush=True)
    for name in [r for r in given.rows or rows if r not in found]:
        if rows[name][1]: make_model(out/f'model-{rows[name][1]}', rows[name][1], device)
        found[name] = measure(name, rows[name], out, device, most)
        file.write_text(json.dumps(found, indent=1))
    columns = dict(row='row', shape='shape', seconds='seconds', memory_gb='peak memory (GB)',
                   tokens_per_second='tokens per second', ceiling_share='share of the ceiling')
    print('| ' + ' | '.join(columns.values()) + ' |\n|' + '---|' * len(columns))
    for r in found.values(): print('| ' + ' | '.join(str(r.get(c, '')) for c in columns) + ' |')


if __name__ == '__main__': main()
