"""A subreaper: a process between the runtime and each child, so that no orphan is left.

    python -I -S subreaper.py LIFELINE_FD GRACE_SECONDS ORPHAN_GRACE_SECONDS CPUS -- COMMAND...

Orphaned descendants of the child become its children. When the child ends, it kills the rest of the tree and ends in the same
way: with the same exit code, or by the same signal.

    SIGTERM, SIGINT      SIGTERM to the child; SIGKILL to the rest after GRACE_SECONDS
    SIGQUIT              kills the whole tree now
    LIFELINE_FD closed   the runtime has ended (kill -9 too): as SIGTERM, with ORPHAN_GRACE_SECONDS

CPUS is ``-`` or a list like ``0,2``. Standard library only, and started without site-packages: it takes 15 ms and a few MiB.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

if __name__ == "__main__":  # by its path, without site-packages
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from scalerl_processes.kernel import adopt_orphans, die_with_parent, has_children, reaped
from scalerl_processes.process_table import descendants, kill_all

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD)
"""The parent of a subreaper blocks these signals until the subreaper handles them."""
_SWEEP_SECONDS = 30.0
"""Limit for killing a tree; only a process blocked in the kernel survives the first rounds."""
_LISTINGS = 10
"""Listings of ``/proc`` without a process of the tree, after which a child that the kernel still has is given up."""


def _spawn(command: list[str], cpus: set[int] | None) -> int:
    subreaper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        # Its own process group: a signal to the child's group must not reach the subreaper.
        os.setpgid(0, 0)
        die_with_parent(subreaper)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        # Python ignores these two, and exec keeps ignored signals.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        _echo(f"cannot start {command[0]}: {error.strerror}")
    os._exit(127)


def _kill_tree(child: int) -> int | None:
    """Kills all descendants; returns the child's exit code if the child ended here."""
    code = None

    def remaining() -> list[int]:
        nonlocal code
        for _ in range(_LISTINGS):
            code = dict(reaped()).get(child, code)
            # A process that was forked after /proc was listed, and whose parent ended before it was read, is in no listing.
            if (found := descendants(os.getpid())) or not has_children():
                return found
        return []

    if left := kill_all(remaining, _SWEEP_SECONDS):
        _echo(f"still there {_SWEEP_SECONDS:.0f} s after SIGKILL: {left}")
    return code


def _echo(text: str) -> None:
    with contextlib.suppress(OSError):  # a full volume must not change the exit code
        os.write(2, f"{text}\n".encode())


def _end_like(code: int) -> None:
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
    """Waits until the child has ended, kills the rest of its tree, and returns the child's exit code."""
    deadline = None
    inputs = [wakeup, lifeline]
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select(inputs, [], [], timeout)
        code = dict(reaped()).get(child)
        if code is not None:
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
    killed = _kill_tree(child)
    # A child blocked in the kernel has no exit code; the log has its pid.
    return next((c for c in (code, killed) if c is not None), -signal.SIGKILL)


def main(arguments: list[str]) -> None:
    lifeline, grace, orphan_grace = int(arguments[0]), float(arguments[1]), float(arguments[2])
    cpus = None if arguments[3] == "-" else {int(cpu) for cpu in arguments[3].split(",")}
    for name in os.listdir("/proc/self/fd"):
        # The child inherits neither the lifeline nor the run's lock.
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                continue  # the descriptor of the listing itself
    adopt_orphans()
    wakeup, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in HANDLED:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    _end_like(_watch(_spawn(arguments[5:], cpus), lifeline, wakeup, grace, orphan_grace))


if __name__ == "__main__":
    main(sys.argv[1:])
