"""What a look asks of the API server, and when it is due: a thousand runs are looked at by one process."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from stage import Stage, condition, stage, tiny
from testcluster import Cluster

from scalerl_api import wire
from scalerl_api.conditions import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_operator.cluster import errors, reconcile
from scalerl_operator.cluster.apply import LONGEST_REPAIR_SECONDS, TRIED_SECONDS
from scalerl_operator.cluster.drift import differs
from scalerl_operator.cluster.names import QUEUE, RENDERED_HASH
from scalerl_operator.cluster.observed import PLACING_SECONDS
from scalerl_operator.cluster.place import WORKLOADS
from scalerl_operator.cluster.reconcile import START_LOOKS
from scalerl_operator.cluster.render import render
from scalerl_operator.cluster.stuck import ASK_SECONDS, SILENT_SECONDS
from scalerl_operator.policy.lifecycle import ASK_AGAIN_SECONDS, POLL_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture
async def there(control_plane: Cluster) -> AsyncIterator[Stage]:
    async with stage(control_plane, f"calls-{uuid.uuid4().hex[:8]}") as made:
        yield made


async def test_a_new_run_is_tried_with_what_a_user_wrote_of_pods_alone(there: Stage) -> None:
    await there.create(tiny())
    await there.look()
    events = len(await there.events())
    # Claim, spec, token, NetworkPolicy and preparation are made; the four workloads are tried before.
    assert there.calls.counts["create"] == 5 + 4 + events
    assert there.calls.counts["get"] == 11, "each name is asked for once"
    assert there.calls.counts["apply"] == 0, "of what is not there"
    assert there.calls.counts["patch"] == 2, "the finalizer, the status"


async def test_pods_that_were_just_taken_are_not_tried_again(there: Stage) -> None:
    async def tried(name: str, **spec: Any) -> int:
        before, events = there.calls.counts["create"], len(await there.events())
        await there.create(tiny(name, **spec))
        await there.look(name)
        events = len(await there.events()) - events
        return there.calls.counts["create"] - before - events - 5

    assert await tried("first") == 4
    assert await tried("second", budget={"maxSteps": 3}) == 0, "what it trains is no matter of its pods"
    assert await tried("third", generator={"replicas": 1, "kvCache": "512Mi"}) == 4
    there.now += TRIED_SECONDS + 1.0
    assert await tried("fourth") == 4, "what is taken may change"


async def test_pods_that_were_taken_are_tried_again_once_anything_was_refused(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    create = there.api.create

    async def noted(obj: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        tried.extend([obj["kind"]] if dry_run else [])
        return await create(obj, dry_run=dry_run)

    monkeypatch.setattr(there.api, "create", noted)
    await there.create(tiny("first"), tiny("second"), tiny("third"))
    await there.look("first")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}}
    full = yaml.safe_dump(quota | {"spec": {"hard": {"count/configmaps": "0"}}})
    await asyncio.to_thread(there.kubectl, "apply", "-n", there.namespace, "-f", "-", stdin=full)
    await asyncio.to_thread(
        *(there.kubectl, "wait", "-n", there.namespace, "resourcequota/q", "--timeout=20s"),
        "--for=jsonpath={.status.used}",
    )
    tried.clear()
    run = await there.looks(lambda r: condition(r, "Degraded") == "QuotaExceeded", "second", times=1)
    assert (condition(run, "Accepted"), tried) == ("Accepted", [])
    await there.look("third")
    assert len(tried) == 4


async def test_a_run_that_was_repaired_is_after_a_while_compared_no_more_than_any(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await there.create(tiny())
    await there.look()
    await there.edit("ConfigMap", "tiny-addition-spec", {"data": {"run.yaml": "{}"}})
    await there.look()
    there.now += 2 * LONGEST_REPAIR_SECONDS + 1.0
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"budget": {"maxSteps": 77}}})
    await there.look()
    rendered: list[str] = []

    def counted(run: ScaleRLRun, *of: Any, **more: Any) -> list[dict[str, Any]]:
        rendered.append(run.metadata.name)
        return render(run, *of, **more)

    monkeypatch.setattr(reconcile, "render", counted)
    await there.look()
    assert rendered == []


async def test_news_of_a_pod_has_nothing_rendered_and_an_edit_by_hand_has(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []

    def counted(run: ScaleRLRun, *of: Any, **more: Any) -> list[dict[str, Any]]:
        rendered.append(run.metadata.name)
        return render(run, *of, **more)

    monkeypatch.setattr(reconcile, "render", counted)
    await there.create(tiny())
    await there.look()
    assert len(rendered) == 2, "for the trial, and to be made"
    await there.begin("prepare")
    await there.look()
    assert len(rendered) == 2
    await there.edit("ConfigMap", "tiny-addition-spec", {"data": {"run.yaml": "{}"}})
    await there.look()
    spec = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec is not None
    assert len(spec["data"]["run.yaml"]) > 100, "and it is put back"
    await there.edit("ScaleRLRun", "tiny-addition", {"metadata": {"labels": {QUEUE: "a"}}})
    before = len(rendered)
    await there.look()
    assert len(rendered) == before + 1, "labels have no generation"


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
async def test_what_was_created_is_taken_over_whatever_it_is(
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
    await there.look()
    live = await there.get(kind, name)
    assert live is not None
    labels = live["metadata"]["labels"]
    assert ("earlier" in labels, labels["team"]) == (False, "blue")
    ours = [e for e in live["metadata"]["managedFields"] if e["manager"] == "scalerl-operator"]
    assert [e["operation"] for e in ours] == ["Apply"]
    assert differs(without_labels(made), without_labels(live)) is None, "and is as it was made"
    applied = there.calls.counts["apply"]
    await there.look()
    assert there.calls.counts["apply"] == applied


def without_labels(obj: dict[str, Any]) -> dict[str, Any]:
    """What an object is for, and what we say of it."""
    said = {name: obj[name] for name in ("spec", "data") if name in obj}
    return said | {
        "metadata": {"annotations": {RENDERED_HASH: obj["metadata"]["annotations"][RENDERED_HASH]}}
    }


async def test_what_was_created_is_applied_from_the_first_change_on(there: Stage) -> None:
    """A field that is rendered no more goes, though creating the object had set it; another's stays."""
    run = tiny()
    run["metadata"]["labels"] = {QUEUE: "a"}
    await there.start(run)
    name = "tiny-addition-generator"
    await there.edit("Deployment", name, {"metadata": {"labels": {"team": "blue"}}})
    await there.edit("ScaleRLRun", "tiny-addition", {"metadata": {"labels": {QUEUE: None}}})
    await there.look()
    live = await there.get("Deployment", name)
    assert live is not None
    labels = live["metadata"]["labels"]
    assert (QUEUE in labels, labels["team"]) == (False, "blue")
    ours = [e for e in live["metadata"]["managedFields"] if e["manager"] == "scalerl-operator"]
    assert [e["operation"] for e in ours] == ["Apply"]
    calls = Counter(there.calls.counts)
    await there.edit("Deployment", name, {"spec": {"replicas": 5}})
    await there.look()
    more = there.calls.counts - calls
    assert (more["get"], more["apply"]) == (0, 1), "it is taken over once"


STRIPPED = {"metadata": {"labels": {"scalerl.dev/run": None}}}


@pytest.mark.parametrize("seen", [True, False], ids=["seen at once", "seen when it is too late"])
async def test_what_lost_the_label_that_it_is_known_by_is_stopped_with_the_run(
    there: Stage, *, seen: bool
) -> None:
    await there.start(tiny())
    (job,) = (o["metadata"]["name"] for o in await there.all("Job", "trainer"))
    await there.edit("Deployment", "tiny-addition-generator", STRIPPED)
    await there.edit("Job", job, STRIPPED)
    if seen:
        await there.look()
        for kind, name in (("Deployment", "tiny-addition-generator"), ("Job", job)):
            live = await there.get(kind, name)
            assert live is not None
            assert live["metadata"]["labels"]["scalerl.dev/run"] == "tiny-addition"
        assert [reason for reason, _ in await there.events()].count("RepairedDrift") == 2
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
    run = await there.looks(lambda r: r["status"]["phase"] in ("Suspending", "Suspended"))
    assert (run["status"]["phase"], there.coordinator.told) == ("Suspending", ["interrupted"])
    assert await there.get("Job", job) is not None, "it saves what it trained"
    there.coordinator.phase = wire.Phase.FINISHED
    await there.end("trainer", 0, count=2)
    await there.looks(lambda r: r["status"]["phase"] == "Suspended")
    for _ in range(50):
        await there.look()
        left = [o["metadata"]["name"] for kind in WORKLOADS for o in await there.all(kind)]
        if not left:
            break
        await asyncio.sleep(0.2)
    assert left == []


async def test_a_run_is_deleted_only_when_a_trainer_without_its_label_has_saved(there: Stage) -> None:
    await there.start(tiny())
    (job,) = (o["metadata"]["name"] for o in await there.all("Job", "trainer"))
    await there.edit("Job", job, STRIPPED)
    await there.delete("ScaleRLRun", "tiny-addition")
    await there.look()
    assert there.coordinator.told == ["interrupted"]
    assert await there.get("ScaleRLRun", "tiny-addition") is not None


async def test_what_a_lost_answer_has_made_is_compared_with_what_is_wanted_by_now(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = there.api.create

    async def lost(obj: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        made = await create(obj, dry_run=dry_run)
        if obj["kind"] == "ConfigMap":
            raise errors.Unreachable("no answer")
        return made

    await there.create(tiny())
    monkeypatch.setattr(there.api, "create", lost)
    with pytest.raises(errors.Unreachable):
        await there.look()
    monkeypatch.undo()
    run = await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"budget": {"maxSteps": 77}}})
    # Its watch is slower than the run's.
    there.cache.observe("MODIFIED", run)
    await there.reconciler.reconcile((there.namespace, "tiny-addition"))
    spec = await there.get("ConfigMap", "tiny-addition-spec")
    assert spec is not None
    assert "maxSteps: 77" in spec["data"]["run.yaml"]


async def test_a_take_over_is_tried_again_while_somebody_writes_the_object(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    await there.look()
    live = await there.get("Deployment", name)
    assert live is not None
    assert (written, live["spec"]["replicas"]) == (2, 1)


async def test_what_goes_while_it_is_repaired_is_created_again(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not applied: that would write over what another makes meanwhile."""
    await there.start(tiny())
    name = "tiny-addition-trainer"
    get = there.api.get

    async def gone(kind: str, *of: Any, **more: Any) -> dict[str, Any] | None:
        if kind == "Service":
            await there.delete("Service", name)
        return await get(kind, *of, **more)

    monkeypatch.setattr(there.api, "get", gone)
    await there.edit("Service", name, {"spec": {"publishNotReadyAddresses": False}})
    applied = there.calls.counts["apply"]
    await there.look()
    live = await there.get("Service", name)
    assert live is not None
    assert (live["spec"]["publishNotReadyAddresses"], there.calls.counts["apply"]) == (True, applied)


async def test_what_comes_between_the_question_and_the_making_is_not_written_over(
    there: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server's memory is a moment old: somebody may have taken a name meanwhile."""
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tiny-addition-spec"}}
    await there.create(theirs | {"data": {"mine": "yes"}}, tiny())

    async def nothing(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(there.reconciler._applier, "_taken", nothing)
    run = await there.looks(lambda r: bool(condition(r, "Degraded")))
    assert condition(run, "Degraded") == "NameTaken"
    live = await there.get("ConfigMap", "tiny-addition-spec")
    assert live is not None
    assert live["data"] == {"mine": "yes"}


async def test_that_a_new_pod_has_no_node_yet_is_no_news_before_a_while(there: Stage) -> None:
    await there.create(tiny())
    await there.looks(lambda run: run.get("status", {}).get("phase") == "Preparing")
    [pod] = await there.pods("prepare")
    unbound = "pod has unbound immediate PersistentVolumeClaims"
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unbound}
    await there.edit("Pod", pod["metadata"]["name"], {"status": {"conditions": [waits]}}, "status")
    writes = there.calls.writes
    wait = await there.look()
    assert wait is not None
    patience = PLACING_SECONDS[Reason.VOLUME_NOT_READY]
    assert (there.calls.writes - writes, wait <= patience) == (0, True)
    there.now += patience + 1.0
    run = await there.looks(lambda r: condition(r, "Prepared") == "VolumeNotReady", times=1)
    assert ("VolumeNotReady", f"Prepared: {unbound}") in await there.events()
    assert run["status"]["phase"] == "Preparing"


async def is_made_and_does_not_begin(there: Stage) -> None:
    await there.create(tiny())
    await there.looks(lambda run: run.get("status", {}).get("phase") == "Preparing")
    [pod] = await there.pods("prepare")
    waiting = {"name": "prepare", "ready": False, "restartCount": 0, "image": "i", "imageID": ""}
    waiting["state"] = {"waiting": {"reason": "ContainerCreating"}}
    status = {"phase": "Pending", "containerStatuses": [waiting]}
    await there.edit("Pod", pod["metadata"]["name"], {"status": status}, "status")


async def test_by_the_clock_only_what_events_alone_tell_is_looked_at(there: Stage) -> None:
    await is_made_and_does_not_begin(there)
    assert await there.look() == START_LOOKS[0], "why a volume is not mounted, only events tell"
    await there.begin("prepare")
    assert await there.look() is None, "its end is news by itself"
    writes = there.calls.writes
    assert await there.look() is None
    assert there.calls.writes == writes


async def test_events_are_asked_for_after_a_while_and_now_and_then(there: Stage) -> None:
    await is_made_and_does_not_begin(there)

    async def questions(seconds_on: float) -> int:
        before = there.calls.counts["list"]
        there.now += seconds_on
        for _ in range(3):  # whatever else has it looked at
            await there.look()
        return there.calls.counts["list"] - before

    assert await questions(0.0) == 0, "most pods begin soon"
    assert await questions(SILENT_SECONDS + 1.0) == 1
    assert await questions(ASK_SECONDS / 2) == 0
    assert await questions(ASK_SECONDS / 2 + 1.0) == 1
    await there.begin("prepare")
    assert await questions(ASK_SECONDS + 1.0) == 0


async def test_a_coordinator_is_asked_once_a_look_and_sooner_again_while_its_word_is_awaited(
    there: Stage,
) -> None:
    await there.start(tiny())
    asked = there.coordinator.asked
    assert await there.look() == POLL_SECONDS
    assert there.coordinator.asked == asked + 1
    there.coordinator.silent = True
    assert await there.look() == ASK_AGAIN_SECONDS
    assert there.coordinator.asked == asked + 2, (
        "one that does not answer is not asked again in the same look"
    )
    there.coordinator.silent = False
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
    assert await there.look() == ASK_AGAIN_SECONDS
    assert (there.coordinator.asked, there.coordinator.told) == (asked + 3, ["interrupted"])
