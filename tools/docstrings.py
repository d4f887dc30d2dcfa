"""What stands beside parameters and settings is written into the docstrings of `alpaca_farm/`.

So `help()` and `?` say it, too. `python tools/parameters.py` does this after `nbdev_export`.
"""
import ast
import importlib
import inspect
import textwrap
from pathlib import Path

from fastcore.docments import docments

from alpaca_farm.run.paths import root
from alpaca_farm.run.settings import Config, explained
from parameters import own_settings

HEADS = 'Parameters:', 'Settings:', 'Returns:'
WIDTH = 100


def own_text(docstring: str) -> str:
    "Return the part of a docstring that its author has written."
    lines = docstring.splitlines()
    heads = [k for k, line in enumerate(lines) if line.strip().startswith(HEADS)]
    return '\n'.join(lines[:heads[0]] if heads else lines).strip()


def section(head: str, comments: dict[str, str]) -> list[str]:
    "Write a line for each name that has a comment, below a heading; nothing if none has."
    lines = []
    for name, comment in comments.items():
        text = f'{name}: {" ".join(comment.split())}' if comment else ''
        lines += textwrap.wrap(text, WIDTH - 10, initial_indent='  ', subsequent_indent='      ')
    return [head, *lines] if lines else []


def comments_of(thing) -> list[str]:
    "The lines that say what a function's parameters and result, or settings, are."
    if isinstance(thing, type):
        said = explained(thing)
        return section('Settings:', {name: said[name] for name in own_settings(thing)})
    comments = dict(docments(thing))
    returned = comments.pop('return', None)
    lines = section('Parameters:', comments)
    if returned: lines += textwrap.wrap(f'Returns: {" ".join(returned.split())}', WIDTH - 10,
                                        subsequent_indent='    ')
    return lines


def documented(file: Path) -> dict[int, object]:
    "The public functions, methods and settings of a module that have comments, by their lines."
    places = file.relative_to(root()).with_suffix('').parts
    module = importlib.import_module('.'.join(places).removesuffix('.__init__'))
    found = {}
    for thing in all_objects():
        if inspect.isfunction(thing) and thing.__code__.co_filename == str(file):
            found[thing.__code__.co_firstlineno] = thing
    for thing in vars(module).values():
        if isinstance(thing, type) and thing.__module__ == module.__name__:
            if issubclass(thing, Config): found[inspect.getsourcelines(thing)[1]] = thing
    return found
