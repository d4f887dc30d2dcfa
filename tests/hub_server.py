"A stand-in for the Hugging Face hub: it serves the repositories in a folder, <kind>s/<owner>/<name>/<file>, over HTTP."
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = 'c0ffee' + '0'*34   # of main


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args): pass

    def answer(self, status, body=b'', head=False, **headers):
        self.send_response(status)
        for k, v in dict(headers, Content_Length=len(body)).items(): self.send_header(k.replace('_', '-'), str(v))
        self.end_headers()
        if not head: self.wfile.write(body)

    def do_HEAD(self): self.do_GET(head=True)

    def do_GET(self, head=False):
        parts = unquote(urlparse(self.path).path).strip('/').split('/')
        self.server.asked.append('/'.join(parts))
        api = parts[0] == 'api'
        kind, owner, name, *rest = parts[1:] if api else parts
        repo = self.server.root/kind/owner/name
        if (repo/'GATED').exists(): return self.answer(403, b'{}', head, X_Error_Code='GatedRepo', X_Error_Message='ask')
        if not repo.is_dir(): return self.answer(404, b'{}', head, X_Error_Code='RepoNotFound', X_Error_Message='no such repository')
        revision = '/'.join(rest[1:]) if rest[:1] == ['revision'] else rest[1] if len(rest) > 1 else 'main'
        if revision not in ('main', COMMIT):
            return self.answer(404, b'{}', head, X_Error_Code='RevisionNotFound', X_Error_Message='no such revision')
        files = {p.relative_to(repo).as_posix(): p for p in sorted(repo.rglob('*')) if p.is_file()}
        if api and rest[:1] == ['tree']:
            tree = [dict(type='file', path=n, size=p.stat().st_size, oid=hashlib.sha1(p.read_bytes()).hexdigest()) for n, p in files.items()]
            return self.answer(200, json.dumps(tree).encode(), head, Content_Type='application/json')
        if api:
            info = dict(id=f'{owner}/{name}', sha=COMMIT, private=False, gated=False, disabled=False, downloads=0, likes=0, tags=[],
                        siblings=[dict(rfilename=n) for n in files])
            return self.answer(200, json.dumps(info).encode(), head, Content_Type='application/json')
        file = files.get('/'.join(rest[2:]))      # resolve/<revision>/<file>
        if file is None: return self.answer(404, b'{}', head, X_Error_Code='EntryNotFound', X_Error_Message='no such file')
        body = file.read_bytes()
        self.answer(200, body, head, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=COMMIT)


def serve(root) -> ThreadingHTTPServer:
    "A running server; `asked` lists the paths of its requests, `url` is its address, `shutdown()` ends it."
    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.root, server.asked, server.url = Path(root), [], f'http://127.0.0.1:{server.server_address[1]}'
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
