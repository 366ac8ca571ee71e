"""A stand-in for a model hub: the plain HTTP protocol of huggingface_hub, and what was sent to it."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

TOKEN, READS_ONLY = "hf_writes", "hf_reads"
COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a dictionary of files; large files come apart from their commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.visibility: dict[str, str | None] = {}
        self.messages: list[str] = []
        self.large: dict[str, bytes] = {}
        self.commits: dict[str, str] = {}
        """Of repositories with another commit than `COMMIT`."""
        self.gated: set[str] = set()
        """Repositories that are shown to nobody who has no token."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, repo: str, folder: Path, inside: str = "") -> None:
        """Add the files of a folder to a repository, and give it the commit of its content."""
        files = self.repos.setdefault(repo, {})
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                files[f"{inside}{path.relative_to(folder).as_posix()}"] = path.read_bytes()
        self.note_commit(repo)

    def note_commit(self, repo: str) -> None:
        """Give a repository the commit of its content."""
        digest = hashlib.sha1()
        for name, content in sorted(self.repos[repo].items()):
            digest.update(name.encode() + content)
        self.commits[repo] = digest.hexdigest()

    def write(self, repo: str, folder: Path) -> Path:
        """The files of a repository as a folder."""
        for name, content in self.repos[repo].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self._body()
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        path = unquote(self.path.split("?")[0])
        if token != TOKEN:
            return self._answer({"error": "no"}, 403 if token == READS_ONLY else 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.visibility.setdefault(name, asked.get("visibility"))
            is_there = name in self.server.repos
            self.server.repos.setdefault(name, {})
            url = f"{self.server.endpoint}/{name}"
            return self._answer({"url": url, "error": "is there"}, 409 if is_there else 200)
        if path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return self._answer({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = {
                name: "lfs" if name.endswith((".safetensors", ".png")) else "regular"
                for name in names
            }
            files = [
                {"path": n, "uploadMode": mode, "shouldIgnore": False} for n, mode in modes.items()
            ]
            return self._answer({"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.server.endpoint}/large/{one['oid']}"}}
            return self._answer({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            repo = self.server.repos[match[1]]
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.server.messages.append(value["summary"])
                elif line["key"] == "file":
                    repo[value["path"]] = base64.b64decode(value["content"])
                else:
                    assert line["key"] == "lfsFile"
                    repo[value["path"]] = self.server.large[value["oid"]]
            url = f"{self.server.endpoint}/{match[1]}/commit/{COMMIT}"
            return self._answer({"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None})
        return self._answer({"error": f"no such route: {path}"}, 404)

    def do_PUT(self) -> None:
        content, oid = self._body(), self.path.split("/")[-1]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.large[oid] = content
        self._answer({})

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.+)?", path):
            files = self.server.repos.get(match[1])
            if files is None:
                return self._answer({"error": "Repository not found"}, 404, "RepoNotFound")
            if match[1] in self.server.gated and "Authorization" not in self.headers:
                return self._answer({"error": "Access is restricted"}, 401, "GatedRepo")
            commit = self.server.commits.get(match[1], COMMIT)
            siblings = [{"rfilename": name, "size": len(one)} for name, one in files.items()]
            return self._answer(
                {"id": match[1], "sha": commit, "siblings": siblings, "private": False}
            )
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/?", path):
            rows = self.server.repos[match[1]].items()
            return self._answer(
                [
                    {"type": "file", "path": name, "size": len(one), "oid": _oid(one)}
                    for name, one in rows
                ]
            )
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.server.repos[match[1]].get(match[2])
            if content is None:
                return self._answer({"error": "Entry not found"}, 404)
            commit = self.server.commits.get(match[1], COMMIT)
            return self._send(content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit})
        return self._answer({"error": f"no such route: {path}"}, 404)

    do_HEAD = do_GET

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content: Any, status: int = 200, code: str | None = None) -> None:
        headers = {"Content-Type": "application/json"}
        if code is not None:
            headers["X-Error-Code"] = code
        self._send(json.dumps(content).encode(), headers, status)

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
