"""What is written of a run's status: each thing once, and nothing of steps that were given up."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest

from scalerl_api.spec import API_VERSION, KIND
from scalerl_api.status import Condition, ExportsStatus, RunStatus, TrainerStatus
from scalerl_lifecycle.lifecycle_types import PersistedState
from scalerl_operator.controller.parts import Accepted, Run
from scalerl_operator.controller.reconcile import accept
from scalerl_operator.controller.run_object import RunObject
from scalerl_operator.controller.volume import OF_STEPS, without_steps
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi

T0 = "2026-01-01T00:00:00Z"


class OlderServer:
    """Takes a status as an API server does whose CRD lacks some fields: it drops them and says nothing."""

    def __init__(self) -> None:
        self.writes = 0
        self.events: list[str] = []

    async def patch(self, *of: Any, resource_version: str, **more: Any) -> dict[str, Any]:
        self.writes += 1
        status = {k: v for k, v in copy.deepcopy(of[3]["status"]).items() if v is not None}
        for parent in (status["trainer"], *status["conditions"], status):
            for field in ("acceptedSpec", "attempt", "observedGeneration"):
                parent.pop(field, None)
        metadata = {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": str(self.writes + 1)}
        return {"kind": KIND, "metadata": metadata, "status": status}

    async def event(self, run: Any, kind: str, reason: str, message: str) -> None:
        self.events.append(reason)


def ready(type_: str, generation: int | None) -> Condition:
    return Condition(
        type=type_, status="True", observed_generation=generation, last_transition_time=T0, reason="Ready"
    )


def said(type_: str, reason: str) -> Condition:
    return Condition(type=type_, status="True", last_transition_time=T0, reason=reason)


async def test_fields_dropped_by_an_older_crd_are_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metadata = {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "1"}
    seen = Run({"kind": KIND, "metadata": metadata}, {}, 100.0, RunStatus(), PersistedState())
    server = OlderServer()
    ours = RunObject(cast(KubeApi, server), Cache(lambda key: None))
    status = RunStatus(
        accepted_spec="{}",
        trainer=TrainerStatus(attempt=3),
        conditions=[ready("TrainerReady", 1), ready("Accepted", 1)],
    )
    for _ in range(3):
        await ours.write(seen, status, at_once=True)
    assert server.writes == 1
    (warning,) = (r.message for r in caplog.records if r.levelname == "WARNING")
    assert (
        "does not keep all of status.acceptedSpec, status.conditions, status.observedGeneration, status.trainer: "
        in warning
    )


@pytest.mark.parametrize(
    ("before", "now", "events"),
    [
        ("StoppedByForecast", "StoppedByForecast", []),
        ("SuspendedBySpec", "StoppedByForecast", ["StoppedByForecast"]),
        (None, "SuspendedBySpec", ["SuspendedBySpec"]),
    ],
)
async def test_same_reason_gets_no_second_event(before: str | None, now: str, events: list[str]) -> None:
    metadata = {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "1"}
    old = RunStatus(conditions=[] if before is None else [said("Suspended", before)])
    obj = {"kind": KIND, "metadata": metadata, "status": old.to_object()}
    seen = Run(obj, {}, 100.0, old, PersistedState())
    server = OlderServer()
    run = RunObject(cast(KubeApi, server), Cache(lambda key: None))
    await run.write(
        seen, RunStatus(trainer=TrainerStatus(), conditions=[said("Suspended", now)]), at_once=True
    )
    assert server.events == events


def test_restarted_run_has_neither_models_nor_decisions() -> None:
    before = RunStatus(step=3, decision="Watching", exports=ExportsStatus(problem="full"))
    after = without_steps(copy.deepcopy(before))
    assert (after.step, after.decision, after.decisions, after.exports) == (None, None, [], ExportsStatus())


KEPT = frozenset(
    {
        *(
            "phase",
            "reason",
            "observed_generation",
            "accepted_spec",
            "accepted_spec_hash",
            "conditions",
            "recipe",
        ),
        *(
            "start_time",
            "completion_time",
            "drain_start_time",
            "coordinator_attempt",
            "coordinator_unreachable_time",
            "suspension",
            "resumed",
        ),
        *("replicas", "selector", "generators", "trainer", "model", "source"),
    }
)
"""Of the object and its pods, not of the steps."""


def test_every_field_is_of_the_steps_or_stays() -> None:
    assert KEPT.isdisjoint(OF_STEPS)
    assert KEPT | set(OF_STEPS) == set(RunStatus.model_fields)
    marks = {name: object() for name in RunStatus.model_fields}
    after = without_steps(RunStatus.model_construct(**marks))
    fresh = RunStatus()
    for name, mark in marks.items():
        value = getattr(after, name)
        assert value is mark if name in KEPT else value == getattr(fresh, name), name


@pytest.mark.parametrize(
    ("change", "fixes"), [({}, False), ({"generator": {"replicas": 9}}, False), ({"trace": True}, True)]
)
def test_edit_of_a_spec_that_is_too_long_to_store(
    change: dict[str, Any], fixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalerl_lifecycle.edits_of_run.MAX_ACCEPTED_SPEC", 10)
    spec = {
        "model": {"path": "/m"},
        "task": {"jsonl": {"path": "/t"}, "verifier": {"name": "exact"}},
        "budget": {"maxSteps": 10},
        "podTemplate": {"nodeSelector": {"zone": "a"}},
    }
    metadata = {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "1"}

    def accepted(spec: dict[str, Any], before: RunStatus) -> Accepted:
        obj = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
        found = accept(Run(obj, {}, 100.0, before))
        assert found.invalid is None
        return found

    first = accepted(spec, RunStatus())
    assert (first.text, first.edit.fields) == (None, ())
    edited = accepted(spec | change, RunStatus(accepted_spec_hash=first.long_hash))
    assert edited.edit.may_fix == fixes
    monkeypatch.undo()
    short = {name: value for name, value in spec.items() if name != "podTemplate"}
    assert accepted(short, RunStatus(accepted_spec_hash=first.long_hash)).edit.may_fix
