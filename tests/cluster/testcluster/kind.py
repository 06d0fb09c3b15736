"""kind, where Docker runs and kind is installed: its nodes are containers, its images come from Docker."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.handle import Cluster

_NAME = "scalerl-test"
_UP_SECONDS = 600
_LOAD_SECONDS = 900


def usable() -> bool:
    """Whether there are kind and a Docker that answers."""
    if shutil.which("kind") is None or shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode == 0


def start_kind(kubectl: Path) -> Cluster:
    """A cluster of one node of the name ``scalerl-test``."""
    folder = Path(tempfile.mkdtemp(prefix="scalerl-test-kind-"))
    kubeconfig = folder / "kubeconfig"

    def end() -> None:
        _kind("delete", "cluster", "--kubeconfig", str(kubeconfig), seconds=_UP_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)

    try:
        _kind("create", "cluster", "--kubeconfig", str(kubeconfig), "--wait", "180s", seconds=_UP_SECONDS)
    except BaseException:
        end()
        raise
    return Cluster(
        kubeconfig,
        kubectl,
        loader=lambda archive: _kind("load", "image-archive", str(archive), seconds=_LOAD_SECONDS),
        ender=end,
    )


def _kind(*words: str, seconds: float) -> None:
    argv = ["kind", *words, "--name", _NAME]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(argv)}` exited {done.returncode}: {done.stderr.strip()[-2000:]}")
