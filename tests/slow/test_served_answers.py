"Best-of-n of a model behind an endpoint that fails on demand: each answer is paid for once."
import json
from dataclasses import replace

import pytest

from alpaca_farm.best_of_n import BestOfNConfig, run, served_prompt
from alpaca_farm.data.records import load_records
from alpaca_farm.eval import EvalConfig, read_models
from asking import summary
from judge_server import digest, judge_server, prompt_text


def config(tmp_path, server=None, n=30, **more):
    data = tmp_path/'eval.json'
    data.write_text(json.dumps([dict(instruction=f'Say word {i}.', input='loudly' * (i % 2),
                                     dataset='own') for i in range(n)]))
    usual = dict(out=str(tmp_path/'run'), data=str(data), policy='', served='judge', tries=2, n=1,
                 reward_model='', temperature=.7, store=str(tmp_path/'a.sqlite'),
                 base_url=server.url if server else '')
    return BestOfNConfig(**usual | more)


def wanted(cfg):
    "What the server says to each instruction: the hash of what it was sent."
    texts = []
    for r in load_records(cfg.data):
        prompt = served_prompt(r, cfg)
        name = 'prompt' if isinstance(prompt, str) else 'messages'
        texts.append(f'Word {digest(prompt_text({name: prompt}))[:8]}.')
    return texts


def answers(cfg): return [r['output'] for r in load_records(cfg.out, 'outputs', 'output')]
def server_of(**options): return judge_server(template=' Word {hash}.\n', **options)


@pytest.mark.parametrize('template, path', [
    ('auto', 'chat/completions'), ('alpaca', 'completions')])
def test_what_is_sent(tmp_path, template, path):
    "As a chat and as a completion, in the order of instructions."
    with server_of() as server:
        cfg = config(tmp_path, server, template=template, system='Be brief.')
        run(cfg)
        assert {r['path'] for r in server.requests()} == {f'/v1/{path}'}
    assert answers(cfg) == wanted(cfg)
    for row, record in zip(load_records(cfg.out, 'outputs'), load_records(cfg.data)):
        assert row['generator'] == 'run'
        assert all(row[k] == v for k, v in record.items())


def test_thoughts_are_left_out(tmp_path):
    with judge_server(template='<think>\nHm.\n</think>\n\nWord {hash}.') as server:
        cfg = config(tmp_path, server, n=3)
        run(cfg)
    assert answers(cfg) == wanted(cfg)
    assert served_prompt(load_records(cfg.data)[1], cfg) == [
        dict(role='user', content='Say word 1.\n\nloudly')]


def test_what_is_refused_for_good_is_left_out(tmp_path, capsys):
    "A refusal in words is an answer."
    faults = {'context': {'p': 0, 'always_for': 'Say word 7\\.'},
              'refusal': {'p': 0, 'always_for': 'Say word 8\\.'}}
    with server_of(faults=faults) as server:
        cfg = config(tmp_path, server)
        run(cfg)
    given = answers(cfg)
    want = wanted(cfg)
    assert given[:7] + given[8:] == want[:7] + want[9:]
    assert "can't assist" in given[7]
    said = capsys.readouterr().out
    assert 'refused 1 of 30 ' in said
    assert 'maximum context length' in said
    assert summary(cfg)['unanswered'] == 1


def test_a_baseline_with_gaps_is_compared_on_the_rest(tmp_path):
    "As AlpacaEval counts it, 803 of 805; a file about other instructions is none."
    rows = [dict(instruction=f'Say word {i}.', input='', output='a') for i in range(805)]
    for name, n in dict(all=805, gaps=803, few=700).items():
        (tmp_path/f'{name}.json').write_text(json.dumps(rows[:n]))
    for reference, model, sizes in (('gaps', 'all', [803, 803]), ('all', 'gaps', [803, 803]),
                                    ('all', 'few', [805, 700])):
        cfg = EvalConfig(reference=f'{tmp_path}/{reference}.json',
                         outputs=[f'{tmp_path}/{model}.json'])
        assert [len(r) for r in read_models(cfg).values()] == sizes


def test_several_samples_other_seeds_and_cut_answers(tmp_path):
    with server_of() as server:
        cfg = config(tmp_path, server, n=4)
        run(cfg)
        samples = replace(cfg, out=str(tmp_path/'samples'), n=3, max_new_tokens=3, seed=1)
        run(samples)
        assert server.counts()['ok'] == 4 + 12, 'a sample of its own each'
        run(replace(samples, out=str(tmp_path/'more'), n=5, max_instances=2))
        assert server.counts()['ok'] == 16 + 4, 'three of five were there'
    rows = load_records(samples.out, 'candidates', 'candidates')
    assert [len(r['output']) for r in rows] == [3]*4
    assert summary(samples)['ended'] == 0
    assert answers(samples) == [r['output'][0] for r in rows]


def test_the_best_of_what_was_served(tmp_path):
    "Chosen by a reward, as a policy's samples are."
    with server_of() as server:
        run(cfg := config(tmp_path, server, n=4, reward_model=f'{__name__}:last'))
    for best, row in zip(answers(cfg), load_records(cfg.out, 'candidates', 'candidates')):
        assert best == max(row['output'])


def test_what_was_served_is_chosen_from_again_and_asked_once(tmp_path):
    "It has no log-probs, and so no KL but the bound."
    with server_of() as server:
        run(cfg := replace(config(tmp_path, server, n=4), n=4))
        asked = server.counts()['ok']
        again = replace(cfg, out=str(tmp_path/'again'), samples=cfg.out, n=3,
                        reward_model=f'{__name__}:last')
        with pytest.raises(ValueError, match='served = judge; here served = other'):
            run(replace(again, served='other'))
        run(again)
        assert server.counts()['ok'] == asked
    for best, row in zip(answers(again), load_records(cfg.out, 'candidates', 'candidates')):
        assert best == max(row['output'][:3])
    assert 'kl_bound' in summary(again) and 'kl' not in summary(again)


def last(records): return [float(int(r['output'][5:13], 16)) for r in records]
