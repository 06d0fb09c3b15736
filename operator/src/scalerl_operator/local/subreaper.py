"""A subreaper: a process between the runtime and each child, so that no orphan is left.

    python -I -S subreaper.py LIFELINE_FD GRACE_SECONDS ORPHAN_GRACE_SECONDS CPUS -- COMMAND...

Orphaned descendants of the child become its children (``PR_SET_CHILD_SUBREAPER``). When the child ends, it kills the rest of the
tree and ends in the same way: with the same exit code, or by the same signal.

    SIGTERM, SIGINT      SIGTERM to the child; SIGKILL to the rest after GRACE_SECONDS
    SIGQUIT              kills the whole tree now
    LIFELINE_FD closed   the runtime has ended (kill -9 too): as SIGTERM, with ORPHAN_GRACE_SECONDS

CPUS is ``-`` or a list like ``0,2``. Standard library only, and started without site-packages: it takes 15 ms and a few MiB.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_SWEEP_SECONDS = 30.0
"""Limit for killing a tree; only a process blocked in the kernel survives the first rounds."""


def pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def state_and_parent(pid: int) -> tuple[bytes, int]:
    """State and parent of a process; of one that has ended, those of a zombie without a parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
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


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _spawn(command: list[str], cpus: set[int] | None) -> int:
    subreaper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        # Its own process group: a signal to the child's group must not reach the subreaper.
        os.setpgid(0, 0)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != subreaper:
            os._exit(137)  # the subreaper died before prctl
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        # Python ignores these two, and exec keeps ignored signals.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _reap(child: int) -> int | None:
    """Reaps every dead descendant; returns the child's wait status if the child was among them."""
    status = None
    while True:
        try:
            pid, state = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            status = state


def kill_all(find: Callable[[], list[int]], limit_seconds: float) -> list[int]:
    """Sends SIGKILL to all of ``find()`` until there are none; returns those left after the limit."""
    deadline = time.monotonic() + limit_seconds
    pause = 0.002
    while (left := find()) and time.monotonic() <= deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(pause)
        pause = min(pause * 2, 0.25)
    return left


def _kill_tree(child: int) -> int | None:
    """Kills all descendants; returns the child's wait status if the child ended here."""
    status = None

    def remaining() -> list[int]:
        nonlocal status
        reaped = _reap(child)
        status = status if reaped is None else reaped
        return descendants(os.getpid())

    if left := kill_all(remaining, _SWEEP_SECONDS):
        os.write(2, f"still there {_SWEEP_SECONDS:.0f} s after SIGKILL: {left}\n".encode())
    return status


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    time.sleep(1)
    os._exit(128 - code)


def _watch(child: int, lifeline: int, wakeup: int, grace: float, orphan_grace: float) -> int:
    """Waits until the child has ended, kills the rest of its tree, and returns the child's wait status."""
    deadline = None
    inputs = [wakeup, lifeline]
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select(inputs, [], [], timeout)
        status = _reap(child)
        if status is not None:
            break
        received = set(os.read(wakeup, 512)) if wakeup in readable else set()
        if lifeline in readable:  # nothing is written to it: the runtime's end is closed
            inputs = [wakeup]
            received.add(signal.SIGTERM)
            grace = orphan_grace
        if received & {signal.SIGTERM, signal.SIGINT}:
            os.kill(child, signal.SIGTERM)  # not reaped yet, so the pid is the child's
            now = time.monotonic()
            deadline = now + grace if deadline is None else min(deadline, now + grace)
        if signal.SIGQUIT in received or (deadline is not None and time.monotonic() >= deadline):
            break
    swept = _kill_tree(child)
    # A child blocked in the kernel has no status; the log has its pid.
    return next((s for s in (status, swept) if s is not None), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    lifeline, grace, orphan_grace = int(arguments[0]), float(arguments[1]), float(arguments[2])
    cpus = None if arguments[3] == "-" else {int(cpu) for cpu in arguments[3].split(",")}
    command = arguments[5:]
    for name in os.listdir("/proc/self/fd"):
        # The child inherits neither the lifeline nor the run's lock.
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                continue  # the descriptor of the listing itself
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    _end_like(_watch(_spawn(command, cpus), lifeline, wakeup, grace, orphan_grace))


if __name__ == "__main__":
    main(sys.argv[1:])
