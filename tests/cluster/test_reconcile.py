"""The operator's reconcile of a run, against a real API server and its controllers; the test plays the pods."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import yaml
from stage import ROOT, Stage, condition, evaluations, own_control_plane, stage, tiny
from testcluster import Cluster

from scalerl_api import wire
from scalerl_api.fields import quantity_bytes
from scalerl_api.load import run_from_object
from scalerl_lifecycle.status_fields import rfc3339
from scalerl_operator.controller.cluster_autoscaler import FinishedRuns

pytestmark = pytest.mark.cluster

WORKLOADS = ("Job", "StatefulSet", "Deployment")


DEPLOYMENT = {
    "selector": {"matchLabels": {"app": "theirs"}},
    "template": {
        "metadata": {"labels": {"app": "theirs"}},
        "spec": {"containers": [{"name": "a", "image": "a:1"}]},
    },
}


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Cluster]:
    """Its own: controllers that are busy with what other tests have left make pods late."""
    with own_control_plane() as cluster:
        yield cluster


@pytest.fixture
async def there(control_plane: Any, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    namespace = f"t{abs(hash(request.node.name)) % 10**8}"
    data = (ROOT / "examples/tiny/data.jsonl").read_text()[:2000]
    async with stage(control_plane, namespace) as place:
        config = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"data.jsonl": data}}
        await place.create(config | {"metadata": {"name": "tiny-addition-data"}})
        yield place


def phase(name: str) -> Any:
    return lambda run: run.get("status", {}).get("phase") == name


async def names(there: Stage, *kinds: str) -> set[str]:
    found = [o for kind in kinds for o in await there.all(kind)]
    return {o["metadata"]["name"] for o in found if "scalerl.dev/run" in o["metadata"].get("labels", {})}


async def test_ended_run_is_a_prior_of_the_next(there: Stage) -> None:
    there.coordinator.points = evaluations(8)
    await there.start(tiny())
    await there.create(tiny("next", seed=7), tiny("another-model", model={"scratch": {"layers": 3}}))
    next_run = await there.get("ScaleRLRun", "next")
    assert next_run is not None
    spec, uid = run_from_object(next_run).spec, next_run["metadata"]["uid"]
    await there.reconcile()
    assert await FinishedRuns(there.cache, there.namespace, uid)(spec) == [], "it works still"
    there.coordinator.phase, there.coordinator.stop_reason = wire.Phase.FINISHED, "maxSteps"
    await there.end("trainer", 0, count=2)
    await there.reconcile_until(phase("Completed"))
    await there.watch()
    asked = there.calls.counts.total()
    (found,) = await FinishedRuns(there.cache, there.namespace, uid)(spec)
    assert (found.name, found.points.compute) == (
        "tiny-addition",
        [1000.0 * i for i in range(1, 9)],
    )
    other = await there.get("ScaleRLRun", "another-model")
    assert other is not None
    assert await FinishedRuns(there.cache, there.namespace, "")(run_from_object(other).spec) == []
    assert there.calls.counts.total() == asked, "nothing is asked of the API server"


async def test_from_nothing_to_completed(there: Stage) -> None:
    await there.start(tiny())
    assert await names(there, *WORKLOADS) == {
        *("tiny-addition-prepare", "tiny-addition-coordinator", "tiny-addition-generator"),
        "tiny-addition-trainer-1",
    }
    there.coordinator.phase, there.coordinator.stop_reason = wire.Phase.FINISHED, "maxSteps"
    await there.end("trainer", 0, count=2)
    run = await there.reconcile_until(phase("Completed"))
    assert (condition(run, "Completed"), run["status"]["step"]) == ("BudgetReached", 3)
    for _ in range(600):
        await there.reconcile()
        left = await names(there, *WORKLOADS)
        if left == {"tiny-addition-prepare", "tiny-addition-trainer-1"}:
            break
        await asyncio.sleep(0.2)
    assert left == {"tiny-addition-prepare", "tiny-addition-trainer-1"}, (
        "Jobs that have ended keep their logs"
    )
    reasons = {reason for reason, _ in await there.events()}
    assert {"Accepted", "Preparing", "Prepared", "Running", "Completed", "BudgetReached"} <= reasons


async def test_idle_reconcile_writes_nothing(there: Stage) -> None:
    await there.start(tiny())
    await there.reconcile()
    before = there.calls.writes
    for _ in range(5):
        assert await there.reconcile() == 5.0
    assert there.calls.writes == before
    await there.fresh_operator()
    await there.reconcile()
    assert there.calls.writes == before, "nor does another operator"


async def test_drift_is_restored_and_foreign_fields_stay(there: Stage) -> None:
    await there.start(tiny())
    await there.reconcile()
    deployment = "tiny-addition-generator"
    await there.edit("Deployment", deployment, {"metadata": {"annotations": {"team": "blue"}}})
    before = there.calls.writes
    await there.reconcile()
    assert there.calls.writes == before
    await there.edit("Deployment", deployment, {"spec": {"replicas": 5}})
    await there.reconcile()
    live = await there.get("Deployment", deployment)
    assert live is not None
    assert (live["spec"]["replicas"], live["metadata"]["annotations"]["team"]) == (1, "blue")
    assert any(reason == "RepairedDrift" and "replicas" in text for reason, text in await there.events())
    # A writer that does it again and again is not fought at full speed.
    there.stopped, writes = time.time(), there.calls.counts["apply"]
    for _ in range(10):
        await there.edit("Deployment", deployment, {"spec": {"replicas": 5}})
        await there.reconcile()
    assert there.calls.counts["apply"] - writes <= 2


@pytest.mark.parametrize(
    ("kind", "tried"),
    [
        *((kind, True) for kind in ("ConfigMap", "Service", "Secret", "PersistentVolumeClaim", "Deployment")),
        ("Deployment", False),
    ],
)
async def test_taken_name_creates_nothing(there: Stage, kind: str, tried: bool) -> None:
    """tried: the run has a podTemplate, and its workloads are created as a dry run."""
    name, body = {
        "ConfigMap": ("tiny-addition-spec", {"data": {"mine": "yes"}}),
        "Service": ("tiny-addition-coordinator", {"spec": {"ports": [{"port": 1}]}}),
        "Secret": ("tiny-addition-token", {"stringData": {"token": "theirs"}}),
        "Deployment": ("tiny-addition-generator", {"spec": DEPLOYMENT}),
        "PersistentVolumeClaim": (
            "tiny-addition-data",
            {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}},
        ),
    }[kind]
    version = "apps/v1" if kind == "Deployment" else "v1"
    await there.create({"apiVersion": version, "kind": kind, "metadata": {"name": name}, **body})
    run = tiny()
    if not tried:
        del run["spec"]["podTemplate"]
    await there.create(run)
    run = await there.reconcile_until(lambda r: bool(condition(r, "Accepted")))
    made = await names(there, *WORKLOADS, "PersistentVolumeClaim")
    assert (condition(run, "Accepted"), made) == ("NameTaken", set())
    live = await there.get(kind, name)
    assert live is not None
    assert "scalerl.dev/run" not in live["metadata"].get("labels", {})
    await there.delete(kind, name)
    await there.reconcile_until(
        lambda r: condition(r, "Accepted").startswith("Accepted") and condition(r, "Degraded") == "Healthy"
    )


async def test_name_of_another_runs_object_is_taken(there: Stage) -> None:
    """It is in the cache, and in no list of objects without a run's label."""
    metadata = {"name": "tiny-addition-spec", "labels": {"scalerl.dev/run": "other"}}
    await there.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}, tiny())
    run = await there.reconcile_until(lambda r: bool(condition(r, "Accepted")))
    assert condition(run, "Accepted") == "NameTaken"


async def test_missing_references_are_conditions(there: Stage) -> None:
    await there.create(tiny("a", storage={"claimName": "shared"}))
    await there.create(tiny("b", storage={"storageClassName": "fast"}))
    run = await there.reconcile_until(lambda r: bool(condition(r, "Accepted")), "a")
    assert condition(run, "Accepted") == "ReferenceNotFound"
    run = await there.reconcile_until(lambda r: bool(condition(r, "Accepted")), "b")
    assert condition(run, "Accepted") == "ReferenceNotFound"
    assert await names(there, *WORKLOADS, "ConfigMap", "PersistentVolumeClaim") == set()
    claim = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
    await there.create(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, **claim}
    )
    await there.reconcile_until(phase("Preparing"), "a")


async def test_invalid_pod_template_creates_nothing(there: Stage) -> None:
    template = tiny()["spec"]["podTemplate"] | {"tolerations": [{"key": "a", "operator": "Sometimes"}]}
    await there.create(tiny(podTemplate=template))
    run = await there.reconcile_until(lambda r: bool(condition(r, "Accepted")))
    said = next(c for c in run["status"]["conditions"] if c["type"] == "Accepted")
    assert (said["status"], said["reason"]) == ("False", "ObjectRefused")
    assert "operator" in said["message"]
    assert await names(there, *WORKLOADS, "ConfigMap", "PersistentVolumeClaim") == set()
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"podTemplate": {"tolerations": []}}})
    await there.reconcile_until(phase("Preparing"))


async def test_invalid_resources_of_the_actor_create_nothing(there: Stage) -> None:
    run = tiny(generator={"actorResources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}})
    del run["spec"]["podTemplate"]
    await there.create(run)
    run = await there.reconcile_until(lambda r: bool(condition(r, "Accepted")))
    said = next(c for c in run["status"]["conditions"] if c["type"] == "Accepted")
    assert (said["status"], said["reason"]) == ("False", "ObjectRefused")
    assert "spec.generator.actorResources.requests" in said["message"]
    assert await names(there, *WORKLOADS, "ConfigMap", "PersistentVolumeClaim") == set()


async def test_exhausted_quota_is_reported_and_awaited(there: Stage) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": {"pods": "0"}},
    }
    there_kubectl = yaml.safe_dump(quota)
    await asyncio.to_thread(there.kubectl, "apply", "-n", there.namespace, "-f", "-", stdin=there_kubectl)
    # Only a quota that has been counted refuses a pod.
    words = ("wait", "-n", there.namespace, "resourcequota/q", "--timeout=500s")
    await asyncio.to_thread(there.kubectl, *words, "--for=jsonpath={.status.used}")
    await there.create(tiny())
    await there.reconcile_until(phase("Preparing"))
    there.now = 20.0
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "QuotaExceeded")
    assert condition(run, "Prepared") == "QuotaExceeded"
    await asyncio.to_thread(there.kubectl, "delete", "-n", there.namespace, "resourcequota", "q")
    await there.pods("prepare")
    await there.reconcile_until(lambda r: condition(r, "Degraded") == "Healthy")


async def test_bad_input_fails_the_run_with_the_last_log_line(there: Stage) -> None:
    await there.create(tiny())
    await there.reconcile_until(phase("Preparing"))
    log = "2026-01-01 00:00:00,000 ERROR scalerl_trainer.prepare task.jsonl.path: line 3: no answer"
    await there.end("prepare", 2, log)
    run = await there.reconcile_until(phase("Failed"))
    said = next(c for c in run["status"]["conditions"] if c["type"] == "Failed")
    assert (said["reason"], said["message"]) == ("BadInput", "task.jsonl.path: line 3: no answer")
    assert any(reason == "BadInput" for reason, _ in await there.events())


async def test_one_rank_dies_and_the_gang_starts_again(there: Stage) -> None:
    await there.start(tiny())
    await there.end("trainer", 137)
    run = await there.reconcile_until(lambda r: r["status"]["trainer"]["restarts"] == 1)
    assert run["status"]["phase"] == "Running"
    there.now = 5.0
    await there.reconcile_until(lambda r: r["status"]["trainer"]["attempt"] == 2)
    for _ in range(600):
        await there.reconcile()
        left = await names(there, "Job")
        if left == {"tiny-addition-prepare", "tiny-addition-trainer-2"}:
            break
        await asyncio.sleep(0.2)
    assert left == {"tiny-addition-prepare", "tiny-addition-trainer-2"}
    assert {"tiny-addition-coordinator", "tiny-addition-generator"} <= await names(there, *WORKLOADS)
    await there.begin("trainer", 2)
    await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready")


async def test_deleted_token_is_restored(there: Stage) -> None:
    """The operator cannot watch Secrets: the kubelet reports it, when a pod does not find it."""
    await there.start(tiny())
    token = await there.get("Secret", "tiny-addition-token")
    assert token is not None
    await there.delete("Secret", "tiny-addition-token")
    (pod,) = await there.pods("generator")
    waiting = [
        {
            "name": c["name"],
            "ready": False,
            "restartCount": 0,
            "image": c["image"],
            "imageID": "",
            "state": {"waiting": {"reason": "ContainerCreating"}},
        }
        for c in pod["spec"]["containers"]
    ]
    status = {
        "phase": "Pending",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": waiting,
    }
    await there.edit("Pod", pod["metadata"]["name"], {"status": status}, "status")
    message = 'MountVolume.SetUp failed for volume "scalerl-token": secret "tiny-addition-token" not found'
    regarding = {
        "kind": "Pod",
        "name": pod["metadata"]["name"],
        "namespace": there.namespace,
        "uid": pod["metadata"]["uid"],
    }
    await there.create(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "mount"},
            "involvedObject": regarding,
            "reason": "FailedMount",
            "message": message,
            "lastTimestamp": rfc3339(there.clock()),
            "type": "Warning",
            "source": {"component": "kubelet"},
        }
    )
    there.now = 20.0
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "ReferenceNotFound")
    assert run["status"]["phase"] == "Running"
    await there.reconcile()
    again = await there.get("Secret", "tiny-addition-token")
    assert again is not None
    assert again["data"] == token["data"]


async def test_suspend_and_resume(there: Stage) -> None:
    await there.start(tiny())
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
    await there.reconcile_until(phase("Suspending"))
    assert there.coordinator.stop_requests == ["interrupted"]
    there.coordinator.phase = wire.Phase.FINISHED
    await there.end("trainer", 0, count=2)
    await there.reconcile_until(phase("Suspended"))
    for _ in range(600):
        await there.reconcile()
        if not await names(there, *WORKLOADS, "Pod"):
            break
        await asyncio.sleep(0.2)
    assert await names(there, *WORKLOADS) == set()
    assert await names(there, "PersistentVolumeClaim") == {"tiny-addition-data"}
    writes = there.calls.writes
    await there.fresh_operator()
    assert await there.reconcile() is None
    assert there.calls.writes == writes, "a suspended run costs nothing"
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": False}})
    await there.reconcile_until(phase("Preparing"))
    await there.end("prepare")
    await there.reconcile_until(phase("Running"))
    await there.begin("coordinator")
    await there.begin("trainer", 2)
    await there.reconcile_until(
        lambda r: condition(r, "CoordinatorReady") == "Ready" and there.coordinator.stop_requests[-1] == ""
    )


@pytest.mark.parametrize("when", ["Pending", "Preparing", "Running", "Refused", "Suspended", "Failed"])
async def test_deletion_in_any_phase_keeps_only_retained_objects(there: Stage, when: str) -> None:
    kept = tiny(storage={"size": "1Gi", "onDelete": "Retain"})
    if when in ("Running", "Refused"):
        await there.start(kept)
        if when == "Refused":
            change = {"podTemplate": {"labels": {"no label": "a"}}}
            await there.edit("ScaleRLRun", "tiny-addition", {"spec": change})
            await there.reconcile_until(lambda run: condition(run, "Accepted") == "SpecInvalid")
    elif when == "Suspended":
        kept["spec"]["suspend"] = True
        await there.create(kept)
        await there.reconcile_until(phase("Suspended"))
    elif when == "Pending":
        kept["spec"]["storage"] = {"claimName": "nowhere"}
        await there.create(kept)
        await there.reconcile_until(phase("Pending"))
    else:
        await there.create(kept)
        await there.reconcile_until(phase("Preparing"))
        if when == "Failed":
            await there.end("prepare", 2, "wrong")
            await there.reconcile_until(phase("Failed"))
    await there.delete("ScaleRLRun", "tiny-addition")
    if when in ("Running", "Refused"):
        assert await there.reconcile() == 2.0
        assert there.coordinator.stop_requests == ["interrupted"], "what was trained is saved first"
        assert await there.get("ScaleRLRun", "tiny-addition") is not None
        there.coordinator.phase = wire.Phase.FINISHED
        await there.end("trainer", 0, count=2)
    await there.reconcile_until(lambda run: False)
    kinds = (*WORKLOADS, "Pod", "ConfigMap", "Secret", "Service", "NetworkPolicy", "PodDisruptionBudget")
    for _ in range(600):
        left = await names(there, *kinds)
        if not left:
            break
        await asyncio.sleep(0.2)
    assert left == set()
    claims = await names(there, "PersistentVolumeClaim")
    assert claims == (set() if when == "Pending" else {"tiny-addition-data"})


async def test_ended_run_is_deleted_after_its_ttl(there: Stage) -> None:
    await there.start(tiny(ttlSecondsAfterFinished=60))
    there.coordinator.phase, there.coordinator.stop_reason = wire.Phase.FINISHED, "maxSteps"
    await there.end("trainer", 0, count=2)
    for _ in range(1200):
        wait = await there.reconcile()
        run = await there.get("ScaleRLRun", "tiny-addition")
        if phase("Completed")(run):
            break
        await asyncio.sleep(0.1)
    assert wait is not None, (
        "our own write wakes no reconcile: the reconcile that ends a run asks for the one that deletes it"
    )
    assert 50 < wait <= 60
    there.now = 61.0
    await there.reconcile_until(lambda run: False)
    assert await there.get("ScaleRLRun", "tiny-addition") is None


async def test_spec_that_changes_rolls_what_reads_it(there: Stage) -> None:
    """A larger budget and batch concern the coordinator alone; another loss everyone, the trainer by way of a checkpoint."""
    await there.start(tiny())
    before = {
        o["metadata"]["name"]: o["metadata"]["generation"] for k in WORKLOADS for o in await there.all(k)
    }
    await there.edit(
        "ScaleRLRun",
        "tiny-addition",
        {"spec": {"budget": {"maxSteps": 200, "maxSeconds": 3600}, "recipe": {"promptsPerStep": 32}}},
    )
    await there.reconcile()
    await there.reconcile()
    after = {
        o["metadata"]["name"]: o["metadata"]["generation"] for k in WORKLOADS for o in await there.all(k)
    }
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"tiny-addition-coordinator"}
    await there.begin("coordinator")
    before = after
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"recipe": {"loss": {"ppoClip": {}}}}})
    await there.reconcile_until(phase("Preparing"))
    assert there.coordinator.stop_requests == ["interrupted"], (
        "training is saved first, on the spec that it began with"
    )
    after = {
        o["metadata"]["name"]: o["metadata"]["generation"] for k in WORKLOADS for o in await there.all(k)
    }
    assert after == before
    there.coordinator.phase = wire.Phase.FINISHED
    await there.end("trainer", 0, count=2)
    for _ in range(1200):
        await there.reconcile()
        left = await names(there, *WORKLOADS)
        if left == {"tiny-addition-prepare"}:
            break
        await asyncio.sleep(0.1)
    assert left == {"tiny-addition-prepare"}
    await there.end("prepare")
    await there.reconcile_until(phase("Running"))
    await there.begin("coordinator")
    await there.begin("trainer", 2)
    await there.reconcile_until(
        lambda r: condition(r, "TrainerReady") == "Ready" and there.coordinator.stop_requests[-1] == ""
    )


async def test_forecast_stop_suspends_until_resumed(there: Stage) -> None:
    await there.start(tiny(autoscaling={"mode": "Auto"}))
    there.coordinator.phase, there.coordinator.stop_reason = wire.Phase.FINISHED, "forecast"
    await there.end("trainer", 0, count=2)
    run = await there.reconcile_until(lambda r: r["spec"].get("suspend") is True)
    assert run["status"]["suspension"] == "Requested", "first it is written down, then asked for"
    run = await there.reconcile_until(lambda r: r["status"]["suspension"] == "Suspended")
    assert condition(run, "Suspended") == "StoppedByForecast"
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": False}})
    await there.reconcile_until(phase("Preparing"))
    await there.end("prepare")
    await there.reconcile_until(phase("Running"))
    await there.begin("coordinator")
    await there.begin("trainer", 2)
    run = await there.reconcile_until(
        lambda r: there.coordinator.stop_requests == [""] and not r["status"]["resumed"]
    )
    assert run["spec"]["suspend"] is False


async def test_requests_follow_from_the_size_that_the_preparation_reports(there: Stage) -> None:
    model = {"parameters": 494_032_768, "hiddenSize": 896, "layers": 24, "intermediateSize": 4864}
    model |= {"vocabularySize": 151_936, "largestTensor": 136_134_656, "checkpointBytes": 988_097_824}
    await there.create(tiny())
    await there.reconcile_until(phase("Preparing"))
    await there.end("prepare", 0, json.dumps(model | {"dtype": "BF16"}))
    run = await there.reconcile_until(phase("Running"))
    assert run["status"]["model"] == model | {"dtype": "BF16"}
    for role, name, least in (("generator", "server", 2 << 30), ("trainer", "trainer", 6 << 30)):
        (first, *_) = await there.pods(role)
        container = next(c for c in first["spec"]["containers"] if c["name"] == name)
        assert quantity_bytes(container["resources"]["requests"]["memory"]) > least
    small = {"podTemplate": {"resources": {"limits": {"memory": "1Gi"}}}}
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"generator": small}})
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "AcceptedWithWarnings")
    (message,) = [c["message"] for c in run["status"]["conditions"] if c["type"] == "Accepted"]
    assert "spec.generator.podTemplate.resources.limits.memory: 1Gi is below the estimate of" in message
    await there.fresh_operator()
    run = await there.reconcile_until(phase("Running"))
    assert run["status"]["model"]["parameters"] == 494_032_768


async def test_failed_preparation_is_retried(there: Stage) -> None:
    await there.create(tiny())
    await there.reconcile_until(phase("Preparing"))
    (first,) = await there.pods("prepare")
    await there.end("prepare", 1, "the hub is away")
    (second,) = await there.pods("prepare")
    assert second["metadata"]["name"] != first["metadata"]["name"]
    run = await there.reconcile_until(lambda r: True)
    assert run["status"]["phase"] == "Preparing"


async def test_failing_generators_degrade_a_run(there: Stage) -> None:
    await there.start(tiny())
    (pod,) = await there.pods("generator")
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}
    over = {"exitCode": 2, "reason": "Error", "message": "a bad device"}
    containers = [
        {
            "name": c["name"],
            "ready": False,
            "restartCount": 21,
            "image": c["image"],
            "imageID": "",
            "state": {"waiting": waiting},
            "lastState": {"terminated": over},
        }
        for c in pod["spec"]["containers"]
    ]
    status = {"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": containers}
    await there.edit("Pod", pod["metadata"]["name"], {"status": status}, "status")
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "GeneratorsFailing")
    assert run["status"]["phase"] == "Running"
