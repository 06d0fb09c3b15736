"""The part of the state that survives a crash, or the loss of the volume."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from coordinator_client import make_group
from coordinator_world import World, check_consistency, make_settings, train

from scalerl_api import wire
from scalerl_api.metrics_fields import STEP_FIGURES
from scalerl_api.wire import Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Refusal
from scalerl_coordinator.run_status import build_status
from scalerl_coordinator.state import CoordinatorState


def test_hello_restores_snapshot_of_checkpoint(world):
    train(world)
    ahead = world.state.prompts
    snapshot = world.checkpoint("t", [1])
    points, next_slot = world.state.points, world.state.next_slot
    world.lose_volume()
    with pytest.raises(Refusal) as caught:
        world.hello("t2", 1)
    assert caught.value.error == "no-state"
    with pytest.raises(Refusal, match="the snapshot has version 1, but its checkpoint has 2"):
        world.hello("t2", 2, snapshot)
    with pytest.raises(Refusal) as caught:
        world.hello("t2", 1, b"\xc1garbage")
    assert caught.value.error == "bad-snapshot"
    world.hello("t2", 1, snapshot)
    state = world.state
    assert (state.version, state.points, state.next_slot) == (1, points, next_slot)
    assert state.open_slots == sorted(slot for slot in ahead if slot >= 3)
    assert (state.counts.acknowledged, state.counts.trained, state.counts.queued) == (6, 6, 0)
    check_consistency(world)
    world.member = world.register("g")
    world.publish("t2")
    assert [lease.slot for lease in world.lease(world.member, 1, 2)] == [3, 4]
    # A journal that knows a trainer needs no snapshot, and takes none.
    world.hello("t3", 1, b"\xc1garbage")


def test_fork_counts_its_own_time_and_the_steps_of_both(world):
    """The settings of the fork name the step of its source's checkpoint. Its own checkpoints do not reset the use again."""
    world.pass_time(100, {world.member: 0})
    train(world)
    prompts = world.state.prompts
    snapshot = world.checkpoint("t", [1])
    source = world.state.usage
    assert source.device_seconds == 3 * source.wall_seconds == 300
    world.settings = replace(world.settings, forked_step=1)
    world.lose_volume()
    world.hello("other", 1, snapshot)
    status = build_status(world.core)
    assert (status.step, status.forked_step, len(status.points)) == (1, 1, 1)
    assert (status.inherited_seconds, status.wall_seconds) == (source.wall_seconds, source.wall_seconds)
    assert (status.own_seconds, status.own_device_seconds, status.waiting_seconds) == (0, 0, 0)
    assert [*world.state.prompts.items()] == [(slot, prompt) for slot, prompt in prompts.items() if slot >= 3]
    world.pass_time(7)
    status = build_status(world.core)
    assert (status.own_seconds, status.waiting_seconds) == (0, 7)  # before its own first lease
    world.member = world.register("g")
    world.publish("other")
    world.serve(world.member, 1)
    world.pass_time(50, {world.member: 1})
    own = build_status(world.core)
    assert (own.own_seconds, own.wall_seconds) == (50, source.wall_seconds + 50)
    assert own.own_device_seconds == 50 * 3
    train(world, "other")
    later = world.checkpoint("other", [1, 2])
    world.acknowledge()
    assert world.replay().inherited_seconds == source.wall_seconds
    world.lose_volume()
    world.hello("again", 2, later)
    again = build_status(world.core)
    assert (again.forked_step, again.inherited_seconds, again.own_seconds) == (1, source.wall_seconds, 50)


def test_fork_of_a_fork_counts_from_the_second(world):
    world.pass_time(10, {world.member: 0})
    train(world)
    first = world.checkpoint("t", [1])
    world.settings = replace(world.settings, forked_step=1)
    world.lose_volume()
    world.hello("b", 1, first)
    world.member = world.register("g")
    world.publish("b")
    world.pass_time(20, {world.member: 1})
    train(world, "b")
    second = world.checkpoint("b", [1, 2])
    used = world.state.usage.wall_seconds
    world.settings = replace(world.settings, forked_step=2)
    world.lose_volume()
    world.hello("c", 2, second)
    status = build_status(world.core)
    assert (status.forked_step, status.inherited_seconds, status.own_seconds) == (2, used, 0)


@pytest.mark.parametrize("reports", ["before the trainer", "after the trainer", "once it is trained again"])
def test_versions_published_after_the_snapshot_are_ambiguous(world, reports):
    """A generator keeps version 2 of the lost lineage while another version 2 is trained."""
    train(world)
    snapshot = world.checkpoint("t", [1])
    train(world)
    assert world.state.published == 2
    world.lose_volume()
    if reports == "before the trainer":
        world.register("g", version=2)
    world.hello("t2", 1, snapshot)
    if reports == "after the trainer":
        world.register("g", version=2)
    other = world.register("h", version=1)
    world.serve(other, 1)
    world.report("t2", 1)
    if reports == "once it is trained again":
        assert world.state.lost == -1
        world.register("g", version=2)
    assert world.state.lost == 2
    world.publish("t2")
    assert world.plan("t2", 1).ambiguous
    world.serve(other, 2)
    assert world.plan("t2", 2).ambiguous
    assert {lease.lost_version for lease in world.lease(other, 2)} <= {2}
    world.report("t2", 2)
    world.publish("t2")
    world.serve(other, 3)
    assert not world.plan("t2", 3).ambiguous
    world.acknowledge()
    assert world.replay().lost == 2


def test_lost_weights_reported_after_the_next_publish_are_ambiguous(world):
    """A generator that was unreachable comes back once another version 2 is published; those that got that one do not count."""
    train(world)
    snapshot = world.checkpoint("t", [1])
    world.lose_volume()
    world.hello("t2", 1, snapshot)
    other = world.register("h", version=1)
    world.serve(other, 1)
    world.report("t2", 1)
    world.publish("t2")
    world.register("h", version=2)
    assert world.state.lost == -1
    world.register("g", version=2)
    assert world.state.lost == 2


def test_lost_weights_are_marked_again_after_a_refused_write(world):
    train(world)
    snapshot = world.checkpoint("t", [1])
    world.lose_volume()
    world.hello("t2", 1, snapshot)
    other = world.register("h", version=1)
    world.serve(other, 1)
    world.report("t2", 1)  # now 2 is a version of the present lineage, too
    world.acknowledge()
    member = world.register("g", version=2)
    assert world.state.lost == 2
    world.core.rebase(world.replay(), world.now)  # the disk refused the mark
    assert world.state.lost == -1
    world.beat(member, 2)
    assert world.state.lost == 2


def test_generator_without_later_weights_leaves_no_version_ambiguous(world):
    train(world)
    snapshot = world.checkpoint("t", [1])
    world.lose_volume()
    world.hello("t2", 1, snapshot)
    other = world.register("g", version=1)
    world.register("h", version=-1)
    world.serve(other, 1)
    world.report("t2", 1)
    world.publish("t2")
    assert world.state.lost == -1
    assert not world.plan("t2", 1).ambiguous


def test_late_registration_leaves_no_version_ambiguous(world):
    train(world)
    snapshot = world.checkpoint("t", [1])
    world.lose_volume()
    world.hello("t2", 1, snapshot)
    other = world.register("g", version=1)
    for version in (1, 2):
        world.serve(other, version)
        world.report("t2", version)
        world.publish("t2")
    world.acknowledge()
    world.crash(0)
    world.register("g", version=3)
    assert (world.state.restored, world.state.lost) == (1, -1)


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([], -1),
        ([(0, 0.2, False), (1, 0.5, False), (2, 0.4, False)], 1),
        ([(0, 0.2, False), (1, 0.5, True), (2, float("nan"), False)], 0),
        ([(0, 0.2, False), (1, 0.2, False)], 1),
    ],
)
def test_checkpoint_begin_reports_best_version(world, points, best):
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
    assert world.trainer_requests.checkpoint_begin(begin, world.now).best_version == best


def test_snapshot_round_trips_state(world):
    train(world)
    world.lease(world.member, 1, 2)
    assert CoordinatorState.decode(world.state.encode()) == world.state
    world.write()
    assert world.replay() == world.state


@pytest.mark.parametrize("changes", [{"format": 3}, {"format": 5}, {"format": "4"}, {"leases": {"a": 1}}])
def test_snapshot_of_another_format_is_refused(world, changes):
    stored = msgspec.msgpack.decode(world.state.encode()) | changes
    with pytest.raises(msgspec.DecodeError, match="format" if "format" in changes else "leases"):
        CoordinatorState.decode(msgspec.msgpack.encode(stored))


def test_identity_refuses_journal_of_another_run(world):
    world.acknowledge()
    world.settings = make_settings(train_digest="other")
    with pytest.raises(Refusal, match="train_digest was 'train', is 'other'"):
        world.crash(0)


def test_usage_accumulates_over_crashes():
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
    status = build_status(world.core)
    assert (status.wall_seconds, status.device_seconds) == (13.0, 39.0)


def test_journal_blob_is_wire_group():
    """The journal keeps a group's bytes as received: they must stay decodable."""
    lease = wire.Lease(
        lease_id="a-0",
        prompt=wire.PromptRef(0, Split.TRAIN, 0),
        slot=0,
        prompt_id="p",
        completions=1,
        max_tokens=8,
        temperature=1.0,
        remaining_seconds=1.0,
        policy_version=0,
    )
    group = make_group(lease)
    blob = msgspec.msgpack.encode(group)
    assert msgspec.msgpack.decode(blob, type=wire.Group) == group
    stored = msgspec.msgpack.decode(blob, type=r.StoredGroup)
    assert stored.prompt_token_ids == group.prompt_token_ids
    assert [c.token_ids for c in stored.completions] == [c.token_ids for c in group.completions]


def test_figures_of_a_step_are_since_the_step_before() -> None:
    world = World(make_settings())
    member = world.register("g")
    world.hello("t")
    world.publish("t")

    def step(seconds: float, busy: float, generated: int) -> dict[str, float]:
        """A step of this duration; the generator's totals are then ``busy`` and ``generated``."""
        world.serve(member, 0)
        world.now += seconds
        world.beat(member, 0, busy_seconds=busy, generated_tokens=generated)
        row = world.report("t", world.state.version)
        assert row is not None
        return {name: row[name] for name in STEP_FIGURES if name in row}

    found = step(10.0, 4.0, 100), step(5.0, 9.0, 150)
    tokens = [world.state.rows[at]["completion_tokens"] for at in (0, 1)]
    assert found == (
        {
            "step_seconds": 10.0,
            "trainer_bubble_fraction": 0.95,
            "generator_bubble_fraction": 0.6,
            "generated_tokens_per_second": 10.0,
            "consumed_tokens_per_second": tokens[0] / 10,
        },
        {
            "step_seconds": 5.0,
            "trainer_bubble_fraction": 0.9,
            "generator_bubble_fraction": 0.0,
            "generated_tokens_per_second": 10.0,
            "consumed_tokens_per_second": tokens[1] / 5,
        },
    )
    # A report may be lost.
    world.state.usage_at_step = None
    world.publish("t")
    world.beat(member, 2, busy_seconds=9.0, generated_tokens=150)
    world.serve(member, 2)
    assert "step_seconds" not in (world.report("t", 2) or {})
