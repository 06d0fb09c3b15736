"""Copies to a hub and to a bucket, over HTTP to servers on loopback."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, S3Server

from scalerl_api.exports import ExportedModel
from scalerl_trainer.export_targets import TargetError, open_target

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
    from scalerl_trainer.export_targets import TargetError, open_target

    def model(text):
        version, _, uri = text.partition("=")
        found = ExportedModel(version=int(version), reward=0.5, path="", uri=uri, time="")
        return found, Path(f"step-{int(version):08d}")

    try:
        print(open_target(sys.argv[1]).put({"best": model(sys.argv[2]), "last": model(sys.argv[3])}))
    except TargetError as error:
        print(f"TargetError: {error}")
"""


def folder_of(directory: Path, version: int) -> Path:
    folder = directory / f"step-{version:08d}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(f'{{"version": "{folder.name}"}}')
    (folder / f"{folder.name}.safetensors").write_bytes(folder.name.encode() * 1000)
    return folder


def put(directory: Path, to: str, best: str, last: str, **environ: str) -> str:
    """In a subprocess: the client reads its endpoint on import."""
    for version in (best, last):
        folder_of(directory, int(version.split("=")[0]))
    environment = {
        n: v
        for n, v in os.environ.items()
        if not n.startswith(("HF_", "AWS_")) and not n.lower().endswith("_proxy")
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PUT), to, best, last],
        cwd=directory,
        env=environment | {"HF_HOME": str(directory / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hub_has_best_in_main_and_last_in_branch(tmp_path: Path, hub: HubServer) -> None:
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


def models(folder: Path, uri: str = "") -> dict[str, tuple[ExportedModel, Path]]:
    version = int(folder.name.removeprefix("step-"))
    return {"last": (ExportedModel(version=version, reward=0.5, path="p", uri=uri, time="t"), folder)}


def test_folder_with_other_files_is_copied_again(tmp_path: Path) -> None:
    """As of a backup that was restored into the target: the status says that the model is there."""
    to, source = tmp_path / "to", folder_of(tmp_path, 10)
    uris = open_target(str(to)).put(models(source))
    copy = to / source.name
    kept = {file.name: file.read_bytes() for file in source.iterdir()}
    for spoil in (
        lambda: (copy / "config.json").write_text("{"),
        lambda: (copy / "old").touch(),
        lambda: shutil.rmtree(copy),
    ):
        spoil()
        assert open_target(str(to)).put(models(source, uris[10])) == uris
        assert {file.name: file.read_bytes() for file in copy.iterdir()} == kept


def test_removed_copy_of_a_model_that_is_gone_does_not_hold_up_the_next(tmp_path: Path) -> None:
    """As after the loss of a trainer's own directory."""
    to, first, second = tmp_path / "to", folder_of(tmp_path, 10), folder_of(tmp_path, 20)
    uri = open_target(str(to)).put(models(first))[10]
    shutil.rmtree(first)
    shutil.rmtree(to / first.name)
    best = models(first, uri)["last"]
    uris = open_target(str(to)).put({"best": best, **models(second)})
    assert uris[20] == str(to / second.name)
    assert sorted(folder.name for folder in to.iterdir()) == [second.name]


def test_hub_errors(tmp_path: Path, hub: HubServer) -> None:
    said = put(tmp_path, "hf://me/model", "10", "10", HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
    assert re.match(r"TargetError: hf://me/model: .*401", said)
    assert hub.repos == {}
    said = put(tmp_path, "hf://me/model", "10", "10", HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN=TOKEN)
    assert re.match(r"TargetError: hf://me/model: ConnectError: .*refused", said)


# --- a bucket --------------------------------------------------------------------------------------------


def put_in_bucket(to: str, directory: Path, best: int, last: int, known: int = -1) -> dict[int, str]:
    """``known``: the version that the bucket has already."""

    def model(version: int) -> tuple[ExportedModel, Path]:
        uri = f"{to}/step-{version:08d}" if version == known else ""
        exported = ExportedModel(version=version, reward=0.5, path="", uri=uri, time="")
        return exported, folder_of(directory, version)

    return open_target(to).put({"best": model(best), "last": model(last)})


def test_bucket_mirrors_models(tmp_path: Path, s3: S3Server) -> None:
    to = f"s3://{BUCKET}/a/b"
    large = folder_of(tmp_path, 10) / "large"
    large.write_bytes(bytes(range(256)) * (12 << 12))  # 12 MiB: in parts
    assert put_in_bucket(to, tmp_path, 10, 20) == {10: f"{to}/step-00000010", 20: f"{to}/step-00000020"}
    sent = {f"a/b/{f.parent.name}/{f.name}": f.read_bytes() for f in tmp_path.glob("step-*/*")}
    index = {
        role: {"version": v, "reward": 0.5, "uri": f"{to}/step-{v:08d}"}
        for role, v in (("best", 10), ("last", 20))
    }
    objects = s3.objects()
    assert json.loads(objects.pop("a/b/exports.json")) == index
    assert objects == sent

    before = s3.written("a/b/step-00000020/config.json")
    put_in_bucket(to, tmp_path, 20, 30, known=20)
    assert {p.split("/")[2] for p in s3.objects()} == {"exports.json", "step-00000020", "step-00000030"}
    assert s3.written("a/b/step-00000020/config.json") == before, "what is there is not sent again"
    put_in_bucket(to, tmp_path, 40, 40)
    assert s3.sent("a/b/step-00000040/config.json") == 1, "best and last in one"


@pytest.mark.parametrize("after", [0, 1, 5])
def test_bucket_error_keeps_earlier_copies(tmp_path: Path, s3: S3Server, after: int) -> None:
    """At once, within a multipart upload, or after it."""
    to = f"s3://{BUCKET}/refused-{after}"
    put_in_bucket(to, tmp_path, 10, 10)
    before = s3.objects()
    (folder_of(tmp_path, 20) / "a-large").write_bytes(bytes(12 << 20))
    s3.refuse(after)
    try:
        with pytest.raises(TargetError, match=rf"^{to}: PermissionDeniedError: .* 403 Forbidden"):
            put_in_bucket(to, tmp_path, 10, 20, known=10)
    finally:
        s3.refuse(float("inf"))
    assert s3.objects().items() >= before.items(), "exports.json names what it named"
    put_in_bucket(to, tmp_path, 10, 20, known=10)
    objects = s3.objects()
    assert objects[f"refused-{after}/step-00000020/a-large"] == bytes(12 << 20)
    assert json.loads(objects[f"refused-{after}/exports.json"])["last"]["version"] == 20


def test_bucket_unreachable_raises(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match=r"^s3://other/a: there is no such bucket$"):
        put_in_bucket("s3://other/a", tmp_path, 10, 10)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("scalerl_api.object_store._RETRIES", {"max_retries": 3})
    with pytest.raises(TargetError, match=rf"^s3://{BUCKET}/a: GenericError: .*after 3 retries"):
        put_in_bucket(f"s3://{BUCKET}/a", tmp_path, 10, 10)
