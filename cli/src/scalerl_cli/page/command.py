"""The command: which directories, which port, and the address to open."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Final

from aiohttp import web

from scalerl_cli.clusters.session import ClusterProblem, explained
from scalerl_cli.exits import DONE, Refused
from scalerl_cli.output import echo, replace_text
from scalerl_cli.page.runs import NotARun, Run
from scalerl_cli.page.server import Server, bound
from scalerl_operator.kube import errors

FIRST_PORT: Final = 8660


def run_view(arguments: argparse.Namespace) -> int:
    """Run the command until it is interrupted; returns its exit code."""
    with contextlib.ExitStack() as stack:
        runs = [_opened(where, arguments, stack) for where in arguments.dirs]
        names = Counter(run.name for run in runs)
        for run in runs:
            run.name += f" ({run.directory})" if names[run.name] > 1 else ""
        if arguments.perfetto is not None:
            return _export(runs, arguments)
        return _listen(runs, arguments)


def _opened(where: Path, arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Run:
    """The run in a directory, else that of a cluster. Raises :class:`NotARun`."""
    from scalerl_cli.page.mirror import NAME, mirrored

    if where.exists() or not NAME.fullmatch(str(where)):
        return Run(where)
    try:
        return stack.enter_context(mirrored(str(where), arguments))
    except (ClusterProblem, errors.ApiError) as error:
        raise NotARun(f"{where}: no such directory; as a run on a cluster: {explained(error)}") from error


def _listen(runs: list[Run], arguments: argparse.Namespace) -> int:
    try:
        listening = bound(arguments.port, FIRST_PORT)
    except OSError as error:
        where = f"port {arguments.port}" if arguments.port is not None else f"ports from {FIRST_PORT} on"
        raise Refused(f"{where}: {error.strerror}; choose another with --port") from error
    asyncio.run(_serve(runs, listening))
    return DONE


def _export(runs: list[Run], arguments: argparse.Namespace) -> int:
    if len(runs) > 1:
        raise Refused("--perfetto is for one run: give one directory")
    content = runs[0].perfetto()
    if not any(event["ph"] == "X" for event in content["traceEvents"]):
        raise Refused(f"{runs[0].directory} has no trained steps yet")
    replace_text(arguments.perfetto, json.dumps(content, separators=(",", ":")))
    echo(f"{arguments.perfetto}: open it in Perfetto (ui.perfetto.dev) or chrome://tracing")
    return DONE


async def _serve(runs: list[Run], listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    server = Server(runs)
    # No log of requests: their addresses may have the token.
    runner = web.AppRunner(server.app(), access_log=None, handle_signals=False, shutdown_timeout=0.5)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await runner.setup()
    # Long files are read before the browser asks.
    reading = asyncio.gather(*(asyncio.to_thread(run.state) for run in runs), return_exceptions=True)
    try:
        await web.SockSite(runner, listening).start()
        address = f"http://127.0.0.1:{port}/?token={server.token}"
        echo(f"open {address} in a browser of this machine; Ctrl-C ends it")
        await ended.wait()
        await reading
    finally:
        await runner.cleanup()
