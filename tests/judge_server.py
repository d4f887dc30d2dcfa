"""A judge that speaks OpenAI's wire format over real HTTP/1.1 on loopback, and fails on demand.

As a program, until it is killed:  python tests/judge_server.py --port 0 --latency .05 --faults '{"429": 0.3}' --log path
In a test:  with judge_server(latency=.05, faults={'429': .3}, seed=0) as server: OpenAI(base_url=server.url, api_key='k')

Every option of DEFAULTS is a flag, a keyword and something that `server.set` can change. A fault is a probability or a
dict: `p`; `times`, the most per distinct body; `always_for`, a regex of the body (canonical JSON) that always meets it;
`on`, a regex of the path (completions, in batches as well). One request meets at most one fault; with several, each has
its own share of one uniform number, which depends on the seed, the body and how often that body has arrived before, not
on the order of arrival. `verdict` is the label that the server gives; the log has each request before it is answered."""
import argparse
import asyncio
import hashlib
import http.client
import json
import math
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, namedtuple
from contextlib import contextmanager
from http import HTTPStatus

END = r'(?:<\||\n\s*\n#* *(?:Which|Preferred|Best|Example \d|Answer)\b|\Z)'
PAIRS = (  # a regex with one group for either output, the last match counts; the first pair that both match is taken
    (r'Output \(a\)(?: for example \d+)?[*"]*:(.*?)[\s#*"]*Output \(b\)',
     rf'Output \(b\)(?<!or Output \(b\))(?: for example \d+)?[*"]*:(.*?){END}'),
    (r'(?:^|\n)[#* ]*Output \(a\)[* ]*\n(.*?)[\s#*]*Output \(b\)', rf'\n[#* ]*Output \(b\)[* ]*\n(.*?){END}'),
    (r'<\|output_a\|>(.*?)<\|', r'<\|output_b\|>(.*?)(?:<\||\Z)'),
    (r'"(?:output|answer)": """(.*?)"""\s*\},', r'"""\s*\},.*?"(?:output|answer)": """(.*?)"""\s*\}'))
DEFAULTS = dict(
    latency=0., faults={}, seed=0, key='', retry_after=.05, hang=60., drip=1., batch_seconds=.2,
    regexes=PAIRS,                  # one pair, or several to try in turn
    labels=('m', 'M'),              # what names the outputs in logprobs, rankings and free strings
    # plain text: {letter} a or b, {label} of labels, {number} 1 or 2 and {other} the other, {bool} true or false, {hash} the prompt's
    template='Output ({letter})')
FAULTS = ('429', '500', '503', 'timeout', 'reset', 'truncated', 'badjson', 'schema', 'nologprobs', 'refusal',
          'unparseable', 'context', 'slowdrip', 'moderation', 'filter', 'echo', 'parts', 'surrogate')
ERRORS = {'429': (429, 'Rate limit reached for {model} on requests per min. Please try again in {after}s.', 'requests',
                  None, 'rate_limit_exceeded'),
          '500': (500, 'The server had an error while processing your request. Sorry about that!', 'server_error', None, None),
          '503': (503, 'The engine is currently overloaded, please try again later.', 'service_unavailable', None, None),
          'context': (400, "This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} "
                      'tokens. Please reduce the length of the messages.', 'invalid_request_error', 'messages',
                      'context_length_exceeded'),
          'moderation': (403, '{model} requires moderation and your input was flagged for "violence".', None, None, None),
          'filter': (400, 'The response was filtered.', 'invalid_request_error', 'prompt', 'content_filter'),
          'echo': (400, 'The header "authorization: Bearer {key}" came with a request that cannot be read.', None, None, None)}
JUDGED = r'completions$'
REFUSAL, NO_VERDICT = "I'm sorry, I can't assist with that request.", 'It depends: both have their merits.'
NAMING = re.compile('better|best|choice|prefer|winner|label|verdict', re.I)
TOKEN = re.compile(r' ?\w+|\s|[^\w\s]+')
LIKELY, UNLIKELY = math.log(.9), math.log(.1)
Request = namedtuple('Request', 'method path headers raw')
canonical = json.JSONEncoder(sort_keys=True, separators=(',', ':'), ensure_ascii=False).encode


def digest(text): return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()


def sha(body):
    "sha256 of a body's canonical JSON: keys sorted, no spaces, UTF-8."
    return digest(canonical(body))


# The verdict

def prompt_text(body):
    "All the text of a request: the contents of its messages one after the other, or the legacy prompt."
    if 'messages' not in body:
        prompt = body.get('prompt', '')
        return prompt if isinstance(prompt, str) else '\n'.join(map(str, prompt))
    contents = [m.get('content') or '' for m in body['messages']]
    return '\n'.join(c if isinstance(c, str) else '\n'.join(part.get('text', '') for part in c) for c in contents)


def verdict(body, options=DEFAULTS):
    "1 or 2: the longer of the two outputs in the prompt, the first when equally long; none found, a hash of the prompt."
    text, regexes = prompt_text(body), options.get('regexes', PAIRS)
    for pair in [regexes] if isinstance(regexes[0], str) else regexes:
        found = [re.findall(regex, text, re.S) for regex in pair]
        if all(found):
            first, second = (len(matches[-1].strip()) for matches in found)
            return 1 if first >= second else 2
    return 1 + int(digest(text), 16)%2


def filled(schema, label, labels, models):
    "A value that fits a JSON schema; the first enum, boolean or ranking in it says which output is better."
    left = [label]

    def value(s, name=''):
        while '$ref' in s or 'anyOf' in s or 'allOf' in s:
            s = schema['$defs'][s['$ref'].split('/')[-1]] if '$ref' in s else (s.get('anyOf') or s['allOf'])[0]
        kind = s.get('type', 'object' if 'properties' in s else 'string')
        if 'const' in s: return s['const']
        if 'enum' in s: return s['enum'][(left.pop() if left and len(s['enum']) > 1 else 1) - 1]
        if kind == 'boolean': return bool(left) and left.pop() == 1
        if kind in ('integer', 'number'): return label
        if kind == 'array': return ranking(s.get('items', {})) or [value(s.get('items', {}), name)]
        if kind == 'object': return {k: value(v, k) for k, v in s.get('properties', {}).items()}
        return labels[label - 1] if NAMING.search(name) else 'The longer output is better.'

    def ranking(items):
        "Best first: {model, rank} objects, or the models alone where strings are to be listed."
        names = [models[label - 1], models[2 - label]]
        if not {'model', 'rank'} <= items.get('properties', {}).keys(): return names if items == {'type': 'string'} else None
        left.clear()
        return [dict(model=model, rank=rank) for rank, model in enumerate(names, 1)]

    return value(schema)


def answer_text(body, label, options):
    "The verdict as text of the requested form, and the name of the function if one is called."
    labels, wanted = options['labels'], body.get('response_format') or {}
    marks = dict(letter='ab'[label - 1], label=labels[label - 1], number=str(label), other=str(3 - label),
                 bool=str(label == 1).lower(), hash=digest(prompt_text(body))[:8])
    models = list(dict.fromkeys(re.findall(r'"model(?:_identifier)?": "([^"]+)"', prompt_text(body))))
    models = models if len(models) == 2 else labels
    if body.get('tools') and body.get('tool_choice') != 'none':
        choice = body.get('tool_choice')
        name = choice['function']['name'] if isinstance(choice, dict) else body['tools'][0]['function']['name']
        function = next(t['function'] for t in body['tools'] if t['function']['name'] == name)
        return json.dumps(filled(function.get('parameters', {}), label, labels, models)), name
    if wanted.get('type') == 'json_schema':
        return json.dumps(filled(wanted['json_schema'].get('schema', {}), label, labels, models)), None
    if asks_logprobs(body) and wanted.get('type') != 'json_object': return labels[label - 1], None
    text = re.sub(r'\{(letter|label|number|other|bool|hash)\}', lambda m: marks[m[1]], options['template'])
    if wanted.get('type') == 'json_object' and not text.startswith('{'):
        text = json.dumps(dict(better=label, choice=labels[label - 1]))
    return text, None


# The wire format

def asks_logprobs(body): return body.get('logprobs') not in (None, False)


def cut(text, body, labels):
    "The text's tokens, as many as the request allows, and why they end."
    tokens = [text] if text in labels else TOKEN.findall(text)
    most = body.get('max_completion_tokens') or body.get('max_tokens') or len(tokens) + 1
    return tokens[:most], 'length' if len(tokens) >= most else 'stop'


def alternatives(token, labels):
    "A token with its log probability, the likeliest first; a label has the other label beside it."
    if token not in labels: return [(token, LIKELY)]
    return [(token, LIKELY), (labels[1] if token == labels[0] else labels[0], UNLIKELY)]


def chat_logprobs(tokens, labels, top):
    def entry(token, logprob, **more): return dict(token=token, logprob=logprob, bytes=list(token.encode()), **more)
    return dict(refusal=None, content=[
        entry(t, LIKELY, top_logprobs=[entry(*pair) for pair in alternatives(t, labels)[:top]]) for t in tokens])


def text_logprobs(tokens, labels, top, start):
    offsets = [start + len(''.join(tokens[:i])) for i in range(len(tokens))]
    return dict(tokens=tokens, token_logprobs=[LIKELY]*len(tokens), text_offset=offsets,
                top_logprobs=[dict(alternatives(t, labels)[:top]) for t in tokens] if top else None)


def chat_choice(body, label, options, fault):
    "The one choice of a chat completion, and its number of tokens."
    text, function = answer_text(body, label, options)
    if fault in ('unparseable', 'refusal'): text = NO_VERDICT if fault == 'unparseable' else REFUSAL
    tokens, finish = cut(text, body, options['labels'])
    message = dict(role='assistant', content=''.join(tokens), refusal=None)
    if fault == 'refusal': message.update(content=None, refusal=REFUSAL)
    elif function:
        call = dict(id=f'call_{sha(body)[:24]}', type='function', function=dict(name=function, arguments=''.join(tokens)))
        message.update(content=None, tool_calls=[call])
        if finish == 'stop' and not isinstance(body.get('tool_choice'), dict): finish = 'tool_calls'
    if fault == 'parts': message.update(content=[dict(type='thinking', thinking='Well.'), dict(type='text', text=message['content'])])
    if fault == 'surrogate': message.update(content=message['content'] + ' \ud83d')
    plain = asks_logprobs(body) and not function and fault not in ('nologprobs', 'refusal')
    logprobs = chat_logprobs(tokens, options['labels'], body.get('top_logprobs') or 0) if plain else None
    return dict(index=0, message=message, logprobs=logprobs, finish_reason=finish), len(tokens)


def text_choice(body, label, options, fault):
    "The choice of a legacy completion, and its number of tokens; a refusal can only be text there."
    text = {'unparseable': NO_VERDICT, 'refusal': REFUSAL}.get(fault) or answer_text(body, label, options)[0]
    tokens, finish = cut(text, body, options['labels'])
    plain = asks_logprobs(body) and fault != 'nologprobs'
    logprobs = text_logprobs(tokens, options['labels'], body['logprobs'], len(body['prompt'])) if plain else None
    return dict(index=0, text=''.join(tokens), logprobs=logprobs, finish_reason=finish), len(tokens)


def completion(path, body, options, fault, index):
    "The answer to a judge's request and the label it gives (a list of them where a legacy request has several prompts)."
    chat = path.endswith('/chat/completions')
    many = not chat and isinstance(body['prompt'], list)
    bodies = [dict(body, prompt=p) for p in body['prompt']] if many else [body]
    labels = [verdict(b, options) for b in bodies]
    choose = chat_choice if chat else text_choice
    choices, lengths = zip(*(choose(b, label, options, fault) for b, label in zip(bodies, labels)))
    for i, choice in enumerate(choices): choice['index'] = i
    read, wrote = sum(len(prompt_text(b))//4 for b in bodies), sum(lengths)
    head = dict(id=f'{"chatcmpl" if chat else "cmpl"}-{index}', object='chat.completion' if chat else 'text_completion',
                created=int(time.time()), model=body['model'])
    if fault == 'schema': return head | dict(output=dict(text=NO_VERDICT)), None
    usage = dict(prompt_tokens=read, completion_tokens=wrote, total_tokens=read + wrote)
    return head | dict(choices=list(choices), usage=usage, system_fingerprint='fp_judge'), labels if many else labels[0]


class Refused(Exception):
    "An answer that is an error, as OpenAI words it."
    def __init__(self, status, message, kind='invalid_request_error', param=None, code=None):
        self.status, self.content = status, dict(error=dict(message=message, type=kind, param=param, code=code))


# HTTP

async def read_request(reader, writer):
    "The next request of a connection, None when there is none."
    try:
        head = await reader.readuntil(b'\r\n\r\n')
        first, *lines = head.decode('latin-1').rstrip().split('\r\n')
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(':') for line in lines)}
        if 'expect' in headers: writer.write(b'HTTP/1.1 100 Continue\r\n\r\n')
        chunked = 'chunked' in headers.get('transfer-encoding', '')
        raw = await (read_chunks(reader) if chunked else reader.readexactly(int(headers.get('content-length', 0))))
    except (asyncio.IncompleteReadError, ConnectionError): return None
    method, path, _ = first.split(' ')
    return Request(method, path.partition('?')[0], headers, raw)


async def read_chunks(reader):
    parts = []
    while size := int((await reader.readuntil(b'\r\n')).split(b';')[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    while await reader.readuntil(b'\r\n') != b'\r\n': pass
    return b''.join(parts)


def response(status, content, index, retry_after=0):
    "The bytes of an answer: JSON, or text that is what it is."
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    more = f'Retry-After: {retry_after:g}\r\n' if status == 429 else ''
    head = (f'HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n'
            f'Content-Length: {len(body)}\r\nx-request-id: req_{index}\r\n{more}\r\n')
    return head.encode() + body


def parse_body(request):
    "What a request carries: JSON, or the fields of a multipart form; None if it is neither."
    found = re.search(r'multipart/form-data.*boundary="?([^";]+)', request.headers.get('content-type', ''))
    if not found:
        try: return json.loads(request.raw) if request.raw else {}
        except ValueError: return None
    fields = {}
    for part in request.raw.split(b'--' + found[1].encode())[1:-1]:
        head, _, content = part[2:-2].partition(b'\r\n\r\n')
        named = dict(re.findall(r'\b(name|filename)="([^"]*)"', head.decode()))
        fields[named['name']] = content.decode('utf-8', 'surrogateescape')
        if 'filename' in named: fields['filename'] = named['filename']
    return fields


# The server

def normalised(faults):
    "Each fault as a dict of p, times, always_for and on."
    out = {}
    for name, given in faults.items():
        given = dict(given) if isinstance(given, dict) else dict(p=given)
        fault = dict(p=0. if 'always_for' in given else 1., times=math.inf, always_for='', on=JUDGED) | given
        if name not in FAULTS: raise ValueError(f'no such fault: {name!r}; there are {", ".join(FAULTS)}')
        if len(fault) > 4: raise ValueError(f'the fault {name!r} has p, times, always_for and on, not {sorted(given)}')
        if not 0 <= fault['p'] <= 1: raise ValueError(f'the probability of the fault {name!r} is {fault["p"]}')
        out[name] = fault
    return out


class Server:
    "The requests, files and batches of one server."

    def __init__(self, options, log=''):
        self.options, self.faults, self.files, self.batches = dict(DEFAULTS), {}, {}, {}
        self.seen, self.used, self.inflight, self.index = Counter(), Counter(), 0, 0
        self.log_file = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644) if log else None
        if log:  # a server that is started again goes on in the same log
            with open(log, encoding='utf-8') as f: self.index = sum('"path"' in line for line in f)
        self.set(options)

    def set(self, given):
        "Change options; given faults replace all that were, and what they had used up is forgotten."
        if extra := given.keys() - DEFAULTS.keys(): raise ValueError(f'no such option: {", ".join(sorted(extra))}')
        if 'faults' in given: self.faults, self.used = normalised(given['faults']), Counter()
        self.options.update(given)

    def log(self, **record):
        "One line, handed to the system at once: it outlives the server."
        if self.log_file is not None: os.write(self.log_file, json.dumps(record).encode() + b'\n')

    def arrived(self, method, path, body, key, **more):
        "The record of a request, with the fault it meets, in the log before anything else happens."
        text, readable = canonical(body), isinstance(body, dict)
        body_id = digest(text)
        fault = self.choose_fault(path, body, text, body_id) if readable and not self.wrong_key(key) else None
        record = dict(index=self.index, time=time.time(), method=method, path=path, fault=fault, answered=False, status=None,
                      key=key, model=body.get('model') if readable else None, sha256=body_id, label=None,
                      inflight=self.inflight, **more)
        self.index += 1
        self.log(**record)
        return record

    def choose_fault(self, path, body, text, body_id):
        "The fault that this request meets, None for most."
        attempt = self.seen[body_id]
        self.seen[body_id] += 1
        free = {name: f for name, f in self.faults.items()
                if self.used[name, body_id] < f['times'] and re.search(f['on'], path)
                and (name != 'nologprobs' or asks_logprobs(body))}
        hit = [name for name, f in free.items() if f['always_for'] and re.search(f['always_for'], text)]
        chance = random.Random(f'{self.options["seed"]} {body_id} {attempt}').random() if free and not hit else 1
        for name, f in free.items():
            if 0 <= chance < f['p']: hit.append(name)
            chance -= f['p']
        if hit: self.used[hit[0], body_id] += 1
        return hit[0] if hit else None

    def wrong_key(self, key): return self.options['key'] not in ('', key)

    async def connection(self, reader, writer):
        "All the requests of one connection, one after the other."
        try:
            while request := await read_request(reader, writer):
                if not await self.serve(request, reader, writer): break
                if request.headers.get('connection', '').lower() == 'close': break
        except ConnectionError: pass
        finally: writer.close()

    async def serve(self, request, reader, writer):
        "Answer one request, as its fault has it; whether the connection goes on."
        if request.path == '/control': return self.control(request, writer)
        self.inflight += 1
        try:
            body, key = parse_body(request), request.headers.get('authorization', '').removeprefix('Bearer ')
            record = self.arrived(request.method, request.path, body, key)
            if self.options['latency'] and re.search(JUDGED, request.path) and record['fault'] not in ('429', 'context'):
                await asyncio.sleep(self.options['latency'])
            if reader.at_eof(): return False  # the client has left
            return await self.answer(record, body, reader, writer)
        finally: self.inflight -= 1

    def control(self, request, writer):
        "Change options while running; the answer holds all that are in force."
        try:
            self.set(json.loads(request.raw or b'{}'))
            writer.write(response(200, self.options, 'control'))
        except (ValueError, TypeError, AttributeError) as error:
            writer.write(response(400, dict(error=str(error)), 'control'))
        return True

    async def answer(self, record, body, reader, writer):
        "Send the answer, or what the fault makes of it; the log has it before the client has."
        fault, index = record['fault'], record['index']
        if fault == 'timeout': return await self.hold(reader)
        if fault == 'reset': return self.reset(writer)
        status, content, label = self.outcome(record, body, fault)
        data = response(status, content, index, self.options['retry_after'])
        if fault == 'truncated':
            self.log(index=index, status=status)
            writer.write(data[:-(len(data.partition(b'\r\n\r\n')[2])//2)])
            return False
        if fault == 'slowdrip': data = await self.drip(data, writer)
        if writer.transport.is_closing() or reader.at_eof(): return False
        self.log(index=index, answered=status == 200 and fault in (None, 'slowdrip'), status=status, label=label)
        writer.write(data)
        await writer.drain()
        return True

    async def hold(self, reader):
        "Keep the connection open without an answer, until the client disconnects or the time is up."
        try: await asyncio.wait_for(reader.read(1), self.options['hang'])
        except asyncio.TimeoutError: pass
        return False

    def reset(self, writer):
        "Close the connection with RST."
        writer.get_extra_info('socket').setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        writer.transport.abort()
        return False

    async def drip(self, data, writer):
        "All bytes but the last, one at a time, evenly over the option drip; the last byte is left."
        start = time.monotonic()
        for i in range(len(data) - 1):
            writer.write(data[i:i + 1])
            await asyncio.sleep(max(0, start + self.options['drip']*(i + 1)/len(data) - time.monotonic()))
            if writer.transport.is_closing(): break
        return data[-1:]

    def outcome(self, record, body, fault):
        "Status, content and label of the answer to a request."
        try:
            self.check(record, body)
            if fault in ERRORS:
                status, message, *rest = ERRORS[fault]
                tokens, after = len(prompt_text(body))//4, f'{self.options["retry_after"]:g}'
                given = dict(model=record['model'], key=record['key'], after=after, tokens=tokens, limit=max(1, tokens - 1))
                raise Refused(status, message.format(**given), *rest)
            if fault == 'badjson': return 200, b'upstream connect error {', None
            if not re.search(JUDGED, record['path']): return 200, self.resource(record, body), None
            content, label = completion(record['path'], body, self.options, fault, record['index'])
            return 200, content, None if fault in ('refusal', 'unparseable', 'truncated') else label
        except Refused as error: return error.status, error.content, None
        except Exception as error:
            traceback.print_exc()
            return 500, dict(error=dict(message=f'a fault of the judge server itself: {error!r}', type='judge_server')), None

    def check(self, record, body):
        "What OpenAI refuses: a wrong key, a body that is not JSON, and what the judge's two endpoints lack."
        if self.wrong_key(key := record['key']):
            raise Refused(401, f'Incorrect API key provided: {key[:2]}***{key[-2:]}. You can find your API key at '
                          'https://platform.openai.com/account/api-keys.', code='invalid_api_key')
        if not isinstance(body, dict): raise Refused(400, 'We could not parse the JSON body of your request.')
        if not re.search(JUDGED, record['path']): return
        if record['method'] != 'POST' or record['path'] not in ('/v1/completions', '/v1/chat/completions'): self.unknown(record)
        for name in ('model', 'messages' if 'chat' in record['path'] else 'prompt'):
            if body.get(name): continue
            raise Refused(400, f"Missing required parameter: '{name}'.", param=name, code='missing_required_parameter')
        if body.get('stream'): raise Refused(400, 'This server does not stream.', param='stream', code='unsupported_value')

    def unknown(self, record): raise Refused(404, f"Invalid URL ({record['method']} {record['path']})")

    # Files and batches

    def resource(self, record, body):
        "What is not a judgement: models, files, batches."
        where, method = record['path'].removeprefix('/v1/').split('/'), record['method']
        match (method, *where):
            case ('GET', 'models'):
                return dict(object='list', data=[dict(id='judge', object='model', created=0, owned_by='tests')])
            case ('POST', 'files'): return self.new_file(body['file'], body['purpose'], body.get('filename', ''))
            case ('GET', 'files', name): return self.find(self.files, name)[0]
            case ('GET', 'files', name, 'content'): return self.find(self.files, name)[1]
            case ('POST', 'batches'): return self.new_batch(body, record['key'])
            case ('GET', 'batches'): return dict(object='list', data=[b['public'] for b in self.batches.values()], has_more=False)
            case ('GET', 'batches', name): return self.see_batch(self.find(self.batches, name)['public'])
            case ('POST', 'batches', name, 'cancel'): return self.cancel_batch(self.find(self.batches, name))
        self.unknown(record)

    def find(self, things, name):
        if name not in things: raise Refused(404, f"No such object: {name}", param='id')
        return things[name]

    def new_file(self, text, purpose, name):
        "Store a file and return its description."
        data, id_ = text.encode('utf-8', 'surrogateescape'), f'file-{len(self.files) + 1}'
        described = dict(id=id_, object='file', bytes=len(data), created_at=int(time.time()), filename=name, purpose=purpose,
                         status='processed')
        self.files[id_] = described, data
        return described

    def new_batch(self, body, key):
        "A batch that will be answered in batch_seconds, or has failed at once if its file is not as it must be."
        if body.get('input_file_id') not in self.files: raise Refused(400, 'Invalid input file id.', param='input_file_id')
        lines, errors = parse_lines(self.files[body['input_file_id']][1], body['endpoint'])
        now, wait = time.time(), self.options['batch_seconds']
        public = {name: body.get(name) for name in ('endpoint', 'input_file_id', 'completion_window', 'metadata')} | dict(
            id=f'batch_{len(self.batches) + 1}', object='batch', status='failed' if errors else 'validating',
            created_at=int(now), expires_at=int(now) + 86400, output_file_id=None, error_file_id=None,
            errors=dict(object='list', data=errors) if errors else None,
            request_counts=dict(total=len(lines), completed=0, failed=0))
        self.batches[public['id']] = batch = dict(public=public, lines=lines, key=key, start=now, wait=wait)
        if not errors: batch['timer'] = asyncio.get_running_loop().call_later(wait, self.end_batch, batch, 'completed', lines)
        return public

    def see_batch(self, public):
        "A batch as it stands; one that was being cancelled is so from now on."
        shown = dict(public)
        if public['status'] == 'validating': public['status'] = 'in_progress'
        if public['status'] == 'cancelling': public.update(status='cancelled', cancelled_at=int(time.time()))
        return shown if shown['status'] == 'validating' else dict(public)

    def cancel_batch(self, batch):
        "Stop a batch: the share of lines that its time allowed is answered, and paid for."
        public, share = batch['public'], (time.time() - batch['start'])/max(batch['wait'], 1e-9)
        if public['status'] not in ('validating', 'in_progress'):
            raise Refused(409, f"Cannot cancel a batch with status '{public['status']}'.")
        batch['timer'].cancel()
        self.end_batch(batch, 'cancelling', batch['lines'][:int(share*len(batch['lines']))])
        return dict(public)

    def end_batch(self, batch, status, lines):
        "Answer the lines into an output and an error file, in an order of the server's own."
        rows, public = [self.batch_row(line, batch) for line in lines], batch['public']
        random.Random(self.options['seed']).shuffle(rows)
        good = [row['response'] is not None and row['response']['status_code'] == 200 for row in rows]
        public.update({'status': status, f'{status}_at': int(time.time())})
        public['request_counts'].update(completed=sum(good), failed=len(good) - sum(good))
        for name, kept in (('output', True), ('error', False)):
            text = ''.join(json.dumps(row) + '\n' for row, fine in zip(rows, good) if fine is kept)
            if text: public[f'{name}_file_id'] = self.new_file(text, 'batch_output', f'{public["id"]}_{name}.jsonl')['id']

    def batch_row(self, line, batch):
        "One line's answer; what breaks a connection is a server error here, and a timeout an expired request."
        more = dict(batch=batch['public']['id'], custom_id=line['custom_id'])
        record = self.arrived('POST', line['url'], line['body'], batch['key'], **more)
        fault, row = record['fault'], dict(id=f'batch_req_{record["index"]}', custom_id=line['custom_id'], error=None)
        if fault == 'timeout':
            return row | dict(response=None, error=dict(code='batch_expired', message='This request could not be executed before '
                                                        'the completion window expired.'))
        broken = fault in ('reset', 'truncated', 'badjson')
        status, content, label = self.outcome(record, line['body'], '500' if broken else fault)
        self.log(index=record['index'], answered=status == 200 and fault in (None, 'slowdrip'), status=status, label=label)
        return row | dict(response=dict(status_code=status, request_id=f'req_{record["index"]}', body=content))


def parse_lines(data, endpoint):
    "The lines of a batch's file, and what is wrong with them."
    lines, errors, names = [], [], set()
    for i, text in enumerate(data.decode('utf-8', 'replace').splitlines(), 1):
        try:
            line = json.loads(text)
            if line['url'] != endpoint: error = 'mismatched_url', 'The url does not match the endpoint of the batch.'
            elif line['custom_id'] in names: error = 'duplicate_custom_id', f'The custom_id {line["custom_id"]!r} is not unique.'
            elif line['method'] != 'POST' or not isinstance(line['body'], dict): error = 'invalid_request', 'Not a request.'
            else: error = None
            names.add(line['custom_id'])
            lines.append(line)
        except (ValueError, KeyError, TypeError): error = 'invalid_json_line', 'This line is not parseable as a request.'
        if error: errors.append(dict(code=error[0], message=error[1], line=i, param=None))
    return lines, errors if lines or errors else [dict(code='empty_file', message='The file is empty.', line=None, param=None)]


# Starting it

async def run(options, port, log, with_parent):
    server = await asyncio.start_server(Server(options, log).connection, '127.0.0.1', port, backlog=1024)
    if with_parent: asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: os._exit(0))
    print('listening on', server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--port', type=int, default=0)
    parser.add_argument('--log', default='')
    parser.add_argument('--with-parent', action='store_true', help='end when standard input does')
    for name, value in DEFAULTS.items():
        kind = type(value) if isinstance(value, (str, int, float)) else json.loads
        parser.add_argument(f'--{name.replace("_", "-")}', type=kind, default=value)
    args = vars(parser.parse_args())
    port, log, with_parent = (args.pop(name) for name in ('port', 'log', 'with_parent'))
    try: asyncio.run(run(args, port, log, with_parent))
    except KeyboardInterrupt: pass


class Client:
    "A running server as a test sees it."

    def __init__(self, process, port, log):
        self.process, self.port, self.log, self.url = process, port, log, f'http://127.0.0.1:{port}/v1'

    def requests(self):
        "Every request received, in order of arrival, each with what became of it."
        records = {}
        with open(self.log, encoding='utf-8') as f:
            for line in map(json.loads, f): records.setdefault(line['index'], {}).update(line)
        return list(records.values())

    def counts(self):
        "How many judgements met each fault, were answered well ('ok'), or got neither ('unanswered')."
        return Counter(r['fault'] or ('ok' if r['answered'] else 'unanswered')
                       for r in self.requests() if re.search(JUDGED, r['path']))

    def set(self, **options):
        "Change options of the running server."
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=10)
        connection.request('POST', '/control', json.dumps(options))
        answer = connection.getresponse()
        status, content = answer.status, json.loads(answer.read())
        connection.close()
        if status != 200: raise ValueError(content['error'])
        return content


@contextmanager
def judge_server(port=0, log='', **options):
    "A server in a process of its own for the length of the block; it dies with this process, however that ends."
    Server(options)  # what is wrong with the options is said here
    with tempfile.TemporaryDirectory() as folder:
        log = str(log or os.path.join(folder, 'log'))
        command = [sys.executable, __file__, '--port', str(port), '--log', log, '--with-parent']
        for name, value in options.items():
            command.append(f'--{name.replace("_", "-")}={value if isinstance(value, str) else json.dumps(value)}')
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            greeting = process.stdout.readline()
            if not greeting: raise RuntimeError(f'the server did not start; it ended with {process.wait()}')
            yield Client(process, int(greeting.split()[-1]), log)
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


if __name__ == '__main__': main()
