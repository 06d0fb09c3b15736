"""The cluster with a node: pods as restricted as ours, names, services, shared volumes, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from testcluster import Cluster, ClusterError, cache, cgroups, start_cluster, tools

NAMESPACE = "node-test"
# Each of two pods writes into the shared folder, then asks for the other's name and file, then a Service's.
SCRIPT = """
id -u; touch /not-here 2>/dev/null && echo writable root
echo $HOSTNAME > /data/$JOB_COMPLETION_INDEX; httpd -p 8080 -h /data
other=$((1 - JOB_COMPLETION_INDEX))
served() { exec 3<>/dev/tcp/$1/$2 && printf "GET /$other HTTP/1.0\\r\\n\\r\\n" >&3 && grep -q ^peer-$other$ <&3; }
until served peer-$other.peers.node-test.svc 8080; do sleep 0.1; done
until served web 80; do sleep 0.1; done
until nslookup elsewhere.example | grep -m 1 -o NXDOMAIN; do sleep 0.1; done
touch /data/done-$JOB_COMPLETION_INDEX; until [ -e /data/done-$other ]; do sleep 0.1; done
echo met
"""


def _objects() -> list[dict[str, Any]]:
    service = {"apiVersion": "v1", "kind": "Service"}
    container = {
        "name": "peer",
        "image": "localhost/busybox:1",
        "command": ["bash", "-c", SCRIPT],
        "volumeMounts": [{"name": "data", "mountPath": "/data", "subPath": "a-run"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    pod = {
        "subdomain": "peers",
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": NAMESPACE},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        },
        {
            **service,
            "metadata": {"name": "peers", "namespace": NAMESPACE},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "peer"}},
        },
        {
            **service,
            "metadata": {"name": "web", "namespace": NAMESPACE},
            "spec": {"selector": {"app": "peer"}, "ports": [{"port": 80, "targetPort": 8080}]},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "peer", "namespace": NAMESPACE},
            "spec": {
                "completions": 2,
                "parallelism": 2,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "template": {"metadata": {"labels": {"app": "peer"}}, "spec": pod},
            },
        },
    ]


def test_pods_reach_each_other_by_name_service_and_volume(cluster: Cluster) -> None:
    cluster.apply(*_objects())
    try:
        cluster.kubectl("wait", "job/peer", "-n", NAMESPACE, "--for=condition=Complete", "--timeout=500s")
        for index in range(2):
            selector = f"batch.kubernetes.io/job-completion-index={index}"
            said = cluster.kubectl("logs", "--tail=-1", "-n", NAMESPACE, "-l", selector)
            assert [line for line in said.splitlines() if ": " not in line] == [
                "10001",
                "NXDOMAIN",
                "met",
            ]
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE)


def test_commands_run_in_pods_with_exit_codes(cluster: Cluster) -> None:
    cluster.kubectl("run", "shell", "--image=localhost/busybox:1", "--", "sh", "-c", "sleep 1000 & wait")
    try:
        cluster.kubectl("wait", "pod/shell", "--for=condition=Ready", "--timeout=500s")
        assert cluster.kubectl("exec", "shell", "--", "echo", "hello") == "hello\n"
        asked = "until nslookup kubernetes.default.svc.cluster.local; do sleep 0.1; done"
        assert "10.96.0.1" in cluster.kubectl("exec", "shell", "--", "sh", "-c", asked)
    finally:
        cluster.kubectl("delete", "pod", "shell", "--grace-period=1")


def _machine() -> dict[str, object]:
    """What a node could change of a machine."""

    def said(*argv: str) -> str:
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=200).stdout

    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = [line for line in mounts if "/pytest-of-" not in line]  # tests beside this one have some
    settings = ("vm/overcommit_memory", "kernel/panic", "net/ipv4/ip_forward")
    return {
        "links": sorted(Path("/sys/class/net").iterdir()),
        "rules": said("iptables-save") if os.geteuid() == 0 else "",
        "mounts": sorted(mounts),
        "settings": {name: Path("/proc/sys", name).read_text() for name in settings},
        "folders": [sorted(Path(folder).iterdir()) for folder in ("/run", "/var/lib", "/opt")],
    }


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("no node can be run here: it needs root")


@pytest.mark.usefixtures("root")
def test_node_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an image store of its own, it may run beside the session's."""
    with tempfile.TemporaryDirectory() as folder:  # short: the kubelet's sockets are below it
        _leaves_nothing(Path(folder), monkeypatch)


def _leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("kube", "coredns"):
        built = tools.tool(program).parent.parent
        (folder / "cache").mkdir(exist_ok=True)
        (folder / "cache" / program).symlink_to(built)
    monkeypatch.setenv(cache.VARIABLE, str(folder / "cache"))
    before = _machine()
    with start_cluster(folder / "node") as cluster:
        assert cluster.layout is not None
        cluster.kubectl("run", "stays", "--image=localhost/busybox:1", "--", "sleep", "1000")
        cluster.kubectl("wait", "pod/stays", "--for=condition=Ready", "--timeout=500s")
        assert cgroups.left(cluster.layout.cgroup)
        with pytest.raises(ClusterError, match="another cluster with a node is up"):
            start_cluster(folder / "second")
    assert not cluster.layout.root.exists()
    assert not cgroups.left(cluster.layout.cgroup)
    assert _machine() == before
