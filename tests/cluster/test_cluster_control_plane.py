"""The control plane that operators are tested against: that it is whole, faulty on demand, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from testcluster import Cluster, ClusterError, KubectlError, start_control_plane
from testcluster.layout import Layout
from testcluster.start import end

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}


def _until_gone(cluster: Cluster, *words: str) -> None:
    for _ in range(1200):
        try:
            cluster.kubectl("get", *words)
        except KubectlError as error:
            assert "NotFound" in str(error)  # noqa: PT017
            return
        time.sleep(0.1)
    pytest.fail(f"{words} is still there")


def _running(pids: Iterable[int]) -> list[int]:
    """Those that still run after a moment in which a killed process may end."""
    for _ in range(1200):
        pids = [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]
        if not pids:
            break
        time.sleep(0.1)
    return list(pids)


def test_controllers_work_and_garbage_is_collected(control_plane: Cluster) -> None:
    control_plane.kubectl("create", "namespace", "collected")
    control_plane.apply(CONFIG_MAP, namespace="collected")
    owner = control_plane.get("configmap", "owner", "-n", "collected")["metadata"]
    control_plane.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": "owned",
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["uid"]}
                ],
            },
            "spec": {
                "selector": {"matchLabels": {"app": "owned"}},
                "template": {
                    "metadata": {"labels": {"app": "owned"}},
                    "spec": {"containers": [{"name": "a", "image": "a"}]},
                },
            },
        },
        namespace="collected",
    )
    control_plane.kubectl(
        "wait", "pod", "-l", "app=owned", "-n", "collected", "--for=create", "--timeout=500s"
    )
    control_plane.kubectl("delete", "configmap", "owner", "-n", "collected")
    _until_gone(control_plane, "deployment/owned", "-n", "collected")


def test_api_server_restarts_with_its_state(control_plane: Cluster) -> None:
    control_plane.kubectl("create", "namespace", "kept")
    server = json.loads(control_plane.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    with control_plane.without("kube-apiserver"):
        assert "kube-apiserver" not in control_plane.programs()
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind(("127.0.0.1", int(server.rpartition(":")[2])))
        with pytest.raises(KubectlError, match="refused"):
            control_plane.kubectl("get", "namespaces")
    for _ in range(1200):
        try:
            assert control_plane.get("namespace", "kept")["status"]["phase"] == "Active"
            return
        except KubectlError:
            time.sleep(0.2)
    pytest.fail("the API server did not come back")


def test_two_control_planes_are_isolated_and_removed(control_plane: Cluster, tmp_path: Path) -> None:
    root = tmp_path / "second"
    with start_control_plane(root, unreal_nodes=2) as second:
        second.kubectl("create", "namespace", "alone")
        second.kubectl("wait", "serviceaccount/default", "-n", "alone", "--for=create", "--timeout=500s")
        second.kubectl("run", "pod", "--image=none", "-n", "alone")
        second.kubectl("wait", "pod/pod", "-n", "alone", "--for=condition=Ready", "--timeout=500s")
        with pytest.raises(KubectlError, match="NotFound"):
            control_plane.kubectl("get", "namespace", "alone")
        pids = second.programs()
        assert pids.keys() == {
            "etcd",
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "unreal",
        }
        with pytest.raises(ClusterError, match="exists"):
            start_control_plane(root)
    assert not root.exists()
    assert not _running(pids.values())


def test_kubectl_that_gets_no_connection_is_called_again(tmp_path: Path) -> None:
    """On a busy machine a handshake takes longer than the ten seconds that kubectl waits."""
    program = tmp_path / "kubectl"
    program.write_text(
        "#!/bin/sh\necho >> $0.calls; [ $(wc -l < $0.calls) = 3 ] && exec cat\n"
        "echo 'Unable to connect to the server: net/http: TLS handshake timeout' >&2; exit 1\n"
    )
    program.chmod(0o755)
    assert Cluster(tmp_path / "kubeconfig", program).kubectl("apply", "-f", "-", stdin="run") == "run"


def test_ends_also_when_its_supervisor_was_killed(tmp_path: Path) -> None:
    root = tmp_path / "killed"
    cluster = start_control_plane(root)
    pids = cluster.programs()
    os.kill(int((root / "pid").read_text()), signal.SIGKILL)
    end(Layout(root))
    assert not root.exists()
    assert not _running(pids.values())


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for sockets, whose paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        yield Path(folder)


def test_leftovers_of_a_killed_caller_are_removed(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    left, used = (short / f"scalerl-test-cluster-{name}" for name in ("left", "used"))
    left.mkdir()
    used.mkdir()
    (left / "pid").write_text(str(2**22 - 1))
    program = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)", str(used)]
    )  # as a supervisor, it names its folder
    (used / "pid").write_text(str(program.pid))
    try:
        with start_control_plane():
            assert not left.exists()
            assert used.exists()
    finally:
        program.kill()
        program.wait(120)
