"""Ends vLLM's engine process with its server, however the server ends.

vLLM does not end the engine process when the server is killed (``kill -9``, out of memory): it would wait for requests
and keep its memory, or its GPU's. So the kernel is asked to kill it with its parent. A forked engine also closes the
server's listening socket.
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
    """Ask the kernel to kill this process when the thread that created it ends: ``parent``'s main thread.

    Raises:
        OSError: the kernel refuses.
    """
    if _LIBC is None:
        return
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def kill_forks_with_parent(listening: socket.socket) -> None:
    """From now on, forks of this process's main thread die with it, and no fork keeps ``listening`` open.

    Started processes (``subprocess``) are not concerned: like a spawned engine, they do not inherit the socket.
    """
    parent, by_main_thread = 0, False

    def before() -> None:
        nonlocal parent, by_main_thread
        parent = os.getpid()
        by_main_thread = threading.get_native_id() == parent

    def in_child() -> None:
        listening.close()
        if (
            by_main_thread
        ):  # the signal is tied to a thread: the end of a short-lived thread must not kill an engine
            die_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=in_child)


def kill_spawned_with_parent() -> None:
    """The same for a process spawned by ``multiprocessing``, which calls this; no effect elsewhere."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
