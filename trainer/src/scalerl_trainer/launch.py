"""``python -m scalerl_trainer.launch COMMAND...``: runs the command once per rank of this pod.

Reads ``NODE_RANK`` (the pod's index), ``LOCAL_WORLD_SIZE`` (ranks in this pod) and ``SCALERL_NAME``; gives each rank
``RANK``, ``LOCAL_RANK`` and a name of its own, and passes on the rest (``WORLD_SIZE``, ``MASTER_ADDR``,
``MASTER_PORT``). Ranks of one pod share its GPUs, NVLink and ``/dev/shm``.

Exit code: 0 when all ranks exit 0; else that of the rank that failed first, 128 + n for signal n. The last line of the
log names that rank and quotes its last line, because the kubelet's termination message is the end of the log. When one
rank fails, the others get SIGTERM, and SIGKILL after :data:`END_SECONDS`: a collective without its peer does not end by
itself. SIGTERM and SIGINT go on to all ranks, which have the pod's whole grace period for a checkpoint. When the
launcher is killed, the kernel kills the ranks.

torchrun is not used: it exits with 1 whatever the rank's code is, kills the ranks 30 s after SIGTERM, and its
rendezvous and restarts do what the Job and the operator do already.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from scalerl_api.process import BAD_INPUT_EXIT_CODE, NAME

END_SECONDS = 10.0
"""From SIGTERM to SIGKILL for the other ranks once one has failed, and then for the kernel to end them."""
LONGEST_LINE = 64 * 1024
"""Bytes after which an output line is passed on in pieces."""
QUOTED_CHARACTERS = 1500
"""Of the failed rank's last line; the kubelet keeps 2,048 bytes of a termination message."""
_PR_SET_PDEATHSIG = 1
_LOG_PREFIX = re.compile(r"^\S+ \S+ (?:INFO|WARNING|ERROR|CRITICAL) \S+ ")

log = logging.getLogger("scalerl_trainer.launch")


class LaunchError(Exception):
    """A variable of the pod is missing or malformed."""


def rank_environments(environment: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Environment of each of this pod's ranks, by rank.

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
    # torch starts a thread per core in every process; ranks that share the cores divide them.
    threads = max(1, len(os.sched_getaffinity(0)) // local_world)
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


class Launcher:
    """The ranks of one pod, from start to end."""

    def __init__(self, command: Sequence[str], environments: Mapping[int, dict[str, str]]) -> None:
        self._command = command
        self._environments = environments
        self._ranks: dict[int, Process] = {}
        self._ended: list[tuple[int, int]] = []  # (rank, return code), in the order in which they ended
        self._last_line: dict[int, str] = {}
        self._requested: int | None = None

    async def run(self) -> int:
        """Start the ranks, wait for all; the pod's exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._forward, number)
        die_with_launcher = _die_with(os.getpid())
        copies = []
        for rank, environment in self._environments.items():
            # A pipe of our own: asyncio's wait for a process also waits until nobody holds the pipe that it made.
            ours, theirs = os.pipe()
            self._ranks[rank] = process = await asyncio.create_subprocess_exec(
                *self._command, env=environment, stdout=theirs, stderr=theirs, preexec_fn=die_with_launcher
            )
            os.close(theirs)
            stream = asyncio.StreamReader()
            await loop.connect_read_pipe(
                partial(asyncio.StreamReaderProtocol, stream), os.fdopen(ours, "rb", buffering=0)
            )
            copies.append(asyncio.create_task(self._copy(rank, stream)))
            if self._requested is not None:
                process.send_signal(self._requested)
        waits = {asyncio.create_task(self._wait(rank)) for rank in self._ranks}
        running = waits
        while running and not self._failed:
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if running and self._requested is not None:
            # They have the signal, and may be writing the checkpoint: the pod's grace period bounds them.
            _, running = await asyncio.wait(running)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if running:
                self._send(number)
                _, running = await asyncio.wait(running, timeout=END_SECONDS)
        # A process that a rank has left behind may hold the pipe open.
        await asyncio.wait(copies, timeout=END_SECONDS)
        if not self._failed:
            return 0
        rank, code = self._failed[0]
        how = (
            f"exited with code {code}"
            if code > 0
            else f"was killed by {signal.Signals(-code).name} after printing"
        )
        log.error("rank %d %s: %s", rank, how, self._last_line.get(rank, "no output"))
        return code if code > 0 else 128 - code

    @property
    def _failed(self) -> list[tuple[int, int]]:
        return [(rank, code) for rank, code in self._ended if code != 0]

    def _forward(self, number: int) -> None:
        self._requested = number
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._ranks.values():
            if process.returncode is None:
                process.send_signal(number)

    async def _wait(self, rank: int) -> None:
        self._ended.append((rank, await self._ranks[rank].wait()))

    async def _copy(self, rank: int, stream: asyncio.StreamReader) -> None:
        """Pass on what a rank prints, each line after the rank's number."""
        rest = b""
        while chunk := await stream.read(LONGEST_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            self._show(rank, lines)
        self._show(rank, [rest] if rest else [])

    def _show(self, rank: int, lines: Sequence[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace")
            _print(f"[rank {rank}] {text}")
            if text.strip():
                self._last_line[rank] = _LOG_PREFIX.sub("", text.strip())[:QUOTED_CHARACTERS]


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _die_with(launcher: int) -> Callable[[], None]:
    """For a child between fork and exec: SIGKILL when the launcher ends, however it ends."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)

    return prepare


def main(argv: Sequence[str] | None = None) -> int:
    """The process; see the module for what it returns."""
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
