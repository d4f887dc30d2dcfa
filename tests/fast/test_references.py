"Every citation leads to its paper by the list of references; each notebook to the glossary."
import os
import re

import pytest

import tiny
from alpaca_farm.run.files import read_json

NBS = tiny.ROOT/'nbs'
PATHS = sorted(p for p in (*NBS.rglob('*.ipynb'), *NBS.rglob('*.md'), tiny.ROOT/'README.md')
               if p.parent.name != '.ipynb_checkpoints'
               and p.name not in ('references.md', 'CHANGES.md'))
REFERENCES = {re.sub(r'[()]', '', name).replace(', ', ' '): url for name, url in re.findall(
    r'^- \[([^]]+)\]\(([^)]+)\)', (NBS/'references.md').read_text(), re.M)}
NAME = r'[A-Z][\w-]+'
AUTHORS = rf'{NAME}(?:(?:,\s+{NAME})*\s+and\s+{NAME}|\s+et\s+al\.)?'
CITATION = re.compile(rf'(?<!\w)({AUTHORS})(?:,\s+|\s+\()((?:19|20)\d\d[a-z]?)\b')
NOT_AUTHORS = re.compile('AlpacaFarm|TRL|January|February|March|April|May|June|July|August|'
                         'September|October|November|December')


def cited(text: str) -> list[str]:
    "The works that a text cites, as the list of references names them."
    found = [f'{" ".join(authors.split())} {year}' for authors, year in CITATION.findall(text)
             if not NOT_AUTHORS.match(authors)]
    return [name.replace(', ', ' ') for name in found]


def texts_of(path, kind: str) -> list[str]:
    "The cells of one kind of a notebook; a page is one text."
    if path.suffix == '.md':
        return [path.read_text()] if kind == 'markdown' else []
    return [''.join(c['source']) for c in read_json(path)['cells'] if c['cell_type'] == kind]


@pytest.mark.parametrize('path', PATHS, ids=lambda p: p.stem)
def test_every_citation_is_a_link_and_resolves(path):
    for text in texts_of(path, 'markdown'):
        text = re.sub(r'```.*?```|`[^`\n]*`', '', text, flags=re.S)
        for name, url in re.findall(r'\[([^]]+)\]\(([^)]+)\)', text):
            for work in cited(name):
                assert REFERENCES.get(work) == url, (work, url)
        assert cited(re.sub(r'\[[^]]+\]\([^)]+\)', '', text)) == []
    for text in texts_of(path, 'code'):   # comments, docstrings and tables cannot link
        assert [work for work in cited(text) if work not in REFERENCES] == []


def test_every_work_of_the_list_is_cited():
    said = {work for path in PATHS for kind in ('markdown', 'code')
            for text in texts_of(path, kind) for work in cited(text)}
    assert set(REFERENCES) - said == set()


def test_the_notebooks_of_the_library_lead_to_the_glossary():
    lost = [p for p in PATHS if p.suffix == '.ipynb' and p.parent.name != 'recipes'
            and f'({os.path.relpath(NBS/"glossary.md", p.parent)})'
            not in texts_of(p, 'markdown')[0]]
    assert lost == []


def test_the_glossary_has_each_term_once():
    terms = re.findall('^### (.*)', (NBS/'glossary.md').read_text(), re.M)
    assert len(terms) == len(set(terms)) >= 25
