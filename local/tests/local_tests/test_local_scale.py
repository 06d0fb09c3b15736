"""Scaling of replicas during a run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from local_runs import Harness, workload
from small_processes import eventually, is_running, script

from scalerl_api.status import RunStatus
from scalerl_lifecycle.workloads import Container, Lifetime, Resources, Role, Workload
from scalerl_local.devices import VISIBLE, NotEnoughDevices
from scalerl_local.ports import Ports
from scalerl_processes.child import ChildProcess, Command

SERVICE = """
    # Says who it is; leaves on SIGTERM after a moment.
    import json, os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(.2), os._exit(0)))
    keys = ("SCALERL_NAME", "CUDA_VISIBLE_DEVICES", "SCALERL_PORT_HTTP")
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({k: os.environ.get(k) for k in keys} | {"pid": os.getpid()}) + "\\n")
    time.sleep(600)
"""


class Replicas:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "notes"
        self.argv = (script(tmp_path, "service", SERVICE), str(self.path))

    def live(self) -> dict[str, dict[str, str]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        notes = [json.loads(line) for line in lines]
        return {n["SCALERL_NAME"]: n for n in notes if is_running(int(n["pid"]))}

    async def are(self, *names: str) -> None:
        await eventually(lambda: sorted(self.live()) == sorted(names))


def generators(replicas: Replicas, devices: int = 0) -> Workload:
    container = Container(
        name="server",
        argv=("python", *replicas.argv),
        ports=("http",),
        resources=Resources(devices=devices),
    )
    return Workload(Role.GENERATOR, Lifetime.SERVICE, (container,))


def trainer() -> Workload:
    return workload(Role.TRAINER, Lifetime.GANG, "-c", "import time; time.sleep(600)")


async def test_scale_up_down_and_up_again(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path)
    harness = Harness(tmp_path, generators(replicas), trainer())
    runtime = harness.runtime

    async def scenario() -> None:
        await replicas.are("generator-0")
        runtime.scale(Role.GENERATOR, 3)
        await replicas.are("generator-0", "generator-1", "generator-2")
        first = replicas.live()
        assert len({n["SCALERL_PORT_HTTP"] for n in first.values()}) == 3
        runtime.scale(Role.GENERATOR, 1)
        assert runtime.draining(Role.GENERATOR)
        with pytest.raises(RuntimeError, match="still draining"):
            runtime.scale(Role.GENERATOR, 2)
        await replicas.are("generator-0")
        await eventually(lambda: not runtime.draining(Role.GENERATOR))
        assert replicas.live()["generator-0"]["pid"] == first["generator-0"]["pid"], "left alone"
        runtime.scale(Role.GENERATOR, 2)
        await replicas.are("generator-0", "generator-1")
        assert runtime.replicas(Role.GENERATOR) == 2

    await harness.while_running(scenario)
    assert replicas.live() == {}
    assert harness.events == []


async def test_status_has_the_generators_that_exist(tmp_path: Path) -> None:
    harness = Harness(tmp_path, generators(Replicas(tmp_path)), trainer())
    harness.local._drain_seconds = 0.0

    def stored() -> int:
        return RunStatus.read(json.loads(harness.directory.paths.status.read_text())).generators.replicas

    task = asyncio.create_task(harness.run())
    try:
        await eventually(lambda: harness.directory.paths.status.exists() and stored() == 1)
    finally:
        harness.local.interrupt()
        await asyncio.wait_for(task, 120)
    assert stored() == 0, "of a suspended run none, though its spec has one"


async def test_added_replica_restarts_like_the_first(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path)
    harness = Harness(tmp_path, generators(replicas), trainer())

    async def scenario() -> None:
        await replicas.are("generator-0")
        harness.runtime.scale(Role.GENERATOR, 2)
        await replicas.are("generator-0", "generator-1")
        pid = int(replicas.live()["generator-1"]["pid"])
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: int(replicas.live().get("generator-1", {}).get("pid", pid)) != pid)

    await harness.while_running(scenario)
    assert any("generator-1" in e.text for e in harness.events)


async def test_scale_reassigns_devices_and_never_shares_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "0,1,2")
    replicas = Replicas(tmp_path)
    harness = Harness(tmp_path, generators(replicas, devices=1), trainer())

    async def scenario() -> None:
        await replicas.are("generator-0")
        harness.runtime.scale(Role.GENERATOR, 3)
        await replicas.are("generator-0", "generator-1", "generator-2")
        assert sorted(n[VISIBLE] for n in replicas.live().values()) == ["0", "1", "2"]
        with pytest.raises(NotEnoughDevices, match=r"1 more devices asked for, 0 .* are free"):
            harness.runtime.scale(Role.GENERATOR, 4)
        assert harness.runtime.replicas(Role.GENERATOR) == 3
        harness.runtime.scale(Role.GENERATOR, 1)
        await eventually(lambda: not harness.runtime.draining(Role.GENERATOR))
        harness.runtime.scale(Role.GENERATOR, 3)
        await replicas.are("generator-0", "generator-1", "generator-2")
        assert sorted(n[VISIBLE] for n in replicas.live().values()) == ["0", "1", "2"]

    await harness.while_running(scenario)


async def test_inessential_unit_failure_does_not_end_the_run(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path)
    container = Container(name="extra", argv=("python", "-c", "import sys; sys.exit(2)"))
    extra = Workload(Role.COORDINATOR, Lifetime.SERVICE, (container,), essential=False)
    harness = Harness(tmp_path, generators(replicas), extra, trainer())

    async def scenario() -> None:
        await eventually(lambda: any("the run continues without it" in e.text for e in harness.events))
        await replicas.are("generator-0")

    await harness.while_running(scenario)


async def test_scale_refuses_a_gang(tmp_path: Path) -> None:
    harness = Harness(tmp_path, generators(Replicas(tmp_path)), trainer())

    async def scenario() -> None:
        with pytest.raises(ValueError, match="start and end together"):
            harness.runtime.scale(Role.TRAINER, 2)

    await harness.while_running(scenario)


async def test_replica_that_cannot_be_started_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster: the others go on."""
    replicas = Replicas(tmp_path)
    harness = Harness(tmp_path, generators(replicas), trainer())
    start = ChildProcess.start

    def full(command: Command) -> ChildProcess:
        if "generator-1" in command.log.name:
            raise OSError(28, "No space left on device")
        return start(command)

    monkeypatch.setattr(ChildProcess, "start", full)

    async def scenario() -> None:
        await replicas.are("generator-0")
        harness.runtime.scale(Role.GENERATOR, 2)
        await eventually(lambda: any("No space left" in event.text for event in harness.events))
        await asyncio.sleep(0.3)
        await replicas.are("generator-0")
        assert harness.runtime.observed(0.0).generators.given_up is not None

    await harness.while_running(scenario)
    assert replicas.live() == {}


async def test_scale_without_free_ports_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = Replicas(tmp_path)
    harness = Harness(tmp_path, generators(replicas), trainer())

    async def scenario() -> None:
        await replicas.are("generator-0")
        with monkeypatch.context() as patched:
            patched.setattr(
                Ports, "take", lambda self: (_ for _ in ()).throw(OSError(24, "Too many open files"))
            )
            with pytest.raises(OSError, match="Too many"):
                harness.runtime.scale(Role.GENERATOR, 2)
        assert harness.runtime.replicas(Role.GENERATOR) == 1
        harness.runtime.scale(Role.GENERATOR, 2)
        await replicas.are("generator-0", "generator-1")

    await harness.while_running(scenario)


async def test_scale_does_nothing_once_the_run_is_ending(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path)
    harness = Harness(tmp_path, generators(replicas), trainer())
    running = asyncio.create_task(harness.run())
    await replicas.are("generator-0")
    harness.stop()
    await eventually(lambda: harness.runtime.units[0].is_stopping)
    harness.runtime.scale(Role.GENERATOR, 2)
    assert await asyncio.wait_for(running, 120) is None
    assert "generator-1" not in replicas.path.read_text()
