"""Why a pod that should exist does not, from Events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from operator_tests.builders import pod
from operator_tests.manifests import UID, cluster_run, findings
from scalerl_api.conditions import Phase
from scalerl_api.reasons import Reason
from scalerl_api.status import RunStatus
from scalerl_lifecycle.lifecycle_types import LifecycleDecision, PersistedState, Wanted
from scalerl_lifecycle.status_fields import rfc3339
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.diagnosis import (
    RECENT_CREATION_SECONDS,
    RECENT_SECONDS,
    START_CHECK_SECONDS,
    diagnose,
    next_start_check,
)
from scalerl_operator.controller.pod_views import observe_objects
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.names import COMPONENT, RUN_UID, Names

NOW = 2e9


class Events:
    """An API server with one Event."""

    def __init__(self, reason: str, message: str, age: float) -> None:
        self.event = {"reason": reason, "message": message, "lastTimestamp": rfc3339(NOW - age)}

    async def list(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return [self.event]


async def reason(events: Events, **objects: Any) -> Reason | None:
    there = {(kind, kind): obj | {"kind": kind} for kind, obj in objects.items()}
    found = findings(
        cluster_run(),
        unix_seconds=NOW,
        objects=there,
        decision=LifecycleDecision(Phase.RUNNING, PersistedState(attempt=1), Wanted(coordinator=True)),
        observed=observe_objects(there, UID, dict.fromkeys(Role, "")),
    )
    problem = await diagnose(cast(KubeApi, events), found)
    return None if problem is None else problem.reason


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (5, Reason.QUOTA_EXCEEDED),
        (1000, Reason.QUOTA_EXCEEDED),  # the controller's longest wait between two tries
        (RECENT_CREATION_SECONDS + 1, None),
    ],
)
async def test_pod_refused_by_quota_stays_explained(age: float, expected: Reason | None) -> None:
    labels = {RUN_UID: UID, COMPONENT: Role.COORDINATOR}
    metadata = {"name": "a", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels}
    events = Events("FailedCreate", "pods is forbidden: exceeded quota: q", age)
    assert await reason(events, StatefulSet={"metadata": metadata}) == expected


@pytest.mark.parametrize(("age", "expected"), [(5, Reason.VOLUME_NOT_READY), (RECENT_SECONDS + 1, None)])
async def test_unstarted_pod_is_explained_by_a_recent_event(age: float, expected: Reason | None) -> None:
    waiting = {"name": "c", "state": {"waiting": {"reason": "ContainerCreating"}}}
    starting = pod("a", Role.COORDINATOR, waiting, phase="Pending")
    assert await reason(Events("FailedMount", "timed out", age), Pod=starting) == expected


@pytest.mark.parametrize(
    ("age", "wait"), [(20, START_CHECK_SECONDS[0]), (200, 100), (9000, START_CHECK_SECONDS[1])]
)
def test_events_are_read_soon_after_each_start_of_a_run_that_has_trained_for_days(
    age: float, wait: float
) -> None:
    started = RunStatus(start_time=rfc3339(NOW - 500_000))
    decision = LifecycleDecision(Phase.PREPARING, PersistedState(attempt=1), Wanted(prepare=True))
    found = findings(cluster_run(), unix_seconds=NOW, before=started, decision=decision)
    metadata = {"name": "a", "uid": "u", "creationTimestamp": rfc3339(NOW - age), "labels": {RUN_UID: UID}}
    found.run.objects["Job", Names(found.run.name).prepare] = {
        "kind": "Job",
        "metadata": metadata,
        "spec": {},
    }
    assert next_start_check(found) == wait
    found.run.objects.clear()
    waiting = {"name": "c", "state": {"waiting": {"reason": "ContainerCreating"}}}
    starting = pod("a", Role.PREPARE, waiting, phase="Pending")
    starting["metadata"]["creationTimestamp"] = rfc3339(NOW - age)
    observed = observe_objects({("Pod", "a"): starting}, UID, dict.fromkeys(Role, ""))
    assert next_start_check(replace(found, observed=observed)) == wait
