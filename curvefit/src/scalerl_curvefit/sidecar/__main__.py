"""`python -m scalerl_curvefit.sidecar [--host H] [--port P] [--token-file F]`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from aiohttp import web

from .app import Sidecar

DEFAULT_PORT = 8077
SHUTDOWN_SECONDS = 5.0


async def serve(host: str, port: int, token: str | None) -> None:
    """Serve until SIGTERM or SIGINT; requests under way get `SHUTDOWN_SECONDS` to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        Sidecar(token=token).application(), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0][1]
        logging.getLogger("scalerl_curvefit").info("listening on http://%s:%d", host, bound)
        await stop.wait()
    finally:
        await runner.cleanup()


def main() -> int:
    """Parse the command line and serve. Exit 2 for a bad one."""
    parser = argparse.ArgumentParser(prog="python -m scalerl_curvefit.sidecar", description=serve.__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: this host only)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 picks a free one")
    parser.add_argument("--token-file", type=Path, help="demand the bearer token in this file")
    arguments = parser.parse_args()
    token = None
    if arguments.token_file is not None:
        try:
            token = arguments.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            parser.error(f"--token-file {arguments.token_file}: {error.strerror}")
        if not token:
            parser.error(f"--token-file {arguments.token_file} is empty")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    try:
        asyncio.run(serve(arguments.host, arguments.port, token))
    except OSError as error:
        parser.error(f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
