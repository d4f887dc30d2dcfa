"""Runs named in a JSON file, one after the other, for the processes of test_processes."""
import atexit
import json
import os
import time
import weakref
from pathlib import Path

import tiny
from alpaca_farm.run.processes import once, rank, written_once
from torch import distributed


def connections(): pass


def check_closed():
    "Nothing holds the connections any more: they are closed when the last reference goes."
    if connections() is not None: os._exit(3)


def check_late_reader(file):
    "A file is written anew only when the slowest process has read it."
    write = written_once(file.write_text)
    write('first')
    time.sleep(.5 * rank()[0])
    assert file.read_text() == 'first'
    write('second')
    assert file.read_text() == 'second'


def check_shared_error(folder):
    "What the first process cannot do is an error of all: none waits for one that has gone on."
    try: once(folder.rmdir)
    except OSError as e: assert 'not empty' in str(e)
    else: raise AssertionError
    assert once(max, 1, 2) == 2


if __name__ == '__main__':
    atexit.register(check_closed)   # the last of the handlers
    for name, given in json.load(open(os.environ['RUNS'])).values():
        tiny.main(name)(tiny.config(name, **given))
        assert rank() == (int(os.environ['RANK']), 2)
    check_late_reader(Path(os.environ['RUNS']).with_name('late.txt'))
    check_shared_error(Path(os.environ['RUNS']).parent)
    connections = weakref.ref(distributed.group.WORLD)
