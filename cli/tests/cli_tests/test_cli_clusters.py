"""Commands for clusters, without one: configuration, copies that are interrupted, texts of other programs."""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl_cli.clusters import volume
from scalerl_cli.clusters.runs import Run, advice, plain
from scalerl_cli.clusters.session import CommandFailed, Interrupted, Trouble, explained, open_session
from scalerl_cli.clusters.volume import Entry, Volume, reader_pod
from scalerl_cli.main import main, parser
from scalerl_operator.kube import errors


class Flaky(Volume):
    """A volume in memory whose connection ends after ``limit`` bytes."""

    files: dict[str, bytes]
    limit: int | None

    def read(self, entry: Entry, offset: int) -> Iterator[bytes]:
        if entry.path not in self.files:
            raise CommandFailed("no such file")
        data = self.files[entry.path][offset : entry.size]
        if self.limit is not None and len(data) > self.limit:
            yield data[: self.limit]
            raise Interrupted("reset")
        yield data

    def sha256(self, entry: Entry) -> str:
        return hashlib.sha256(self.files[entry.path][: entry.size]).hexdigest()


def flaky(files: dict[str, bytes], limit: int | None = None) -> tuple[Flaky, list[Entry]]:
    made: Any = Flaky(None, "ns", "pod", "c")  # type: ignore[arg-type]  # it connects to nothing
    object.__setattr__(made, "files", files)
    object.__setattr__(made, "limit", limit)
    return made, [Entry(path, len(data), 7) for path, data in sorted(files.items())]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume.time, "sleep", lambda seconds: None)


def test_copy_continues_while_bytes_come(tmp_path: Path) -> None:
    made, entries = flaky({"m/a.bin": bytes(range(200)), "m/b/c.json": b"{}"}, limit=30)
    volume.copy(made, entries, tmp_path / "model", strip="m/")
    assert (tmp_path / "model/a.bin").read_bytes() == bytes(range(200))
    assert sorted(p.name for p in (tmp_path / "model").rglob("*")) == ["a.bin", "b", "c.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_interrupted_copy_leaves_no_target_and_is_continued(tmp_path: Path) -> None:
    made, entries = flaky({"a": b"x" * 100}, limit=0)
    with pytest.raises(Trouble, match="0 of 100 bytes are here: repeat the command to continue"):
        volume.copy(made, entries, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    part = tmp_path / ".model.partial/a"
    part.write_bytes(b"x" * 60)
    asked: list[int] = []
    read = made.read
    object.__setattr__(made, "limit", None)
    object.__setattr__(made, "read", lambda entry, offset: asked.append(offset) or read(entry, offset))
    volume.copy(made, entries, tmp_path / "model")
    assert asked == [60]
    assert (tmp_path / "model/a").read_bytes() == b"x" * 100


def test_part_of_another_version_is_not_continued(tmp_path: Path) -> None:
    made, entries = flaky({"a": b"x" * 100}, limit=0)
    with pytest.raises(Trouble):
        volume.copy(made, entries, tmp_path / "model")
    (tmp_path / ".model.partial/a").write_bytes(b"y" * 60)
    made, _ = flaky({"a": b"z" * 100})
    volume.copy(made, [Entry("a", 100, 8)], tmp_path / "model")
    assert (tmp_path / "model/a").read_bytes() == b"z" * 100


def test_torn_bytes_are_refused(tmp_path: Path) -> None:
    made, entries = flaky({"a": b"x" * 100})
    object.__setattr__(made, "read", lambda entry, offset: iter([b"x" * 99 + b"y"]))
    with pytest.raises(Trouble, match="changed during the copy"):
        volume.copy(made, entries, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / ".model.partial/a").exists()


def test_files_of_a_journal_may_vanish(tmp_path: Path) -> None:
    made, entries = flaky({"a": b"1", "b": b"2"})
    del made.files["a"]
    volume.copy(made, entries, tmp_path / "rollouts", vanishing=True)
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["b"]
    with pytest.raises(Trouble, match="cannot be read"):
        volume.copy(made, entries, tmp_path / "model")


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "a/../../b"])
def test_paths_outside_of_the_run_are_refused(path: str) -> None:
    made, _ = flaky({})
    object.__setattr__(made, "_run", lambda script, *words: iter([f"3 7 {path}\n".encode()]))
    with pytest.raises(Trouble, match="outside of the run directory"):
        made.list(["m"])


def test_reader_pod_is_none_of_the_runs_and_only_reads() -> None:
    obj = {"metadata": {"name": "math", "namespace": "team"}, "spec": {"storage": {"claimName": "shared"}}}
    pod = reader_pod(Run(obj), "math-fetch-1", "busybox")
    assert pod["metadata"]["labels"] == {volume.READER_LABEL: "true"}
    mount = pod["spec"]["containers"][0]["volumeMounts"][0]
    assert (mount["readOnly"], mount["subPath"]) == (True, "math")
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "shared"
    assert not pod["spec"]["automountServiceAccountToken"]


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"kubeconfig": None, "context": None, "namespace": None} | given))


def kubeconfig(path: Path, name: str, server: str, namespace: str = "") -> Path:
    context = {"cluster": name, "user": name} | ({"namespace": namespace} if namespace else {})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": server}}],
        "users": [{"name": name, "user": {"token": f"token-of-{name}"}}],
        "contexts": [{"name": name, "context": context}],
        "current-context": name,
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_kubeconfigs_contexts_and_namespaces_as_in_kubectl(tmp_path: Path) -> None:
    one = kubeconfig(tmp_path / "one", "one", "http://127.0.0.1:1", "team-a")
    two = kubeconfig(tmp_path / "two", "two", "http://127.0.0.1:2")
    both = {"KUBECONFIG": f"{one}:{two}"}
    assert open_session(arguments(), both).namespace == "team-a"
    assert open_session(arguments(namespace="mine"), both).namespace == "mine"
    session = open_session(arguments(context="two"), both)
    assert session.namespace == "default"
    assert session._configuration.host == "http://127.0.0.1:2"
    with pytest.raises(Trouble, match="three") as refused:
        open_session(arguments(context="three"), both)
    assert refused.value.code == 2
    with pytest.raises(Trouble, match="no kubeconfig at"):
        open_session(arguments(kubeconfig=str(tmp_path / "none")), both)


def test_exec_plugin_gives_the_token(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", "one", "http://127.0.0.1:1")
    config = yaml.safe_load(path.read_text())
    answer = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "of-the-plugin"},
    }
    plugin = tmp_path / "plugin"
    plugin.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
    plugin.chmod(0o755)
    run = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(plugin),
        "interactiveMode": "Never",
    }
    config["users"][0]["user"] = {"exec": run}
    path.write_text(yaml.safe_dump(config))
    headers: dict[str, str] = {}
    open_session(arguments(kubeconfig=str(path)))._authorize(headers)
    assert headers == {"authorization": "Bearer of-the-plugin"}


class _NoScaleRL(http.server.BaseHTTPRequestHandler):
    """Answers as an API server without the CRD."""

    code = 404

    def do_GET(self) -> None:
        has_it = self.code == 404 and self.path.startswith("/api/v1/")
        body = b'{"items": []}' if has_it else b"404 page not found\n"
        self.send_response(200 if has_it else self.code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PATCH = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("code", "expected", "says"),
    [
        (404, 3, "ScaleRL is not installed in this cluster"),
        (401, 4, "log in again"),
        (503, 1, "page not found"),
    ],
)
def test_cluster_that_cannot_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, expected: int, says: str
) -> None:
    handler = type("Handler", (_NoScaleRL,), {"code": code})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path = kubeconfig(tmp_path / "config", "one", f"http://127.0.0.1:{server.server_port}")
        run = Path(__file__).parents[3] / "examples/tiny/run-kubernetes.yaml"
        for words in (["get"], ["why", "a"], ["logs", "a"], ["fetch", "a", "curve"], ["submit", str(run)]):
            assert main([*words, "--kubeconfig", str(path)]) == expected, words
            assert says in capsys.readouterr().err, words
        server.shutdown()


def test_unreachable_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = kubeconfig(tmp_path / "config", "one", "http://127.0.0.1:1")
    assert main(["get", "--kubeconfig", str(path)]) == 1
    assert "the API server cannot be reached" in capsys.readouterr().err


def test_refusals_of_admission_are_quoted_and_those_of_rbac_name_the_right() -> None:
    rbac = errors.Forbidden(
        'pods is forbidden: User "u" cannot list resource', what="list pods in the namespace a"
    )
    assert "ask for the verb 'list' of 'pods'" in str(explained(rbac))
    policy = errors.Forbidden(
        "ValidatingAdmissionPolicy 'x' denied request: no such registry", what="apply pods a/b"
    )
    assert str(explained(policy)) == f"apply pods a/b: {policy.message}"


def test_kubectl_plugin_is_installed_and_named_as_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["kubectl-scalerl"] == project["scripts"]["scalerl"] == "scalerl_cli.main:main"
    monkeypatch.setattr("sys.argv", ["/usr/local/bin/kubectl-scalerl"])
    assert parser().prog == "kubectl scalerl"


def test_texts_of_a_run_cannot_move_the_cursor() -> None:
    assert plain("a\x1b[2J\rb\n\x07c\u202e") == "a[2J b c"


def test_condition_of_another_release_has_advice() -> None:
    assert "Fix the cause soon" in advice({"type": "Degraded", "reason": "OfTheFuture"})
    assert advice({"type": "OfTheFuture", "reason": "OfTheFuture"}) == ""
