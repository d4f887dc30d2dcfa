"""What people get wrong: a clear error that names the fault, and nothing half-written."""
import builtins
import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import tiny
from alpaca_farm import ppo
from alpaca_farm.core.run import inputs, runs
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.run.inputs import ensure_inputs
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.runs import read_log, read_summary

ROWS = [dict(instruction=f'Say {i}.', input='', output=f'{i}.') for i in range(6)]
PAIRS = [dict(instruction=f'Say {i}.', input='', output_1='a', output_2='b', preference=1)
         for i in range(6)]


def changed(row, **more): return [dict(r, **more) if i == row else r for i, r in enumerate(ROWS)]


def as_json(rows): return json.dumps(rows).encode()


BAD = [(as_json(ROWS)[:-20], 'not valid JSON'),
       (as_json([*ROWS[:3], dict(instruction='Say 4.')]), "row 3: the field 'output' is missing"),
       (as_json(changed(1, instruction='  ')), "row 1: the field 'instruction' is empty"),
       (as_json(changed(4, output=None)), "row 4: the field 'output' is None")]


def refused(notebook, base, folder, error, match, **given):
    "A run fails with that error and leaves nothing."
    with pytest.raises(error, match=match): tiny.run(notebook, base, folder/'out', **given)
    assert not (folder/'out').exists()


@pytest.mark.parametrize('content, message', BAD)
def test_bad_demonstrations(base, tmp_path, content, message):
    (tmp_path/'bad.json').write_bytes(content)
    refused('sft', base, tmp_path, ValueError, rf'bad\.json.*{message}', val_split='',
            eval_split='', data=str(tmp_path/'bad.json'))


@pytest.mark.parametrize('notebook', ['sft', 'ppo'])
def test_one_file_is_not_several_splits(base, tmp_path, notebook):
    (tmp_path/'all.json').write_bytes(as_json(ROWS))
    message = r'all\.json is one file, .*split and val_split and eval_split at once'
    refused(notebook, base, tmp_path, ValueError, message, data=str(tmp_path/'all.json'))


def test_another_policy_needs_data(base, tmp_path, monkeypatch):
    given = tiny.settings('ppo', base, out=str(tmp_path/'out'))
    del given['data']
    copy = shutil.copytree(base/'sft'/'model', tmp_path/'copy')   # is nobody's run
    for policy in ('org/model', str(copy)):
        message = f'^data: {policy} is no policy of the embedded world'
        with pytest.raises(ValueError, match=message):
            ppo.train(ppo.PPOConfig(**given | dict(policy=policy)))
    assert not (tmp_path/'out').exists()
    step = tmp_path/'run'/'model-2'
    shutil.copytree(base/'sft'/'model', step)
    shutil.copy(base/'sft'/'config.json', step.parent)
    monkeypatch.setattr(inputs, 'build', lambda *_, **__: None)
    ensure_inputs(ppo.PPOConfig(**given | dict(policy=str(step))), ('policy', 'data'))
    none = dict.fromkeys(('split', 'val_split', 'eval_split'), '')   # nothing is read from it
    ensure_inputs(ppo.PPOConfig(**given | none | dict(policy=policy)), ('policy', 'data'))


def test_too_little_training_is_said(base, tmp_path, capsys):
    tiny.run('sft', base, tmp_path/'out', eval_split='', learning_rate=3.)
    said = capsys.readouterr().out
    assert 'only 5 optimiser steps' in said and 'the loss on val has risen from' in said
    tiny.run('reward_model', base, tmp_path/'rm')
    assert '12 held-out labels' in capsys.readouterr().out


@pytest.mark.parametrize('row, message', [
    (dict(preference=3), "'preference' is 3"), (dict(preference='many'), "is 'many'"),
    (dict(output_2=None), "'output_2' is None")])
@pytest.mark.parametrize('notebook', ['reward_model', 'dpo'])
def test_bad_preferences(base, tmp_path, notebook, row, message):
    rows = [dict(p, **row) if i == 3 else p for i, p in enumerate(PAIRS)]
    (tmp_path/'bad.json').write_text(json.dumps(rows))
    refused(notebook, base, tmp_path, ValueError, rf'bad\.json, row 3: the field .*{message}',
            preferences=str(tmp_path/'bad.json'))


LONG_PROMPTS = dict(
    sft=dict(max_length=128, val_split='', eval_split=''),
    ppo=dict(annotators='', rollouts=8, val_split='', eval_split=''),
    best_of_n=dict(reward_model='', chunk=3))   # too long a prompt costs itself, not its chunk


@pytest.mark.parametrize('notebook', LONG_PROMPTS)
def test_long_prompts_are_counted_and_reported(base, tmp_path, capsys, notebook):
    rows = load_records(str(base/'world'), 'eval', 'output', 12)
    for r in rows[3:5]: r['instruction'] += ' please'*150
    (tmp_path/'long.json').write_text(json.dumps(rows))
    tiny.run(notebook, base, tmp_path/'out', data=str(tmp_path/'long.json'),
             **LONG_PROMPTS[notebook])
    assert '2 of 12' in capsys.readouterr().out
    assert read_summary(tmp_path/'out')['too_long'] == 2
    if notebook == 'best_of_n': assert len(read_json(tmp_path/'out'/'outputs.json')) == 10


@pytest.mark.parametrize('notebook', ['reward_model', 'dpo'])
def test_long_pairs_are_counted_and_reported(base, tmp_path, capsys, notebook):
    rows = read_json(base/'annotators'/'preferences.json')
    for i, r in enumerate(rows[:10]): r.update(output_2=f'{i}' + ' very'*150)
    (tmp_path/'long.json').write_text(json.dumps(rows))
    more = dict(held_out=1) if notebook == 'reward_model' else dict(eval_split='')
    tiny.run(notebook, base, tmp_path/'out', preferences=str(tmp_path/'long.json'), **more)
    assert ' of ' in capsys.readouterr().out
    found = read_summary(tmp_path/'out')
    assert found['too_long'] in (9, 10)
    assert found['too_long'] + found['labels'] + found.get('held_out', 0) == 60


def test_out_that_cannot_be_written(base, tmp_path):
    (tmp_path/'file').write_text('mine')
    for out in (tmp_path/'file'/'sft', tmp_path/'file'):
        with pytest.raises(OSError, match='cannot write there'): tiny.run('sft', base, out)
    assert (tmp_path/'file').read_text() == 'mine'


@pytest.mark.parametrize('files', [['config.json'], ['.a.json.123', '.git/config'], ['data.csv']])
def test_out_that_is_not_ours_is_untouched(base, tmp_path, files):
    "Another program's folder, or one with hidden files only."
    out = tmp_path/'theirs'
    for name in files:
        (out/name).parent.mkdir(parents=True, exist_ok=True)
        (out/name).write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match='holds files that do not belong to a run'):
        tiny.run('sft', base, out)
    assert sorted(str(p.relative_to(out)) for p in out.rglob('*') if p.is_file()) == files


@pytest.fixture(scope='module')
def whole(base):
    "A finished run of SFT."
    return tiny.run('sft', base, base/'my_sft').folder


@pytest.fixture
def run_of_sft(base, whole, tmp_path):
    "A copy of it that may be spoiled, and a function that runs it again."
    shutil.copytree(whole, tmp_path/'sft')
    def again(out=tmp_path/'sft', **more): return tiny.run('sft', base, out, **more)
    return tmp_path/'sft', again


def test_only_our_own_temporary_files_are_swept(run_of_sft):
    folder, again = run_of_sft
    theirs = ['.backup.2023/notes.txt', '.x.123', 'checkpoint/.keep']
    for name in (*theirs, '.alpaca_farm-model.123/config.json',
                 'checkpoint/.alpaca_farm-state.safetensors.1/.tmpB11v7m'):
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        (folder/name).write_text('')
    (folder/'summary.json').unlink()
    again()
    files = [str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file()]
    assert {name for name in files if '/.' in f'/{name}'} == set(theirs)


@pytest.mark.parametrize('out, message', [
    ('world', 'lies in the input'), ('', 'lies in the input'), ('sft/model', 'lies in the input'),
    ('annotators/model', 'a part of the run')])
def test_out_among_inputs_or_in_a_run(base, out, message):
    was = sorted(base.rglob('*'))
    with pytest.raises(ValueError, match=message):
        tiny.run('reward_model', base, base/out, preferences=str(base/'world'/'preference.json'))
    assert sorted(base.rglob('*')) == was


def test_a_linked_out_stays_a_link(base, tmp_path):
    (tmp_path/'disk').mkdir()
    (tmp_path/'sft').symlink_to(tmp_path/'disk'/'mine', target_is_directory=True)
    for seed in (0, 1):
        tiny.run('sft', base, tmp_path/'sft', eval_split='', val_split='', seed=seed)
    assert (tmp_path/'sft').is_symlink()
    assert sorted(p.name for p in (tmp_path/'disk').glob('mine*')) == ['mine', 'mine~1']
    assert [read_json(tmp_path/'disk'/n/'config.json')['settings']['seed']
            for n in ('mine~1', 'mine')] == [0, 1]


def test_a_failing_command_leaves_the_earlier_run(run_of_sft):
    folder, again = run_of_sft
    was = {p: p.stat().st_mtime_ns for p in folder.rglob('*')}
    for given in (dict(split='nothing'), dict(max_length=2),
                  dict(seed=1, policy=str(folder.parent))):
        with pytest.raises((ValueError, FileNotFoundError)): again(**given)
        assert {p: p.stat().st_mtime_ns for p in folder.rglob('*')} == was
        with pytest.raises((ValueError, FileNotFoundError)):
            again(folder.with_name('new'), **given)
        assert [p.name for p in folder.parent.iterdir()] == ['sft']
    assert again().done


def test_a_damaged_config_names_the_file(run_of_sft):
    folder, again = run_of_sft
    (folder/'config.json').write_text('{"settings": ')
    with pytest.raises(ValueError, match=r'sft/config\.json is damaged .* delete'): again()
    assert not folder.with_name('sft~1').exists()


def test_what_is_damaged_at_resume_is_named(base, tmp_path, monkeypatch):
    "A checkpoint cut short, and a log that ends before it; a last line cut short is left out."
    def run(): return tiny.run('sft', base, tmp_path/'sft', checkpoint_every=2)
    with monkeypatch.context() as m:
        fill_disk(m, 'model')
        fail_full(run)
    log, state = tmp_path/'sft'/'log.jsonl', tmp_path/'sft'/'checkpoint'/'state.safetensors'
    text, whole_state = log.read_text(), state.read_bytes()
    state.write_bytes(whole_state[:-100])
    with pytest.raises(ValueError, match='state.safetensors is damaged'): run()
    state.write_bytes(whole_state)
    for cut in (text[:len(text)//3], text[9:]):
        log.write_text(cut)
        with pytest.raises(ValueError, match='log.jsonl is damaged'): run()
    log.write_text(text + '{"step": ')
    run()
    steps = [r['step'] for r in read_log(tmp_path/'sft')]
    assert steps == [*range(1, len(steps) + 1)] and read_summary(tmp_path/'sft')


FULL = OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.parametrize('name', ['model', 'outputs.json', 'summary.json', 'state.safetensors',
                                  'log.jsonl'])
def test_full_disk_in_a_run(base, tmp_path, monkeypatch, name):
    "Nothing is half-written, and with space again the run goes on to the same end."
    def run(name): return tiny.run('sft', base, tmp_path/name/'sft', checkpoint_every=2).folder
    with monkeypatch.context() as m:
        fill_disk(m, name)
        fail_full(lambda: run('full'))
    folder = tmp_path/'full'/'sft'
    assert not list(folder.rglob('.*')) and not (folder/'summary.json').exists()
    assert name != 'model' or not (folder/'model').exists()
    for p in folder.rglob('*.json'): read_json(p)
    read_log(folder)
    def end(name):
        made = run(name)
        log = [{k: v for k, v in r.items() if k != 'wall'} for r in read_log(made)]
        return log, (made/'model'/'model.safetensors').read_bytes()
    assert end('full') == end('whole')


def fill_disk(m, name):
    "Let the disk be full for `name`: its file gets some bytes, then nothing more fits."
    if name == 'log.jsonl':
        real = builtins.open
        def half(path, mode='r', *a, **k):
            f = real(path, mode, *a, **k)
            if mode == 'a' and Path(path).name == name and Path(path).stat().st_size > 300:
                f.write('{"step": ')
                f.close()
                raise FULL
            return f
        m.setattr(runs, 'open', half, raising=False)
    elif name == 'model':
        from transformers import PreTrainedTokenizerFast
        def full(self, folder, **k):
            (Path(folder)/'tokenizer.json').write_text('{"ver')
            raise FULL
        m.setattr(PreTrainedTokenizerFast, 'save_pretrained', full)
    else:
        real = os.replace
        def full(a, b):
            if Path(b).name == name: raise FULL
            return real(a, b)
        m.setattr(os, 'replace', full)


def fail_full(run):
    with pytest.raises(OSError, match='No space left'): run()


def test_a_policy_without_a_whole_model_is_refused(base, tmp_path):
    shutil.copytree(base/'sft', tmp_path/'sft')
    model = tmp_path/'sft'/'model'
    refused('best_of_n', base, tmp_path, FileNotFoundError, 'there is no model',
            policy=str(base/'annotators'))
    for name, content, message in (
            ('tokenizer.json', b'{"a": ', 'its tokenizer cannot be read'),
            ('tokenizer_config.json', b'[]', 'its tokenizer cannot be read'),
            ('chat_template.jinja', b'{% if', 'its chat template is not valid'),
            ('config.json', b'{}', 'its config.json cannot be read'),
            ('config.json', b'{"model_type": "llama", "hidden_size": "x"}', 'config.json cannot'),
            ('model.safetensors', b'', 'model.safetensors is damaged')):
        was = (model/name).read_bytes() if (model/name).exists() else b''
        (model/name).write_bytes(content or was[:-1000])
        refused('sft', base, tmp_path, ValueError, message, policy=str(tmp_path/'sft'))
        if was: (model/name).write_bytes(was)
        else: (model/name).unlink()


def ended(notebook, given, capsys):
    "What `python -m` says of an error that ends it."
    import runpy
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, 'argv', [f'{notebook}.py', *tiny.command(notebook, **given)[3:]])
        m.setattr(sys, 'excepthook', sys.excepthook)
        module = tiny.module_of(notebook)
        m.delitem(sys.modules, module)
        with pytest.raises(Exception) as e: runpy.run_module(module, None, '__main__')
        sys.excepthook(e.type, e.value, e.value.__traceback__)
    return capsys.readouterr().err


def test_an_error_of_a_file_ends_a_command_with_one_line(base, tmp_path, capsys, monkeypatch):
    "A fault of the code, or of what it calls, has its traceback."
    (tmp_path/'bad.json').write_bytes(as_json(changed(4, output=None)))
    given = tiny.settings('sft', base, out=str(tmp_path/'out'), val_split='', eval_split='')
    wrong = given | dict(data=str(tmp_path/'bad.json'))
    message = "bad.json, row 4: the field 'output' is None"
    said = ended('sft', wrong, capsys)
    assert said.startswith('sft.py: error: ') and message in said and said.count('\n') == 1
    (tmp_path/'file').write_text('mine')
    said = ended('sft', given | dict(out=str(tmp_path/'file')), capsys)
    assert 'cannot write there' in said and said.count('\n') == 1
    def fault(*_, **__): return [][0]
    for broken in (fault, lambda *_, **__: json.loads('{')):
        monkeypatch.setattr('alpaca_farm.core.data.text.encode', broken)
        assert 'Traceback (most recent call last)' in ended('sft', given, capsys)


def test_a_folder_is_no_file_of_settings(base, capsys):
    from alpaca_farm.core.run.settings import from_args
    for notebook, args in (('real', ['--size', str(base)]), ('sft', ['-f', str(base)])):
        with pytest.raises(SystemExit): from_args(tiny.config_class(notebook), args)
        said = capsys.readouterr().err
        assert f'{base}: there is no such' in said and said.count('\n') == 1


BROKEN = dict(   # by notebook: settings, and which file of what they name is damaged
    sft='data/sft data/val data/eval', reward_model='preferences/preferences',
    dpo='preferences/preferences data/eval',
    binary_feedback='preferences/preferences data/val data/eval annotators/labels',
    ppo='data/unlabeled data/val data/eval annotators/labels',
    quark='data/unlabeled data/val data/eval annotators/labels',
    expert_iteration='data/unlabeled data/val data/eval',
    rrhf='candidates/candidates data/eval', best_of_n='data/eval samples/labels',
    rlcd='data/unlabeled annotators/labels', annotators='outputs/candidates',
    eval='outputs/outputs reference/candidates labels/labels difficulty/labels annotators/labels',
    decoding='data/val data/eval annotators/labels', compare='folders/outputs labels/labels',
    agreement='sets/labels judges/labels', overoptimization='bank/candidates references/candidates',
    bring_your_own='prompts/eval preferences/preferences demonstrations/labels labels/labels')


@pytest.mark.parametrize('notebook, broken', [
    (notebook, path) for notebook, paths in BROKEN.items() for path in paths.split()], ids=str)
def test_a_damaged_file_is_refused_before_a_model_is_loaded(base, tmp_path, monkeypatch, notebook,
                                                            broken):
    "Every judge is a reward model, unless its file is the damaged one."
    world, sft, samples, labels, judge = (
        str(base/name) for name in ('world', 'sft', 'samples', 'annotators', 'reward_model'))
    judged = dict.fromkeys(('binary_feedback', 'ppo', 'quark', 'annotators'),
                           dict(annotators=judge))
    sound = judged | dict(
        rlcd=dict(method='rlaif', split='unlabeled'), best_of_n=dict(policy=sft, n=2),
        eval=dict(outputs=[samples], reference=samples, annotators=[judge]),
        decoding=dict(policies=[sft], reference=sft, annotators=judge, data=world),
        compare=dict(folders=[sft, samples], annotators=judge),
        agreement=dict(sets=[labels], judges=[judge]),
        overoptimization=dict(policy=sft, bank=samples, references=samples, proxies=[judge],
                              policies=[sft], crowd=judge),
        bring_your_own=dict(model=sft, prompts=world, preferences=labels, judge=judge))
    given = tiny.settings(notebook, base) if notebook in tiny.SETTINGS else {}
    given |= sound.get(notebook, {})
    setting, name = broken.split('/')
    value = given.get(setting, '')
    named = value[0] if isinstance(value, list) and value else value
    damaged = tmp_path/'labels.json'
    if os.path.isdir(named or '') and name != 'labels':
        damaged = shutil.copytree(named, tmp_path/Path(named).name)/f'{name}.json'
    damaged.write_text('[{"instruction": "Say 1.", "output": ')
    spoiled = str(damaged if name == 'labels' else damaged.parent)
    cls = tiny.config_class(notebook)
    listed = isinstance(getattr(cls(), setting), list)
    given |= {setting: [*(value or [])[1:], spoiled] if listed else spoiled}

    def load(*_, **__): raise AssertionError('a model is loaded')
    monkeypatch.setattr('alpaca_farm.core.model.models.load_model', load)
    with pytest.raises(ValueError, match=rf'{name}\.json.* not valid JSON'):
        tiny.run(notebook, base, tmp_path/'out', **given)
    assert not (tmp_path/'out').exists()
