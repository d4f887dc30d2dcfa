"""The `parameters` cell of each notebook is written from its dataclass, with the comments of `--help`,
and the docstrings of `alpaca_farm/` from what stands beside parameters (`docstrings`).

    python tools/parameters.py    # after nbdev_export; `make fast` does both
"""
import ast
import importlib
import inspect
import json
import textwrap
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType

from alpaca_farm.run.paths import module_of, root
from alpaca_farm.run.settings import Config, field_comments, sized_defaults
from docstrings import write_docstrings

WIDTH = 100
OPEN = '# None: by the sizes of model and data (run/defaults)'


def is_parameters(cell: dict) -> bool:
    "Whether papermill injects settings behind this cell."
    return 'parameters' in cell['metadata'].get('tags', [])


def own_settings(cls) -> list[str]:
    "List what a notebook's cell holds: `out`, inputs, its own settings, those by size, the seed."
    inherited = [f.name for f in fields(cls) if f.name not in cls.__annotations__]
    inputs = [name for name in inherited if name in cls.inputs]
    sized = [name for name in inherited if name in sized_defaults(cls)]
    names = dict.fromkeys(['out', *inputs, *cls.__annotations__, *sized])
    names.pop('seed', None)
    return [*names, 'seed']


def plain_type(kind) -> str:
    "Name the type of a setting without its limits, as papermill reads it."
    origin = typing.get_origin(kind)
    if origin in (typing.Union, UnionType): return plain_type(typing.get_args(kind)[0])
    if origin is typing.Literal: return type(typing.get_args(kind)[0]).__name__
    if origin is typing.Annotated: return plain_type(typing.get_args(kind)[0])
    if origin is list: return f'list[{plain_type(typing.get_args(kind)[0])}]'
    return kind.__name__


def written_default(node: ast.expr, text: str) -> str:
    "Return a default as the dataclass writes it: None where it is by size, without a factory."
    if not isinstance(node, ast.Call): return ast.get_source_segment(text, node)
    if node.func.id == 'by_size': return 'None'
    made = node.keywords[0].value   # field(default_factory=...)
    if isinstance(made, ast.Lambda): return ast.get_source_segment(text, made.body)
    return '{}' if made.id == 'dict' else '[]'


def written_defaults(cls) -> dict[str, str]:
    "Read the defaults of all settings from the source of the classes that define them."
    found = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base): continue
        text = textwrap.dedent(inspect.getsource(base))
        for node in ast.parse(text).body[0].body:
            if not isinstance(node, ast.AnnAssign): continue
            found[node.target.id] = written_default(node.value, text)
    return found


def parameters_cell(cls) -> str:
    "Write the cell of a notebook with settings of this class, with comments in one column."
    kinds = typing.get_type_hints(cls, include_extras=True)
    defaults = written_defaults(cls)
    comments = field_comments(cls)
    rows = []
    for name in own_settings(cls):
        rows.append((f'{name}: {plain_type(kinds[name])} = {defaults[name]}', comments[name]))
    column = max(len(code) for code, _ in rows if len(code) < 45)
    lines = []
    for code, comment in rows:
        padded = f'{code:{column}}  # {comment}'
        lines.append(padded if len(padded) <= WIDTH else f'{code}  # {comment}')
    if 'None' in defaults.values() and sized_defaults(cls): lines.insert(0, OPEN)
    return '\n'.join(lines)


def settings_class(path: Path):
    "Return the settings of the module that a notebook exports; None if it has none."
    if '@dataclass' not in path.read_text(encoding='utf-8'): return None
    module = importlib.import_module(module_of(path.stem))
    for value in vars(module).values():
        ours = isinstance(value, type) and value.__module__ == module.__name__
        if ours and issubclass(value, Config): return value


def write_parameters() -> list[str]:
    "Write the cells that differ from their dataclass; return the names of their notebooks."
    changed = []
    for path in sorted((root()/'nbs').rglob('*.ipynb')):
        if {'.ipynb_checkpoints', 'recipes'} & {*path.parts}: continue
        nb = json.loads(path.read_text(encoding='utf-8'))
        cells = [cell for cell in nb['cells'] if is_parameters(cell)]
        cls = settings_class(path) if cells else None
        if cls is None: continue
        text = parameters_cell(cls)
        if text == ''.join(cells[0]['source']): continue
        cells[0]['source'] = text.splitlines(True)
        path.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
        changed.append(path.stem)
    return changed


if __name__ == '__main__':
    for name in write_parameters(): print(f'{name}: parameters cell written')
    write_docstrings(own_settings)
