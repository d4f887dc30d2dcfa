"""What cannot work is refused before any work: in one line, which names the setting or the file."""
import json
import re
import shutil

import pytest
import yaml

import tiny
from alpaca_farm.run.runs import read_log
from alpaca_farm.train.trainer import Trainer
from alpaca_farm.world import LENGTH

POOL = 'alpaca_farm.world:pool'
HERE = __name__
ONLINE = 'ppo', 'quark', 'rrhf', 'best_of_n'
TRAINED = 'sft', 'dpo', 'binary_feedback', 'rrhf', 'ppo', 'quark'


# rewards and judges that fail in a way of their own
def broken(records): return [r['price'] for r in records]
def not_a_number(records): return [float('nan')]*len(records)
def indifferent(records): return [3.]*len(records)
def length(records): return [float(len(r['output'])) for r in records]
def silent(pairs): return [float('nan')]*len(pairs)
def unlicensed(pairs): raise OSError('no licence')
def second(pairs): return [2.]*len(pairs)
def second_low(pairs): return [2.]*len(pairs)


REAL = [dict(instruction=f'What is the capital of country {i}?', output=f'Its capital is city {i}.')
        for i in range(20)]
THUMBS = [dict(instruction=f'q{i}', output='a', label=i % 2) for i in range(12)]
ANSWERS = [dict(instruction=f'Say {i}.', output='a') for i in range(12)]
LONG = [dict(r, output=r['output']*20) for r in REAL]
TASK = yaml.safe_load((tiny.ROOT/'tests'/'data'/'task.yaml').read_text())


def thumbs(row, label):
    rows = [dict(r) for r in THUMBS]
    rows[row]['label'] = label
    return rows


def useless(labels):
    "Rated answers, the last four marked as held out."
    rated = zip(THUMBS, labels)
    return [dict(r, label=label, held_out=i > 7) for i, (r, label) in enumerate(rated)]


FILES = dict(   # their names stand in braces below
    real=REAL, long=LONG, answers=ANSWERS, thumbs=THUMBS,
    twice=[*ANSWERS, dict(ANSWERS[0], output='z')],
    label_7=[dict(instruction='a', output_1='b', output_2='c', preference=7)],
    no_output=[dict(instruction='a')],
    long_prompt=[dict(instruction='word '*400)],
    one_prompt=[dict(instruction='One?')],
    others=[dict(r, output='b') for r in ANSWERS],
    not_drawn=[dict(instruction='Say 1.', output_1='a', output_2='c', preference=1, drawn='duel')],
    fair=thumbs(7, 'fair'),
    odd=thumbs(5, 2),
    text=[dict(query='x', responses='y')],
    mixed=[dict(query='x', responses=['y', 3])],
    one_ended=[dict(instruction='x', output=['y', 'z'], ended=True)],
    all_bad=useless([0]*12),
    all_ties=useless([.5]*12),
    misspelt=dict(dop=dict(beta=1)),
    no_setting=dict(dpo=3),
    dpoo=dict(dpoo={}))
TASKS = dict(   # what is wrong in the file of a task
    name=dict(name=''),
    stop=dict(stop='x'),
    contrast=dict(contrast=[dict(positive='a', negative='b')]),
    minwords=dict(filters=dict(minwords=1)),
    compare=dict(compare=dict(a=1)),
    reject=dict(filters=dict(reject=['('])))
WORLDS = dict(   # what is wrong in the file of a world
    two_models=dict(policy='no/such/model/here'),
    lost_pool=dict(pool='./pools.json'),
    lost_judge=dict(board_judge='nobody:judge'),
    lost_labels=dict(preferences='../labels.json'),
    lost_utility=dict(utility='nobody:utility'),
    flips=dict(label_flip=2),
    unknown=dict(pol='a'))


@pytest.fixture(scope='module')
def places(base, tmp_path_factory):
    "Paths by name: the runs of the tiny world, and files and folders with something wrong in them."
    folder = tmp_path_factory.mktemp('refused')
    found = {p.name: str(p) for p in base.iterdir() if p.is_dir()}
    for name, rows in FILES.items():
        found[name] = tiny.write(folder/f'{name}.json', rows)
    for name, more in TASKS.items():
        found[f'task_{name}'] = tiny.write(folder/f'task_{name}.yaml', TASK | more)
    for split in ('eval', 'val'):
        found[f'no_{split}'] = str(folder/f'no_{split}')
        left_out = shutil.ignore_patterns(f'{split}.json', 'model')
        shutil.copytree(base/'world', found[f'no_{split}'], ignore=left_out)
    for name, more in WORLDS.items():
        found[name] = str(folder/name)
        shutil.copytree(base/'world', folder/name, ignore=shutil.ignore_patterns('model'))
        world = json.loads((base/'world'/'world.json').read_text())
        tiny.write(folder/name/'world.json', world | more)
    found['no_template'] = str(folder/'no_template')
    shutil.copytree(base/'sft'/'model', found['no_template'],
                    ignore=shutil.ignore_patterns('chat_template*'))
    found['long_eval'] = str(folder/'long_eval')
    shutil.copytree(base/'world', folder/'long_eval', ignore=shutil.ignore_patterns('model'))
    tiny.write(folder/'long_eval'/'eval.json', FILES['long_prompt'])
    found['short_sighted'] = str(folder/'short_sighted')   # reads short answers alone
    shutil.copytree(base/'reward_model'/'model', folder/'short_sighted')
    config = json.loads((folder/'short_sighted'/'config.json').read_text())
    tiny.write(folder/'short_sighted'/'config.json', config | dict(max_position_embeddings=38))
    for name in ('real', 'long'):
        found[f'{name}_data'] = tiny.splits(folder/f'{name}_data', FILES[name])
    return found


def placed(value, places):
    "A setting, whose names in braces have become paths."
    if isinstance(value, list):
        return [placed(v, places) for v in value]
    return value.format(**places) if isinstance(value, str) else value


# what the settings of other notebooks stand on, beside those of `tiny`
OWN = dict(model='{sft}', prompts='{world}', judge=POOL, preferences='{annotators}', n=2,
           max_new_tokens=12, max_prompt=110)
SERVED = dict(data='{answers}', policy='', served='judge', reward_model='', n=1)
JUDGED = dict(outputs=['{answers}'], reference='{answers}', annotators=[f'{HERE}:second'])
USUAL = dict(bring_your_own=OWN, eval=JUDGED, farm={}, real={})
STORED = dict(samples='{samples}', split='preference', n=1, skip=2, max_instances=5)

REFUSED = [   # a notebook, some of its settings, and the name that the error must contain
    # splits and lengths
    ('sft', dict(data='{no_val}'), 'val_split'),
    ('ppo', dict(data='{no_val}', annotators=POOL), 'val_split'),
    ('binary_feedback', dict(data='{no_val}', annotators=POOL), 'val_split'),
    ('expert_iteration', dict(data='{no_eval}'), 'eval_split'),
    ('expert_iteration', dict(data='{long_eval}'), 'Set max_prompt'),
    ('sft', dict(data='{real}'), 'real.json is one file'),
    ('best_of_n', dict(policy='{annotators}'), 'there is no model'),
    ('reward_model', dict(max_length=LENGTH + 1), 'max_length'),
    ('reward_model', dict(held_out=500), 'held_out = 500'),
    ('dpo', dict(held_out=1000), 'held_out = 1000'),
    ('dpo', dict(max_length=30), 'Set max_length'),
    ('ppo', dict(max_prompt=5), 'Set max_prompt'),
    ('sft', dict(data='{long_data}', max_prompt=70), 'Set max_length'),
    ('sft', dict(eval_every=2, val_split=''), 'val_split'),
    ('sft', dict(data='nowhere:alpaca'), 'nowhere'),
    ('sft', dict(policy='{no_template}', template='chat'), 'template = chat'),
    ('ppo', dict(policy='{no_template}', template='chat'), 'template = chat'),
    ('bring_your_own', dict(model='{no_template}', template='chat'), 'template = chat'),
    ('ppo', dict(kl_coef=0, target_kl=6), 'target_kl'),
    ('ppo', dict(top_p=.9), 'top_p'),
    # rewards and judges
    ('ppo', dict(reward_model=f'{HERE}:not_a_number'), f'{HERE}:not_a_number'),
    ('ppo', dict(annotators=f'{HERE}:silent'), f'{HERE}:silent'),
    ('ppo', dict(reward_model='{sft}'), 'not a reward model'),
    ('ppo', dict(reward_model=f'{HERE}:length', annotators=POOL, data='{real_data}'), POOL),
    ('quark', dict(reward_model=f'{HERE}:length', annotators=POOL, data='{real_data}'), POOL),
    ('binary_feedback', dict(annotators=POOL, data='{real_data}'), POOL),
    ('reward_model', dict(margin_field='gap'), 'gap'),
    # labels
    ('dpo', dict(preferences='{thumbs}'), 'output_1'),
    ('dpo', dict(preferences='{odd}', loss_type='kto'), 'row 5'),
    ('binary_feedback', dict(preferences='{fair}', held_out=4), 'fair.json, row 7'),
    ('binary_feedback', dict(preferences='{all_bad}', held_out=4), 'held_out = 4'),
    ('binary_feedback', dict(preferences='{all_ties}', held_out=4), 'held_out = 4'),
    # candidates
    ('rrhf', dict(reward_model=''), 'score is None'),
    ('rrhf', dict(perplexity_model='{reward_model}'), 'perplexity_model = '),
    ('rrhf', dict(candidates='{text}'), 'text.json'),
    ('rrhf', dict(candidates='{mixed}'), 'mixed.json'),
    ('rrhf', dict(candidates='{one_ended}'), 'one_ended.json'),
    ('rrhf', dict(reward_model=f'{HERE}:indifferent', missing_eos=''), 'nothing to rank'),
    ('expert_iteration', dict(rounds=61), '60 requests'),
    ('best_of_n', STORED | dict(n=3), 'n = 3'),
    ('best_of_n', dict(reference='{sft}'), 'reference'),   # beside a reward model
    ('eval', dict(policies=['{world}', '{world}/model']), 'another row world'),
    ('farm', dict(policies=['{sft}']), 'another row sft'),
    ('best_of_n', STORED | dict(skip=60), 'skip'),
    ('best_of_n', STORED | dict(split='eval'), 'split'),
    ('best_of_n', STORED | dict(temperature=.25), 'temperature'),
    ('best_of_n', STORED | dict(policy='{world}'), 'policy'),
    ('best_of_n', SERVED, 'OPENAI_API_KEY'),
    ('best_of_n', SERVED | dict(served=''), 'served'),
    ('world', dict(dialogues=-1), 'dialogues'),
    # boards
    ('eval', dict(outputs=['no/such.json']), 'no/such.json'),
    ('eval', dict(outputs=[]), 'outputs'),
    ('eval', dict(outputs=['{twice}']), 'rows 0 and 12'),
    ('eval', dict(reference='no/such'), 'no/such'),
    ('eval', dict(max_instances=-1), 'max_instances'),
    ('eval', dict(weights=['gpt4']), 'weights'),
    ('eval', dict(annotators=['nobody:judge']), 'nobody'),
    ('eval', dict(annotators=['alpaca_eval_gtp4']), 'alpaca_eval_gpt4'),
    ('eval', dict(annotators=[f'{HERE}:second', f'x.{HERE}:second_low']), 'second_low'),
    # duels
    ('labelling', dict(methods=['{answers}']), 'methods'),
    ('labelling', dict(methods=['{answers}', '{others}'], budget=1), 'budget = 1'),
    ('labelling', dict(methods=['{answers}', '{others}'], draw=5), 'draw'),
    ('labelling', dict(methods=['{answers}', '{others}'], labels='{not_drawn}'), "'Say 1.'"),
    ('labelling', dict(labels='{not_drawn}'), 'methods'),
    # worlds
    ('bring_your_own', dict(preferences='{label_7}'), "'preference'"),
    ('bring_your_own', dict(prompts='{long_prompt}'), 'max_prompt'),
    ('bring_your_own', dict(prompts='{one_prompt}'), 'divided in three'),
    ('bring_your_own', dict(demonstrations='{no_output}'), "'output'"),
    ('bring_your_own', dict(recipe='{misspelt}'), 'dop'),
    ('bring_your_own', dict(judge=f'{HERE}:unlicensed'), 'no licence'),
    ('bring_your_own', dict(model='{reward_model}'), 'a reward model'),
    ('bring_your_own', dict(model='{no_eval}'), 'there is no model'),
    ('bring_your_own', dict(methods=['dop']), 'dop'),
    ('real', dict(sizes='{dpoo}'), 'Did you mean dpo'),
    ('real', dict(sizes='{no_setting}'), 'dpo: 3 names no setting'),
    ('real', dict(sizes='no.yaml'), 'no.yaml'),
    ('farm', dict(methods=['pppo']), 'Did you mean ppo'),
    ('farm', dict(world='{two_models}'), 'either a base or a policy'),
    ('farm', dict(world='{lost_pool}'), 'pool'),
    ('farm', dict(world='{lost_judge}'), 'nobody'),
    ('farm', dict(world='{lost_labels}'), 'preferences'),
    ('farm', dict(world='{lost_utility}'), 'nobody'),
    ('farm', dict(world='{flips}'), 'label_flip = 2'),
    ('farm', dict(world='{unknown}'), 'pol')]
for name in TRAINED:
    REFUSED.append((name, dict(data='{no_eval}'), 'eval_split'))
    REFUSED.append((name, dict(max_new_tokens=LENGTH), 'max_new_tokens'))
for name in ('sft', 'dpo', 'binary_feedback', 'rrhf'):
    REFUSED.append((name, dict(max_length=LENGTH + 1), 'max_length'))
for name in ONLINE:
    REFUSED.append((name, dict(reward_model=f'{HERE}:broken'), f'{HERE}:broken'))
for name in ('ppo', 'quark', 'best_of_n'):
    REFUSED.append((name, dict(reward_model='{short_sighted}'), 'reward_model = '))
for name in TASKS:
    REFUSED.append(('rlcd', dict(task=f'{{task_{name}}}'), f'task_{name}.yaml'))


def name_of(value):
    "A part of a test's name."
    if isinstance(value, dict):
        return ' '.join(f'{k}={v}' for k, v in value.items())[:60]
    return str(value)


@pytest.mark.slow
@pytest.mark.parametrize('notebook, settings, name', REFUSED, ids=name_of)
def test_it_is_refused_by_name_before_any_work(base, places, tmp_path, monkeypatch, notebook,
                                               settings, name):
    def update(*_, **__):
        raise AssertionError('a step was made')
    monkeypatch.setattr(Trainer, 'update', update)
    monkeypatch.delenv('OPENAI_API_KEY', raising=False)
    given = tiny.settings(notebook, base) | USUAL.get(notebook, {}) | settings
    given = {k: placed(v, places) for k, v in given.items()}
    if notebook != 'farm':
        given['out'] = str(tmp_path/'out')
    with pytest.raises((ValueError, TypeError, OSError), match=re.escape(name)):
        tiny.main(notebook)(tiny.config(notebook, **given))
    assert not (tmp_path/'out'/'summary.json').exists()
    assert read_log(tmp_path/'out') == []
