"""What the coordinator decides of the end of a run, case by case."""

from __future__ import annotations

from coordinator_client import make_group
from coordinator_world import World, make_settings, ready, train

from scalerl_api import wire
from scalerl_api.wire import NextAction, Phase, PushResult, Split
from scalerl_coordinator.run_status import build_status


def test_the_budget_of_steps_ends_the_run_once_its_last_version_is_measured():
    world = ready(World(make_settings(max_steps=1)))
    assert [lease.slot for lease in world.serve(world.member, 0)] == [0, 1, 2]
    world.report("t", 0)
    assert world.next("t").action is NextAction.PUBLISH
    world.publish("t")
    assert world.next("t") is None
    assert build_status(world.core).waiting_for == "the evaluation of version 1: 0 of 2 prompts"
    world.serve(world.member, 1)
    finish = world.next("t")
    assert (finish.action, finish.reason) == (NextAction.FINISH, "maxSteps")
    assert build_status(world.core).phase is Phase.FINISHING
    assert world.rollouts.offer(world.member, 1, world.now).stop
    world.checkpoint("t", [1])
    assert build_status(world.core).phase is Phase.FINISHED


def test_the_trainer_is_told_which_versions_are_measured(world):
    assert [v for v in range(5) if world.training.has_evaluation(v)] == [0, 2, 4]
    ending = World(make_settings(max_steps=3))
    assert [v for v in range(5) if ending.training.has_evaluation(v)] == [0, 2, 3, 4]
    world.core.stop("plateau", world.now)
    assert world.training.has_evaluation(3), "the last one, whichever it is"
    world.core.stop(wire.INTERRUPTED, world.now)
    assert not world.training.has_evaluation(3)


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
    assert build_status(world.core).stop_reason == ""
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
    assert build_status(world.core).phase is Phase.FINISHED
    world.core.stop("", world.now)  # resumed
    world.hello("t2", 1)
    assert [lease.slot for lease in world.lease(world.member, 1, 2)] != []


def test_a_held_out_prompt_that_nobody_can_serve_waits_counts_0_and_ends_no_run():
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
