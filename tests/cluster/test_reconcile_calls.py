"""What a reconcile asks of the API server, and when it is due: one process reconciles a thousand runs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from stage import Stage, condition, evaluations, tiny

from scalerl_api import wire
from scalerl_api.reasons import Reason
from scalerl_autoscaling.report import AutoscalerReport
from scalerl_lifecycle.lifecycle_types import ASK_AGAIN_SECONDS, POLL_SECONDS
from scalerl_lifecycle.status_fields import seconds
from scalerl_operator.controller import apply
from scalerl_operator.controller.diagnosis import EVENTS_SECONDS, MIN_AGE_SECONDS, START_CHECK_SECONDS
from scalerl_operator.controller.pod_views import PLACING_SECONDS
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.controller.run_state import MAX_REPAIR_SECONDS
from scalerl_operator.manifests import render
from scalerl_operator.manifests.scope import Scope
from scalerl_operator.names import QUEUE

pytestmark = pytest.mark.cluster


async def test_only_pods_with_user_fields_are_dry_run(there: Stage) -> None:
    await there.create(tiny())
    await there.reconcile()
    events = len(await there.events())
    # Claim, spec, token, NetworkPolicy and preparation are made; the four workloads are tried before.
    assert there.calls.counts["create"] == 5 + 4 + events
    # Claim, ConfigMap, NetworkPolicy, Services and PodDisruptionBudget; the trial finds the names of the workloads taken.
    assert (there.calls.counts["list"], there.calls.counts["get"]) == (5, 1), "a Secret is not listed"
    assert there.calls.counts["apply"] == 0, "of what is not there"
    assert there.calls.counts["patch"] == 2, "the finalizer, the status"


async def test_run_beside_another_reads_one_name(there: Stage) -> None:
    await there.create(tiny("a"), tiny("b"))
    await there.reconcile("a")
    before = there.calls.counts["list"], there.calls.counts["get"]
    await there.reconcile("b")
    assert (there.calls.counts["list"] - before[0], there.calls.counts["get"] - before[1]) == (0, 1)
    run = await there.get("ScaleRLRun", "b")
    assert run is not None
    assert run["status"]["phase"] == "Preparing"


async def test_repaired_run_settles_again(there: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await there.create(tiny())
    await there.reconcile()
    await there.edit("ConfigMap", "tiny-addition-spec", {"data": {"run.yaml": "{}"}})
    await there.reconcile()
    there.now += 2 * MAX_REPAIR_SECONDS + 1.0
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"budget": {"maxSteps": 77}}})
    await there.reconcile()
    rendered: list[str] = []

    def counted(scope: Scope) -> list[dict[str, Any]]:
        rendered.append(scope.run.metadata.name)
        return render(scope)

    monkeypatch.setattr(apply, "render", counted)
    await there.reconcile()
    assert rendered == []


async def test_pod_event_renders_nothing_and_drift_does(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []

    def counted(scope: Scope) -> list[dict[str, Any]]:
        rendered.append(scope.run.metadata.name)
        return render(scope)

    monkeypatch.setattr(apply, "render", counted)
    await there.create(tiny())
    await there.reconcile()
    assert len(rendered) == 2, "for the trial, and to be made"
    await there.begin("prepare")
    await there.reconcile()
    assert len(rendered) == 2
    await there.edit("ConfigMap", "tiny-addition-spec", {"data": {"run.yaml": "{}"}})
    await there.reconcile()
    spec = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec is not None
    assert len(spec["data"]["run.yaml"]) > 100, "and it is put back"
    await there.edit("ScaleRLRun", "tiny-addition", {"metadata": {"labels": {QUEUE: "a"}}})
    before = len(rendered)
    await there.reconcile()
    assert len(rendered) == before + 1, "labels have no generation"


async def test_curve_that_grows_has_nothing_rendered(there: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await there.start(tiny())
    rendered: list[str] = []

    def counted(scope: Scope) -> list[dict[str, Any]]:
        rendered.append(scope.run.metadata.name)
        return render(scope)

    await there.reconcile()
    monkeypatch.setattr(apply, "render", counted)
    for count in (1, 2, 3):
        there.coordinator.points = evaluations(count)
        await there.reconcile()
    curve = await there.get("ConfigMap", "tiny-addition-curve")
    assert curve is not None
    assert (len(curve["data"]["curve.csv"].splitlines()), rendered) == (1 + 3, [])


async def test_new_pod_without_node_is_no_problem_at_first(there: Stage) -> None:
    await there.create(tiny())
    await there.reconcile_until(lambda run: run.get("status", {}).get("phase") == "Preparing")
    [pod] = await there.pods("prepare")
    unbound = "pod has unbound immediate PersistentVolumeClaims"
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unbound}
    await there.edit("Pod", pod["metadata"]["name"], {"status": {"conditions": [waits]}}, "status")
    there.stopped = seconds(pod["metadata"]["creationTimestamp"])
    writes = there.calls.writes
    wait = await there.reconcile()
    assert wait is not None
    patience = PLACING_SECONDS[Reason.VOLUME_NOT_READY]
    assert (there.calls.writes - writes, wait <= patience) == (0, True)
    there.now += patience + 1.0
    run = await there.reconcile_until(lambda r: condition(r, "Prepared") == "VolumeNotReady", times=1)
    texts = [text for reason, text in await there.events() if reason == "VolumeNotReady"]
    assert any(text.startswith(f"Prepared: {unbound}") for text in texts), texts
    assert run["status"]["phase"] == "Preparing"


async def is_made_and_does_not_begin(there: Stage) -> None:
    await there.create(tiny())
    await there.reconcile_until(lambda run: run.get("status", {}).get("phase") == "Preparing")
    [pod] = await there.pods("prepare")
    waiting = {"name": "prepare", "ready": False, "restartCount": 0, "image": "i", "imageID": ""}
    waiting["state"] = {"waiting": {"reason": "ContainerCreating"}}
    status = {"phase": "Pending", "containerStatuses": [waiting]}
    await there.edit("Pod", pod["metadata"]["name"], {"status": status}, "status")
    there.stopped = seconds(pod["metadata"]["creationTimestamp"])


async def test_periodic_reconcile_reads_only_events(there: Stage) -> None:
    await is_made_and_does_not_begin(there)
    assert await there.reconcile() == START_CHECK_SECONDS[0], "why a volume is not mounted, only events tell"
    await there.begin("prepare")
    assert await there.reconcile() is None, "its end is news by itself"
    writes = there.calls.writes
    assert await there.reconcile() is None
    assert there.calls.writes == writes


async def test_events_are_read_after_a_delay_and_rarely(there: Stage) -> None:
    await is_made_and_does_not_begin(there)

    async def questions(seconds_on: float) -> int:
        before = there.calls.counts["list"]
        there.now += seconds_on
        for _ in range(3):  # whatever else wakes it
            await there.reconcile()
        return there.calls.counts["list"] - before

    assert await questions(0.0) == 0, "most pods begin soon"
    assert await questions(MIN_AGE_SECONDS + 1.0) == 1
    assert await questions(EVENTS_SECONDS / 2) == 0
    assert await questions(EVENTS_SECONDS / 2 + 1.0) == 1
    await there.begin("prepare")
    assert await questions(EVENTS_SECONDS + 1.0) == 0


async def test_coordinator_is_polled_once_per_reconcile(
    there: Stage,
) -> None:
    await there.start(tiny())
    asked = there.coordinator.asked
    assert await there.reconcile() == POLL_SECONDS
    assert there.coordinator.asked == asked + 1
    there.silence(True)
    assert await there.reconcile() == POLL_SECONDS, "its answer wakes the run"
    assert there.coordinator.asked == asked + 2, (
        "one that does not answer is not asked again in the same reconcile"
    )
    there.silence(False)
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
    assert await there.reconcile() == ASK_AGAIN_SECONDS
    assert (there.coordinator.asked, there.coordinator.stop_requests) == (asked + 4, ["interrupted"]), (
        "its status from before the request is out of date, and is asked for again"
    )


async def test_decision_is_written_once_before_it_is_applied(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await there.start(tiny())
    await there.end("trainer", 137)
    await there.reconcile_until(lambda r: r["status"]["trainer"]["restarts"] == 1)
    done: list[str] = []
    for verb in ("create", "patch", "delete"):
        monkeypatch.setattr(there.api, verb, recorded(getattr(there.api, verb), verb, done))

    async def of_the_look_that(until: Any) -> list[str]:
        while True:
            done.clear()
            if (await there.reconcile_until(lambda r: True, times=1)) and await until():
                return list(done)
            await asyncio.sleep(0.1)

    async def is_tried_again() -> bool:
        return await there.get("Job", "tiny-addition-trainer-2") is not None

    there.now = 5.0
    assert await of_the_look_that(is_tried_again) == ["patch ScaleRLRun", "create Job"]
    await there.begin("trainer", 2)
    there.coordinator.phase, there.coordinator.stop_reason = wire.Phase.FINISHED, "maxSteps"
    await there.end("trainer", 0, count=2)

    async def has_ended() -> bool:
        run = await there.get("ScaleRLRun", "tiny-addition")
        return run is not None and run["status"]["phase"] == "Completed"

    first, *others = await of_the_look_that(has_ended)
    assert first == "patch ScaleRLRun"
    assert {"delete StatefulSet", "delete Deployment"} <= set(others)
    assert "patch ScaleRLRun" not in others, "what was to be said is said"


def recorded(ask: Any, verb: str, done: list[str]) -> Any:
    """A call of the API, written down; events are not."""

    async def asked(what: Any, *of: Any, **more: Any) -> Any:
        kind = what if isinstance(what, str) else what["kind"]
        if kind != "Event":
            done.append(f"{verb} {kind}")
        return await ask(what, *of, **more)

    return asked


def one_that_says(there: Stage, report: AutoscalerReport) -> Reconciler:
    return Reconciler(
        there.api,
        there.cache,
        images=there.images,
        operator_namespace="scalerl",
        autoscaler=lambda run, uid: cast(Any, Autoscaler(report)),
        background=False,
        clock=there.clock,
    )


SCALED: dict[str, Any] = {"mode": "Auto", "generators": {"min": 1, "max": 4}}


async def replicas(there: Stage) -> tuple[int, int]:
    """In the run's spec, and in the Deployment's."""
    run, [deployment] = await there.get("ScaleRLRun", "tiny-addition"), await there.all("Deployment")
    assert run is not None
    return run["spec"]["generator"]["replicas"], deployment["spec"]["replicas"]


async def test_autoscaler_patches_the_spec_once_a_decision(there: Stage) -> None:
    """With a field manager of its own; a number that somebody sets afterwards stays until the next decision."""
    await there.start(tiny(autoscaling=SCALED))
    await there.reconciler.forget_all()
    there.reconciler = one_that_says(there, AutoscalerReport(known=True, scale_to=3, decision=7))
    await there.reconcile()
    await there.reconcile()
    assert await replicas(there) == (3, 3)
    run = await there.get("ScaleRLRun", "tiny-addition")
    assert run is not None
    owner = [e for e in run["metadata"]["managedFields"] if e["manager"] == "scalerl-autoscaler"]
    assert "f:replicas" in str(owner)
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"generator": {"replicas": 2}}})
    for _ in range(3):
        await there.reconcile()
    assert await replicas(there) == (2, 2)
    await there.reconciler.forget_all()
    there.reconciler = one_that_says(there, AutoscalerReport(known=True, scale_to=3, decision=7))
    await there.reconcile()
    assert await replicas(there) == (2, 2), "an operator that starts later does not repeat the decision"
    await there.reconciler.forget_all()
    there.reconciler = one_that_says(there, AutoscalerReport(known=True, scale_to=4, decision=9))
    await there.reconcile()
    await there.reconcile()
    assert await replicas(there) == (4, 4)
    assert run["status"]["trainer"]["attempt"] == 1


class Autoscaler:
    """An autoscaler that always reports the same."""

    stop = ""

    def __init__(self, report: AutoscalerReport) -> None:
        self._report = report

    def report(self, *_: Any, **__: Any) -> AutoscalerReport:
        return self._report

    def close(self) -> None:
        pass
