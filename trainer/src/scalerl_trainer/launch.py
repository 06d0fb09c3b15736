"""``python -m scalerl_trainer.launch COMMAND...``: runs the command once per rank of this pod.

The launcher reads ``NODE_RANK`` (the pod's index) and ``LOCAL_WORLD_SIZE`` (ranks in this pod), sets ``RANK``,
``LOCAL_RANK`` and ``SCALERL_NAME`` for each rank, and passes on all other variables (``WORLD_SIZE``, ``MASTER_ADDR``,
``MASTER_PORT``). Ranks of one pod share its GPUs, NVLink and ``/dev/shm``.

Exit code: 0 when all ranks exit with 0; otherwise that of the rank that failed first, 128 + n for signal n. The last line
of the log names that rank and quotes its last line, because the kubelet takes the termination message from the end of
the log. When one rank fails, the launcher sends SIGTERM to the others, and SIGKILL after :data:`END_SECONDS`, because a
collective with a missing rank does not end by itself. SIGTERM and SIGINT are forwarded to all ranks, which have the pod's
whole grace period for a checkpoint; a signal before the ranks are started ends the launcher with 128 + n. When the
launcher is killed, the kernel kills the ranks.

The launcher is process 1 of its container, so it reaps all orphans of the ranks.

torchrun is not used: it exits with 1 whatever the rank's exit code is, kills the ranks 30 s after SIGTERM, and its
rendezvous and restarts duplicate the Job and the operator.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Blocked first, because the kernel drops a signal that process 1 neither handles nor blocks, and the imports below are slow.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from scalerl_api.process import BAD_INPUT_EXIT_CODE, NAME
from scalerl_processes.kernel import describe, die_with_parent, reaped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
END_SECONDS = 10.0
"""Seconds from SIGTERM to SIGKILL for the other ranks after one has failed, and from SIGKILL until they must have ended."""
MAX_LINE_BYTES = 64 * 1024
"""Length in bytes above which an output line is passed on in pieces."""
QUOTED_CHARACTERS = 1500
"""Maximum length of the quoted last line; the kubelet keeps 2,048 bytes of a termination message."""
_LOG_PREFIX = re.compile(r"^\S+ \S+ (?:INFO|WARNING|ERROR|CRITICAL) \S+ ")

log = logging.getLogger("scalerl_trainer.launch")


class LaunchError(Exception):
    """An environment variable of the pod is missing or malformed, or there is no command."""


def rank_environments(environment: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Environment variables of this pod's ranks, by rank.

    >>> pod = {"NODE_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "4"}
    >>> [(rank, each["LOCAL_RANK"], each["SCALERL_NAME"]) for rank, each in rank_environments(pod).items()]
    [(2, '0', 'trainer-2'), (3, '1', 'trainer-3')]

    Raises:
        LaunchError: NODE_RANK or LOCAL_WORLD_SIZE is missing or out of range.
    """
    try:
        node, local_world = int(environment["NODE_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise LaunchError(f"NODE_RANK and LOCAL_WORLD_SIZE must be set to integers: {error}") from error
    if node < 0 or local_world < 1:
        raise LaunchError(f"NODE_RANK {node} must be at least 0, LOCAL_WORLD_SIZE {local_world} at least 1")
    # By default torch starts one thread per core of the node in every process; the ranks of a pod divide its cores.
    threads = max(1, int(usable_cores() / local_world))
    return {
        node * local_world + local: {
            "OMP_NUM_THREADS": str(threads),
            **environment,
            "RANK": str(node * local_world + local),
            "LOCAL_RANK": str(local),
            NAME: f"trainer-{node * local_world + local}",
        }
        for local in range(local_world)
    }


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Number of cores that this process may use: of its CPU affinity, or the container's CPU quota if that is lower.

    ``cgroups``: mount point of the container's own control group (version 2 or 1).
    """
    cores = float(len(os.sched_getaffinity(0)))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroups / file).read_text() for file in files).split()
        except FileNotFoundError:
            continue
        # Without a quota, version 2 has "max" and version 1 has -1.
        return cores if quota in ("max", "-1") else min(cores, int(quota) / int(period))
    return cores


class Launcher:
    """Starts the ranks of one pod, and supervises them until all have ended."""

    def __init__(self, command: Sequence[str], environments: Mapping[int, dict[str, str]]) -> None:
        self._command = command
        self._environments = environments
        self._running: dict[int, int] = {}  # rank by process id
        self._failed: list[tuple[int, int]] = []  # (rank, exit code), in the order of their ends
        self._rank_ended = asyncio.Event()
        self._last_line: dict[int, str] = {}
        self._requested: int | None = None

    async def run(self) -> int:
        """Start the ranks and wait for all; returns the pod's exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._forward, number)
        early = signal.sigpending() & set(STOP_SIGNALS)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if early:
            log.error("got %s before the ranks were started", signal.Signals(min(early)).name)
            return 128 + int(min(early))
        copies = [
            asyncio.create_task(self._copy(rank, await self._start(rank, environment)))
            for rank, environment in self._environments.items()
        ]
        await self._wait(lambda: not self._running or bool(self._failed))
        if self._requested is not None:
            # The ranks have the signal and may be writing a checkpoint, for which they have the pod's grace period.
            await self._wait(lambda: not self._running)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._send(number)
            await self._wait(lambda: not self._running, END_SECONDS)
        # The timeout is for an orphan of a rank that holds the pipe open.
        await asyncio.wait(copies, timeout=END_SECONDS)
        if not self._failed:
            return 0
        rank, code = self._failed[0]
        how = describe(code) + (" after printing" if code < 0 else "")
        log.error("rank %d %s: %s", rank, how, self._last_line.get(rank, "no output"))
        return code if code > 0 else 128 - code

    async def _start(self, rank: int, environment: Mapping[str, str]) -> asyncio.StreamReader:
        """Start one rank; returns the stream of its output."""
        ours, theirs = os.pipe()
        process = subprocess.Popen(  # noqa: ASYNC220 - spawning takes a millisecond
            self._command,
            env=environment,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        os.close(theirs)
        process.returncode = 0  # keeps this object from waiting for the process, which _reap() collects
        self._running[process.pid] = rank
        stream = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            partial(asyncio.StreamReaderProtocol, stream), os.fdopen(ours, "rb", buffering=0)
        )
        if self._requested is not None and process.pid in self._running:
            os.kill(process.pid, self._requested)
        return stream

    def _reap(self) -> None:
        for pid, code in reaped():
            rank = self._running.pop(pid, None)  # None: an orphan that process 1 has adopted
            if rank is not None and code != 0:
                self._failed.append((rank, code))
            self._rank_ended.set()

    async def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until ``condition`` holds, but at most ``seconds``; it is checked whenever a rank ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self._rank_ended.clear()
                    await self._rank_ended.wait()

    def _forward(self, number: int) -> None:
        self._requested = number
        self._send(number)

    def _send(self, number: int) -> None:
        for pid in self._running:
            os.kill(pid, number)

    async def _copy(self, rank: int, stream: asyncio.StreamReader) -> None:
        """Copy a rank's output to standard error, with the rank's number before each line."""
        rest, in_line = b"", False  # in_line: a first piece of the present long line has been printed
        while chunk := await stream.read(MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._show(rank, line, in_line)
                in_line = False
            if len(rest) > MAX_LINE_BYTES:
                self._show(rank, rest, in_line)
                rest, in_line = b"", True
        if rest:
            self._show(rank, rest, in_line)

    def _show(self, rank: int, line: bytes, continues: bool) -> None:
        text = line.decode(errors="replace")
        _print(f"[rank {rank}] {text}")
        if text.strip() and not continues:
            self._last_line[rank] = _LOG_PREFIX.sub("", text.strip())[:QUOTED_CHARACTERS]


def _print(line: str) -> None:
    """A line that the log has no room for is lost: a rank whose output is not read would wait for ever."""
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; returns the exit code (see the module)."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    command = sys.argv[1:] if argv is None else argv
    try:
        if not command:
            raise LaunchError("no command: python -m scalerl_trainer.launch COMMAND...")
        launcher = Launcher(command, rank_environments(os.environ))
    except LaunchError as error:
        log.error("%s", error)
        return BAD_INPUT_EXIT_CODE
    return asyncio.run(launcher.run())


if __name__ == "__main__":
    sys.exit(main())
