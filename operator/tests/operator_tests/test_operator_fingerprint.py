"""What of a run's objects is news, and what is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from operator_tests import builders
from operator_tests.manifests import UID, cluster_run
from scalerl_api.conditions import Phase
from scalerl_lifecycle.lifecycle_types import LifecycleDecision, PersistedState, Wanted
from scalerl_operator.controller.apply import fingerprint
from scalerl_operator.controller.parts import Accepted, Findings, Observed, PodView, Run
from scalerl_operator.controller.pod_views import pod_view
from scalerl_operator.manifests.scope import Desired, Images

RUN = cluster_run()
IMAGES = Images("t", "g", "c")
DESIRED = Desired(Wanted(prepare=True, coordinator=True, generators=True, trainer=1))

Object = dict[str, Any]
Objects = dict[tuple[str, str], Object]


def place(*changes: Callable[[Objects], object]) -> Findings:
    objects: Objects = {}
    for kind in ("Deployment", "ConfigMap", "Job", "Pod"):
        metadata = {"name": "a", "uid": kind, "labels": {"l": "1"}, "annotations": {"scalerl.dev/n": "1"}}
        objects[kind, "a"] = {
            "kind": kind,
            "metadata": metadata,
            "spec": {"replicas": 1},
            "data": {"k": "v"},
            "status": {"ready": 1},
        }
    objects = copy.deepcopy(objects)
    for change in changes:
        change(objects)
    run = {"metadata": {"uid": UID, "generation": 1, "name": "r", "namespace": "n"}}
    decision = LifecycleDecision(Phase.RUNNING, PersistedState())
    return Findings(Run(run, objects, 0.0), Accepted(RUN), Observed(), decision)


def said(
    at: Findings, desired: Desired = DESIRED, images: Images = IMAGES, *, update_existing: bool = True
) -> int | None:
    decision = replace(at.decision, update_existing=update_existing)
    return fingerprint(replace(at, decision=decision), desired, images)


def put(kind: str, part: str, **values: Any) -> Callable[[Objects], object]:
    def change(objects: Objects) -> None:
        held = objects[kind, "a"]
        for name in part.split("."):
            held = held[name]
        held.update(values)

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("Deployment", "status", ready=2),
        put("Deployment", "metadata", resourceVersion="7"),
        put("Deployment", "metadata.annotations", **{"deployment.kubernetes.io/revision": "2"}),
        put("Job", "status", succeeded=1),
        put("Job", "spec", suspend=True),
        put("Pod", "status", phase="Running"),
        lambda objects: objects.pop(("Pod", "a")),
        lambda objects: objects.update({("ConfigMap", "r-curve"): {"metadata": {"uid": "x"}}}),
    ],
)
def test_fingerprint_ignores_status_jobs_pods_and_curve(change: Callable[[Objects], object]) -> None:
    assert said(place(change)) == said(place()) is not None


@pytest.mark.parametrize(
    "change",
    [
        put("Deployment", "metadata.labels", l="2"),
        put("Deployment", "metadata.annotations", **{"scalerl.dev/n": "2"}),
        put("Deployment", "metadata", ownerReferences=[{"uid": "u"}]),
        put("Deployment", "metadata", uid="another"),
        put("Deployment", "spec", replicas=2),
        put("ConfigMap", "data", k="w"),
        put("ConfigMap", "data", more="v"),
        put("Job", "metadata", uid="another"),
        lambda objects: objects.pop(("Job", "a")),
        lambda objects: objects.pop(("ConfigMap", "a")),
        lambda objects: objects.update(
            {("ConfigMap", "theirs"): {"kind": "ConfigMap", "metadata": {"uid": "x"}}}
        ),
    ],
)
def test_fingerprint_changes_with_content_and_existence(change: Callable[[Objects], object]) -> None:
    assert said(place(change)) not in (said(place()), None)


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_nothing_is_created_while_something_terminates(kind: str) -> None:
    assert said(place(put(kind, "metadata", deletionTimestamp="2026-01-01T00:00:00Z"))) is None
    assert said(place(put("Pod", "metadata", deletionTimestamp="2026-01-01T00:00:00Z"))) is not None


def test_job_that_a_lost_node_keeps_disables_nothing() -> None:
    """Its node may be away for days, while each reconcile would render and compare all objects."""
    deleted = put("Job", "metadata", deletionTimestamp="2026-01-01T00:00:00Z")

    def kept(*pods: PodView) -> int | None:
        return said(replace(place(deleted), observed=Observed(pods=pods)))

    running = pod_view(builders.pod(job="a"), 0.0)
    lost = replace(running, lost=True)
    assert kept(lost) is not None
    assert kept(running) is None
    assert kept(lost, running) is None, "its gang still has to be ended"
    assert kept() is None


def test_fingerprint_changes_with_its_inputs() -> None:
    now, run = said(place()), place()
    assert said(place(), Desired(Wanted(prepare=True))) != now
    assert said(place(), images=Images("t2", "g", "c")) != now
    assert said(place(), update_existing=False) != now
    run.run.obj["metadata"]["generation"] = 2
    assert said(run) != now
