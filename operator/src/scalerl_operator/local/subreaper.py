"""A subreaper: one tiny process between the runtime and each child, so that no orphan is ever left.

    python -I -S subreaper.py LIFELINE_FD GRACE_SECONDS ORPHAN_GRACE_SECONDS CPUS -- COMMAND...

It adopts whatever its child's descendants leave behind (``PR_SET_CHILD_SUBREAPER``), so they all stay
below it whatever they do. When the child ends, the rest of the tree is killed and the subreaper ends in
the same way: same exit code, or by the same signal.

    SIGTERM, SIGINT      to the child; whatever is left after GRACE_SECONDS is killed
    SIGQUIT              kill the whole tree now
    HUP, USR1, USR2      passed on
    LIFELINE_FD closed   the runtime is gone (kill -9 too): as SIGTERM, with ORPHAN_GRACE_SECONDS

The subreaper writes the child's pid to LIFELINE_FD. CPUS is ``-`` or a list like ``0,2``. Standard library
only, and started without site-packages: it takes 15 ms and a few MiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SWEEP_SECONDS = 30.0
"""How long to go on killing a tree; only a process stuck in the kernel outlives the first rounds."""


def descendants(root: int) -> list[int]:
    """Pids below ``root``, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # gone meanwhile
        # The command name is in parentheses and may contain anything, also parentheses.
        parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
        children.setdefault(parent, []).append(int(entry))
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
        # A group of its own: a signal for the child's group must not reach the subreaper.
        os.setpgid(0, 0)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != subreaper:
            os._exit(137)  # the subreaper died before the line above
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        # Python ignores these two, and a process inherits what is ignored.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _reap(child: int) -> int | None:
    """Collect every dead descendant; the child's wait status if it was among them."""
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


def _kill_tree(child: int) -> int | None:
    """SIGKILL all descendants until there are none; the child's wait status if it died here."""
    status = None
    deadline = time.monotonic() + _SWEEP_SECONDS
    pause = 0.002
    while True:
        left = descendants(os.getpid())
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reaped = _reap(child)
        status = status if reaped is None else reaped
        if not left:
            return status
        if time.monotonic() > deadline:
            os.write(2, f"still there {_SWEEP_SECONDS:.0f} s after SIGKILL: {left}\n".encode())
            return status
        time.sleep(pause)
        pause = min(pause * 2, 0.25)


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
    """Until the child has ended and nothing of its tree is left; its wait status."""
    deadline = None
    inputs = [wakeup, lifeline]
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select(inputs, [], [], timeout)
        status = _reap(child)
        if status is not None:
            break
        received = set(os.read(wakeup, 512)) if wakeup in readable else set()
        stopping = received & {signal.SIGTERM, signal.SIGINT}
        if lifeline in readable:  # nobody writes to it: it can only have been closed
            inputs = [wakeup]
            stopping, grace = {signal.SIGTERM}, orphan_grace
        if stopping:
            _signal(child, signal.SIGTERM)
            now = time.monotonic()
            deadline = now + grace if deadline is None else min(deadline, now + grace)
        for number in received.intersection(_FORWARDED):
            _signal(child, number)
        if signal.SIGQUIT in received or (deadline is not None and time.monotonic() >= deadline):
            break
    swept = _kill_tree(child)
    # A child stuck in the kernel has no status; the sweep has said so in the log.
    return next((s for s in (status, swept) if s is not None), signal.SIGKILL)


def _signal(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        return  # it has just ended; the next round collects it


def main(arguments: list[str]) -> None:
    lifeline, grace, orphan_grace = int(arguments[0]), float(arguments[1]), float(arguments[2])
    cpus = None if arguments[3] == "-" else {int(cpu) for cpu in arguments[3].split(",")}
    command = arguments[5:]
    for name in os.listdir("/proc/self/fd"):
        # The lifeline and the run's lock are the subreaper's, not the child's.
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                continue  # the descriptor of the listing itself
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD, *_FORWARDED):
        signal.signal(number, lambda *_: None)
    child = _spawn(command, cpus)
    with contextlib.suppress(OSError):  # the runtime is gone already; the loop sees that
        os.write(lifeline, f"{child}\n".encode())
    _end_like(_watch(child, lifeline, wakeup, grace, orphan_grace))


if __name__ == "__main__":
    main(sys.argv[1:])
