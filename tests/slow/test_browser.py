"""JupyterLab as a person uses it: nothing outside is asked, a run is interrupted and goes on,
pairs are labelled by mouse and keyboard."""
import json
import os
import re
import shutil
import subprocess
import sys
import time

import nbformat
import pytest

import tiny
from alpaca_farm.ask.store import Store
from alpaca_farm.labelling import person_labels
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_log

playwright = pytest.importorskip('playwright.sync_api', reason='pip install -e .[browser]')
playwright.expect.set_options(timeout=1000*tiny.LONG)
NAMES = 'chromium', 'chromium-browser', 'google-chrome'
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason='no Chromium here')
SHOTS = os.environ.get('SCREENSHOTS')   # a folder to look at what the browser showed


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    "JupyterLab, started like `make lab` on a folder that holds the notebooks opened here."
    folder = tmp_path_factory.mktemp('lab')
    own = {f'JUPYTER_{k.upper()}_DIR': str(folder/k) for k in ('config', 'data', 'runtime')}
    env = tiny.environment(JUPYTER_CONFIG_PATH=str(tiny.ROOT/'.jupyter'),
                           PYTHONPATH=str(tiny.ROOT), **own)
    command = [sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root',
               '--port=0', '--IdentityProvider.token=', '--ServerApp.root_dir', str(folder)]
    with open(folder/'server.txt', 'w') as f:
        server = subprocess.Popen(command, env=env, cwd=tiny.ROOT, stdout=f, stderr=f)
    try:
        wait_until(lambda: list(folder.glob('runtime/jpserver-*.json')))
        port = read_json(*folder.glob('runtime/jpserver-*.json'))['port']
        yield folder, f'http://127.0.0.1:{port}'
    finally:
        server.terminate(); server.wait()


def copy(name, folder, **given):
    "A copy of a notebook with other parameters, without outputs."
    path = next((tiny.ROOT/'nbs').rglob(f'{name}.ipynb'))
    nb = json.loads(path.read_text())
    for cell in nb['cells']:
        if cell['cell_type'] == 'code':
            cell['outputs'] = []
        if 'parameters' in cell['metadata'].get('tags', []):
            for k, v in given.items():
                old = rf'^{k}(: [^=]*)? = .*?(\n?)$'
                new = f'{k} = {v!r}\n'
                cell['source'] = [re.sub(old, lambda _: new, line) for line in cell['source']]
    (folder/f'{name}.ipynb').write_text(json.dumps(nb))


@pytest.fixture
def browser():
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
        yield chromium
        chromium.close()


def opened(browser, address, name, width=1300):
    "A page with a notebook, and the addresses that it has asked for."
    page = browser.new_page(viewport=dict(width=width, height=900))
    asked = []
    page.on('request', lambda r: asked.append(r.url))
    page.set_default_timeout(1000*tiny.LONG)
    page.goto(f'{address}/lab/workspaces/{name}-{width}/tree/{name}.ipynb?reset')
    page.wait_for_selector('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell')
    page.get_by_text('| Idle').wait_for()
    return page, asked


def shot(page, name):
    if SHOTS:
        page.screenshot(path=f'{SHOTS}/{name}.png')


def section(page, title):
    "Scroll to a heading by the table of contents."
    if not page.locator('.jp-TableOfContents:visible').count():
        page.locator('[title^="Table of Contents"]').first.click()
    heading = re.compile(rf'^{title}$')
    page.locator('.jp-TableOfContents .jp-tocItem-content', has_text=heading).click()


def code_line(page, start):
    "The first line of code that begins so; only cells near what is in view are in the page."
    return page.locator('.jp-Notebook .cm-line', has_text=re.compile('^' + re.escape(start))).first


def menu(page, *names):
    for name in names:
        page.get_by_role('menuitem', name=re.compile(rf'^{name}')).first.click()


def wait_until(condition):
    while not condition():
        time.sleep(.1)


def test_a_run_is_interrupted_and_goes_on(base, lab, browser):
    folder, address = lab
    out = folder/'ppo'
    given = dict(steps=400, eval_every=400, save_every=0, checkpoint_every=2)
    copy('ppo', folder, **tiny.settings('ppo', base, out=str(out), **given))
    page, asked = opened(browser, address, 'ppo')
    section(page, 'Run')
    code_line(page, 'kl_coef: float').click()
    for key in ('Home', 'Shift+End'):
        page.keyboard.press(key)
    page.keyboard.type('kl_coef: float = 0.07')
    menu(page, 'Run', 'Run All Cells')
    wait_until(lambda: len(read_log(out)) > 4)
    section(page, 'Results'); section(page, 'Run')
    code_line(page, 'train(cfg)').click()
    run = page.locator('.jp-Cell.jp-mod-active')
    playwright.expect(run.locator('svg[role=img] polyline')).to_be_visible()
    playwright.expect(run.locator('progress')).to_have_attribute('max', '400')
    shot(page, 'ppo-running')
    page.keyboard.press('Escape'); page.keyboard.press('i'); page.keyboard.press('i')
    playwright.expect(run).to_contain_text('KeyboardInterrupt')
    shot(page, 'ppo-interrupted')
    assert read_json(out/'config.json')['settings']['kl_coef'] == .07
    step = len(read_log(out))
    page.keyboard.press('Control+Enter')
    wait_until(lambda: len(read_log(out)) > step + 3)
    assert [r['step'] for r in read_log(out)][:step + 3] == list(range(1, step + 4))
    assert not list(folder.glob('ppo~*'))
    page.keyboard.press('i'); page.keyboard.press('i')
    playwright.expect(run).to_contain_text('KeyboardInterrupt')
    sent = [a for a in asked if not a.startswith(('data:', 'blob:'))]
    assert {a.split('/')[2] for a in sent} == {address.split('/')[2]}
    assert not [a for a in asked if re.search('api/(news|update|extensions)', a)]


@pytest.mark.parametrize('width', [900, 1300])
def test_five_pairs_by_mouse_and_keyboard(lab, browser, width):
    folder, address = lab
    name = f'Ann at {width}'
    pairs = [dict(instruction=f'Say {i}.', input='', output_1=f'{i}. ' * 20,
                  output_2=f'{i}, as you wish. ' * 9) for i in range(6)]
    out, outputs, store = (folder/k for k in ('labelling', 'pairs.json', 'answers.sqlite'))
    outputs.write_text(json.dumps(pairs))
    copy('labelling', folder, out=str(out), outputs=str(outputs), store=str(store), person=name)
    page, _ = opened(browser, address, 'labelling', width)
    menu(page, 'Run', 'Run All Cells')
    section(page, 'Results'); section(page, 'Label')
    widget = page.locator('.labelling')
    playwright.expect(widget).to_contain_text('0 done, 6 left')
    playwright.expect(widget.locator('[aria-live=polite]')).to_contain_text('Say 0.')
    widget.scroll_into_view_if_needed()
    for button in widget.locator('button').all():
        text = button.inner_text()
        box = button.bounding_box()
        assert button.evaluate('b => b.scrollWidth <= b.clientWidth'), f'{text} is cut'
        assert box['x'] + box['width'] < width
    shot(page, f'labelling-{width}')

    def done(n):
        playwright.expect(widget).to_contain_text(f'{n} done, {6 - n} left')
        time.sleep(.4)   # a key at once is for the pair before

    widget.get_by_role('button', name='1: left').click(); done(1)
    page.keyboard.press('2'); done(2)                        # the button still has the focus
    widget.get_by_text(re.compile('^2[.,]')).first.click()   # a click on an answer
    page.keyboard.press('0'); done(3)
    page.keyboard.press('1'); done(4)
    page.keyboard.press('u'); done(3)
    page.keyboard.press('s'); done(4)
    widget.get_by_role('button', name='2: right').click(); done(5)
    page.keyboard.press('0'); page.keyboard.press('0'); done(6)
    assert page.locator('.jp-Dialog').count() == 0, '"0 0" restarts the kernel elsewhere'
    shot(page, f'labelling-{width}-done')
    found = [(r['preference'], r['shown_first']) for r in person_labels(Store(store), pairs, name)]
    assert [p if first == 1 else 3 - p for p, first in found] == [1, 2, 1.5, 2, 1.5]


PRESSED = """
import pathlib, time
from ipywidgets import interact_manual
from alpaca_farm.run.progress import Progress

def work():
    show = Progress('work', 2)
    show(1, 'half of it')
    while not pathlib.Path('seen').exists(): time.sleep(.1)

interact_manual(work);"""


def test_progress_is_shown_beside_the_button_that_was_pressed(lab, browser):
    folder, address = lab
    kernel = dict(name='python3', language='python', display_name='python3')
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PRESSED)],
                                        metadata=dict(kernelspec=kernel))
    nbformat.write(notebook, folder/'pressed.ipynb')
    page, _ = opened(browser, address, 'pressed')
    menu(page, 'Run', 'Run All Cells')
    page.get_by_role('button', name='Run Interact').click()
    playwright.expect(page.locator('.widget-output')).to_contain_text('work 1/2 half of it')
    playwright.expect(page.locator('.widget-output progress')).to_have_attribute('max', '2')
    shot(page, 'pressed')
    (folder/'seen').touch()
