"A stand-in for the Hugging Face hub: it serves <kind>s/<owner>/<name>/<file> of a folder."
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = 'c0ffee' + '0'*34   # of main


def sha1(file): return hashlib.sha1(file.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args): pass

    def answer(self, status, body=b'', **headers):
        self.send_response(status)
        headers['Content-Length'] = len(body)
        for k, v in headers.items(): self.send_header(k.replace('_', '-'), str(v))
        self.end_headers()
        if self.command != 'HEAD': self.wfile.write(body)

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), Content_Type='application/json')

    def refuse(self, status, code, message):
        self.answer(status, b'{}', X_Error_Code=code, X_Error_Message=message)

    def do_HEAD(self): self.do_GET()

    def do_GET(self):
        parts = unquote(urlparse(self.path).path).strip('/').split('/')
        self.server.asked.append('/'.join(parts))
        api = parts[0] == 'api'
        kind, owner, name, *rest = parts[1:] if api else parts
        repo = self.server.root/kind/owner/name
        if (repo/'GATED').exists(): return self.refuse(403, 'GatedRepo', 'ask')
        if not repo.is_dir(): return self.refuse(404, 'RepoNotFound', 'no such repository')
        revision = '/'.join(rest[1:] if rest[:1] == ['revision'] else rest[1:2] or ['main'])
        if revision not in ('main', COMMIT):
            return self.refuse(404, 'RevisionNotFound', 'no such revision')
        files = {p.relative_to(repo).as_posix(): p for p in sorted(repo.rglob('*')) if p.is_file()}
        if api and rest[:1] == ['tree']:
            return self.answer_json([dict(type='file', path=n, size=p.stat().st_size, oid=sha1(p))
                                     for n, p in files.items()])
        if api:
            return self.answer_json(dict(
                id=f'{owner}/{name}', sha=COMMIT, private=False, gated=False, disabled=False,
                downloads=0, likes=0, tags=[], siblings=[dict(rfilename=n) for n in files]))
        file = files.get('/'.join(rest[2:]))      # resolve/<revision>/<file>
        if file is None: return self.refuse(404, 'EntryNotFound', 'no such file')
        self.answer(200, file.read_bytes(), ETag=f'"{sha1(file)}"', X_Repo_Commit=COMMIT)


def serve(root) -> ThreadingHTTPServer:
    "A running server with its `url`; `asked`: the paths of its requests; `shutdown()` ends it."
    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.root, server.asked = Path(root), []
    server.url = f'http://127.0.0.1:{server.server_port}'
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
