"""What online methods share, RLOO and GRPO, and answers to the evaluation split."""
import copy
import csv
import json

import pytest
import torch

import tiny
from alpaca_farm import overoptimization
from alpaca_farm.model.logprobs import load_policy
from alpaca_farm.model.policy import Policy
from alpaca_farm.overoptimization import OverConfig
from alpaca_farm.ppo import PPOConfig, value_model
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_log, read_summary
from alpaca_farm.train import online
from alpaca_farm.train.online import CheckpointSelector, OnlineConfig
from tiny import randn

torch.set_num_threads(1)


@pytest.mark.parametrize('function', ['alpaca_farm.world:utility', ['alpaca_farm.world:utility']],
                         ids=str)
def test_the_value_model_of_a_function_reward_starts_from_the_policy(base, models, function):
    "Its trunk has the policy's weights and its head is 0."
    policy = load_policy(str(base/'sft'), models.cfg)
    value = value_model(PPOConfig(**tiny.settings('ppo', base, reward_model=function)), policy)
    trunk = policy.model.base_model.state_dict()
    assert all(torch.equal(w, trunk[k]) for k, w in value.model.base_model.state_dict().items())
    assert not value.score.weight.any()
    assert (value.mean, value.std) == (0., 1.)


def ran(folder, notebook, **settings):
    "A folder with the configuration of a finished run."
    folder.mkdir(parents=True)
    (folder/'summary.json').write_text('{}')
    (folder/'config.json').write_text(
        json.dumps(dict(fingerprint='', notebook=notebook, settings=settings, code='', inputs={})))
    return str(folder)


@pytest.mark.parametrize('setting, value', [
    ('temperature', .5), ('top_p', .5), ('max_new_tokens', 9), ('template', 'raw')])
def test_a_bank_that_was_sampled_in_another_way_is_refused(base, tmp_path, setting, value):
    for name in ('bank', 'references'):
        ran(tmp_path/name, 'best_of_n', **{setting: value})
    cfg = OverConfig(out=str(tmp_path/'out'), policy=str(base/'sft'), bank=str(tmp_path/'bank'),
                     world=str(base/'world'),
                     references=str(tmp_path/'references'), proxies=[str(base/'reward_model')],
                     policies=[str(base/'sft')])
    with pytest.raises(ValueError, match=f'with {setting} = {value}; here {setting} = '):
        overoptimization.run(cfg)


def test_answers_are_compared_with_those_to_the_same_instruction(monkeypatch):
    "A pair has one label; missing verdicts do not count."
    def rows(prompts, text):
        return [dict(instruction=i, input='', output=[f'{text} {i}']) for i in prompts]
    choose = CheckpointSelector(None, OnlineConfig())
    choose.base = rows('abc', 'base')
    seen = []

    def measure(answered, preferences):
        monkeypatch.setattr(online, 'sample_answers', lambda *_, **__: rows(answered, 'new'))

        def annotate(pairs, seed):
            seen[:] = [(p['output_1'], p['output_2']) for p in pairs]
            return [dict(p, preference=v) for p, v in zip(pairs, preferences)]
        choose.annotate = annotate
        figures = choose.measure(None)
        return figures['val_win_rate'], figures['val_labels']
    assert measure('cab', [2., 2., 2.]) == (100., 3)
    assert seen == [('base a', 'new a'), ('base b', 'new b'), ('base c', 'new c')]
    assert measure('abc', [2., None, 2.]) == (100., 2)
    with pytest.raises(ValueError, match='no label'):
        measure('abc', [None]*3)


def test_a_checkpoint_is_chosen_by_single_labels_that_count(base, tmp_path):
    "By default the last one is kept; else each pair has one label, and the summary counts it."
    more = dict(steps=2, eval_every=1, eval_split='')
    last = tiny.run('ppo', base, tmp_path/'last', **more).folder
    assert read_summary(last)['best_step'] == 2
    judged = dict(more, annotators=str(base/'world'/'pool.json'))
    chosen = tiny.run('ppo', base, tmp_path/'chosen', **judged).folder
    counted = [r['val_labels'] for r in read_log(chosen)]
    assert 0 < max(counted) <= 8
    assert read_summary(chosen)['labels'] == read_summary(last)['labels'] + sum(counted)


@pytest.fixture(scope='module')
def answered(base, tmp_path_factory):
    "PPO whose training samples at temperature 0.8 and whose answers are greedy."
    return tiny.run('ppo', base, tmp_path_factory.mktemp('answered')/'ppo', steps=1,
                    temperature=.8, eval_temperature=0., eval_top_p=.9).folder


def test_answers_are_sampled_with_settings_of_their_own(base, answered):
    from alpaca_farm.train.answers import AnswerConfig, answering, sample_answers
    from alpaca_farm.data.records import load_records
    cfg = answering(AnswerConfig(**tiny.SAMPLING, eval_temperature=0.))
    expected = sample_answers(load_policy(str(answered), cfg),
                              load_records(str(base/'world'), 'eval', n=10), cfg)
    left = read_json(answered/'outputs.json')
    assert [r['output'] for r in left] == [r['output'][0] for r in expected]
    assert {(r['temperature'], r['top_p']) for r in left} == {(0., .9)}


def test_a_board_says_that_its_rows_are_answered_differently(base, answered, tmp_path, capsys):
    from alpaca_farm import eval as ev
    cfg = ev.EvalConfig(out=str(tmp_path/'eval'), outputs=[str(answered)],
                        reference=str(base/'sft'), annotators=[str(base/'world'/'pool.json')])
    ev.run(cfg)
    assert 'not answered alike' in capsys.readouterr().out
    rows = list(csv.DictReader(open(tmp_path/'eval'/'leaderboard.csv')))
    decoding = {r['method']: r['decoding'] for r in rows}
    assert decoding == dict(ppo='temperature 0.0, top-p 0.9',
                            reference='temperature 1.0, top-p 1.0')


def test_samples_go_on_after_a_chunk_that_was_cut_short(base, tmp_path, monkeypatch):
    "Killed between a chunk's lines and its checkpoint: the same candidates as without."
    from alpaca_farm.train import trainer as training
    def run(name):
        made = tiny.run('best_of_n', base, tmp_path/name, reward_model='', max_instances=9, chunk=3)
        return (made.folder/'candidates.json').read_bytes()
    append = training.append_lines
    def torn(path, size, records):
        if not size:
            return append(path, size, records)
        with open(path, 'ab') as f:
            f.write(b'{"instruction": "a"}\n{"output": ["cut sh')
        raise KeyboardInterrupt
    monkeypatch.setattr(training, 'append_lines', torn)
    with pytest.raises(KeyboardInterrupt): run('torn')
    monkeypatch.setattr(training, 'append_lines', append)
    assert run('torn') == run('whole')


def test_a_trainer_is_torchs_adam(tmp_path):
    "Five updates by the settings of a run, in float64."
    from alpaca_farm.run.runs import start
    from alpaca_farm.train.trainer import Trainer
    from alpaca_farm.sft import SFTConfig
    cfg = SFTConfig(out=str(tmp_path/'adam'), adam_eps=1e-3, learning_rate=.1, warmup=0.,
                    lr_schedule='constant', betas=[.9, .99], weight_decay=0., max_grad_norm=0.,
                    device='cpu', data='x/y', policy='x/y')
    cfg.inputs = {}
    model = torch.nn.Linear(3, 1, bias=False).double()
    other = copy.deepcopy(model)
    adam = torch.optim.Adam(other.parameters(), lr=.1, betas=(.9, .99), eps=1e-3)
    trainer = Trainer(start(cfg, test_a_trainer_is_torchs_adam), 5, dict(model=Policy(model)))

    def loss_of(batch): return dict(loss=model(batch['x'])[:, 0])
    for step, x in enumerate(1e-3*randn(5, 1, 3), 1):
        trainer.step = step
        trainer.update(dict(weight=torch.ones(1), x=x), loss_of)
        other(x).sum().backward()
        adam.step()
        adam.zero_grad()
    torch.testing.assert_close(model.weight, other.weight, rtol=1e-9, atol=1e-12)
