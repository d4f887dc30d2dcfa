"""Settings so small that a run takes a second or two; used by the tests; every path is given."""
import ast
import gzip
import importlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import typing
from pathlib import Path

import floors
from alpaca_farm.run.paths import module_of

ROOT = Path(__file__).parents[1]
# where a process of its own finds the library and this module
PATHS = os.pathsep.join(str(ROOT/place) for place in ('', 'tests', 'tools'))
SHARED = floors.shared_folders()   # their notebooks make no runs
LONG = 3600   # seconds, where something needs a limit: that of the whole run (pytest.ini)
SAMPLING = dict(max_new_tokens=12, max_prompt=110, eval_instances=10)
SETTINGS = dict(
    world=dict(prose=400, sft=60, preference=60, unlabeled=60, val=20, eval=30, vocab_size=600,
               hidden_size=32, layers=1, heads=2, ffn=48, batch_size=16, learning_rate=3e-3),
    sft=dict(batch_size=12, epochs=1, learning_rate=1e-2, max_length=128, **SAMPLING),
    best_of_n=dict(n=2, max_instances=30, chunk=10,
                   **{k: v for k, v in SAMPLING.items() if k != 'eval_instances'}),
    annotators=dict(label_flip=.25),
    reward_model=dict(batch_size=8, held_out=12, epochs=1, learning_rate=1e-3, max_length=128),
    dpo=dict(batch_size=8, epochs=1, beta=.1, learning_rate=1e-3, max_length=128, **SAMPLING),
    expert_iteration=dict(n=2, max_instances=16, epochs=1, batch_size=8, learning_rate=1e-3,
                          max_length=128, val_instances=8, **SAMPLING),
    binary_feedback=dict(batch_size=8, learning_rate=1e-3, max_length=128, token_times=2,
                         held_out=12, eval_every=4, val_instances=8, **SAMPLING),
    rrhf=dict(k=4, batch_size=8, epochs=1, learning_rate=1e-3, max_length=128, save_every=0,
              **SAMPLING),
    quark=dict(steps=3, rollouts=16, batch_size=8, updates=3, token_times=2, missing_eos='',
               learning_rate=1e-3, val_instances=8, eval_every=2, save_every=2,
               checkpoint_every=1, **SAMPLING),
    rlcd=dict(chunk=8, max_new_tokens=12, max_retries=1,
              task=str(ROOT/'tests'/'data'/'task.yaml')),
    ppo=dict(steps=3, rollouts=16, batch_size=8, ppo_epochs=2, learning_rate=1e-3,
             value_learning_rate=1e-3, val_instances=8,
             eval_every=2, save_every=2, checkpoint_every=1, **SAMPLING))

# Settings of the farm's runs so small that the farm takes a minute and its results mean nothing.
FARM = dict(
    world=dict(sft=60, preference=80, unlabeled=64, val=20, eval=30, prose=160, hidden_size=32,
               layers=1, ffn=32, heads=2),
    reward_model=dict(epochs=1), best_of_n=dict(n=2), base=dict(n=1),
    candidates=dict(n=4, max_instances=24),
    expert_iteration=dict(n=4, max_instances=24, epochs=1),
    ppo=dict(steps=2, rollouts=8, batch_size=4, val_instances=8, eval_every=1, save_every=1),
    quark=dict(steps=2, rollouts=16, batch_size=8, val_instances=8, eval_every=1, save_every=1),
    rrhf=dict(k=4, epochs=1, missing_eos=''), binary_feedback=dict(held_out=10, val_instances=8),
    eval_samples=dict(n=4))


def settings(notebook, base, **more):
    "Tiny settings of a notebook whose inputs are the runs in the folder `base`."
    world, sft, samples, labels, rm = (
        str(base/k) for k in ('world', 'sft', 'samples', 'annotators', 'reward_model'))
    pool = f'{world}/pool.json'
    on_policy = dict(data=world, policy=sft)
    pairs = dict(preferences=labels, policy=sft)
    rewarded = dict(on_policy, reward_model=rm)
    inputs = dict(
        world={}, sft=dict(data=world, policy=world), rlcd=dict(data=world, policy=world),
        annotators=dict(outputs=samples, annotators=pool), reward_model=pairs,
        look_at_data=dict(data=labels, policy=sft),
        dpo=pairs | on_policy, binary_feedback=pairs | on_policy | dict(annotators=pool),
        best_of_n=rewarded, expert_iteration=rewarded, quark=rewarded, ppo=rewarded,
        rrhf=dict(rewarded, perplexity_model=world,
                  candidates=[samples, f'{world}/preference.json']))
    return SETTINGS.get(notebook, {}) | inputs.get(notebook, {}) | more


def module(notebook):
    "The module of a notebook."
    return importlib.import_module(module_of(notebook)) if isinstance(notebook, str) else notebook


def config_class(notebook):
    "The class of the settings of a notebook, or of its module."
    return next(v for k, v in vars(module(notebook)).items()
                if k.endswith('Config') and v.__module__ == module(notebook).__name__)


def check_settings(notebook, settings):
    "TypeError for a setting that the notebook does not have, ValueError for one of another type."
    from alpaca_farm.run.settings import as_type, refuse_unknown
    kinds = typing.get_type_hints(config_class(notebook), include_extras=True)
    refuse_unknown(notebook, settings, [*kinds])
    for name, value in settings.items():
        as_type(name, value, kinds[name])


def config(notebook, **given):
    "The configuration of a notebook, or of its module."
    return config_class(notebook)(**given)


def main(notebook):
    "The function that makes a notebook's run: `train`, or `run` where nothing is trained."
    return getattr(module(notebook), 'run', None) or module(notebook).train


def run(notebook, base, out, **more):
    "Make a run with tiny settings on the runs in the folder `base`."
    return main(notebook)(config(notebook, **settings(notebook, base, out=str(out)) | more))


def run_here(jobs, *_, **__):
    "`run_jobs` in this process, in the order given."
    for job in jobs:
        main(job.notebook)(config(job.notebook, out=job.out, **job.settings))
    return []


def run_with_its_jobs(*arguments):
    "`run_job` whose notebook makes the runs that it asks for in its own process, which is faster."
    from alpaca_farm.run import execution, jobs
    jobs.run_jobs = run_here
    execution.run_job(*arguments)


def show_results(notebook, cfg):
    "Execute the cells of a notebook after its settings, which show a run; returns their text."
    import matplotlib.pyplot as plt
    from alpaca_farm.run.paths import notebook_path
    code = [''.join(c['source']) for c in json.loads(notebook_path(notebook).read_text())['cells']
            if c['cell_type'] == 'code']
    at = next(i for i, text in enumerate(code) if re.match(r'cfg = \w+\.collect', text))
    cells = vars(module(notebook)) | dict(cfg=cfg)
    for text in code[:at]:
        imports = all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in ast.parse(text).body)
        if imports or 'in_short()' in text:
            exec(text, cells)
    shown = [text for text in code[at + 1:] if text.startswith('#| slow')]
    for text in shown:
        exec(text, cells)
    plt.close('all')
    return shown


def executed(notebook):
    "The names that a notebook without exports defines, its cells executed but for the slow ones."
    from alpaca_farm.run.paths import notebook_path
    names = {}
    for c in json.loads(notebook_path(notebook).read_text())['cells']:
        text = ''.join(c['source'])
        if c['cell_type'] == 'code' and not text.startswith('#| slow'):
            exec(text, names)
    return names


def command(notebook, **given):
    "The command line of a run."
    options = [x for k, v in given.items()
               for x in (f'--{k}', *map(str, v if isinstance(v, list) else [v]))]
    return [sys.executable, '-m', module_of(notebook), *options]


def papermill(notebook, executed, **given):
    "The command line of a papermill run."
    options = [x for k, v in given.items()
            for x in (('-y', f'{k}: {json.dumps(v)}') if isinstance(v, list)
                      else ('-p', k, str(v)))]
    return [sys.executable, '-m', 'papermill', str(notebook), str(executed), *options,
            '--no-progress-bar', '--log-level', 'ERROR', '-k', 'python3',
            '--start-timeout', str(LONG)]


def environment(**more):
    return dict(os.environ, OMP_NUM_THREADS='1', TOKENIZERS_PARALLELISM='false',
                HF_HUB_OFFLINE='1', PYDEVD_DISABLE_FILE_VALIDATION='1', **more)


def given(words):
    "The settings that a papermill command gives: as text, or as its YAML has them."
    import yaml
    from papermill.cli import papermill as command
    said = command.make_context('papermill', words[1:]).params
    texts = [(ROOT/file).read_text() for file in said['parameters_file']]
    settings = {}
    for text in (*texts, *said['parameters_yaml']):
        settings |= yaml.safe_load(text)
    return settings | dict(said['parameters'] + said['parameters_raw'])


def run_notebook(notebook, executed, given, with_its_jobs=False):
    "Exit status and output of a notebook in a process forked as the farm's are."
    from alpaca_farm.run.execution import run_job, start_process
    log = Path(executed).with_suffix('.txt')
    run = run_with_its_jobs if with_its_jobs else run_job
    call = start_process(run, Path(notebook), Path(executed), given, log, ROOT, {})
    error = call.exception()
    return error is not None, f'{log.read_text()}{error or ""}'


def run_module(notebook, given, log):
    "Make a run in this process, whose output goes to a file."
    with open(log, 'w') as f:
        for stream in (1, 2):
            os.dup2(f.fileno(), stream)
    main(notebook)(config(notebook, **given))


def start_module(notebook, given):
    "The process of a run, forked as in `run_notebook`, and the file with its output."
    from alpaca_farm.run.execution import warm_server
    log = Path(given['out']).with_suffix('.txt')
    process = warm_server().Process(target=run_module, args=(notebook, given, log))
    process.start()
    return process, log


def free_ports(n):
    "Ports of this computer that nothing listens on."
    sockets = [socket.create_server(('', 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def spawn(command, **more):
    return subprocess.Popen(command, env=environment(**more), stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def write(path, rows, lines=False):
    "Write records as JSON, or JSON lines, gzipped if the name says so; returns the path."
    text = '\n'.join(json.dumps(r) for r in rows) if lines else json.dumps(rows)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == '.gz' else text.encode())
    return str(path)


def splits(folder, rows, other='no'):
    "Write demonstrations as every split, and as preferences over or under another answer."
    for name in ('sft', 'unlabeled', 'val', 'eval'):
        write(Path(folder)/f'{name}.json', rows)
    write(Path(folder)/'preferences.json', [
        dict(r, output_1=r['output'], output_2=other, preference=1 + i % 2)
        for i, r in enumerate(rows)])
    return str(folder)


SIZE = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=48,
            max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ALIBI = dict(alibi=True, new_decoder_architecture=False, multi_query=True)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
FAMILIES = dict(  # what each needs beside SIZE; windows as long as the models can read
    llama={}, qwen2={}, qwen3=dict(head_dim=8), mistral=dict(sliding_window=64), phi3={},
    smollm3={}, gpt_neox={}, gemma2=dict(head_dim=8, sliding_window=64),
    gemma3_text=dict(head_dim=8, sliding_window=64),
    mixtral=dict(num_local_experts=4, num_experts_per_tok=2), qwen3_moe=dict(head_dim=8, **MOE),
    gpt2=dict(n_embd=32, n_layer=2, n_head=4), opt=dict(ffn_dim=48, word_embed_proj_dim=32),
    falcon=ALIBI | dict(alibi=False),
    granite=dict(logits_scaling=4., residual_multiplier=.5),
    cohere2=dict(sliding_window=64, logit_scale=.25), phi={},
    falcon_h1=dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1,
                   mamba_d_state=8, lm_head_multiplier=.5), lfm2=dict(full_attn_idxs=[1]))
_IMAGES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
               image_size=28, patch_size=14)
SEEING = dict(   # the text model and the model of images within a model
    gemma3=(dict(FAMILIES['gemma3_text'], tie_word_embeddings=True), _IMAGES),
    qwen3_5=(dict(head_dim=8, tie_word_embeddings=True, linear_num_key_heads=2,
                  linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
                  layer_types=['linear_attention', 'full_attention']),
             dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, patch_size=4,
                  out_hidden_size=32)))
UNPACKED = dict(bloom=dict(n_head=4, n_layer=2), mpt=dict(d_model=32, n_heads=4, n_layers=2),
                mamba={}, falcon=ALIBI)


def family(name, std=.3, **more):
    "A model of a family with random weights, so large that positions and attention matter."
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    torch.manual_seed(0)
    kind = AutoModelForCausalLM
    attention = more.pop('attn_implementation', None)
    config = SIZE | (UNPACKED | FAMILIES).get(name, {}) | more
    if name in SEEING:
        text, images = SEEING[name]
        kind = AutoModelForImageTextToText
        config = dict(text_config=config | text, vision_config=images, tie_word_embeddings=True)
    model = kind.from_config(AutoConfig.for_model(name, **config),
                             attn_implementation=attention).eval()
    for p in model.parameters():
        if p.ndim == 2:
            p.data.normal_(std=std)
    return model


def policy(name, **more):
    "A policy of a family, without a tokenizer."
    from alpaca_farm.model.policy import Policy
    return Policy(family(name, **more))


def ragged(count, longest=20, seed=0):
    "Prompts of different lengths for models of a family."
    import numpy as np
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 60, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


LETTERS = """{{ bos_token }}{% for m in messages %}{{ m.content }}{{
'<sep>' if m.role == 'user' else eos_token }}{% endfor %}"""


def letters(template=LETTERS, last='<sep>'):
    "A tokenizer of 260 tokens, one for each byte, that puts <s> before a text."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    special = ['<pad>', '<s>', '</s>', last]
    vocab = enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE({t: i for i, t in vocab}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single='<s> $A',
                                                             special_tokens=[('<s>', 1)])
    tokenizer.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=[last],
                                        pad_token='<pad>', bos_token='<s>', eos_token='</s>')
    tokenizer.chat_template = template
    return tokenizer


def randn(*shape, seed=0):
    "Numbers in float64 with a deviation of 2."
    import torch
    g = torch.Generator().manual_seed(seed)
    return 2*torch.randn(*shape, generator=g, dtype=torch.float64)


def sigmoid(z): return 1/(1 + math.exp(-z))


# prompts with several answers to each, for packed batches
TREE = [([1, 5, 6, 7, 3], [[11, 12, 2], [13, 14, 15, 16, 17, 2], [11, 2]]), ([1, 9, 3], [[18, 2]]),
        ([1, 8, 6, 3], [[11, 2], [19, 11, 2], []]),
        ([1, 8, 6, 9, 10, 12, 13, 3], [[11] * 20 + [2]])]
PROMPTS = [p for p, answers in TREE for _ in answers]
ANSWERS = [a for _, answers in TREE for a in answers]


def alone(policy, p, a):
    "The states of a sequence that stands alone."
    import torch
    ids = torch.tensor([p + a])
    return policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
