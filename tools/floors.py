"""The floors of the library: read from `nbs/architecture.md`, drawn, and held by a test.

    python tools/floors.py    # draws nbs/images/floors.svg from the imports as they are
"""
import ast
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT/'alpaca_farm'
PAGE = ROOT/'nbs'/'architecture.md'
WIDTH, BAND, TOP = 760, 58, 34
# what `docstrings` has written into modules
WRITTEN = re.compile(r'\n\n *(?:Parameters|Settings|Returns):.*?"""', re.S)
STYLE = '''
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
rect { fill: #f6f8fa; stroke: #59636e; rx: 6 }
path { stroke: #0969da; fill: none; opacity: .55 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 }
  rect { fill: #151b23; stroke: #9198a1 } path { stroke: #4493f8 }
}
'''


@dataclass
class Floor:
    "A floor of the house."
    title: str
    rooms: list[str]   # names of modules, and of folders with a slash behind


def read_floors() -> list[Floor]:
    "Read the floors from the page's table, the ground floor first."
    floors = []
    for line in PAGE.read_text(encoding='utf-8').splitlines():
        row = re.fullmatch(r'\| \d+ \| \*\*(.+?)\*\*.*\|(.*)\|', line)
        if row: floors.append(Floor(row[1], re.findall(r'`([\w/]+)`', row[2])))
    return floors[::-1]   # the page shows the roof first


def shared_folders() -> list[str]:
    "List the folders of the lower floors, on which all notebooks that make runs stand."
    rooms = []
    for floor in read_floors(): rooms += floor.rooms
    return [room.rstrip('/') for room in rooms[:6]]


def module_name(path: Path) -> str:
    "Name the module of a file, without the package's name."
    return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)


def modules() -> dict[str, Path]:
    "Find the library's modules by name."
    paths = sorted(PACKAGE.rglob('*.py'))
    return {module_name(p): p for p in paths if p.name not in ('__init__.py', '_modidx.py')}


def floor_of(module: str, floors: list[Floor]) -> int:
    "Return the number of a module's floor, from 0; a module that no floor names is a method's."
    place = module.replace('.', '/')
    found = []
    for number, floor in enumerate(floors):
        for room in floor.rooms:
            if room == place or room.endswith('/') and place.startswith(room): found.append(number)
    if not found and '/' not in place: return [floor.title for floor in floors].index('Methods')
    if len(found) != 1: raise ValueError(f'{module} is on {len(found)} floors of {PAGE.name}')
    return found[0]


def imported_modules(path: Path, known) -> set[str]:
    "Find the library's modules that a module imports, anywhere in it, or names in a string."
    here = ['alpaca_farm', *module_name(path).split('.')[:-1]]
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import): names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[:len(here) + 1 - node.level] if node.level else []
            module = '.'.join([*base, *([node.module] if node.module else [])])
            names += [module, *(f'{module}.{alias.name}' for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r'alpaca_farm(\.\w+)+(:\w+)?', node.value):
                names.append(node.value.partition(':')[0])
    found = {name.removeprefix('alpaca_farm.') for name in names if name.startswith('alpaca_farm.')}
    return found & {*known} - {module_name(path)}


def count_imports(floors: list[Floor]) -> dict[tuple[int, int], int]:
    "Count the imports between two floors: from the first number to the second."
    paths = modules()
    counts = {}
    for name, path in paths.items():
        for other in imported_modules(path, paths):
            ends = floor_of(name, floors), floor_of(other, floors)
            counts[ends] = counts.get(ends, 0) + 1
    return counts


def code_lines(path: Path) -> int:
    "Count the lines of a module that are not empty, without what `docstrings` has written."
    text = WRITTEN.sub('', path.read_text(encoding='utf-8'))
    return sum(bool(line.strip()) for line in text.splitlines())


def draw(floors: list[Floor]) -> str:
    "Draw the floors with their lines of code, and as arcs how often one stands on another."
    paths = modules()
    height = TOP + BAND * len(floors) + 16
    told = 'The floors of the library; imports go down only.'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
             f'<title>{told}</title><style>{STYLE}</style>',
             f'<text class="small" x="10" y="20">{told} Width of an arc: number of imports</text>']
    middle = {}
    for number, floor in enumerate(floors):
        top = TOP + BAND * (len(floors) - 1 - number)
        middle[number] = top + 22
        on_it = [name for name in paths if floor_of(name, floors) == number]
        lines = sum(code_lines(paths[name]) for name in on_it)
        rooms = ', '.join(name.rpartition('.')[2] for name in on_it)
        if len(rooms) > 88: rooms = rooms[:rooms.rindex(',', 0, 84)] + ', ...'
        parts.append(f'<rect x="10" y="{top}" width="560" height="44"/>'
                     f'<text x="22" y="{top + 19}">{escape(floor.title)}</text>'
                     f'<text class="small" x="22" y="{top + 36}">{escape(rooms)}</text>'
                     f'<text class="small" x="558" y="{top + 19}" text-anchor="end">'
                     f'{len(on_it)} modules, {lines:,} lines</text>')
    for (upper, lower), n in sorted(count_imports(floors).items()):
        if upper == lower: continue
        bend = 580 + 17 * (upper - lower)
        parts.append(f'<path d="M570 {middle[upper]} C{bend} {middle[upper]} {bend} '
                     f'{middle[lower]} 570 {middle[lower]}" stroke-width="{1 + n / 12:.1f}"/>')
    return '\n'.join([*parts, '</svg>']) + '\n'


if __name__ == '__main__':
    (ROOT/'nbs'/'images'/'floors.svg').write_text(draw(read_floors()), encoding='utf-8')
