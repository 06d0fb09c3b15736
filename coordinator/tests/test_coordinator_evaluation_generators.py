"""Some of the generators keep a version under evaluation (``evaluation.generators``), while the others get newer ones."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_client import make_group
from coordinator_world import World, make_settings, ready

from scalerl_api import wire
from scalerl_api.wire import Lease, NextAction, PushResult, ReleaseCause, Split
from scalerl_coordinator.leases import MAX_FAILURES


def kept_world(names: str = "ab", **changes: Any) -> tuple[World, dict[str, str]]:
    """Version 2 is published to all and due; k = 3, one prompt a step. Returns the members by name."""
    settings: dict[str, Any] = {"max_staleness_steps": 3, "prompts_per_step": 1, "evaluation_generators": 1}
    world = ready(World(make_settings(**settings | changes)), names[0])
    members = {names[0]: world.member} | {name: world.register(name) for name in names[1:]}
    if len(names) > 1:
        world.publish("t")
    for step in range(2):
        world.serve(world.member, step, 1)
        world.report("t", step)
        assert sorted(world.publish("t")) == sorted(members.values())
        for member in members.values():
            world.beat(member, step + 1)
    assert (2, 0) in world.state.evaluations
    return world, members


def held_out(leases: list[Lease]) -> list[Lease]:
    return [lease for lease in leases if lease.split is Split.HELD_OUT]


def train_and_publish(world: World, member: str, version: int) -> list[str]:
    world.serve(member, version, 1)
    assert world.state.closed(version)
    world.report("t", version)
    return world.publish("t")


def test_others_get_newer_versions_while_an_evaluation_is_generated() -> None:
    world, members = kept_world()
    a, b = members["a"], members["b"]
    assert not held_out(world.serve(b, 2, 1)), "it would be overwritten"
    (first,) = held_out(world.lease(a, 2, 1))
    for version in (2, 3):
        assert train_and_publish(world, b, version) == [b]
        world.beat(b, version + 1)
    assert world.state.published == 4
    assert world.core.membership.members[a].version == 2
    (second,) = held_out(world.lease(a, 2, 1))
    for lease in (first, second):
        assert world.push(a, make_group(lease, version=2)) is PushResult.ACCEPTED
    point = world.state.points[-1]
    assert (point.version, point.mixed_versions) == (2, False)
    world.serve(b, 4, 1)
    assert world.next("t").action is NextAction.TRAIN
    world.report("t", 4)
    assert world.publish("t") == [a], (
        "it catches up, over versions that it did not get; now the other one keeps version 4"
    )


def test_kept_generator_trains_once_the_prompts_are_leased() -> None:
    world, members = kept_world()
    leases = world.lease(members["a"], 2, 4)
    assert [lease.split for lease in leases] == [Split.HELD_OUT] * 2 + [Split.TRAIN] * 2
    for version in (2, 3):
        for lease in [one for one in leases if one.slot == version and one.split is Split.TRAIN]:
            world.push(members["a"], make_group(lease, version=2))
        world.report("t", version)
        assert world.publish("t") == [members["b"]]
        world.beat(members["b"], version + 1)
    assert [lease.slot for lease in world.lease(members["a"], 2, 9)] == [4, 5], (
        "k = 3 steps after its version"
    )


def test_generators_that_do_not_have_the_version_are_not_kept() -> None:
    """Two are, of three; the one that joins later gets the newest weights, and the next point is its own."""
    world, members = kept_world("abc", evaluation_generators=2)
    assert not held_out(world.serve(members["c"], 2, 1))
    assert [len(held_out(world.lease(members[n], 2, 1))) for n in "ba"] == [1, 1]
    late = world.register("0")
    assert train_and_publish(world, members["c"], 2) == [late, members["c"]]


def test_generator_takes_the_place_of_a_kept_one_that_dies_before_it_has_newer_weights() -> None:
    world, members = kept_world()
    a, b = members["a"], members["b"]
    leases = world.lease(a, 2, 2)
    world.pass_time(9, {b: 2})
    assert a not in world.core.membership.members
    again = held_out(world.lease(b, 2, 2))
    assert [lease.slot for lease in again] == [lease.slot for lease in leases]
    world.serve(b, 2, 1)
    world.report("t", 2)
    assert world.begin_publish("t") is None, "one generator alone is not trained past, as without the field"
    for lease in again:
        world.push(b, make_group(lease, version=2))
    assert (world.state.points[-1].version, world.state.points[-1].mixed_versions) == (2, False)
    assert world.publish("t") == [b]


def test_newer_weights_complete_the_point_of_a_kept_generator_that_dies_later() -> None:
    world, members = kept_world()
    a, b = members["a"], members["b"]
    world.lease(a, 2, 2)
    assert train_and_publish(world, b, 2) == [b]
    world.beat(b, 3)
    world.serve(b, 3, 1)
    world.report("t", 3)
    world.pass_time(9, {b: 3})
    assert world.begin_publish("t") is None
    world.pass_time(9, {b: 3})
    assert world.state.evaluations[2, 0].released
    assert world.publish("t") == [b]
    world.beat(b, 4)
    for lease in held_out(world.lease(b, 4, 4)):
        world.push(b, make_group(lease, version=4))
    assert [(p.version, p.mixed_versions) for p in world.state.points[-2:]] == [(2, True), (4, False)]


def test_restarted_coordinator_keeps_the_same_generator() -> None:
    """It is named in the leases, and the other one registers first."""
    world, members = kept_world("ba")
    a, b = members["a"], members["b"]
    (lease,) = held_out(world.lease(a, 2, 1))
    world.lease(b, 2, 1)
    world.acknowledge()
    world.crash(0)
    b = world.register("b", version=2)
    a = world.register("a", [lease.lease_id], version=2)
    assert not held_out(world.lease(b, 2, 1))
    assert held_out(world.lease(a, 2, 1))
    assert world.push(a, make_group(lease, version=2)) is PushResult.ACCEPTED


def test_generator_with_a_prompt_keeps_the_version_though_another_one_has_its_place() -> None:
    """``a`` was unhealthy for a moment, in which ``b`` began with its prompts."""
    world, members = kept_world("abc")
    a, b, c = (members[name] for name in "abc")
    world.lease(a, 2, 1)
    world.beat(a, 2, healthy=False)
    assert held_out(world.lease(b, 2, 1))
    world.beat(a, 2)
    assert not held_out(world.serve(a, 2, 1))
    assert train_and_publish(world, c, 2) == [a, c]


def fail(world: World, member: str, leases: list[Lease]) -> None:
    ids = [lease.lease_id for lease in leases]
    request = wire.Release(member_id=member, lease_ids=ids, reason="no", cause=ReleaseCause.FAILED)
    world.generator_requests.release(request, world.now)


def test_generator_with_the_version_serves_what_the_kept_one_fails() -> None:
    """The first by name fails all prompts; the other one holds the version, and keeps it once it has one of them."""
    world, members = kept_world()
    a, b = members["a"], members["b"]
    leases = held_out(world.lease(a, 2, 2))
    assert held_out(world.lease(b, 2, 1)) == [], "it is not kept"
    fail(world, a, leases)
    assert held_out(world.lease(a, 2, 2)) == []
    again = held_out(world.lease(b, 2, 2))
    assert [lease.slot for lease in again] == [lease.slot for lease in leases]
    for lease in again:
        world.push(b, make_group(lease, version=2))
    point = world.state.points[-1]
    assert (point.version, point.mixed_versions, point.given_up_prompts) == (2, False, 0)


@pytest.mark.parametrize("bad_prompt", [False, True])
def test_prompt_that_fails_with_the_only_generator_of_its_version_is_left_to_newer_weights(
    bad_prompt: bool,
) -> None:
    """It is given up only if those fail with it, too."""
    world, members = kept_world()
    a, b = members["a"], members["b"]
    assert train_and_publish(world, b, 2) == [b]
    world.beat(b, 3)
    for _ in range(MAX_FAILURES):
        assert not world.state.evaluations[2, 0].released
        assert held_out(world.lease(b, 3, 2)) == []
        world.pass_time(9, {a: 2, b: 3})
        (lease,) = (one for one in held_out(world.lease(a, 2, 2)) if one.slot == 0)
        fail(world, a, [lease])
    assert world.state.evaluations[2, 0].released
    world.pass_time(9, {a: 2, b: 3})
    assert held_out(world.lease(a, 2, 2)) == []
    (lease,) = held_out(world.lease(b, 3, 1))
    assert lease.slot == 0
    if bad_prompt:
        fail(world, b, [lease])
        assert world.state.evaluations[2, 0].results[0].given_up
    else:
        world.push(b, make_group(lease, version=3))
        assert not world.state.evaluations[2, 0].results[0].given_up


def test_evaluation_is_not_released_while_publishes_go_to_others() -> None:
    """Publishes wait for nothing: neither while the others can be sent a version, nor while they sample with it."""
    world, members = kept_world(lease_seconds=1000.0)
    a, b = members["a"], members["b"]
    held = held_out(world.lease(a, 2, 2))
    for version in (2, 3):
        assert train_and_publish(world, b, version) == [b]
        for _ in range(70):
            assert world.next("t") is None
            world.pass_time(1, {a: 2, b: version + 1})
        assert not world.state.evaluations[2, 0].released
    for lease in held:
        world.push(a, make_group(lease, version=2))
    assert (world.state.points[-1].version, world.state.points[-1].mixed_versions) == (2, False)


def test_hold_counts_from_when_the_others_are_gone() -> None:
    world, members = kept_world()
    a, b = members["a"], members["b"]
    world.lease(a, 2, 2)
    assert train_and_publish(world, b, 2) == [b]
    world.beat(b, 3)
    world.next("t")
    world.pass_time(70, {a: 2, b: 3})
    seconds = 0
    while not world.state.evaluations[2, 0].released and seconds < 80:
        assert world.next("t") is None
        world.pass_time(1, {a: 2})
        seconds += 1
    assert 60 <= seconds <= 75, "hold_seconds after b counts as lost"


def test_all_generators_evaluate_the_last_version() -> None:
    world, members = kept_world()
    held = held_out(world.lease(members["a"], 2, 2))
    world.serve(members["b"], 2, 1)
    world.report("t", 2)
    world.core.stop("enough", world.now)
    assert world.next("t").action is NextAction.PUBLISH
    assert world.publish("t") == [members["b"]]
    world.beat(members["b"], 3)
    assert world.next("t") is None
    for lease in held:
        world.push(members["a"], make_group(lease, version=2))
    assert world.publish("t") == [members["a"]]
    world.beat(members["a"], 3)
    for name in "ab":
        (lease,) = world.lease(members[name], 3, 1)
        world.push(members[name], make_group(lease, version=3))
    assert world.next("t").action is NextAction.FINISH


@pytest.mark.parametrize("generators", [1, 2, 5])
def test_no_more_generators_than_are_kept_is_as_without_the_field(generators: int) -> None:
    """Autoscaling or failures may leave that few."""
    world, members = kept_world("a", evaluation_generators=generators)
    held = held_out(world.lease(members["a"], 2, 2))
    world.serve(members["a"], 2, 1)
    world.report("t", 2)
    assert world.begin_publish("t") is None
    for lease in held:
        world.push(members["a"], make_group(lease, version=2))
    assert world.publish("t") == [members["a"]]
