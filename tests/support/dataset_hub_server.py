"""A hub of data sets on loopback, with the part of its HTTP API that huggingface_hub uses to read data sets, and its errors.

``/api/datasets/NAME/revision/REV`` and ``…/tree/REV`` describe a repository, ``/datasets/NAME/resolve/REV/PATH`` has a file (HEAD for its
ETag and commit). Errors are distinguished by ``X-Error-Code``, as huggingface_hub's ``hf_raise_for_status`` reads them: a repository that is
missing, or private for this token, is a 401 without a token and a 404 with one; the files of a gated one are a 401 or 403.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKENS = {"hf_accepted": True, "hf_other": False}
"""Tokens that the hub knows, and whether their accounts have accepted the terms of gated data sets."""


@dataclass
class Repository:
    """A data set: files by commit, and commit by branch or tag."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    private: bool = False


@dataclass
class Hub:
    """Serves :attr:`repositories`; used as a context manager."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    failing: bool = False
    """Answer everything with 503."""

    def __enter__(self) -> Hub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path}")
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.failing:
            return _refuse(request, 503, "", "the hub is down")
        if token and token not in TOKENS:
            return _refuse(request, 401, "", "Invalid credentials in Authorization header")
        described = re.fullmatch(r"/api/datasets/(.+?)/(revision|tree)/([^/]+)", path)
        resolved = re.fullmatch(r"/datasets/(.+?)/resolve/([^/]+)/(.+)", path)
        match = described or resolved
        if match is None:
            return _refuse(request, 404, "", "no such path")
        found = self.repositories.get(match[1])
        if found is None or (found.private and not token):
            return _refuse(request, 404 if token else 401, "RepoNotFound", "Repository not found")
        revision = match[3] if described else match[2]
        commit = found.refs.get(revision, revision)
        if commit not in found.commits:
            return _refuse(request, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = found.commits[commit]
        if described is not None and described[2] == "revision":
            names = [{"rfilename": name} for name in files]
            about = {"id": match[1], "sha": commit, "siblings": names, "private": found.private, "tags": []}
            return _send(
                request, json.dumps(about | {"gated": "auto" if found.gated else False}).encode(), {}
            )
        if described is not None:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return _send(request, json.dumps(entries).encode(), {})
        if found.gated and not TOKENS.get(token, False):
            what = f"Access to dataset {match[1]} is restricted."
            return _refuse(request, 403 if token else 401, "GatedRepo", what)
        assert resolved is not None
        if resolved[3] not in files:
            return _refuse(request, 404, "EntryNotFound", "Entry not found")
        data = files[resolved[3]]
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        return _send(request, data, {"X-Repo-Commit": commit, "ETag": etag})


def _send(request: BaseHTTPRequestHandler, data: bytes, headers: dict[str, str]) -> None:
    request.send_response(200)
    for name, value in (headers | {"Content-Length": str(len(data))}).items():
        request.send_header(name, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(data)


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
    data = json.dumps({"error": message}).encode()
    request.send_response(status)
    headers = {"X-Error-Message": message, "Content-Length": str(len(data))}
    for name, value in (headers | ({"X-Error-Code": code} if code else {})).items():
        request.send_header(name, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(data)
