"""Policies by tables; and the coordinator's leasing by them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from coordinator_client import make_group
from coordinator_world import World, make_settings, ready
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api import wire
from scalerl_api.wire import Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator import training_leases
from scalerl_coordinator.scheduling import (
    ByLength,
    Generator,
    LeastLoaded,
    OpenSlot,
    Pace,
    SchedulerInput,
    SchedulingPolicy,
)
from scalerl_coordinator.slot_attempts import SlotAttempts
from scalerl_coordinator.state import OpenLease
from scalerl_coordinator.training_leases import PATIENCE_SECONDS

POLICIES = (LeastLoaded(), ByLength())
LONG = [OpenSlot(0, 0, 10.0), OpenSlot(1, 0, 90.0), OpenSlot(2, 1, 100.0), OpenSlot(3, 1, 30.0)]
EMPTY = Generator("b", 9)


@pytest.mark.parametrize(
    ("policy", "capacity", "other", "slots"),
    [
        (LeastLoaded(), 9, None, [0, 1, 2, 3]),
        (LeastLoaded(), 3, None, [0, 1, 2]),
        (LeastLoaded(), 9, EMPTY, [2]),  # it holds two groups, the other none; 2 is the first of a tie's
        (LeastLoaded(), 9, Generator("b", 9, groups=9), [0, 1, 2, 3]),
        (LeastLoaded(), 9, Generator("b", 0), [0, 1, 2, 3]),
        (ByLength(), 9, None, [1, 0, 2, 3]),
        (ByLength(), 2, None, [1, 0]),
        (ByLength(), 9, Generator("b", 9, tokens=499.0), [1, 0, 3]),  # 2 is the other's
        (ByLength(), 9, EMPTY, []),  # it has 400 tokens to do, the other gets the 230
        (ByLength(), 9, Generator("b", 1), [0, 2, 3]),  # the other has room for one
    ],
)
def test_assign(policy: SchedulingPolicy, capacity: int, other: Generator | None, slots: list[int]) -> None:
    asking = Generator("a", capacity, groups=2, tokens=400.0)
    generators = [asking] if other is None else [asking, other]
    assigned = policy.assign(SchedulerInput(LONG, generators, tokens_per_step=200.0))
    assert [place.slot for place in assigned["a"]] == slots


@pytest.mark.parametrize(
    ("tokens_per_step", "slots"),
    [(math.inf, [1, 0, 2, 3]), (200.0, [1, 0, 2, 3]), (50.0, [1, 2, 0, 3]), (5.0, [2, 1, 3, 0])],
)
def test_long_group_is_leased_early(tokens_per_step: float, slots: list[int]) -> None:
    assigned = ByLength().assign(SchedulerInput(LONG, [Generator("a", 9)], tokens_per_step=tokens_per_step))
    assert [place.slot for place in assigned["a"]] == slots


def test_pace_is_of_groups_and_steps() -> None:
    pace = Pace()
    assert (pace.tokens(9.0), pace.tokens_per_step) == (0.0, math.inf)
    pace.observe_step(4, 100.0)
    pace.observe_group(30.0, [100, 300, 200])
    assert (pace.tokens(9.0), pace.tokens_per_step) == (60.0, math.inf)
    pace.observe_step(6, 140.0)
    assert pace.tokens_per_step == pytest.approx(20.0 * 200 / 30)
    pace.observe_step(2, 150.0)  # the trainer returned to a checkpoint
    pace.observe_step(3, 170.0)
    assert pace.tokens_per_step == pytest.approx(20.0 * 200 / 30)


@given(
    tokens=st.lists(st.floats(1.0, 2e4), max_size=40),
    generators=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 5), st.floats(0, 1e5)), min_size=1, max_size=6
    ),
    policy=st.sampled_from(POLICIES),
)
def test_every_place_is_assigned_once(
    tokens: list[float], generators: list[tuple[int, int, float]], policy: SchedulingPolicy
) -> None:
    """Until all places are assigned or no generator has room."""
    slots = [OpenSlot(slot, slot // 4, n) for slot, n in enumerate(tokens)]
    asking = [Generator(f"g{n}", *one) for n, one in enumerate(generators)]
    assigned = policy.assign(SchedulerInput(slots, asking, tokens_per_step=1000.0))
    assert all(len(assigned[one.name]) <= one.capacity for one in asking)
    given = [place.slot for mine in assigned.values() for place in mine]
    assert len(set(given)) == len(given) == min(len(slots), sum(one.capacity for one in asking))


# --- the coordinator ------------------------------------------------------------------------------


def make_world(*, by_length: bool = True, **changes: Any) -> World:
    """Seven prompts, three a step, k = 1."""
    return ready(World(make_settings(by_length=by_length, zero_variance_filter=False, **changes)))


def taken(world: World, member_id: str, groups: int = 9) -> list[int]:
    return [lease.slot for lease in world.take(member_id, groups)]


def test_long_prompts_are_leased_first_within_the_window() -> None:
    """Prompt n has completions of n + 1 tokens."""
    world = make_world(max_staleness_steps=2)
    for step in range(6):
        leases = world.lease(world.member, step)
        for lease in leases:
            group = make_group(lease, version=step, tokens=lease.prompt.index + 1)
            assert world.push(world.member, group) == "accepted"
        assert world.next("t").action is wire.NextAction.TRAIN
        world.report("t", step)
        world.publish("t")
        if world.state.evaluations:
            world.serve(world.member, step + 1, 2)
    leases = world.lease(world.member, 6)
    assert sorted(lease.slot for lease in leases) == list(world.state.slots_of(8))
    prompts = [lease.prompt.index for lease in leases]
    assert prompts == sorted(prompts, reverse=True)
    assert [lease.slot for lease in leases] != sorted(lease.slot for lease in leases)


@pytest.mark.parametrize("by_length", [False, True])
def test_generators_that_ask_at_once(by_length: bool) -> None:
    world = ready(World(make_settings(by_length=by_length)))
    other = world.register("h", version=0)
    world.ask(world.member, 0, 9)
    world.ask(other, 0, 9)
    slots = [taken(world, world.member), taken(world, other)]
    assert [len(some) for some in slots] == [3, 3]
    assert sorted(slots[0] + slots[1]) == list(range(6))


def test_busier_generator_is_skipped_for_a_second() -> None:
    """The one with less to do has an open request, and never takes the place."""
    world = make_world()
    assert len(world.lease(world.member, 0, 5)) == 5
    world.ask(world.register("h", version=0), 0, 9)
    world.ask(world.member, 0, 9)
    assert taken(world, world.member) == []
    world.core.wake.clear()
    world.generator_requests.tick(world.now)
    assert not world.core.wake
    world.now += PATIENCE_SECONDS
    world.generator_requests.tick(world.now)
    assert world.core.wake == {"work"}
    world.core.wake.clear()
    world.now += 0.25
    world.generator_requests.tick(world.now)
    assert not world.core.wake, "once: it may not be eligible any more"
    assert len(taken(world, world.member)) == 1


@pytest.mark.parametrize("by_length", [False, True])
def test_groups_that_wait_for_the_teacher_are_no_load(by_length: bool) -> None:
    world = make_world(by_length=by_length)
    sampled = [lease.lease_id for lease in world.lease(world.member, 0, 5)]
    world.beat(world.member, 0, held_leases=sampled, generated_leases=sampled)
    world.ask(world.member, 0, 9)
    world.ask(world.register("h", version=0), 0, 9)
    assert len(taken(world, world.member)) == 1


def test_skipped_generator_is_woken_when_the_other_stops() -> None:
    world = make_world()
    assert len(world.lease(world.member, 0, 5)) == 5
    other = world.register("h", version=0)
    world.ask(other, 0, 9)
    world.ask(world.member, 0, 9)
    assert taken(world, world.member) == []
    world.core.wake.clear()
    world.generator_requests.end_lease_request(other)
    assert world.core.wake == {"work"}
    assert len(taken(world, world.member)) == 1


def test_least_loaded_leases_in_slot_order_and_evaluations_are_load() -> None:
    world = World(make_settings())
    world.member, other = world.register("g"), world.register("h")
    world.hello("t")
    world.next("t")
    world.publish("t")
    assert [lease.split for lease in world.lease(world.member, 0, 2)] == [Split.HELD_OUT] * 2
    world.ask(world.member, 0, 9)
    world.ask(other, 0, 9)
    assert (taken(world, world.member), taken(world, other)) == ([2, 4], [0, 1, 3, 5])


def test_lost_leases_free_their_generator() -> None:
    """What was assigned to all that asked is assigned again."""
    world = make_world(by_length=False)
    lost, other = world.register("h", version=0), world.register("i", version=0)
    world.lease(lost, 0, 6)
    world.ask(world.member, 0, 9)
    world.ask(other, 0, 9)
    assert taken(world, world.member) == []
    world.register("h", version=0)  # without its leases
    world.ask(late := world.register("j", version=0), 0, 9)
    assert (taken(world, late), taken(world, world.member), taken(world, other)) == ([2, 5], [0, 3], [1, 4])


def test_failed_slot_goes_to_another_generator() -> None:
    world = make_world(by_length=False)
    (failed,) = world.lease(world.member, 0, 1)
    other = world.register("h", version=0)
    assert len(world.lease(other, 0, 3)) == 3
    release(world, world.member, failed)
    for member_id in (world.member, other):
        world.ask(member_id, 0, 9)
    assert (taken(world, other), taken(world, world.member)) == ([failed.slot], [4, 5])


def release(world: World, member_id: str, lease: wire.Lease) -> None:
    """It failed with the member."""
    world.generator_requests.release(
        wire.Release(
            member_id=member_id,
            lease_ids=[lease.lease_id],
            reason="no",
            cause=wire.ReleaseCause.FAILED,
        ),
        world.now,
    )


def test_places_beyond_those_ordered_by_length_are_assigned_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_leases, "_MAX_OPEN_SLOTS", 2)
    world = make_world()
    assert len(world.lease(world.member, 0, 2)) == 2
    other = world.register("h", version=0)
    world.ask(other, 0, 9)
    world.ask(world.member, 0, 9)
    assert (taken(world, other), taken(world, world.member)) == ([2, 3], [4, 5])


def test_after_patience_others_get_the_rest() -> None:
    """A generator without patience takes one place, and has no room for the other."""
    world = make_world(by_length=False)
    assert len(world.lease(world.member, 0, 4)) == 4
    other = world.register("h", version=0)
    world.ask(other, 0, 9)
    world.ask(world.member, 0, 1)
    assert taken(world, world.member, 1) == []
    world.now += PATIENCE_SECONDS
    assert (taken(world, world.member, 1), taken(world, other)) == ([4], [5])


def test_generators_of_two_versions_share_assignments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes milliseconds with thousands of places; a publish wakes all generators at once."""
    views: list[SchedulerInput] = []
    assign = LeastLoaded.assign
    monkeypatch.setattr(
        LeastLoaded, "assign", lambda policy, inputs: views.append(inputs) or assign(policy, inputs)
    )
    world = make_world(by_length=False, prompts_per_step=20)
    for lease in world.lease(world.member, 0, 20):
        world.push(world.member, make_group(lease, version=0))
    assert world.next("t").action is wire.NextAction.TRAIN
    world.report("t", 0)
    world.publish("t")
    members = [world.register(f"h{n}", version=(n + 1) % 2) for n in range(8)]
    for n, member_id in enumerate(members):
        world.ask(member_id, (n + 1) % 2, 4)
    views.clear()
    slots = [taken(world, member_id, 4) for member_id in members]
    assert all(slots)
    assert {slot for some in slots[1::2] for slot in some} <= set(range(20, 40)), "within their bound"
    assert len(views) == 2


def test_place_opened_by_a_closed_one_is_assigned() -> None:
    """Between two ticks, the late group of an expired lease is accepted, and a lease is released: as many places as before."""
    world = make_world(by_length=False)
    late, other = world.lease(world.member, 0, 2)
    helper = world.register("h", version=0)
    assert len(world.lease(helper, 0, 9)) == 4
    world.core.close_lease(late.lease_id, r.CloseReason.EXPIRED)
    SlotAttempts(world.core).retry_slot(
        OpenLease(late.prompt, late.slot, -1, "g"), "slow", world.now, failed=True
    )
    world.ask(world.member, 0, 9)
    assert taken(world, world.member) == []
    assert world.push(world.member, make_group(late)) == "accepted"
    world.core.close_lease(other.lease_id, r.CloseReason.RELEASED)
    assert taken(world, world.member) == [other.slot]


def test_pace_ignores_steps_that_were_restored() -> None:
    pace = Pace()
    pace.observe_group(10.0, [100])
    for step, now in ((0, 0.0), (1, 50.0), (500, 50.2), (501, 100.2)):
        pace.observe_step(step, now)
    assert pace.tokens_per_step == pytest.approx(500.0)


def test_restarted_coordinator_leases_the_rest_of_the_window() -> None:
    world = make_world()
    first = world.lease(world.member, 0, 2)
    before = dict(world.state.prompts)
    world.acknowledge()
    world.crash(0)
    world.member = world.register("g", [lease.lease_id for lease in first], 0)
    rest = world.lease(world.member, 0)
    assert sorted(lease.slot for lease in [*first, *rest]) == list(range(6))
    assert {lease.slot: lease.prompt for lease in [*first, *rest]} == before
