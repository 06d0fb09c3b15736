"""Finds the processes of a run, kills those without a subreaper, and measures their memory."""

from __future__ import annotations

import os
from pathlib import Path

from scalerl_operator.local.subreaper import descendants, kill_all, pids, state_and_parent

_SWEEP_SECONDS = 10.0


def marked(variable: str, value: str) -> list[int]:
    """Pids of this user's processes with ``variable=value`` in their environment, without this process."""
    wanted, found = f"{variable}={value}".encode(), []
    for pid in pids():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # the process has ended, or is another user's
        if wanted in environ.split(b"\0") and pid != os.getpid():
            found.append(pid)
    return found


def writing_to(log: Path) -> list[int]:
    """Pids of this user's processes whose standard output or error is ``log``, or a file in that folder.

    Without this process and its ancestors, since a shell may write its own output there.
    """
    wanted, found, ancestors = Path(os.path.realpath(log)), [], set[int]()
    pid = os.getpid()
    while pid > 0:
        ancestors.add(pid)
        pid = state_and_parent(pid)[1]
    for pid in set(pids()) - ancestors:
        for stream in (1, 2):
            try:
                file = Path(os.readlink(f"/proc/{pid}/fd/{stream}"))
            except OSError:
                continue  # the process has ended, the stream is closed, or the process is another user's
            if wanted in (file, file.parent):
                found.append(pid)
                break
    return found


def kill_marked(variable: str, value: str, log: Path | None = None) -> None:
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
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass  # the kernel has no such file, or the process has ended
    except OSError:
        return 0  # the process has ended
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
