"""Requests over connections of our own: encrypted ones, proxies, connections that the server closes, and what breaks off."""
import asyncio
import json
import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest

from alpaca_farm.core.ask.api import ApiConfig, make_connections
from alpaca_farm.core.ask.batches import ApiClient
from alpaca_farm.core.ask.connections import Connections
from fast_server import ANSWER, fast_server


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ('OPENAI_BASE_URL', 'OPENAI_ORG_ID', 'HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY', 'http_proxy', 'https_proxy', 'all_proxy', 'no_proxy', 'NO_PROXY'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('OPENAI_API_KEY', 'sk-a-key-of-the-tests')


class Handler(BaseHTTPRequestHandler):
    "Answers in chunks, and keeps each request's headers; closes the connection after an answer if the class says so."
    protocol_version, closes, seen = 'HTTP/1.1', False, []

    def do_POST(self):
        self.rfile.read(int(self.headers['content-length']))
        self.seen.append((self.client_address, self.path, dict(self.headers)))
        body = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header('Transfer-Encoding', 'chunked')
        self.end_headers()
        for part in (body[:7], body[7:], b''): self.wfile.write(b'%x\r\n%s\r\n' % (len(part), part))
        self.close_connection = self.closes    # without saying so

    def log_message(self, *args): pass


@pytest.fixture
def handler(): return type('Seen', (Handler,), dict(seen=[]))


@pytest.fixture
def server(handler):
    server = ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def ask(tmp_path, url, n=5):
    client = ApiClient(ApiConfig(base_url=url, store=str(tmp_path/'answers.sqlite'), tries=3, timeout=5.))
    assert None not in client([dict(model='judge', messages=[dict(role='user', content=f'ä {i}')]) for i in range(n)])
    return client


def test_the_key_and_the_organisation_are_sent(tmp_path, handler, server, monkeypatch):
    monkeypatch.setenv('OPENAI_ORG_ID', 'an-organisation')
    ask(tmp_path, f'http://127.0.0.1:{server.server_port}/my/v1')
    assert {path for _, path, _ in handler.seen} == {'/my/v1/chat/completions'}
    for _, _, headers in handler.seen:
        assert headers['Authorization'] == 'Bearer sk-a-key-of-the-tests' and headers['OpenAI-Organization'] == 'an-organisation'


@pytest.mark.skipif(not shutil.which('openssl'), reason='a certificate is made with openssl')
def test_encrypted_and_only_if_the_certificate_is_known(tmp_path, handler, server, monkeypatch):
    made = ['openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days', '2', '-subj', '/CN=localhost', '-addext', 'subjectAltName=DNS:localhost',
            '-keyout', tmp_path/'key.pem', '-out', tmp_path/'certificate.pem']
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path/'certificate.pem', tmp_path/'key.pem')
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f'https://localhost:{server.server_port}/v1'
    stranger = make_connections(openai.AsyncOpenAI(base_url=url, api_key='x'))
    with pytest.raises(ssl.SSLCertVerificationError): asyncio.run(stranger.post('/completions', {}))
    monkeypatch.setenv('SSL_CERT_FILE', str(tmp_path/'certificate.pem'))
    ask(tmp_path, url)
    assert len(handler.seen) == 5


def test_a_proxy_is_not_passed_over(tmp_path, monkeypatch):
    "The address does not exist; the proxy answers for it."
    with fast_server(latency=0.) as proxy:
        monkeypatch.setenv('HTTP_PROXY', proxy.url.removesuffix('/v1'))
        monkeypatch.setenv('http_proxy', proxy.url.removesuffix('/v1'))
        client = ask(tmp_path, 'http://no-such-host.invalid/v1')
        for name in ('HTTP_PROXY', 'http_proxy'): monkeypatch.delenv(name)
        assert client.connections is None and proxy.counts()['answered'] == 5


def test_a_password_in_the_address_is_not_sent_as_the_host(tmp_path, handler, server, monkeypatch):
    monkeypatch.setenv('OPENAI_BASE_URL', f'http://user:secret@127.0.0.1:{server.server_port}/v1')
    ask(tmp_path, '')
    assert {headers['Host'] for *_, headers in handler.seen} == {f'127.0.0.1:{server.server_port}'}


def test_a_connection_that_the_server_has_closed_is_not_used_again(handler, server):
    handler.closes = True
    async def three():
        connections = Connections(f'http://127.0.0.1:{server.server_port}/v1', {})
        for _ in range(3):
            assert json.loads(await connections.post('/completions', {})) == ANSWER
            await asyncio.sleep(.1)
        connections.close()
    asyncio.run(three())
    assert len({address for address, _, _ in handler.seen}) == 3


def test_an_abandoned_request_takes_its_connection_with_it():
    "Its answer would be taken for that of the next request."
    async def two():
        with fast_server(latency=.3) as server:
            connections = Connections(server.url, {})
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(.1): await connections.post('/completions', {})
            assert connections.idle == []
            assert json.loads(await connections.post('/completions', {})) == ANSWER and len(connections.idle) == 1
            connections.close()
    asyncio.run(two())


def test_a_key_with_a_line_break_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('OPENAI_API_KEY', 'sk-a-key\nX-Other: of the tests')
    with pytest.raises(ValueError, match='the header Authorization has a line break') as caught: ask(tmp_path, 'http://127.0.0.1:1/v1')
    assert 'sk-a-key' not in str(caught.value)


def test_a_server_that_has_moved_is_named_as_such(tmp_path, handler, server):
    def do_POST(self):
        self.rfile.read(int(self.headers['content-length']))
        self.send_response(308)
        self.send_header('Location', 'http://elsewhere/v1')
        self.send_header('Content-Length', '0')
        self.end_headers()
    handler.do_POST = do_POST
    with pytest.raises(ValueError, match='the endpoint has moved: give its new address as base_url'): ask(tmp_path, f'http://127.0.0.1:{server.server_port}/v1')


def test_a_server_that_takes_no_connection_is_not_a_slow_one(monkeypatch):
    from alpaca_farm.core.ask import connections
    async def hang(*_, **__): await asyncio.sleep(60)
    monkeypatch.setattr(connections.asyncio, 'open_connection', hang)
    monkeypatch.setattr(connections, 'CONNECT', .05)
    with pytest.raises(ConnectionError, match='no connection to 10.255.255.1:80'): asyncio.run(Connections('http://10.255.255.1:80/v1', {}).connect())
