"""Decisions about the end of a run."""

from __future__ import annotations

import pytest
from coordinator_client import make_group
from coordinator_world import World, make_settings, ready, train

from scalerl_api import wire
from scalerl_api.wire import NextAction, Phase, PushResult, Split
from scalerl_coordinator.core import TRAINER, WORK
from scalerl_coordinator.leases import slot_key
from scalerl_coordinator.run_status import build_status


def test_max_steps_finishes_after_last_evaluation():
    world = ready(World(make_settings(max_steps=1)))
    assert [lease.slot for lease in world.serve(world.member, 0)] == [0, 1, 2]
    world.report("t", 0)
    assert world.next("t").action is NextAction.PUBLISH
    world.publish("t")
    assert world.next("t") is None
    assert build_status(world.core).waiting_for == "the evaluation of version 1: 0 of 2 held-out prompts"
    world.serve(world.member, 1)
    finish = world.next("t")
    assert (finish.action, finish.reason) == (NextAction.FINISH, "maxSteps")
    assert build_status(world.core).phase is Phase.FINISHING
    assert world.generator_requests.offer(world.member, 1, world.now).stop
    world.checkpoint("t", [1])
    assert build_status(world.core).phase is Phase.FINISHED


def test_next_reports_evaluated_versions(world):
    assert [v for v in range(5) if world.trainer_requests.evaluations.has_evaluation(v)] == [0, 2, 4]
    ending = World(make_settings(max_steps=3))
    assert [v for v in range(5) if ending.trainer_requests.evaluations.has_evaluation(v)] == [0, 2, 3, 4]
    world.core.stop("plateau", world.now)
    assert world.trainer_requests.evaluations.has_evaluation(3), "the last one, whichever it is"
    world.core.stop(wire.INTERRUPTED, world.now)
    assert not world.trainer_requests.evaluations.has_evaluation(3)


def test_stop_survives_crash_and_can_be_cancelled(world):
    train(world)
    world.core.stop("plateau", world.now)
    world.acknowledge()
    world.crash(0)
    member = world.register("g")
    world.beat(member, 1)
    assert world.next("t") is None  # version 1 is the last now: it is measured
    assert {lease.split for lease in world.lease(member, 1)} == {Split.HELD_OUT}
    world.core.stop("", world.now)
    assert build_status(world.core).stop_reason == ""
    assert [lease.slot for lease in world.lease(member, 1, 2) if lease.split is Split.TRAIN]


def test_stop_without_generators_finishes(world):
    train(world)
    world.core.stop("plateau", world.now)
    assert world.next("t") is None
    world.pass_time(20)
    assert world.next("t") is None
    world.pass_time(9)
    finish = world.next("t")
    assert (finish.action, finish.reason) == (NextAction.FINISH, "plateau")
    assert [p.version for p in world.state.points] == [0]


def test_final_evaluation_timeout_restarts_with_new_trainer(world):
    train(world)
    world.core.stop("plateau", world.now)
    assert world.next("t") is None
    world.pass_time(20)
    assert world.next("t") is None
    world.pass_time(7)
    world.hello("t2", 1)
    world.pass_time(2)
    assert world.next("t2") is None


@pytest.mark.parametrize("read", [False, True])
def test_run_whose_last_version_reaches_no_generator_finishes(world, caplog, read):
    """As when the volume is full, or its only generator cannot read it."""
    train(world, publish=False)
    world.core.stop("enough", world.now)
    problem = "a file is damaged" if read else "version 1 cannot be written"
    for _ in range(40):
        action = world.next("t")
        if action is not None and action.action is NextAction.FINISH:
            break
        if action is not None:
            members = [m.member_id for m in world.begin_publish("t").members]
            assert members
            world.commit_publish("t", [], problem=problem, kept=members if read else [])
        world.pass_time(1, {world.member: 0})
    assert (action.action, action.reason) == (NextAction.FINISH, "enough")
    assert 8 <= world.now <= 20
    assert f"the last publish failed: {problem}" in caplog.text


def test_interrupt_skips_evaluation(world):
    train(world)
    world.core.stop(wire.INTERRUPTED, world.now)
    assert world.generator_requests.offer(world.member, 8, world.now) is None
    finish = world.next("t")
    assert (finish.action, finish.reason) == (NextAction.FINISH, "interrupted")
    world.checkpoint("t", [1])
    assert build_status(world.core).phase is Phase.FINISHED
    world.core.stop("", world.now)  # resumed
    world.hello("t2", 1)
    assert [lease.slot for lease in world.lease(world.member, 1, 2)] != []


def test_final_evaluation_scores_unservable_prompt_0():
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
        assert world.state.counts.acknowledged == world.state.counts.trained + world.state.counts.queued
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
    assert tried == 5
    assert world.now >= 7
    counts = build_status(world.core).counts
    assert (counts.held_out_invalid, counts.held_out_given_up, counts.invalid) == (10, 2, 0)
    point = world.state.points[-1]
    assert (point.version, point.prompts, point.given_up_prompts) == (1, 2, 1)


def test_stop_finishes_a_run_whose_trainer_never_registered():
    """There is nothing to save, and no trainer to send FINISH to."""
    world = World(make_settings(max_steps=5))
    world.register("g")
    world.pass_time(100.0)
    status = build_status(world.core)
    assert (status.waiting_seconds, status.trainer_registered) == (100.0, False)
    world.core.stop("maxSeconds", world.now)
    world.acknowledge()
    status = build_status(world.core)
    assert (status.phase, status.stop_reason) == (Phase.FINISHED, "maxSeconds")
    world.crash(0)
    assert build_status(world.core).phase is Phase.FINISHED
    world.core.stop("", world.now)
    assert build_status(world.core).phase is Phase.WAITING, "the budget was raised"
    world.core.stop("maxSeconds", world.now)
    world.hello("t")
    status = build_status(world.core)
    assert (status.phase, status.trainer_registered) == (Phase.FINISHING, True), "it arrived after all"
    assert world.next("t").action is NextAction.FINISH


def test_time_before_the_first_lease_is_counted_and_a_stop_then_ends_the_run():
    """The first weights never arrive: nothing is left to publish or to evaluate."""
    world = World(make_settings(max_steps=5))
    world.hello("t")
    world.pass_time(100.0)
    status = build_status(world.core)
    assert (status.waiting_seconds, status.wall_seconds) == (100.0, 0.0)
    world.acknowledge()
    world.crash(0)
    world.hello("t2")
    kept = build_status(world.core).waiting_seconds
    assert 70.0 <= kept <= 100.0
    world.pass_time(50.0)
    assert build_status(world.core).waiting_seconds == kept + 50.0
    assert world.next("t2") is None
    world.core.stop("maxSeconds", world.now)
    finish = world.next("t2")
    assert (finish.action, finish.reason) == (NextAction.FINISH, "maxSeconds")
    world.checkpoint("t2", [0])
    assert build_status(world.core).phase is Phase.FINISHED


def test_time_of_mid_training_is_no_waiting_time():
    world = World(make_settings(max_steps=5))
    world.hello("t")
    for seconds in (20.0, 40.0, 60.0):
        world.pass_time(20.0)
        message = wire.SupervisedReport(incarnation="t", steps=1, tokens=1, seconds=seconds)
        world.trainer_requests.supervised(message, world.now)
        status = build_status(world.core)
        assert (status.waiting_seconds, status.wall_seconds) == (0.0, seconds)


def test_time_after_the_first_lease_is_no_waiting_time():
    world = ready(World(make_settings(max_steps=5)))
    waited = build_status(world.core).waiting_seconds
    world.serve(world.member, 0)
    world.pass_time(10.0)
    status = build_status(world.core)
    assert status.waiting_seconds == waited
    assert status.wall_seconds >= 10.0


def test_back_offs_that_end_before_usage_is_journaled_wake_the_polls():
    world = ready(World(make_settings()))
    (lease,) = world.lease(world.member, 0, 1)
    key = slot_key(lease.prompt, lease.slot)
    for _ in range(2):
        world.core.book.add_retry(key, "slow", world.now)
    world.core.membership.failed_publish("g", world.now)
    world.now += 6.0
    assert not world.core.book.waits(key, world.now)
    world.core.flush_usage(world.now)
    world.core.wake.clear()
    world.pass_time(1.0, {world.member: 0})
    assert world.core.wake == {WORK, TRAINER}
    world.core.wake.clear()
    world.pass_time(1.0, {world.member: 0})
    assert not world.core.wake
