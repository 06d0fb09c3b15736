"""Commands for clusters, without one: configuration, copies that are interrupted, texts of other programs."""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl_cli.clusters import logs, volume
from scalerl_cli.clusters.runs import Run, advice, plain
from scalerl_cli.clusters.session import (
    ClusterProblem,
    CommandFailed,
    Interrupted,
    Session,
    explained,
    open_session,
)
from scalerl_cli.clusters.submit import submit
from scalerl_cli.clusters.volume import Entry, Volume, reader_pod
from scalerl_cli.clusters.why import explain
from scalerl_cli.main import main, parser
from scalerl_operator.kube import errors
from scalerl_operator.kube.kinds import Kind
from scalerl_operator.kube.types import Object


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

    def sha256(self, entry: Entry) -> Sequence[str]:
        data = self.files[entry.path][: entry.size]
        return [hashlib.sha256(data).hexdigest()] if data else []

    def list(self, paths: Sequence[str]) -> list[Entry]:
        return [Entry(path, len(data)) for path, data in self.files.items() if path in paths]


def flaky(files: dict[str, bytes], limit: int | None = None) -> tuple[Flaky, list[Entry]]:
    made: Any = Flaky(None, "ns", "pod", "c")  # type: ignore[arg-type]  # it connects to nothing
    object.__setattr__(made, "files", files)
    object.__setattr__(made, "limit", limit)
    return made, [Entry(path, len(data)) for path, data in sorted(files.items())]


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
    with pytest.raises(ClusterProblem, match="0 of 100 bytes are here: repeat the command to continue"):
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
    with pytest.raises(ClusterProblem):
        volume.copy(made, entries, tmp_path / "model")
    (tmp_path / ".model.partial/a").write_bytes(b"y" * 60)
    made, _ = flaky({"a": b"z" * 100})
    volume.copy(made, [Entry("a", 100)], tmp_path / "model")
    assert (tmp_path / "model/a").read_bytes() == b"z" * 100


def test_torn_bytes_are_refused(tmp_path: Path) -> None:
    made, entries = flaky({"a": b"x" * 100})
    object.__setattr__(made, "read", lambda entry, offset: iter([b"x" * 99 + b"y"]))
    with pytest.raises(ClusterProblem, match="changed during the copy"):
        volume.copy(made, entries, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / ".model.partial/a").exists()


def test_files_of_a_journal_may_vanish(tmp_path: Path) -> None:
    made, entries = flaky({"a": b"1", "b": b"2"})
    del made.files["a"]
    volume.copy(made, entries, tmp_path / "rollouts", vanishing=True)
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["b"]
    with pytest.raises(ClusterProblem, match="cannot be read"):
        volume.copy(made, entries, tmp_path / "model")


class Shell(Volume):
    """A volume in a directory of this machine, read by the scripts that containers run."""

    root: Path

    def _run(self, script: str, *words: str) -> Iterator[bytes]:
        done = subprocess.run(["sh", "-c", script, "sh", str(self.root), *words], capture_output=True)
        if done.returncode:
            raise CommandFailed(done.stderr.decode())
        yield done.stdout


def shell(root: Path) -> Volume:
    made: Any = Shell(None, "ns", "pod", "c")  # type: ignore[arg-type]  # it connects to nothing
    object.__setattr__(made, "root", root)
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("listing", "says"),
    [
        *((f"3 {path}\n".encode(), "outside of what") for path in ("../../etc/passwd", "/etc/passwd", "n/b")),
        *(
            (f"3 {path}\n".encode(), "outside of what")
            for path in ("m/../b", "m//home/u/.bashrc", "m/./b", "m/", "mm")
        ),
        (b"3 m/a\xff\n", r"'m/a\\udcff' of the volume cannot be copied: rename it"),
        ("3 m/a\x85b\n".encode(), "cannot be copied"),
        (b"3 m/a\nb\n", "the line 'b', which is no file"),
        (b"busybox: applet not found\n", "which is no file"),
        (b"3 m/a\n4 m/", "ends within a line"),
    ],
)
def test_listings_that_cannot_be_used_are_refused(listing: bytes, says: str) -> None:
    made = shell(Path())
    object.__setattr__(made, "_run", lambda script, *words: iter([listing]))
    with pytest.raises(ClusterProblem, match=says):
        made.list(["m"])


def test_files_are_listed_read_and_hashed_in_ranges_by_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run/m").mkdir(parents=True)
    big = bytes(range(256)) * (5 << 13)
    for name, data in {"big": big, "empty": b"", "listing.json": b"{}", "a b": b"1"}.items():
        (tmp_path / "run/m" / name).write_bytes(data)
    made = shell(tmp_path / "run")
    sums = volume._SUM.replace("count=64", "count=4").replace(str(volume.RANGE), str(4 << 20))
    monkeypatch.setattr(volume, "_SUM", sums)
    monkeypatch.setattr(volume, "RANGE", 4 << 20)
    entries = made.list(["m", "none"])
    assert [entry.path for entry in entries] == ["m/a b", "m/big", "m/empty", "m/listing.json"]
    assert len(made.sha256(entries[1])) == 3
    (tmp_path / "run/m/big").write_bytes(big + b"more")
    assert b"".join(made.read(entries[1], len(big) - 5)) == big[-5:]
    volume.copy(made, entries, tmp_path / "model", strip="m/")
    assert (tmp_path / "model/big").read_bytes() == big
    assert (tmp_path / "model/listing.json").read_bytes() == b"{}"


def test_links_in_the_staging_directory_are_not_followed(tmp_path: Path) -> None:
    made, entries = flaky({"a": b"1", "d/b": b"2"})
    outside = tmp_path / "home"
    outside.mkdir()
    (outside / "a").write_bytes(b"")
    staging = tmp_path / ".model.partial"
    staging.mkdir()
    (staging / "a").symlink_to(outside / "a")
    (staging / "d").symlink_to(outside)
    volume.copy(made, entries, tmp_path / "model")
    assert (outside / "a").read_bytes() == b""
    assert [p.name for p in outside.iterdir()] == ["a"]
    link = tmp_path / "link"
    link.symlink_to(outside / "a")
    with pytest.raises(OSError, match="symbolic links"):
        volume._open(link, os.O_CREAT)


def test_copy_of_a_live_run_continues_files_that_grew(tmp_path: Path) -> None:
    made, _ = flaky({"gone": b"1", "log": b"x" * 50})
    staging = tmp_path / ".rollouts.partial"
    staging.mkdir()
    (staging / "log").write_bytes(b"x" * 50)
    (staging / "gone").write_bytes(b"1")
    made.files["log"] = b"x" * 50 + b"y" * 10
    asked: list[int] = []
    read = made.read
    object.__setattr__(made, "read", lambda entry, offset: asked.append(offset) or read(entry, offset))
    volume.copy(made, [Entry("log", 60)], tmp_path / "rollouts", vanishing=True)
    assert asked == [50]
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["log"]
    assert (tmp_path / "rollouts/log").read_bytes() == made.files["log"]


@pytest.mark.parametrize("fault", ["denied", "no sha256sum", "torn"])
def test_only_files_that_no_longer_exist_are_left_out(tmp_path: Path, fault: str) -> None:
    made, entries = flaky({"a": b"1", "b": b"2"})

    def fail(*_: object) -> Any:
        if fault == "torn":
            return ["of other bytes"]
        raise CommandFailed(fault)

    object.__setattr__(made, "read" if fault == "denied" else "sha256", fail)
    with pytest.raises(ClusterProblem, match="a: it ") as refused:
        volume.copy(made, entries, tmp_path / "rollouts", vanishing=True)
    assert refused.value.code == 1
    assert not (tmp_path / "rollouts").exists()


def test_reader_pod_is_none_of_the_runs_and_only_reads() -> None:
    obj: Any = {
        "metadata": {"name": "math", "namespace": "team"},
        "spec": {"storage": {"claimName": "shared"}},
    }
    placed = {"nodeSelector": {"pool": "runs"}, "tolerations": [{"key": "runs", "operator": "Exists"}]}
    obj["spec"]["podTemplate"] = placed
    pod = reader_pod(Run(obj), "math-fetch-1", "busybox")
    assert {field: pod["spec"][field] for field in placed} == placed
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
    for stale in (None, "deleted"):
        config = yaml.safe_load(one.read_text())
        config["current-context"] = stale
        if stale is None:
            del config["current-context"]
        other = tmp_path / "stale"
        other.write_text(yaml.safe_dump(config))
        assert open_session(arguments(context="one", kubeconfig=str(other))).namespace == "team-a"
        with pytest.raises(ClusterProblem, match="the kubeconfig cannot be used"):
            open_session(arguments(kubeconfig=str(other)))
    for broken in (
        "- a",
        "{contexts: {a: b}, clusters: 3, users: []}",
        one.read_text().replace("http://127.0.0.1:1", "3"),
    ):
        other.write_text(broken)
        with pytest.raises(ClusterProblem, match="the kubeconfig cannot be used"):
            open_session(arguments(context="one", kubeconfig=str(other)))
    with pytest.raises(ClusterProblem, match="three") as refused:
        open_session(arguments(context="three"), both)
    assert refused.value.code == 2
    with pytest.raises(ClusterProblem, match="no kubeconfig at"):
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


class Cluster(Session):
    """Objects in memory. It refuses what an API server does in a namespace or of a kind that it does not have."""

    def __init__(self) -> None:
        self.namespace = "default"
        self.kinds = {"Namespace": False, "CustomResourceDefinition": False, "ConfigMap": True}
        self.applied: list[str] = []
        self.namespaces = {"default"}

    def kind(self, api_version: str, name: str) -> Kind | None:
        return Kind(name, api_version, name.lower(), self.kinds[name]) if name in self.kinds else None

    def apply(self, kind: Kind, namespace: str | None, body: Object, *, dry_run: bool, force: bool) -> Object:
        if kind.name not in self.kinds or (namespace and namespace not in self.namespaces):
            raise errors.NotFound(f"no {kind.name} in {namespace}", code=404)
        if not dry_run:
            self.applied.append(kind.name)
            self.namespaces |= {body["metadata"]["name"]} if kind.name == "Namespace" else set()
            if kind.name == "CustomResourceDefinition":
                self.kinds[body["spec"]["names"]["kind"]] = True
        return body


NEW_NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "new"}}
NEW_KIND = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "gadgets.example.org"},
    "spec": {
        "group": "example.org",
        "scope": "Namespaced",
        "names": {"kind": "Gadget", "plural": "gadgets"},
        "versions": [{"name": "v1"}],
    },
}


class Queue(Session):
    """A queue of Kueue: first another's pod, then the run's preparation. It serves only the older version of the visibility API."""

    def __init__(self) -> None: ...

    def raw(self, path: str, what: str) -> Object:
        if "/v1beta1/namespaces/a/localqueues/gpus/" not in path:
            raise errors.NotFound("no such version", code=404)
        owners = [
            {"kind": "Job", "name": "run-2-prepare", "uid": "2"},
            {"kind": "Job", "name": "run-prepare", "uid": "3"},
        ]
        return {
            "items": [
                {"metadata": {"ownerReferences": [owner]}, "positionInLocalQueue": n}
                for n, owner in enumerate(owners)
            ]
        }

    def list(
        self, kind: Kind | str, namespace: str | None, labels: str = "", fields: str = ""
    ) -> list[Object]:
        if kind != "Workload":
            return [{"metadata": {"uid": "4"}, "status": {}}]
        owners = [
            {"kind": "Job", "name": "run-2-prepare", "uid": "2"},
            {"kind": "Pod", "name": "run-generator-1-2", "uid": "4"},
        ]
        return [
            {
                "metadata": {"ownerReferences": [owner]},
                "status": {
                    "conditions": [
                        {"type": "QuotaReserved", "status": "False", "message": f"{owner['name']} lacks it"}
                    ]
                },
            }
            for owner in owners
        ]


def test_queued_run_has_its_position_and_what_it_lacks() -> None:
    condition = {
        "type": "Admitted",
        "status": "False",
        "reason": "WaitingForQuota",
        "message": "prepare in the queue gpus",
    }
    labels = {"kueue.x-k8s.io/queue-name": "gpus"}
    run = Run(
        {
            "metadata": {"name": "run", "namespace": "a", "uid": "1", "labels": labels},
            "status": {"phase": "Pending", "conditions": [condition]},
        }
    )
    cause, _ = explain(Queue(), run)
    assert cause == "prepare in the queue gpus; position 2 in the queue gpus; run-generator-1-2 lacks it"


def submitted(path: Path, *objects: Mapping[str, Any], **given: Any) -> tuple[Cluster, argparse.Namespace]:
    path.write_text(yaml.safe_dump_all(objects))
    flags = {"manifests": [str(path)], "force_conflicts": False, "dry_run": False}
    return Cluster(), arguments(**(flags | given))


def test_submission_with_its_own_namespace_and_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gadget = {"apiVersion": "example.org/v1", "kind": "Gadget", "metadata": {"name": "g", "namespace": "new"}}
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "new"}}
    everything = (gadget, settings, NEW_NAMESPACE, NEW_KIND)
    cluster, given = submitted(tmp_path / "all.yaml", *everything, dry_run=True)
    assert submit(cluster, given) == 0
    assert not cluster.applied
    assert "ConfigMap new/c: not tried" in capsys.readouterr().out
    cluster, given = submitted(tmp_path / "all.yaml", *everything)
    assert submit(cluster, given) == 0
    assert cluster.applied == ["Namespace", "CustomResourceDefinition", "Gadget", "ConfigMap"]
    cluster, given = submitted(tmp_path / "all.yaml", settings, NEW_KIND)
    with pytest.raises(ClusterProblem, match="nothing was applied"):
        submit(cluster, given)
    assert not cluster.applied


def test_namespace_of_an_object_may_not_contradict_the_flag(tmp_path: Path) -> None:
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "default"}}
    cluster, given = submitted(tmp_path / "c.yaml", settings, namespace="other")
    with pytest.raises(ClusterProblem, match="namespace default, not other of -n") as refused:
        submit(cluster, given)
    assert refused.value.code == 2
    assert submit(cluster, argparse.Namespace(**vars(given) | {"namespace": "default"})) == 0


def test_pod_that_cannot_be_created_is_not_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(Session):
        def __init__(self) -> None: ...

        def get(self, kind: Kind | str, namespace: str | None, name: str) -> Object | None:
            return None

        def create(self, kind: str, namespace: str, body: Object) -> Object:
            raise errors.Forbidden("no", code=403)

        def delete(self, kind: str, namespace: str, name: str) -> None:
            raise errors.Forbidden("no", code=403)

    run = Run({"metadata": {"name": "math", "namespace": "team"}})
    with pytest.raises(errors.Forbidden), volume.opened(Refusing(), run, "busybox"):
        pass
    assert capsys.readouterr().err == ""


class Starting(Session):
    """One pod, whose log is refused until it has been asked for often enough."""

    def __init__(self, refusals: int, phase: str = "Pending") -> None:
        self.refusals, self.phase = refusals, phase

    def get(self, kind: Kind | str, namespace: str | None, name: str) -> Object | None:
        return {"status": {"phase": self.phase}}

    def log(self, namespace: str, pod: str, query: Mapping[str, str], *, follow: bool) -> Iterator[bytes]:
        self.refusals -= 1
        if self.refusals >= 0:
            raise errors.Invalid("c is waiting to start: PodInitializing", code=400)
        yield b"ready"


def test_logs_follow_a_pod_that_starts() -> None:
    run = Run({"metadata": {"name": "math", "namespace": "team"}})

    def lines(session: Session, query: dict[str, str]) -> list[object]:
        return [line for _, line in logs._lines(session, run, ("p", "c"), query)]

    refused, line = lines(Starting(3), {"follow": "true"})
    assert isinstance(refused, errors.Invalid)
    assert line == b"ready"
    assert len(lines(Starting(3), {})) == 1
    assert len(lines(Starting(3, "Running"), {"follow": "true"})) == 1


def test_log_lines_cannot_move_the_cursor_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = "\x1b]0;title\x07a\tb\r\u202eé".encode()
    assert logs.shown(raw) == raw.decode()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert logs.shown(raw) == "\\x1b]0;title\\x07a\tb\\r\\u202eé"


def test_mistyped_path_of_compare_is_no_run_of_the_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    handler = type("Handler", (_NoScaleRL,), {"code": 404})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path = kubeconfig(tmp_path / "config", "one", f"http://127.0.0.1:{server.server_port}", "team-a")
        assert main(["compare", "resluts", "--kubeconfig", str(path)]) == 2
        assert (
            "resluts: no such file, and no run of that name in the namespace team-a"
            in capsys.readouterr().err
        )
        monkeypatch.setattr(
            "scalerl_cli.clusters.runs.find", lambda *_: Run({"metadata": {"name": "a", "namespace": "b"}})
        )
        server.shutdown()
    with monkeypatch.context() as patched:
        patched.setattr(
            "scalerl_cli.clusters.fetch.curve", lambda *_: (_ for _ in ()).throw(errors.Unreachable("reset"))
        )
        assert main(["compare", "resluts", "--kubeconfig", str(path)]) == 2
    assert "reset" in capsys.readouterr().err


def test_lines_of_a_followed_log_come_as_they_are_written(tmp_path: Path) -> None:
    """The server writes the rest once the first line has been read."""
    was_read = threading.Event()

    class Log(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (b"one\nt", b"wo\n\nthree", b""):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                assert was_read.wait(120)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Log) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path = kubeconfig(tmp_path / "config", "one", f"http://127.0.0.1:{server.server_port}")
        read = open_session(arguments(kubeconfig=str(path))).log("team", "pod", {}, follow=True)
        assert next(read) == b"one"
        was_read.set()
        assert list(read) == [b"two", b"", b"three"]
        server.shutdown()
