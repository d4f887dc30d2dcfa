"""Runs named in a JSON file, one after the other; started in several processes by test_processes."""
import importlib
import json
import os

import tiny
from alpaca_farm.core.processes import rank
from alpaca_farm.core.training import Trainer

hold = Trainer.hold


def checked(self, together):
    "`hold`, and whether the layers are divided exactly where the settings say so."
    hold(self, together)
    assert self.divided == (self.cfg.sharding == 'fsdp')


if __name__ == '__main__':
    Trainer.hold = checked
    for name, given in json.load(open(os.environ['RUNS'])).values():
        module = importlib.import_module(f'alpaca_farm.{name}')
        module.train(tiny.config(module, **given))
        assert rank() == (int(os.environ['RANK']), 2)
