"""Reference answers from an endpoint that fails on demand: each is asked as it should be, paid for once, and stands where it belongs."""
import json

import pytest

from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.run.runs import read_summary
from alpaca_farm.eval import EvalConfig, read_models
from alpaca_farm.judging.openai_baselines import baseline_request, BASELINES, OpenaiBaselinesConfig, run
from judge_server import digest, judge_server, prompt_text


@pytest.fixture(autouse=True)
def key(monkeypatch):
    for name in ('OPENAI_BASE_URL', 'OPENAI_API_BASE', 'OPENAI_ORG_ID'): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('OPENAI_API_KEY', 'test')
    monkeypatch.setattr('openai._base_client.MAX_RETRY_DELAY', .06)


def config(tmp_path, url, n=30, baseline='gpt-4-0314', **more):
    data = tmp_path/'eval.json'
    if not data.exists(): data.write_text(json.dumps([dict(instruction=f'Say word {i}.', input='loudly' * (i % 2), dataset='own') for i in range(n)]))
    return OpenaiBaselinesConfig(**dict(dict(out=str(tmp_path/'run'), data=str(data), store=str(tmp_path/'a.sqlite'), base_url=url, baseline=baseline,
                                             models=[f'{b}=judge' for b in BASELINES], tries=30, timeout=5.), **more))


def wanted(cfg, model='judge'):
    "What the server says to each instruction: the hash of what it was sent."
    return [f'Word {digest(prompt_text(baseline_request(r, cfg, model)))[:8]}.' for r in load_records(cfg.data)]


def server_of(**options): return judge_server(**dict(dict(template=' Word {hash}.\n'), **options))


@pytest.mark.parametrize('baseline', BASELINES)
def test_what_is_sent(tmp_path, baseline):
    "Prompt, limit and decoding of each baseline, as a chat and as a completion; outputs as AlpacaEval has them, in the order of the instructions."
    sent, limit = {}, BASELINES[baseline]
    for model in ('judge', 'text-davinci-003'):
        with server_of() as server:
            cfg = config(tmp_path, server.url, baseline=baseline, models=[f'{baseline}={model}'], out=str(tmp_path/model))
            run(cfg)
            rows, seen = load_records(cfg.out, 'outputs', 'output'), server.requests()
        assert [(r['instruction'], r['input'], r['dataset']) for r in rows] == [(r['instruction'], r['input'], 'own') for r in load_records(cfg.data)]
        assert [r['output'] for r in rows] == wanted(cfg, model) and {r['generator'] for r in rows} == {model}
        assert {r['path'] for r in seen} == {'/v1/chat/completions' if model == 'judge' else '/v1/completions'}
        asked = baseline_request(rows[1], cfg, model)
        assert (asked['temperature'], asked['max_tokens'], asked['model']) == (.7, 300, model)
        text = prompt_text(asked)
        assert 'Say word 1.' in text and 'loudly' in text and (str(limit) in text if limit else '### Response:' in text)
        if model == 'judge': assert [m['role'] for m in asked['messages']] == ['system', 'user'] * bool(limit) + ['user'] * (not limit)


def test_what_fails_for_now_is_asked_again_and_nothing_else(tmp_path):
    with server_of(faults={'500': {'p': 0, 'always_for': 'Say word [37]\\.'}}) as server:
        cfg = config(tmp_path, server.url, tries=2)
        with pytest.raises(ValueError, match=r"(?s)2 OF 30 .*Run again.*'Say word 3.'.*'Say word 7.'"): run(cfg)
        assert len(load_records(cfg.out, 'outputs')) == 28 and not read_summary(cfg.out)
        server.set(faults={})
        run(cfg)
        assert [r['output'] for r in load_records(cfg.out, 'outputs')] == wanted(cfg) and server.counts()['ok'] == 30
        assert read_summary(cfg.out)['known'] == 28 and run(cfg).done


def test_what_is_refused_for_good_is_named_and_left_out(tmp_path, capsys):
    with server_of(faults={'context': {'p': 0, 'always_for': 'Say word 7\\.'}}) as server:
        cfg = config(tmp_path, server.url)
        run(cfg)
    assert [r['output'] for r in load_records(cfg.out, 'outputs')] == [w for i, w in enumerate(wanted(cfg)) if i != 7]
    said = capsys.readouterr().out
    assert '1 OF 30 INSTRUCTIONS HAVE NO ANSWER' in said and "'Say word 7.'" in said and 'maximum context length' in said
    assert read_summary(cfg.out)['unanswered'] == 1


def test_a_baseline_with_gaps_is_compared_on_the_rest(tmp_path, capsys):
    "As AlpacaEval counts it, 803 of 805: as the reference and as a model; a file about other instructions is none."
    rows = [dict(instruction=f'Say word {i}.', input='', output='a') for i in range(805)]
    for name, kept in dict(all=rows, gaps=rows[:803], few=rows[:700]).items(): (tmp_path/f'{name}.json').write_text(json.dumps(kept))
    def lengths(reference, model):
        return [len(r) for r in read_models(EvalConfig(reference=str(tmp_path/f'{reference}.json'), outputs=[str(tmp_path/f'{model}.json')])).values()]
    assert lengths('gaps', 'all') == [803, 803] and 'reference has no answer to 2 of 805 instructions' in capsys.readouterr().out
    assert lengths('all', 'gaps') == [803, 803] and 'gaps has no answer to 2 of 805 instructions' in capsys.readouterr().out
    assert lengths('all', 'few') == [805, 700], 'refused when they are paired'


def test_a_refusal_is_an_answer(tmp_path):
    with server_of(faults={'refusal': 1}) as server:
        cfg = config(tmp_path, server.url, n=3)
        run(cfg)
    assert all("can't assist" in r['output'] for r in load_records(cfg.out, 'outputs')) and read_summary(cfg.out)['empty'] == 0


def test_several_samples_other_seeds_and_cut_answers(tmp_path):
    with server_of() as server:
        cfg = config(tmp_path, server.url, n=4)
        samples = config(tmp_path, server.url, **{'max_tokens': 3, 'seed': 1})
        samples.n = 3
        run(cfg); run(samples)
        assert server.counts()['ok'] == 4 + 12, 'a sample of its own each'
        more = config(tmp_path, server.url, max_tokens=3, seed=1, out=str(tmp_path/'more'), max_instances=2)
        more.n = 5
        run(more)
        assert server.counts()['ok'] == 16 + 4, 'three of five were there'
    rows = load_records(samples.out, 'candidates', 'candidates')
    assert [len(r['output']) for r in rows] == [3]*4 and not any(e for r in rows for e in r['ended'])
    assert read_summary(samples.out)['ended'] == 0 and [r['output'] for r in load_records(samples.out, 'outputs')] == [r['output'][0] for r in rows]


def test_no_key_and_no_baseline(tmp_path, monkeypatch):
    monkeypatch.delenv('OPENAI_API_KEY')
    with pytest.raises(ValueError, match='OPENAI_API_KEY'): run(config(tmp_path, ''))
    with pytest.raises(ValueError, match='baseline = .*text-davinci-003'):
        run(config(tmp_path, '', baseline='', out=str(tmp_path/'b')))


def test_decoding_changes_the_request(tmp_path):
    record = dict(instruction='Say a word.')
    for model, decoding, fields in (('m', [], dict(temperature=.7, max_tokens=300)), ('m', ['max_tokens=77', 'top_p=0.5'], dict(temperature=.7, max_tokens=77, top_p=.5)),
                                    ('gpt-5', ['reasoning_effort=low'], dict(max_completion_tokens=300 + 4096, reasoning_effort='low'))):
        request = baseline_request(record, config(tmp_path, 'http://localhost', decoding=decoding), model)
        assert {k: v for k, v in request.items() if k not in ('model', 'messages')} == fields
