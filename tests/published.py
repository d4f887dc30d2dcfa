"Rows as published sets of preferences have them, and what is read from them."
import csv
import json

import numpy as np

import tiny
from alpaca_farm.data.pairs import read_preference
from alpaca_farm.judging.label_files import Verdicts
from alpaca_farm.run.files import read_json


def pandalm_verdicts(folder):
    "GPT-3.5's verdicts on PandaLM's test set, in its order, by number; 25 are no verdict."
    said = [r['gpt_result'].replace('garbage', '')
            for r in read_json(folder/'gpt-3.5-turbo-testset-v1.json')]
    preferences = np.full((1, 2, len(said)), np.nan)
    preferences[0, 0] = [read_preference(text, 'row', 'gpt_result') for text in said]
    shown = np.zeros((2, len(said)), bool)
    shown[0] = True
    return Verdicts(preferences, 'recorded', np.isnan(preferences[0, 0]).astype(int), shown)


def llmbar_verdicts(folder, strategy, out):
    "A file of the verdicts of LLMBar's judges who are asked by one strategy, with their texts."
    pairs = {path.stem: read_json(path) for path in folder.glob('LLMBar_*.json')}
    rows = []
    with open(folder/'judge_verdicts.csv', newline='') as file:
        for r in csv.DictReader(file):
            dataset = r['dataset'].replace('/', '_')
            if r['strategy'] != strategy or dataset not in pairs: continue
            pair = pairs[dataset][int(r['item'])]
            texts = [pair['output_1'], pair['output_2']]
            winner = int(r['winner']) if r['winner'] else None   # in the pair's own order
            if r['swapped'] == '1':
                texts.reverse()
                winner = winner and 3 - winner
            rows.append(dict(instruction=pair['input'], output_1=texts[0], output_2=texts[1],
                             preference=winner, annotator=f'{r["judge"]} {strategy}'))
    return tiny.write(out/'verdicts.json', rows)

ASK, MORE = dict(role='user', content='Name a colour.'), dict(role='user', content='Another?')


def say(text, parts=False):
    return dict(role='assistant', content=[dict(type='text', text=text, image=None)]
                if parts else text)


def vote(winner, a='Red.', b='Blue.', **more):
    return dict(model_a='one', model_b='two', winner=winner, language='English', **more,
                conversation_a=[ASK, say(a)], conversation_b=[ASK, say(b)])


def round_(first, second, asked=ASK):
    return dict(user=asked, model_side_a=say(first, True), model_side_b=say(second, True))


def texts(winner=None, as_json=False, **more):
    def column(text): return json.dumps([text]) if as_json else text
    row = dict(model_a='one', model_b='two', prompt=column('Name a colour.'), **more,
               response_a=column('Red.'), response_b=column('Blue.'))
    return row | (dict(winner=winner) if winner else {})


def strength(value, column='preference_strength', equal=False):
    names = dict(preference_strength=('prompt', 'response_1', 'response_2'),
                 overall_preference=('context', 'response1', 'response2'))[column]
    prompt = 'Name a colour.' if column == 'preference_strength' else [ASK]
    return dict(zip(names, (prompt, 'Red.', 'Red.' if equal else 'Blue.'))) | {column: value}


def safe(better, safer):
    return dict(prompt='Name a colour.', response_0='Red.', response_1='Blue.',
                is_response_0_safe=True, better_response_id=better, safer_response_id=safer)


def shp(label, score_a, score_b):
    return dict(history='Name a colour.', human_ref_A='Red.', human_ref_B='Blue.', labels=label,
                score_A=score_a, score_B=score_b, domain='askart_train')


def completion(response, overall, *ratings):
    aspects = ('helpfulness', 'honesty', 'instruction_following', 'truthfulness')
    return dict(model=response.lower(), response=response, critique='...', overall_score=overall,
                annotations={k: dict(Rating=r, Rationale='...') for k, r in zip(aspects, ratings)})


def rated(*completions):
    return dict(source='flan', instruction='Name a colour.', models=['red', 'blue'],
                completions=list(completions))


def binarized(chosen, rejected, high, low):
    return dict(prompt='Name a colour.', prompt_id='1', messages=[ASK, say(chosen)],
                chosen=[ASK, say(chosen)], rejected=[ASK, say(rejected)],
                score_chosen=high, score_rejected=low)


RED = completion('Red.', 8., '4', '4', '4', '5')
BLUE = completion('Blue.', 6., '3', '3', 'N/A', '3')
WRONG = completion('Blue.', 10., '1', '1', '1', '1')     # the judge's rating was 1

# by kind: rows; the preferences that are read, for Red. (1) or Blue. (2); what is printed
KINDS = {
    'arena': ([vote('model_a'), vote('model_b'), vote('tie'), vote('tie (bothbad)'),
               vote('both_bad'), vote('model_a', 'Red.', 'Red.')], [1, 2, 1.5, 1.5, 1.5],
              '1 pairs have two equal answers'),
    'arena, rounds': ([dict(model_a='one', model_b='two', winner='model_b',
                            full_conversation=[round_('Red.', 'Blue.')])], [2], ''),
    'arena, texts': ([texts('model_a'), texts('tie'), texts('model_b', True)], [1, 1.5, 2], ''),
    'arena, three columns': ([texts(as_json=True, **dict(zip(
        ('winner_model_a', 'winner_model_b', 'winner_tie'), one))) for one in
        ((1, 0, 0), (0, 1, 0), (0, 0, 1))], [1, 2, 1.5], ''),
    'HelpSteer2': ([strength(v) for v in range(-3, 4)] + [strength(2, equal=True)],
                   [1, 1, 1, 1.5, 2, 2, 2], '1 pairs have two equal answers'),
    'HelpSteer3': ([strength(v, 'overall_preference') for v in (-3, -1, 0, 2, None)],
                   [1, 1, 1.5, 2], '1 pairs have no label'),
    'PKU-SafeRLHF': ([safe(0, 1), safe(1, 0), safe(1, 1)], [1, 2, 2], ''),
    'SHP': ([shp(1, 9, 2), shp(0, 2, 9)], [1, 2], ''),
    'UltraFeedback': ([rated(RED, BLUE)], [1], ''),
    'UltraFeedback, contradicted': ([rated(RED, WRONG)], [1], ''),
    'UltraFeedback, incomplete': (
        [rated(completion('Red.', None, '2'), BLUE, completion('Green.', None, 'N/A')),
         rated(RED, completion('Blue.', None)), rated(RED, completion('Red.', 2.))], [2],
        ''),
    'UltraFeedback, binarized': (
        [binarized('Red.', 'Blue.', 8., 6.), binarized('Blue.', 'Red.', 7., 7.),
         binarized('Red.', 'Red.', 8., 6.)], [1, 1.5], '1 pairs have two equal answers')}
