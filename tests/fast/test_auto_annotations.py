"""AlpacaFarm's README code, through HTTP: unchanged calls, nothing lost or paid for twice."""
import json

import pytest

import tiny
from alpaca_farm.auto_annotations import _records_of, _reference_from_hub, alpaca_leaderboard
from alpaca_farm.auto_annotations import PairwiseAutoAnnotator
from judge_server import judge_server

EXAMPLES = tiny.ROOT/'../shared/data/alpaca_farm_examples'
needs_examples = pytest.mark.skipif(not EXAMPLES.exists(), reason='without AlpacaFarm\'s examples')
RANKING = "[{'model': 'model_1', 'rank': {number}}, {'model': 'model_2', 'rank': {other}}]"
PAIR = dict(instruction='a', input='', output_1='c', output_2='dddd')


def example(name): return json.loads((EXAMPLES/f'{name}.json').read_text())


@pytest.fixture
def server(monkeypatch, tmp_path):
    "An endpoint that the environment names, as the README's code finds it; and an own store."
    with judge_server(template=RANKING) as server:
        for name in ('OPENAI_API_BASE', 'OPENAI_ORG_ID', 'OPENAI_ORG'):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv('OPENAI_BASE_URL', server.url)
        monkeypatch.setenv('OPENAI_API_KEY', 'test')
        monkeypatch.setattr('alpaca_farm.ask.client.at_root', lambda path: tmp_path/path)
        yield server


def test_the_readme_without_a_change(server):
    pairs = [dict(PAIR, input='Wordy, as it is.'), dict(PAIR, output_1='The longer one.')]
    annotator = PairwiseAutoAnnotator()
    annotated = annotator.annotate_pairs(pairs)
    assert [r['preference'] for r in annotated] == [2, 1]
    assert {r['annotator'] for r in annotated} == {'alpaca_eval_gpt4'}
    assert [{k: r[k] for k in p} for r, p in zip(annotated, pairs)] == pairs
    assert {'time_per_example', 'raw_completion'} < set(annotated[0])
    assert annotated[0]['price_per_example'] > 0
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
    annotator = PairwiseAutoAnnotator()
    multisamples = example('multisamples_sft')
    assert len(annotator.annotate_pairs(example('outputs_pairs')[:6])) == 6
    samples = annotator.annotate_samples(multisamples)
    assert len(samples) == len(multisamples)
    assert all(r['output_1'] != r['output_2'] for r in samples)
    annotator.set_noise(.25)
    asked = len(server.requests())
    ours = example('outputs_sft')
    noisy = annotator.annotate_head2head(outputs_1=example('outputs_baseline'), outputs_2=ours)
    coins = sum(r['annotator'] == 'coin' for r in noisy)
    assert len(noisy) == 252
    assert .35 < coins/252 < .65
    assert len(server.requests()) - asked <= 252 - coins
    def prompts(rows): return [(r['instruction'], r['input']) for r in rows]
    assert prompts(noisy) == prompts(ours)


@needs_examples
def test_the_leaderboard_keeps_all_805(server, tmp_path, capsys):
    path = EXAMPLES/'eval_gpt-3.5-turbo-0301.json'
    file = tmp_path/'davinci003.json'
    def merged(r): return '\n\n'.join(filter(None, (r['instruction'], r['input'])))
    reference = [dict(r, output='Davinci said so.', instruction=merged(r), input='')
                 for r in json.loads(path.read_text())]
    file.write_text(json.dumps(reference))
    board = alpaca_leaderboard(path, name='My fancy model', reference_outputs=file)
    assert board.n_total.item() == 805
    assert board.win_rate.item() > 50
    said = capsys.readouterr().out
    assert 'My fancy model' in said
    assert 'not comparable' in said
    board = alpaca_leaderboard(path, reference_outputs=reference[:-2])
    assert board.n_total.item() == 803     # as AlpacaEval counts it
    assert 'baseline has no answer to 2 of 805 requests' in capsys.readouterr().out
    with pytest.raises(ValueError, match='the same requests'):
        alpaca_leaderboard(path, reference_outputs=reference[:600])


def test_retired_models_are_mapped_by_the_environment(server, monkeypatch):
    monkeypatch.setenv('ALPACA_FARM_MODELS', 'gpt-4=in-service, other=x')
    PairwiseAutoAnnotator().annotate_pairs([PAIR])
    assert server.requests()[0]['model'] == 'in-service'


def test_old_names_and_decoding(server):
    server.set(template='Output ({letter})')
    old = 'gpt-4-0314', 'gpt-3.5-turbo-0301', 'text-davinci-003'
    models = dict.fromkeys(old, 'judge')
    pool = PairwiseAutoAnnotator('annotator_pool_v0/configs.yaml', models=models)
    assert len(pool.pool.annotators) == 13
    one = PairwiseAutoAnnotator('test', models=models)
    one.annotate_pairs([PAIR], temperature=.3)
    request, = one.pool.client.store.run('select request from requests')[0]
    assert request.count('"temperature": 0.3') == 1


def test_answers_are_kept_in_a_file_of_their_own(server, tmp_path):
    file = tmp_path/'mine.sqlite'
    def label(): return PairwiseAutoAnnotator(caching_path=str(file)).annotate_pairs([PAIR])[0]
    first = label()['preference']
    assert file.exists()
    assert label()['preference'] == first
    assert len(server.requests()) == 1


def test_probabilities_stay_what_they_are(server):
    "A weighted judge's preference is between 1 and 2, and so is the leaderboard's win rate."
    judge = 'weighted_alpaca_eval_gpt4_turbo'
    models = {'gpt-4-1106-preview': 'judge'}
    row, = PairwiseAutoAnnotator(judge, models=models).annotate_pairs([PAIR])
    assert row['preference'] == pytest.approx(1.9)
    ours, theirs = ([dict(instruction='a', output=o)] for o in ('dddd', 'c'))
    board = alpaca_leaderboard(ours, judge, reference_outputs=theirs, models=models)
    assert board.win_rate.item() == pytest.approx(90.)


def test_the_references_are_a_configuration_of_the_hubs_data(monkeypatch):
    rows = [dict(instruction='a', input='', output='b')]
    hub = {('tatsu-lab/alpaca_farm:alpaca_farm_evaluation', ('eval',)): rows}
    monkeypatch.setattr('alpaca_farm.auto_annotations.load_rows',
                        lambda spec, names: (hub[spec, names], spec))
    assert _reference_from_hub() == rows


def test_a_gap_in_a_data_frame_is_an_empty_input():
    import pandas as pd
    frame = pd.DataFrame(dict(instruction=['a', 'b'], input=[None, 'c'], output=['x', 'y']))
    for gap in (None, float('nan')):
        frame = frame.astype(object)
        frame.loc[0, 'input'] = gap
        assert [r['input'] for r in _records_of(frame)] == ['', 'c']


def test_a_data_frame_from_parquet_has_arrays_of_outputs(tmp_path):
    import pandas as pd
    rows = [dict(instruction='a', input='', output=['b', 'cc'])]
    pd.DataFrame(rows).to_parquet(tmp_path/'samples.parquet')
    assert _records_of(pd.read_parquet(tmp_path/'samples.parquet')) == rows


def test_one_budget_for_calls_with_other_decoding(server, tmp_path):
    "Each such call had the whole budget."
    prices = tiny.write(tmp_path/'prices.yaml', {'gpt-4': [0, 10**6]})
    server.set(usage=dict(prompt_tokens=1, completion_tokens=100))
    annotator = PairwiseAutoAnnotator(budget=150., prices=prices, concurrency=1)
    for temperature in (.1, .2, .3): annotator.annotate_pairs([PAIR], temperature=temperature)
    assert len(server.requests()) == 1


def test_without_earlier_answers_each_call_asks(server):
    "Two calls gave the same sample of a judge, as if it never varied."
    annotator = PairwiseAutoAnnotator(is_avoid_reannotations=False)
    for _ in range(2): annotator.annotate_pairs([PAIR])
    assert len(server.requests()) == 2


def test_two_models_answers_keep_the_models_names(server):
    one, two = ([dict(instruction='a', output=text, generator=text*2)] for text in ('c', 'dddd'))
    row, = PairwiseAutoAnnotator().annotate_head2head(one, two)
    assert (row['generator_1'], row['generator_2']) == ('cc', 'dddddddd')
