"A stand-in for the Hugging Face hub: it serves <kind>s/<owner>/<name>/<file> of a folder."
import hashlib
from urllib.parse import unquote, urlparse

COMMIT = 'c0ffee' + '0'*34   # of main


def sha1(file): return hashlib.sha1(file.read_bytes()).hexdigest()


def hub(root, asked):
    "What `judge_server.serve` answers for the repositories under a folder; `asked`: the paths."
    def answer(handler, body):
        parts = unquote(urlparse(handler.path).path).strip('/').split('/')
        asked.append('/'.join(parts))
        api = parts[0] == 'api'
        kind, owner, name, *rest = parts[1:] if api else parts
        repo = root/kind/owner/name
        def refuse(status, code, message):
            handler.reply(status, {}, X_Error_Code=code, X_Error_Message=message)
        if (repo/'GATED').exists():
            return refuse(403, 'GatedRepo', 'ask')
        if not repo.is_dir():
            return refuse(404, 'RepoNotFound', 'no such repository')
        revision = '/'.join(rest[1:] if rest[:1] == ['revision'] else rest[1:2] or ['main'])
        if revision not in ('main', COMMIT):
            return refuse(404, 'RevisionNotFound', 'no such revision')
        files = {p.relative_to(repo).as_posix(): p for p in sorted(repo.rglob('*')) if p.is_file()}
        if api and rest[:1] == ['tree']:
            return handler.reply(200, [
                dict(type='file', path=n, size=p.stat().st_size, oid=sha1(p))
                for n, p in files.items()])
        if api:
            return handler.reply(200, dict(
                id=f'{owner}/{name}', sha=COMMIT, private=False, gated=False, disabled=False,
                downloads=0, likes=0, tags=[], siblings=[dict(rfilename=n) for n in files]))
        file = files.get('/'.join(rest[2:]))      # resolve/<revision>/<file>
        if file is None:
            return refuse(404, 'EntryNotFound', 'no such file')
        handler.reply(200, file.read_bytes(), ETag=f'"{sha1(file)}"', X_Repo_Commit=COMMIT)
    return answer
