"""Decisions about publishing and evaluation."""

from __future__ import annotations

import pytest
from coordinator_client import make_group
from coordinator_world import World, make_settings, ready, train

from scalerl_api import wire
from scalerl_api.wire import Lease, NextAction, PushResult, Split
from scalerl_coordinator.run_status import build_status


def measured_at_2(world: World) -> None:
    """Version 2 is published and due; nothing of its point is generated."""
    train(world)
    train(world, publish=False)
    world.publish("t")


def test_publish_waits_for_evaluation(world):
    measured_at_2(world)
    world.beat(world.member, 2)
    held_out = world.lease(world.member, 2, 2)
    assert [lease.policy_version for lease in held_out] == [2, 2]
    world.serve(world.member, 2)
    world.report("t", 2)
    assert world.begin_publish("t") is None
    for lease in held_out:
        world.push(world.member, make_group(lease))
    assert world.begin_publish("t").ready
    point = world.state.points[-1]
    assert (point.version, point.mixed_versions, point.work_tokens) == (2, False, 48)


def test_publish_hold_end_marks_point_mixed(world):
    measured_at_2(world)
    world.serve(world.member, 2, 1)
    stuck = world.lease(world.member, 2, 1)
    assert stuck[0].split is Split.HELD_OUT
    world.serve(world.member, 2)
    world.report("t", 2)
    assert world.begin_publish("t") is None
    world.pass_time(61, {world.member: 2})
    assert world.begin_publish("t").ready
    world.publish("t")
    world.pass_time(45, {world.member: 3})
    again = world.lease(world.member, 3, 1)
    assert (again[0].split, again[0].slot, again[0].policy_version) == (Split.HELD_OUT, stuck[0].slot, 2)
    assert world.push(world.member, make_group(again[0], version=3)) is PushResult.ACCEPTED
    assert (world.state.points[-1].version, world.state.points[-1].mixed_versions) == (2, True)


def test_publish_hold_ends_without_capable_member(world):
    measured_at_2(world)
    world.core.membership.members.clear()
    world.report("t", 2)
    assert world.begin_publish("t") is None
    world.pass_time(7)
    assert world.begin_publish("t") is None
    world.pass_time(2)
    permit = world.begin_publish("t")
    assert permit.ready
    assert permit.members == []
    assert world.state.evaluations[2, 0].released


def test_evaluation_requires_its_version(world):
    measured_at_2(world)
    late = world.register("late")
    world.beat(late, 1)
    assert all(lease.split is Split.TRAIN for lease in world.lease(late, 1))


def test_publish_failure_removes_member(world):
    train(world, publish=False)
    bad = world.register("bad")
    world.begin_publish("t")
    world.commit_publish("t", [world.member], [bad])
    again = world.register("bad")
    assert [m.name for m in world.core.membership.publishable(world.now)] == ["g"]
    world.serve(world.member, 1)
    assert world.next("t").action is NextAction.TRAIN
    world.pass_time(6, {world.member: 1, again: -1})
    world.report("t", 1)
    assert sorted(m.name for m in world.begin_publish("t").members) == ["bad", "g"]


def test_a_version_that_none_was_sent_is_not_published(world):
    """As when the volume is full. Complete steps are trained meanwhile, with what the leases permit, but not past a due point."""
    train(world, publish=False)
    published = world.state.published
    world.begin_publish("t")
    world.commit_publish("t", [], problem="version 1 cannot be written")
    assert world.state.published == published
    assert world.core.publish_problem == "version 1 cannot be written"
    assert world.state.closed(1)
    assert world.next("t").action is NextAction.TRAIN


def test_a_due_version_that_none_was_sent_is_not_trained_past(world):
    """Its point would be missing, or of weights that no generator has."""
    train(world)
    train(world, publish=False)
    world.serve(world.member, 1)
    assert world.state.closed(2)
    world.begin_publish("t")
    world.commit_publish("t", [], problem="version 2 cannot be written")
    assert not world.state.evaluations
    assert world.next("t").action is NextAction.PUBLISH
    world.commit_publish("t", [world.member])
    assert (2, 0) in world.state.evaluations


def test_a_member_that_cannot_read_a_version_keeps_its_leases(world):
    world.serve(world.member, 0, 3)
    (lease,) = world.lease(world.member, 0, 1)
    train(world, publish=False)
    other = world.register("other")
    world.begin_publish("t")
    world.commit_publish("t", [other], problem="a file is damaged", kept=[world.member])
    assert world.state.published == 1
    assert world.core.membership.members[world.member].version == 0
    assert world.push(world.member, make_group(lease)) is PushResult.ACCEPTED
    assert world.begin_publish("t").members == [], "its back-off"
    world.pass_time(6, {world.member: 0, other: 1})
    assert [m.name for m in world.begin_publish("t").members] == ["g"]
    world.commit_publish("t", [], problem="a file is damaged", kept=[world.member])
    assert world.state.published == 1


def test_a_due_version_waits_for_the_back_off_of_the_generator_that_could_not_read_it(world):
    """Otherwise it would be published to none, and its point begun with no generator that has it."""
    train(world)
    train(world, publish=False)
    world.serve(world.member, 1)
    assert world.state.closed(2)
    world.begin_publish("t")
    world.commit_publish("t", [], problem="a file is damaged", kept=[world.member])
    assert world.next("t") is None
    assert world.state.published == 1
    world.pass_time(6, {world.member: 1})
    assert world.next("t").action is NextAction.PUBLISH
    assert world.publish("t") == [world.member]
    assert (2, 0) in world.state.evaluations


def test_refused_version_is_not_committed_and_gets_no_lease(world):
    train(world, publish=False)
    published = world.state.published
    (member,) = world.begin_publish("t").members
    world.commit_publish("t", [], [], [member.member_id], "a KL of 3 nats")
    assert world.state.published == published
    again = world.register("g", version=1)
    assert world.lease(again, 1) == [], "it holds the version and computes something else with it"
    assert "; the last publish failed: a KL of 3 nats" in build_status(world.core).waiting_for
    world.hello("t2", 1)
    world.pass_time(6, {again: 1})
    permit = world.begin_publish("t2")
    assert ([m.member_id for m in permit.members], permit.holders) == ([again], 0)
    world.commit_publish("t2", [again])
    assert world.state.published == 1
    world.beat(again, 1)
    assert world.lease(again, 1)
    assert "failed" not in build_status(world.core).waiting_for


def test_refused_version_that_is_due_is_not_trained_past(world):
    """Its point would be missing."""
    train(world)
    train(world, publish=False)
    world.serve(world.member, 1)
    assert world.state.closed(2)
    (member,) = world.begin_publish("t").members
    world.commit_publish("t", [], [], [member.member_id], "a KL of 3 nats")
    assert world.next("t").action is NextAction.PUBLISH


def test_refused_member_waits_while_others_hold_the_version(world):
    train(world, publish=False)
    bad = world.register("bad")
    world.begin_publish("t")
    world.commit_publish("t", [world.member], [], [bad], "a KL of 3 nats")
    assert world.state.published == 1
    again = world.register("bad", version=1)
    assert world.lease(again, 1) == []
    assert world.lease(world.member, 1)
    assert world.next("t").action is not NextAction.PUBLISH, "its back-off"
    world.pass_time(6, {world.member: 1, again: 1})
    permit = world.begin_publish("t")
    assert ([m.name for m in permit.members], permit.holders) == (["bad"], 1)
    world.commit_publish("t", [], [], [again], "a KL of 3 nats")
    again = world.register("bad", version=1)
    world.pass_time(6, {world.member: 1, again: 1})
    assert world.begin_publish("t").members == [], "each refusal waits longer"
    world.pass_time(6, {world.member: 1, again: 1})
    assert [m.name for m in world.begin_publish("t").members] == ["bad"]
    assert world.lease(again, 1) == []
    # Its server restarts and holds no weights: the mark ends, and the next weights count.
    world.beat(again, -1)
    world.commit_publish("t", [again])
    world.beat(again, 1)
    assert world.core.membership.members[again].version == 1


def test_first_weights_get_no_lease_before_their_probe(world):
    train(world, publish=False)
    late = world.register("late")
    assert {m.member_id for m in world.begin_publish("t").members} == {world.member, late}
    world.beat(late, 1)
    assert world.lease(late, 1) == [], "the probe may refuse them"
    world.commit_publish("t", [world.member, late])
    assert world.lease(late, 1)
    later = world.register("later")
    assert world.begin_publish("t").holders == 2
    world.beat(later, 1)
    assert world.core.membership.members[later].version == -1
    world.hello("t2", 1)
    world.beat(later, 1)
    assert world.core.membership.members[later].version == -1, (
        "it has not been probed, and the next trainer does so"
    )
    assert [m.name for m in world.begin_publish("t2").members] == ["later"]
    world.commit_publish("t2", [later])
    world.beat(later, 1)
    assert world.core.membership.members[later].version == 1


@pytest.mark.parametrize("crash", ["after the publish", "during the publish"])
def test_refusal_outlives_a_restart_of_the_coordinator(world, crash):
    """The trainer reports the members of the publish by the ids that they had before the restart."""
    train(world, publish=False)
    bad = world.register("bad")
    world.begin_publish("t")
    world.acknowledge()
    if crash == "during the publish":
        world.crash(0)
        good = world.register("g", version=1)
        assert world.register("bad", version=1)
    world.commit_publish("t", [world.member], [], [bad], "a KL of 3 nats")
    world.acknowledge()
    if crash == "after the publish":
        world.crash(0)
        good = world.register("g", version=1)
    else:
        world.beat(good, 1)
    again = world.register("bad", version=1)
    world.pass_time(6, {good: 1, again: 1})
    assert world.lease(again, 1) == []
    assert world.lease(good, 1)
    permit = world.begin_publish("t")
    assert ([m.name for m in permit.members], permit.holders) == (["bad"], 1), "it is sent and probed again"
    world.commit_publish("t", [again])
    world.beat(again, 1)
    assert world.core.membership.members[again].version == 1


def test_refusal_of_later_weights_outlives_a_restart_of_the_coordinator(world):
    """``g`` held version 0, which was proven, and is refused with version 1 after the restart."""
    train(world, publish=False)
    world.begin_publish("t")
    world.acknowledge()
    world.crash(0)
    world.commit_publish("t", [], [], [world.member], "a KL of 3 nats")
    again = world.register("g", version=1)
    assert world.lease(again, 1) == []
    assert world.state.unproven == {"g": 1}


def test_refusal_of_a_generator_that_left_is_forgotten(world):
    """Otherwise every replica that was ever scaled away stays in the journal."""
    train(world, publish=False)
    bad = world.register("bad")
    world.begin_publish("t")
    world.commit_publish("t", [world.member], [], [bad], "a KL of 3 nats")
    world.beat(world.member, 1)
    assert world.state.unproven == {"bad": 1}
    for _ in range(world.core.settings.identity.max_staleness_steps + 3):
        train(world)
        world.checkpoint("t", [world.state.version])
    assert world.state.unproven == {}


def test_failed_publish_is_named_while_no_generator_has_weights(world):
    world.commit_publish("t", [], [world.member], problem="vLLM cannot load 'a'")
    assert build_status(world.core).waiting_for == (
        "a generator to register; the last publish failed: vLLM cannot load 'a'"
    )
    world.register("g")
    assert build_status(world.core).waiting_for.endswith("; the last publish failed: vLLM cannot load 'a'")


def test_mismatch_sources_are_separate(world):
    """The probe of a publish once took the place of what the step's own tokens said."""
    train(world, publish=False)
    world.publish("t", probe_kl=0.25, probe_tokens=8.0, publish_seconds=1.5)
    world.serve(world.member, 1)
    world.report(
        "t", 1, sampled_kl=0.01, sampled_tokens=100.0, sampled_kl_1k_4k=0.02, sampled_tokens_1k_4k=50.0
    )
    world.publish("t", probe_kl=0.75, probe_tokens=24.0)
    world.serve(world.member, 2)
    world.report("t", 2, sampled_kl=0.07, sampled_tokens=300.0, ratio_kl=0.5, ratio_tokens=900.0)
    status = build_status(world.core)
    assert status.mismatch_kl("probe") == pytest.approx((0.25 * 8 + 0.75 * 24) / 32)
    assert status.mismatch_kl("sampled") == pytest.approx((0.01 * 100 + 0.07 * 300) / 400)
    assert status.mismatch_kl("sampled", "1k_4k") == 0.02
    assert status.mismatch_kl("sampled", "4k_16k") is None
    assert status.mismatch_kl("ratio") == 0.5
    (sampled,) = (m for m in status.mismatch if (m.source, m.positions) == ("sampled", "all"))
    assert sampled.recent_kl == pytest.approx((0.01 * 50 + 0.07 * 300) / 350)
    row = world.state.rows[2]
    assert (row["probe_kl"], row["sampled_kl"], row["ratio_kl"]) == (0.75, 0.07, 0.5)
    assert world.state.rows[1]["publish_seconds"] == 1.5


def test_publish_commit_retry_counts_once(world):
    """The answer was lost; the trainer repeats the report, and a coordinator that restarted receives it."""
    train(world, publish=False)
    members = [m.member_id for m in world.begin_publish("t").members]
    for value in (0.25, 0.25):
        world.commit_publish("t", members, probe_kl=value, probe_tokens=8.0)
    world.acknowledge()
    world.crash(0)
    world.commit_publish("t", members, probe_kl=0.25, probe_tokens=8.0)
    assert world.state.mismatches["probe_kl"].tokens == 8
    world.commit_publish("t", members, probe_kl=0.75, probe_tokens=8.0)
    assert build_status(world.core).mismatch_kl("probe") == 0.5


def test_mismatch_skips_step_without_on_policy_tokens(world):
    world.serve(world.member, 0, 3)
    assert world.report("t", 0) is not None
    assert build_status(world.core).mismatch == []


def test_generator_that_joins_a_batch_gets_weights_during_an_evaluation():
    """Under PPO-off-policy the others keep the batch's weights, and finish the evaluation of them."""
    world = ready(World(make_settings(steps_per_batch=2, max_staleness_steps=1, evaluation_every=2)))
    for step in range(2):
        world.serve(world.member, 0)
        assert world.next("t").action is NextAction.TRAIN
        world.report("t", step)
    world.publish("t")
    world.beat(world.member, 2)
    held_out = world.lease(world.member, 2, 2)
    assert [lease.split for lease in held_out] == [Split.HELD_OUT] * 2
    world.serve(world.member, 2)
    world.report("t", 2)
    late = world.register("late")
    assert world.publish("t") == [late]
    for lease in held_out:
        world.push(world.member, make_group(lease, version=2))
    point = world.state.points[-1]
    assert (point.version, point.mixed_versions) == (2, False)


def held_at_2() -> tuple[World, list[Lease]]:
    """Version 2 is published and its two prompts are leased; every slot that k = 3 permits is served."""
    settings = make_settings(max_staleness_steps=3, prompts_per_step=1)
    world = ready(World(settings))
    for step in range(2):
        world.serve(world.member, step, 1)
        world.report("t", step)
        world.publish("t")
        world.beat(world.member, step + 1)
    held_out = world.lease(world.member, 2, 2)
    assert [lease.split for lease in held_out] == [Split.HELD_OUT] * 2
    world.serve(world.member, 2)
    return world, held_out


def test_evaluation_holds_publishes_and_no_steps() -> None:
    """Versions are skipped in publishing, but none that is due; the point is of the version that was evaluated."""
    world, held_out = held_at_2()
    assert world.state.closed(5)
    world.report("t", 2)
    assert world.begin_publish("t") is None
    assert world.next("t") == wire.Next(action=NextAction.TRAIN, step=3)
    world.report("t", 3)
    assert world.begin_publish("t") is None
    assert world.next("t") is None, "version 4 is due, and must be published before it is trained further"
    for lease in held_out:
        world.push(world.member, make_group(lease, version=2))
    point = world.state.points[-1]
    assert (point.version, point.mixed_versions, point.work_tokens) == (2, False, 16)
    assert world.next("t").action is NextAction.PUBLISH
    assert [m.member_id for m in world.begin_publish("t").members] == [world.member]
    assert world.next("t") == wire.Next(action=NextAction.TRAIN, step=4), "beside the publish"
    world.commit_publish("t", [world.member])
    assert (4, 0) in world.state.evaluations
    world.report("t", 4)


def test_hold_that_ends_is_followed_by_a_publish_before_a_closed_step() -> None:
    """Otherwise the generators would wait for weights until no step is closed."""
    world, held_out = held_at_2()
    world.report("t", 2)
    assert world.next("t").action is NextAction.TRAIN
    for lease in held_out:
        world.push(world.member, make_group(lease, version=2))
    assert world.next("t").action is NextAction.PUBLISH


def test_due_version_is_published_without_generators() -> None:
    """A trainer that ends between its report and its publish loses no point."""
    world = ready(World(make_settings(max_staleness_steps=5, prompts_per_step=1, evaluation_every=4)))
    world.serve(world.member, 0)
    for step in range(4):
        world.report("t", step)
    world.core.membership.members.clear()
    assert world.state.closed(4)
    world.hello("t2", 4)
    assert world.next("t2").action is NextAction.PUBLISH
    assert world.begin_publish("t2").members == []
    world.commit_publish("t2", [])
    assert world.next("t2").action is NextAction.TRAIN
    assert (4, 0) in world.state.evaluations


def test_generator_that_joins_gets_weights_while_an_evaluation_holds_a_publish() -> None:
    world, held_out = held_at_2()
    world.report("t", 2)
    assert world.begin_publish("t") is None
    late = world.register("late")
    assert world.next("t").action is NextAction.PUBLISH
    assert world.publish("t") == [late]
    assert world.state.published == 3
    assert world.next("t").action is NextAction.TRAIN
    for lease in held_out:
        world.push(world.member, make_group(lease, version=2))
    point = world.state.points[-1]
    assert (point.version, point.mixed_versions) == (2, False)
    world.report("t", 3)
    world.beat(late, 3)
    assert world.publish("t") == [world.member, late]


@pytest.mark.parametrize("release", [False, True])
def test_tokens_of_a_held_generator_are_at_most_k_old(release: bool) -> None:
    """It gets no slot of a step more than k = 3 after its version, however far the trainer is."""
    world, _ = held_at_2()
    for step in (2, 3):
        world.report("t", step)
        assert world.begin_publish("t") is None
    if release:
        world.pass_time(61, {world.member: 2})
        assert world.state.evaluations[2, 0].released
    assert world.serve(world.member, 2) == []
    assert not world.state.closed(6)


def test_run_that_ends_waits_for_the_evaluation_that_holds_a_publish() -> None:
    world, held_out = held_at_2()
    world.report("t", 2)
    world.core.stop("enough", world.now)
    assert world.next("t") is None
    late = world.register("late")
    assert world.next("t").action is NextAction.PUBLISH
    assert world.publish("t") == [late]
    world.beat(late, 3)
    assert world.next("t") is None
    for lease in world.lease(late, 3, 2):
        assert (lease.split, lease.policy_version) == (Split.HELD_OUT, 3)
        world.push(late, make_group(lease, version=3))
    assert world.next("t") is None, "the point of version 2 is not complete"
    for lease in held_out:
        world.push(world.member, make_group(lease, version=2))
    assert world.next("t").action is NextAction.FINISH
    assert [(p.version, p.mixed_versions) for p in world.state.points[-2:]] == [(2, False), (3, False)]
