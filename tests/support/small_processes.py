"""Small real processes for tests, and how to look for them."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalerl_processes.child import MARK
from scalerl_processes.process_table import marked

STUBBORN_FAMILY = """
    # A child with a daemon grandchild (own session, parent gone) and a plain one; all ignore SIGTERM.
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-c", sleeper])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-S", "-c", sleeper])
        os._exit(0)
    os.wait()
    open(sys.argv[1], "w").write("up")
    time.sleep(600)
"""


HIDDEN_GRANDCHILD = """
    # A grandchild in a session of its own that shows no environment, as after setproctitle.
    import os, subprocess, sys, time
    code = "import os, time; open({!r}, 'w').write(str(os.getpid())); time.sleep(600)".format(sys.argv[1])
    subprocess.Popen([sys.executable, "-S", "-c", code], env={}, start_new_session=True)
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # also if it ends while it is read
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def script(tmp: Path, name: str, body: str) -> str:
    path = tmp / f"{name}.py"
    path.write_text(textwrap.dedent(body))
    return str(path)


async def eventually(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait for what other processes do: only another read shows it."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def left_of(mark: str) -> list[int]:
    return marked(MARK, mark)


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)
