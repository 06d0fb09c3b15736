"""The control group below which a node's pods are accounted; version 1 and 2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_V2 = _ROOT / "cgroup.controllers"


def create(name: str) -> None:
    """Make the group in every hierarchy; a kubelet does not start where it is missing."""
    if _V2.exists():
        wanted = [
            f"+{c}"
            for c in _V2.read_text().split()
            if c in ("cpu", "cpuset", "memory", "pids", "io", "hugetlb")
        ]
        (_ROOT / "cgroup.subtree_control").write_text(" ".join(wanted))
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)


def remove(name: str) -> None:
    """Remove the group and those below it; its processes have ended."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def left(name: str) -> list[Path]:
    """What is there of the group."""
    return [hierarchy / name for hierarchy in _hierarchies() if (hierarchy / name).exists()]


def _hierarchies() -> Iterator[Path]:
    if _V2.exists():
        yield _ROOT
        return
    for path in _ROOT.iterdir():
        # Controllers are often linked under a second name.
        if path.is_dir() and not path.is_symlink() and (path / "cgroup.procs").exists():
            yield path
