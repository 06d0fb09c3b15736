"""Parents and children as the kernel sees them: the death signal, adoption of orphans, exit codes.

An exit code is as ``subprocess`` gives it: negative is the signal that ended the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process, a child of ``parent``, when the thread that forked it ends.

    Raises:
        OSError: the system call failed.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(137)


def adopt_orphans() -> None:
    """Makes orphaned descendants of this process its children, as those of a container are of process 1.

    Raises:
        OSError: the system call failed.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def reaped() -> Iterator[tuple[int, int]]:
    """Reaps every child that has ended, adopted ones too; yields process id and exit code."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def has_children() -> bool:
    """Whether this process has children, running or not yet reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def describe(exit_code: int) -> str:
    """How a process ended.

    >>> describe(2), describe(-15), describe(-40)  # Python names only the first and the last of the real-time signals
    ('exited with code 2', 'was killed by SIGTERM', 'was killed by signal 40')
    """
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
