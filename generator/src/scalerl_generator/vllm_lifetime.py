"""vLLM's engine lives no longer than its server, however the server ends.

The engine is a process of its own, and nothing in vLLM ends it when the server dies without a word (``kill
-9``, out of memory): it would wait for requests for ever and keep its memory, or its GPU's. So the kernel is
asked to kill it with its parent. Where the engine is forked, it also lets go of the server's listening socket.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int) -> None:
    """Have this process killed when the thread that made it ends, which must be ``parent``'s main thread.

    Raises:
        OSError: the kernel refuses.
    """
    if _LIBC is None:
        return
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def tie_forks(listening: socket.socket) -> None:
    """From now on, what this process's main thread forks dies with it; no fork keeps ``listening`` open.

    Processes that are started (``subprocess``) are not meant: they get the socket as little as a spawned
    engine does.
    """
    parent, by_main_thread = 0, False

    def before() -> None:
        nonlocal parent, by_main_thread
        parent = os.getpid()
        by_main_thread = threading.get_native_id() == parent

    def in_child() -> None:
        listening.close()
        if by_main_thread:  # the kernel goes by threads: a passing thread's end must not kill an engine
            die_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=in_child)


def tie_spawned() -> None:
    """The same for a process that ``multiprocessing`` has spawned, called in it; elsewhere without effect."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
