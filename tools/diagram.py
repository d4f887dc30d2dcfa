"""Draw `nbs/images/farm.svg`, the picture of the whole at the top of the README.

    python tools/diagram.py

One file serves light and dark pages: its colours follow the reader's setting.
"""
from html import escape
from pathlib import Path

FILE = Path(__file__).parents[1]/'nbs'/'images'/'farm.svg'
WIDTH, HEIGHT = 760, 330
STYLE = '''
text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.small { font-size: 11px; fill: #59636e }
rect { fill: #f6f8fa; stroke: #59636e; rx: 6 }
.judge rect { fill: #ddf4ff }
.trained rect { fill: #dafbe1 }
path { stroke: #59636e; fill: none; marker-end: url(#head) }
#head path { fill: #59636e; stroke: none; marker-end: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 }
  rect { fill: #151b23; stroke: #9198a1 }
  .judge rect { fill: #0c2d6b } .trained rect { fill: #033a16 }
  path { stroke: #9198a1 } #head path { fill: #9198a1 }
}
'''
BOXES = {   # name: left, top, width, what kind it is, title, line below
    'world': (10, 20, 160, '', 'World', 'requests, demonstrations'),
    'sft': (210, 20, 160, 'trained', 'SFT', 'imitates demonstrations'),
    'answers': (410, 20, 160, '', 'Two answers', 'to each request'),
    'pool': (590, 105, 160, 'judge', 'Pool', '13 simulated judges'),
    'crowd': (590, 165, 160, 'judge', 'or crowd', '32 simulated persons'),
    'labels': (410, 135, 160, '', 'Labels', 'which answer is better'),
    'reward': (210, 135, 160, 'trained', 'Reward model', 'scores one answer'),
    'policy': (210, 250, 160, 'trained', 'Policy', 'PPO, DPO, best-of-n, ...'),
    'new': (410, 250, 160, '', 'New answers', 'beside answers of SFT'),
    'held': (590, 250, 160, 'judge', 'Held-out crowd', '32 others: win rate'),
}
ARROWS = [   # from a point to a point
    (170, 42, 210, 42), (370, 42, 410, 42), (490, 64, 490, 135), (590, 127, 570, 150),
    (590, 187, 570, 166), (410, 157, 370, 157), (290, 179, 290, 250), (450, 179, 360, 250),
    (370, 272, 410, 272), (570, 272, 590, 272)]


def box(left: int, top: int, width: int, kind: str, title: str, below: str) -> str:
    "Draw a box with a title and a smaller line below it."
    middle = left + width//2
    return (f'<g class="{kind}"><rect x="{left}" y="{top}" width="{width}" height="44"/>'
            f'<text x="{middle}" y="{top + 19}">{escape(title)}</text>'
            f'<text class="small" x="{middle}" y="{top + 35}">{escape(below)}</text></g>')


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    "Draw a line with a head at its end."
    return f'<path d="M{x} {y} L{to_x} {to_y}"/>'


def picture() -> str:
    "Draw the whole as SVG."
    head = ('<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 Z"/></marker>')
    told = ('The farm: a world gives requests and demonstrations; SFT imitates them and writes two '
            'answers to each request; a pool or a crowd labels which is better; a reward model and '
            'a policy learn from the labels; a held-out crowd judges the new answers.')
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
             f'<title>{told}</title>', f'<style>{STYLE}</style>', f'<defs>{head}</defs>']
    parts += [arrow(*points) for points in ARROWS]
    parts += [box(*given) for given in BOXES.values()]
    parts.append('<text class="small" x="380" y="318">blue: who judges · green: what is trained · '
                 'DPO learns from the labels directly</text></svg>')
    return '\n'.join(parts) + '\n'


if __name__ == '__main__': FILE.write_text(picture(), encoding='utf-8')
