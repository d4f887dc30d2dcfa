"""Killed at any moment, a run ends as if it had not been; edited code always runs."""
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tiny
from alpaca_farm import sft
from alpaca_farm.run import runs
from alpaca_farm.run.runs import content_hash, read_log, read_summary
from alpaca_farm.train.trainer import Trainer
from tiny import run as train

# settings with many steps, and the range from which the step of the kill is chosen
LONG = dict(
    world=(dict(prose=200, batch_size=1, checkpoint_every=100), 60, 180),
    sft=(dict(batch_size=1, checkpoint_every=2), 2, 45),
    reward_model=(dict(batch_size=1, checkpoint_every=2, epochs=2), 2, 80),
    dpo=(
        dict(batch_size=2, epochs=2, loss_type='kto', checkpoint_every=1, save_every=20), 2, 40),
    ppo=(dict(steps=8, checkpoint_every=2, target_kl=1., k_beta=1.), 1, 7),
    rrhf=(
        dict(batch_size=2, n=2, epochs=2, refresh_every=7, kl_coef=.1, checkpoint_every=3,
             save_every=20, missing_eos=''), 2, 45),
    quark=(
        dict(steps=8, checkpoint_every=2, best_quantile_only=False, clear_pool=False), 1, 7),
    binary_feedback=(
        dict(batch_size=1, checkpoint_every=2, eval_every=7, save_every=20), 2, 55),
    rlcd=(dict(chunk=4), 1, 12),
    best_of_n=(dict(chunk=1, n=4), 2, 24))
RESULTS = 'outputs.json', 'candidates.json', 'items.json', 'preferences.json', 'preferences.csv'


def without_times(folder):
    return [{k: v for k, v in r.items() if k != 'wall'} for r in read_log(folder)]


def files_of(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file())


def is_result(name):
    "Whether a file of a run must be the same to the bit; a README says the fingerprint."
    if name.endswith('README.md'):
        return False
    return name.endswith('.safetensors') or name.startswith('model') or name in RESULTS


def figures(folder):
    times = ('cpu_seconds', 'seconds', 'peak_memory_gb')
    return {k: v for k, v in read_summary(folder).items() if k not in times}


def same_run(a, b):
    "The same files, bit for bit where they are results; no temporary file among them."
    assert files_of(a) == files_of(b)
    for name in files_of(a):
        if is_result(name):
            assert (a/name).read_bytes() == (b/name).read_bytes(), name
    assert without_times(a) == without_times(b) != []
    assert figures(a) == figures(b)


def kill_at(step, notebook, given):
    "Start a run and kill it when its log has `step` records; returns how many it had."
    p, output = tiny.start_module(notebook, given)
    log = Path(given['out'])/'log.jsonl'
    try:
        while p.is_alive() and (not log.exists() or log.read_bytes().count(b'\n') < step):
            time.sleep(.002)
        assert p.is_alive(), f'{notebook} ended before step {step}:\n{output.read_text()}'
    finally:
        p.kill()
    p.join()
    assert p.exitcode == -signal.SIGKILL
    return len(read_log(given['out']))


def interrupted(notebook, base, folder):
    more, low, high = LONG[notebook]
    given = tiny.settings(notebook, base, out=str(folder/notebook), **more)
    at = random.SystemRandom().randint(low, high)
    reached = kill_at(at, notebook, given)
    assert not (folder/notebook/'summary.json').exists()
    again, output = tiny.start_module(notebook, given)
    again.join()
    assert again.exitcode == 0, output.read_text()
    return at, reached


@pytest.fixture(scope='module')
def killed(base, tmp_path_factory):
    "Every notebook's run, killed and started again; two at a time."
    folder = tmp_path_factory.mktemp('killed')
    with ThreadPoolExecutor(2) as workers:
        yield folder, {notebook: workers.submit(interrupted, notebook, base, folder)
                       for notebook in LONG}


@pytest.mark.parametrize('notebook', LONG)
def test_killed_at_a_random_step_and_at_its_end(base, killed, tmp_path, capsys, monkeypatch,
                                                notebook):
    "After ten minutes the last step has a checkpoint, so that no step is made again."
    from alpaca_farm.train import trainer as training
    def full(*_, **__): raise OSError('No space left on device')
    def run(): return train(notebook, base, tmp_path/notebook, **LONG[notebook][0])
    folder, jobs = killed
    at, reached = jobs[notebook].result()
    with capsys.disabled():
        print(f' [{notebook} killed at step {at}, {reached} logged]', end='', flush=True)
    if notebook not in ('rlcd', 'best_of_n'):   # which train nothing
        with monkeypatch.context() as m, pytest.raises(OSError):
            m.setattr(training, 'SAVE_AFTER', 0)
            m.setattr(runs.Run, 'finish', full)
            run()
        monkeypatch.setattr(training.Trainer, 'update', full)
    run()
    same_run(tmp_path/notebook, folder/notebook)


def die_at(train, cfg, function, name, count=1):
    "Run `train` in a fork, killed when `function` makes `name` for the `count`th time."
    pid = os.fork()
    if pid == 0:
        try:
            owner, attribute = function
            real = getattr(owner, attribute)
            seen = []
            def deadly(*args, **kwargs):
                if Path(args[-1]).name == name:
                    seen.append(1)
                if len(seen) == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)
            setattr(owner, attribute, deadly)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            train(cfg)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, 'it was not killed'


@pytest.fixture(scope='module')
def whole_sft(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')/'sft'
    return train('sft', base, folder, checkpoint_every=1).folder


MOMENTS = [   # a call, the file that it makes, and which time
    (os, 'replace', 'config.json', 1), (os, 'replace', 'config.json', 2),
    (os, 'replace', 'log.jsonl', 1), (os, 'replace', 'state.safetensors', 1),
    (os, 'replace', 'state.safetensors', 3), (os, 'replace', 'outputs.json', 1),
    (os, 'replace', 'summary.json', 1), (Path, 'rename', 'model', 1),
    (Path, 'unlink', 'state.safetensors', 1)]


@pytest.mark.parametrize('owner, attribute, name, count', MOMENTS)
def test_killed_while_a_file_is_written(base, whole_sft, tmp_path, owner, attribute, name, count):
    "Nothing half-written is ever taken for whole, and no temporary file stays behind."
    cfg = cfg_of('sft', base, tmp_path/'sft', checkpoint_every=1)
    die_at(sft.train, cfg, (owner, attribute), name, count)
    assert (tmp_path/'sft'/'summary.json').exists() == (attribute == 'unlink')
    sft.train(cfg)
    (tmp_path/'sft'/'checkpoint'/'state.safetensors').unlink(missing_ok=True)
    same_run(whole_sft, tmp_path/'sft')


def test_a_checkpoint_is_written_with_each_best_policy(base, tmp_path, monkeypatch):
    "A run that goes on finds no model of a later step than its own."
    saved = []
    monkeypatch.setattr(Trainer, 'save', lambda self: saved.append(
        (self.step, self.extra['best_step'])))
    tiny.run('ppo', base, tmp_path/'ppo', steps=6, eval_every=1, checkpoint_every=50,
             annotators=f'{base}/world/pool.json')
    best = []
    won = -1.
    for row in read_log(tmp_path/'ppo')[:-1]:
        if row['val_win_rate'] > won:
            best.append((row['step'], row['step']))
            won = row['val_win_rate']
    assert saved == best
    assert best


def test_a_checkpoint_holds_the_loss_scale_and_its_own_device_alone(base, tmp_path):
    import torch
    from alpaca_farm.model.logprobs import load_policy
    from alpaca_farm.train.trainer import Trainer
    cfg = cfg_of('sft', base, tmp_path/'run')
    trainer = Trainer(runs.Run(cfg, {}), 9,
                      dict(policy=load_policy(cfg.policy, cfg, train=True)))
    trainer.accelerator.scaler = torch.amp.GradScaler('cpu', init_scale=8.)
    trainer.accelerator.scaler._lazy_init_scale_growth_tracker(torch.device('cpu'))
    trainer.run.log(trainer.step, loss=1.)
    trainer.save()
    trainer.accelerator.scaler.load_state_dict(
        torch.amp.GradScaler('cpu', init_scale=2.).state_dict())
    state = trainer.run.load()
    assert set(state['rng']) == {'cpu'}
    trainer.restore(state)
    assert trainer.accelerator.scaler.get_scale() == 8


SOURCE = '''
from dataclasses import dataclass
from alpaca_farm.run.runs import start
from alpaca_farm.run.settings import Config

WEIGHT = 1.

@dataclass
class ToyConfig(Config):
    out: str = 'runs/toy'

class Model:
    "A model."
    def loss(self, x): return x

def loss(x): return WEIGHT*Model().loss(x)

def train(cfg):
    run = start(cfg, train)
    if not run.done:
        run.load()
        run.log(1, loss=loss(2.))
        run.finish(loss=loss(2.))
    return run
'''


def write_modules(folder, files):
    for name, text in files.items():
        (folder/name).parent.mkdir(exist_ok=True)
        (folder/name).write_text(text)


def toy(folder, name, source):
    (folder/f'{name}.py').write_text(source)
    spec = importlib.util.spec_from_file_location(name, folder/f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HASHES = """
from alpaca_farm.run.runs import notebook_hash
print(*(notebook_hash(name) for name in ('dpo', 'ppo', 'world')))
"""


def test_an_edited_method_leaves_the_runs_of_others_alone(tmp_path):
    "A core module that all import does not; nor does a comment count."
    for name in ('nbs', 'alpaca_farm'):
        shutil.copytree(tiny.ROOT/name, tmp_path/name)
    shutil.copy(tiny.ROOT/'settings.ini', tmp_path)
    def hashes():
        return subprocess.run([sys.executable, '-c', HASHES], cwd=tmp_path, text=True, check=True,
                              env=tiny.environment() | dict(PYTHONPATH=str(tmp_path)),
                              capture_output=True).stdout.split()
    seen = [hashes()]
    def edit(file, old, new):
        text = (tmp_path/file).read_text()
        assert old in text
        (tmp_path/file).write_text(text.replace(old, new, 1))
        seen.append(hashes())
        return [a != b for a, b in zip(*seen[-2:], strict=True)]
    assert edit('nbs/dpo.ipynb', '"def ', '"x = 3\\n",\n    "def ') == [True, False, False]
    assert edit('alpaca_farm/train/trainer.py', '\nclass ', '\n# a comment\nclass ') == [False]*3
    assert edit('alpaca_farm/train/trainer.py', '\nclass ', '\nx = 3\nclass ') == [True]*3


def test_with_an_edited_loss_a_notebook_runs_anew(base, tmp_path):
    given = tiny.settings('sft', base, out=str(tmp_path/'sft'))
    train('sft', base, tmp_path/'sft')
    was = read_log(tmp_path/'sft')
    source = (tiny.ROOT/'nbs'/'sft.ipynb').read_text()
    old = 'return dict(loss=-logprobs(policy, batch))'
    assert source.count(old) == 1
    source = json.loads(source.replace(old, 'return dict(loss=-3*logprobs(policy, batch))'))
    for c in source['cells']:  # the notebook's own test of the loss would, rightly, fail
        if 'test_close' in ''.join(c['source']) and '#| export' not in ''.join(c['source']):
            c['source'] = 'pass'
    (tmp_path/'edited.ipynb').write_text(json.dumps(source))
    status, output = tiny.run_notebook(tmp_path/'edited.ipynb', tmp_path/'out.ipynb', given)
    assert status == 0, output
    assert read_log(tmp_path/'sft~1') == was
    assert read_log(tmp_path/'sft')[0]['loss'] == pytest.approx(3*was[0]['loss'], rel=1e-5)


def test_one_writer_at_a_time(tmp_path):
    module = toy(tmp_path, 'toy_c', SOURCE)
    cfg = module.ToyConfig(out=str(tmp_path/'toy'))
    run = runs.start(cfg, module.train)
    late = runs.start(cfg, module.train)
    run.load()
    run.finish()
    assert runs.start(cfg, module.train).done
    with pytest.raises(RuntimeError, match='another process has written .*toy since'):
        late.load()


WRITER = '''
import sys
from alpaca_farm.run import runs
sys.path.insert(0, sys.argv[1])
import toy_d
from alpaca_farm.run import runs
runs._lock.__defaults__ = .3,   # seconds of patience
run = runs.start(toy_d.ToyConfig(out=sys.argv[2]), toy_d.train)
print('started', flush=True)
input()
run.load()
print('writes', flush=True)
input()
run.finish()
'''


@pytest.mark.parametrize('outdated', [False, True])
def test_two_users_cannot_write_one_run(tmp_path, outdated):
    "Who has another cache folder, as in another container, and another path to the run."
    module = toy(tmp_path, 'toy_d', SOURCE)
    (tmp_path/'link').symlink_to(tmp_path)
    if outdated:
        module.train(module.ToyConfig(out=str(tmp_path/'toy'), seed=1))
    def user(name, out):
        command = [sys.executable, '-c', WRITER, str(tmp_path), str(out)]
        p = subprocess.Popen(command, env=tiny.environment(XDG_CACHE_HOME=str(tmp_path/name)),
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)
        assert said(p)[-1] == 'started'
        return p
    def said(p):
        lines = [p.stdout.readline().strip()]
        while lines[-1] not in ('started', 'writes', ''):
            lines.append(p.stdout.readline().strip())
        return lines
    def go(p):
        p.stdin.write('\n')
        p.stdin.flush()
    one = user('a', tmp_path/'toy')
    two = user('b', tmp_path/'link'/'toy')
    go(one)
    assert said(one)[-1] == 'writes'
    assert 'another process is writing' in two.communicate('\n')[0]
    assert two.returncode == 1
    go(one)
    assert one.wait() == 0
    assert read_summary(tmp_path/'toy')
    assert (tmp_path/'toy~1').exists() == outdated
    assert not list(tmp_path.rglob('.alpaca_farm*'))


@pytest.fixture(scope='module')
def copied(base, tmp_path_factory):
    "Runs in another place, where they may be spoiled."
    folder = tmp_path_factory.mktemp('copied')
    for name in ('world', 'sft', 'samples', 'annotators'):
        shutil.copytree(base/name, folder/name)
        (folder/name/'summary.json').write_text(json.dumps(read_summary(folder/name)))   # no hashes
    return folder


def cfg_of(notebook, base, out, **more):
    return tiny.config(notebook, **tiny.settings(notebook, base, out=str(out)) | more)


def test_the_model_of_an_unfinished_input_is_refused(copied, tmp_path):
    shutil.copytree(copied/'sft', tmp_path/'sft')
    (tmp_path/'sft'/'summary.json').unlink()
    with pytest.raises(ValueError, match='policy = .*sft.*not finished'):
        train('reward_model', copied, tmp_path/'rm', policy=str(tmp_path/'sft'/'model'))
    assert not (tmp_path/'rm').exists()


def test_an_input_whose_own_inputs_changed_is_named(copied, tmp_path, capsys):
    "A reward model that has learned from the samples of another policy."
    shutil.copytree(copied, tmp_path/'runs')
    config = tmp_path/'runs'/'annotators'/'config.json'
    old = json.loads(config.read_text().replace(str(copied), str(tmp_path/'runs')))
    del old['digest']
    samples = str(tmp_path/'runs'/'samples'/'candidates.json')
    old['inputs']['outputs'] = {samples: 'of another policy'}
    config.write_text(json.dumps(old))
    runs.start(cfg_of('reward_model', tmp_path/'runs', tmp_path/'rm'), tiny.main('reward_model'))
    said = capsys.readouterr().out
    assert 'was made before' in said
    assert 'samples/candidates.json changed' in said


def test_a_users_modules_are_followed(tmp_path, monkeypatch):
    "Through their own imports: plain, relative and in packages."
    judge = 'import helper_a\nfrom parts_a.inner import weight\njudge = helper_a.f'
    files = {'judge_a.py': judge,
             'helper_a.py': 'def f(pairs): return [1]*len(pairs)',
             'parts_a/__init__.py': 'from .sums import total',
             'parts_a/inner.py': 'from . import sums\nweight = 1', 'parts_a/sums.py': 'total = 1',
             'unused_a.py': 'x = 1'}
    write_modules(tmp_path, files)
    monkeypatch.syspath_prepend(tmp_path)
    before = content_hash('judge_a:judge')
    for name, source in files.items():
        (tmp_path/name).write_text(source + '\ny = 2')
        assert (content_hash('judge_a:judge') == before) == (name == 'unused_a.py'), name
        (tmp_path/name).write_text(source + '  # a comment')
        assert content_hash('judge_a:judge') == before


def test_files_that_a_judge_names_belong_to_it(tmp_path, monkeypatch):
    "Beside the module that names them, or by their whole path; those that come later too."
    far = tmp_path/'far'/'list.csv'
    files = {'judge_b.py': f"""
import helper_b
WORDS = open('words.txt').read()
FAR = open('{far}').read()
NOT = 'gone.txt', 'folder.d', 'a' * 2 + '.md', f'{{WORDS}}.json', {'x'*300 + '.txt'!r}
def judge(pairs): return [1. for _ in pairs]""",
             'helper_b.py': "from pathlib import Path\nJSON = Path(__file__).parent/'table.json'",
             'words.txt': 'good', 'table.json': '{}', 'far/list.csv': 'a,b', 'aa.md': 'A'}
    (tmp_path/'folder.d').mkdir()
    write_modules(tmp_path, files)
    monkeypatch.syspath_prepend(tmp_path)
    marks = [content_hash('judge_b:judge')]
    for name in ('words.txt', 'table.json', 'far/list.csv', 'gone.txt', 'aa.md'):
        (tmp_path/name).write_text('other')
        marks.append(content_hash('judge_b:judge'))
        assert (marks[-1] == marks[-2]) == (name == 'aa.md'), name
    (tmp_path/'gone.txt').unlink()
    assert content_hash('judge_b:judge') == marks[-3]


def test_a_judges_configuration_is_known_by_its_content(tmp_path):
    from alpaca_farm.annotators import AnnotatorsConfig
    shutil.copytree(tiny.ROOT/'nbs'/'recipes'/'judges'/'structured', tmp_path/'structured')
    folder = tmp_path/'structured'
    def mark(spec):
        cfg = AnnotatorsConfig(annotators=str(spec))
        return [content_hash(source) for source in runs._sources(cfg, 'annotators')]
    def marks(): return mark(folder)
    assert mark('structured') == marks() != mark('open_pool')
    for name in ('prompt.txt', 'configs.yaml'):
        before = marks()
        (folder/name).write_text((folder/name).read_text() + '\n# more')
        assert before != marks()
