"Whatever is written into a setting works or is refused by name; paths and the installed package."
import functools
import inspect
import math
import pydoc
import random
import re
import shutil
import string
import sys
import warnings

import pytest
import torch
from hypothesis import given, HealthCheck, Phase, settings, strategies as st

import tiny
from alpaca_farm.decide import DecideConfig
from alpaca_farm.dpo import Loss
from alpaca_farm.farm import _all_sizes, FarmConfig
from alpaca_farm.run import paths
from alpaca_farm.run.settings import field_comments, from_args, no_secrets, TrainConfig
from alpaca_farm.worlds.folder import World

NOTEBOOKS = ('agreement', 'annotators', 'compare', 'dpo', 'eval', 'farm', 'labelling', 'ppo', 'rrhf')
QUICK = dict(deadline=None, phases=[Phase.generate], database=None, derandomize=True,
             suppress_health_check=list(HealthCheck))
NASTY = ['', 'nan', '-inf', '1e400', '9'*5000, '[0.9,', '{[]: 1}', '()'*500 + ')', '['*300, 'None',
         '"', '\ud800', '~', '~nobody', '/', '..', '..x:y', 'json.x.y:z', ':', 'json:dumps',
         'jsn:dumps', 'rnus/world', 'x'*300, 'x/'*3000, '=', 'a=b', 'a#[', '-1', '--seed', '%s',
         'http://a:b', '1.5', '[1, 2]', "['a', 'b']", "[None]", '1_0', '\u0661']
texts = st.sampled_from(NASTY) | st.text(max_size=20)


@pytest.fixture(scope='module')
def classes(): return [tiny.config_class(n) for n in NOTEBOOKS]


@pytest.mark.slow
@pytest.mark.parametrize('on_the_command_line', [False, True])
def test_any_text_works_or_is_refused_by_name(classes, capsys, monkeypatch, on_the_command_line):
    monkeypatch.setattr('alpaca_farm.run.settings.field_comments',
                        functools.cache(field_comments))
    sys.stderr.reconfigure(errors='backslashreplace')   # as it is outside of tests
    @settings(max_examples=400 if on_the_command_line else 1000, **QUICK)
    @given(st.data(), texts)
    def holds(data, text):
        cls = data.draw(st.sampled_from(classes))
        name = data.draw(st.sampled_from(sorted(cls.__dataclass_fields__)))
        try:
            if on_the_command_line:
                from_args(cls, [f'--{name}', text])
            else:
                cls(**{name: data.draw(st.sampled_from([text, [text]]))})
        except (ValueError, TypeError, FileNotFoundError) as e:
            assert name in str(e), (cls, text)
        except SystemExit as e:
            named = name, text.lstrip('-') or name   # a list ends where an option begins
            said = capsys.readouterr().err
            assert e.code == 2 and any(n in said for n in named), (cls, name, text)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        holds()


JUDGE = 'alpaca_farm.world:pool'
SIMPO = 'alpaca_farm.dpo:simpo_loss'   # as a function of one's own, which names no settings


# losses of margins, and advantages of groups, that are none
def of_one_pair(h, beta): return (h - beta).mean()
def infinite(h, beta): return torch.log(h)
def constant(h, beta): return torch.ones_like(h)
LACKING = Loss('reads more than there is', lambda h, beta, gap: h - gap, ('gap',))
def by_spread(group): return group/group.std(1, keepdim=True)
def of_the_best(group): return group.max(1).values


BAD_ALONE = dict(   # by notebook: values that are bad whatever the other settings
    dpo=dict(beta=0., temperature=0., label_smoothing=.6, save_every=-1, preferences='',
             seed=10**30, device='gpu'),
    reward_model=dict(flip_rate=.5, margin=-1., held_out=0, likelihood=-1., out='runs/a:b'),
    quark=dict(num_quantiles=1, temperature=0., kl_coef=math.nan),
    sft=dict(adam_eps=0.), real=dict(temperature=-1.),
    ppo=dict(group_size=1, reward_model=[], ensemble='median', annotators='open_pol', adam_eps=0.),
    rrhf=dict(k=1, decoding='diverse', rrhf_weight=-1, candidates='no/such/file.json'),
    rlcd=dict(method='rlhf', temperature=0, samples=__file__, task='wrold'),
    binary_feedback=dict(method='thumbs', held_out=0),
    annotators=dict(base_url='http://localhost:port/v1'),
    eval=dict(base_url='localhost:8000/v1'),
    farm=dict(size='huge', seeds=0, crowd='alpaca_farm.world:nobody', board_judge='no/such.json',
              runs='my:runs'),
    bench=dict(worlds=1))
ALONE = [(notebook, *row) for notebook, rows in BAD_ALONE.items() for row in rows.items()]


@pytest.mark.parametrize('notebook, name, value', ALONE)
def test_a_bad_value_is_refused_by_the_name_of_its_setting(notebook, name, value):
    with pytest.raises((ValueError, FileNotFoundError), match=f'^{name}'):
        tiny.config(notebook, **{name: value})


REFUSED = dict(   # by notebook: settings that do not fit, and the name that the error contains
    dpo=[
        (dict(loss_type='robust'), 'label_smoothing'),
        (dict(loss_type='simpo', target_margin=-1.), 'target'),
        (dict(loss_type='simpo', undesirable_weight=2.), 'kto'),
        (dict(loss_function=SIMPO, target_margin=2.), SIMPO),
        (dict(loss_function=SIMPO, loss_type='kto'), SIMPO),
        (dict(loss_type='kto', batch_size=1), 'batch_size'),
        (dict(eval_every=3, held_out=0), 'held_out'),
        (dict(load_best_model_at_end=True), 'eval_every'),
        (dict(eval_every=3, early_stopping_patience=2), 'load_best_model_at_end'),
        (dict(out=202410), '-r out')],
    reward_model=[(dict(margin=1., margin_field='gap'), 'margin_field')],
    sft=[(dict(lora_targets='q_proj'), 'lora_rank'), (dict(lora_alpha=8.), 'lora_rank')],
    best_of_n=[(dict(system='Be brief.'), 'column `system`')],
    quark=[(dict(num_quantiles=9, rollouts=8), 'cannot be cut')],
    ppo=[
        (dict(reward_model=['alpaca_farm.world:utility', '']), 'reward_model = .*none empty'),
        (dict(advantage='rloo', group_size=5), 'multiple'),
        (dict(annotators=JUDGE, val_split=''), 'val_split')],
    rrhf=[
        (dict(k=4, n=7), 'n = 7'),
        (dict(candidates='', n=1), 'needs two'),
        (dict(refresh_every=2), 'Set n'),
        (dict(n=3, groups=4), 'groups'),
        (dict(n=2, temperature=0), 'temperature'),
        (dict(kl_coef=.1), 'refresh_every'),
        (dict(reward_model='', n=2), 'name')],
    rlcd=[
        (dict(served='m'), 'model'),
        (dict(policy=''), 'model'),
        (dict(both_orders=True), 'no judge'),
        (dict(method='rlcd_rescore'), 'samples'),
        (dict(template='chat'), 'behind a role')],
    annotators=[
        (dict(label_flip=.6, ask_flipped=False), 'label_flip'),
        (dict(annotators='alpaca_farm', weights=['nobody=1']), 'weights'),
        (dict(annotators='alpaca_farm', weights=['gpt4_1=-1']), 'weights')],
    agreement=[(dict(judges=['chatgpt'], models=['gpt-4=x']), 'models: gpt-4')],
    bench=[
        (dict(method='ipo', settings=dict(beta=-1)), 'beta'),
        (dict(method='runs'), '{world}')])
for kind in ('ipo', 'hinge', 'simpo', 'kto'):
    REFUSED['dpo'].append((dict(loss_type=kind, label_smoothing=.1), kind))
for name in ('of_one_pair', 'infinite', 'constant', 'LACKING', 'written', 'TrainConfig'):
    REFUSED['dpo'].append((dict(loss_function=f'{__name__}:{name}'), f'{__name__}:{name}'))
for name in ('by_spread', 'of_the_best'):
    REFUSED['ppo'].append((dict(advantage_function=f'{__name__}:{name}'), f'{__name__}:{name}'))
REFUSED['ppo'].append((dict(advantage='grpo', advantage_function=f'{__name__}:by_spread'), 'no effect'))
for name in ('of_one_pair', 'infinite', 'by_spread', 'nothing'):
    REFUSED['bench'].append((dict(method=f'{__name__}:{name}'), f'{__name__}:{name}'))
ROWS = [(notebook, *row) for notebook, rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize('notebook, given, name', ROWS, ids=str)
def test_settings_that_do_not_fit_each_other_are_refused(notebook, given, name):
    with pytest.raises(ValueError, match=name):
        tiny.config(notebook, **given)


def written(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.slow
def test_a_file_of_settings_counts_before_the_defaults_and_behind_the_options(tmp_path):
    a = written(tmp_path/'a.yaml', 'learning_rate: 1e-4\nbetas: [0.8, 0.9]\nseed: 3\nout: runs/a\n')
    b = written(tmp_path/'b.yaml', 'seed: 5\n')
    cfg = from_args(TrainConfig, ['-f', a, '--out', 'runs/b', '-f', b])
    assert cfg.learning_rate == 1e-4
    assert cfg.betas == [.8, .9]
    assert cfg.seed == 5
    assert cfg.out == 'runs/b'
    assert cfg.warmup == TrainConfig.warmup


@pytest.mark.slow
@pytest.mark.parametrize('text, name', [
    ('warmpu: 1', 'warmup'), ('warmup: 2', 'warmup'), ('a: [', 'YAML'),
    ('tracker: {key}', 'tracker')])
def test_a_file_with_a_wrong_setting_is_refused(tmp_path, capsys, text, name):
    "And a folder, which is no file."
    file = written(tmp_path/'c.yaml', text.replace('{key}', KEYS[0]))
    for path, named in ((file, name), (str(tmp_path), f'{tmp_path}: ')):
        with pytest.raises(SystemExit):
            from_args(TrainConfig, ['-f', path])
        said = capsys.readouterr().err
        assert named in said
        assert said.count('\n') == 1
        assert KEYS[0] not in said


def made_up(form, seed=0):
    """A key in the form of a provider: {20} stands for as many characters of URL-safe base64,
    {20n} for letters and digits, {20h} for hexadecimal, {20u} for capitals and digits, {9d}."""
    rng = random.Random(f'{form}{seed}')
    letters = dict(h='0123456789abcdef', d=string.digits, u=string.ascii_uppercase + string.digits,
                   n=string.ascii_letters + string.digits, a=string.ascii_letters)
    def fill(m): return ''.join(rng.choices(letters.get(m[2], letters['n'] + '-_'), k=int(m[1])))
    return re.sub(r'{(\d+)(\w?)}', fill, form)


FORMS = """
    sk-{48n} sk-proj-{124} sk-svcacct-{120} sk-admin-{100} sk-ant-api03-{93}AA sk-{32h}
    sk-or-v1-{64h} sk-lf-{8h}-{4h}-{4h}-{4h}-{12h} csk-{48n} pcsk_{6n}_{63n} sk_{48h} sk_live_{24n}
    rk_live_{24n} whsec_{32n} hf_{34a} api_org_{34a} gsk_{52n} xai-{80n} nvapi-{64} pplx-{48n}
    fw_{24n} r8_{37n} tgp_v1_{43} jina_{32h}{28n} tvly-{32n} tvly-dev-{32n} esecret_{26n}
    secret_{43n} ntn_{46n} rpa_{40u} as-{22n} lsv2_pt_{32h}_{10h} lin_api_{40n} wandb_v1_{77n}
    AIzaSy{33} GOCSPX-{28} ya29.a0{120} AKIA{16u} ASIA{16u} LTAI{20n} SG.{22}.{43}
    ghp_{36n} gho_{36n} ghs_{36n} github_pat_{22n}_{59n} glpat-{20} gldt-{20} npm_{36n}
    pypi-AgEIcHlwaS5vcmc{100} dckr_pat_{27} dop_v1_{64h} dapi{32h} dapi{32h}-2 key-{32h} shpat_{32h}
    SK{32h} sbp_{40h} hvs.{90} xoxb-{12d}-{12d}-{24n} xapp-1-{11u}-{13d}-{64h} NRAK-{27u}
    sq0atp-{22} PMAK-{24h}-{34h} {10d}:AA{33} {40h} {64h} {32h} {84n} {32h}.{16n}
    eyJ{33}.eyJ{60}.{43} eyJhcGlfYWRkcmVzcyI6{60n}== ATATT3xFfGF0{160}={8h}
    https://{20n}@host/v1 https://me:{9n}@host:8000/v1 https://hooks.slack.com/services/T{8u}/{24n}
    https://:{9n}@host https://host/v1?a=1&token={9n} https://host/v1?api-key={9n}
    https://host/v1?api_key={9n} https://host/v1?sig={43n} AccountKey=a;SharedAccessKey={43n}=
    gpt-4.1=sk-ant-{40n} OPENAI_API_KEY=sk-{40n} pa-{43} pa-{10n}-{9n}_{10n}-{11n}
    {8h}-{4h}-{4h}-{4h}-{12h} SAMBANOVA_API_KEY={8h}-{4h}-{4h}-{4h}-{12h}""".split()
FORMS += ['Bearer {30n}', 'Authorization: Bearer {32h}', 'Basic {22n}==',
          '-----BEGIN PRIVATE KEY-----{64n}']
KEYS = [made_up(form) for form in FORMS]
# without a prefix, two digits among them
KEYS += ['aB3dEf6hIj9lMn2pQrStUvWx0y1z2A3B', 'aB3dEf6hIj/lMn2pQr+tUvWx0y1z2A3BcD4eFgHi']


@pytest.mark.parametrize('key', KEYS)
def test_keys_of_every_vendor_are_refused_and_not_repeated(key, capsys):
    from alpaca_farm.ask.client import ApiConfig
    places = dict(tracker=key, out=key, seed=key, dtype=key, models=[f'gpt-4.1={key}'],
                  base_url=f'http://localhost/v1?api_key={key}')
    for name, value in places.items():
        with pytest.raises(ValueError, match=f'^{name} looks like an API key') as e:
            ApiConfig(**{name: value})
        assert key not in str(e.value)
    with pytest.raises(SystemExit):
        from_args(ApiConfig, ['--api_key', key])
    said = capsys.readouterr()
    assert 'looks like an API key' in said.err
    assert key not in said.err + said.out


UUID = made_up('{8h}-{4h}-{4h}-{4h}-{12h}')
ORDINARY = [
    f'runs/{UUID}', f'/tmp/{UUID}/out', f'ppo-{UUID}', f'ann/policy@{UUID}',
    'pa-ppo-with-a-long-name-of-many-words-and-kl02', 'pa-PPO-Lr1e4-Batch32-Seed0-Warmup10-KLCoef02',
    'runs/ppo~1', '/data/sk-learn-2024/models', 'alpaca_farm.world:pool', 'xai-org/grok-1',
    'hf-internal-testing/tiny-random-Qwen2MoeForSequenceClassification', 'gpt2@' + '0a1b'*10,
    'https://user.example.org:8443/a@b', 'gpt-4.1=meta-llama/Llama-3.1-8B-Instruct',
    'https://host/v1?api-version=2024-02-01&max_tokens=3', 'a_judge.json#AKIA',
    '~/.cache/huggingface/hub/models--a--b/snapshots/' + '9f'*20, 'ann/policy@' + '9f'*20,
    '/models/blobs/sha256-' + '9f'*32, 'runs/lr1e4bs32ep3seed0warm10', '20261126'*5,
    'runs/MyDPORunWithBeta01AndLr5e7', 'VeryLongNameOfAModelInCamelCaseWithoutDigits',
    'Qwen/Qwen3-235B-A22B-Instruct-2507-FP8', 'nvidia/Llama-3.1-Nemotron-70B-Instruct-HF',
    'bartowski/Meta-Llama-3-8B-Instruct-Q4_K_M.gguf', 'secret_santa_conversations2024',
    'ft:gpt-4o-mini-2024-07-18:my-org:custom-suffix:AbC12dEf', 'run-20261126T120000Z',
    'us.anthropic.claude-3-7-sonnet-20250219-v1:0', 'instruction=question,output=answer',
    '{"enable_thinking": true, "date_string": "26 Nov 2026"}', 'name@example.org',
    'a basic instruction-following model', 'the bearer of bad news', 'max_completion_tokens=4096',
    'Write a poem about 20 keys and 3 passwords.', 'tatsu-lab/alpaca_farm:alpaca_noisy',
    'data/train-00000-of-00001.parquet', 'q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj']


def test_ordinary_values_are_no_keys():
    no_secrets(dict(a=ORDINARY, b=dict(c=.1, e=[1, [2]])))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    "The working folder is in a project of somebody else, with a settings.ini of its own."
    (tmp_path/'settings.ini').write_text('[DEFAULT]\nlib_name = mine\n')
    for name in ('runs/world', 'data'):
        (tmp_path/name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_relative_paths_are_the_users_outside_the_checkout(elsewhere, monkeypatch):
    assert paths.at_root('runs/ppo') == elsewhere/'runs'/'ppo'
    assert paths.notebooks_folder() == tiny.ROOT/'nbs'
    monkeypatch.chdir(elsewhere/'data')
    assert paths.at_root('x') == elsewhere/'data'/'x'
    monkeypatch.chdir(tiny.ROOT/'nbs'/'run')
    assert paths.at_root('runs/ppo') == tiny.ROOT/'runs'/'ppo'


@pytest.mark.parametrize('path', ['data/12:30.json', 'C:\\mine\\a.json', 'https://huggingface.co/a/b'])
def test_a_path_with_a_colon_is_named(elsewhere, path):
    "Such as a time, a Windows disk or a URL; a run that could not be read again is not begun."
    (elsewhere/'data'/'12:30.json').write_text('[]')
    for name in ('data', 'out'):
        with pytest.raises(ValueError, match=f'^{name} = .* a (folder with a )?colon'):
            tiny.config('sft', **{name: path})


def test_a_mistyped_path_is_named(elsewhere):
    "When it is read, where it could be a name on the hub."
    from alpaca_farm.data.records import load_records
    from alpaca_farm.model.loading import model_config
    with pytest.raises(ValueError, match='rnus/world'):
        load_records('rnus/world', 'eval')
    with pytest.raises((FileNotFoundError, ValueError), match='rnus/world'):
        model_config('rnus/world')


def test_named_inputs_are_refused_before_a_default_is_built(base, elsewhere, monkeypatch):
    "A fresh checkout: the world alone would take minutes."
    from alpaca_farm import dpo, ppo
    from alpaca_farm.run import runs as build
    built = []
    data = str(base/'world')
    monkeypatch.setattr(build, 'build', lambda notebook, out, **_: built.append(out))
    half = dict(notebook='sft', fingerprint='', inputs=dict(data={data: ''}), code='')
    tiny.write(elsewhere/'half'/'config.json', half)
    for path, why in (('nobody/here', '^preferences: the default is of the embedded world'),
                      ('half', 'not finished')):
        cfg = dpo.DPOConfig(policy=path, data=data, out='runs/a')
        with pytest.raises(ValueError, match=why):
            dpo.train(cfg)
    assert built == []
    assert not (elsewhere/'runs'/'a').exists()
    build.ensure_inputs(ppo.PPOConfig(policy=str(base/'sft')))
    assert built == ['runs/reward_model', 'runs/world']


@pytest.mark.parametrize('by_command', [False, True])
def test_what_is_named_is_taken_though_it_is_the_default(base, elsewhere, monkeypatch, by_command):
    "Beside a model from elsewhere, whose run would not take the embedded world by itself."
    from alpaca_farm.best_of_n import BestOfNConfig
    from alpaca_farm.run import runs as build
    from alpaca_farm.dpo import DPOConfig
    def ensure(cls, **given):
        words = [word for name, value in given.items() for word in (f'--{name}', value)]
        build.ensure_inputs(from_args(cls, words) if by_command else cls(**given))
    shutil.copytree(base/'sft'/'model', elsewhere/'mine')
    monkeypatch.setattr(build, 'build', lambda *_, **__: None)
    given = dict(policy='mine', preferences=str(base/'annotators'))
    why = 'the default is of the embedded world'
    with pytest.raises(ValueError, match=f'^data: {why}.*the default itself .-p data runs'):
        ensure(DPOConfig, **given)
    ensure(DPOConfig, **given, data='runs/world')
    given = dict(policy='mine', data=str(base/'world'))
    with pytest.raises(ValueError, match=f'^reward_model: {why}'):
        ensure(BestOfNConfig, **given)
    ensure(BestOfNConfig, **given, reward_model='')


def test_an_apple_gpu_is_taken_where_there_is_one(monkeypatch):
    from alpaca_farm.run.settings import Config
    from alpaca_farm.model.loading import device_of
    monkeypatch.setattr('torch.backends.mps.is_available', lambda: True)
    assert device_of(Config(device='mps')).type == 'mps'
    monkeypatch.setattr('torch.backends.mps.is_available', lambda: False)
    with pytest.raises(ValueError, match='device = mps: '):
        Config(device='mps')


def test_what_a_users_module_needs_is_named(elsewhere):
    from alpaca_farm.run.settings import resolve
    (elsewhere/'my_judge.py').write_text('import not_installed_anywhere')
    with pytest.raises(ModuleNotFoundError, match='not_installed_anywhere'):
        resolve('my_judge:judge')


def test_a_rebuilt_run_is_not_tracked_again_and_git_need_not_be_there(monkeypatch):
    from alpaca_farm import sft
    from alpaca_farm.run import runs
    def missing(*_, **__): raise FileNotFoundError(2, 'No such file or directory', 'git')
    monkeypatch.setattr(runs.subprocess, 'run', missing)
    cfg = sft.SFTConfig(out='runs/a', tracker='tensorboard', epochs=2)
    described = runs.describe_run(cfg, sft.train)
    assert described['given'] == dict(epochs=2)
    assert described['commit'] == ''


def test_a_model_of_the_hub_in_one_of_its_revisions(base, elsewhere, monkeypatch):
    import huggingface_hub
    from alpaca_farm.run.runs import content_hash
    from alpaca_farm.model.logprobs import load_policy
    from alpaca_farm.sft import SFTConfig
    cache = elsewhere/'cache'/'models--ann--policy'
    commit = '9f'*20
    shutil.copytree(base/'sft'/'model', cache/'snapshots'/commit)
    (cache/'refs').mkdir()
    (cache/'refs'/'v1').write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(elsewhere/'cache'))
    for spec in ('ann/policy@v1', f'ann/policy@{commit}'):
        cfg = SFTConfig(policy=spec)
        policy = load_policy(cfg.policy, cfg)
        tokenizer = policy.tokenizer
        assert len(tokenizer) <= policy.model.get_input_embeddings().weight.shape[0]
        assert paths.hub_snapshot(spec) == str(cache/'snapshots'/commit)
    assert content_hash('ann/policy@v1') != content_hash('ann/policy@v2')
    with pytest.raises(FileNotFoundError, match="revision 'v2'"):
        load_policy('ann/policy@v2', cfg)


def test_help_says_shapes_meanings_and_defaults():
    "Of functions, methods and settings; by the docstrings and signatures that `?` shows, too."
    from alpaca_farm.bench import win_rates
    from alpaca_farm.dpo import DPOConfig
    from alpaca_farm.model.functional import gae
    from alpaca_farm.run.progress import Progress
    from alpaca_farm.worlds.embedded.crowd import with_bias
    from alpaca_farm.worlds.embedded.grammar import parse
    said = ' '.join(pydoc.plain(pydoc.render_doc(gae)).split())
    assert 'rewards : (B, T) rewards of the tokens' in said
    assert 'Returns: (B, T) each, 0 outside of the mask' in said
    assert 'beta : KL weight' in inspect.getdoc(DPOConfig)
    shown = inspect.signature(DPOConfig).parameters
    assert [name for name, p in shown.items() if p.default is None] == []
    assert (shown['beta'].default, shown['beta'].annotation) == (DPOConfig().beta, float)
    assert 'step : the bar' in inspect.getdoc(Progress.show)
    told = [inspect.getdoc(thing).split('\n\n')[1:] for thing in (with_bias, win_rates, parse)]
    assert 'likings : added' in told[0][0] and 'Returns' not in told[0][0]   # `**likings`
    assert told[1:] == [['Returns: a DataFrame'], []]   # a head of one line; a decorator's comment


def test_a_clone_that_is_not_installed_makes_a_run_without_alpaca_eval(base, tmp_path, monkeypatch):
    "A reward model of a file of labels; a judge that does not exist says what the package has."
    import importlib
    from alpaca_farm import __version__
    from alpaca_farm.annotators import AnnotatorsConfig
    def distribution(name, known=importlib.metadata.distribution):
        if name.startswith('alpaca'):
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)
    def find_spec(name, *rest, known=importlib.util.find_spec):
        return None if name == 'alpaca_eval' else known(name, *rest)
    monkeypatch.setattr(importlib.metadata, 'distribution', distribution)
    monkeypatch.setattr(importlib.util, 'find_spec', find_spec)
    labels = shutil.copy(base/'annotators'/'preferences.json', tmp_path/'mine.json')
    made = tiny.run('reward_model', base, tmp_path/'rm', preferences=str(labels))
    assert made.config['versions']['alpaca_farm'] == __version__
    for name in ('weighted_alpaca_eval_gpt4_turbo', 'alpaca_farm', 'structure'):
        with pytest.raises(ValueError, match='pip install alpaca-eval') as refused:
            AnnotatorsConfig(annotators=name)
        assert '\n' not in str(refused.value)


@pytest.mark.parametrize('slash', ['', '/', '//'])
def test_a_slash_at_the_end_of_a_folder_makes_no_difference(base, slash):
    "Tab completion writes it."
    cfg = FarmConfig(world=f'{base}/world{slash}', out=f'{base}/board{slash}')
    assert (cfg.world, cfg.runs, cfg.out) == (f'{base}/world', f'{base}/world_runs', f'{base}/board')
    assert tiny.config('sft', **tiny.settings('sft', base, data=f'{base}/world{slash}')).data == f'{base}/world'


def test_folders_of_a_farm_that_are_named_stay():
    "Though they are the defaults."
    cfg = FarmConfig(world='runs/world', runs='my')
    assert (cfg.world, cfg.runs, cfg.out) == ('runs/world', 'my', 'my/farm')
    assert FarmConfig(world='my/world', runs='runs').runs == 'runs'
    cells = ['out = "runs/farm"\nworld = "runs/world"\nruns = "runs"', '# Parameters\nruns = "my"',
             'FarmConfig.collect(globals())']
    cfg = FarmConfig.collect(dict(In=cells, out='runs/farm', world='runs/world', runs='my'))
    assert (cfg.world, cfg.out) == ('my/world', 'my/farm')


def test_a_decision_keeps_the_runs_that_are_named_and_makes_the_world():
    own = dict(model='org/small', prompts='org/prompts', judge='numpy:sign')
    assert DecideConfig(**own).runs == 'runs/decide_runs'
    assert DecideConfig(**own, runs='my').runs == 'my'
    with pytest.raises(ValueError, match='world = my'):
        DecideConfig(**own, world='my')


def test_true_is_no_number():
    with pytest.raises(ValueError, match='held_out = True'):
        tiny.config('dpo', held_out=True)


@pytest.mark.parametrize('given', [-1, '-1', -1.])
def test_a_default_can_be_written(given):
    for name in ('dpo', 'reward_model', 'binary_feedback'):
        assert tiny.config(name, held_out=given).held_out == -1
    with pytest.raises(ValueError, match='held_out'):
        tiny.config('reward_model', held_out='0')


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU here')
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match='device = cuda:1: torch finds no NVIDIA GPU'):
        tiny.config('sft', device='cuda:1')


def test_a_served_model_has_the_defaults_of_a_large_one():
    for name in ('rlcd', 'best_of_n'):
        cfg = tiny.config(name, policy='', served='gpt-4.1', **(dict(reward_model='') if name == 'best_of_n' else {}))
        assert cfg.max_new_tokens == 256


def test_the_methods_of_a_farm_are_named_in_their_order():
    with pytest.raises(TypeError, match='It has: best_of_n, .*dpo'):
        FarmConfig(methods=['nope'])


def test_a_farm_can_leave_the_greedy_answers_out():
    "As it can every run."
    world = World('runs/world', sizes=dict(sft_greedy=None))
    assert _all_sizes(FarmConfig(), world)['sft_greedy'] is None
    assert _all_sizes(FarmConfig(), World('runs/world'))['sft_greedy'] == dict(n=1)
