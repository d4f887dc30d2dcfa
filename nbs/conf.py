"The site, which `make docs` builds from the committed notebooks; nothing is executed or fetched."
import ast
import json
import re
import sys
from dataclasses import is_dataclass
from html import escape
from inspect import Parameter, formatannotation, unwrap
from pathlib import Path

from fastcore.docments import docments

import alpaca_farm
from alpaca_farm.run.settings import Config, explained

sys.path.insert(0, str(Path(alpaca_farm.__file__).parents[1]/'tools'))   # of the checkout
from docstrings import comments_of

empty = Parameter.empty

project, author = 'alpaca_farm', 'the alpaca_farm contributors'
copyright = author
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx-mathjax-offline']
html_theme, html_title = 'furo', 'alpaca_farm'
html_static_path, html_css_files = ['_static'], ['site.css']
highlight_language = 'none'   # of blocks that name no language: commands
nb_code_prompt_show, nb_code_prompt_hide = 'Show the code', 'Hide the code'
html_baseurl = 'https://alpaca-farm.github.io/alpaca_farm/'
suppress_warnings = ['mystnb.unknown_mime_type']   # of what an exercise keeps for its grade
exclude_patterns = ['**.ipynb_checkpoints']
nb_execution_mode = 'off'
nb_merge_streams = True
nb_render_markdown_format = 'myst'   # what a cell shows has tables too
myst_enable_extensions = ['dollarmath', 'amsmath']
myst_dmath_double_inline = True   # a formula between dollars may stand right under its sentence
myst_heading_anchors = 3
autodoc_member_order = 'bysource'
PATH = ['start', 'world', 'annotators', 'reward_model', 'ppo', 'dpo', 'overoptimization', 'farm']
ORDER = ['notebooks', 'recipes', 'studies', 'judging', 'boards', 'worlds', 'embedded', 'train', 'model',
         'ask', 'data', 'run']


def tree(caption: str, pages: list[str]) -> str:
    "A table of contents, shown at the side."
    return '\n'.join(['```{toctree}', ':hidden:', f':caption: {caption}', '', *pages, '```', ''])


def about(source: Path, page: str) -> str:
    "What a page is about: the sentence under a notebook's title, or the first of a page of text."
    if page.startswith('api/'): return f'The public names of alpaca_farm.{page[4:].replace("/", ".")}.'
    if (source/f'{page}.md').exists(): text = (source/f'{page}.md').read_text()
    else:
        cells = json.loads((source/f'{page}.ipynb').read_text())['cells']
        text = ''.join(cells[0]['source'])
    text = re.sub('```.*?```', '', text, flags=re.DOTALL)   # commands
    text = re.sub(r'\[([^]]*)\]\([^)]*\)|\*\*|`', r'\1', text)   # links, bold, code
    told = re.search(r'^(?:> )?(\w.*?\.?)(?:(?<=\.)\s|$)', text, re.MULTILINE)
    return (told or re.search('# (.*)', text))[1]


def describe(app, page, template, context, doctree):
    "Give each page its sentence, for those who search."
    source = Path(app.srcdir)
    known = page.startswith('api/') or any((source/f'{page}{e}').exists() for e in ('.md', '.ipynb'))
    if known and page != 'api/index':
        told = escape(about(source, page))
        context['metatags'] += f'<meta name="description" content="{told}">\n'


def write_pages(app):
    "A page for each module, with its public names from their docstrings; all pages in `llms.txt`."
    source = Path(app.srcdir)
    notebooks = sorted(str(p.relative_to(source).with_suffix('')) for p in source.rglob('*.ipynb'))
    modules = [n for n in notebooks if '#| default_exp' in (source/f'{n}.ipynb').read_text()]
    for name in modules:
        module = 'alpaca_farm.' + name.replace('/', '.')
        page = source/'api'/f'{name}.md'
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'# {module}\n\nDefined in the notebook [`{name}`](/{name}.ipynb).\n\n'
                        f'```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n```\n')
    shown = tree('Modules', modules).replace(':hidden:', ':maxdepth: 1')
    (source/'api'/'index.md').write_text('# Modules\n\n' + shown)
    texts = [*source.glob('*.md'), *source.glob('studies/*.md')]
    others = sorted(str(p.relative_to(source).with_suffix('')) for p in texts if p.stem != 'index')
    parts = {}
    for n in notebooks:
        part = n.split('/')[0] if '/' in n else 'notebooks'
        if n not in PATH: parts.setdefault(part, []).append(n)
    contents = tree('Learn', PATH) + tree('Pages', [*others, 'api/index'])
    for part in sorted(parts, key=ORDER.index): contents += tree(part.capitalize(), parts[part])
    readme = (source/'index.md').read_text().replace('](nbs/', '](')
    (source/'index.md').write_text(readme + '\n' + contents)
    what = re.search(r'\*\*(.+)\*\*', readme)[1]
    pages = [*PATH, *others, *sum(parts.values(), []), *(f'api/{m}' for m in modules)]
    lines = ''.join(f'- [{n}]({n}.html): {about(source, n)}\n' for n in pages)
    Path(app.outdir).mkdir(parents=True, exist_ok=True)
    (Path(app.outdir)/'llms.txt').write_text(f'# alpaca_farm\n\n> {what}\n\n## Pages\n\n{lines}')


def only_imports(cell: dict) -> bool:
    "Whether a cell does nothing but import."
    if cell['cell_type'] != 'code': return False
    try: statements = ast.parse(''.join(cell['source'])).body
    except SyntaxError: return False   # a magic
    imports = [isinstance(statement, (ast.Import, ast.ImportFrom)) for statement in statements]
    return bool(imports) and all(imports)


def fold(text: str) -> str:
    "A notebook whose cells are folded here where JupyterLab folds them, and its imports."
    notebook = json.loads(text)
    for cell in notebook['cells']:
        imports = only_imports(cell)
        if imports: cell['metadata']['mystnb'] = dict(code_prompt_show='Show the imports',
                                                      code_prompt_hide='Hide the imports')
        if imports or cell['metadata'].get('jupyter', {}).get('source_hidden'):
            cell['metadata'].setdefault('tags', []).append('hide-input')
    return json.dumps(notebook)


def plain(app, page, source):
    "A page without the lines that nbdev reads, and without links to folders."
    text = re.sub(r'"#\| ?\w[^"]*?(\\n)?",?\s*(?=["\]])', '', source[0])
    if (Path(app.srcdir)/f'{page}.ipynb').exists(): text = fold(text)
    source[0] = re.sub(r'\[(`[^`\]]+`)\]\([\w/]+\)', r'\1', text)


def rst(text: str) -> str:
    "Plain text as reStructuredText, with code between backticks."
    parts = enumerate(text.split('`'))
    return ''.join(f'``{p}``' if k % 2 else re.sub(r'([*_|\\])', r'\\\1', p) for k, p in parts)


def beside_parameters(function) -> list[str]:
    "Fields of what stands beside a function's parameters and its result, with their types."
    function = unwrap(getattr(function, '__func__', function))
    comments = comments_of(function)
    lines = []
    for name, found in docments(function, full=True).items():
        kind, comment = found.anno, rst(comments.get(name, ''))
        written = '' if kind is empty else formatannotation(kind)
        if name == 'return':
            if comment: lines.append(f':returns: {comment}')
            continue
        default = '' if found.default is empty else f' (default: ``{found.default!r}``)'
        if comment: lines.append(f':param {name}: {comment}{default}')
        if comment and written: lines.append(f':type {name}: ``{written}``')
    return lines


def as_rst(app, what, name, obj, options, lines):
    "A docstring, then what stands beside parameters; of settings, their comments and defaults."
    own = re.split(r'\n\n(?=Parameters:|Settings:|Returns:)', '\n'.join(lines))[0]
    lines[:] = [rst(line) for line in own.splitlines()]
    if what in ('function', 'method'): more = beside_parameters(obj)
    elif is_dataclass(obj) and issubclass(obj, Config):
        own = explained(obj)
        more = [f':param {name}: {rst(own[name])}' for name in obj.__annotations__]
    else: more = []
    lines += ['', *more, '']


def without_settings(app, what, name, *more):
    "No signature of settings: they are listed with their comments."
    if what == 'class' and name.endswith('Config'): return '', None


def setup(app):
    app.connect('builder-inited', write_pages)
    app.connect('source-read', plain)
    app.connect('html-page-context', describe)
    app.connect('autodoc-process-docstring', as_rst)
    app.connect('autodoc-process-signature', without_settings)
