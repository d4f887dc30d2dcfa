"""Datasets of the hub, laid out as the real ones are, read from a server of our own."""
import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hub_server
from judge_server import serve
import tiny

PAIR = dict(instruction='Name one.', input='', output_1='A.', output_2='B.', preference=2)
HH = dict(chosen='\n\nHuman: Hi.\n\nAssistant: Yes?', rejected='\n\nHuman: Hi.\n\nAssistant: No.')


def binarized(prompt):
    "A row of UltraFeedback binarized, whose dialogues begin with the prompt."
    def turns(answer):
        return [dict(role='user', content=prompt), dict(role='assistant', content=answer)]
    return dict(prompt=prompt, chosen=turns('Yes?'), rejected=turns('No.'), messages=turns('Yes?'))


def parquet(rows):
    import pyarrow
    import pyarrow.parquet
    f = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f)
    return f.getvalue()


def dump(rows): return json.dumps(rows).encode()
def lines(rows): return '\n'.join(map(json.dumps, rows)).encode()
def asks(text): return [dict(instruction=f'{text} {i}', input='', output='ok') for i in range(2)]


SCRIPT = b'raise SystemExit("a loading script was executed")'
def liked(model, score): return dict(model=model, response=model*2, overall_score=score)


ANSWERED = dict(instruction='Hi.', completions=[liked('a', 8.5), liked('b', 3)])
OF_THE_FARM = {
    'alpaca_farm.py': SCRIPT, 'README.md': b'---\nlicense: cc-by-nc-4.0\n---\n',
    'alpaca_farm_evaluation.json': dump([dict(r, generator='text_davinci_003')
                                         for r in asks('eval')])}
for name in ('human', 'noisy_multi', 'gpt4'):
    OF_THE_FARM[f'alpaca_{name}_preference.json'] = dump([dict(PAIR, instruction=name)])
for split in ('sft', 'preference', 'unlabeled', 'val'):
    OF_THE_FARM[f'alpaca_instructions/{split}.json'] = dump(asks(split))
OF_HH = {'red-team-attempts/red_team_attempts.jsonl.gz': gzip.compress(b'{}')}
for part in ('harmless-base', 'helpful-base'):
    for split in ('train', 'test'):
        row = dict(HH, chosen=f'{HH["chosen"]} {part} {split}')
        OF_HH[f'{part}/{split}.jsonl.gz'] = gzip.compress(lines([row]))
BINARIZED = {}
for split in ('train_sft', 'train_prefs', 'test_prefs'):
    for i in (0, 1):
        BINARIZED[f'data/{split}-0000{i}-of-00002.parquet'] = parquet([binarized(f'{split} {i}')])
REPOSITORIES = {
    'tatsu-lab/alpaca_farm': OF_THE_FARM,
    'Anthropic/hh-rlhf': OF_HH,
    'HuggingFaceH4/ultrafeedback_binarized': BINARIZED,
    'openbmb/UltraFeedback': {'sharegpt.jsonl': lines([ANSWERED])},
    'somebody/nothing': {'nothing.py': SCRIPT},
    'somebody/gated': {'GATED': b''},
    'somebody/mine': {'train.csv': b'question,answer\nAdd.,2\n'}}

CODE = '''
import json, os, sys
from alpaca_farm.data.records import load_records
out = []
for case in json.loads(sys.argv[1]):
    try: out.append(load_records(*case))
    except Exception as e: out.append(f"{type(e).__name__}: {e}")
print("\\n" + json.dumps(out), flush=True)
os._exit(0)   # threads of pyarrow that are just starting can abort an interpreter that ends
'''
FARM = 'tatsu-lab/alpaca_farm'
CASES = {
    **{split: (FARM, split) for split in ('sft', 'unlabeled', 'val', 'eval')},
    'instructions': (f'{FARM}:alpaca_instructions', 'preference'),
    'human': (f'{FARM}:alpaca_human_preference', 'preferences', 'preference'),
    'noisy': (FARM, 'preferences', 'preference'),
    'references': (f'{FARM}:alpaca_farm_evaluation', 'outputs', 'output'),
    'pinned': (f'{FARM}@{hub_server.COMMIT}:alpaca_instructions', 'val'),
    'hh': ('Anthropic/hh-rlhf:harmless-base', 'preferences', 'preference'),
    'hh eval': ('Anthropic/hh-rlhf:helpful-base', 'eval'),
    'binarized': ('HuggingFaceH4/ultrafeedback_binarized', 'preferences', 'preference'),
    'binarized sft': ('HuggingFaceH4/ultrafeedback_binarized', 'sft', 'output'),
    'candidates': ('openbmb/UltraFeedback:sharegpt', 'candidates', ['candidates']),
    'columns': ('somebody/mine', 'sft', 'output', 0, 'instruction=question,output=answer'),
    'several': ('Anthropic/hh-rlhf', 'sft'),
    'no config': (f'{FARM}:alpaca_instruction', 'sft'),
    'no split': (f'{FARM}:alpaca_instructions', 'eval'),
    'nothing': ('somebody/nothing', 'sft'),
    'no such': ('somebody/no_such', 'sft'),
    'no revision': ('somebody/mine@v2', 'sft'),
    'gated': ('somebody/gated', 'sft')}


def read(cases, home, url, offline=False):
    env = dict(os.environ, HF_ENDPOINT=url, HF_HOME=str(home), HF_HUB_OFFLINE=str(int(offline)),
               HF_HUB_DISABLE_PROGRESS_BARS='1', HF_HUB_DISABLE_XET='1', PYTHONPATH=str(tiny.ROOT))
    env.pop('HF_TOKEN', None)
    done = subprocess.run([sys.executable, '-c', CODE, json.dumps(list(cases))],
                          capture_output=True, text=True, env=env, cwd=home)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope='module')
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp('hub')
    home = tmp_path_factory.mktemp('home')
    for repo, files in REPOSITORIES.items():
        for name, content in files.items():
            path = root/'datasets'/repo/name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    asked = []
    with serve(hub_server.hub(root, asked)) as server:
        results = dict(zip(CASES, read(CASES.values(), home, server.url)))
    return results, asked, home


def test_configurations_and_layouts(hub):
    got = hub[0]
    for split in ('sft', 'unlabeled', 'val', 'eval'):
        assert [r['instruction'] for r in got[split]] == [f'{split} 0', f'{split} 1'], got[split]
    assert got['instructions'][0]['instruction'] == 'preference 0'
    assert got['pinned'] == got['val']
    assert got['human'][0] == dict(PAIR, instruction='human')
    assert got['noisy'][0]['instruction'] == 'noisy_multi'
    assert got['references'][0]['generator'] == 'text_davinci_003'

    def best(r): return r[f'output_{r["preference"]:.0f}']
    assert best(got['hh'][0]) == 'Yes? harmless-base train'
    assert best(got['hh eval'][0]) == 'Yes? helpful-base test'
    assert [r['prompt'] for r in got['binarized sft']] == ['train_sft 0', 'train_sft 1']
    assert [best(r) for r in got['binarized']] == ['Yes?', 'Yes?']
    assert got['candidates'][0]['output'] == ['aa', 'bb']
    assert got['candidates'][0]['scores'] == [8.5, 3.]
    assert got['columns'][0]['output'] == '2'


@pytest.mark.parametrize('case, name', [
    ('several', 'harmless-base/test'), ('no config', 'alpaca_instructions'),
    ('no split', 'alpaca_instructions/eval'), ('nothing', 'no data'),
    ('no such', 'RepositoryNotFound'), ('no revision', 'RevisionNotFound'), ('gated', 'Gated')])
def test_what_cannot_be_read_is_said(hub, case, name):
    assert name in hub[0][case], hub[0][case]


def test_only_the_data_files_of_the_split_are_fetched(hub):
    fetched = {p for p in hub[1] if p.startswith('datasets/')}
    assert fetched
    assert not any(p.endswith('.py') or 'red_team' in p for p in fetched)
    assert not [p for p in Path(hub[2]).rglob('*.py')]


def test_without_a_network_the_cache_is_read(hub):
    cases = [CASES['sft'], CASES['binarized'], ('somebody/else', 'sft')]
    for offline in (True, False):
        sft, pairs, lost = read(cases, hub[2], 'http://127.0.0.1:9', offline)
        assert sft == hub[0]['sft']
        assert pairs == hub[0]['binarized']
        assert 'did not give it' in lost
        assert 'hf download somebody/else --repo-type dataset' in lost


def test_a_part_of_a_split_is_not_taken_for_all_of_it(hub):
    "An earlier download broke off, and the hub is out of reach now."
    shard, = Path(hub[2]).rglob('train_prefs-00001-of-00002.parquet')
    kept = shard.resolve().read_bytes()
    shard.unlink()
    broken, = read([CASES['binarized']], hub[2], 'http://127.0.0.1:9', True)
    shard.write_bytes(kept)
    assert 'ValueError' in broken
    assert 'did not give it' in broken or '1 of 2 shards' in broken


def test_a_method_learns_from_a_configuration(base, tmp_path, monkeypatch):
    "Preferences and instructions of the hub go through a whole run."
    from alpaca_farm import dpo
    from alpaca_farm.data.records import find_file
    asked = []
    def fetch(spec, names):
        asked.append((spec, *names))
        return find_file(str(base/('annotators' if 'preference' in spec else 'world')), *names)
    monkeypatch.setattr('alpaca_farm.data.records._hub_file', fetch)
    given = tiny.settings('dpo', base, out=str(tmp_path/'dpo'), data=FARM,
                          preferences=f'{FARM}:alpaca_human_preference')
    run = dpo.train(dpo.DPOConfig(**given))
    assert (run.folder/'summary.json').exists()
    assert dpo.train(dpo.DPOConfig(**given)).done
    assert {(f'{FARM}:alpaca_human_preference', 'preferences'), (FARM, 'eval')} <= set(asked)
