"""Groups with a teacher's log-probabilities: what is accepted, what the trainer gets, and a teacher that is away."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest
from coordinator_client import make_group, run_text
from coordinator_world import World, make_settings, ready

from scalerl_api import wire
from scalerl_api.load import parse_run
from scalerl_api.spec import BudgetSpec
from scalerl_api.wire import NextAction, PushResult, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.run_status import build_status
from scalerl_coordinator.settings import Settings
from scalerl_coordinator.shards import fill_shard
from scalerl_lifecycle.budget import limit_reached

TEACHER = struct.pack("<4f", -1.0, -2.0, 0.0, -4.0)


def settings_of(recipe: dict[str, object]) -> Settings:
    run = parse_run(run_text(recipe=recipe | {"maxCompletionTokens": 16}), "run.yaml")
    return Settings.of_run(run, train_digest="train", held_out=[("held-out", 2)])


@pytest.fixture
def world() -> World:
    return ready(World(make_settings(teacher=True, zero_variance_filter=False)))


def taught(lease: wire.Lease, logprobs: bytes = TEACHER, **changes: object) -> wire.Group:
    group = make_group(lease, **changes)  # type: ignore[arg-type]
    completions = [msgspec.structs.replace(c, teacher_logprobs=logprobs) for c in group.completions]
    return msgspec.structs.replace(group, completions=completions)


def test_settings_of_a_distillation() -> None:
    distillation = {"teacher": {"url": "http://teacher:8000"}}
    plain, alone = settings_of({}), settings_of({"distillation": distillation})
    assert (plain.teacher, plain.identity.zero_variance_filter) == (False, True)
    assert (alone.teacher, alone.identity.zero_variance_filter) == (True, False)
    tokens = alone.identity.completions_per_prompt * alone.identity.max_completion_tokens
    assert alone.max_group_bytes == plain.max_group_bytes + 4 * tokens


def test_groups_of_equal_scores_reach_the_trainer_with_the_teacher(world: World) -> None:
    groups = {}
    for lease in world.lease(world.member, 0, 3):
        group = taught(lease, scores=[1.0, 1.0])
        assert world.push(world.member, group) is PushResult.ACCEPTED
        groups[lease.lease_id] = r.decode_stored(msgspec.msgpack.encode(group))
    assert world.next("t").action is NextAction.TRAIN  # type: ignore[union-attr]
    plan = world.plan("t", 0)
    assert [group.filtered for group in plan.groups] == [False] * 3
    shard = fill_shard(plan, groups)
    assert [sequence.teacher_logprobs for sequence in shard.sequences] == [TEACHER] * 6


@pytest.mark.parametrize(
    "logprobs",
    [
        b"",
        TEACHER[:12],
        struct.pack("<4f", -1, math.nan, -1, -1),
        struct.pack("<4f", -1, -math.inf, -1, -1),
        struct.pack("<4f", -1, 0.5, -1, -1),
    ],
)
def test_group_with_other_logprobs_of_the_teacher_is_invalid(world: World, logprobs: bytes) -> None:
    (lease,) = world.lease(world.member, 0, 1)
    assert world.push(world.member, taught(lease, logprobs)) is PushResult.INVALID


def test_evaluations_need_no_teacher() -> None:
    world = World(make_settings(teacher=True))
    world.hello("t")
    member = world.register("g")
    world.publish("t")
    held_out = [lease for lease in world.lease(member, 0) if lease.split is Split.HELD_OUT]
    assert held_out
    assert world.push(member, make_group(held_out[0])) is PushResult.ACCEPTED


def test_status_names_the_teacher_that_generators_wait_for(world: World) -> None:
    assert build_status(world.core).teacher_problem == ""
    world.beat(world.member, 0, teacher_problem="http://teacher:8000: refused")
    status = build_status(world.core)
    assert status.teacher_problem == "g: http://teacher:8000: refused"
    assert status.waiting_for == "the teacher: g: http://teacher:8000: refused"
    world.beat(world.member, 0)
    assert build_status(world.core).teacher_problem == ""


def test_run_ends_while_no_teacher_answers(world: World) -> None:
    """A stop waits neither for groups that wait for the teacher, nor for the step that needs them."""
    leases = world.lease(world.member, 0, 3)
    world.push(world.member, taught(leases[0]))
    problem = "http://teacher:8000: refused"
    world.beat(world.member, 0, teacher_problem=problem)
    assert world.next("t") is None
    world.core.stop("the budget is used up", world.now)
    following = world.next("t")
    assert following is not None
    assert following.action is NextAction.FINISH
    status = build_status(world.core)
    assert status.stop_reason == "the budget is used up"
    assert status.phase in (wire.Phase.FINISHING, wire.Phase.FINISHED)


@pytest.mark.parametrize("crashes", [False, True])
def test_max_seconds_ends_a_run_all_of_whose_groups_wait_for_the_teacher(crashes: bool) -> None:
    """For many times a lease's deadline: the run's time counts, and no slot is given up for the teacher."""
    world = ready(World(make_settings(teacher=True, lease_seconds=20.0)))
    budget = BudgetSpec(max_seconds=300)
    waiting = world.lease(world.member, 0)
    held = [lease.lease_id for lease in waiting]
    seconds = 0
    while not (limit := limit_reached(budget, build_status(world.core))):
        seconds += 1
        assert seconds <= 300
        assert world.next("t") is None
        world.beat(
            world.member,
            0,
            teacher_problem="http://teacher:8000: refused",
            held_leases=held,
            generated_leases=held,
            progress=dict.fromkeys(held, seconds),
        )
        world.pass_time(1.0)
        assert world.lease(world.member, 0) == []
        if crashes and seconds == 150:
            world.acknowledge()
            world.crash(0)
            world.member = world.register("g", held=held, version=0)
    assert limit == "maxSeconds"
    assert seconds >= 290
    world.core.stop(limit, world.now)
    finish = world.next("t")
    assert finish is not None
    assert (finish.action, finish.reason) == (NextAction.FINISH, "maxSeconds")
    world.checkpoint("t", [0])
    status = build_status(world.core)
    assert (status.phase, status.stop_reason) == (wire.Phase.FINISHED, "maxSeconds")
    assert (status.counts.leased, status.counts.given_up, status.counts.expired_leases) == (12, 0, 0)
    offered = world.generator_requests.offer(world.member, 1, world.now)
    assert offered is not None
    assert offered.stop
    # The teacher answers after all, to actors that have not read their stop.
    assert {world.push(world.member, taught(lease)) for lease in waiting} == {PushResult.ACCEPTED}
    world.pass_time(60.0, {world.member: 0})
    assert build_status(world.core).wall_seconds == status.wall_seconds
    world.acknowledge()
    assert world.replay() == world.state


def test_stop_evaluates_the_last_version_without_a_teacher(world: World) -> None:
    for lease in world.lease(world.member, 0, 3):
        world.push(world.member, taught(lease))
    assert world.next("t").action is NextAction.TRAIN  # type: ignore[union-attr]
    world.report("t", 0)
    world.core.stop("the budget is used up", world.now)
    world.publish("t")
    world.beat(world.member, 1, teacher_problem="http://teacher:8000: refused")
    assert world.next("t") is None
    assert build_status(world.core).phase is wire.Phase.FINISHING
    evaluation = world.lease(world.member, 1)
    assert {lease.split for lease in evaluation} == {Split.HELD_OUT}
    for lease in evaluation:
        assert world.push(world.member, make_group(lease, version=1)) is PushResult.ACCEPTED
    assert world.next("t").action is NextAction.FINISH  # type: ignore[union-attr]


def test_step_is_trained_again_with_the_same_teacher_after_a_rollback(world: World) -> None:
    stored = {}
    world.checkpoint("t", [0])
    for number, lease in enumerate(world.lease(world.member, 0, 3)):
        group = taught(lease, struct.pack("<4f", *[-1.0 - number] * 4))
        world.push(world.member, group)
        stored[lease.lease_id] = r.decode_stored(msgspec.msgpack.encode(group))
    first = fill_shard(world.plan("t", 0), stored)
    world.report("t", 0)
    world.acknowledge()
    world.crash(0)
    world.hello("t2", 0)
    again = fill_shard(world.plan("t2", 0), stored)
    assert [s.teacher_logprobs for s in again.sequences] == [s.teacher_logprobs for s in first.sequences]
    assert len({s.teacher_logprobs for s in again.sequences}) == 3


def test_refill_with_added_rewards_needs_the_teacher_too() -> None:
    world = ready(World(make_settings(teacher=True, max_tries=3, evaluation_every=1000)))
    (first, *_) = world.lease(world.member, 0, 3)
    assert world.push(world.member, taught(first, scores=[1.0, 1.0])) is PushResult.ACCEPTED
    (again,) = world.lease(world.member, 0, 1)
    assert again.slot == first.slot
    assert world.push(world.member, make_group(again)) is PushResult.INVALID
    (retried,) = world.lease(world.member, 0, 1)
    assert (retried.slot, retried.prompt) == (again.slot, again.prompt)
    assert world.push(world.member, taught(retried)) is PushResult.ACCEPTED
