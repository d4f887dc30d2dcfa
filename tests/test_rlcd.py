"""Preference data without people: tasks are data; the same file however a run is interrupted, divided and joined."""
import json
import math
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

import tiny
from judge_server import judge_server
from alpaca_farm import rlcd, wombat, world
from alpaca_farm.core.ask.completions import label_tokens, LocalWriter, prompt_tokens, shown_label, Written
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.runs import read_log, read_summary
from alpaca_farm.rlcd import RLCDConfig
from alpaca_farm.rlcd import clean_response, contrast_prompt, judge_prompt, read_task, reject_reason, task_file

TASKS = sorted((tiny.ROOT/'nbs'/'recipes'/'tasks').glob('*.yaml'))
ANYTHING = str(tiny.ROOT/'tests'/'data'/'task.yaml')
FILES = ('items.json', 'preferences.json', 'preferences.csv')


# --- theory ----------------------------------------------------------------------------------------------------------------------

def test_toy_theory_in_closed_form():
    "Appendix N: 0.75 and 0.528 for RLAIF, 0.574 for RLCD; limits; and integrals by brute force."
    assert [round(x, 3) for x in (rlcd.rlaif_accuracy(), rlcd.rlaif_accuracy(within=.2), rlcd.rlcd_accuracy(within=.2))] == [.75, .528, .574]
    assert abs(rlcd.rlcd_accuracy(0.) - .5) < 1e-9 > abs(rlcd.rlcd_accuracy(0., within=.3) - .5) and rlcd.rlaif_accuracy(judge=1e-6) > .999
    phi = lambda x: .5*(1 + math.erf(x/2**.5))
    for g, j, r in ((1., 1., .2), (.5, 2., 1.5), (2., .7, 4.)):
        d = np.linspace(-r, r, 40_001)
        weight = np.exp(-d**2/(4*g*g))
        right = np.array([phi(abs(x)/(2**.5*j)) for x in d])
        assert abs((weight*right).sum()/weight.sum() - rlcd.rlaif_accuracy(g, j, r)) < 1e-4
        weight = np.exp(-(d - 1.3)**2/(4*g*g))
        assert abs(weight[d > 0].sum()/weight.sum() - rlcd.rlcd_accuracy(1.3, g, r)) < 1e-3


# --- tasks -----------------------------------------------------------------------------------------------------------------------

def test_shipped_tasks():
    tasks = [read_task(p) for p in TASKS]
    assert {t.name for t in tasks} == {'harmlessness', 'helpfulness', 'outlining', 'code_review', 'world'}
    assert [p for p in TASKS if task_file(read_task(p).name) != p] == []
    for t in tasks:
        assert all(p['positive'] != p['negative'] for p in t.contrast) and t.compare
        lengths = [abs(len(p['positive'].split()) - len(p['negative'].split())) for p in t.contrast]
        assert max(lengths) <= 5, f'{t.name}: the two phrases of a pair are alike but for the attribute'


BROKEN = [  # what is changed in a file, and what the error says beside the file's name
    (dict(promt='{instruction}'), "promt: Extra inputs are not permitted. Did you mean 'prompt'?"),
    (dict(contrast=[dict(positive='a', negative='b')]), 'contrast, 0, judge: '),
    (dict(contrast=[dict(positive='a', negative=2, judge='c')]), 'contrast, 0, negative: '),
    (dict(contrast=['kind']), 'contrast, 0: '), (dict(name=''), 'name: '),
    (dict(judge='{dialogue} {question} {first} ('), 'the placeholder {second} is missing'),
    (dict(filters=dict(min_words=5, max_words=3)), 'no answer has min_words = 5 and max_words = 3'),
    (dict(prompt='Do it.'), 'the placeholder {instruction} is missing'), (dict(stop='x'), 'stop: '),
    (dict(stop=['']), 'stop, 0: '), (dict(history='none '), 'history: '),
    (dict(filters=dict(minwords=1)), "filters, minwords: Extra inputs are not permitted. Did you mean 'min_words'?"),
    (dict(filters=dict(ended='yes')), 'filters, ended: '), (dict(filters=dict(reject=['('])), 'filters, reject, 0: '),
    (dict(compare=dict(a=1)), 'compare, a: '), (dict(name='world'), 'has a task of this name too')]


@pytest.mark.parametrize('more, message', BROKEN, ids=lambda v: v if isinstance(v, str) else '')
def test_a_broken_task_is_an_error_that_names_file_and_key(tmp_path, more, message):
    path = tmp_path/'mine.yaml'
    path.write_text(yaml.safe_dump(yaml.safe_load(Path(ANYTHING).read_text()) | more))
    for made in (lambda: RLCDConfig(task=str(path)), lambda: task_file(str(path))):
        with pytest.raises(ValueError) as e: made()
        assert str(path) in str(e.value) and message in str(e.value)


TALK = dict(messages=[dict(role='user', content='Hi'), dict(role='assistant', content='Hello.'), dict(role='user', content='Bye')])
PAIR = dict(positive='kind', negative='rude', judge='?')


def task_with(**more): return read_task(task_file('harmlessness')).__class__(**vars(read_task(task_file('harmlessness'))) | more)


def test_prompts_are_mirror_images():
    task = task_with()
    plus, minus = (contrast_prompt(task, TALK, PAIR, side) for side in ('positive', 'negative'))
    assert plus == '\n\nHuman: Hi\n\nAssistant (rude): Hello.\n\nHuman: Bye\n\nAssistant (kind):'
    assert minus == plus.replace('rude', 'x').replace('kind', 'rude').replace('x', 'kind')
    assert contrast_prompt(task, TALK, PAIR) == '\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Bye\n\nAssistant:'
    for history, earlier in (('same', ' (kind)'), ('none', '')):
        assert contrast_prompt(task_with(history=history), TALK, PAIR, 'positive') == plus.replace(' (rude)', earlier)
    assert contrast_prompt(task_with(placement='user'), TALK, PAIR, 'positive') == '\n\nHuman: Hi\n\n(rude)\n\nAssistant: Hello.\n\nHuman: Bye\n\n(kind)\n\nAssistant:'
    chat = contrast_prompt(task_with(placement='system'), TALK, PAIR, 'negative', chat=True)
    assert chat == [dict(role='system', content='rude'), *TALK['messages']]
    outline = contrast_prompt(read_task(task_file('outlining')), dict(instruction='A dragon.', input=''), PAIR, 'positive')
    assert outline.endswith('The premise: A dragon.\n\nAssistant (kind): 1.')


@pytest.mark.parametrize('text, found, stopped', [
    (' Sure.', 'Sure.', False), (' Sure.\n\nHuman: Thanks', 'Sure.', True), (' Sure.\n\nHuman (rude): Thanks', 'Sure.', True),
    (' Humanity and the Human body.', 'Humanity and the Human body.', False), (' A.\n\nHumanity: b.\nHuman: c', 'A.\n\nHumanity: b.\nHuman: c', False),
    ('The Human: factor', 'The Human: factor', False), (' Human: Assistant: hi', 'hi', False), ('Assistant: Human: hi', 'hi', False),
    ('user: User: hi', 'hi', False), ('\n\nHuman: and then?', '', True), ('Human: and then?', 'and then?', False), ('\n\nAssistant: hi', 'hi', False),
    ('\n Human: hi', 'hi', False), ('  ', '', False), (' Assistant (kind): hi\n\nAssistant: no', 'hi', True)])
def test_answers_end_at_whole_role_tags(text, found, stopped):
    "The release's filter cut or rejected whatever contained Human."
    assert clean_response(text, task_with()) == (found, stopped)


def test_filters():
    task = task_with(filters=dict(min_words=2, max_words=3, ended=True, reject=['^I ']))
    given = [('', True), ('a b', False), ('a', True), ('a b c d', True), ('I am', True), ('a b', True)]
    assert [reject_reason(*g, task) for g in given] == ['empty', 'cut_off', 'too_short', 'too_long', 'rejected', '']


def test_a_text_cannot_forge_a_slot():
    text = judge_prompt(task_with(), dict(instruction='{first}', output_1='{second}', output_2='two'), 'Which?')
    assert 'Human: {first}' in text and 'Answer (A): {second}' in text and 'Answer (B): two' in text


# --- the judge's letters -------------------------------------------------------------------------------------------------------------

def toy(*merged, bos='<s>'):
    "A tokenizer of characters and of these words."
    from tokenizers import models, Tokenizer
    from transformers import PreTrainedTokenizerFast
    vocab = {w: i for i, w in enumerate(['<pad>', '<s>', '</s>', *map(chr, range(32, 127)), *merged])}
    model = models.BPE(vocab, [(w[:-1], w[-1]) for w in merged], unk_token='?')
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), bos_token=bos, eos_token='</s>', pad_token='<pad>')


@pytest.mark.parametrize('merged, letters', [((), 'AB'), (('(A', '(B'), ('(A', '(B')), ((' (', ' (A'), (' (A', ' (B'))])
def test_answer_tokens_are_those_behind_the_prompt(merged, letters):
    "Not those of the bare letter: with a merge the bracket belongs to them, of one letter or of both."
    tokenizer = toy(*merged)
    spelt = lambda ids: ''.join(tokenizer.convert_ids_to_tokens(ids))
    shared, labels = label_tokens('It is (', 'AB', tokenizer)
    for letter, ids in zip('AB', labels): assert spelt(shared + ids) == f'<s>It is ({letter}' and spelt(ids) in (letter, f'({letter}', f' ({letter}')
    assert len({tuple(ids) for ids in labels}) == 2 and prompt_tokens('It', toy(bos=None)) == toy()('It')['input_ids']


def test_worlds_answer_tokens(models):
    shared, (a, b) = label_tokens('\n\nHuman: Hi\n\nThe better answer is (', 'AB', models.tokenizer)
    assert [models.tokenizer.decode(x) for x in (a, b)] == ['A', 'B'] and models.tokenizer.decode(shared).endswith('is (')


def test_shown_labels():
    chat = lambda top: dict(choices=[dict(logprobs=dict(content=[dict(top_logprobs=[dict(token=t, logprob=math.log(p)) for t, p in top])]))])
    assert abs(shown_label(chat([('A', .2), (' A', .1), ('B', .1), ('Because', .5)]), 'AB') - .25) < 1e-9
    assert shown_label(chat([('B', .1)]), 'AB') == 1 and math.isnan(shown_label(chat([('Bad', .9)]), 'AB')) and math.isnan(shown_label(dict(choices=[{}]), 'AB'))


# --- runs ----------------------------------------------------------------------------------------------------------------------------

def settings(base, out, **more):
    "Tiny settings of a run on the tiny world."
    return dict(out=str(out), data=str(base/'world'), policy=str(base/'world'), task=ANYTHING, chunk=8, max_new_tokens=12, max_retries=1) | more


def made(base, out, **more):
    rlcd.run(RLCDConfig(**settings(base, out, **more)))
    return [(Path(out)/name).read_bytes() for name in FILES if (Path(out)/name).exists()]


@pytest.fixture(scope='module')
def whole(base, tmp_path_factory):
    "The folder of a run of rlcd over all 60 prompts, and its files."
    out = tmp_path_factory.mktemp('rlcd')/'rlcd'
    return out, made(base, out)


def pairs(out): return read_json(Path(out)/'preferences.json')


def test_run(base, whole):
    out, files = whole
    rows, items, summary = pairs(out), read_json(out/'items.json'), read_summary(out)
    assert len(files) == 3 and len(items) == summary['prompts'] == 60 and len(rows) == summary['made'] > 40
    assert summary['made'] + summary['skipped'] == 60 and summary['labels'] == 0 and summary['length_positive'] > 0
    assert summary['retries'] == sum(i['retries'] for i in items) and summary['certainty'] == 1
    reasons = Counter(i['reason'] for i in items if i['reason'])
    assert {k: v for k, v in summary.items() if k.startswith('skipped_')} == {f'skipped_{k}': n for k, n in reasons.items()}
    by = {i['index']: i for i in items}
    prompts = load_records(str(base/'world'), 'preference')
    for r in rows:
        positive, negative = by[r['index']]['outputs']
        assert (r['output_1'], r['output_2'])[int(r['preference']) - 1] == positive != negative and r['instruction'] == prompts[r['index']]['instruction']
    assert {r['preference'] for r in rows} == {1., 2.} and {r['contrast'] for r in rows} == {0, 1}
    assert load_records(str(out), 'preferences', 'preference') == rows
    assert rlcd.run(RLCDConfig(**settings(base, out))).done


def test_killed_and_divided_the_file_is_the_same(base, whole, tmp_path):
    "Killed at a random moment and started again; over three processes, which are joined; and of some prompts only."
    out, files = whole
    parts = [str(tmp_path/f'part{r}') for r in range(3)]
    for r, part in enumerate(parts): made(base, part, indices_mod=3, indices_remainder=r)
    assert made(base, tmp_path/'joined', parts=parts[::-1]) == files
    some = [r for r in pairs(out) if r['index'] in {5, *range(9, 30)}]
    made(base, tmp_path/'some', indices='9-29,5')
    assert pairs(tmp_path/'some') == some
    with pytest.raises(ValueError, match='prompt 0 is in 0 of them'): made(base, tmp_path/'x', parts=parts[1:])
    with pytest.raises(ValueError, match='prompt 8 is in 2 of them'): made(base, tmp_path/'x', parts=parts + parts[1:2])
    with pytest.raises(ValueError, match=r"part0 was made with temperature = 1.0, and this run has 0.5"): made(base, tmp_path/'x', parts=parts, temperature=.5)
    with pytest.raises(ValueError, match='is no run of rlcd'): made(base, tmp_path/'x', parts=[str(base/'samples')])
    given, log = settings(base, tmp_path/'killed', chunk=4), tmp_path/'killed'/'log.jsonl'
    process, at = tiny.spawn(tiny.command('rlcd', **given)), random.SystemRandom().randint(1, 12)
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b'\n') < at): time.sleep(.002)
    process.kill()
    process.communicate()
    assert not (tmp_path/'killed'/'summary.json').exists(), at
    reached = len(read_log(tmp_path/'killed'))
    assert made(base, tmp_path/'killed', chunk=4) == made(base, tmp_path/'alone', chunk=4), (at, reached)
    assert [r['step'] for r in read_log(tmp_path/'killed')] == list(range(1, 16))


@pytest.mark.parametrize('where', ['write_rlcd_csv', 'item_figures'])
def test_killed_after_the_last_chunk(base, whole, tmp_path, monkeypatch, where):
    "Nothing that a restart needs is removed before the run has finished."
    def die(*_): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(rlcd, where, die)
        with pytest.raises(KeyboardInterrupt): made(base, tmp_path/'run')
    assert made(base, tmp_path/'run') == whole[1] and not list((tmp_path/'run').rglob('*.jsonl*'))[1:]


def test_rlaif_keeps_soft_labels(base, whole, tmp_path):
    made(base, tmp_path/'one', method='rlaif')
    made(base, tmp_path/'both', method='rlaif', both_orders=True)
    one, both = pairs(tmp_path/'one'), pairs(tmp_path/'both')
    assert [(r['output_1'], r['output_2']) for r in one] == [(r['output_1'], r['output_2']) for r in both]
    p = np.array([r['preference'] for r in both])
    assert ((1 < p) & (p < 2)).all() and len(set(p)) > 30 and {r['annotator'] for r in both} == {'self'}
    for r in both: assert abs(np.mean(r['orders']) - r['preference']) < 1e-9
    model = LocalWriter(str(base/'world'), RLCDConfig(**settings(base, tmp_path/'x')))
    judge, swapped = rlcd.SelfJudge(model, read_task(Path(ANYTHING)), False), [dict(r, output_1=r['output_2'], output_2=r['output_1']) for r in both]
    by_hand = (np.array(judge(both)) + 3 - np.array(judge(swapped)))/2
    np.testing.assert_allclose(p, by_hand, atol=1e-5)   # the order of a pair does not matter, only in one order does it
    assert np.abs(p - [r['preference'] for r in one]).max() > 1e-3
    assert read_summary(tmp_path/'one')['labels'] == len(one)


def test_rescored_pairs_are_those_of_rlcd(base, whole, tmp_path):
    "Written again or read from the run or its CSV: the same pairs, judged; with any annotator."
    out, _ = whole
    made(base, tmp_path/'again', method='rlcd_rescore')
    made(base, tmp_path/'read', method='rlcd_rescore', samples=str(out))
    again, read = pairs(tmp_path/'again'), pairs(tmp_path/'read')
    strip = lambda rows: [{k: v for k, v in r.items() if k not in ('preference', 'annotator')} for r in rows]
    assert strip(again) == strip(read) == strip(pairs(out))
    np.testing.assert_allclose([r['preference'] for r in again], [r['preference'] for r in read], atol=1e-5)
    made(base, tmp_path/'people', method='rlcd_rescore', samples=str(out/'preferences.csv'), annotators='alpaca_farm.world:gold')
    from alpaca_farm.world import gold
    people = pairs(tmp_path/'people')
    assert len(people) == len(again) and {r['annotator'] for r in people} == {'gold'}
    assert [r['preference'] for r in people] == gold(people) and len({r['preference'] for r in people}) > 1
    some = tmp_path/'some.json'   # pairs of a run that left prompts out
    some.write_text(json.dumps([r for r in pairs(out) if r['index'] % 5]))
    given, parts = dict(method='rlcd_rescore', samples=str(some)), [str(tmp_path/f'part{r}') for r in range(2)]
    for r, part in enumerate(parts): made(base, part, indices_mod=2, indices_remainder=r, **given)
    assert made(base, tmp_path/'joined', parts=parts, **given) == made(base, tmp_path/'undivided', **given)
    some.write_text(json.dumps([dict(pairs(out)[0], contrast=7)]))
    with pytest.raises(ValueError, match='row 0 of .* has contrast = 7, and the task'): made(base, tmp_path/'x', **given)
    with pytest.raises(ValueError, match='row 0 of .* is labelled by self'): made(base, tmp_path/'x', method='rlcd_rescore', samples=str(tmp_path/'read'))
    made(base, tmp_path/'anew', method='rlaif', samples=str(tmp_path/'read'), both_orders=True)   # the pairs of any run, as they stand
    anew, read = pairs(tmp_path/'anew'), pairs(tmp_path/'read')
    assert [(r['output_1'], r['output_2']) for r in anew] == [(r['output_1'], r['output_2']) for r in read] and all('orders' in r for r in anew)


def test_context_distillation_gives_demonstrations(base, whole, tmp_path):
    out, _ = whole
    made(base, tmp_path/'written', method='context_distillation')
    made(base, tmp_path/'read', method='context_distillation', samples=str(out))
    written, read = (load_records(str(tmp_path/name), 'sft', 'output') for name in ('written', 'read'))
    positive = {r['index']: (r['output_1'], r['output_2'])[int(r['preference']) - 1] for r in pairs(out)}
    assert {r['index']: r['output'] for r in read} == positive and len(written) >= len(read)
    assert not (tmp_path/'written'/'preferences.json').exists()


def test_csv_of_rlcd(tmp_path):
    rows = [dict(TALK, output_1='one', output_2='two, "three"', preference=1.25), dict(instruction='Hi', input='x', output_1='a\r\n\nb', output_2='c', preference=2.), dict(instruction='Go\r', input='', output_1='a', output_2='\r', preference=1.)]
    rlcd.write_rlcd_csv(tmp_path/'x.csv', rows)
    text = (tmp_path/'x.csv').read_bytes().decode()
    assert text.startswith('instruction,input,output_1,output_2,preference,win2_prob\r\n"\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Bye\n\nAssistant:",,one')
    assert load_records(str(tmp_path/'x.csv'), kind='preference') == [rows[0] | dict(input=''), *rows[1:]]
    rlcd.write_rlcd_csv(tmp_path/'hard.csv', rows[1:2])
    assert (tmp_path/'hard.csv').read_bytes() == b'instruction,input,output_1,output_2,preference\r\nHi,x,"a\r\n\nb",c,2\r\n'
    (tmp_path/'bad.csv').write_text('instruction,output_1,output_2,preference,win2_prob\na,b,c,1,often\n')
    with pytest.raises(ValueError, match="bad.csv, row 0: the field 'win2_prob' is 'often'"): load_records(str(tmp_path/'bad.csv'), kind='preference')


class Fussy:
    "Gives each key's text; nothing on the first try, and never for prompt 2."
    together = True
    def __init__(self): self.asked = []

    def write(self, prompts, keys, stop):
        self.asked += keys
        return [Written(f' {k[:2]}' if k[2] and k[0] != 2 else '', True) if k[0] != 1 else Written('', False, 'long_prompt') for k in keys]


def test_retries_are_counted_and_bounded():
    writer, cfg = Fussy(), RLCDConfig(max_retries=2)
    items = rlcd.write_items(writer, read_task(Path(ANYTHING)), {i: dict(instruction=f'{i}') for i in range(4)}, cfg)
    assert [i['reason'] for i in items] == ['', 'long_prompt', 'empty', ''] and [i['retries'] for i in items] == [2, 0, 4, 2]
    assert Counter(k[0] for k in writer.asked) == {0: 4, 1: 2, 2: 6, 3: 4}
    figures = rlcd.item_figures(rlcd.label_items(items, None, cfg), cfg)
    assert (figures['prompts'], figures['made'], figures['skipped_empty'], figures['skipped_long_prompt'], figures['retries']) == (4, 2, 1, 1, 8)
    with pytest.raises(ValueError, match='nothing is left of 1 prompts'): rlcd.item_figures(items[1:2], cfg)


@pytest.mark.parametrize('more, message', [
    (dict(method='rlhf'), "method = 'rlhf'"), (dict(indices='9-'), 'such as "17-29,35"'), (dict(indices_mod=2, indices_remainder=2), 'indices_remainder = 2'),
    (dict(served='m'), 'name one model'), (dict(policy=''), 'name one model'), (dict(annotators='alpaca_farm.world:pool'), 'method = rlcd has no judge'), (dict(both_orders=True), 'both_orders false'),
    (dict(method='rlcd', samples=__file__), 'samples: rlcd writes its own'), (dict(template='chat'), 'stand behind a role'), (dict(temperature=0), 'temperature'),
    (dict(task='wrold'), "did you mean 'world'?"), (dict(template='alpaca'), 'template')])
def test_wrong_settings(more, message):
    with pytest.raises(ValueError) as e: RLCDConfig(**more)
    assert message in str(e.value)


def test_a_judge_that_fails_stops_the_run_before_anything_is_written(base, tmp_path):
    dialogues = tmp_path/'talk.json'
    dialogues.write_text(json.dumps([TALK]))
    with pytest.raises(ValueError, match='annotators = .* failed on a first answer .*gold judges answers to an instruction, and a pair has a dialogue'):
        made(base, tmp_path/'out', method='rlaif', data=str(dialogues), annotators='alpaca_farm.world:gold')
    assert not (tmp_path/'out').exists()


def test_a_served_model(base, tmp_path):
    "Behind an endpoint: completions with a seed of their own for each answer, asked once."
    with judge_server(template='I say {hash}') as server:
        served = dict(policy='', served='base', base_url=server.url, store=str(tmp_path/'answers.sqlite'), max_instances=12)
        first = made(base, tmp_path/'one', **served)
        asked = server.requests()
        assert len(asked) == 24 and {r['path'] for r in asked} == {'/v1/completions'}
        rows = pairs(tmp_path/'one')
        assert len(rows) == 12 and all(r[k].startswith('I say') for r in rows for k in ('output_1', 'output_2'))
        made(base, tmp_path/'two', **served, indices='3-4')
        assert pairs(tmp_path/'two') == rows[3:5] and len(server.requests()) == 24
        server.set(labels='AB')
        made(base, tmp_path/'judged', method='rlcd_rescore', samples=str(tmp_path/'one'), **served)
        judged = server.requests()[24:]
        assert len(judged) == 12 and {r['annotator'] for r in pairs(tmp_path/'judged')} == {'self'}
        assert first and all(1 < r['preference'] < 2 for r in pairs(tmp_path/'judged'))


# --- the world that can be asked for good and for poor answers ---------------------------------------------------------------------------

def test_dialogue_pages():
    from alpaca_farm.embedded.grammar import is_held_out, parse
    rng = random.Random(0)
    pages = [world.dialogue_page(world.WorldConfig(), rng) for _ in range(1500)]
    answers = [p.split('\n\nAssistant') for p in pages if '\n\nAssistant' in p]
    assert 800 < len(answers) < 1000
    skill = {who: [] for who in world.DESCRIBED}
    for asked, answer in answers:
        who, _, said = answer.partition(': ')
        instruction = asked.removeprefix('\n\nHuman: ')
        assert not is_held_out(parse(instruction))   # what is held out is not asked here
        skill[who.strip(' ()')] += world.utility([dict(instruction=instruction.replace('\n\n', ' '), output=said)])
    means = {who: np.mean(u) for who, u in skill.items()}
    assert means['a careful author'] > means[''] + .4 > means['a careless author'] + .8 and means['an expert'] > means['a beginner'] + 1
    chosen = Counter(p[-3] for p in pages if p.endswith(').'))
    assert set(chosen) == {'A', 'B'} and abs(chosen['A'] - chosen['B']) < 120


def test_the_default_world_has_no_dialogues(base, tmp_path):
    "Its files are those without the setting; with it only the model and its tokenizer differ."
    plain, cfg = base/'world', world.WorldConfig(**tiny.settings('world', base, out=str(tmp_path/'w'), dialogues=200))
    world.train(cfg)
    for split in (*world.SPLITS, 'crowd', 'pool'): assert (tmp_path/'w'/f'{split}.json').read_bytes() == (plain/f'{split}.json').read_bytes()
    assert (tmp_path/'w'/'model'/'tokenizer.json').read_bytes() != (plain/'model'/'tokenizer.json').read_bytes()
    assert read_summary(tmp_path/'w')['prose_tokens'] > read_summary(plain)['prose_tokens']
    with pytest.raises(ValueError, match='dialogues = -1'): world.WorldConfig(dialogues=-1)


# --- Wombat: candidates of several models, rated ---------------------------------------------------------------------------------------------

MARKED = '1: 5 5 5 5\n2: 3 3 3 3\n3: 1 2 1 1\n4: 1 1 1 1 ({hash})'


def test_wombat_from_models_and_files_to_a_policy(base, tmp_path, monkeypatch, capsys):
    "A model on this machine, one behind an endpoint and a file; rated in one request each; then RRHF."
    monkeypatch.setattr(wombat, 'run_or_fail', tiny.run_here)
    prompts = load_records(str(base/'world'), 'unlabeled', n=6)
    (tmp_path/'file.json').write_text(json.dumps([dict(r, output='From a file.', generator='people') for r in prompts[:5]] + [dict(instruction='Other', output='x')]))
    trained = tiny.settings('rrhf', base, reward_model='', candidates='', perplexity_model='', eval_split='', missing_eos='')
    given = dict(out=str(tmp_path/'wombat'), data=str(base/'world'), max_instances=6, writers=[str(base/'sft')], served=['a'], files=[str(tmp_path/'file.json')], n=1,
                 max_new_tokens=12, max_prompt=110, rater='judge', store=str(tmp_path/'answers.sqlite'), rrhf=[f'{k}={v}' for k, v in trained.items() if k != 'candidates'])
    with judge_server(template=MARKED) as server:
        cfg = wombat.WombatConfig(base_url=server.url, **given)
        wombat.run(cfg)
        assert '1 of 6 rows of files answer other prompts' in capsys.readouterr().out
        asked = Counter(r['model'] for r in server.requests())
        pool = read_json(tmp_path/'wombat'/'candidates.json')
        assert asked == dict(a=6, judge=6 + 2*(6 - len(pool)))   # what cannot be read is asked three times
    assert pool and {len(q['output']) for q in pool} <= {2, 3, 4}
    for q in pool:
        assert sorted(q['source'])[-1] == 'people' or q['instruction'] == prompts[5]['instruction']
        shown = wombat.rating_order(q, 0)
        assert [q['scores'][i] for i in shown] == [20., 12., 5.][:len(shown)]
    summary = read_summary(tmp_path/'wombat')
    assert summary['queries'] == summary['labels'] == len(pool) and summary['queries'] + summary['unrated'] == 6
    assert (tmp_path/'wombat'/'rrhf'/'model'/'model.safetensors').exists() and not list((tmp_path/'wombat').rglob('.*'))
    learnt = read_json(tmp_path/'wombat'/'rrhf'/'candidates.json')
    assert {(q['instruction'], t): s for q in learnt for t, s in zip(q['output'], q['scores'])}.items() <= \
        {(q['instruction'], t): s for q in pool for t, s in zip(q['output'], q['scores'])}.items()


@pytest.mark.parametrize('text, sums', [('1: 4 5\n2: 1 1', [9, 2]), ('**Answer 1**: 4, 5\n- 2: 1/1', [9, 2]), ('2: 1 1\n1: 4 5', [9, 2]), ('1: 4 5', None),
                                        ('1: 4 6\n2: 1 1', None), ('1: 4 5\n2: 1', None), ('1: 4 5 5\n2: 1 1 1', None), ('1: 4 5\n2: 1 1\n3: 1 1', None), ('', None)])
def test_ratings(text, sums): assert wombat.read_rating(text, 2, 2) == sums


def test_wrong_settings_of_wombat():
    for more, message in ((dict(writers=[]), 'nobody writes'), (dict(rrhf=['k']), 'rrhf'), (dict(rrhf=['epoch=3']), 'rrhf: epoch is no setting'), (dict(marks=[]), 'marks = '), (dict(n=0), 'n = 0'),
                          (dict(rrhf=['k=1']), "rrhf: k = '1'"), (dict(rrhf=['out=runs/mine']), 'rrhf: out is set by this notebook'),
                          (dict(rrhf=['policy=./no_such_run']), "rrhf: policy = './no_such_run'"), (dict(temperature=0), 'temperature = 0'),
                          (dict(rater='judge', rrhf=['reward_model=my:reward']), 'rrhf: reward_model would replace the ratings')):
        with pytest.raises((ValueError, FileNotFoundError), match=message): wombat.WombatConfig(**more)
    wombat.WombatConfig(temperature=0, n=1)
