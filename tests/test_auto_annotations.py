"""AlpacaFarm's README code, through HTTP: unchanged calls, the caller's fields kept, no row lost, nothing paid for twice."""
import json
import sys

import pytest

import tiny
from alpaca_farm.auto_annotations import PairwiseAutoAnnotator, alpaca_leaderboard, reference_from_hub
from judge_server import judge_server

EXAMPLES = tiny.ROOT/'../shared/data/alpaca_farm_examples'
needs_examples = pytest.mark.skipif(not EXAMPLES.exists(), reason='AlpacaFarm\'s example files are not beside this checkout')
RANKING = "[{'model': 'model_1', 'rank': {number}}, {'model': 'model_2', 'rank': {other}}]"


@pytest.fixture
def server(monkeypatch, tmp_path):
    "An endpoint that the environment names, as the README's code finds it; labels of this test's own store."
    with judge_server(template=RANKING) as server:
        for name in ('OPENAI_API_BASE', 'OPENAI_ORG_ID', 'OPENAI_ORG'): monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv('OPENAI_BASE_URL', server.url)
        monkeypatch.setenv('OPENAI_API_KEY', 'test')
        monkeypatch.setattr('alpaca_farm.core.ask.client.at_root', lambda path: tmp_path/path)
        yield server


def test_the_readme_without_a_change(server):
    pairs = [dict(instruction='Rewrite this.', input='Wordy, as it is.', output_1='Short.', output_2='A longer answer than that.'),
             dict(instruction='Say it.', input='', output_1='The longer one of the two.', output_2='b')]
    annotator = PairwiseAutoAnnotator()
    annotated = annotator.annotate_pairs(pairs)
    assert [r['preference'] for r in annotated] == [2, 1] and {r['annotator'] for r in annotated} == {'alpaca_eval_gpt4'}
    assert [{k: r[k] for k in p} for r, p in zip(annotated, pairs)] == pairs, 'a field of the caller was changed'
    assert {'price_per_example', 'time_per_example', 'raw_completion'} < set(annotated[0]) and annotated[0]['price_per_example'] > 0
    assert len(server.requests()) == 2
    annotator.annotate_pairs(pairs)
    PairwiseAutoAnnotator().annotate_pairs(pairs)
    assert len(server.requests()) == 2, 'asked twice'
    PairwiseAutoAnnotator(is_avoid_reannotations=False).annotate_pairs(pairs)
    PairwiseAutoAnnotator(caching_path=None).annotate_pairs(pairs)
    assert len(server.requests()) == 6, 'nothing is to be remembered'


@needs_examples
def test_the_notebook_of_alpaca_farm(server):
    "Its example files: pairs, samples, noise, head to head on 252 instructions."
    read = lambda name: json.loads((EXAMPLES/f'{name}.json').read_text())
    annotator = PairwiseAutoAnnotator()
    assert len(annotator.annotate_pairs(read('outputs_pairs')[:6])) == 6
    samples = annotator.annotate_samples(read('multisamples_sft'))
    assert len(samples) == len(read('multisamples_sft')) and all(r['output_1'] != r['output_2'] for r in samples)
    annotator.set_noise(.25)
    asked = len(server.requests())
    noisy = annotator.annotate_head2head(outputs_1=read('outputs_baseline'), outputs_2=read('outputs_sft'))
    coins = sum(r['annotator'] == 'coin' for r in noisy)
    assert len(noisy) == 252 and .35 < coins/252 < .65 and len(server.requests()) - asked <= 252 - coins
    assert [(r['instruction'], r['input']) for r in noisy] == [(r['instruction'], r['input']) for r in read('outputs_sft')]


@needs_examples
def test_the_leaderboard_keeps_all_805(server, tmp_path, capsys):
    path = EXAMPLES/'eval_gpt-3.5-turbo-0301.json'
    reference = [dict(r, output='Davinci said so.', instruction='\n\n'.join(filter(None, (r['instruction'], r['input']))), input='')
                 for r in json.loads(path.read_text())]
    (tmp_path/'davinci003.json').write_text(json.dumps(reference))
    board = alpaca_leaderboard(path, name='My fancy model', reference_outputs=tmp_path/'davinci003.json')
    assert board.n_total.item() == 805 and board.win_rate.item() > 50
    said = capsys.readouterr().out
    assert 'My fancy model' in said and 'not comparable' in said
    assert alpaca_leaderboard(path, reference_outputs=reference[:-2]).n_total.item() == 803     # as AlpacaEval counts it
    assert 'baseline has no answer to 2 of 805 instructions' in capsys.readouterr().out
    with pytest.raises(ValueError, match='no partner'): alpaca_leaderboard(path, reference_outputs=reference[:600])


def test_retired_models_are_mapped_by_the_environment(server, monkeypatch):
    monkeypatch.setenv('ALPACA_FARM_MODELS', 'gpt-4=in-service, other=x')
    PairwiseAutoAnnotator().annotate_pairs([dict(instruction='a', input='', output_1='b', output_2='ccc')])
    assert server.requests()[0]['model'] == 'in-service'


def test_old_names_and_decoding(server):
    server.set(template='Output ({letter})')
    models = {m: 'judge' for m in ('gpt-4-0314', 'gpt-3.5-turbo-0301', 'text-davinci-003')}
    pool = PairwiseAutoAnnotator('annotator_pool_v0/configs.yaml', models=models)
    assert len(pool.pool.annotators) == 13
    one = PairwiseAutoAnnotator('test', models=models)
    one.annotate_pairs([dict(instruction='a', output_1='b', output_2='ccc')], temperature=.3)
    assert one.pool.client.store.run('select request from requests')[0][0].count('"temperature": 0.3') == 1


def test_labels_in_a_file_of_alpaca_eval(server, tmp_path):
    pair = dict(instruction='a', input='b', output_1='c', output_2='dddd')
    file = tmp_path/'annotations.json'
    first = PairwiseAutoAnnotator(caching_path=str(file)).annotate_pairs([pair])
    assert json.loads(file.read_text())[0]['instruction'] == 'a\n\nb' and len(server.requests()) == 1
    merged = dict(pair, instruction='a\n\nb', input='')
    for p in (file.parent/'answers.sqlite', file.parent/'runs'/'answers.sqlite'): p.unlink(missing_ok=True)
    again = PairwiseAutoAnnotator(caching_path=str(file)).annotate_pairs([pair])
    assert PairwiseAutoAnnotator(caching_path=str(file)).annotate_pairs([merged])[0]["preference"] == again[0]["preference"]
    assert again[0]['preference'] == first[0]['preference'] and len(server.requests()) == 1


def test_the_file_of_labels_keeps_what_it_has(server, tmp_path):
    "The same pair twice, and labels that are not to be used again: the file can be opened, and nothing in it is lost."
    file, pair = str(tmp_path/'annotations.json'), dict(instruction='a', input='', output_1='c', output_2='dddd')
    PairwiseAutoAnnotator(caching_path=file).annotate_pairs([pair, pair, dict(pair, instruction='b')])
    PairwiseAutoAnnotator(caching_path=file, is_avoid_reannotations=False).annotate_pairs([dict(pair, instruction='c'), pair])
    assert sorted(r['instruction'] for r in json.loads((tmp_path/'annotations.json').read_text())) == ['a', 'b', 'c']
    PairwiseAutoAnnotator(caching_path=file, is_store_missing_annotations=False, is_reapply_parsing=True)


def test_probabilities_stay_what_they_are(server):
    "A weighted judge's preference is between 1 and 2, as AlpacaEval returns it, and so is the win rate of the leaderboard."
    pair = dict(instruction='a', input='', output_1='c', output_2='dddd')
    models = {'gpt-4-1106-preview': 'judge'}
    assert PairwiseAutoAnnotator('weighted_alpaca_eval_gpt4_turbo', models=models).annotate_pairs([pair])[0]['preference'] == pytest.approx(1.9)
    board = alpaca_leaderboard([dict(instruction='a', output='dddd')], 'weighted_alpaca_eval_gpt4_turbo', reference_outputs=[dict(instruction='a', output='c')], models=models)
    assert board.win_rate.item() == pytest.approx(90.)


def test_no_key_names_the_variable(monkeypatch, tmp_path):
    for name in ('OPENAI_API_KEY', 'OPENAI_BASE_URL', 'OPENAI_API_BASE'): monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr('alpaca_farm.core.ask.client.at_root', lambda path: tmp_path/path)
    with pytest.raises(ValueError, match='OPENAI_API_KEY'):
        PairwiseAutoAnnotator().annotate_pairs([dict(instruction='a', output_1='b', output_2='c')])


def test_the_references_are_a_configuration_of_the_hubs_data(monkeypatch):
    asked = []
    def load(spec, names):
        asked.append((spec, names))
        if len(asked) > 1: raise ValueError('no network')
        return [dict(instruction='a', input='', output='b')], spec
    monkeypatch.setattr('alpaca_farm.auto_annotations.load_rows', load)
    assert reference_from_hub() == [dict(instruction='a', input='', output='b')]
    assert asked == [('tatsu-lab/alpaca_farm:alpaca_farm_evaluation', ('eval',))]
    with pytest.raises(ValueError, match='no network.*reference_outputs='): reference_from_hub()


def test_a_gap_in_a_data_frame_is_an_empty_input():
    import pandas as pd
    from alpaca_farm.auto_annotations import records_of
    frame = pd.DataFrame(dict(instruction=['a', 'b'], input=[None, 'c'], output=['x', 'y'])).astype(object)
    frame.loc[0, 'input'] = float('nan')
    assert [r['input'] for r in records_of(frame)] == ['', 'c']
