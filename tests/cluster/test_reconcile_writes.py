"""How a run's objects are written: created, taken over, repaired, and never over another's. On a real API server."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from typing import Any

import pytest
from stage import Stage, condition, tiny

from scalerl_api import wire
from scalerl_operator.controller import check
from scalerl_operator.controller.parts import WORKLOADS
from scalerl_operator.controller.run_state import MAX_REPAIR_SECONDS, REPAIR_SECONDS, RunState
from scalerl_operator.kube import errors
from scalerl_operator.kube.objects import first_difference
from scalerl_operator.names import QUEUE, RENDERED_HASH

pytestmark = pytest.mark.cluster


_NO_CHANGE_OF_SERVICES = """
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {{name: {name}}}
spec:
  matchConstraints:
    namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {namespace}}}}}
    resourceRules: [{{apiGroups: [""], apiVersions: [v1], operations: [UPDATE], resources: [services]}}]
  validations: [{{expression: "false", message: not this week}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {{name: {name}}}
spec: {{policyName: {name}, validationActions: [Deny]}}
"""


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("Service", "trainer", {"spec": {"publishNotReadyAddresses": False}}),
        ("Service", "coordinator", {"spec": {"ports": [{"name": "http", "port": 8080, "targetPort": 1}]}}),
        ("StatefulSet", "coordinator", {"spec": {"replicas": 0}}),
        ("Deployment", "generator", {"spec": {"replicas": 0}}),
        ("PersistentVolumeClaim", "data", {"metadata": {"annotations": {"scalerl.dev/rendered": None}}}),
        ("NetworkPolicy", "run", {"spec": {"ingress": []}}),
        ("PodDisruptionBudget", "generator", {"spec": {"maxUnavailable": 3}}),
        ("ConfigMap", "spec", {"data": {"run.yaml": "{}"}}),
    ],
)
async def test_created_object_of_any_kind_is_taken_over(
    there: Stage, kind: str, name: str, change: dict[str, Any]
) -> None:
    """As if an earlier release had created it with a label that is rendered no more."""
    create, name = there.api.create, f"tiny-addition-{name}"

    async def earlier(obj: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        if obj["kind"] == kind and not dry_run:
            obj["metadata"]["labels"]["earlier"] = "yes"
        return await create(obj, dry_run=dry_run)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(there.api, "create", earlier)
        await there.start(tiny(generator={"replicas": 2, "kvCache": "256Mi"}))
    made = await there.get(kind, name)
    assert made is not None
    assert made["metadata"]["labels"]["earlier"] == "yes"
    await there.edit(
        kind, name, change | {"metadata": {"labels": {"team": "blue"}, **change.get("metadata", {})}}
    )
    await there.reconcile()
    live = await there.get(kind, name)
    assert live is not None
    labels = live["metadata"]["labels"]
    assert ("earlier" in labels, labels["team"]) == (False, "blue")
    ours = [e for e in live["metadata"]["managedFields"] if e["manager"] == "scalerl-operator"]
    assert [e["operation"] for e in ours] == ["Apply"]
    if kind == "ConfigMap":  # beside that, the run has steps since
        assert live["data"].pop("trained")
        live["metadata"]["annotations"] = made["metadata"]["annotations"]
    assert first_difference(without_labels(made), without_labels(live)) is None, "and is as it was made"
    applied = there.calls.counts["apply"]
    await there.reconcile()
    assert there.calls.counts["apply"] == applied


def without_labels(obj: dict[str, Any]) -> dict[str, Any]:
    """What an object is for, and what we say of it."""
    said = {name: obj[name] for name in ("spec", "data") if name in obj}
    return said | {
        "metadata": {"annotations": {RENDERED_HASH: obj["metadata"]["annotations"][RENDERED_HASH]}}
    }


async def test_created_object_is_applied_on_its_first_change(there: Stage) -> None:
    """A field that is rendered no more goes, though creating the object had set it; another's stays."""
    run = tiny()
    run["metadata"]["labels"] = {QUEUE: "a"}
    await there.start(run)
    name = "tiny-addition-generator"
    await there.edit("Deployment", name, {"metadata": {"labels": {"team": "blue"}}})
    await there.edit("ScaleRLRun", "tiny-addition", {"metadata": {"labels": {QUEUE: None}}})
    await there.reconcile()
    live = await there.get("Deployment", name)
    assert live is not None
    labels = live["metadata"]["labels"]
    assert (QUEUE in labels, labels["team"]) == (False, "blue")
    ours = [e for e in live["metadata"]["managedFields"] if e["manager"] == "scalerl-operator"]
    assert [e["operation"] for e in ours] == ["Apply"]
    calls = Counter(there.calls.counts)
    await there.edit("Deployment", name, {"spec": {"replicas": 5}})
    await there.reconcile()
    more = there.calls.counts - calls
    assert (more["get"], more["apply"]) == (0, 1), "it is taken over once"


STRIPPED = {"metadata": {"labels": {"scalerl.dev/run": None}}}


@pytest.mark.parametrize("seen", [True, False], ids=["seen at once", "seen when it is too late"])
async def test_unlabelled_workload_is_stopped_with_the_run(there: Stage, *, seen: bool) -> None:
    await there.start(tiny())
    (job,) = (o["metadata"]["name"] for o in await there.all("Job", "trainer"))
    await there.edit("Deployment", "tiny-addition-generator", STRIPPED)
    await there.edit("Job", job, STRIPPED)
    if seen:
        await there.reconcile()
        for kind, name in (("Deployment", "tiny-addition-generator"), ("Job", job)):
            live = await there.get(kind, name)
            assert live is not None
            assert live["metadata"]["labels"]["scalerl.dev/run"] == "tiny-addition"
        assert [reason for reason, _ in await there.events()].count("RepairedDrift") == 2
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
    run = await there.reconcile_until(lambda r: r["status"]["phase"] in ("Suspending", "Suspended"))
    assert (run["status"]["phase"], there.coordinator.stop_requests) == ("Suspending", ["interrupted"])
    assert await there.get("Job", job) is not None, "it saves what it trained"
    there.coordinator.phase = wire.Phase.FINISHED
    await there.end("trainer", 0, count=2)
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspended")
    for _ in range(600):
        await there.reconcile()
        left = [o["metadata"]["name"] for kind in WORKLOADS for o in await there.all(kind)]
        if not left:
            break
        await asyncio.sleep(0.2)
    assert left == []


async def test_unlabelled_preparation_is_stopped_with_the_run(there: Stage) -> None:
    await there.create(tiny())
    await there.reconcile_until(lambda r: r.get("status", {}).get("phase") == "Preparing")
    await there.edit("Job", "tiny-addition-prepare", STRIPPED)
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspended")
    for _ in range(600):
        await there.reconcile()
        left = await there.all("Job")
        if not left:
            break
        await asyncio.sleep(0.2)
    assert left == []


async def test_deletion_waits_for_an_unlabelled_trainer(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often somebody takes it off."""
    await there.start(tiny())
    monkeypatch.setattr(RunState, "may_repair", lambda *_: False)
    (job,) = (o["metadata"]["name"] for o in await there.all("Job", "trainer"))
    await there.edit("Job", job, STRIPPED)
    await there.delete("ScaleRLRun", "tiny-addition")
    for _ in range(2):
        await there.reconcile()
    assert there.coordinator.stop_requests == ["interrupted"]
    assert await there.get("ScaleRLRun", "tiny-addition") is not None


async def test_object_of_a_lost_response_is_compared(there: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    create = there.api.create

    async def lost(obj: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        made = await create(obj, dry_run=dry_run)
        if obj["kind"] == "ConfigMap":
            raise errors.Unreachable("no answer")
        return made

    await there.create(tiny())
    monkeypatch.setattr(there.api, "create", lost)
    with pytest.raises(errors.Unreachable):
        await there.reconcile()
    monkeypatch.undo()
    run = await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"budget": {"maxSteps": 77}}})
    # Its watch is slower than the run's.
    there.cache.observe("MODIFIED", run)
    await there.reconciler.reconcile((there.namespace, "tiny-addition"))
    spec = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec is not None
    assert "maxSteps: 77" in spec["data"]["run.yaml"]


async def test_take_over_is_retried_on_conflicts(there: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await there.start(tiny())
    name = "tiny-addition-generator"
    get, written = there.api.get, 0

    async def and_written(kind: str, *of: Any, **more: Any) -> dict[str, Any] | None:
        nonlocal written
        found = await get(kind, *of, **more)
        if kind == "Deployment" and written < 2:
            written += 1
            status = {"status": {"observedGeneration": 100 + written}}
            await there.edit("Deployment", name, status, "status")
        return found

    monkeypatch.setattr(there.api, "get", and_written)
    await there.edit("Deployment", name, {"spec": {"replicas": 5}})
    await there.reconcile()
    live = await there.get("Deployment", name)
    assert live is not None
    assert (written, live["spec"]["replicas"]) == (2, 1)


async def test_object_deleted_during_repair_is_recreated(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not applied: that would write over what another makes meanwhile."""
    await there.start(tiny())
    await there.reconcile()
    name = "tiny-addition-trainer"
    get = there.api.get

    async def gone(kind: str, *of: Any, **more: Any) -> dict[str, Any] | None:
        if kind == "Service":
            await there.delete("Service", name)
        return await get(kind, *of, **more)

    monkeypatch.setattr(there.api, "get", gone)
    await there.edit("Service", name, {"spec": {"publishNotReadyAddresses": False}})
    applied = there.calls.counts["apply"]
    await there.reconcile()
    live = await there.get("Service", name)
    assert live is not None
    assert (live["spec"]["publishNotReadyAddresses"], there.calls.counts["apply"]) == (True, applied)


async def test_foreign_object_created_meanwhile_is_not_overwritten(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server's memory is a moment old: somebody may have taken a name meanwhile."""
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tiny-addition-spec"}}
    await there.create(theirs | {"data": {"mine": "yes"}}, tiny())

    async def nothing(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(check, "_check_name", nothing)
    run = await there.reconcile_until(lambda r: bool(condition(r, "Degraded")))
    assert condition(run, "Degraded") == "NameTaken"
    live = await there.get("ConfigMap", "tiny-addition-spec")
    assert live is not None
    assert live["data"] == {"mine": "yes"}


async def test_foreign_object_with_the_name_is_not_overwritten(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await there.start(tiny())
    name, apply = "tiny-addition-trainer", there.api.apply
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"ports": [{"port": 7}]},
    }

    async def late(obj: dict[str, Any], **more: Any) -> dict[str, Any]:
        if obj["kind"] == "Service":
            await there.delete("Service", name)
            await there.create(theirs)
        return await apply(obj, **more)

    monkeypatch.setattr(there.api, "apply", late)
    await there.edit("Service", name, {"spec": {"publishNotReadyAddresses": False}})
    with pytest.raises(errors.Conflict):
        await there.reconcile()
    monkeypatch.undo()
    run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "NameTaken")
    assert run["status"]["phase"] == "Running"
    live = await there.get("Service", name)
    assert live is not None
    assert ([p["port"] for p in live["spec"]["ports"]], live["metadata"].get("labels")) == ([7], None)


async def test_freed_name_is_not_reported_as_taken(there: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server's memory may still hold what is gone."""
    get, asked = there.api.get, list[str]()

    async def behind(kind: str, *of: Any, recent: bool = False) -> dict[str, Any] | None:
        asked.append(of[1])
        return {"kind": kind, "metadata": {"name": of[1], "uid": "gone"}} if recent else await get(kind, *of)

    async def names(kind: str, *_: Any) -> frozenset[str]:
        return frozenset({"tiny-addition-spec"} if kind == "ConfigMap" else ())

    monkeypatch.setattr(there.api, "get", behind)
    monkeypatch.setattr(there.api, "names", names)
    await there.create(tiny())
    run = await there.reconcile_until(lambda r: bool(condition(r, "Accepted")), times=1)
    assert condition(run, "Accepted") == "Accepted"
    assert asked == [*["tiny-addition-spec"] * 2, *["tiny-addition-token"] * 2]


async def test_delayed_repair_is_made_when_due(there: Stage) -> None:
    await there.create(tiny())
    there.stopped = time.time()
    await there.reconcile()
    for _ in range(2):
        await there.edit("ConfigMap", "tiny-addition-spec", {"data": {"run.yaml": "{}"}})
        wait = await there.reconcile()
    spec = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec is not None
    assert spec["data"]["run.yaml"] == "{}"
    assert wait is not None, "nothing else would wake the run"
    assert 0 < wait <= REPAIR_SECONDS
    there.now += wait
    await there.reconcile()
    spec = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec is not None
    assert spec["data"]["run.yaml"] != "{}"


async def test_refused_repair_degrades_the_run_until_it_succeeds(there: Stage) -> None:
    """Also while the repair is withheld; other objects are applied meanwhile."""

    async def until(*, refused: bool) -> None:
        for _ in range(1200):
            try:
                await there.edit("Service", "tiny-addition-coordinator", {"metadata": {"labels": {"a": "b"}}})
                found = False
            except errors.Invalid:
                found = True
            if found is refused:
                return
            await asyncio.sleep(0.1)

    await there.start(tiny())
    await there.reconcile()
    await there.edit("Service", "tiny-addition-trainer", {"spec": {"publishNotReadyAddresses": False}})
    name = f"refuse-{there.namespace}"
    there.kubectl(
        "create", "-f", "-", stdin=_NO_CHANGE_OF_SERVICES.format(name=name, namespace=there.namespace)
    )
    await until(refused=True)
    said = set()
    for count in range(8):
        await there.reconcile()
        run = await there.get("ScaleRLRun", "tiny-addition")
        assert run is not None
        degraded = next(c for c in run["status"]["conditions"] if c["type"] == "Degraded")
        said.add((degraded["status"], degraded["reason"], "not this week" in degraded["message"]))
        there.now += REPAIR_SECONDS / 2
        if count == 2:
            await there.edit("Deployment", "tiny-addition-generator", {"spec": {"replicas": 5}})
    assert said == {("True", "ObjectRefused", True)}
    live = await there.get("Deployment", "tiny-addition-generator")
    assert live is not None
    assert live["spec"]["replicas"] == 1
    there.kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", name)
    await until(refused=False)
    there.now += MAX_REPAIR_SECONDS
    await there.reconcile_until(lambda r: condition(r, "Degraded") == "Healthy", times=3)
    service = await there.get("Service", "tiny-addition-trainer")
    assert service is not None
    assert service["spec"]["publishNotReadyAddresses"]


async def test_admission_mutations_are_applied_once(there: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A webhook that has everybody's images from a mirror: at each write of ours."""
    create, apply = there.api.create, there.api.apply

    def mirrored(obj: dict[str, Any]) -> dict[str, Any]:
        obj = copy.deepcopy(obj)
        if obj["kind"] == "Deployment":
            for container in obj["spec"]["template"]["spec"]["containers"]:
                container["image"] = f"mirror/{container['image']}"
        return obj

    async def created(obj: dict[str, Any], **more: Any) -> dict[str, Any]:
        return await create(mirrored(obj), **more)

    async def applied(obj: dict[str, Any], **more: Any) -> dict[str, Any]:
        return await apply(mirrored(obj), **more)

    monkeypatch.setattr(there.api, "create", created)
    monkeypatch.setattr(there.api, "apply", applied)
    await there.start(tiny())
    there.now += MAX_REPAIR_SECONDS
    await there.reconcile()
    before = there.calls.counts["apply"]
    for _ in range(3):
        there.now += MAX_REPAIR_SECONDS
        await there.reconcile()
    assert there.calls.counts["apply"] == before
    await there.edit("Deployment", "tiny-addition-generator", {"spec": {"replicas": 5}})
    await there.reconcile()
    live = await there.get("Deployment", "tiny-addition-generator")
    assert live is not None
    assert live["spec"]["replicas"] == 1, "what somebody else changes is put back all the same"


@pytest.mark.parametrize("change", [{"run.yaml": None}, {"run.yaml": "{}"}], ids=["removed", "changed"])
async def test_drift_without_an_operator_is_restored(there: Stage, change: dict[str, Any]) -> None:
    """Of a removed field managedFields keeps no trace."""
    await there.start(tiny())
    await there.edit("ConfigMap", "tiny-addition-spec", {"data": change})
    await there.fresh_operator()
    for _ in range(2):
        await there.reconcile()
    spec = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec is not None
    assert "maxSteps" in spec["data"]["run.yaml"]


async def test_restarted_operator_writes_no_object_again(there: Stage) -> None:
    await there.start(tiny())
    await there.reconcile()
    await there.fresh_operator()
    applied = there.calls.counts["apply"]
    for _ in range(2):
        await there.reconcile()
    assert there.calls.counts["apply"] == applied
