"""Of all replicas one works, and only while it leads: against a real API server, in one process and as processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from replicas import (
    LONG_LEASE_SECONDS,
    a_run,
    an_operator,
    asked,
    config_map,
    follow,
    leader,
    noting,
    replica,
    running,
    settings,
    until,
)
from stage import stage, tiny
from testcluster import Cluster

from scalerl_operator import main
from scalerl_operator.kube import connection, errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.leader_election import DURATION_SECONDS, LEASE_NAME, Leader
from scalerl_operator.kube.types import Key, Object

pytestmark = pytest.mark.cluster

PACE_SECONDS = 0.1
STARTING_SECONDS = 180.0
"""For a few processes to begin on a machine that does other things too; what comes after has bounds of its own."""


class Work:
    """Reconciles every run again and again; the reconcile of the run ``long`` never ends by itself."""

    def __init__(self) -> None:
        self.reconciled: list[str] = []
        self.stopped: list[str] = []
        self.forgotten = 0

    @contextlib.asynccontextmanager
    async def make(self, parts: main.Parts) -> AsyncIterator[main.Reconcile]:
        async def reconcile(key: Key) -> float | None:
            self.reconciled.append(key[1])
            try:
                await asyncio.sleep(3600 if key[1] == "long" else 0.01)
            except asyncio.CancelledError:
                self.stopped.append(key[1])
                raise
            return PACE_SECONDS

        async def forget() -> None:
            self.forgotten += 1

        parts.on_lost.append(forget)
        yield reconcile


@pytest.fixture
async def at_work(api: KubeApi, served: Cluster, namespace: str) -> AsyncIterator[tuple[main.Operator, Work]]:
    """An operator that leads and has reconciled its three runs."""
    for name in ("a", "b", "long"):
        await api.apply(a_run(namespace, name))
    work, chosen = Work(), settings(served, namespace)
    made = main.Operator(chosen, await connection.load(chosen.kubeconfig), work.make)
    made.leader.duration_seconds = LONG_LEASE_SECONDS
    async with running(made) as operator:
        await until(lambda: {"a", "b", "long"} <= set(work.reconciled))
        await until(operator.watches.started.is_set)
        yield operator, work


async def has_stopped(operator: main.Operator, work: Work) -> None:
    """No reconcile is under way or begun, nothing is written, and nothing of the time before is kept."""
    await until(lambda: "long" in work.stopped, 120)
    await until(lambda: work.forgotten == 1, 120)
    work.reconciled.clear()
    assert operator.queue.in_work() == 0
    with pytest.raises(errors.Fenced):
        await operator.api.apply(config_map("default", "a"))


async def test_lost_lease_ends_all_work_until_regained(
    api: KubeApi,
    namespace: str,
    at_work: tuple[main.Operator, Work],
) -> None:
    operator, work = at_work
    rival = {
        "holderIdentity": "somebody",
        "renewTime": "2026-01-01T00:00:00.000000Z",
        "leaseDurationSeconds": 3600,
    }
    await api.patch("Lease", namespace, LEASE_NAME, {"spec": rival})
    took = await until(operator.leader.lost.is_set)
    print(f"stops {took:.1f} s after somebody took its Lease")
    await has_stopped(operator, work)
    assert await asked(operator, "/readyz") == (200, "somebody leads\n")
    await api.apply(a_run(namespace, "late"))
    await until(lambda: operator.cache.run(namespace, "late"), 120)
    await asyncio.sleep(10 * PACE_SECONDS)
    assert work.reconciled == [], "it receives events, and reconciles no run"
    # That replica does not renew, and is taken for dead.
    await api.patch("Lease", namespace, LEASE_NAME, {"spec": {"leaseDurationSeconds": 1}})
    await until(operator.leader.is_leader, 120)
    await until(lambda: {"a", "b", "late", "long"} <= set(work.reconciled), 120)
    assert (work.forgotten, await asked(operator, "/readyz")) == (1, (200, "leads\n"))


async def test_unreachable_api_server_ends_all_work_after_the_lease(
    api: KubeApi, served: Cluster, namespace: str, at_work: tuple[main.Operator, Work]
) -> None:
    operator, work = at_work
    with served.without("kube-apiserver"):
        operator.leader._leads_until = operator.leader._clock() + DURATION_SECONDS
        took = await until(operator.leader.lost.is_set)
        print(f"stops {took:.1f} s after the API server")
        await has_stopped(operator, work)
        for name in ("a", "b"):  # a watch's late news, as far as it knows
            operator.queue.wake((namespace, name))
        await asyncio.sleep(10 * PACE_SECONDS)
        assert work.reconciled == []
        assert await asked(operator, "/readyz") == (200, "does not lead; the leader is not known\n")
    await until(operator.leader.is_leader, 120)
    await until(lambda: {"a", "b", "long"} <= set(work.reconciled), 120)


async def test_standby_is_warm_and_idle_until_it_leads(api: KubeApi, served: Cluster, namespace: str) -> None:
    first: list[Key] = []
    second: list[Key] = []
    async with running(await an_operator(served, namespace, second, "two")) as two:
        async with running(await an_operator(served, namespace, first, "one")) as one:
            await until(lambda: one.leader.is_leader() or two.leader.is_leader())
            leading, standby = (first, second) if one.leader.is_leader() else (second, first)
            other = two if leading is first else one
            await until(other.watches.started.is_set)
            await asyncio.sleep(1)
            await api.apply(a_run(namespace, "r"))
            await until(lambda: leading and other.cache.run(namespace, "r"), 120)
            assert not standby
            await until(lambda: other.leader.holder == ("one" if leading is first else "two"), 120)
            assert await asked(other, "/readyz") == (200, f"{other.leader.holder} leads\n")
            with pytest.raises(errors.Fenced):
                await other.api.apply(config_map(namespace, "a"))
            two_led = two.leader.is_leader()
        if not two_led:
            took = await until(two.leader.is_leader, LONG_LEASE_SECONDS / 2)
            print(f"the next leads {took:.2f} s after an orderly end")
            await until(lambda: second, 120)


async def test_replica_without_the_lease_names_no_leader(served: Cluster, namespace: str) -> None:
    class Silent:
        """Leases of which no word comes."""

        async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
            return await asyncio.get_running_loop().create_future()

        create = replace = get

    chosen = settings(served, namespace)
    operator = main.Operator(chosen, await connection.load(chosen.kubeconfig), noting([]))
    operator.leader = Leader(Silent(), namespace=namespace, identity="test")  # type: ignore[arg-type]
    async with running(operator):
        await until(lambda: operator.address)
        deadline = time.monotonic() + 120
        while (answer := await asked(operator, "/readyz"))[0] != 200:
            assert answer[1].startswith("waiting for "), answer
            assert time.monotonic() < deadline, answer
        assert answer[1] == "does not lead; the leader is not known\n"


async def test_non_leader_sends_no_request_to_coordinator(
    control_plane: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(control_plane, f"fence-{uuid.uuid4().hex[:8]}") as there:
        await there.start(tiny())
        await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
        patch = there.api.patch

        async def last(*of: Any, **more: Any) -> Any:
            """What is decided is written down, and then the lead is lost."""
            made = await patch(*of, **more)
            there.leads = False
            return made

        monkeypatch.setattr(there.api, "patch", last)
        with pytest.raises(errors.Fenced, match="coordinator"):
            await there.reconcile()
        monkeypatch.undo()
        assert there.coordinator.stop_requests == []
        there.leads = True
        await there.reconcile()
        assert there.coordinator.stop_requests == ["interrupted"]


async def test_one_of_three_leads_and_the_next_takes_over(
    api: KubeApi, served: Cluster, namespace: str
) -> None:
    async with (
        replica(served, namespace, "one") as one,
        replica(served, namespace, "two") as two,
        replica(served, namespace, "three") as three,
    ):
        replicas = [one, two, three]
        first = await leader(replicas, STARTING_SECONDS)
        await follow(replicas, first)
        killed = time.monotonic()
        first.process.kill()
        await first.process.wait()
        left = [each for each in replicas if each is not first]
        second = await leader(left)
        print(f"after kill -9 the next leads within {time.monotonic() - killed:.1f} s")
        await asyncio.sleep(3)
        ended = time.monotonic()
        second.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(second.process.wait(), 120) == 0
        lease = await api.get("Lease", namespace, LEASE_NAME)
        assert lease is not None
        assert lease["spec"]["holderIdentity"] != second.identity, "it has not to expire"
        third = await leader([each for each in left if each is not second])
        print(f"after SIGTERM the next leads within {time.monotonic() - ended:.1f} s")
        third.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(third.process.wait(), 120) == 0


async def test_frozen_leader_finds_another_leader(served: Cluster, namespace: str) -> None:
    async with replica(served, namespace, "one") as one, replica(served, namespace, "two") as two:
        first = await leader([one, two], STARTING_SECONDS)
        await follow([one, two], first)
        second = two if first is one else one
        first.process.send_signal(signal.SIGSTOP)
        try:
            await leader([second])
        finally:
            first.process.send_signal(signal.SIGCONT)
        await follow([first, second], second)
