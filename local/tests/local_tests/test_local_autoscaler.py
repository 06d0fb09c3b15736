"""The autoscaler's back end for a local run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from autoscaler_inputs import run, spec
from coordinator_statuses import evaluations, status
from decision_service import DecisionService, opened
from local_runs import Harness, workload
from minimal_run import run_spec
from small_processes import eventually

from scalerl_api.wire import BROKEN, FORECAST
from scalerl_autoscaling.autoscaler import Autoscaler, Step
from scalerl_autoscaling.decision_log import DecisionRecord
from scalerl_autoscaling.models import Action, Decision, Generators, History, State
from scalerl_autoscaling.observation import observe, point
from scalerl_lifecycle.role_containers import plan
from scalerl_lifecycle.workloads import Lifetime, Role
from scalerl_local.devices import VISIBLE
from scalerl_local.local_autoscaler import LocalAutoscaler, resumed_plan
from scalerl_local.run_view import Event

CURVE = evaluations([0.2, 0.3])


async def recorded(tmp_path: Path, mode: str, wanted: int, to: int | None) -> DecisionRecord:
    """A record whose last line has seen ``wanted`` generators, and decided on ``to``."""
    record = await opened(tmp_path / "decisions.jsonl")
    points = [point(e) for e in CURVE]
    seen = observe(run(), status(CURVE), points, Generators(wanted=wanted, ready=wanted), unix_seconds=1.7e9)
    action = Action() if to is None else Action(kind="scale", scale_to=to)
    decision = Decision(state=State.CONTINUE, reasons=["so"], action=action, history=History())
    await record.append("balance", spec(mode=mode, generators={"max": 8}), points, seen, decision)
    return record


@pytest.mark.parametrize(
    ("recorded_mode", "wanted", "to", "rules", "expected"),
    [
        ("Auto", 2, 3, {}, 3),
        ("Auto", 3, None, {}, 3),
        ("Advisory", 1, 3, {}, 1),
        ("Auto", 2, 3, {"mode": "Advisory"}, 1),
        ("Auto", 2, 3, {"generators": {"max": 2}}, 2),
        ("Auto", 2, 3, {"generators": None}, 1),
    ],
)
async def test_run_starts_with_the_chosen_generators(
    tmp_path: Path, recorded_mode: str, wanted: int, to: int | None, rules: dict[str, Any], expected: int
) -> None:
    record = await recorded(tmp_path, recorded_mode, wanted, to)
    made = run_spec(autoscaling={"mode": "Auto", "generators": {"max": 4}} | rules)
    found, message = resumed_plan(plan(made), made.spec, record.summary)
    assert found.workload(Role.GENERATOR).replicas == expected
    assert found.workload(Role.TRAINER) == plan(made).workload(Role.TRAINER)
    assert bool(message) == (expected != 1)


async def test_first_start_uses_the_spec(tmp_path: Path) -> None:
    made = run_spec(autoscaling={"mode": "Auto", "generators": {"max": 4}})
    record = await opened(tmp_path / "decisions.jsonl")
    assert resumed_plan(plan(made), made.spec, record.summary) == (plan(made), "")


@pytest.mark.parametrize(("devices", "expected"), [("0,1,2,3,4", 4), ("0,1,2", 1)])
async def test_devices_that_are_gone_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str, expected: int
) -> None:
    monkeypatch.setenv(VISIBLE, devices)
    record = await recorded(tmp_path, "Auto", 1, 4)
    made = run_spec(
        autoscaling={"mode": "Auto", "generators": {"max": 4}},
        generator={"devices": 1},
        trainer={"devices": 1},
    )
    found, message = resumed_plan(plan(made), made.spec, record.summary)
    assert found.workload(Role.GENERATOR).replicas == expected
    assert ("3 found on this machine" in message) == (expected == 1)


@asynccontextmanager
async def deciding(
    tmp_path: Path, state: State, action: Action, **changes: Any
) -> AsyncIterator[tuple[LocalAutoscaler, Harness, list[Event]]]:
    """The autoscaler of a run whose last decision, of an earlier process, was ``action``; ``changes`` of its first statuses."""
    made = run_spec(autoscaling={"mode": "Auto", "generators": {"max": 4}}).spec
    record = await opened(tmp_path / "decisions.jsonl")
    known = [point(e) for e in CURVE]
    observation = observe(made, status(CURVE), known, Generators(wanted=1, ready=1), unix_seconds=1.7e9)
    decision = Decision(state=state, reasons=["so"], action=action, history=History())
    await record.append("autoscale", made.autoscaling, known, observation, decision)
    harness = Harness(
        tmp_path, workload(Role.GENERATOR, Lifetime.SERVICE, "-c", "import time; time.sleep(600)")
    )
    events: list[Event] = []
    autoscaler = LocalAutoscaler(
        made,
        harness.runtime,
        DecisionService(path=tmp_path / "decisions.jsonl").record(),
        applied=record.summary.sequence - 1,
        token="secret",
        on_event=events.append,
    )
    points = changes.pop("points", [])

    async def update() -> None:
        first, later = status(points, **changes), status(points)
        for one in itertools.chain(itertools.repeat(first, 20), itertools.repeat(later)):
            autoscaler.update(one)
            await asyncio.sleep(0.01)

    runtime = asyncio.create_task(harness.run())
    task = asyncio.create_task(update())
    try:
        yield autoscaler, harness, events
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        autoscaler.close()
        harness.stop()
        await asyncio.wait_for(runtime, 120)


async def test_recorded_stop_is_executed_after_a_restart(tmp_path: Path) -> None:
    async with deciding(tmp_path, State.STOP, Action(kind="stop")) as (autoscaler, _, _):
        await eventually(lambda: autoscaler.stop == FORECAST)


@pytest.mark.parametrize(
    ("state", "kind", "reason"), [(State.STOP, "stop", FORECAST), (State.BROKEN, "hold", BROKEN)]
)
async def test_resumed_run_ignores_the_decision_that_stopped_it(
    tmp_path: Path, state: State, kind: Any, reason: str
) -> None:
    """Its first statuses still have the stop; the next ones do not."""
    async with deciding(tmp_path, state, Action(kind=kind), stop_reason=reason) as (
        autoscaler,
        _,
        _,
    ):
        await asyncio.sleep(0.1)
        assert autoscaler.stop == ""
        await asyncio.sleep(0.3)
        assert autoscaler.stop == ""


async def test_autoscaler_error_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError("so")

    monkeypatch.setattr(Autoscaler, "step", fail)
    async with deciding(tmp_path, State.CONTINUE, Action(), points=CURVE) as (_, _, events):
        await eventually(lambda: events)
        await asyncio.sleep(0.2)
        assert [(e.text, e.is_problem) for e in events] == [("ZeroDivisionError: so", True)]


async def test_chosen_number_is_applied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``resumed_plan`` has started as many as the last decision of the process before set, or could not."""
    numbers = iter((3, 3, 2))

    async def decide(autoscaler: Autoscaler, *_: object) -> Step | None:
        number = next(numbers, None)
        if number is None:
            return None
        known = autoscaler.record.summary
        assert known.last is not None
        action = Action(kind="scale", scale_to=number)
        decision = Decision(state=State.CONTINUE, reasons=["so"], action=action, history=known.history)
        line = await autoscaler.record.append(
            "balance", autoscaler.spec.autoscaling, known.points, known.last.observation, decision
        )
        return Step("balance", line.decision, action, False)

    monkeypatch.setattr(Autoscaler, "step", decide)
    scaled: list[int] = []
    async with deciding(tmp_path, State.GROW, Action(kind="scale", scale_to=4)) as (
        _,
        harness,
        _,
    ):
        monkeypatch.setattr(harness.runtime, "scale", lambda role, number: scaled.append(number))
        await eventually(lambda: len(scaled) == 3)
        await asyncio.sleep(0.2)
    assert scaled == [3, 3, 2], "the runtime does not take them here, and each is requested once"
