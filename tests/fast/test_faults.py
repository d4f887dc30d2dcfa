"""What people get wrong: a clear error that names the fault, and nothing half-written."""
import builtins
import contextlib
import errno
import json
import os
import pickle
import pty
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import tiny
from alpaca_farm import farm, ppo, sft
from alpaca_farm.ask import client
from alpaca_farm.boards import farm_board
from alpaca_farm.boards.compare import _differing_settings, CompareConfig
from alpaca_farm.data.records import load_records
from alpaca_farm.model import loading
from alpaca_farm.model.loading import model_path
from alpaca_farm.run import files, jobs, progress, runs
from alpaca_farm.run.defaults import count_weights
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.paths import notebooks_folder
from alpaca_farm.run.runs import content_hash, ensure_inputs, read_log, read_signed, read_summary
from alpaca_farm.run.runs import signed
from alpaca_farm.run.settings import Config
from alpaca_farm.worlds.folder import World

ROWS = [dict(instruction=f'Say {i}.', input='', output=f'{i}.') for i in range(6)]


def refused(notebook, base, folder, error, match, **given):
    "A run fails with that error and leaves nothing."
    with pytest.raises(error, match=match):
        tiny.run(notebook, base, folder/'out', **given)
    assert not (folder/'out').exists()


LONGEST = 'alpaca_farm.boards.agreement:prefer_longer'
JUDGES = {'judge', 'judges', 'annotators'}


def commands_on_the_embedded_world():
    "Classes of settings with several inputs of the embedded world, and the names of these."
    for path in notebooks_folder().rglob('*.ipynb'):
        name = path.relative_to(notebooks_folder()).with_suffix('')
        if name.parts[0] in (*tiny.SHARED, 'studies'):
            continue
        try:
            kind = tiny.config_class(str(name))
        except (ImportError, StopIteration):
            continue
        cfg = kind()
        names = [n for n in cfg.inputs if 'runs/' in str(getattr(cfg, n))]
        if len(names) > 1:
            yield kind, names


COMMANDS = list(commands_on_the_embedded_world())


def with_input(kind, name, path):
    "Settings of which one input is named, twice where there may be several."
    several = isinstance(getattr(kind(), name), list)
    twice = [path, os.path.join(path, '')] if os.path.isdir(path) else [path]
    return kind(**{name: twice if several else path})


def test_most_commands_stand_on_the_embedded_world(): assert len(COMMANDS) > 15


@pytest.mark.parametrize('kind, names', COMMANDS, ids=lambda x: getattr(x, '__name__', ''))
def test_a_real_input_is_never_joined_by_the_embedded_world(base, monkeypatch, tmp_path, kind,
                                                            names):
    built = []
    monkeypatch.setattr(runs, 'build', lambda _, out, **__: built.append(out))
    copy = shutil.copytree(base/'sft'/'model', tmp_path/'copy')   # is nobody's run
    for name in names:
        if name in JUDGES:   # who judges goes with any world
            ensure_inputs(with_input(kind, name, LONGEST))
            ensure_inputs(with_input(kind, name, str(base/'reward_model'/'model')))
            continue
        forgotten = ', '.join(n for n in names if n != name)
        message = f'^{forgotten}: the default is of the embedded world, and {name} = {copy} is not[.]'
        with pytest.raises(ValueError, match=message):
            ensure_inputs(with_input(kind, name, str(copy)))
    built.clear()
    ensure_inputs(kind())   # all of them are of one world
    assert built


def test_the_world_of_a_run_is_that_of_what_it_was_made_from(base, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'build', lambda *_, **__: None)
    step = shutil.copytree(base/'sft'/'model', tmp_path/'run'/'model-2')
    shutil.copy(base/'sft'/'config.json', step.parent)
    ensure_inputs(ppo.PPOConfig(policy=str(step)))
    for source in ('org/model', str(tmp_path/'gone')):   # the same run, made from another model
        config = runs.run_config(base/'sft') | dict(inputs=dict(policy={source: ''}))
        (step.parent/'config.json').write_text(json.dumps(config))
        with pytest.raises(ValueError, match='^reward_model, data: the default is'):
            ensure_inputs(ppo.PPOConfig(policy=str(step)))
    for path in ('runs/ppo/labels.json', str(runs.at_root('runs/ppo/labels.json'))):
        assert runs._of_embedded_world(path)   # a file beside runs, however it is named
    none = dict.fromkeys(('split', 'val_split', 'eval_split'), '') | dict(reward_model=LONGEST)
    ensure_inputs(ppo.PPOConfig(policy=str(step), **none))   # nothing else is read


def test_too_little_training_is_said(base, tmp_path, capsys):
    tiny.run('sft', base, tmp_path/'out', eval_split='', learning_rate=3.)
    said = capsys.readouterr().out
    assert 'only 5 optimiser steps' in said
    assert 'the held-out loss has risen from' in said
    assert 'only 5 optimiser steps' in read_summary(tmp_path/'out')['warnings'][0]
    tiny.run('reward_model', base, tmp_path/'rm')
    assert 'accuracy on held-out labels' in capsys.readouterr().out


SHORT = dict(val_split='', eval_split='')
LONG = dict(   # settings under which a prompt is too long
    sft=dict(SHORT, max_length=128),
    ppo=dict(SHORT, annotators='', rollouts=8),
    best_of_n=dict(reward_model='', chunk=3))   # a prompt costs itself, not its chunk


@pytest.mark.parametrize('notebook', LONG)
def test_prompts_that_are_too_long_are_counted(base, tmp_path, capsys, notebook):
    rows = load_records(str(base/'world'), 'eval', 'output', 12)
    for r in rows[:2]:
        r['instruction'] += ' please'*150
    file = tiny.write(tmp_path/'long.json', rows)
    tiny.run(notebook, base, tmp_path/'out', data=file, **LONG[notebook])
    assert read_summary(tmp_path/'out')['too_long'] == 2
    assert '2 of 12' in capsys.readouterr().out
    if notebook == 'best_of_n':
        assert len(read_json(tmp_path/'out'/'outputs.json')) == 10


@pytest.mark.parametrize('notebook, more', [
    ('reward_model', dict(held_out=1)), ('dpo', dict(eval_split=''))])
def test_pairs_that_are_too_long_are_counted(base, tmp_path, notebook, more):
    "Ten of sixty; one may be held out."
    rows = read_json(base/'annotators'/'preferences.json')
    for i, r in enumerate(rows[-10:]):
        r['output_2'] = f'{i}' + ' very'*150
    file = tiny.write(tmp_path/'long.json', rows)
    tiny.run(notebook, base, tmp_path/'out', preferences=file, **more)
    found = read_summary(tmp_path/'out')
    assert found['too_long'] in (9, 10)
    assert found['too_long'] + found['labels'] + found.get('held_out', 0) == 60


def test_out_that_cannot_be_written(base, tmp_path):
    (tmp_path/'file').write_text('mine')
    for out in (tmp_path/'file'/'sft', tmp_path/'file'):
        with pytest.raises(OSError, match='cannot write there'):
            tiny.run('sft', base, out)
    assert (tmp_path/'file').read_text() == 'mine'


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


def test_a_resume_leaves_what_is_not_its_own(run_of_sft):
    "Beside its files and in its model's folder; temporary files of its own go."
    folder, again = run_of_sft
    theirs = ['.backup.2023/notes.txt', '.x.123', 'checkpoint/.keep', 'model/notes.txt',
              'model/plots/a.csv']
    for name in (*theirs, '.alpaca_farm-model.123/config.json',
                 'checkpoint/.alpaca_farm-state.safetensors.1/.tmpB11v7m'):
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        (folder/name).write_text('mine')
    weights = (folder/'model'/'model.safetensors').read_bytes()
    (folder/'model'/'model.safetensors').write_bytes(b'of a step before')
    (folder/'summary.json').unlink()
    again()
    assert {(folder/name).read_text() for name in theirs} == {'mine'}
    assert not [p for p in folder.rglob('.alpaca_farm*') if p.suffix != '.lock']
    assert (folder/'model'/'model.safetensors').read_bytes() == weights


@pytest.mark.parametrize('out, message', [
    ('', 'lies in the input'), ('annotators/model', 'a part of the run')])
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
        with pytest.raises((ValueError, FileNotFoundError)):
            again(**given)
        assert {p: p.stat().st_mtime_ns for p in folder.rglob('*')} == was
        with pytest.raises((ValueError, FileNotFoundError)):
            again(folder.with_name('new'), **given)
        assert [p.name for p in folder.parent.iterdir()] == ['sft']
    assert again().done


def test_what_is_damaged_at_resume_is_named(base, tmp_path, monkeypatch):
    "A checkpoint cut short, and a log that ends before it; a last line cut short is left out."
    def run(): return tiny.run('sft', base, tmp_path/'sft', checkpoint_every=2)
    with monkeypatch.context() as m:
        fill_disk(m, 'model')
        fail_full(run, 'model')
    log = tmp_path/'sft'/'log.jsonl'
    state = tmp_path/'sft'/'checkpoint'/'state.safetensors'
    text = log.read_text()
    whole_state = state.read_bytes()
    state.write_bytes(whole_state[:-100])
    with pytest.raises(ValueError, match='state.safetensors is damaged'):
        run()
    state.write_bytes(whole_state)
    for cut in (text[:len(text)//3], text[9:]):
        log.write_text(cut)
        with pytest.raises(ValueError, match='log.jsonl is damaged'):
            run()
    log.write_text(text + '{"step": ')
    run()
    steps = [r['step'] for r in read_log(tmp_path/'sft')]
    assert steps == [*range(1, len(steps) + 1)]
    assert read_summary(tmp_path/'sft')


def full_disk(*_, **__): raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['model', 'outputs.json', 'summary.json', 'state.safetensors',
                                  'log.jsonl'])
def test_full_disk_in_a_run(base, tmp_path, monkeypatch, name):
    "Nothing is half-written, and with space again the run goes on to the same end."
    def run(name): return tiny.run('sft', base, tmp_path/name/'sft', checkpoint_every=2).folder
    with monkeypatch.context() as m:
        fill_disk(m, name)
        fail_full(lambda: run('full'), name)
    folder = tmp_path/'full'/'sft'
    assert [p.name for p in folder.rglob('.*')] == ['.alpaca_farm-run.lock']   # of this process
    assert not (folder/'summary.json').exists()
    assert name != 'model' or not (folder/'model').exists()
    for p in folder.rglob('*.json'):
        read_json(p)
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
                full_disk()
            return f
        m.setattr(runs, 'open', half, raising=False)
    elif name == 'model':
        from transformers import PreTrainedTokenizerFast
        def full(self, folder, **k):
            (Path(folder)/'tokenizer.json').write_text('{"ver')
            full_disk()
        m.setattr(PreTrainedTokenizerFast, 'save_pretrained', full)
    else:
        real = os.replace
        def full(a, b):
            if Path(b).name == name:
                full_disk()
            return real(a, b)
        m.setattr(os, 'replace', full)


def fail_full(run, name):
    with pytest.raises(OSError, match=f"No space left on device: '.*sft/.*{name}'$"):
        run()


def test_a_finished_run_on_a_disk_that_cannot_be_written_is_read(base, run_of_sft, monkeypatch):
    folder, again = run_of_sft
    def only_read(*_, **__): raise OSError(errno.EROFS, 'Read-only file system')
    with monkeypatch.context() as m:
        m.setattr(os, 'access', lambda path, mode, **_: mode != os.W_OK)
        for name in ('mkdir', 'rename', 'replace', 'unlink'):
            m.setattr(os, name, only_read)
        assert again().done
        for other in (dict(seed=1), dict(eval_instances=5)):
            with pytest.raises(OSError, match='cannot write there'):
                again(**other)
    assert sorted(p.name for p in folder.parent.iterdir()) == ['sft']


def test_a_run_is_not_moved_in_a_folder_that_cannot_be_written(run_of_sft, monkeypatch, capsys):
    "It is told by its name before anything is said or done; the run itself could go on there."
    folder, again = run_of_sft
    real = os.access
    def access(path, mode, **more): return Path(path) != folder.parent and real(path, mode, **more)
    monkeypatch.setattr(os, 'access', access)
    assert again().done
    with pytest.raises(OSError, match=rf'cannot write there \({folder.parent} is no folder'):
        again(seed=1)
    assert 'takes its place' not in capsys.readouterr().out
    assert [p.name for p in folder.parent.iterdir()] == ['sft']


def test_links_beside_and_in_a_run(run_of_sft, tmp_path):
    "The name of a link that leads nowhere is taken; a model on another disk is not touched."
    folder, again = run_of_sft
    folder.with_name('sft~1').symlink_to(tmp_path/'gone')
    shutil.move(folder/'model', tmp_path/'disk')
    (folder/'model').symlink_to(tmp_path/'disk')
    (folder/'.alpaca_farm-model.7').symlink_to(tmp_path/'disk')
    (folder/'summary.json').unlink()
    before = {p: p.read_bytes() for p in (tmp_path/'disk').iterdir()}
    again()
    again(seed=1)
    assert {p: p.read_bytes() for p in (tmp_path/'disk').iterdir()} == before
    assert read_summary(folder.with_name('sft~2'))
    assert folder.with_name('sft~1').is_symlink()
    (tmp_path/'loop').symlink_to('loop')
    with pytest.raises(OSError, match='cannot write there'):
        again(tmp_path/'loop')


def turn_a_bit(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw)//2] ^= 1
    path.write_bytes(raw)


def test_other_answers_are_another_run(run_of_sft, capsys):
    "What is said names the command that answers with the policy that is there."
    folder, again = run_of_sft
    again(eval_instances=5)
    assert 'best_of_n -p n 1' in capsys.readouterr().out
    assert read_summary(folder.with_name('sft~1'))
    assert again(eval_instances=5).done


def test_a_run_of_an_earlier_version_is_told_and_set_aside(run_of_sft, capsys):
    folder, again = run_of_sft
    old = read_json(folder/'config.json')
    del old['digest'], old['left_open']
    files.write_json(folder/'config.json', old | dict(fingerprint='', versions={}))
    again()
    assert 'an earlier version' in capsys.readouterr().out
    assert read_json(folder.with_name('sft~1')/'config.json')['fingerprint'] == ''


def compared(folder): return _differing_settings([folder, folder])


@pytest.mark.parametrize('name, reader, shown', [
    ('config.json', runs.run_config, compared), ('summary.json', read_summary, read_summary)])
def test_a_digit_of_settings_or_figures_is_seen_by_who_reads_it(run_of_sft, name, reader, shown):
    folder, again = run_of_sft
    text = (folder/name).read_text()
    assert 'digest' not in reader(folder)
    places = [m.start() for m in re.finditer(r'(?<!\\u)\d', text)]
    for at in places[::7]:
        changed = text[:at] + str(int(text[at]) % 9 + 1) + text[at + 1:]
        (folder/name).write_text(changed)
        for read in (lambda: reader(folder), lambda: shown(str(folder)), again):
            with pytest.raises(ValueError, match=f'{name} is damaged'):
                read()
    old = json.loads(text)   # of a run that was made before there were digests
    del old['digest']
    (folder/name).write_text(json.dumps(old | dict(seconds=7)))
    assert reader(folder)['seconds'] == 7
    (folder/name).write_text(text)
    assert again().done


def test_a_damaged_run_says_so_when_it_is_started_again(run_of_sft):
    "A file that is gone too, unless it is a checkpoint, which one deletes for its space."
    folder, again = run_of_sft
    (folder/'model-3').mkdir()
    name = 'model/model.safetensors'
    was = (folder/name).read_bytes()
    for harm in (turn_a_bit, Path.unlink):
        harm(folder/name)
        with pytest.raises(ValueError, match=name):
            again()
        (folder/name).write_bytes(was)
    kept = read_json(folder/'summary.json')
    gone = kept['files'] | {'model-3/model.safetensors': 'abc'}
    files.write_json(folder/'summary.json', signed(kept | dict(files=gone)))
    assert again().done


def test_a_digest_is_of_what_is_read_again(tmp_path):
    "Texts that UTF-8 cannot hold, numbers as names, tuples, and what is no number."
    odd = dict(a='\ud83d', b={10: 1, 9: (1., -0.)}, c=float('nan'), d=[1e400, 2**70], e='é')
    files.write_json(tmp_path/'a.json', signed(signed(odd)))
    assert [*read_signed(tmp_path/'a.json')] == [*odd]


def test_a_bit_that_turned_on_the_disk_is_seen_when_a_run_is_made(tmp_path, monkeypatch):
    "Size and times of a large file are as they were: its hash is remembered."
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    run = tmp_path/'run'
    memory = tmp_path/'cache'/'alpaca_farm'/'hashes.json'
    files.write_json(run/'config.json', dict(notebook='toy', fingerprint='', inputs={}))
    weights = run/'model'/'model.safetensors'
    weights.parent.mkdir()
    weights.write_bytes(bytes(2**21))
    files.write_json(run/'summary.json', dict(files=runs._hash_weights(run)))
    turn_a_bit(weights)
    stat, (name, known) = weights.stat(), *read_json(memory).items()
    files.write_json(memory, {name: [*known[:1], stat.st_mtime_ns, stat.st_ctime_ns, known[3]]})
    content_hash(str(weights))   # nothing is seen
    cfg = ppo.PPOConfig(out=str(tmp_path/'out'), policy=str(weights), data=str(weights),
                        reward_model=str(weights))
    with pytest.raises(ValueError, match='model.safetensors'):
        runs.start(cfg, ppo.train)


@pytest.mark.parametrize('what', ['log.jsonl', ''])
def test_a_run_whose_folder_or_log_vanishes_ends(tmp_path, what):
    def begun(name):
        run = runs.Run(Config(out=str(tmp_path/name)), dict(notebook='toy', fingerprint=''))
        run.load()
        for step in (1, 2):
            run.log(step, loss=1.)
        return run, run.folder/what
    for name in ('log', 'finish'):
        run, path = begun(name)
        if what:
            path.unlink()
        else:
            path.rename(tmp_path/f'{name} moved')
        with pytest.raises(OSError, match='was removed or'):
            run.log(3, loss=1.) if name == 'log' else run.finish()
        assert not (run.folder/'summary.json').exists()
        assert path.exists() == False
    run, path = begun('replaced')
    shutil.copytree(run.folder, tmp_path/'copy')
    shutil.rmtree(run.folder)
    shutil.copytree(tmp_path/'copy', run.folder)   # as another process would
    with pytest.raises(OSError, match='was removed or replaced'):
        run.log(3, loss=1.)


def test_a_clock_that_jumps_back_takes_no_time_away(tmp_path, monkeypatch):
    run = runs.Run(Config(out=str(tmp_path/'run')), {})
    run.load()
    with monkeypatch.context() as m:
        m.setattr(time, 'time', lambda: 0.)
        run.log(1)
        run.finish()
    assert 0 <= read_log(run.folder)[0]['wall'] < 1e6   # not the seconds since 1970
    assert 0 <= read_summary(run.folder)['seconds'] < 1e6


def test_who_takes_the_place_of_a_run_is_told_before_any_work(run_of_sft, monkeypatch, capsys):
    "What is moved, and how to keep both; once."
    folder, again = run_of_sft
    def stop(cfg): raise InterruptedError
    with monkeypatch.context() as m:
        m.setattr(runs, 'ensure_inputs', stop)
        with pytest.raises(InterruptedError):
            again(learning_rate=.02)
        said = capsys.readouterr().out.strip()
    assert len(said.splitlines()) == 1
    for part in (f'{folder} holds a run made with learning_rate = 0.01', 'kept as sft~1',
                 f'-p out {folder}_2 '):
        assert part in said
    ends, terminal = os.pipe()   # of a kernel whose output papermill does not show
    with monkeypatch.context() as m:
        m.setattr(sys.stderr, '_original_stdstream_copy', terminal, raising=False)
        again(learning_rate=.02)
    os.close(terminal)
    with open(ends) as f:
        assert f.read().strip().startswith(said)
    assert capsys.readouterr().out.count('sft~1') == 1
    assert read_json(folder.with_name('sft~1')/'config.json')['settings']['learning_rate'] == .01


def test_a_default_that_a_user_has_made_is_named(base, tmp_path, monkeypatch, capsys):
    "A board of runs/dpo and runs/ppo reads what lies there, and says with which settings."
    monkeypatch.setattr(runs, 'is_fresh', lambda path: True)
    def config(path):
        given = dict(kl_coef=.02) if path == 'runs/ppo' else {}
        return dict(given=given, notebook='world', inputs={})
    monkeypatch.setattr(runs, 'run_config', config)
    ensure_inputs(CompareConfig())
    assert capsys.readouterr().out == 'folders = runs/ppo was made with kl_coef = 0.02\n'


def test_a_farm_says_which_runs_it_makes_anew_and_which_inputs_are_damaged(
        base, run_of_sft, monkeypatch, capsys):
    folder, _ = run_of_sft
    failing = Future()
    failing.set_exception(RuntimeError('it broke'))
    place = jobs.Place(lambda *_: failing, [{}])
    monkeypatch.setitem(jobs.JOB_PLACES, 'toys', lambda workers, gpus: place)
    given = read_json(folder/'config.json')['given'] | dict(learning_rate=.5)
    failed = jobs.run_jobs([jobs.Job(str(folder), 'sft', given)], place='toys')
    assert len(failed) == 1 and f'{folder} was made with other settings: it is kept as sft~1' in \
        capsys.readouterr().out
    with monkeypatch.context() as m:
        weights = folder/'model'/'model.safetensors'
        m.setattr(jobs, 'is_fresh', lambda *_: content_hash(str(weights)) == '')
        turn_a_bit(weights)
        failed, = jobs.run_jobs([jobs.Job(str(folder), 'sft', given)], place='toys')
    assert 'model.safetensors is damaged' in failed


@pytest.mark.slow
@pytest.mark.parametrize('name, content, message', [
    ('tokenizer.json', b'{"a": ', 'its tokenizer'),
    ('tokenizer_config.json', b'[]', 'its tokenizer'),
    ('chat_template.jinja', b'{% if', 'its chat template'),
    ('config.json', b'{}', 'config.json'),
    ('config.json', b'{"model_type": "llama", "hidden_size": "x"}', 'config.json'),
    ('model.safetensors', b'', 'model.safetensors')])
def test_a_policy_without_a_whole_model_is_refused(base, tmp_path, name, content, message):
    model = shutil.copytree(base/'sft'/'model', tmp_path/'sft')
    (model/name).write_bytes(content or (model/name).read_bytes()[:-1000])
    refused('sft', base, tmp_path, ValueError, message, policy=str(model))


def ended(notebook, given, capsys):
    "What `python -m` says of an error that ends it."
    import runpy
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, 'argv', [f'{notebook}.py', *tiny.command(notebook, **given)[3:]])
        m.setattr(sys, 'excepthook', sys.excepthook)
        module = tiny.module_of(notebook)
        m.delitem(sys.modules, module)
        with pytest.raises(Exception) as e:
            runpy.run_module(module, None, '__main__')
        sys.excepthook(e.type, e.value, e.value.__traceback__)
    return capsys.readouterr().err


def test_an_error_of_a_file_ends_a_command_with_one_line(base, tmp_path, capsys, monkeypatch):
    "A fault of the code, or of what it calls, has its traceback."
    bad = tiny.write(tmp_path/'bad.json', [*ROWS[:4], dict(ROWS[4], output=None)])
    given = tiny.settings('sft', base, out=str(tmp_path/'out'), val_split='', eval_split='')
    said = ended('sft', given | dict(data=bad), capsys)
    assert re.fullmatch("sft.py: error: .*bad.json, row 4: the field 'output' is None.*\n", said)
    (tmp_path/'file').write_text('mine')
    said = ended('sft', given | dict(out=str(tmp_path/'file')), capsys)
    assert 'cannot write there' in said
    assert said.count('\n') == 1
    def fault(*_, **__): return [][0]
    for broken in (fault, lambda *_, **__: json.loads('{')):
        monkeypatch.setattr('alpaca_farm.data.text.encode', broken)
        assert 'Traceback (most recent call last)' in ended('sft', given, capsys)


BROKEN = dict(   # by notebook: settings, and which file of what they name is damaged
    sft='data/sft data/val data/eval', reward_model='preferences/preferences',
    dpo='preferences/preferences data/eval',
    binary_feedback='preferences/preferences data/val data/eval annotators/labels',
    ppo='data/unlabeled data/val data/eval annotators/labels',
    quark='data/unlabeled data/val data/eval annotators/labels',
    expert_iteration='data/unlabeled data/val data/eval',
    rrhf='candidates/candidates data/eval', best_of_n='data/eval samples/labels',
    rlcd='data/unlabeled', annotators='outputs/candidates',
    eval='outputs/outputs reference/candidates labels/labels annotators/labels',
    compare='folders/outputs labels/labels',
    agreement='sets/labels judges/labels', overoptimization='bank/candidates references/candidates',
    bring_your_own='prompts/eval preferences/preferences demonstrations/labels')


@pytest.mark.slow
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
        compare=dict(folders=[sft, samples], annotators=judge),
        agreement=dict(sets=[labels], judges=[judge]),
        overoptimization=dict(policy=sft, bank=samples, references=samples, proxies=[judge],
                              policies=[sft], world=world, max_new_tokens=12),
        bring_your_own=dict(model=sft, prompts=world, preferences=labels, judge=judge))
    given = tiny.settings(notebook, base) if notebook in tiny.SETTINGS else {}
    given |= sound.get(notebook, {})
    setting, name = broken.split('/')
    value = given.get(setting, '')
    named = value[0] if isinstance(value, list) and value else value
    damaged = tmp_path/'labels.json'
    if os.path.isdir(named or '') and name != 'labels':
        damaged = shutil.copytree(named, tmp_path/Path(named).name)/f'{name}.json'
        summary = damaged.parent/'summary.json'   # a run that was made before files had hashes
        summary.write_text(json.dumps(read_summary(summary.parent)))
    damaged.write_text('[{"instruction": "Say 1.", "output": ')
    spoiled = str(damaged if name == 'labels' else damaged.parent)
    cls = tiny.config_class(notebook)
    listed = isinstance(getattr(cls(), setting), list)
    given |= {setting: [*(value or [])[1:], spoiled] if listed else spoiled}

    def load(*_, **__): raise AssertionError('a model is loaded')
    monkeypatch.setattr('alpaca_farm.model.logprobs.load_model', load)
    with pytest.raises(ValueError, match=rf'{name}\.json.* not valid JSON'):
        tiny.run(notebook, base, tmp_path/'out', **given)
    assert not (tmp_path/'out').exists()


CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import LlamaConfig, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig): model_type = 'own_kind'
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize('file, settings', [
    ('config.json', dict(model_type='own_kind', auto_map=dict(AutoConfig='own.OwnConfig'))),
    ('tokenizer_config.json', dict(tokenizer_class='OwnTokenizer',
                                   auto_map=dict(AutoTokenizer=[None, 'own.OwnTokenizer'])))])
def test_code_that_comes_with_a_model_is_neither_executed_nor_asked_about(
        base, tmp_path, file, settings, monkeypatch):
    "Each kind of run refuses it in one line, before it is trained; a terminal would say y."
    asked = []
    folder = tmp_path/'it'
    monkeypatch.setattr(builtins, 'input', lambda *text: asked.append(text) or 'y')
    shutil.copytree(base/'sft'/'model', folder)
    (folder/file).write_text(json.dumps(read_json(folder/file) | settings))
    (folder/'own.py').write_text(CODE.format(marker=str(tmp_path/'executed')))
    given = dict(policy=str(folder), out=str(tmp_path/'out'))
    runs = [('sft', given), ('reward_model', given), ('dpo', given), ('ppo', given),
            ('ppo', given | dict(policy=str(base/'sft'), reward_model=str(folder))),
            ('best_of_n', given), ('dpo', given | dict(lora_rank=2))]
    for notebook, more in runs:
        with pytest.raises(ValueError, match='code of its own, which is not executed') as e:
            tiny.run(notebook, base, **more)
        assert '\n' not in str(e.value)
        assert str(folder) in str(e.value)
    assert not asked
    assert not (tmp_path/'executed').exists()


class Attack:
    def __init__(self, marker): self.marker = marker
    def __reduce__(self): return Path.touch, (Path(self.marker),)


@pytest.mark.parametrize('file, named', [
    ('model.safetensors.index.json', dict(weight_map={'lm_head.weight': 'evil.bin'})),
    ('config.json', dict(transformers_weights='adapter_model.bin')),
    ('config.json', dict(transformers_weights='other.safetensors.index.json'))])
def test_no_file_of_a_checkpoint_leads_to_a_pickle(base, tmp_path, monkeypatch, file, named):
    "Whatever torch would make of it: it is not asked."
    def load(*_, **__): raise AssertionError('a pickle is read')
    monkeypatch.setattr('torch.load', load)
    folder = shutil.copytree(base/'sft'/'model', tmp_path/'it')
    marker = tmp_path/'executed'
    for name in ('evil.bin', 'adapter_model.bin', 'pytorch_model.bin', 'training_args.bin'):
        (folder/name).write_bytes(pickle.dumps(Attack(str(marker))))
    tiny.run('sft', base, tmp_path/'beside', policy=str(folder))   # of which nobody reads one
    (folder/'model.safetensors').rename(folder/'model-00001-of-00001.safetensors')
    old = read_json(folder/file) if (folder/file).exists() else {}
    (folder/file).write_text(json.dumps(old | named))
    other = dict(weight_map={'lm_head.weight': 'evil.bin'})
    tiny.write(folder/'other.safetensors.index.json', other)
    with pytest.raises(ValueError, match=rf'{folder}: its weights are in \w+\.bin, and only') as e:
        tiny.run('sft', base, tmp_path/'out', policy=str(folder))
    assert '\n' not in str(e.value)
    assert not marker.exists()
    monkeypatch.setattr(loading, 'hub_snapshot', lambda name: str(folder))
    with pytest.raises(ValueError, match=rf'{folder}: its weights are in'):   # of the hub
        loading.load_model(AutoModelForCausalLM, 'org/it', None)


def test_all_files_of_a_run_follow_the_umask(base, tmp_path):
    old = os.umask(0o027)
    try:
        folder = tiny.run('sft', base, tmp_path/'out', lora_rank=2, checkpoint_every=2).folder
    finally:
        os.umask(old)
    found = {p.name: p.stat().st_mode & 0o777 for p in folder.rglob('*') if p.is_file()}
    assert {'model.safetensors', 'adapter_model.safetensors', 'summary.json'} <= {*found}
    assert {*found.values()} == {0o640}, found


@pytest.mark.parametrize('closed', ['it/model.safetensors', 'it'])
def test_what_another_user_may_not_read_is_said_to_be_there(base, closed):
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        os.chmod(place, 0o755)
        shutil.copytree(base/'sft'/'model', 'it')
        model_path('it')
        os.chmod(closed, 0)
        root = os.geteuid() == 0   # who may read all
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match=f'Permission denied: .*{closed}'):
                model_path('it')
        finally:
            if root:
                os.seteuid(0)
            os.chmod(closed, 0o755)


def test_a_branch_of_a_cached_model_is_counted(tmp_path, monkeypatch):
    "Snapshots are named by their commits, and a file by the branch."
    model = tmp_path/'models--org--small'
    (model/'snapshots'/('a'*40)).mkdir(parents=True)
    (model/'refs').mkdir()
    (model/'refs'/'main').write_text('a'*40)
    save_file(dict(w=torch.zeros(10, 10)), model/'snapshots'/('a'*40)/'model.safetensors')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path))
    assert count_weights('org/small@main') == count_weights('org/small') == 100


def test_runs_that_failed_now_are_not_on_the_board(tmp_path, monkeypatch):
    "Though an earlier farm has left their folders."
    cfg = farm.FarmConfig(runs=str(tmp_path), methods=['ppo'])
    for job in farm.farm_jobs(cfg):
        write_json(Path(job.out)/'summary.json', signed(dict(cpu_seconds=1)))
    why = [f'{tmp_path}/ppo: not run, since x is missing']
    monkeypatch.setattr(farm, 'run_jobs', lambda jobs, **_: why)
    made, _ = farm._make_runs(cfg)
    assert f'{tmp_path}/ppo' not in made
    assert f'{tmp_path}/ppo_crowd' in made


def test_a_farm_reads_labels_of_people_before_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(farm, '_make_runs', lambda cfg: pytest.fail('runs were made'))
    write_json(tmp_path/'labels.json', [dict(instruction='a')])
    cfg = farm.FarmConfig(runs=str(tmp_path), labels=str(tmp_path/'labels.json'))
    with pytest.raises(ValueError, match='labels.json'):
        farm.run(cfg)


def test_null_for_a_notebook_leaves_its_runs_out(tmp_path):
    (tmp_path/'sizes.yaml').write_text('binary_feedback: null')
    found = farm.farm_jobs(farm.FarmConfig(size=str(tmp_path/'sizes.yaml')))
    names = {Path(job.out).name for job in found}
    assert names.isdisjoint({'feedme', 'reward_conditioning', 'feedme_crowd'})
    assert 'ppo' in names


def test_settings_of_those_who_label_count_before_the_worlds():
    world = World('w', pool='my:pool', label_flip=.1, asking=dict(budget=1.))
    def asked(**own): return farm._label_settings(farm.FarmConfig(), 'annotators', world, own)
    assert asked() == dict(annotators='my:pool', label_flip=.1, budget=1.)
    assert asked(annotators=dict(label_flip=.3, budget=2.)) == dict(annotators='my:pool')


def test_a_loss_that_is_not_shaped_like_the_weights_is_refused(base, tmp_path, monkeypatch):
    "Also where an answer is read alone, and torch would take it for the loss of each token."
    whole = sft.sft_loss
    def of_answers(policy, batch): return dict(loss=whole(policy, batch)['loss'].sum(1))
    monkeypatch.setattr(sft, 'sft_loss', of_answers)
    with pytest.raises(ValueError, match=r'the loss has shape \(1,\), and the weights \(1, '):
        tiny.run('sft', base, tmp_path/'sft', micro_batch_size=1, val_split='')


def test_two_ways_of_one_name_are_two_rows(tmp_path, monkeypatch):
    for name, sign in dict(long='', short='-').items():
        text = f"def best(records): return [{sign}len(r['output']) for r in records]"
        (tmp_path/f'{name}_way.py').write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    world = World('w', ways=['long_way:best', 'short_way:best'])
    chosen = farm_board._chosen_answers([dict(instruction='a', output=['x', 'yy'])], world)
    assert [own['output'] for own, in chosen.values()] == ['yy', 'x']


@pytest.mark.parametrize('name', ['references', 'eval_samples', 'sft'])
def test_a_farm_without_what_its_board_needs_is_refused(tmp_path, name):
    (tmp_path/'sizes.yaml').write_text(f'{name}: null')
    with pytest.raises(ValueError, match='a board needs'):
        farm.farm_jobs(farm.FarmConfig(size=str(tmp_path/'sizes.yaml')))


def test_an_unfinished_input_is_named_with_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'root', lambda: tmp_path)
    monkeypatch.setattr(runs, 'run_of', lambda path: tmp_path/path)
    (tmp_path/'runs'/'x').mkdir(parents=True)
    with pytest.raises(ValueError, match='out = runs/x;'):
        runs._check_named('policy', 'runs/x')


def test_a_run_may_be_called_like_a_model_of_a_step(run_of_sft):
    folder, _ = run_of_sft
    folder = folder.rename(folder.with_name('model-a'))
    assert runs.run_of(str(folder)) == runs.run_of(f'{folder}/model') == folder
    (folder/'summary.json').unlink()
    with pytest.raises(ValueError, match='not finished'):
        runs._check_named('policy', str(folder))


def test_a_damaged_log_ends_its_own_job_only(tmp_path, monkeypatch):
    write_json(tmp_path/'a'/'config.json', signed(dict(notebook='sft', fingerprint='', steps=5)))
    (tmp_path/'a'/'log.jsonl').write_text('{"step": 1}\nx\n{"step": 2}\n')
    done = Future()
    done.set_result(None)
    monkeypatch.setitem(jobs.JOB_PLACES, 'toys', lambda *_: jobs.Place(lambda *_: done, [{}]))
    both = [jobs.Job(f'{tmp_path}/{name}', 'sft') for name in 'ab']
    assert jobs.run_jobs(both, place='toys') == []


def test_a_terminal_that_is_closed_ends_no_training(monkeypatch):
    master, slave = pty.openpty()
    monkeypatch.setattr(progress, '_terminal', lambda: slave)
    show = progress.Progress('ppo', 10, every=0)
    show(1)
    os.close(master)
    show(2)
    progress.tell('a warning')


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    with pytest.raises(ValueError, match='cuda:3'):
        Config(device='cuda:3')


def test_a_module_whose_relative_import_is_guarded_is_hashed(tmp_path, monkeypatch):
    text = 'try: from .a import f\nexcept ImportError: f = len\ndef loss(h): return h\n'
    (tmp_path/'guarded_module.py').write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert content_hash('guarded_module:loss')


COLLECT = 'cfg = PPOConfig.collect(globals())'


@pytest.mark.parametrize('first', ['', '%env A=1\n', '%%time\n'])
def test_a_cell_that_sets_only_the_folder_keeps_the_other_settings(first):
    "With a magic in the parameters cell, too."
    cells = [first + 'out = ""\nseed = 0\ncheckpoint_every = 5', 'out = "b"', COLLECT]
    cfg = ppo.PPOConfig.collect(dict(In=cells, out='b', seed=0, checkpoint_every=7))
    assert (cfg.out, cfg.checkpoint_every) == ('b', 7)


def test_parameters_above_the_settings_are_not_lost_silently():
    "Papermill writes them there in a copy of a notebook whose parameters cell has no tag."
    cells = ['# Parameters\nseed = 7', 'out = ""\nseed = 0', COLLECT]
    with pytest.raises(ValueError, match='^seed: .*the tag parameters'):
        ppo.PPOConfig.collect(dict(In=cells, out='', seed=0))
    again = [*cells[:2], '# Parameters\nseed = 7', COLLECT]   # the cell was executed once more
    assert ppo.PPOConfig.collect(dict(In=again, out='', seed=7)).seed == 7


@pytest.mark.parametrize('set_steps', ['seed, steps = 1, 3', 'if True: steps = 3', 'steps = 2\nsteps += 1'])
def test_settings_may_be_assigned_together_or_below_a_condition(set_steps):
    cells = [f'out = ""\n{set_steps}', COLLECT]
    assert ppo.PPOConfig.collect(dict(In=cells, out='', seed=1, steps=3)).steps == 3


def test_a_notebook_that_is_executed_as_a_whole_is_refused():
    "IPython keeps none of its cells then, so that its settings would be the defaults."
    running = "get_ipython().run_line_magic('run', 'ppo.ipynb')"
    with pytest.raises(ValueError, match='use papermill or python -m'):
        ppo.PPOConfig.collect(dict(In=['', running], out='', steps=3))


def test_a_run_that_is_interrupted_releases_its_folder(base, tmp_path, monkeypatch):
    "In a kernel, which lives on: the command line could not go on with it."
    def interrupt(self, step, **record): raise KeyboardInterrupt
    monkeypatch.setattr(runs.Run, 'log', interrupt)
    with pytest.raises(KeyboardInterrupt):
        tiny.run('sft', base, tmp_path/'run')
    assert not files.lock_of(tmp_path/'run'/'run').is_locked
    monkeypatch.undo()
    assert tiny.run('sft', base, tmp_path/'run').state == 'finished'


def test_a_power_cut_does_not_leave_a_checkpoint_with_a_shorter_log(tmp_path, monkeypatch):
    flushed = []
    def fsync(fd): flushed.append(Path(os.readlink(f'/proc/self/fd/{fd}')).name)
    monkeypatch.setattr(os, 'fsync', fsync)
    run = runs.Run(Config(out=str(tmp_path/'run')), dict(fingerprint='abc'))
    run.log(1, loss=1.)
    run.save(step=1)
    assert flushed.index('log.jsonl') < flushed.index('state.safetensors')


@pytest.mark.parametrize('text, match', [
    ('ppo: {steps: many}', 'ppo: steps = .many.: it must be a valid integer'),
    ('dpo: {beta: -1}', 'dpo: beta = -1: it must be'),
    ('ppo: {val_instances: yes}', 'not true or false'),
    ('ppo: {steps: 4}\ndpo: {beta: .2}\nppo: {kl_coef: .1}', 'ppo stands twice')])
def test_a_farm_refuses_sizes_with_a_bad_value(tmp_path, text, match):
    "Before it starts; its run would fail an hour later."
    (tmp_path/'sizes.yaml').write_text(text)
    with pytest.raises(ValueError, match=match):
        farm.FarmConfig(size=str(tmp_path/'sizes.yaml'))
    (tmp_path/'sizes.yaml').write_text('ppo: {learning_rate: null, steps: "4"}')
    assert farm.FarmConfig(size=str(tmp_path/'sizes.yaml'))


def test_an_address_without_http_is_refused_also_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv('OPENAI_BASE_URL', 'localhost:8000/v1')
    with pytest.raises(ValueError, match='write it like http'):
        client._make_client(client.ApiConfig(store=str(tmp_path/'store.sqlite')))
