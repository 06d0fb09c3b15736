"""An operator that ends within a reconcile, after any of its writes: another one brings about what it would have.

Each course is gone through many times side by side: once undisturbed, and for each n with an operator that is cut off
after its n-th write in every scene, where another one takes over that knows nothing but what the cluster holds.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from stage import Stage, condition, stage_in, tiny
from testcluster import Cluster

from scalerl_api import wire
from scalerl_operator.controller.parts import WORKLOADS
from scalerl_operator.kube import errors

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

Object = dict[str, Any]
Names = frozenset[tuple[str, str]]
Reached = Callable[[Object, Names], bool]
LifecycleDecision = Callable[[Stage], AsyncIterator[Reached]]

NAME = "tiny-addition"


@dataclass(frozen=True)
class Scene:
    """What there is once nothing moves any more. made: how often an object of that kind and name was, from the first
    scene on. stop_requests: those that the coordinator got."""

    status: Object
    objects: Names
    made: dict[tuple[str, str], int]
    stop_requests: list[str]


# --- courses ------------------------------------------------------------------------------------


def in_phase(name: str) -> Reached:
    return lambda run, there: run["status"]["phase"] == name


def works(attempt: int = 1) -> Reached:
    def reached(run: Object, there: Names) -> bool:
        ready = condition(run, "TrainerReady") == condition(run, "CoordinatorReady") == "Ready"
        return ready and not run["status"].get("resumed") and run["status"]["trainer"]["attempt"] == attempt

    return reached


def holds_nothing(run: Object, there: Names) -> bool:
    suspended = run["spec"].get("suspend") is True and run["status"].get("suspension") == "Suspended"
    return suspended and not any(kind in WORKLOADS for kind, _ in there)


def is_gone(run: Object, there: Names) -> bool:
    return not run


async def begin(there: Stage) -> None:
    await there.begin("coordinator")
    await there.begin("generator")
    await there.begin("trainer", 2)


async def stop(there: Stage, reason: str) -> None:
    """The coordinator has seen the last checkpoint, and the trainer leaves."""
    there.coordinator.phase, there.coordinator.stop_reason = wire.Phase.FINISHED, reason
    await there.end("trainer", 0, count=2)


async def a_whole_life(there: Stage) -> AsyncIterator[Reached]:
    """Started, a rank lost, suspended, resumed, completed, deleted."""
    await there.create(tiny(podTemplate={}))
    yield in_phase("Preparing")
    await there.end("prepare")
    yield in_phase("Running")
    await begin(there)
    yield works()
    await there.end("trainer", 137)
    yield lambda run, names: ("Job", f"{NAME}-trainer-2") in names
    await there.begin("trainer", 2)
    yield works(2)
    await there.edit("ScaleRLRun", NAME, {"spec": {"suspend": True}})
    yield in_phase("Suspending")
    await stop(there, "interrupted")
    yield holds_nothing
    await there.edit("ScaleRLRun", NAME, {"spec": {"suspend": False}})
    yield in_phase("Preparing")
    await there.end("prepare")
    yield in_phase("Running")
    await begin(there)
    yield works(2)
    await stop(there, "maxSteps")
    yield in_phase("Completed")
    await there.delete("ScaleRLRun", NAME)
    yield is_gone


async def stopped_by_its_forecast(there: Stage) -> AsyncIterator[Reached]:
    await there.create(tiny(podTemplate={}, autoscaling={"mode": "Auto"}))
    yield in_phase("Preparing")
    await there.end("prepare")
    yield in_phase("Running")
    await begin(there)
    yield works()
    await stop(there, "forecast")
    yield holds_nothing
    await there.edit("ScaleRLRun", NAME, {"spec": {"suspend": False}})
    yield in_phase("Preparing")


async def deleted_while_it_works(there: Stage) -> AsyncIterator[Reached]:
    await there.create(tiny(podTemplate={}))
    yield in_phase("Preparing")
    await there.end("prepare")
    yield in_phase("Running")
    await begin(there)
    yield works()
    await there.delete("ScaleRLRun", NAME)
    yield in_phase("Suspending")
    await stop(there, "interrupted")
    yield is_gone


# --- going through them -------------------------------------------------------------------------


def objects(there: Stage) -> tuple[Names, bool]:
    """The run's objects as the last reconcile found and left them, and whether any of them is on its way out."""
    found = there.cache.owned(there.namespace, NAME)
    names = frozenset((kind, name) for kind, name in found if kind != "Pod")
    return names, any("deletionTimestamp" in o["metadata"] for o in found.values())


def counted(there: Stage) -> Counter[tuple[str, str]]:
    """How often an object of that kind and name is made, from now on. Events are not written: they only tell people, and
    one that is lost stays lost."""
    made, create = Counter[tuple[str, str]](), there.api.create

    async def counting(obj: Object, *, dry_run: bool = False) -> Object:
        answer = await create(obj, dry_run=dry_run)
        if not dry_run:
            made[obj["kind"], obj["metadata"]["name"]] += 1
        return answer

    async def silent(*_: Any) -> None:
        pass

    there.api.create, there.api.event = counting, silent  # type: ignore[method-assign]
    return made


async def settle(there: Stage, reached: Reached, cut: int | None) -> tuple[Object, Names]:
    """Reconciles until it is reached and a reconcile writes nothing. cut: the first operator's last write."""
    there.writes_left = cut
    for n in range(100):
        writes = there.calls.writes
        try:
            await there.reconcile()
        except (errors.Fenced, errors.Conflict, errors.AlreadyExists):
            writes = -1  # what lists the runs comes back
        run, (names, leave) = there.cache.run(there.namespace, NAME) or {}, objects(there)
        if there.writes_left == 0:
            there.writes_left = None
            await there.fresh_operator()
        elif there.calls.writes == writes and (not run or (reached(run, names) and not leave)):
            return run, names
        else:
            await asyncio.sleep(min(0.1 * 1.2**n, 1.0))
    raise AssertionError(f"not reached: {json.dumps(run.get('status'))} {sorted(names)}")


def without_times(run: Object) -> Object:
    """Of a status what does not depend on how long anything took."""
    status = run.get("status", {})
    return {
        "suspend": run.get("spec", {}).get("suspend"),
        "trainer": {k: v for k, v in status.get("trainer", {}).items() if not k.endswith("Time")},
        **{name: status.get(name) for name in ("phase", "suspension", "resumed")},
        **{type_: condition(run, type_) for type_ in ("Completed", "Failed", "Suspended")},
    }


async def played(
    there: Stage, decision: LifecycleDecision, cut: int | None = None, first: int = 0, last: int | None = None
) -> tuple[list[Scene], list[int]]:
    """The course's scenes up to the last, and how much was written in each. first: of those that are cut."""
    made, scenes, written = counted(there), list[Scene](), list[int]()
    async for reached in decision(there):
        writes = there.calls.writes
        try:
            run, names = await settle(there, reached, cut if len(scenes) >= first else None)
        except AssertionError as error:
            raise AssertionError(f"cut off after {cut} writes, in scene {len(scenes)}: {error}") from error
        written.append(there.calls.writes - writes)
        # What a run that is gone has left is the garbage collector's.
        names = names if run else frozenset()
        scenes.append(Scene(without_times(run), names, dict(made), list(there.coordinator.stop_requests)))
        if len(scenes) - 1 == last:
            break
    return scenes, written


async def stages(stack: AsyncExitStack, served: Cluster, count: int) -> list[Stage]:
    names = [f"cut-{uuid.uuid4().hex[:8]}" for _ in range(count)]
    made = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names]
    both = json.dumps({"apiVersion": "v1", "kind": "List", "items": made})
    await asyncio.to_thread(served.kubectl, "create", "-f", "-", stdin=both)
    return [await stack.enter_async_context(stage_in(served, name)) for name in names]


COURSES: tuple[tuple[LifecycleDecision, int], ...] = (
    (a_whole_life, 0),
    (stopped_by_its_forecast, 3),
    (deleted_while_it_works, 3),
)
"""Each with the first scene in which operators are cut off: what comes before is cut off in another one."""


async def test_operator_killed_after_any_write_is_succeeded(served: Cluster) -> None:
    async with AsyncExitStack() as stack:
        theres = await stages(stack, served, len(COURSES))
        undisturbed = await asyncio.gather(
            *(played(there, decision) for there, (decision, _) in zip(theres, COURSES, strict=True))
        )
        cuts = [
            # No further than to the last scene in which there is something to cut.
            (decision, expected, cut, first, max(n for n, writes in enumerate(written) if writes > cut))
            for (decision, first), (expected, written) in zip(COURSES, undisturbed, strict=True)
            for cut in range(1, max(written[first:]))
        ]
        theres = await stages(stack, served, len(cuts))
        all_scenes = await asyncio.gather(
            *(
                played(there, decision, cut, first, last)
                for there, (decision, _, cut, first, last) in zip(theres, cuts, strict=True)
            )
        )
    assert len(cuts) > 15
    for scenes, _ in undisturbed:
        assert set(scenes[2].made.values()) == {1}, "of what works nothing is made twice"
    for (decision, expected, cut, *_), (scenes, _) in zip(cuts, all_scenes, strict=True):
        for number, scene in enumerate(scenes):
            assert scene == expected[number], (
                f"{decision.__name__}, cut off after {cut} writes, scene {number}"
            )
