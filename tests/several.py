"""Runs named in a JSON file, one after the other; started in several processes by test_processes."""
import importlib
import json
import os

import tiny
from alpaca_farm.core.processes import rank

if __name__ == '__main__':
    for name, given in json.load(open(os.environ['RUNS'])).items():
        module = importlib.import_module(f'alpaca_farm.{name}')
        module.train(tiny.config(module, **given))
        assert rank() == (int(os.environ['RANK']), 2)
