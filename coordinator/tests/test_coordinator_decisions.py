"""What the coordinator decides, case by case: the walks of the machine test, made deliberate."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_client import make_group
from coordinator_world import World, check_consistency, make_settings

from scalerl_api import wire
from scalerl_api.wire import NextAction, Phase, PushResult, Split
from scalerl_coordinator.core import Refusal
from scalerl_coordinator.membership import UnknownMember
from scalerl_coordinator.state import State
from scalerl_coordinator.status import view


@pytest.fixture
def world() -> World:
    """A trainer at version 0 and one generator that holds it; the point of version 0 is made."""
    return ready(World(make_settings()))


def ready(world: World, name: str = "g") -> World:
    world.member = world.register(name)
    world.hello("t")
    assert world.next("t").action is NextAction.PUBLISH
    world.publish("t")
    world.beat(world.member, 0)
    leases = world.lease(world.member, 0, 2)
    assert [lease.split for lease in leases] == [Split.HELD_OUT] * 2
    for lease in leases:
        assert world.push(world.member, make_group(lease)) is PushResult.ACCEPTED
    assert [p.version for p in world.state.points] == [0]
    return world


def train(world: World, incarnation: str = "t", *, publish: bool = True) -> None:
    """Generate what can be, train one step, publish, and measure what is due."""
    version = world.state.version
    world.serve(world.member, world.core.membership.members[world.member].version)
    following = world.next(incarnation)
    assert following.action is NextAction.TRAIN, following
    world.report(incarnation, version)
    if publish:
        world.publish(incarnation)
        if world.state.evaluations:
            world.serve(world.member, version + 1, 2)


# --- leases ---------------------------------------------------------------------------------------


def test_nothing_is_leased_before_weights_and_nothing_beyond_k():
    world = World(make_settings())
    member = world.register("g")
    assert world.lease(member, -1) == []
    assert world.lease(member, 5) == []  # weights of a run that this coordinator does not know
    world.hello("t")
    world.publish("t")
    held_out = world.lease(member, 0)
    assert [lease.slot for lease in held_out if lease.split is Split.HELD_OUT] == [0, 1]
    assert [lease.slot for lease in held_out if lease.split is Split.TRAIN] == [0, 1, 2, 3, 4, 5]
    assert world.lease(member, 0) == []


def test_a_lost_lease_is_issued_again_first_with_its_prompt(world):
    first = world.lease(world.member, 0, 4)
    world.rollouts.release(
        wire.Release(member_id=world.member, lease_ids=[first[2].lease_id, first[1].lease_id], reason="full"),
        world.now,
    )
    again = world.lease(world.member, 0, 3)
    assert [lease.slot for lease in again] == [1, 2, 4]
    for before, after in zip(first[1:3], again, strict=False):
        assert before.lease_id != after.lease_id
        assert before.prompt_index == after.prompt_index


def test_leases_end_with_their_deadline_and_late_groups_are_dropped_and_counted(world):
    lease = world.lease(world.member, 0, 1)[0]
    world.pass_time(99, {world.member: 0})
    assert world.state.leases
    world.pass_time(2, {world.member: 0})
    assert not world.state.leases
    assert world.state.fates.expired_leases == 1
    other = world.register("h")
    again = world.lease(other, 0, 1)[0]
    assert again.slot == lease.slot
    assert world.push(world.member, make_group(lease)) is PushResult.LATE
    assert world.state.fates.late == 2
    assert world.push(other, make_group(again)) is PushResult.ACCEPTED


def test_a_late_group_is_welcome_while_nobody_else_has_its_slot(world):
    lease = world.lease(world.member, 0, 1)[0]
    world.pass_time(101, {world.member: 0})
    assert world.state.reissue == [0]
    assert world.push(world.member, make_group(lease)) is PushResult.ACCEPTED
    assert world.state.reissue == []
    assert world.state.fates.acknowledged == 2
    assert world.push(world.member, make_group(lease)) is PushResult.DUPLICATE
    assert world.state.fates.duplicate == 2
    check_consistency(world)


@pytest.mark.parametrize("how", ["silent", "unhealthy", "replaced", "failed"])
def test_a_member_that_is_lost_loses_its_leases(world, how):
    other = world.register("h")
    world.beat(other, 0)
    leases = world.lease(world.member, 0, 3)
    match how:
        case "silent":
            world.pass_time(10, {other: 0})
        case "unhealthy":
            world.beat(world.member, 0, healthy=False)
        case "replaced":
            world.register("g")
        case "failed":
            world.commit_publish("t", [other], [world.member])
    assert [lease.slot for lease in world.lease(other, 0, 3)] == [lease.slot for lease in leases]
    if how != "unhealthy":
        with pytest.raises(UnknownMember):
            world.lease(world.member, 0)


def test_a_member_keeps_the_leases_it_names_when_it_registers_again(world):
    kept, dropped = world.lease(world.member, 0, 2)
    world.acknowledge()
    world.crash(0)
    world.core.membership.members.clear()
    member = world.register("g", held=[kept.lease_id])
    assert list(world.state.leases) == [kept.lease_id]
    assert world.push(member, make_group(kept)) is PushResult.ACCEPTED
    assert world.state.reissue == [dropped.slot]


def test_after_a_coordinator_crash_holders_have_the_patience_of_members(world):
    world.lease(world.member, 0, 2)
    world.acknowledge()
    world.crash(0)
    assert len(world.state.leases) == 2
    world.pass_time(8)
    assert len(world.state.leases) == 2
    world.pass_time(2)
    assert world.state.leases == {}
    assert world.state.reissue == [0, 1]


def test_an_answer_that_never_arrived_is_noticed_at_the_next_heartbeats(world):
    lost, held = world.lease(world.member, 0, 2)
    world.beat(world.member, 0, held_leases=[held.lease_id])
    assert len(world.state.leases) == 2  # this heartbeat may have been sent before
    world.pass_time(3, {world.member: 0})
    assert len(world.state.leases) == 2  # these say nothing about leases
    world.pass_time(2, {world.member: 0})
    world.beat(world.member, 0, held_leases=[held.lease_id])
    assert list(world.state.leases) == [held.lease_id]
    assert world.state.reissue == [lost.slot]


def test_a_stale_group_is_dropped_and_its_slot_issued_again():
    world = ready(World(make_settings(max_staleness_steps=0, evaluation_every=100)))
    train(world)
    leases = world.lease(world.member, 1)
    assert [lease.slot for lease in leases] == [3, 4, 5]
    assert world.push(world.member, make_group(leases[0], version=0)) is PushResult.STALE
    assert world.state.fates.stale == 2
    assert world.state.reissue == [3]


def test_a_slot_that_keeps_coming_back_waits_and_is_told_about(world):
    for _ in range(5):
        world.pass_time(20, {world.member: 0})
        lease = world.lease(world.member, 0, 1)[0]
        assert lease.slot == 0
        assert world.push(world.member, make_group(lease, logprob=1.0)) is PushResult.INVALID
    assert world.lease(world.member, 0, 1)[0].slot == 1
    assert world.state.fates.invalid == 10
    assert "slot 0, which came back 5 times" in view(world.core).waiting_for


def test_actors_of_another_task_are_refused(world):
    request = wire.Register(name="x", control_url="u", task_digest="other")
    with pytest.raises(Refusal, match="same version of the task library"):
        world.rollouts.register(request, "x/1", world.now)


# --- steps ----------------------------------------------------------------------------------------


def test_zero_variance_groups_are_filtered_at_close_and_not_refilled(world):
    leases = world.lease(world.member, 0, 3)
    world.push(world.member, make_group(leases[0], scores=[1.0, 1.0]))
    world.push(world.member, make_group(leases[1]))
    assert world.state.fates.filtered == 0
    world.push(world.member, make_group(leases[2], scores=[0.0, 0.0]))
    assert (world.state.fates.filtered, world.state.fates.queued) == (4, 2)
    plan = world.plan("t", 0)
    assert [g.filtered for g in plan.groups] == [True, False, True]
    assert [(i.group, i.sample) for i in plan.items] == [(1, 0), (1, 1)]
    row = world.report("t", 0)
    assert (row["groups"], row["filtered_groups"], row["work_tokens"], row["reward"]) == (3, 2, 24, 0.5)
    assert world.state.fates.trained == 2


def test_every_rank_gets_its_part_of_the_same_step(world):
    world.serve(world.member, 0, 3)
    shares = [world.plan("t", 0, rank, 4).items for rank in range(4)]
    assert sorted((i.group, i.sample) for share in shares for i in share) == [
        (g, s) for g in range(3) for s in range(2)
    ]
    assert {len(share) for share in shares} == {1, 2}
    with pytest.raises(Refusal, match="rank 4 is outside"):
        world.plan("t", 0, 4, 4)
    with pytest.raises(Refusal, match="not closed"):
        world.plan("t", 1)


def test_the_trainer_goes_back_and_gets_the_very_same_batches(world):
    for _ in range(2):
        train(world)
    batches = [world.plan("t", step).lease_ids for step in range(2)]
    before = world.state.fates
    assert world.hello("t2", 0) == wire.TrainerWelcome(next_step=0, published_version=2)
    assert (world.state.fates.trained, world.state.line.work_tokens) == (0, 0)
    assert world.state.fates.acknowledged == before.acknowledged
    assert world.state.rows == {}
    assert [p.version for p in world.state.points] == [0, 2]
    for step in range(2):
        assert world.next("t2").action is NextAction.TRAIN
        assert world.plan("t2", step).lease_ids == batches[step]
        world.report("t2", step)
    for call in (lambda: world.next("t"), lambda: world.report("t", 2), lambda: world.plan("t", 0)):
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.error == "superseded"
    check_consistency(world)


def test_a_member_without_weights_gets_the_older_ones_while_others_keep_the_lost_line(world):
    for _ in range(2):
        train(world)
    world.hello("t2", 0)
    new = world.register("new")
    following = world.next("t2")
    assert following.action is NextAction.PUBLISH
    permit = world.begin_publish("t2")
    assert [m.name for m in permit.members] == ["new"]
    world.commit_publish("t2", [new])
    assert world.state.published == 2
    assert world.next("t2").action is NextAction.TRAIN


def test_a_member_that_has_not_said_what_it_holds_is_neither_behind_nor_gone(world):
    """It may just have registered again after the coordinator came back."""
    for _ in range(2):
        train(world)
    world.hello("t2", 0)
    held = world.lease(world.member, 2, 1)
    world.acknowledge()
    world.crash(0)
    member = world.register("g", held=[held[0].lease_id], version=None)
    assert world.next("t2").action is NextAction.TRAIN
    assert world.begin_publish("t2").members == []
    new = world.register("new")
    world.commit_publish("t2", [new])
    assert world.state.published == 2
    assert world.push(member, make_group(held[0])) is PushResult.ACCEPTED


def test_a_line_that_nobody_holds_any_more_is_given_up(world):
    for _ in range(2):
        train(world)
    world.hello("t2", 0)
    world.core.membership.members.clear()
    new = world.register("new")
    world.publish("t2")
    assert world.state.published == 0
    assert all(lease.slot < 6 for lease in world.lease(new, 0))


def test_a_checkpoint_from_ahead_is_believed_when_its_steps_are_still_there(world):
    for _ in range(2):
        train(world)
    world.hello("t2", 0)
    world.hello("t3", 2)
    assert (world.state.version, world.state.fates.trained) == (2, 12)
    assert sorted(world.state.rows) == [0, 1]
    with pytest.raises(Refusal) as caught:
        world.hello("t4", 5)
    assert caught.value.error == "no-state"
    world.hello("t5", 2)


def test_a_trainer_that_lost_its_checkpoints_does_not_wipe_the_run(world):
    for _ in range(3):
        train(world)
    world.checkpoint("t", [2, 3])
    assert world.state.first_kept_step == 2
    assert min(world.state.groups) == 6
    assert len(world.core.forgotten) == 6
    before = world.state.encode()
    for version, error in ((1, "unknown-version"), (0, "checkpoints-lost")):
        with pytest.raises(Refusal) as caught:
            world.hello("t2", version)
        assert caught.value.error == error
    assert "one of version 3 was committed" in str(caught.value)
    assert world.state.encode() == before
    world.hello("t2", 2)
    check_consistency(world)


def test_a_run_without_a_checkpoint_begins_again_on_the_same_rollouts(world):
    for _ in range(2):
        train(world)
    acknowledged, batch = world.state.fates.acknowledged, world.plan("t", 0).lease_ids
    world.hello("t2", 0)
    assert (world.state.fates.acknowledged, world.state.fates.trained) == (acknowledged, 0)
    assert world.plan("t2", 0).lease_ids == batch


def test_the_run_is_not_finished_before_the_line_that_ends_it_is_saved():
    world = ready(World(make_settings(max_steps=2, evaluation_every=100)))
    train(world)
    world.checkpoint("t", [0, 1])
    train(world)
    world.checkpoint("t", [0, 1, 2])
    world.hello("t2", 1)  # it could not read the newest
    assert world.state.checkpoint == view(world.core).checkpoint_version == 1
    world.report("t2", 1)
    if world.next("t2").action is NextAction.PUBLISH:
        world.publish("t2")
    world.serve(world.member, 2)
    assert world.next("t2").action is NextAction.FINISH
    assert view(world.core).phase is Phase.FINISHING
    world.checkpoint("t2", [1, 2])
    assert view(world.core).phase is Phase.FINISHED
    world.hello("t3", 2)  # restarted by mistake: it has its checkpoint, and nothing more to write
    assert world.next("t3").action is NextAction.FINISH
    assert view(world.core).phase is Phase.FINISHED


def test_checkpoint_failures_add_up_over_incarnations(world):
    train(world)
    world.serve(world.member, 1)
    world.report("t", 1, checkpoint_failures=2.0)
    assert world.state.rows[1]["checkpoint_failures"] == 2
    world.hello("t2", 1)
    world.report("t2", 1, checkpoint_failures=1.0)
    world.publish("t2")
    world.serve(world.member, 2)
    world.report("t2", 2, checkpoint_failures=1.0)
    assert view(world.core).checkpoint_failures == 3
    world.acknowledge()
    world.crash(0)
    assert view(world.core).checkpoint_failures == 3


def test_grading_errors_are_counted_and_told_once(world, caplog):
    for lease in world.lease(world.member, 0, 3):
        group = make_group(lease)
        failed = msgspec.structs.replace(group.completions[0], grading_error="timeout after 10 s")
        group = msgspec.structs.replace(group, completions=[failed, group.completions[1]])
        assert world.push(world.member, group) is PushResult.ACCEPTED
    assert view(world.core).grading_errors == 3
    assert world.report("t", 0)["grading_errors"] == 3
    assert len([m for m in caplog.messages if "timeout after 10 s" in m]) == 1


def test_metrics_rows_are_kept_until_a_checkpoint_has_them(world):
    train(world)
    train(world)
    world.checkpoint("t", [2])
    assert world.state.rows == {}
    assert view(world.core).last_step_stats["step"] == 1


def test_reports_that_are_not_finite_or_out_of_step_are_refused(world):
    world.serve(world.member, 0, 3)
    with pytest.raises(Refusal, match=r"stats\.loss is nan"):
        world.report("t", 0, loss=float("nan"))
    with pytest.raises(Refusal, match="step 1 is reported, step 0 is next"):
        world.report("t", 1)
    assert world.report("t", 0) is not None
    assert world.report("t", 0) is None


# --- publishing and evaluation --------------------------------------------------------------------


def measured_at_2(world: World) -> None:
    """Version 2 is published and due; nothing of its point is generated."""
    train(world)
    train(world, publish=False)
    world.publish("t")


def test_a_publish_waits_for_the_point_before_it(world):
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


def test_after_the_hold_newer_weights_finish_the_point_and_it_says_so(world):
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


def test_a_hold_ends_when_nobody_can_make_the_point(world):
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
    assert world.state.evaluations[2].released


def test_evaluation_is_made_by_the_very_version_only(world):
    measured_at_2(world)
    late = world.register("late")
    world.beat(late, 1)
    assert all(lease.split is Split.TRAIN for lease in world.lease(late, 1))


def test_a_member_that_fails_a_publish_does_not_hold_up_the_trainer(world):
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


def test_mismatch_is_the_mean_over_publishes(world):
    train(world, publish=False)
    world.publish("t", mismatch_kl=0.25, publish_seconds=1.5)
    train(world, publish=False)
    world.publish("t", mismatch_kl=0.75)
    assert world.state.mismatch_kl == 0.5
    assert world.state.rows[1]["mismatch_kl"] == 0.25
    assert world.state.rows[1]["publish_seconds"] == 1.5


def test_the_same_commit_again_counts_once(world):
    """The answer was lost; the trainer says it again, and a coordinator that restarted hears it."""
    train(world, publish=False)
    members = [m.member_id for m in world.begin_publish("t").members]
    for value in (0.25, 0.25):
        world.commit_publish("t", members, mismatch_kl=value)
    world.acknowledge()
    world.crash(0)
    world.commit_publish("t", members, mismatch_kl=0.25)
    assert world.state.publish_mismatches == 1
    world.commit_publish("t", members, mismatch_kl=0.75)
    assert world.state.mismatch_kl == 0.5


def test_before_a_publish_measures_the_steps_say_how_far_the_sides_are_apart(world):
    world.serve(world.member, 0, 3)
    assert world.report("t", 0) is not None  # no token of its own version: it says nothing
    assert world.state.mismatch_kl is None
    world.publish("t")
    world.serve(world.member, 1)
    world.report("t", 1, mismatch_kl=0.5)
    assert world.state.mismatch_kl == 0.5


# --- the end --------------------------------------------------------------------------------------


def test_the_budget_of_steps_ends_the_run_once_its_last_version_is_measured():
    world = ready(World(make_settings(max_steps=1)))
    assert [lease.slot for lease in world.serve(world.member, 0)] == [0, 1, 2]
    world.report("t", 0)
    assert world.next("t").action is NextAction.PUBLISH
    world.publish("t")
    assert world.next("t") is None
    assert view(world.core).waiting_for == "the evaluation of version 1: 0 of 2 prompts"
    world.serve(world.member, 1)
    finish = world.next("t")
    assert (finish.action, finish.reason) == (NextAction.FINISH, "maxSteps")
    assert view(world.core).phase is Phase.FINISHING
    assert world.rollouts.offer(world.member, 1, world.now).stop
    world.checkpoint("t", [1])
    assert view(world.core).phase is Phase.FINISHED


def test_a_stop_outlives_crashes_and_can_be_taken_back(world):
    train(world)
    world.core.stop("plateau", world.now)
    world.acknowledge()
    world.crash(0)
    member = world.register("g")
    world.beat(member, 1)
    assert world.next("t") is None  # version 1 is the last now: it is measured
    assert {lease.split for lease in world.lease(member, 1)} == {Split.HELD_OUT}
    world.core.stop("", world.now)
    assert view(world.core).stop_reason == ""
    assert [lease.slot for lease in world.lease(member, 1, 2) if lease.split is Split.TRAIN]


def test_a_stop_without_generators_does_not_wait_for_ever(world):
    train(world)
    world.core.stop("plateau", world.now)
    assert world.next("t") is None
    world.pass_time(20)
    assert world.next("t") is None
    world.pass_time(9)
    finish = world.next("t")
    assert (finish.action, finish.reason) == (NextAction.FINISH, "plateau")
    assert [p.version for p in world.state.points] == [0]


def test_the_patience_with_a_final_evaluation_starts_anew_with_a_new_trainer(world):
    train(world)
    world.core.stop("plateau", world.now)
    assert world.next("t") is None
    world.pass_time(20)
    assert world.next("t") is None
    world.pass_time(7)
    world.hello("t2", 1)
    world.pass_time(2)
    assert world.next("t2") is None


def test_who_interrupts_does_not_wait_for_an_evaluation(world):
    train(world)
    world.core.stop(wire.INTERRUPTED, world.now)
    assert world.rollouts.offer(world.member, 8, world.now) is None
    finish = world.next("t")
    assert (finish.action, finish.reason) == (NextAction.FINISH, "interrupted")
    world.checkpoint("t", [1])
    assert view(world.core).phase is Phase.FINISHED
    world.core.stop("", world.now)  # resumed
    world.hello("t2", 1)
    assert [lease.slot for lease in world.lease(world.member, 1, 2)] != []


def test_a_held_out_prompt_that_nobody_can_serve_waits_is_counted_and_ends_no_run():
    world = ready(World(make_settings(max_steps=1)))
    world.serve(world.member, 0)
    world.report("t", 0)
    world.publish("t")
    good, bad = world.lease(world.member, 1, 2)
    world.push(world.member, make_group(good))
    tried = 0
    while True:
        assert world.push(world.member, make_group(bad, logprob=1.0)) is PushResult.INVALID
        tried += 1
        if tried == 5:
            assert "held-out prompt 1, which came back 5 times" in view(world.core).waiting_for
        assert world.state.fates.acknowledged == world.state.fates.trained + world.state.fates.queued
        following = world.next("t")
        if following is not None:
            break
        for _ in range(100):
            again = world.lease(world.member, 1, 2)
            if again:
                break
            world.pass_time(1, {world.member: 1})
        assert [lease.slot for lease in again] == [bad.slot]
        bad = again[0]
    assert following.action is NextAction.FINISH
    assert tried == 10
    assert world.now > 60
    counts = view(world.core).counts
    assert (counts.held_out_invalid, counts.invalid) == (20, 0)


# --- what survives --------------------------------------------------------------------------------


def test_an_empty_coordinator_starts_from_the_checkpoints_snapshot(world):
    train(world)
    ahead = world.state.prompts
    snapshot = world.checkpoint("t", [1])
    points, next_slot = world.state.points, world.state.next_slot
    world.lose_volume()
    with pytest.raises(Refusal) as caught:
        world.hello("t2", 1)
    assert caught.value.error == "no-state"
    with pytest.raises(Refusal, match="the snapshot is of version 1, the checkpoint of 2"):
        world.hello("t2", 2, snapshot)
    with pytest.raises(Refusal) as caught:
        world.hello("t2", 1, b"\xc1garbage")
    assert caught.value.error == "bad-snapshot"
    world.hello("t2", 1, snapshot)
    state = world.state
    assert (state.version, state.points, state.next_slot) == (1, points, next_slot)
    assert state.reissue == sorted(slot for slot in ahead if slot >= 3)
    assert (state.fates.acknowledged, state.fates.trained, state.fates.queued) == (6, 6, 0)
    check_consistency(world)
    world.member = world.register("g")
    world.publish("t2")
    assert [lease.slot for lease in world.lease(world.member, 1, 2)] == [3, 4]
    # A journal that knows a trainer needs no snapshot, and takes none.
    world.hello("t3", 1, b"\xc1garbage")


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([], -1),
        ([(0, 0.2, False), (1, 0.5, False), (2, 0.4, False)], 1),
        ([(0, 0.2, False), (1, 0.5, True), (2, float("nan"), False)], 0),
        ([(0, 0.2, False), (1, 0.2, False)], 1),
    ],
)
def test_a_checkpoint_is_told_where_the_run_was_best(world, points, best):
    """Of several weight versions, or no number: such a point says nothing of one."""
    train(world)
    world.state.points = [
        wire.EvaluationPoint(
            version=version,
            work_tokens=100 * version,
            reward=reward,
            standard_error=0.01,
            samples=8,
            prompts=2,
            set_digest="set",
            mixed_versions=mixed,
            truncated_fraction=0.0,
            mean_tokens=5.0,
            wall_seconds=1.0,
            device_seconds=1.0,
        )
        for version, reward, mixed in points
    ]
    begin = wire.CheckpointBegin(incarnation="t", step=1)
    assert world.training.checkpoint_begin(begin, world.now).best_version == best


def test_a_snapshot_is_the_whole_state(world):
    train(world)
    world.lease(world.member, 1, 2)
    assert State.decode(world.state.encode()) == world.state
    world.write()
    assert world.replay() == world.state


def test_a_journal_of_another_run_is_refused(world):
    world.acknowledge()
    world.settings = make_settings(prompts_per_step=5)
    with pytest.raises(Refusal, match="prompts_per_step was 3, is 5"):
        world.crash(0)


def test_time_and_devices_count_from_the_first_lease_and_add_up_over_crashes():
    world = World(make_settings())
    member = world.register("g")
    world.pass_time(5, {member: -1})
    world.hello("t")
    world.publish("t")
    world.lease(member, 0, 1)
    world.pass_time(10, {member: 0})
    world.beat(member, 0, busy_seconds=4.0, generated_tokens=100)
    world.core.flush_usage(world.now)
    world.acknowledge()
    usage = world.state.usage
    assert (usage.wall_seconds, usage.device_seconds) == (10.0, 30.0)  # a generator and two ranks
    assert (usage.generator_busy_fraction, usage.generated_tokens) == (0.4, 100)
    world.crash(0)
    member = world.register("g")
    world.pass_time(3, {member: 0})
    status = view(world.core)
    assert (status.wall_seconds, status.device_seconds) == (13.0, 39.0)


def test_wire_groups_are_what_the_journal_holds():
    """The journal keeps a group's bytes as they came: they must decode as a group for ever."""
    lease = wire.Lease(
        lease_id="a-0",
        split=Split.TRAIN,
        slot=0,
        prompt_index=0,
        prompt_id="p",
        completions=1,
        max_tokens=8,
        temperature=1.0,
        remaining_seconds=1.0,
        policy_version=0,
    )
    group = make_group(lease)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=wire.Group) == group
