"""A coordinator restarted with other settings: what changes, from which step on, and what stays."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_client import make_group
from coordinator_world import World, check_consistency, make_settings, ready, train

from scalerl_api.wire import PushResult, Split
from scalerl_coordinator.core import Refusal


def restart(world: World, **changes: Any) -> None:
    world.acknowledge()
    world.change(**changes)
    world.beat(world.register("g", sorted(world.state.leases)), world.state.published)
    world.member = next(iter(world.core.membership.members))
    check_consistency(world)


def steps(world: World) -> list[list[int]]:
    """Slots of the steps from the first that is kept on."""
    first = world.state.first_kept_step
    return [list(world.state.slots_of(step)) for step in range(first, first + 4)]


def test_batch_size_changes_from_first_open_step():
    world = ready(World(make_settings()))
    train(world)
    world.hello("t", 1)
    world.serve(world.member, 1, 2)  # step 1 was closed before; slots 6 and 7 are of step 2
    restart(world, prompts_per_step=2)
    assert steps(world) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert world.state.closed(1)
    assert world.state.closed(2)  # with the two groups that it had of three
    restart(world, prompts_per_step=4)
    assert steps(world) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9, 10, 11]]
    world.hello("t2", 1)
    for step, slots in ((1, [3, 4, 5]), (2, [6, 7])):
        assert [g.slot for g in world.plan("t2", step).groups] == slots
        world.report("t2", step)
        world.publish("t2")
        if world.state.evaluations:
            world.serve(world.member, step + 1, 2)
    train(world, "t2")
    assert [world.state.rows[step]["groups"] for step in range(4)] == [3, 3, 2, 4]


def test_batch_size_change_reissues_stale_groups():
    world = ready(World(make_settings(max_staleness_steps=2)))
    world.serve(world.member, 0)  # 9 slots at version 0: steps 0, 1 and 2
    before = world.state.counts.acknowledged
    restart(world, prompts_per_step=2, max_staleness_steps=1)
    state = world.state
    # Steps 0 to 2 were closed and stay as they are.
    assert steps(world) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert state.counts.acknowledged == before

    world = ready(World(make_settings(max_staleness_steps=2)))
    first, *others = world.lease(world.member, 0)
    for lease in others:  # all but slot 0: no step after it counts as closed
        world.push(world.member, make_group(lease, version=0))
    assert world.state.closed(1)
    restart(world, prompts_per_step=2, max_staleness_steps=1)
    state = world.state
    assert steps(world)[0] == [0, 1]
    assert sorted(state.groups) == [1, 2, 3]  # steps 0 and 1; 4 to 8 are of steps 2, 3 and 4 now
    assert state.open_slots == [4, 5, 6, 7, 8]
    assert (state.counts.stale, state.counts.acknowledged, state.counts.queued) == (10, 6, 6)
    assert world.push(world.member, make_group(first, version=0)) is PushResult.ACCEPTED
    assert state.closed(0)
    assert [lease.slot for lease in world.lease(world.member, 0)] == []  # k = 1: no generator may run ahead


def test_batch_size_change_queues_filtered_groups_of_reopened_steps():
    world = ready(World(make_settings(max_staleness_steps=2)))
    _, *others = world.lease(world.member, 0)
    for lease in others:
        world.push(world.member, make_group(lease, version=0, scores=[1.0, 1.0]))
    assert world.state.counts.filtered == 12
    restart(world, zero_variance_filter=False)
    assert (world.state.counts.filtered, world.state.counts.queued) == (0, 16)
    restart(world, zero_variance_filter=True, prompts_per_step=4)
    assert (world.state.counts.filtered, world.state.counts.queued) == (8, 8)  # step 1 is slots 4-7


def test_completions_change_ends_leases_and_keeps_groups():
    world = ready(World(make_settings()))
    old, *others = world.lease(world.member, 0)
    world.push(world.member, make_group(others[0], version=0))
    restart(world, completions_per_prompt=3)
    assert world.push(world.member, make_group(old, version=0)) is PushResult.LATE
    leases = world.lease(world.member, 0)
    assert {(lease.slot, lease.completions) for lease in leases} == {(slot, 3) for slot in (0, 2, 3, 4, 5)}
    for lease in leases:
        world.push(world.member, make_group(lease, version=0))
    world.hello("t", 0)
    assert [len(g.scores) for g in world.plan("t", 0).groups] == [3, 2, 3]
    assert world.report("t", 0)["rollouts"] == 8
    check_consistency(world)


def test_staleness_change_keeps_leases():
    world = ready(World(make_settings()))
    leases = world.lease(world.member, 0)
    restart(world, max_staleness_steps=0)
    assert [lease.slot for lease in world.lease(world.member, 0)] == []
    results = [world.push(world.member, make_group(lease, version=0)) for lease in leases]
    assert results == ["accepted"] * 3 + ["stale"] * 3


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({"evaluation_samples": 4}, False),
        ({"evaluation_temperature": 1.0}, True),
        ({"max_completion_tokens": 7}, True),
    ],
)
def test_evaluation_set_changes_with_what_changes_the_reward(changes, again):
    world = ready(World(make_settings()))
    train(world)
    world.serve(world.member, 1, 3)
    world.next("t")
    world.report("t", 1)
    world.publish("t")
    one, _ = world.lease(world.member, 2, 2)
    assert one.split is Split.HELD_OUT
    world.push(world.member, make_group(one, version=2))
    restart(world, **changes)
    left = [lease for lease in world.lease(world.member, 2) if lease.split is Split.HELD_OUT]
    assert len(left) == (2 if again else 1)
    for lease in left:
        assert lease.completions == world.settings.identity.evaluation_samples
        assert world.push(world.member, make_group(lease, version=2)) is PushResult.ACCEPTED
    first, second = world.state.points
    assert (first.set_digest != second.set_digest) is again


def test_restore_applies_present_settings():
    world = ready(World(make_settings()))
    train(world)
    snapshot = world.checkpoint("t", [1])
    world.settings = make_settings(prompts_per_step=5)
    world.changed = True
    world.lose_volume()
    world.hello("t2", 1, snapshot)
    assert [list(world.state.slots_of(step)) for step in (1, 2)] == [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    check_consistency(world)


def test_identity_refuses_another_seed():
    with pytest.raises(Refusal, match="seed was 11, is 12"):
        restart(ready(World(make_settings())), seed=12)
