"""Small real processes for the tests of the local runtime, and how to look for them."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from scalerl_api.spec import ScaleRLRun
from scalerl_operator.local.process import MARK
from scalerl_operator.local.procfs import marked
from scalerl_operator.local.run_directory import RunDirectory
from scalerl_operator.local.supervisor import LocalRuntime, LocalSettings
from scalerl_operator.local.unit import Event
from scalerl_operator.policy.restarts import RestartPolicy
from scalerl_operator.workloads import Container, Lifetime, Plan, Role, Workload

QUICK = RestartPolicy(first_delay_seconds=0.05, max_delay_seconds=0.2, max_failed_starts=3, max_restarts=4)

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
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def run_spec(**spec: Any) -> ScaleRLRun:
    base: dict[str, Any] = {
        "model": {"scratch": {}},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "reasoning-gym"}},
        "budget": {"maxSteps": 4},
    }
    return ScaleRLRun.model_validate({"metadata": {"name": "test"}, "spec": base | spec})


def script(tmp: Path, name: str, body: str) -> str:
    path = tmp / f"{name}.py"
    path.write_text(textwrap.dedent(body))
    return str(path)


def workload(role: Role, lifetime: Lifetime, *argv: str, replicas: int = 1, **container: Any) -> Workload:
    return Workload(
        role, lifetime, (Container(str(role), ("python", "-S", *argv), **container),), replicas=replicas
    )


async def always(lifetime: Lifetime) -> bool:
    return True


async def eventually(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait for what other processes do: only another read shows it."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Harness:
    """A runtime on a plan of small processes, with its events kept."""

    def __init__(self, tmp: Path, *workloads: Workload, may_exit: Any = always, **settings: Any) -> None:
        self.directory = RunDirectory.create(tmp / "run", run_spec())
        self.events: list[Event] = []
        self.needed = True
        self.runtime = LocalRuntime(
            Plan(workloads),
            self.directory,
            settings=LocalSettings(**{"restart": QUICK, "grace_seconds": 1.0, **settings}),
            may_exit=may_exit,
            needed=lambda role: self.needed,
            on_event=self.events.append,
        )

    def log(self, name: str) -> str:
        return (self.directory.paths.logs / f"{name}.log").read_text()

    async def while_running(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run, ``scenario`` meanwhile, stop, and see that the runtime ends."""
        task = asyncio.create_task(self.runtime.run())
        try:
            await scenario()
        finally:
            self.runtime.stop()
            await asyncio.wait_for(task, 120)


def left_of(mark: str) -> list[int]:
    return marked(MARK, mark)


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)
