"""Which processes belong to a run, what they use, and how to end those that nobody holds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from scalerl_operator.local.subreaper import descendants

_SWEEP_SECONDS = 10.0


def marked(variable: str, value: str) -> list[int]:
    """Pids of this user's processes whose environment has ``variable=value``, this process excepted."""
    wanted = f"{variable}={value}".encode()
    return [pid for pid, environ in _environments() if wanted in environ.split(b"\0") and pid != os.getpid()]


def writing_to(log: Path) -> list[int]:
    """Pids of this user's processes whose standard output or error is ``log``, or a file in that folder.

    This process and those that it came from are not among them: a shell may write its own output there.
    """
    own, wanted = _line_of(os.getpid()), Path(os.path.realpath(log))
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in own:
            continue
        for stream in (1, 2):
            try:
                file = Path(os.readlink(f"/proc/{entry}/fd/{stream}"))
            except OSError:
                continue  # gone, closed, or another user's
            if wanted in (file, file.parent):
                found.append(int(entry))
                break
    return found


def kill_marked(variable: str, value: str, log: Path | None = None) -> list[int]:
    """SIGKILL all of :func:`marked`, and of :func:`writing_to` ``log``, until none is left; the killed pids.

    Both, because a process may hide its environment: one that sets its title, as vLLM's engine does,
    writes over what ``/proc`` shows of it. What it inherited to write to stays.

    Raises:
        TimeoutError: some are still there after 10 s (stuck in the kernel).
    """

    def alive() -> list[int]:
        found = {*marked(variable, value), *(writing_to(log) if log is not None else ())}
        return [pid for pid in found if not _is_zombie(pid)]

    killed: list[int] = []
    deadline = time.monotonic() + _SWEEP_SECONDS
    pause = 0.002
    while left := alive():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} survive SIGKILL; they hold {value}")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.append(pid)
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    return sorted(set(killed))


def tree_memory_bytes(root: int) -> int:
    """Memory of ``root`` and all below it: proportional set size, so that shared pages count once.

    Where the kernel gives no PSS, resident size stands in: an upper bound.
    """
    return sum(_memory_bytes(pid) for pid in (root, *descendants(root)))


def _memory_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass  # no such file on this kernel, or no such process any more
    except OSError:
        return 0  # gone meanwhile
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _environments() -> Iterator[tuple[int, bytes]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                yield int(entry), Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue  # gone, or another user's


def _line_of(pid: int) -> set[int]:
    """``pid`` and what it came from."""
    line = set()
    while pid > 0 and pid not in line:
        line.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            break
        pid = int(stat[stat.rindex(b")") + 2 :].split()[1])
    return line


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] == b"Z"
