"""Leadership: never two at once, soon the next one, whatever the clocks and the API server do."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operator_tests.virtual_time import run
from scalerl_operator.kube import errors
from scalerl_operator.kube.leader_election import Leader, steady_clock


def now() -> float:
    return asyncio.get_running_loop().time()


def given_up() -> dict[str, Any]:
    """As an operator leaves it that has ended in order."""
    spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": "t0", "leaseTransitions": 0}
    return {"metadata": {"name": "scalerl-operator", "resourceVersion": "0"}, "spec": spec}


@dataclass
class Leases:
    """One Lease with the API server's optimistic locking, slow, failing or away as the test sets it."""

    latency: Callable[[], tuple[float, float]] = lambda: (0.005, 0.005)
    """Seconds before the request takes effect, and from there to its answer."""
    failing: Callable[[], bool] = lambda: False
    lease: dict[str, Any] | None = field(default_factory=given_up)
    version: int = 0
    writes: list[tuple[float, str]] = field(default_factory=list)

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        return await self._do(lambda: self.lease)

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        def effect() -> dict[str, Any]:
            if self.lease is not None:
                raise errors.AlreadyExists("taken", code=409)
            return self._write(obj)

        return await self._do(effect)

    async def replace(self, obj: dict[str, Any]) -> dict[str, Any]:
        def effect() -> dict[str, Any]:
            if self.lease is None or obj["metadata"]["resourceVersion"] != str(self.version):
                raise errors.Conflict("not the current one", code=409)
            return self._write(obj)

        return await self._do(effect)

    def _write(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.writes.append((now(), obj["spec"]["holderIdentity"]))
        metadata = {**obj["metadata"], "resourceVersion": str(self.version)}
        # renewTime is wall time, which stands still in virtual time; the server would see it change.
        self.lease = {**obj, "metadata": metadata, "spec": {**obj["spec"], "renewTime": f"t{self.version}"}}
        return self.lease

    async def _do(self, effect: Callable[[], Any]) -> Any:
        before, after = self.latency()
        await asyncio.sleep(before)
        if self.failing():
            raise errors.Unreachable("connection refused")
        result = effect()
        await asyncio.sleep(after)
        if self.failing():
            raise errors.Unreachable("connection reset")  # it took effect, and the caller does not know
        return result


class Replica:
    """One process: a leader and its task, on a clock that is off by ``offset``."""

    def __init__(self, leases: Leases, name: str, offset: float = 0.0) -> None:
        self.leader = Leader(
            leases,
            namespace="scalerl",
            identity=name,
            clock=lambda: now() + offset,
            rng=random.Random(name),
        )
        self.task = asyncio.create_task(self.leader.run())

    async def kill(self) -> None:
        """As kill -9: nothing is released or reported."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def until(condition: Callable[[], bool], limit: float) -> float:
    began = now()
    while not condition():
        if now() - began > limit:
            raise AssertionError(f"not within {limit} s")
        await asyncio.sleep(0.01)
    return now() - began


def test_first_replica_leads_and_second_waits() -> None:
    async def scenario() -> None:
        leases = Leases()
        first = Replica(leases, "one")
        await asyncio.wait_for(first.leader.began.wait(), 1)
        second = Replica(leases, "two")
        await asyncio.sleep(120)
        assert first.leader.is_leader()
        assert not second.leader.is_leader()
        assert second.leader.holder == "one"
        assert not first.leader.lost.is_set()
        await first.kill()
        await second.kill()
        # A renewal every three seconds, and nothing else.
        assert 35 <= len(leases.writes) <= 45

    run(scenario())


@pytest.mark.parametrize("offset", [0.0, 3600.0, -3600.0])
def test_next_leads_within_15_seconds_of_a_kill(offset: float) -> None:
    async def scenario() -> None:
        leases = Leases()
        first = Replica(leases, "one")
        second = Replica(leases, "two", offset=offset)
        await until(lambda: first.leader.is_leader() or second.leader.is_leader(), 5)
        dead, heir = (first, second) if first.leader.is_leader() else (second, first)
        await asyncio.sleep(30.1)
        await dead.kill()
        took = await until(heir.leader.is_leader, 15)
        assert took > 5
        assert leases.lease is not None
        assert leases.lease["spec"]["leaseTransitions"] == 2, "with the first, who found none that held it"
        await heir.kill()

    run(scenario())


def test_next_leads_within_3_seconds_of_a_release() -> None:
    async def scenario() -> None:
        leases = Leases()
        first = Replica(leases, "one")
        await asyncio.sleep(1)
        second = Replica(leases, "two")
        await asyncio.sleep(20)
        await first.kill()
        await first.leader.release()
        assert not first.leader.is_leader()
        assert first.leader.lost.is_set()
        await until(second.leader.is_leader, 3)
        await first.leader.release()  # not ours any more: left alone
        assert leases.lease is not None
        assert leases.lease["spec"]["holderIdentity"] == "two"
        await second.kill()

    run(scenario())


def test_failed_release_does_not_block_the_exit() -> None:
    async def scenario() -> None:
        silent = False
        leases = Leases(latency=lambda: (1e6, 0) if silent else (0.005, 0.005))
        first = Replica(leases, "one")
        await asyncio.sleep(1)
        await first.kill()
        silent = True
        began = now()
        await first.leader.release()
        assert now() - began <= 5
        assert first.leader.lost.is_set()

    run(scenario())


def test_restarted_replica_leads_again_at_once() -> None:
    async def scenario() -> None:
        leases = Leases()
        first = Replica(leases, "pod-1")
        await asyncio.sleep(5)
        await first.kill()
        again = Replica(leases, "pod-1")
        await until(again.leader.is_leader, 0.5)
        assert leases.lease is not None
        assert leases.lease["spec"]["leaseTransitions"] == 1
        await again.kill()

    run(scenario())


def test_leader_steps_down_before_its_lease_expires() -> None:
    async def scenario() -> None:
        away = False
        leases = Leases(failing=lambda: away)
        only = Replica(leases, "one")
        await asyncio.sleep(20)
        away = True
        last = leases.writes[-1][0]
        await until(lambda: not only.leader.is_leader(), 10)
        assert now() - last <= 8.0
        await asyncio.sleep(0.1)
        assert only.leader.lost.is_set()
        await asyncio.sleep(30)
        away = False
        await until(only.leader.is_leader, 3)
        assert not only.leader.lost.is_set()
        await only.kill()

    run(scenario())


def test_deleted_lease_never_makes_two_leaders() -> None:
    async def scenario() -> None:
        leases = Leases()
        first = Replica(leases, "one")
        await asyncio.sleep(1)
        second = Replica(leases, "two")
        for moment in range(20):
            await asyncio.sleep(20 + moment / 7)
            assert first.leader.is_leader()
            leases.lease = None
            for _ in range(50):
                await asyncio.sleep(0.1)
                assert first.leader.is_leader()
                assert not second.leader.is_leader()
        await first.kill()
        leases.lease = None
        await until(second.leader.is_leader, 15)
        await second.kill()

    run(scenario())


def test_first_lease_waits_one_lease_duration() -> None:
    async def scenario() -> None:
        leases = Leases(lease=None)
        first, second = Replica(leases, "one"), Replica(leases, "two")
        took = await until(lambda: first.leader.is_leader() or second.leader.is_leader(), 15)
        assert took >= 10
        await asyncio.sleep(30)
        assert first.leader.is_leader() != second.leader.is_leader()
        await first.kill()
        await second.kill()

    run(scenario())


def test_new_replica_without_lease_waits_before_leading() -> None:
    async def scenario() -> None:
        leases = Leases()
        first = Replica(leases, "one")
        await asyncio.sleep(20)
        leases.lease = None
        second = Replica(leases, "two")
        for _ in range(200):
            await asyncio.sleep(0.1)
            assert first.leader.is_leader()
            assert not second.leader.is_leader()
        await first.kill()
        await second.kill()

    run(scenario())


def test_missing_lease_twice_does_not_prove_no_leader() -> None:
    async def scenario() -> None:
        blind = False
        leases = Leases(lease=None, failing=lambda: blind and asyncio.current_task() is seldom.task)
        seldom = Replica(leases, "seldom")
        await asyncio.sleep(0.1)
        blind = True
        other = Replica(leases, "other")
        await until(other.leader.is_leader, 15)
        leases.lease, blind = None, False
        for _ in range(200):
            await asyncio.sleep(0.1)
            assert other.leader.is_leader()
            assert not seldom.leader.is_leader()
        await other.kill()
        await until(seldom.leader.is_leader, 15)
        await seldom.kill()

    run(scenario())


def test_disconnected_leader_does_not_assume_missing_lease() -> None:
    """While it was away another led, whose Lease somebody has deleted."""

    async def scenario() -> None:
        away = False
        shared = Leases()
        cut_off = Leases(failing=lambda: away)
        first = Replica(cut_off, "one")
        await asyncio.sleep(5)
        away = True
        await until(lambda: not first.leader.is_leader(), 10)
        second = Replica(shared, "two")
        await until(second.leader.is_leader, 1)
        await asyncio.sleep(5)
        away, cut_off.lease, shared.lease = False, None, None
        began = now()
        while now() - began < 5:  # longer than two reads by one who waits
            assert not first.leader.is_leader()
            await asyncio.sleep(0.1)
        await first.kill()
        await second.kill()

    run(scenario())


def test_hanging_renewal_keeps_the_lead() -> None:
    async def scenario() -> None:
        hang = False
        leases = Leases(latency=lambda: (1e6, 0) if hang else (0.005, 0.005))
        only = Replica(leases, "one")
        await asyncio.sleep(10.0)
        hang = True
        await asyncio.sleep(4)  # the next renewal goes out and hangs
        hang = False
        await asyncio.sleep(20)
        assert only.leader.is_leader()
        assert not only.leader.lost.is_set()
        await only.kill()

    run(scenario())


def test_frozen_process_does_not_lead_after_thawing() -> None:
    time = 0.0

    async def scenario() -> None:
        nonlocal time
        leader = Leader(Leases(), namespace="scalerl", identity="one", clock=lambda: time)
        task = asyncio.create_task(leader.run())
        await asyncio.wait_for(leader.began.wait(), 120)
        assert leader.is_leader()
        time = 8.5  # no task of ours had a turn
        assert not leader.is_leader()
        task.cancel()

    run(scenario())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), offsets=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=3))
def test_never_two_at_once(seed: int, offsets: list[float]) -> None:
    """Slow and lost answers, outages, kills and restarts, clocks that are far apart: at most one leads."""
    chance = random.Random(seed)

    def latency() -> tuple[float, float]:
        return chance.choice([(0.01, 0.01)] * 6 + [(3.0, 0.1), (0.1, 3.0), (9.0, 9.0), (0.5, 30.0)])

    async def scenario() -> None:
        away = False
        leases = Leases(latency, lambda: away or chance.random() < 0.05)
        replicas = {index: Replica(leases, f"r{index}", offset) for index, offset in enumerate(offsets)}
        end = now() + 300
        change = now()
        led = 0.0
        while now() < end:
            leading = [index for index, one in replicas.items() if one.leader.is_leader()]
            assert len(leading) <= 1, f"{leading} lead at {now()}"
            led += 0.25 * len(leading)
            if now() >= change:
                change = now() + chance.uniform(1, 30)
                away = chance.random() < 0.2
                if chance.random() < 0.2:
                    leases.lease = None  # somebody deletes it
                index = chance.choice(list(replicas))
                if chance.random() < 0.5:
                    await replicas[index].kill()
                    # A new process; the dead one's requests may still be under way.
                    replicas[index] = Replica(leases, f"r{index}-{now():.0f}", offsets[index])
            await asyncio.sleep(0.25)
        assert led > 0
        for one in replicas.values():
            await one.kill()

    run(scenario())


def test_steady_clock_advances() -> None:
    assert steady_clock() <= steady_clock()
