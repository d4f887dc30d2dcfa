"""The stand-in for all servers: `serve` runs one in this process, for the answers of a function;
`judge_server` is a judge that speaks OpenAI's wire format in a process of its own, and fails on
demand:

    with judge_server(latency=.05, faults={'429': .3}, seed=0) as server:
        OpenAI(base_url=server.url, api_key='k')

`server.set` changes any option of DEFAULTS. A fault is a probability, a regex of the body that
always meets it, or a dict of `p`, `times` (most per distinct body) and `always_for` (a regex). What
a request meets depends on the seed, its body and how often that has arrived, not on the order."""
import hashlib
import json
import math
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

END = r'(?:<\||\n\s*\n#* *(?:Which|Preferred|Best|Example \d|Answer)\b|\Z)'
PAIRS = (  # a regex with one group for either output; the last match counts
    (r'Output \(a\)(?: for example \d+)?[*"]*:(.*?)[\s#*"]*Output \(b\)',
     rf'Output \(b\)(?<!or Output \(b\))(?: for example \d+)?[*"]*:(.*?){END}'),
    (r'(?:^|\n)[#* ]*Output \(a\)[* ]*\n(.*?)[\s#*]*Output \(b\)',
     rf'\n[#* ]*Output \(b\)[* ]*\n(.*?){END}'),
    (r'<\|output_a\|>(.*?)<\|', r'<\|output_b\|>(.*?)(?:<\||\Z)'),
    (r'"(?:output|answer)": """(.*?)"""\s*\},',
     r'"""\s*\},.*?"(?:output|answer)": """(.*?)"""\s*\}'))
DEFAULTS = dict(
    latency=0., faults={}, seed=0, key='', model='',   # model: that answers, whatever is asked for
    hold=math.inf,                  # requests that are answered; the others wait until it changes
    usage=None,                     # reported with every answer, instead of its numbers of tokens
    regexes=PAIRS,
    labels=('m', 'M'),              # what names the outputs in log-probs and rankings
    # {letter} a or b, {number} 1 or 2 and {other} the other, {label}, {hash} of the prompt
    template='Output ({letter})')
ERRORS = {  # status, message and code
    '429': (429, 'Rate limit reached for requests per min.', 'rate_limit_exceeded'),
    '500': (500, 'The server had an error while processing your request. Sorry about that!', None),
    '503': (503, 'The engine is currently overloaded, please try again later.', None),
    'context': (400, 'The maximum context length is 9 tokens.', 'context_length_exceeded'),
    'echo': (400, 'The header "authorization: Bearer {key}" cannot be read.', None)}
ANSWERS = ('schema', 'nologprobs', 'refusal', 'unparseable', 'parts', 'surrogate', 'empty',
           'nested', 'badutf8')
BROKEN = 'timeout', 'reset', 'truncated', 'badjson', 'drip'
FAULTS = (*ERRORS, *ANSWERS, *BROKEN)
REFUSAL = "I'm sorry, I can't assist with that request."
NO_VERDICT = 'It depends: both have their merits.'
canonical = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


def digest(text): return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()


def prompt_text(body):
    "The contents of a request's messages one after the other, or its prompt."
    if 'messages' not in body: return body['prompt']
    return '\n'.join(m['content'] for m in body['messages'])


def verdict(body, options=DEFAULTS):
    "1 or 2: the longer output in the prompt, the first of equals; a hash of a prompt without."
    text, regexes = prompt_text(body), options['regexes']
    for pair in [regexes] if isinstance(regexes[0], str) else regexes:
        found = [re.findall(regex, text, re.S) for regex in pair]
        if all(found):
            first, second = (len(matches[-1].strip()) for matches in found)
            return 1 if first >= second else 2
    return 1 + int(digest(text), 16) % 2


def filled(schema, label, labels):
    "A value that fits a JSON schema and prefers the output `label`."
    if 'enum' in schema: return schema['enum'][label - 1]
    if schema.get('type') == 'array':
        return [dict(model=labels[i - 1], rank=k) for k, i in ((1, label), (2, 3 - label))]
    if 'properties' not in schema: return 'The longer output is better.'
    return {k: filled(v, label, labels) for k, v in schema['properties'].items()}


def completion(body, options, fault):
    "The answer to a request: a chat completion, or one of a text."
    label, labels, chat = verdict(body, options), options['labels'], 'messages' in body
    schema = (body.get('response_format') or {}).get('json_schema')
    top, tool = body.get('logprobs'), next(iter(body.get('tools') or []), None)
    marks = dict(letter='ab'[label - 1], label=labels[label - 1], number=str(label),
                 other=str(3 - label), hash=digest(prompt_text(body))[:8])
    text = re.sub(r'\{(\w+)\}', lambda m: marks[m[1]], options['template'])
    if schema: text = json.dumps(filled(schema['schema'], label, labels))
    if tool: text = json.dumps(filled(tool['function']['parameters'], label, labels))
    if top: text = labels[label - 1]
    text = dict(unparseable=NO_VERDICT, refusal=REFUSAL).get(fault, text)
    tokens = [text] if text in labels else re.findall(r' ?\w+|\s|[^\w\s]+', text)
    most = body.get('max_completion_tokens') or body.get('max_tokens') or math.inf
    text = ''.join(tokens[:int(min(most, len(tokens)))])
    choice = dict(index=0, finish_reason='length' if len(tokens) >= most else 'stop')
    sizes = len(prompt_text(body))//4, len(tokens)
    usage = dict(prompt_tokens=sizes[0], completion_tokens=sizes[1], total_tokens=sum(sizes))
    if options['usage'] is not None: usage = options['usage']
    answer = dict(id='1', object='chat.completion' if chat else 'text_completion', created=0,
                  model=options['model'] or body['model'], choices=[choice], usage=usage)
    if fault == 'schema': return answer | dict(choices=None)
    likely = {text: math.log(.9)}
    if text in labels: likely[labels[2 - label]] = math.log(.1)
    if fault == 'nologprobs': top = None
    if not chat:
        choice |= dict(text=text, logprobs=dict(top_logprobs=[likely]) if top else None)
        return answer
    message = choice['message'] = dict(role='assistant', content=text, refusal=None)
    if top:
        entries = [dict(token=t, logprob=p) for t, p in likely.items()]
        choice['logprobs'] = dict(content=[dict(entries[0], top_logprobs=entries)])
    if tool and fault not in ('refusal', 'unparseable'):
        function = dict(name=tool['function']['name'], arguments=text)
        call = dict(id='call', type='function', function=function)
        message |= dict(content=None, tool_calls=[call])
    if fault == 'refusal': message |= dict(content=None, refusal=text)
    if fault == 'empty':
        message['content'], choice['finish_reason'] = None, 'content_filter'
    if fault == 'surrogate': message['content'] += ' \ud83d'
    if fault == 'parts':
        thought = dict(type='thinking', thinking='Well.')
        message['content'] = [thought, dict(type='text', text=text)]
    return answer


def error(status, message, code=None):
    return status, dict(error=dict(message=message, type='error', code=code))


class Handler(BaseHTTPRequestHandler):
    "One connection; the server's `answer(handler, body)` replies to each request."
    protocol_version, disable_nagle_algorithm = 'HTTP/1.1', True

    def log_message(self, *args): pass

    def do_GET(self):
        self.server.answer(self, self.rfile.read(int(self.headers.get('Content-Length', 0))))

    do_POST = do_HEAD = do_GET

    def begin(self, status, size, **headers):
        "The head of an answer of a number of bytes."
        self.send_response(status)
        for name, value in dict(headers, Content_Length=size).items():
            self.send_header(name.replace('_', '-'), str(value))
        self.end_headers()

    def reply(self, status, content, **headers):
        "Answer with bytes, a text, or a value as JSON."
        if isinstance(content, str): content = content.encode()
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers['Content_Type'] = 'application/json'
        self.begin(status, len(content), **headers)
        if self.command != 'HEAD': self.wfile.write(content)


class Server(ThreadingHTTPServer):
    "A server of `answer`, a function, on a free port, with its `url`."
    daemon_threads, request_queue_size = True, 1024

    def __init__(self, answer):
        super().__init__(('127.0.0.1', 0), Handler)
        self.answer, self.url = answer, f'http://127.0.0.1:{self.server_port}'


@contextmanager
def serve(answer):
    "A server of this process for the length of the block."
    with Server(answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try: yield server
        finally: server.shutdown()


class Judge:
    "The requests of a judge."
    def __init__(self, options):
        self.options, self.records = dict(DEFAULTS), []
        self.changed, self.seen, self.used = threading.Condition(), Counter(), Counter()
        self.set(options)

    def set(self, given):
        "Change options; given faults replace all that were."
        if 'faults' in given:
            self.used.clear()
            for name, fault in given['faults'].items():
                if name not in FAULTS: raise ValueError(f'no such fault: {name}')
                if isinstance(fault, str): fault = dict(always_for=fault)
                given['faults'][name] = fault if isinstance(fault, dict) else dict(p=fault)
        with self.changed:
            self.options |= given
            self.changed.notify_all()

    def arrived(self, method, path, body, **more):
        "The record of a request, with the fault that it meets, once it may be answered."
        record = dict(time=time.time(), method=method, path=path, model=body.get('model'),
                      fault=None, answered=False, **more)
        with self.changed:
            if path.endswith('completions'): record['fault'] = self.choose_fault(canonical(body))
            self.records.append(record)
            number = len(self.records)
            self.changed.wait_for(lambda: number <= self.options['hold'])
        return record

    def choose_fault(self, text):
        "The fault that the request meets, None for most."
        attempt = self.seen[text]
        self.seen[text] += 1
        chance = random.Random(f'{self.options["seed"]} {digest(text)} {attempt}').random()
        for name, fault in self.options['faults'].items():
            if self.used[name, text] >= fault.get('times', math.inf): continue
            if name == 'nologprobs' and '"logprobs"' not in text: continue
            always = 'always_for' in fault and re.search(fault['always_for'], text)
            if always or 0 <= chance < fault.get('p', 0 if 'always_for' in fault else 1):
                self.used[name, text] += 1
                return name
            chance -= fault.get('p', 0)

    def judge(self, record, body, key):
        "Status and content of the answer to a request for a completion."
        fault = record['fault']
        if self.options['key'] not in ('', key): return error(401, 'Incorrect API key provided.')
        if fault in ERRORS:
            status, message, code = ERRORS[fault]
            return error(status, message.format(key=key), code)
        record['answered'] = fault is None
        return 200, completion(body, self.options, fault)

    def answer(self, handler, raw):
        "Reply to a request, or meet its fault."
        path, key = handler.path.partition('?')[0], (handler.headers['Authorization'] or '')[7:]
        if path == '/control':
            if raw: self.set(json.loads(raw))
            return handler.reply(200, self.records)
        body = json.loads(raw)
        record = self.arrived(handler.command, path, body)
        fault = record['fault']
        if fault not in ERRORS: time.sleep(self.options['latency'])
        status, content = self.judge(record, body, key)
        if fault in BROKEN: return self.break_off(handler, status, content, fault)
        data = json.dumps(content).encode()
        if fault == 'nested': data = data[:-1] + b', "more": ' + b'['*3000 + b']'*3000 + b'}'
        if fault == 'badutf8': data = data.replace(b'"id": "1"', b'"id": "\xff\\\xff\0\n"')
        handler.reply(status, data, **dict(Retry_After=.05) if status == 429 else {})

    def break_off(self, handler, status, content, fault):
        "Send no answer, or a broken one."
        data = json.dumps(content).encode()
        if fault == 'badjson': return handler.reply(status, b'upstream connect error {')
        if fault == 'timeout': return handler.connection.recv(1)   # until the client has left
        handler.close_connection = True
        if fault == 'reset':
            linger = struct.pack('ii', 1, 0)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return handler.connection.close()
        handler.begin(status, len(data))
        if fault == 'truncated': return handler.wfile.write(data[:len(data)//2])
        with suppress(OSError):   # drip: a few bytes now and then, until the client has left
            for i in range(100):
                handler.wfile.write(data[i*len(data)//100:(i + 1)*len(data)//100])
                time.sleep(.2)


class Client:
    "A running server as a test sees it."
    def __init__(self, port): self.url = f'http://127.0.0.1:{port}/v1'

    def set(self, **options):
        "Change options; all requests so far."
        url, data = self.url.replace('/v1', '/control'), json.dumps(options).encode()
        with urllib.request.urlopen(url, data) as answer: return json.load(answer)

    def requests(self):
        "Every request received, in order of arrival, each with what became of it."
        return self.set()

    def counts(self):
        "How many requests to judge met each fault, were answered well ('ok'), or neither."
        return Counter(r['fault'] or ('ok' if r['answered'] else 'unanswered')
                       for r in self.requests() if r['path'].endswith('completions'))


@contextmanager
def judge_server(**options):
    "A server in a process of its own for the length of the block; it dies with this process."
    command = [sys.executable, __file__, json.dumps(options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try: yield Client(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


if __name__ == '__main__':
    server = Server(Judge(json.loads(sys.argv[1])).answer)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever).start()
    sys.stdin.read()   # until the test's process has ended
    os._exit(0)
