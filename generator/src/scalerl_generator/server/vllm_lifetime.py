"""Ends vLLM's engine process when the server's process ends for any reason.

When the server is killed (``kill -9``, out of memory), vLLM's engine process would go on waiting for requests and keep its
memory and that of its GPU. Therefore the kernel is asked to kill it with its parent (``PR_SET_PDEATHSIG``). A forked engine
also closes its copy of the server's listening socket.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading

from scalerl_processes.kernel import die_with_parent


def kill_forks_with_parent(listening: socket.socket) -> None:
    """From now on, forks of this process's main thread die with it, and no fork keeps ``listening`` open.

    Processes started by ``subprocess`` are not affected. Like a spawned engine, they do not inherit the socket.
    """
    parent, by_main_thread = 0, False

    def before() -> None:
        nonlocal parent, by_main_thread
        parent = os.getpid()
        by_main_thread = threading.get_native_id() == parent

    def in_child() -> None:
        listening.close()
        # The kernel sends the signal when the forking thread ends; a short-lived thread's end must not kill an engine.
        if by_main_thread:
            die_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=in_child)


def kill_spawned_with_parent() -> None:
    """Make a process that ``multiprocessing`` spawned die with its parent. It calls this itself; no effect elsewhere."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
