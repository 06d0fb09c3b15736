"""What a resumed run on this machine begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from operator_tests.children import run_spec
from operator_tests.scaling import evaluations, run, spec, status
from scalerl_operator.autoscaling.decision_log import DecisionRecord
from scalerl_operator.autoscaling.models import Action, Decision, Generators, History, State
from scalerl_operator.autoscaling.observation import observe, point
from scalerl_operator.local.devices import VISIBLE
from scalerl_operator.local.local_autoscaler import resumed_plan
from scalerl_operator.plan import plan
from scalerl_operator.workloads import Role

CURVE = evaluations([0.2, 0.3])


async def recorded(tmp_path: Path, mode: str, wanted: int, to: int | None) -> DecisionRecord:
    """A record whose last line has seen ``wanted`` generators, and decided on ``to``."""
    record = DecisionRecord.open(tmp_path / "decisions.jsonl")
    points = [point(e) for e in CURVE]
    seen = observe(run(), status(CURVE), points, Generators(wanted=wanted, ready=wanted), unix_seconds=1.7e9)
    action = Action() if to is None else Action(kind="scale", generators=to)
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
async def test_a_run_begins_with_the_generators_that_were_chosen(
    tmp_path: Path, recorded_mode: str, wanted: int, to: int | None, rules: dict[str, Any], expected: int
) -> None:
    record = await recorded(tmp_path, recorded_mode, wanted, to)
    made = run_spec(autoscaling={"mode": "Auto", "generators": {"max": 4}} | rules)
    found, message = resumed_plan(plan(made), made.spec, record)
    assert found.workload(Role.GENERATOR).replicas == expected
    assert found.workload(Role.TRAINER) == plan(made).workload(Role.TRAINER)
    assert bool(message) == (expected != 1)


async def test_a_first_start_is_the_specs(tmp_path: Path) -> None:
    made = run_spec(autoscaling={"mode": "Auto", "generators": {"max": 4}})
    record = DecisionRecord.open(tmp_path / "decisions.jsonl")
    assert resumed_plan(plan(made), made.spec, record) == (plan(made), "")


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
    found, message = resumed_plan(plan(made), made.spec, record)
    assert found.workload(Role.GENERATOR).replicas == expected
    assert ("3 found on this machine" in message) == (expected == 1)
