"""The machine's processes: those of a tree, those with a mark in their environment; kills and measures them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

_SWEEP_SECONDS = 10.0


def pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def state_and_parent(pid: int) -> tuple[bytes, int]:
    """State and parent of a process; of one that has ended, those of a zombie without a parent."""
    try:
        stat = _read(pid, "stat")
    except OSError:
        return b"Z", 0
    # The command name is in parentheses and may contain parentheses.
    state, parent = stat[stat.rindex(b")") + 2 :].split(maxsplit=2)[:2]
    return state, int(parent)


def descendants(root: int) -> list[int]:
    """Pids below ``root``, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        children.setdefault(state_and_parent(pid)[1], []).append(pid)
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for pid in frontier for child in children.get(pid, ())]
        found += frontier
    return found


def kill_all(find: Callable[[], list[int]], limit_seconds: float) -> list[int]:
    """Sends SIGKILL to all of ``find()`` until there are none; returns those left after the limit.

    Its own pauses are counted, not the clock: after a standstill of the machine, all of the limit is left.
    """
    waited, pause = 0.0, 0.002
    while (left := find()) and waited <= limit_seconds:
        for pid in left:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # it has ended, or is another user's by now
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        waited += pause
        pause = min(pause * 2, 0.25)
    return left


def marked(variable: str, value: str) -> list[int]:
    """Pids of this user's processes with ``variable=value`` in their environment, without this process."""
    wanted, found = f"{variable}={value}".encode(), []
    for pid in pids():
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if wanted in _read(pid, "environ").split(b"\0") and pid != os.getpid():
                found.append(pid)
    return found


def writing_to(log: str | os.PathLike[str]) -> list[int]:
    """Pids of this user's processes whose standard output or error is ``log``, or a file in that folder.

    Without this process and its ancestors, since a shell may write its own output there.
    """
    wanted, found, ancestors = os.path.realpath(log), [], set[int]()
    pid = os.getpid()
    while pid > 0:
        ancestors.add(pid)
        pid = state_and_parent(pid)[1]
    for pid in set(pids()) - ancestors:
        for stream in (1, 2):
            with contextlib.suppress(
                OSError
            ):  # the process has ended, the stream is closed, or another user's
                file = os.readlink(f"/proc/{pid}/fd/{stream}")
                if wanted in (file, os.path.dirname(file)):
                    found.append(pid)
                    break
    return found


def kill_marked(variable: str, value: str, log: str | os.PathLike[str] | None = None) -> None:
    """SIGKILL all of :func:`marked`, and of :func:`writing_to` ``log``, until none is left.

    Both, because vLLM's engine sets its process title, which overwrites its environment in ``/proc``; it keeps the output that
    it inherited.

    Raises:
        TimeoutError: some still exist after 10 s (blocked in the kernel).
    """

    def remaining() -> list[int]:
        found = {*marked(variable, value), *(writing_to(log) if log is not None else ())}
        return [pid for pid in found if state_and_parent(pid)[0] != b"Z"]

    if left := kill_all(remaining, _SWEEP_SECONDS):
        raise TimeoutError(f"processes {left} survive SIGKILL; they hold {value}")


def tree_memory_bytes(root: int) -> int:
    """Memory of ``root`` and all its descendants: proportional set size (PSS), so that shared pages count once.

    Without PSS in the kernel: resident size, an upper bound.
    """
    return sum(_memory_bytes(pid) for pid in (root, *descendants(root)))


def _memory_bytes(pid: int) -> int:
    try:
        for line in _read(pid, "smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass  # the kernel has no such file, or the process has ended
    except OSError:
        return 0  # the process has ended
    try:
        return int(_read(pid, "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
