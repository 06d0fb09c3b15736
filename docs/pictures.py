"""Draws the pictures of ``view.md``: the page of a finished run in a headless Chromium.

    make run RUN_DIR=runs/tiny-addition && .venv/bin/python docs/pictures.py runs/tiny-addition [--directory DIR] [--all]

``--all`` draws every view at 1280 and 390 pixels, light and dark.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from asyncio.subprocess import PIPE
from itertools import product
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests/support"))
import chromium  # noqa: E402

VIEWS: Final = (
    "curve",
    "metrics",
    "rollouts?split=held-out&step=last&sort=reward",
    "prompt",
    "timeline",
    "decisions",
)
PICTURES: Final = {
    "curve": ("curve", 1280, 800, False),
    "rollouts": (VIEWS[2], 1280, 900, False),
    "timeline": ("timeline", 1280, 720, False),
    "narrow": ("prompt", 390, 844, True),
}
"""View, width, height, and whether it is dark."""


async def draw(run: Path, directory: Path, pictures: dict[str, tuple[str, int, int, bool]]) -> None:
    command = (sys.executable, "-m", "scalerl_cli.main", "view", str(run))
    server = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        address = (await server.stdout.readline()).decode().split()[1] if server.stdout else ""
        async with chromium.tab() as tab:
            await tab.open(address)
            await tab.until("location.search === '' && document.querySelector('nav [aria-current]')")
            for name, (view, width, height, dark) in pictures.items():
                await tab.run(f"location.hash = {view!r}")
                await tab.until(
                    f"document.querySelector('nav [aria-current]').hash === {'#' + view.split('?')[0]!r}"
                )
                await tab.until("!/Reading …|Searching …/.test(document.getElementById('main').textContent)")
                (directory / f"view-{name}.png").write_bytes(await tab.screenshot(width, height, dark=dark))
    finally:
        server.terminate()
        await server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--directory", type=Path, default=DOCS / "images")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    every = {
        f"{view.split('?')[0]}-{width}{'-dark' * dark}": (view, width, 1000, dark)
        for view, width, dark in product(VIEWS, (1280, 390), (False, True))
    }
    asyncio.run(draw(arguments.run, arguments.directory, every if arguments.all else PICTURES))


if __name__ == "__main__":
    main()
