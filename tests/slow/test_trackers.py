"A copy of the log elsewhere, by accelerate's trackers."
import pytest
from accelerate import tracking

import tiny
from alpaca_farm.run import runs
from alpaca_farm.run.runs import read_log


class Recorder(tracking.GeneralTracker):
    "A tracker that keeps what it is sent."
    name = 'wandb'
    requires_logging_directory = False
    tracker = None

    def __init__(self, project, **where):
        super().__init__()
        self.where = where
        self.sent = []

    def start(self): Recorder.last = self

    def store_init_configuration(self, values): self.settings = values

    def log(self, values, step): self.sent.append((step, values['loss']))

    def finish(self): self.finished = True


def test_a_tracker_gets_settings_and_log(base, tmp_path, monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, 'wandb', Recorder)
    monkeypatch.setattr(runs, '_check_tracker', lambda name: None)
    run = tiny.run('sft', base, tmp_path/'sft', tracker='wandb')
    sent = Recorder.last
    assert sent.sent == [(r['step'], r['loss']) for r in read_log(run.folder)]
    assert sent.settings['batch_size'] == 12 and sent.finished
    assert sent.where == dict(name='sft')


@pytest.mark.parametrize('name', ['tensorboard', 'trackio'])
def test_a_real_tracker_is_started_where_it_is_installed(base, tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    monkeypatch.setenv('TRACKIO_DIR', str(tmp_path/'trackio'))
    run = tiny.run('sft', base, tmp_path/'sft', tracker=name)
    assert run.tracker.name == name and read_log(run.folder)


def test_a_missing_package_is_named_before_any_work(base, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'find_spec', lambda name: None)
    with pytest.raises(ModuleNotFoundError, match='tracker = trackio'):
        tiny.run('sft', base, tmp_path/'a', tracker='trackio')
    assert not (tmp_path/'a').exists()
