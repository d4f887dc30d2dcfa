"""Every notebook of nbs/ executes through papermill; wrong parameters fail before any work."""
import csv
import re
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest

import tiny
from alpaca_farm import farm
from alpaca_farm.boards.farm_board import _plain_name, short_board
from alpaca_farm.run import execution
from alpaca_farm.run.execution import is_needed
from alpaca_farm.run.files import read_json
from alpaca_farm.run.jobs import Job, run_jobs
from alpaca_farm.run.paths import notebook_path
from alpaca_farm.run.runs import methods, read_log, read_summary

NBS = tiny.ROOT/'nbs'
RUNNABLE = [p for p in sorted(NBS.rglob('*.ipynb'))
            if not {*tiny.SHARED, 'studies', 'recipes', '.ipynb_checkpoints'}
            & {*p.parts[len(NBS.parts):]}]
# notebooks without a run, which nbdev_test executes
SILENT = [p.stem for p in RUNNABLE if '"parameters"' not in p.read_text()]
# notebooks that the farm runs, with the run that shows each: of several methods the first
FARMED = ({name: name for name in ('world', 'sft', 'annotators', 'reward_model')}
          | {row['notebook']: method for method, row in reversed(methods().items())})


def own(f):
    "Settings of the notebooks that are run here, on the farm's runs in the folder `f`."
    world = f'{f}/world'
    sft = f'{f}/sft'
    references = f'{f}/references'
    return dict(
        rlcd=dict(data=world, policy=world, task=f'{tiny.ROOT}/tests/data/task.yaml',
                  max_instances=12, chunk=8),
        wombat=dict(candidates=[f'{f}/candidates'], max_instances=12),
        eval=dict(outputs=[f'{f}/dpo', f'{f}/ppo'], reference=references,
                  annotators=[f'{world}/{name}.json' for name in ('held_out_crowd', 'gold')]),
        pretrained={},
        labelling=dict(outputs=f'{f}/samples', store=f'{f}/answers.sqlite'),
        agreement=dict(max_instances=100, draws=20, sets=[f'{world}/labelled.json'],
                       judges=[f'{world}/pool.json', f'{world}/judge.json']),
        overoptimization=dict(
            policy=sft, bank=f'{f}/eval_samples', references=references, instances=20, world=world,
            proxies=[f'{f}/reward_model', f'{f}/reward_model_crowd'],
            policies=[f'{f}/{m}' for m in ('ppo', 'rloo', 'dpo', 'quark')]),
        look_at_data=dict(data=f'{f}/annotators', policy=sft), chat=dict(policy=sft),
        compare=dict(folders=[f'{f}/dpo', f'{f}/ppo'], annotators=f'{world}/crowd.json'),
        real=dict(model=sft, n=2, max_prompt=120, max_new_tokens=16,
                  sizes=f'{tiny.ROOT}/tests/data/real.yaml'),
        bring_your_own=dict(model=sft, prompts=world, n=2, judge=f'{world}/pool.json',
                            preferences=f'{f}/annotators'),
        decide=dict(model=sft, prompts=world, judge=f'{world}/pool.json', methods=['dpo'],
                    seeds=1, labels=f'{world}/held_out_crowd.json', budget=40, force=True))


SUFFIX = 'one suffix for all'   # a row where answers have common last sentences
OWN = [*own('')]
STUDIES = dict(hybrid=dict(budgets=[20]), effects=dict(methods=['best_of_n', 'dpo', 'simpo']),
               goodhart=dict(steps=2, saved=1, instances=4, samples=4, labels=[20],
                             likelihoods=[.05]),
               remedies=dict(steps=2, saved=1, instances=4, further=20), labellers=dict(dialogues=[200], prompts=80),
               worth=dict(instances=24, labels=[10, 15], methods=['dpo']),
               simulators=dict(methods=['best_of_n', 'dpo']),
               knowledge=dict(shares=[0., 1.], budgets=[20]),
               limits=dict(steps=2, saved=1, instances=4, requests=24, pairs_each=1,
                           factors=['utility', 'imitation', 'preferences', 'crowd', 'pool'],
                           holes=['topic']),
               which_figure=dict(instances=4, labels=[20], flips=[0.], biases=[.5]),
               alarms=dict(steps=2, saved=1, instances=4, cells=['pool_all_middle_0.05']),
               literature=dict(worlds=1, steps=2), likelihood=dict(likelihoods=[0.]))
STUDIES = {name: dict(given, replicates=1) for name, given in STUDIES.items()}
STUDIES['regret'] = dict(labels=[21, 42, 63], draws=10)
STUDIES['decoding'] = dict(instances=8, temperatures=[1., 0.])
STUDIES['human_labels'] = dict(max_length=120, folds=2, budgets=[12, 24], prompts=6,
                               n=2, max_new_tokens=8,
                               labelled=['alpaca_farm.world:embedded_pairs'])
TOUR = dict(start=dict(label_flip=.4, steps=4, instances=8),
            ppo_single=dict(steps=2, rollouts=8, batch_size=4, max_new_tokens=12))


def executed(notebook, out, given):
    "Exit status and output of a papermill run."
    p = tiny.spawn(tiny.papermill(notebook_path(notebook), out, **given))
    output = p.communicate()[0]
    return p.returncode, output


# executed as a reader does; of others the cells that a run needs: nbdev_test runs the rest
WHOLE = 'farm', 'rlcd', 'compare'


def forked(notebook, out, given): return tiny.run_notebook(notebook_path(notebook), out, given)


@pytest.fixture(scope='module')
def sizes(tmp_path_factory):
    "The file that the farm reads its tiny sizes from."
    return tiny.write(tmp_path_factory.mktemp('sizes')/'tiny.json', tiny.FARM)


@pytest.fixture(scope='module')
def made(sizes, tmp_path_factory):
    "The folder of the tiny farm and of the other notebooks on its runs; how each of them ended."
    folder = tmp_path_factory.mktemp('farm')
    outputs = dict(farm=executed('farm', folder/'farm.ipynb', dict(size=sizes, runs=str(folder))))
    with ThreadPoolExecutor(2) as workers:
        jobs = {}
        for n, given in reversed(own(folder).items()):   # the longest first
            run = executed if n in WHOLE else forked
            jobs[n] = workers.submit(run, n, folder/f'{n}.ipynb', dict(given, out=f'{folder}/{n}'))
        return folder, outputs | {n: j.result() for n, j in jobs.items()}


def test_no_notebook_is_forgotten():
    "nbdev_test executes those without a run as a whole; a study exports nothing."
    # test_course.py executes `exercises`, test_bench.py `bench`
    assert {p.stem for p in RUNNABLE} == {'farm', *FARMED, *OWN, *SILENT, *TOUR, 'exercises',
                                          'bench'}
    for p in RUNNABLE:
        assert p.stem not in SILENT or not re.search(r'#\| *(slow|notest|eval)', p.read_text()), p
    studies = list((NBS/'studies').glob('*.ipynb'))
    # `tuning`, `try_it`, `processors` and `ladder` make runs of the methods; TRL is not installed
    long = 'tuning', 'try_it', 'beside_trl', 'processors', 'ladder'
    assert {p.stem for p in studies} == {*long, *STUDIES}
    assert not any(re.search(r'#\| *(export|default_exp)', p.read_text()) for p in studies)


def test_the_farm_in_the_real_world(made, monkeypatch):
    import pandas as pd
    folder, _ = made
    monkeypatch.setattr(farm, 'run_jobs', lambda jobs, **_: tiny.run_here(jobs))
    run = farm.run(farm.FarmConfig(world=str(folder/'real'), device='cpu'))
    board = pd.read_csv(run.folder/'leaderboard.csv', index_col='method')
    assert {'sft', 'dpo_crowd', 'rloo'} < {*board.index}
    best = board.utility['best of 3 by the utility']
    for name in ('likeliest of 3', 'shortest of 3', 'best_of_n'):
        assert best >= board.utility[name]
    parts = pd.read_csv(run.folder/'parts.csv')
    assert {*parts.part} == {'kept', 'kept_new', 'fluency', 'utility'}
    assert parts.notna().all(None)
    pool = read_json(folder/'real_runs'/'annotators'/'preferences.json')
    crowd = read_json(folder/'real_runs'/'annotators_crowd'/'preferences.json')
    assert [p['output_1'] for p in pool] == [p['output_1'] for p in crowd]
    assert pool != crowd
    prompts = [p['instruction'] for p in pool]
    assert len(prompts) > 3*len({*prompts})   # all pairs of four answers


@pytest.mark.parametrize('name', ['farm', *FARMED, *OWN])
def test_notebook_executes(made, name):
    folder, outputs = made
    status, output = outputs.get(name, outputs['farm'])
    assert status == 0, output
    run = FARMED.get(name, name)
    code = []
    for cell in nbformat.read(folder/f'{run}.ipynb', 4).cells:
        if cell.cell_type == 'code' and cell.source.strip():
            code.append(cell)
    for cell in code:
        if name in WHOLE or is_needed(cell):   # the others demonstrate
            assert cell.execution_count
        assert len(cell.outputs) <= 6, 'a live line leaves one output behind'
        for shown in cell.outputs:
            assert shown.output_type != 'error'
            assert 'Traceback' not in str(shown.get('text', ''))
    if name not in ('pretrained', 'chat'):   # which make no run
        assert {'cpu_seconds', 'seconds', 'peak_memory_gb'} <= {*read_summary(folder/run)}
        known = read_json(folder/run/'config.json')
        assert {'settings', 'fingerprint', 'versions', 'commit', 'started'} <= {*known}
        assert not list((folder/run).rglob('.*'))


def where_of(name, folder, sizes):
    "The settings that say where a study finds its runs, in the tiny farm's folder."
    sft = f'{folder}/sft'
    places = dict(
        human_labels=dict(folder=f'{folder}/{name}', policy=sft,
                          preferences=f'{folder}/annotators'),
        decoding=dict(policies=[sft, f'{folder}/best_of_n'], reference=sft,
                      data=f'{folder}/world', out=f'{folder}/{name}'),
        ppo_single=dict(sft=f'{sft}/model', prompts=f'{folder}/world/unlabeled.json',
                        reward_model=f'{folder}/reward_model/model', out=f'{folder}/{name}/model'),
        limits=dict(world=f'{folder}/real', runs=f'{folder}/real_runs'),
        regret=dict(folders=[str(folder)]*2))   # one replicate for two
    return places.get(name, dict(runs=str(folder), size=sizes))


# each reads runs of those before it
IN_ORDER = 'goodhart', 'remedies', 'alarms', 'labellers', 'literature'


@pytest.fixture(scope='module')
def studied(made, sizes):
    "How the tour and studies of one replicate ended, on the tiny farm's runs where they read them."
    folder = made[0]

    def execute(names):
        ends = {}
        for name in names:
            given = (STUDIES | TOUR)[name] | where_of(name, folder, sizes)
            notebook = name if name in TOUR else f'studies/{name}'
            ends[name] = tiny.run_notebook(notebook_path(notebook), folder/f'{name}.ipynb', given,
                                           with_its_jobs=True)
        return ends

    others = [name for name in STUDIES | TOUR if name not in IN_ORDER]
    with ThreadPoolExecutor(2) as workers:
        first, second = workers.map(execute, [IN_ORDER, others])
    return first | second


@pytest.mark.parametrize('name', STUDIES | TOUR)
def test_study_executes(made, studied, name):
    status, output = studied[name]
    assert status == 0, output
    cells = nbformat.read(made[0]/f'{name}.ipynb', 4).cells
    assert any('image/png' in o.get('data', {}) for c in cells for o in c.get('outputs', []))


def table(path): return list(csv.DictReader(open(path)))


def test_farm_does_nothing_twice(made, sizes):
    folder, _ = made
    def written():
        files = [p for p in folder.rglob('*') if p.is_file() and not p.name.startswith('.')]
        return {p: p.stat().st_mtime_ns for p in files}
    before = written()
    assert farm.run(farm.FarmConfig(size=sizes, runs=str(folder))).done
    assert written() == before


def test_a_misspelt_parameter_fails_before_any_work(base, tmp_path):
    "What else is wrong with settings is tested without a notebook."
    given = tiny.settings('ppo', base, out=str(tmp_path/'out'), kl_coff=.1)
    status, said = executed('ppo', tmp_path/'a.ipynb', given)
    assert status
    assert 'Did you mean kl_coef?' in said
    assert not (tmp_path/'out').exists()


def test_what_a_run_warns_of_is_in_its_notebook_and_summary_and_told_by_its_job(base, tmp_path,
                                                                               capfd):
    "The run's cell ends in a semicolon; its first step is warned of, the others are not."
    out = str(tmp_path/'run')
    settings = tiny.settings('ppo', base, max_new_tokens=1)
    assert run_jobs([Job(out, 'ppo', settings)], 1) == []
    warning = 'step 1: more than half of the answers never end: raise max_new_tokens'
    assert read_summary(out)['warnings'].count(warning) == 1
    assert f'{out}: {warning}\n' in capfd.readouterr().out
    outputs = [o for c in nbformat.read(f'{out}.ipynb', 4).cells for o in c.get('outputs', [])]
    assert any(warning in o.get('text', '') for o in outputs)


LACKING = dict(  # the settings under which a method's run has the fewest figures
    sft=dict(eval_split='', val_split=''), reward_model={}, best_of_n=dict(reward_model=''),
    dpo=dict(eval_split=''), ppo=dict(eval_split='', annotators=''),
    quark=dict(eval_split='', annotators=''), rrhf=dict(eval_split='', perplexity_model=''),
    expert_iteration=dict(eval_split=''),
    binary_feedback=dict(eval_split='', annotators='', val_split=''))


@pytest.mark.parametrize('name', LACKING)
def test_results_are_shown_of_any_run(base, tmp_path, name, monkeypatch):
    "The cells after the settings need no figure that can be left out, and read no other run."
    monkeypatch.setattr('alpaca_farm.run.jobs.run_jobs', tiny.run_here)
    given = tiny.settings(name, base, out=str(tmp_path/name)) | LACKING[name]
    shown = tiny.show_results(name, tiny.config(name, **given))
    assert len(shown) > 1
    assert "'runs/" not in ''.join(shown)


def test_a_notebook_runs_where_nothing_can_be_forked(base, tmp_path, monkeypatch):
    "As on macOS: a process that loads the libraries itself, with the same result."
    runs = []
    for platform in ('linux', 'darwin'):
        execution.warm_server.cache_clear()
        monkeypatch.setattr(execution.sys, 'platform', platform)
        context = execution.warm_server()
        out = tmp_path/platform
        assert context.get_start_method() == dict(linux='forkserver', darwin='spawn')[platform]
        status, output = forked('sft', tmp_path/f'{platform}.ipynb',
                                tiny.settings('sft', base, out=str(out)))
        assert status == 0, output
        runs.append([row['loss'] for row in read_log(out)])
    execution.warm_server.cache_clear()
    assert runs[0] == runs[1]
    assert len(runs[0]) > 2


BASELINES = {'base model', 'greedy SFT', 'likeliest of 4', 'longest of 4', 'bag of words',
             'bag of words_crowd', 'words x asker', 'words x asker_crowd', 'base verdict',
             'best of 4 by the utility', 'best without labels', 'an expert'}


def test_the_farms_board_has_every_method_and_baseline(made):
    rows = table(made[0]/'farm'/'leaderboard.csv')
    by = {r['method']: r for r in rows}
    trained = {*methods(), *(f'{m}_crowd' for m in methods())}
    assert {*by} - {SUFFIX} == {'sft', *BASELINES, *trained}
    for name in trained | {'bag of words', 'bag of words_crowd'}:
        assert int(by[name]['labels']) > 0
        assert float(by[name]['cpu_seconds']) > 0
    best = by['best of 4 by the utility']
    longest = by['longest of 4']
    assert float(best['utility']) >= float(longest['utility'])
    assert float(best['utility']) >= float(by['sft']['utility'])
    assert float(longest['length']) >= float(best['length'])
    for judge in ('crowd', 'pool', 'utility'):
        assert float(by['sft'][judge]) == 50
        for r in rows:
            low = float(r[f'{judge}_low'])
            high = float(r[f'{judge}_high'])
            assert 0 <= low <= float(r[judge]) <= high <= 100


def test_the_short_board_and_the_simulation_are_of_the_board(made):
    folder = made[0]/'farm'
    by = {r['method']: r for r in table(folder/'leaderboard.csv')}
    short = short_board(str(folder))
    plain = {name: _plain_name(name) for name in methods()}
    assert {*plain.values(), 'always the likeliest next token', 'choice by words'} <= {*short.index}
    for name in methods():
        assert short['judge: held-out crowd'][plain[name]].startswith(f'{float(by[name]["crowd"]):.1f} ')
        crowd = float(by[f'{name}_crowd']['crowd'])
        assert short['labels: crowd'][plain[name]].startswith(f'{crowd:.1f} ')
    simulated = {r['method']: r for r in table(folder/'simulation.csv')}
    assert {*simulated} - {SUFFIX} == {'base model', 'sft', *methods()}
    for name in methods():
        assert simulated[name]['simulated'] == by[name]['pool']
        assert simulated[name]['transfer'] == by[name]['crowd']
        assert simulated[name]['crowd'] == by[f'{name}_crowd']['crowd']
    assert {'spearman_simulated_crowd_low', 'gaining', 'crowd_groups'} <= {*read_summary(folder)}
    assert (folder/'leaderboard.png').stat().st_size > 5000
    curves = table(made[0]/'overoptimization'/'curves.csv')
    assert {'kl', 'proxy', 'utility', 'utility_low', 'utility_high', 'crowd'} <= {*curves[0]}
    assert {'best_of_n', 'ppo', 'rloo', 'dpo, beta 0.3', 'quark'} <= {r['method'] for r in curves}
