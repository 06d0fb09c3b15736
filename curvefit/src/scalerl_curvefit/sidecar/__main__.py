"""`python -m scalerl_curvefit.sidecar [--host H] [--port P] [--metrics-host H --metrics-port P] [--token-file F]`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web

from .app import Sidecar, runner
from .malloc import keep_freed_memory

DEFAULT_PORT = 8077
SHUTDOWN_SECONDS = 5.0


async def serve(host: str, port: int, token: str | None, metrics: tuple[str, int] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight have `SHUTDOWN_SECONDS` to finish."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sidecar = Sidecar(token=token)
    async with AsyncExitStack() as stack:
        await _listen(stack, sidecar.application(), host, port, "listening")
        if metrics is not None:
            await _listen(stack, sidecar.metrics_application(), *metrics, "metrics")
        await stop.wait()


async def _listen(
    stack: AsyncExitStack, application: web.Application, host: str, port: int, what: str
) -> None:
    served = runner(application, SHUTDOWN_SECONDS)
    stack.push_async_callback(served.cleanup)
    await served.setup()
    try:
        await web.TCPSite(served, host, port).start()
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    bound = served.addresses[0][1]
    logging.getLogger("scalerl_curvefit").info("%s on http://%s:%d", what, host, bound)


def main() -> int:
    """Parse the command line and serve. Exits with 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="python -m scalerl_curvefit.sidecar", description=serve.__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: this host only)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 picks a free one")
    parser.add_argument("--metrics-host", default="127.0.0.1", help="address of --metrics-port")
    parser.add_argument("--metrics-port", type=int, help="another port, with metrics and health only")
    parser.add_argument("--token-file", type=Path, help="require the bearer token in this file")
    arguments = parser.parse_args()
    token = None
    if arguments.token_file is not None:
        try:
            token = arguments.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            parser.error(f"--token-file {arguments.token_file}: {error.strerror}")
        if not token:
            parser.error(f"--token-file {arguments.token_file} is empty")
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    metrics = None if arguments.metrics_port is None else (arguments.metrics_host, arguments.metrics_port)
    try:
        asyncio.run(serve(arguments.host, arguments.port, token, metrics))
    except OSError as error:
        parser.error(str(error.strerror))
    return 0


if __name__ == "__main__":
    sys.exit(main())
