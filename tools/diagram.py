"""Draw the pictures of boxes and arrows in `nbs/images`: the farm, and a step of PPO.

    python tools/diagram.py

Each serves light and dark pages: its colours follow the reader's setting.
"""
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1]/'nbs'/'images'
WIDTH, BOX_WIDTH, BOX_HEIGHT = 760, 160, 44
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
HEAD = ('<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 Z"/></marker>')


@dataclass
class Picture:
    "Boxes, and arrows between points."
    told: str      # what it shows, for those who cannot see it
    caption: str   # below it
    height: int
    boxes: list    # left, top, kind (judge, trained or none), title, a smaller line below it
    arrows: list   # paths of SVG


def box(left: int, top: int, kind: str, title: str, below: str) -> str:
    "Draw a box with a title and a smaller line below it."
    middle = left + BOX_WIDTH//2
    return (f'<g class="{kind}"><rect x="{left}" y="{top}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}"/><text x="{middle}" y="{top + 19}">{escape(title)}</text>'
            f'<text class="small" x="{middle}" y="{top + 35}">{escape(below)}</text></g>')


def draw(picture: Picture) -> str:
    "Draw a picture as SVG."
    size = f'viewBox="0 0 {WIDTH} {picture.height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
             f'<title>{escape(picture.told)}</title>', f'<style>{STYLE}</style>',
             f'<defs>{HEAD}</defs>']
    parts += [f'<path d="{path}"/>' for path in picture.arrows]
    parts += [box(*given) for given in picture.boxes]
    parts.append(f'<text class="small" x="{WIDTH//2}" y="{picture.height - 12}">'
                 f'{escape(picture.caption)}</text></svg>')
    return '\n'.join(parts) + '\n'


FARM = Picture(
    'The farm: a world gives requests and demonstrations; SFT imitates them and writes two answers '
    'to each request; a pool or a crowd labels which is better; a reward model and a policy learn '
    'from the labels; a held-out crowd judges the new answers.',
    'blue: who judges · green: what is trained · DPO learns from the labels directly', 330,
    [(10, 20, '', 'World', 'requests, demonstrations'),
     (210, 20, 'trained', 'SFT', 'imitates demonstrations'),
     (410, 20, '', 'Two answers', 'to each request'),
     (590, 105, 'judge', 'Pool', '13 simulated judges'),
     (590, 165, 'judge', 'or crowd', '32 simulated persons'),
     (410, 135, '', 'Labels', 'which answer is better'),
     (210, 135, 'trained', 'Reward model', 'scores one answer'),
     (210, 250, 'trained', 'Policy', 'PPO, DPO, best-of-n, ...'),
     (410, 250, '', 'New answers', 'beside answers of SFT'),
     (590, 250, 'judge', 'Held-out crowd', '32 others: win rate')],
    ['M170 42 L210 42', 'M370 42 L410 42', 'M490 64 L490 135', 'M590 127 L570 150',
     'M590 187 L570 166', 'M410 157 L370 157', 'M290 179 L290 250', 'M450 179 L360 250',
     'M370 272 L410 272', 'M570 272 L590 272'])

PPO = Picture(
    'A step of PPO: the policy answers prompts; the reward model scores each answer, the reference '
    'gives the KL penalty of each token, the value model what was expected; their difference is '
    'the advantage, by which policy and value model are updated.',
    'green: trained · blue: frozen · a step: one rollout of answers, then a few updates', 300,
    [(10, 110, '', 'Prompts', 'a batch of requests'),
     (210, 110, 'trained', 'Policy', 'writes an answer to each'),
     (410, 20, 'judge', 'Reward model', 'score of the answer'),
     (410, 110, 'judge', 'Reference', 'KL penalty of each token'),
     (410, 200, 'trained', 'Value model', 'reward still expected'),
     (590, 110, '', 'Advantages', 'reward minus expected')],
    ['M170 132 L210 132', 'M370 122 L410 50', 'M370 132 L410 132', 'M370 142 L410 214',
     'M570 50 L640 110', 'M570 132 L590 132', 'M570 214 L640 154',
     'M700 154 L700 266 L290 266 L290 154', 'M480 266 L480 244'])

if __name__ == '__main__':
    for name, picture in dict(farm=FARM, ppo_loop=PPO).items():
        (FOLDER/f'{name}.svg').write_text(draw(picture), encoding='utf-8')
