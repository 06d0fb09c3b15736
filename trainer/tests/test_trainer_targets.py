"""Copies to a hub and to a bucket, over HTTP to servers on loopback."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TOKEN = "hf_secret"


class HubServer:
    """The part of a hub's API that an upload of small files needs; refuses what a hub refuses."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.commits: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if found := re.fullmatch(
                    r"/api/models/([^/]+/[^/]+)/(?:tree|revision)/([^/?]+).*", self.path
                ):
                    files = hub.repos.get(found[1], {}).get(found[2])
                    if files is None:
                        return self.answer(404, {"error": "Revision Not Found"})
                    if "/tree/" in self.path:
                        entries = [
                            {"type": "file", "path": p, "size": len(b), "oid": "0" * 40}
                            for p, b in files.items()
                        ]
                        return self.answer(200, entries)
                    return self.answer(
                        200, {"id": found[1], "sha": "0" * 40, "siblings": [{"rfilename": p} for p in files]}
                    )
                return self.answer(404, {"error": self.path})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"] or 0))
                if self.headers["authorization"] != f"Bearer {TOKEN}":
                    return self.answer(401, {"error": "Invalid credentials"})
                if self.path == "/api/repos/create":
                    asked = json.loads(body)
                    name = f"{asked['organization']}/{asked['name']}"
                    if name in hub.repos:
                        return self.answer(
                            409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
                        )
                    hub.repos[name] = {"main": {}}
                    return self.answer(200, {"url": f"{hub.url}/{name}"})
                if self.path == "/api/validate-yaml":
                    return self.answer(200, {"errors": [], "warnings": []})
                found = re.fullmatch(
                    r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/([^/?]+).*", self.path
                )
                if found is None or found[1] not in hub.repos:
                    return self.answer(404, {"error": "Repository Not Found"})
                repo, what, revision = hub.repos[found[1]], found[2], found[3]
                if what == "branch":
                    if revision in repo:
                        return self.answer(409, {"error": "Reference already exists"})
                    repo[revision] = dict(repo["main"])
                    return self.answer(200, {})
                if revision not in repo:
                    return self.answer(404, {"error": "Revision Not Found"})
                if what == "preupload":
                    files = [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in json.loads(body)["files"]
                    ]
                    return self.answer(200, {"files": files})
                lines = [json.loads(line) for line in body.splitlines()]
                files = dict(repo[revision])
                for line in lines:
                    value = line["value"]
                    if line["key"] == "header":
                        hub.commits.append((revision, value["summary"]))
                    elif line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "deletedFile":
                        del files[value["path"]]
                repo[revision] = files
                return self.answer(
                    200, {"commitUrl": f"{hub.url}/{found[1]}/commit/1", "commitOid": "0" * 40}
                )

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                if status == 404:
                    kind = "RevisionNotFound" if "Revision" in str(body) else "RepoNotFound"
                    self.send_header("X-Error-Code", kind)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


PUT = """
    import sys
    from pathlib import Path
    from scalerl_api.exports import ExportedModel
    from scalerl_trainer.targets import TargetError, open_target

    def model(text):
        version, _, uri = text.partition("=")
        found = ExportedModel(version=int(version), reward=0.5, path="", uri=uri, time="")
        return found, Path(f"step-{int(version):08d}")

    try:
        print(open_target(sys.argv[1]).put({"best": model(sys.argv[2]), "last": model(sys.argv[3])}))
    except TargetError as error:
        print(f"TargetError: {error}")
"""


def put(directory: Path, to: str, best: str, last: str, **environ: str) -> str:
    """In a process of its own: the client reads its endpoint when it is imported."""
    for version in (best, last):
        folder = directory / f"step-{int(version.split('=')[0]):08d}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(f'{{"version": "{folder.name}"}}')
        (folder / f"{folder.name}.safetensors").write_bytes(folder.name.encode() * 1000)
    clean = {
        n: v
        for n, v in os.environ.items()
        if not n.startswith(("HF_", "AWS_")) and not n.lower().endswith("_proxy")
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PUT), to, best, last],
        cwd=directory,
        env=clean | {"HF_HOME": str(directory / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_hub_holds_the_best_as_main_and_the_last_beside_it(tmp_path: Path, hub: HubServer) -> None:
    environ = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    said = put(tmp_path, "hf://me/model", "10", "20", **environ)
    assert said == "{20: 'hf://me/model@last', 10: 'hf://me/model'}"
    repo = hub.repos["me/model"]
    assert set(repo["main"]) >= {"config.json", "step-00000010.safetensors"}
    assert repo["last"]["config.json"] == b'{"version": "step-00000020"}'
    assert put(tmp_path, "hf://me/model", "20", "30", **environ) == (
        "{30: 'hf://me/model@last', 20: 'hf://me/model'}"
    )
    assert repo.keys() == {"main", "last"}
    for revision, version in (("main", 20), ("last", 30)):
        weights = [p for p in hub.repos["me/model"][revision] if p.endswith("safetensors")]
        assert weights == [f"step-{version:08d}.safetensors"], "shards of the model before are gone"
    assert hub.commits[0] == ("last", "last: version 20, reward 0.5000")
    assert len(hub.commits) == 4, "one commit each"


def test_a_hub_that_refuses_or_is_not_there_is_said(tmp_path: Path, hub: HubServer) -> None:
    said = put(tmp_path, "hf://me/model", "10", "10", HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
    assert re.match(r"TargetError: hf://me/model: .*401", said)
    assert hub.repos == {}
    said = put(tmp_path, "hf://me/model", "10", "10", HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN=TOKEN)
    assert re.match(r"TargetError: hf://me/model: ConnectError: .*refused", said)
