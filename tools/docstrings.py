"""What stands beside parameters and settings is written into the docstrings of `alpaca_farm/`.

`help()` and `?` then say it, too. `python tools/parameters.py` does this after `nbdev_export`.
"""
import ast
import importlib
import inspect
import io
import textwrap
import tokenize
from pathlib import Path

from alpaca_farm.run.paths import root
from alpaca_farm.run.settings import Config, explained

HEADS = 'Parameters:', 'Settings:', 'Returns:'
WIDTH = 96   # of a line, without its indentation


def own_text(docstring: str) -> str:
    "Return the part of a docstring that its author has written."
    kept = []
    for line in docstring.splitlines():
        if line.strip().startswith(HEADS): break
        kept.append(line)
    return '\n'.join(kept).strip()


def said_of(label: str, comment: str | None) -> list[str]:
    "Write the lines of a label and a comment; none without a comment."
    if not comment: return []
    return textwrap.wrap(f'{label} {" ".join(comment.split())}', WIDTH, subsequent_indent='    ')


def comments_of(function) -> dict[str, str]:
    "Read the comments beside a function's parameters; `return` is the one behind its whole head."
    text = textwrap.dedent(inspect.getsource(function))
    node = ast.parse(text).body[0]
    comments = {}   # by line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT: comments[token.start[0]] = token.string.lstrip('# ')
    last = max(node.lineno, node.body[0].lineno - 1)   # line of the head
    found = {}
    for arg in ast.walk(node.args):
        if isinstance(arg, ast.arg) and arg.lineno in comments and arg.lineno < last:
            found[arg.arg] = comments[arg.lineno]
    if last in comments: found['return'] = comments[last]
    return {name: found[name] for name in (*inspect.signature(function).parameters, 'return')
            if name in found}


def explanation(thing, settings: list[str]) -> list[str]:
    "Write the lines that say what parameters, a result or these settings of a class are."
    comments = comments_of(thing) if inspect.isfunction(thing) else explained(thing)
    returned = said_of('Returns:', comments.pop('return', None))
    named = []
    for name in settings or comments: named += said_of(f'  {name} :', comments[name])
    head = 'Settings:' if settings else 'Parameters:'
    return [head, *named, *returned] if named else returned


def public_things() -> dict[tuple[str, int], object]:
    "Find the functions, methods and settings of the library by file and first line."
    spaces = []
    for path in sorted((root()/'alpaca_farm').rglob('*.py')):
        name = '.'.join(path.relative_to(root()).with_suffix('').parts).removesuffix('.__init__')
        spaces.append(vars(importlib.import_module(name)))
    for space in [*spaces]:
        spaces += [vars(thing) for thing in space.values() if isinstance(thing, type)]
    found = {}
    for space in spaces:
        for thing in space.values():
            thing = inspect.unwrap(getattr(thing, '__func__', thing))
            if inspect.isfunction(thing) and not thing.__name__.startswith('_'):
                found[thing.__code__.co_filename, thing.__code__.co_firstlineno] = thing
            elif isinstance(thing, type) and issubclass(thing, Config):
                found[inspect.getsourcefile(thing), inspect.getsourcelines(thing)[1]] = thing
    return found


def write_docstrings(settings_of) -> list[str]:
    "Write the docstrings that lack what comments say; return the names of their modules."
    things = public_things()
    changed = []
    ours = root()/'alpaca_farm'
    for path in {path for path in (Path(file) for file, _ in things) if ours in path.parents}:
        text = path.read_text(encoding='utf-8')
        lines = text.splitlines()
        nodes = [node for node in ast.walk(ast.parse(text))
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
        for node in sorted(nodes, key=lambda node: -node.body[0].lineno):   # lines above stay
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            thing = things.get((str(path), first))
            docstring = ast.get_docstring(node)
            if thing is None or not docstring: continue
            settings = settings_of(thing) if isinstance(thing, type) else []
            more = explanation(thing, settings)
            if not more: continue
            place = node.body[0]
            mark = 'r' if '\\' in docstring or any('\\' in line for line in more) else ''
            written = [f'{mark}"""{own_text(docstring)}', '', *more, '"""']
            indent = ' '*place.col_offset
            written = [f'{indent}{line}'.rstrip() for line in '\n'.join(written).splitlines()]
            lines[place.lineno - 1:place.end_lineno] = written
        written = '\n'.join(lines) + '\n'
        if written == text: continue
        path.write_text(written, encoding='utf-8')
        changed.append(path.stem)
    return changed
