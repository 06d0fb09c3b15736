"""For an edit of every field that restarts a role, on a real API server: the role fails, and reverting the edit goes on.

Its controllers and admission rules are real; the test ends pods, as a kubelet would. On objects in memory, in the default tier:
``test_operator_failing_edits.py``; with a real kubelet: ``test_cluster_edits.py``.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from spec_edits import UNKNOWN_PLUGINS, Edited, edits, entry_edits, value_at
from stage import Object, Stage, condition, stage_in
from test_failing_edits import LINE, NAME, RUN, phase
from testcluster import Cluster

from scalerl_api import wire
from scalerl_operator.controller.run_object import merge_patch

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

STAGES, PARTS = 8, 4
RESTARTING = [
    e
    for e in (*edits(refused=False), *entry_edits(refused=False))
    if e.edit.effect.roles and not e.path.startswith((*UNKNOWN_PLUGINS, "environment."))
]
CLASSES = """
{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: other}, value: 1}
---
{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: other}, handler: other}
"""
ROLES_READY = ("CoordinatorReady", "GeneratorsReady", "TrainerReady")
REFUSED = ("ObjectRefused", "ReferenceNotFound")


async def new_pods(there: Stage, role: str, but: set[str] = frozenset()) -> list[Object]:  # type: ignore[assignment]
    """Pods of a role that have not started, and are none of ``but``."""
    found = [p for p in await there.all("Pod", role) if "deletionTimestamp" not in p["metadata"]]
    found = [p for p in found if p.get("status", {}).get("phase") in (None, "Pending")]
    return [p for p in found if p["metadata"]["uid"] not in but]


async def start(there: Stage) -> Object:
    """The run prepares, and all its pods start, each when it is there."""
    for _ in range(900):
        await there.reconcile()
        if await new_pods(there, "prepare"):
            await there.end("prepare")
        for role in ("coordinator", "generator", "trainer"):
            if await new_pods(there, role):
                there.coordinator.phase = wire.Phase.RUNNING
                await there.begin(role)
        run = await there.get(*RUN)
        assert run is not None
        status = run.get("status", {})
        seen = status.get("observedGeneration") == run["metadata"]["generation"]
        if seen and status["phase"] == "Running" and all(condition(run, of) == "Ready" for of in ROLES_READY):
            return run
        assert status.get("phase") != "Failed", status
        await asyncio.sleep(0.1)
    raise AssertionError(run["status"])


async def crash(there: Stage, pod: Object) -> None:
    """A container has ended with exit code 2, and waits to be started again."""
    over = {"exitCode": 2, "message": LINE, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    waits = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    containers = [
        {
            "name": c["name"],
            "ready": False,
            "restartCount": 1,
            "image": c["image"],
            "imageID": "",
            "state": waits,
            "lastState": {"terminated": over},
        }
        for c in pod["spec"]["containers"]
    ]
    status = {"phase": "Running", "containerStatuses": containers}
    await there.edit("Pod", pod["metadata"]["name"], {"status": status}, "status")


async def fails(there: Stage, edited: Edited, before: set[str], run: Object) -> str:
    """The first role that the edit restarts rejects its input; how the run takes it: held, waits or trains on."""
    roles = edited.edit.effect.roles
    role = next(r for r in ("prepare", "coordinator", "generator") if r in roles)
    asked = len(there.coordinator.stop_requests)
    for _ in range(900):
        await there.reconcile()
        if len(there.coordinator.stop_requests) > asked and there.coordinator.stop_requests[-1]:
            asked, there.coordinator.phase = 10**6, wire.Phase.FINISHED
            await there.end("trainer")
        if pods := await new_pods(there, role, before):
            break
        run = await there.get(*RUN) or {}
        assert run["status"]["phase"] != "Failed", (edited.path, run["status"])
        reasons = {c["reason"]: c["message"] for c in run["status"]["conditions"]}
        if refused := [reasons[reason] for reason in REFUSED if reason in reasons]:
            named = (edited.path.rsplit(".", 1)[-1], str(value_at(edited.manifest, edited.path)))
            assert any(name in text for name in named for text in refused), (edited.path, refused)
            return "waits"
        await asyncio.sleep(0.1)
    else:
        raise AssertionError(f"{edited}: no new pod of {role}: {run['status']}")
    if role == "generator":
        await crash(there, pods[0])
        run = await there.reconcile_until(lambda run: condition(run, "Degraded") == "BackOff")
        assert run["status"]["phase"] == "Running"
        return "trains on"
    if role == "prepare":
        await there.end(role, 2, LINE)
    else:
        await crash(there, pods[0])
    run = await there.reconcile_until(phase("Suspended"))
    message = next(c["message"] for c in run["status"]["conditions"] if c["type"] == "Suspended")
    assert condition(run, "Suspended") == "EditFailed"
    assert "/data/data.jsonl does not exist; revert or fix the edit of" in message
    assert f"spec.{edited.path.removesuffix('.none')}" in message
    return "held"


async def goes_through(there: Stage, edits: Sequence[Edited]) -> Counter[str]:
    """One run, and one edit after another."""
    taken, base = Counter[str](), copy.deepcopy(edits[0].before)
    base["metadata"]["name"] = NAME
    await there.create(base)
    run = await start(there)
    for edited in edits:
        old, new = edited.before["spec"], edited.manifest["spec"]
        before = {pod["metadata"]["uid"] for pod in await there.all("Pod")}
        attempt = run["status"]["trainer"]["attempt"]
        await there.edit(*RUN, {"spec": merge_patch(old, new)})
        how = await fails(there, edited, before, run)
        taken[how] += 1
        await there.fresh_operator()
        await there.edit(*RUN, {"spec": merge_patch(new, old)})
        run = await start(there)
        run = await there.reconcile_until(lambda run: condition(run, "Degraded") == "Healthy")
        assert (run["status"]["step"], run["status"].get("trainedSpec")) == (3, None), edited
        if how == "trains on":
            assert run["status"]["trainer"]["attempt"] == attempt, edited
    return taken


@pytest.mark.parametrize("part", range(PARTS))
async def test_edit_of_every_field_that_fails_is_reverted(served: Cluster, part: int) -> None:
    served.kubectl("apply", "-f", "-", stdin=CLASSES)
    by_base: dict[str, list[Edited]] = {}
    for edited in RESTARTING[part::PARTS]:
        by_base.setdefault(edited.before["metadata"]["name"], []).append(edited)
    runs = [one for found in by_base.values() for n in range(STAGES) if (one := found[n::STAGES])]
    limit = asyncio.Semaphore(STAGES)

    async def play(edits: list[Edited]) -> Counter[str]:
        async with limit, AsyncExitStack() as stack:
            name = f"fields-{uuid.uuid4().hex[:8]}"
            await asyncio.to_thread(served.kubectl, "create", "namespace", name)
            there = await stack.enter_async_context(stage_in(served, name))
            await there.account()
            taken = await goes_through(there, edits)
            served.kubectl("delete", "namespace", name, "--wait=false")
            return taken

    taken = sum(await asyncio.gather(*map(play, runs)), Counter[str]())
    print(f"measured: {dict(taken)}")
    assert sum(taken.values()) == len(RESTARTING[part::PARTS])
    assert taken["held"] > taken["trains on"]
