"""A server that only waits and answers, some 8,000 times a second: the client is measured.

with fast_server(latency=.05, slots=64) as server: server.url, server.counts()"""
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

OPTIONS = dict(latency=.05,   # seconds for an answer
               slots=0,       # requests worked on at a time, while others wait; 0 for all
               most=0)        # requests at a time, above which there is status 429
TEXT = "[{'model': 'model_1', 'rank': 1}, {'model': 'model_2', 'rank': 2}]"
MESSAGE = dict(role='assistant', content=TEXT, refusal=None)
ANSWER = dict(id='chatcmpl-1', object='chat.completion', created=1, model='judge',
              usage=dict(prompt_tokens=300, completion_tokens=20, total_tokens=320),
              choices=[dict(index=0, message=MESSAGE, logprobs=None, finish_reason='stop')])
REFUSAL = dict(error=dict(message='Rate limit reached', type='requests',
                          code='rate_limit_exceeded'))


def response(status, content, more=''):
    body = json.dumps(content)   # of ASCII alone
    return (f'HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{more}'
            f'Content-Length: {len(body)}\r\n\r\n{body}').encode()


GOOD = response('200 OK', ANSWER)
REFUSED = response('429 Too Many Requests', REFUSAL, 'Retry-After: 0.2\r\n')


class Server:
    def __init__(self, options):
        self.options, self.loop = SimpleNamespace(**options), asyncio.get_running_loop()
        self.queue, self.underway, self.busy = deque(), 0, 0
        self.seen = dict(first=0., last=0.)   # times of the first request and the last answer

    def asked(self, transport):
        if self.underway >= self.options.most > 0: return transport.write(REFUSED)
        self.underway += 1
        self.seen['first'] = self.seen['first'] or time.monotonic()
        self.queue.append(transport)
        self.work()

    def work(self):
        while self.queue and not self.busy >= self.options.slots > 0:
            self.busy += 1
            self.loop.call_later(self.options.latency, self.answer, self.queue.popleft())

    def answer(self, transport):
        self.busy, self.underway = self.busy - 1, self.underway - 1
        self.seen['last'] = time.monotonic()
        transport.write(GOOD)
        self.work()


class Connection(asyncio.Protocol):
    def __init__(self, server): self.server, self.data = server, b''

    def connection_made(self, transport): self.transport = transport

    def data_received(self, data):
        "Of requests only their ends are looked for; a GET is answered with the counts."
        self.data += data
        while (end := self.data.find(b'\r\n\r\n')) >= 0:
            head = self.data[:end].lower()
            length = head.partition(b'content-length:')[2].split(b'\r\n')[0]
            end += 4 + int(length or 0)
            if len(self.data) < end: return
            self.data = self.data[end:]
            if head.startswith(b'get'): self.transport.write(response('200 OK', self.server.seen))
            else: self.server.asked(self.transport)


async def run(options):
    server, loop = Server(options), asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(server), '127.0.0.1', 0, backlog=2048)
    print(listening.sockets[0].getsockname()[1], flush=True)
    loop.add_reader(sys.stdin.fileno(), lambda: sys.stdin.read() or sys.exit())
    await listening.serve_forever()


@contextmanager
def fast_server(**options):
    "A server in a process of its own for the length of the block: its `url` and `counts`."
    command = [sys.executable, __file__, json.dumps(OPTIONS | options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    url = f'http://127.0.0.1:{int(process.stdout.readline())}/v1'
    try: yield SimpleNamespace(url=url, counts=lambda: json.load(urllib.request.urlopen(url)))
    finally:
        process.kill()
        process.communicate()


if __name__ == '__main__':
    asyncio.run(run(json.loads(sys.argv[1])))
