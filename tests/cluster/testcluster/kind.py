"""kind, where Docker runs and kind is installed: its nodes are containers, its images come from Docker."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from testcluster import progress, tools
from testcluster.handle import Cluster

_KUBECONFIG = "kind-kubeconfig"
_UP_SECONDS = 600
_LOAD_SECONDS = 900


def usable() -> bool:
    """Whether there are kind and a Docker that answers."""
    if shutil.which("kind") is None or shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode == 0


def start_kind(name: str = "test", folder: Path | None = None) -> Cluster:
    """A cluster of one node, its kubeconfig in ``folder`` (a new one by default), which goes when it ends."""
    where = folder or Path(tempfile.mkdtemp(prefix="scalerl-test-kind-"))
    where.mkdir(parents=True, exist_ok=True)
    cluster = _cluster(name, where)
    try:
        _kind("create", "cluster", name, cluster.kubeconfig, "--wait", "180s", seconds=_UP_SECONDS)
    except BaseException:
        cluster.down()
        raise
    return cluster


def found_kind(name: str, folder: Path) -> Cluster | None:
    """The cluster that was started so, if there is one."""
    return _cluster(name, folder) if (folder / _KUBECONFIG).exists() else None


def _cluster(name: str, folder: Path) -> Cluster:
    kubeconfig = folder / _KUBECONFIG

    def load(archive: Path) -> None:
        _kind("load", "image-archive", name, kubeconfig, str(archive), seconds=_LOAD_SECONDS)

    def end() -> None:
        _kind("delete", "cluster", name, kubeconfig, seconds=_UP_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)

    found = shutil.which("kubectl")
    return Cluster(kubeconfig, Path(found) if found else tools.kubectl(), loader=load, ender=end)


def _kind(verb: str, what: str, name: str, kubeconfig: Path, *words: str, seconds: float) -> None:
    argv = ["kind", verb, what, *words, "--name", f"scalerl-{name}"]
    if what == "cluster":
        argv += ["--kubeconfig", str(kubeconfig)]
    with progress.step(f"kind: {verb} {what}") as step:
        progress.followed(step, argv, silent_seconds=seconds)
