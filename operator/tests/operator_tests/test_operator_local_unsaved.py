"""What a local run reports of a trainer that keeps its last weights in memory, and how an interrupt ends it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from operator_tests.children import run_spec
from operator_tests.scaling import status
from scalerl_api.wire import Phase
from scalerl_operator.local.run import LocalRun
from scalerl_operator.local.run_directory import RunDirectory
from scalerl_operator.local.unit import Event
from scalerl_operator.policy.lifecycle import DRAIN_SECONDS
from scalerl_operator.role_containers import plan
from scalerl_operator.workloads import Role

HELD = status(
    [],
    phase=Phase.FINISHING,
    stop_reason="maxSteps",
    unsaved_version=4,
    checkpoint_version=2,
    checkpoint_problem="No space left on device",
)


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[tuple[LocalRun, list[Event], RunDirectory]]:
    run, events = run_spec(), list[Event]()
    directory = RunDirectory.create(tmp_path / "run", run)
    local = LocalRun(run, plan(run), directory, on_event=events.append)
    yield local, events, directory
    await local._client.aclose()
    local._runtime._ports.close()
    directory.release()


async def test_unsaved_weights_are_reported_once_with_what_to_do(
    local: tuple[LocalRun, list[Event], RunDirectory],
) -> None:
    run, events, directory = local
    run._report_warnings(HELD)
    run._report_warnings(HELD)
    (event,) = events
    assert event.is_problem
    assert "version 4 cannot be saved: No space left on device" in event.text
    assert "interrupt this command to give them up" in event.text
    later = msgspec.structs.replace(HELD, unsaved_version=-1, checkpoint_problem="")
    run._report_warnings(later)
    assert events == [event], "a coordinator that has restarted does not know it yet"
    run._report_warnings(HELD)
    directory.paths.checkpoint(4).mkdir(parents=True)
    run._report_warnings(later)
    assert (events[-1].text, events[-1].is_problem) == ("the last version is saved", False)


async def test_run_whose_trainer_never_registers_ends_with_its_budget(
    local: tuple[LocalRun, list[Event], RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, events, _ = local
    stops: list[None] = []
    monkeypatch.setattr(run._runtime, "stop", lambda: stops.append(None))
    run._status = msgspec.structs.replace(
        HELD, phase=Phase.FINISHED, stop_reason="maxSeconds", unsaved_version=-1, trainer_registered=True
    )
    run._revocable = ()
    await run._apply()
    assert not stops, "a trainer that registered saves, and exits by itself"
    run._status = msgspec.structs.replace(run._status, trainer_registered=False)
    await run._apply()
    await run._apply()
    assert stops
    (event,) = events
    assert event.text.startswith("maxSeconds was reached before the trainer registered: nothing was trained")


async def test_resumed_run_is_not_ended_by_its_earlier_limit(
    local: tuple[LocalRun, list[Event], RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = local
    told: list[str] = []

    async def stop(reason: str) -> None:
        told.append(reason)

    monkeypatch.setattr(run._runtime, "stop", lambda: told.append("ended"))
    monkeypatch.setattr(run._client, "stop", stop)
    run._status = msgspec.structs.replace(
        HELD, phase=Phase.FINISHED, stop_reason="maxSeconds", unsaved_version=-1, trainer_registered=False
    )
    await run._apply()
    assert told == [""], "the stop is cancelled"


async def test_interrupt_does_not_drain_a_run_that_has_ended_training(
    local: tuple[LocalRun, list[Event], RunDirectory],
) -> None:
    run, _, _ = local
    run.interrupt()
    assert run._drain_until > time.monotonic() + DRAIN_SECONDS / 2
    run._interrupts = 0
    run._report_warnings(HELD)
    run.interrupt()
    assert run._drain_until <= time.monotonic()


async def test_lost_updates_are_named_unless_the_last_attempt_saved_them(
    local: tuple[LocalRun, list[Event], RunDirectory],
) -> None:
    run, events, directory = local
    run._report_lost(HELD)
    assert events[-1].text == (
        "version 4 was not saved: all updates since version 2 are lost (No space left on device)"
    )
    directory.paths.checkpoint(4).mkdir(parents=True)
    run._report_lost(HELD)
    assert len(events) == 1


async def test_generators_are_needed_once_mid_training_has_ended(
    local: tuple[LocalRun, list[Event], RunDirectory],
) -> None:
    run, _, _ = local
    run._status = msgspec.structs.replace(HELD, checkpoint_version=-1, published_version=-1)
    assert run._needed(Role.GENERATOR), "a run without mid-training"
    run._run = run_spec(warmStart={"steps": 1})
    assert not run._needed(Role.GENERATOR)
    assert run._needed(Role.TRAINER)
    run._status = msgspec.structs.replace(HELD, checkpoint_version=0, published_version=-1)
    assert run._needed(Role.GENERATOR)
