"""The Hub on this machine's loopback, for the real client of ``huggingface_hub``.

It keeps repositories in memory, and every byte that it receives. It can drop a connection or answer
with an error once, and take large files by LFS, as the Hub does.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

USER = "reader-of-tests"
BASE = f"{USER}/tiny-base"
TOKEN = "hf_" + "LoopbackSecret" * 3
FIRST = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]
    operations: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Repository:
    private: bool
    commits: list[Commit]
    branches: dict[str, str]

    def at(self, revision: str) -> Commit | None:
        oid = self.branches.get(revision, revision)
        return next((each for each in self.commits if each.oid == oid), None)


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class LoopbackHub:
    """Serves until :meth:`close`; ``url`` is its endpoint.

    Attributes:
        faults: what goes wrong once, by kind of request ("create", "look", "preupload", "commit",
            "lfs", "yaml"): a status, or "drop" for a connection that breaks.
        by_lfs: whether weights are uploaded by LFS.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.blobs: dict[str, bytes] = {}
        self.faults: dict[str, Any] = {}
        self.by_lfs = False
        self.lock = threading.RLock()
        hub = self

        class Handler(_Handler):
            loopback = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    # -- what tests ask --

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """What a branch holds, without what the Hub itself put there."""
        commit = self.repositories[repository].at(revision)
        assert commit is not None
        return {name: text for name, text in commit.files.items() if name != ".gitattributes"}

    def pushes(self, repository: str) -> list[Commit]:
        """The commits, without that which made the repository."""
        return self.repositories[repository].commits[1:]

    def received(self) -> Iterator[tuple[str, bytes]]:
        """Everything that was sent: names, headers but the authorization, bodies, and what is
        encoded in them."""
        for request in self.requests:
            where = f"{request.method} {request.path}"
            yield where, unquote(request.path).encode()
            for name, value in request.headers.items():
                if name.lower() not in ("authorization", "host"):
                    yield f"{where}: {name}", value.encode()
            yield where, request.body
            for name, content in _encoded(request.body):
                yield f"{where}: {name}", content

    def add(
        self, repository: str, files: dict[str, bytes], message: str = "", branch: str = "main"
    ) -> None:
        """Put files into a repository, as its owner does on the web page."""
        there = self.repositories.setdefault(repository, _new(False))
        last = there.at(branch)
        assert last is not None
        _commit(there, branch, {**last.files, **files}, message, [])


class _Handler(BaseHTTPRequestHandler):
    loopback: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        body, path = self._body(), urlsplit(self.path).path
        with self.loopback.lock:
            self.loopback.requests.append(
                Request(self.command, self.path, dict(self.headers.items()), body)
            )
            for kind, pattern, methods, act in ROUTES:
                match = re.fullmatch(pattern, path)
                if match is None or self.command not in methods:
                    continue
                fault = self.loopback.faults.pop(kind, None)
                if fault == "drop":
                    self.close_connection = True
                    self.connection.close()
                    return
                if fault is not None:
                    return self.send(fault, {"error": f"planted {fault}"})
                return act(self, body, *map(unquote, match.groups()))
            self.send(404, {"error": f"no such route: {self.command} {path}"})

    do_HEAD = do_POST = do_PUT = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # -- who asks --

    def may_write(self, repository: str) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token != TOKEN:
            self.send(401, {"error": "Invalid username or password."})
            return False
        if not repository.startswith(f"{USER}/"):
            self.send(403, {"error": f"You may not write to {repository}"})
            return False
        return True

    def find(self, name: str, revision: str) -> tuple[Repository, Commit] | None:
        repository = self.loopback.repositories.get(name)
        authorized = (self.headers.get("Authorization") or "") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not authorized):
            self.send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        commit = repository.at(revision)
        if commit is None:
            self.send(404, {"error": "Revision not found"}, X_Error_Code="RevisionNotFound")
            return None
        return repository, commit

    # -- what they ask --

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        if not self.may_write(name):
            return
        url = f"{self.loopback.url}/{name}"
        if name in self.loopback.repositories:
            return self.send(409, {"error": "You already created this model repo", "url": url})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.loopback.repositories[name] = _new(private)
        self.send(200, {"url": url, "name": name})

    def validate(self, body: bytes) -> None:
        self.send(200, {"errors": [], "warnings": []})

    def look(self, body: bytes, name: str, revision: str | None = None) -> None:
        if (found := self.find(name, revision or "main")) is None:
            return
        repository, commit = found
        files = [{"rfilename": path} for path in commit.files]
        private = repository.private
        self.send(200, {"id": name, "sha": commit.oid, "private": private, "siblings": files})

    def tree(self, body: bytes, name: str, revision: str) -> None:
        if (found := self.find(name, revision)) is None:
            return
        rows = [
            {"type": "file", "path": path, "size": len(text), "oid": _digest(text)}
            for path, text in found[1].files.items()
        ]
        self.send(200, rows)

    def history(self, body: bytes, name: str, revision: str) -> None:
        if (found := self.find(name, revision)) is None:
            return
        alike = {"message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}
        commits = reversed(found[0].commits)
        self.send(200, [{"id": each.oid, "title": each.message, **alike} for each in commits])

    def branch(self, body: bytes, name: str, branch: str) -> None:
        if not self.may_write(name) or (found := self.find(name, "main")) is None:
            return
        start = json.loads(body or b"{}").get("startingPoint") or found[1].oid
        found[0].branches[branch] = start
        self.send(200, {})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        if not self.may_write(name) or self.find(name, revision) is None:
            return
        lfs = self.loopback.by_lfs
        paths = [each["path"] for each in json.loads(body)["files"]]
        modes = ["lfs" if lfs and path.endswith(".safetensors") else "regular" for path in paths]
        files = [
            {"path": path, "uploadMode": mode, "shouldIgnore": False}
            for path, mode in zip(paths, modes, strict=True)
        ]
        self.send(200, {"files": files})

    def commit(self, body: bytes, name: str, revision: str) -> None:
        if not self.may_write(name) or (found := self.find(name, revision)) is None:
            return
        repository, last = found
        lines = [json.loads(line) for line in body.splitlines()]
        header, files = lines[0]["value"], dict(last.files)
        if header.get("parentCommit") not in (None, last.oid):
            return self.send(412, {"error": "A commit has happened since."})
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.loopback.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                return self.send(400, {"error": f"unknown operation {line['key']}"})
        made = _commit(repository, revision, files, header["summary"], lines[1:])
        url = f"{self.loopback.url}/{name}/commit/{made.oid}"
        self.send(200, {"commitUrl": url, "commitOid": made.oid, "pullRequestUrl": None})

    def lfs_batch(self, body: bytes, name: str) -> None:
        rows = [
            {**each, "actions": {"upload": {"href": f"{self.loopback.url}/lfs/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        self.send(200, {"transfer": "basic", "objects": rows})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.send(400, {"error": "digest"})
        self.loopback.blobs[oid] = body
        self.send(200, {})

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        if (found := self.find(name, revision)) is None:
            return
        commit = found[1]
        if path not in commit.files:
            wrong = {"X_Error_Code": "EntryNotFound", "X_Repo_Commit": commit.oid}
            return self.send(404, {"error": "Entry not found"}, **wrong)
        text = commit.files[path]
        self.send(200, text, ETag=f'"{_digest(text)}"', X_Repo_Commit=commit.oid)


_REPO = r"([^/]+/[^/]+)"
_READ, _POST = ("GET", "HEAD"), ("POST",)
ROUTES: list[tuple[str, str, tuple[str, ...], Any]] = [
    ("create", r"/api/repos/create", _POST, _Handler.create),
    ("yaml", r"/api/validate-yaml", _POST, _Handler.validate),
    ("preupload", rf"/api/models/{_REPO}/preupload/([^/]+)", _POST, _Handler.preupload),
    ("commit", rf"/api/models/{_REPO}/commit/([^/]+)", _POST, _Handler.commit),
    ("branch", rf"/api/models/{_REPO}/branch/([^/]+)", _POST, _Handler.branch),
    ("history", rf"/api/models/{_REPO}/commits/([^/]+)", _READ, _Handler.history),
    ("tree", rf"/api/models/{_REPO}/tree/([^/]+).*", _READ, _Handler.tree),
    ("look", rf"/api/models/{_REPO}/revision/([^/]+)", _READ, _Handler.look),
    ("look", rf"/api/models/{_REPO}", _READ, _Handler.look),
    ("lfs", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", _POST, _Handler.lfs_batch),
    ("lfs", r"/lfs/([0-9a-f]+)", ("PUT",), _Handler.lfs_put),
    ("resolve", rf"/{_REPO}/resolve/([^/]+)/(.+)", _READ, _Handler.resolve),
]


def _new(private: bool) -> Repository:
    repository = Repository(private, [], {})
    _commit(repository, "main", dict(FIRST), "initial commit", [])
    return repository


def _commit(
    repository: Repository,
    branch: str,
    files: dict[str, bytes],
    message: str,
    operations: list[dict[str, Any]],
) -> Commit:
    number = len(repository.commits)
    made = Commit(_digest(f"{number} {sorted(files)}".encode()), message, files, operations)
    repository.commits.append(made)
    repository.branches[branch] = made.oid
    return made


def _digest(text: bytes) -> str:
    return hashlib.sha1(text).hexdigest()


def _encoded(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what JSON lines hold in base64: contents of files, and their beginnings."""
    for line in body.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        value = value.get("value", value) if isinstance(value, dict) else {}
        for each in (value, *(value.get("files") or ())):
            for key in ("content", "sample"):
                if key in each and (key == "sample" or each.get("encoding") == "base64"):
                    yield f"{each.get('path')} ({key})", base64.b64decode(each[key])
