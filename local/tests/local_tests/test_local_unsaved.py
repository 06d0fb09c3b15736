"""What a local run reports of a trainer that keeps its last weights in memory, and how it ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from coordinator_statuses import status
from local_runs import Harness, workload
from minimal_run import run_spec
from small_processes import eventually

from scalerl_api.paths import RunPaths
from scalerl_api.wire import BROKEN, FORECAST, INTERRUPTED, Phase
from scalerl_lifecycle.workloads import Lifetime, Role
from scalerl_local.reports import Reports
from scalerl_local.run_directory import RunDirectory
from scalerl_local.run_view import Event, UnitState

HELD = status(
    [],
    phase=Phase.FINISHING,
    stop_reason="maxSteps",
    unsaved_version=4,
    checkpoint_version=2,
    checkpoint_problem="No space left on device",
)
SLEEP = ("-c", "import time; time.sleep(600)")


def running(tmp_path: Path, *argv: str, **options: object) -> Harness:
    """A coordinator and a trainer, which sleeps unless ``argv`` says what it does."""
    return Harness(
        tmp_path,
        workload(Role.COORDINATOR, Lifetime.SERVICE, *SLEEP),
        workload(Role.TRAINER, Lifetime.GANG, *(argv or SLEEP)),
        **options,  # type: ignore[arg-type]
    )


def stored(harness: Harness) -> dict[str, object]:
    found: dict[str, object] = json.loads(harness.directory.paths.status.read_text())
    return found


def test_unsaved_weights_are_reported_once_with_what_to_do(tmp_path: Path) -> None:
    paths, events = RunPaths(tmp_path), list[Event]()
    reports = Reports(paths, events.append)
    reports.warnings(HELD)
    reports.warnings(HELD)
    (event,) = events
    assert event.is_problem
    assert "version 4 cannot be saved: No space left on device" in event.text
    assert "interrupt this command to give them up" in event.text
    later = msgspec.structs.replace(HELD, unsaved_version=-1, checkpoint_problem="")
    reports.warnings(later)
    assert events == [event], "a coordinator that has restarted does not know it yet"
    reports.warnings(HELD)
    paths.checkpoint(4).mkdir(parents=True)
    reports.warnings(later)
    assert (events[-1].text, events[-1].is_problem) == ("the last version is saved", False)


def test_lost_updates_are_named_unless_the_last_attempt_saved_them(tmp_path: Path) -> None:
    paths, events = RunPaths(tmp_path), list[Event]()
    reports = Reports(paths, events.append)
    reports.lost(HELD)
    assert events[-1].text == (
        "version 4 was not saved: all updates since version 2 are lost (No space left on device)"
    )
    paths.checkpoint(4).mkdir(parents=True)
    reports.lost(HELD)
    assert len(events) == 1


async def test_run_whose_trainer_never_registers_ends_with_its_budget(tmp_path: Path) -> None:
    harness = running(tmp_path)
    harness.coordinator.changes = {
        "phase": Phase.FINISHED,
        "stop_reason": "maxSteps",
        "trainer_registered": False,
    }
    assert await asyncio.wait_for(harness.run(), 120) is None
    (event,) = harness.events
    assert event.text.startswith("maxSteps was reached before the trainer registered: nothing was trained")
    assert stored(harness)["phase"] == "Completed"


@pytest.mark.parametrize("reason", [INTERRUPTED, FORECAST, BROKEN])
async def test_resumed_run_takes_its_earlier_stop_back(tmp_path: Path, reason: str) -> None:
    RunDirectory.create(tmp_path / "run", run_spec()).release()
    harness = running(tmp_path, resume=True)
    harness.coordinator.changes = {"phase": Phase.FINISHED, "stop_reason": reason}

    async def scenario() -> None:
        await eventually(lambda: harness.coordinator.stops)

    await harness.while_running(scenario)
    assert set(harness.coordinator.stops) == {""}
    assert f"resumed after: {reason}" in [event.text for event in harness.events]


@pytest.mark.parametrize(("unsaved", "drains"), [(-1, True), (4, False)])
async def test_interrupt_drains_unless_training_has_ended(tmp_path: Path, unsaved: int, drains: bool) -> None:
    """A trainer that keeps unsaved weights gets its signal at once, at which it tries a last time."""
    harness = running(tmp_path)
    task = asyncio.create_task(harness.run())
    trainer = harness.runtime.units[1]
    await eventually(lambda: trainer.status.state is UnitState.READY)
    harness.coordinator.changes = {"unsaved_version": unsaved, "phase": Phase.FINISHING}
    await eventually(lambda: harness.local._reports.unsaved_version == unsaved)
    harness.local.interrupt()
    if drains:
        await eventually(lambda: INTERRUPTED in harness.coordinator.stops)
        assert (trainer.status.state, stored(harness)["phase"]) == (UnitState.READY, "Suspending")
        harness.kill()
    await asyncio.wait_for(task, 120)
    assert stored(harness)["phase"] == ("Suspending" if drains else "Suspended")


async def test_drained_run_is_suspended_and_resumed_by_its_status(tmp_path: Path) -> None:
    over = tmp_path / "over"
    first = running(
        tmp_path, "-c", f"import os, time\nwhile not os.path.exists({str(over)!r}): time.sleep(0.05)"
    )
    task = asyncio.create_task(first.run())
    await eventually(lambda: first.runtime.units[1].status.state is UnitState.READY)
    first.local.interrupt()
    await eventually(lambda: INTERRUPTED in first.coordinator.stops)
    over.touch()
    await asyncio.wait_for(task, 120)
    assert {key: stored(first)[key] for key in ("phase", "reason", "suspension")} == {
        "phase": "Suspended",
        "reason": "SuspendedBySpec",
        "suspension": "Suspended",
    }
    first.directory.release()
    again = running(tmp_path, "-c", "", resume=True)
    assert await asyncio.wait_for(again.run(), 120) is None
    assert stored(again)["phase"] == "Completed"
    assert stored(again)["trainer"]["attempt"] == 1  # type: ignore[index]
    again.directory.release()
    ended = running(tmp_path, "-c", "", resume=True)
    result = await asyncio.wait_for(ended.local.run(), 120)
    assert (result.status, result.outcome is not None) == (None, True), (
        "no limit is raised: nothing is started"
    )


async def test_full_volume_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scalerl_local.status_file.replace_file", full)
    harness = running(tmp_path, "-c", "")
    assert await asyncio.wait_for(harness.run(), 120) is None
    texts = [event.text for event in harness.events]
    assert texts == ["status.json cannot be written: No space left on device"]
