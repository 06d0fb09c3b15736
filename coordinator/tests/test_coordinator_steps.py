"""Decisions about steps: batches, and returns of the trainer to a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from coordinator_client import make_group
from coordinator_world import World, check_consistency, make_settings, ready, train

from scalerl_api import wire
from scalerl_api.wire import NextAction, Phase, PushResult
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Refusal
from scalerl_coordinator.run_status import build_status


def test_step_close_filters_zero_variance_groups(world):
    leases = world.lease(world.member, 0, 3)
    world.push(world.member, make_group(leases[0], scores=[1.0, 1.0]))
    world.push(world.member, make_group(leases[1]))
    assert world.state.counts.filtered == 0
    world.push(world.member, make_group(leases[2], scores=[0.0, 0.0]))
    assert (world.state.counts.filtered, world.state.counts.queued) == (4, 2)
    plan = world.plan("t", 0)
    assert [g.filtered for g in plan.groups] == [True, False, True]
    assert [(i.group, i.sample) for i in plan.items] == [(1, 0), (1, 1)]
    row = world.report("t", 0)
    assert (row["groups"], row["filtered_groups"], row["work_tokens"], row["reward"]) == (3, 2, 24, 0.5)
    assert world.state.counts.trained == 2


def test_shards_of_ranks_cover_step(world):
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


def test_hello_at_older_version_repeats_batches(world):
    for _ in range(2):
        train(world)
    batches = [world.plan("t", step).lease_ids for step in range(2)]
    before = world.state.counts
    assert world.hello("t2", 0) == wire.TrainerWelcome(next_step=0, published_version=2)
    assert (world.state.counts.trained, world.state.lineage.work_tokens) == (0, 0)
    assert world.state.counts.acknowledged == before.acknowledged
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


def test_publish_after_return_skips_members_of_lost_lineage(world):
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


def test_publish_ignores_member_without_reported_version(world):
    """It may have registered again after a restart of the coordinator."""
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


def test_publish_abandons_lineage_without_members(world):
    for _ in range(2):
        train(world)
    world.hello("t2", 0)
    world.core.membership.members.clear()
    new = world.register("new")
    world.publish("t2")
    assert world.state.published == 0
    assert all(lease.slot < 6 for lease in world.lease(new, 0))


def test_hello_at_newer_version_keeps_closed_steps(world):
    for _ in range(2):
        train(world)
    world.hello("t2", 0)
    world.hello("t3", 2)
    assert (world.state.version, world.state.counts.trained) == (2, 12)
    assert sorted(world.state.rows) == [0, 1]
    with pytest.raises(Refusal) as caught:
        world.hello("t4", 5)
    assert caught.value.error == "no-state"
    world.hello("t5", 2)


def test_hello_refuses_lost_checkpoints(world):
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
    assert "a checkpoint of version 3 was committed" in str(caught.value)
    assert world.state.encode() == before
    world.hello("t2", 2)
    check_consistency(world)


def test_hello_at_version_0_repeats_rollouts(world):
    for _ in range(2):
        train(world)
    acknowledged, batch = world.state.counts.acknowledged, world.plan("t", 0).lease_ids
    world.hello("t2", 0)
    assert (world.state.counts.acknowledged, world.state.counts.trained) == (acknowledged, 0)
    assert world.plan("t2", 0).lease_ids == batch


def test_finish_requires_checkpoint_of_last_version():
    world = ready(World(make_settings(max_steps=2, evaluation_every=100)))
    train(world)
    world.checkpoint("t", [0, 1])
    train(world)
    world.checkpoint("t", [0, 1, 2])
    world.hello("t2", 1)  # it could not read the newest
    assert world.state.checkpoint == build_status(world.core).checkpoint_version == 1
    world.report("t2", 1)
    if world.next("t2").action is NextAction.PUBLISH:
        world.publish("t2")
    world.serve(world.member, 2)
    assert world.next("t2").action is NextAction.FINISH
    assert build_status(world.core).phase is Phase.FINISHING
    world.checkpoint("t2", [1, 2])
    assert build_status(world.core).phase is Phase.FINISHED
    world.hello("t3", 2)  # restarted by mistake: it has its checkpoint, and nothing more to write
    assert world.next("t3").action is NextAction.FINISH
    assert build_status(world.core).phase is Phase.FINISHED


def test_checkpoint_failures_accumulate_over_incarnations(world):
    train(world)
    world.serve(world.member, 1)
    world.report("t", 1, checkpoint_failures=2.0)
    assert world.state.rows[1]["checkpoint_failures"] == 2
    world.hello("t2", 1)
    world.report("t2", 1, checkpoint_failures=1.0)
    world.publish("t2")
    world.serve(world.member, 2)
    world.report("t2", 2, checkpoint_failures=1.0)
    assert build_status(world.core).checkpoint_failures == 3
    world.acknowledge()
    world.crash(0)
    assert build_status(world.core).checkpoint_failures == 3


def test_grading_errors_are_counted_and_logged_once(world, caplog):
    for lease in world.lease(world.member, 0, 3):
        group = make_group(lease)
        verdicts = wire.Verdicts(scores=[0.0, 1.0], errors={0: "timeout after 10 s"})
        group = msgspec.structs.replace(group, verdicts=verdicts)
        assert world.push(world.member, group) is PushResult.ACCEPTED
    assert build_status(world.core).grading_errors == 3
    assert build_status(world.core).counts.ungraded == 3
    # One verdict is left in each group: it says nothing, and the step trains nothing.
    assert [(g.filtered, g.ungraded) for g in world.plan("t", 0).groups] == [(True, [0])] * 3
    assert world.report("t", 0)["grading_errors"] == 3
    (message,) = [m for m in caplog.messages if "timeout after 10 s" in m]
    assert "train slot 0, " in message
    assert "first on completions[0]: timeout after 10 s" in message


def test_rows_are_kept_until_checkpoint(world):
    train(world)
    train(world)
    world.checkpoint("t", [2])
    assert world.state.rows == {}
    assert build_status(world.core).last_step_stats["step"] == 1


def test_step_report_refuses_non_finite_and_wrong_step(world):
    world.serve(world.member, 0, 3)
    with pytest.raises(Refusal, match=r"stats\.loss is nan"):
        world.report("t", 0, loss=float("nan"))
    with pytest.raises(Refusal, match="the trainer reported step 1; expected 0"):
        world.report("t", 1)
    assert world.report("t", 0) is not None
    assert world.report("t", 0) is None


def test_supervised_tokens_count_once_and_seconds_each_time():
    """A trainer that returns to a checkpoint reports absolute tokens again, and its own seconds from 0."""
    world = World(make_settings(max_compute_tokens=231))

    def report(incarnation, steps, tokens, seconds):
        message = wire.SupervisedReport(incarnation=incarnation, steps=steps, tokens=tokens, seconds=seconds)
        return world.trainer_requests.supervised(message, world.now).stop_reason

    world.hello("a")
    assert report("a", 10, 100, 3.0) == ""
    report("a", 10, 100, 3.0)  # its answer was lost
    report("a", 20, 200, 5.0)
    world.register("g")
    assert build_status(world.core).waiting_for == "the end of mid-training, which has done 20 steps"
    world.acknowledge()
    world.crash(0)
    world.hello("b")
    report("b", 15, 150, 2.0)
    assert report("b", 20, 200, 4.0) == ""
    assert (world.state.supervised_steps, world.state.supervised_tokens) == (20, 200)
    usage = world.state.usage
    assert (usage.wall_seconds, usage.device_seconds) == (9.0, 18.0)  # of two ranks
    assert build_status(world.core).compute_tokens == 200.0
    assert report("b", 23, 231, 4.0) == "maxComputeTokens"
    with pytest.raises(Refusal, match="newer trainer"):
        report("a", 20, 200, 5.0)


def test_compute_budget_counts_rl_tokens_by_their_cost(world):
    """A step of 24 completion tokens costs 32."""
    world.core.settings = replace(world.core.settings, max_compute_tokens=64)
    train(world)
    assert (world.core.compute_tokens, world.core.end_reason) == (32, "")
    train(world)
    assert (world.core.compute_tokens, world.core.end_reason) == (64, "maxComputeTokens")


def test_compute_before_a_penalty_is_added_keeps_its_cost():
    """A step of 24 completion tokens costs 32, and 40 with a reference that scores them, also when it is trained again."""
    world = World(make_settings(max_compute_tokens=105))
    world.member = world.register("g")
    world.hello("t")
    world.publish("t")
    world.beat(world.member, 0)
    train(world)
    world.acknowledge()
    for reference, incarnation, expected in ((True, "b", 72), (False, "c", 104)):
        world.acknowledge()
        world.change(reference=reference)
        version = world.state.version
        world.member = world.register("g", version=version)
        world.hello(incarnation, version)
        world.publish(incarnation)
        world.beat(world.member, version)
        train(world, incarnation)
        assert (world.core.compute_tokens, world.core.end_reason) == (expected, "")
    world.acknowledge()
    world.crash(0)
    world.hello("d", 1)
    assert world.core.compute_tokens == 32


def test_skipped_step_consumes_rollouts(world):
    """It is a step like others for versions, budget and evaluation; its rollouts are in a pile of their own."""
    world.serve(world.member, 0)
    trained = world.state.counts.queued
    tokens = world.state.lineage.trained_tokens
    row = world.report("t", 0, skipped="the loss is nan", grad_norm=1.0, sampled_kl=9.0, sampled_tokens=5.0)
    record = next(record for record, _ in world.core.outbox if isinstance(record, r.StepSkipped))
    assert (record.slots, record.reason) == ([0, 1, 2], "the loss is nan")
    status = build_status(world.core)
    assert (status.step, status.skipped_steps, status.last_skip_reason) == (1, 1, "the loss is nan")
    assert (status.counts.trained, status.counts.skipped) == (0, 6)
    assert status.counts.queued == trained - 6
    assert (row["skipped"], row["trained_tokens"], row["completion_tokens"] > 0) == (1, 0, True)
    assert world.state.lineage.trained_tokens == tokens
    assert world.state.lineage.work_tokens == row["completion_tokens"]
    assert status.mismatch == [], "what exploded would hide every measurement after it"
    check_consistency(world)


def test_hello_reports_consecutive_skipped_steps(world):
    train(world)
    world.checkpoint("t", [1])
    for step in (1, 2):
        world.serve(world.member, step)
        world.report("t", step, skipped="the loss is nan")
        world.publish("t")
    world.acknowledge()
    world.crash(0)
    world.hello("t2", 1)
    assert world.hello("t3", 3).consecutive_skipped_steps == 2, "from a checkpoint ahead of the one before"
    assert world.state.counts.skipped == 12
    assert world.hello("t4", 1).consecutive_skipped_steps == 0
    assert (world.state.counts.skipped, world.state.counts.queued) == (0, 18)
    assert build_status(world.core).skipped_steps == 2, "that they were skipped stays known"
    world.report("t4", 1)
    assert (world.state.counts.trained, world.state.counts.skipped) == (12, 0), "this time it was applied"
    check_consistency(world)


def test_earlier_attempt_is_refused_whatever_it_sends(world):
    """Its node was lost, and it goes on when a later attempt is registered; the number survives a restart of the coordinator."""
    first, second = "1795000000.1-aa", "1795000000.10-bb"
    world.hello(first)
    world.hello(second)
    world.acknowledge()
    for _ in range(2):
        calls = [
            lambda: world.hello(first),
            lambda: world.hello("1794999999.99-cc"),  # of an earlier run of the same name
            lambda: world.next(first),
            lambda: world.report(first, 0),
            lambda: world.begin_publish(first),
            lambda: world.commit_publish(first, []),
            lambda: world.checkpoint(first, [0]),
        ]
        for call in calls:
            with pytest.raises(Refusal) as caught:
                call()
            assert caught.value.error == "superseded"
        assert world.state.incarnation == second
        world.crash(0)
    world.hello(second)
    world.hello("1795000000.10-dd")
    world.hello("without-a-number")
    world.hello(first)
