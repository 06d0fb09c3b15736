"""Decisions about leases: who gets which slot, and which groups count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_client import make_group
from coordinator_world import (
    TRAIN_PROMPTS,
    JournalWorld,
    World,
    check_consistency,
    make_settings,
    ready,
    train,
)

from scalerl_api import wire
from scalerl_api.wire import NextAction, PushResult, Split
from scalerl_coordinator import slots
from scalerl_coordinator.core import Refusal
from scalerl_coordinator.journal import JournalCounters
from scalerl_coordinator.membership import UnknownMember
from scalerl_coordinator.metrics import Metrics
from scalerl_coordinator.run_status import build_status
from scalerl_coordinator.sampler_interface import SeededEpochs
from scalerl_coordinator.shards import fill_shard


def test_lease_requires_weights_and_bounds_staleness():
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


def test_lease_lost_is_reissued_first_with_its_prompt(world):
    first = world.lease(world.member, 0, 4)
    world.generator_requests.release(
        wire.Release(member_id=world.member, lease_ids=[first[2].lease_id, first[1].lease_id], reason="full"),
        world.now,
    )
    again = world.lease(world.member, 0, 3)
    assert [lease.slot for lease in again] == [1, 2, 4]
    for before, after in zip(first[1:3], again, strict=False):
        assert before.lease_id != after.lease_id
        assert before.prompt == after.prompt


def test_lease_expiry_drops_and_counts_late_groups(world):
    lease = world.lease(world.member, 0, 1)[0]
    world.pass_time(99, {world.member: 0})
    assert world.state.leases
    world.pass_time(2, {world.member: 0})
    assert not world.state.leases
    assert world.state.counts.expired_leases == 1
    other = world.register("h")
    again = world.lease(other, 0, 1)[0]
    assert again.slot == lease.slot
    assert world.push(world.member, make_group(lease)) is PushResult.LATE
    assert world.state.counts.late == 2
    assert world.push(other, make_group(again)) is PushResult.ACCEPTED


def test_lease_progress_extends_deadline(world):
    growing, stuck = world.lease(world.member, 0, 2)
    tokens = 0
    for _ in range(5):
        world.pass_time(60, {world.member: 0})
        tokens += 7
        world.beat(world.member, 0, progress={growing.lease_id: tokens, stuck.lease_id: 3})
    # Repeated progress is no progress, nor is another member's report.
    assert list(world.state.leases) == [growing.lease_id]
    other = world.register("h")
    world.beat(other, 0, progress={growing.lease_id: 1000})
    world.pass_time(101, {world.member: 0})
    assert world.state.leases == {}
    counts = build_status(world.core).counts
    assert (counts.expired_leases, counts.timed_out_leases) == (2, 2)
    world.lease(world.member, 0, 1)
    world.pass_time(10)  # silent
    counts = build_status(world.core).counts
    assert (counts.expired_leases, counts.timed_out_leases) == (3, 2)


def test_push_accepts_late_group_of_unissued_slot(world):
    lease = world.lease(world.member, 0, 1)[0]
    world.pass_time(101, {world.member: 0})
    assert world.state.open_slots == [0, 1, 2, 3, 4, 5]
    assert world.push(world.member, make_group(lease)) is PushResult.ACCEPTED
    assert world.state.open_slots == [1, 2, 3, 4, 5]
    assert world.state.counts.acknowledged == 2
    assert world.push(world.member, make_group(lease)) is PushResult.DUPLICATE
    assert world.state.counts.duplicate == 2
    check_consistency(world)


@pytest.mark.parametrize("how", ["silent", "unhealthy", "replaced", "failed"])
def test_lost_member_loses_its_leases(world, how):
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


def test_register_keeps_held_leases(world):
    kept, dropped = world.lease(world.member, 0, 2)
    world.acknowledge()
    world.crash(0)
    world.core.membership.members.clear()
    member = world.register("g", held=[kept.lease_id])
    assert list(world.state.leases) == [kept.lease_id]
    assert world.push(member, make_group(kept)) is PushResult.ACCEPTED
    assert world.state.open_slots == [dropped.slot, 2, 3, 4, 5]


def test_crash_keeps_leases_for_member_timeout(world):
    world.lease(world.member, 0, 2)
    world.acknowledge()
    world.crash(0)
    assert len(world.state.leases) == 2
    world.pass_time(8)
    assert len(world.state.leases) == 2
    world.pass_time(2)
    assert world.state.leases == {}
    assert world.state.open_slots == [0, 1, 2, 3, 4, 5]


def test_heartbeat_detects_lost_lease_answer(world):
    lost, held = world.lease(world.member, 0, 2)
    world.beat(world.member, 0, held_leases=[held.lease_id])
    assert len(world.state.leases) == 2  # this heartbeat may have been sent before
    world.pass_time(3, {world.member: 0})
    assert len(world.state.leases) == 2  # these say nothing about leases
    world.pass_time(2, {world.member: 0})
    world.beat(world.member, 0, held_leases=[held.lease_id])
    assert list(world.state.leases) == [held.lease_id]
    assert world.state.open_slots == [lost.slot, 2, 3, 4, 5]


def test_on_policy_slot_waits_for_its_weights(monkeypatch):
    """Deadlock-free: step 2 trains as soon as its fresh slot is generated by version 2; staleness stays within k."""
    monkeypatch.setattr(slots, "ON_POLICY_EVERY", 1)
    monkeypatch.setattr(slots, "_MIN_ON_POLICY", 1)
    world = ready(World(make_settings(max_staleness_steps=2, evaluation_every=100)))
    prompts = {slot: SeededEpochs(TRAIN_PROMPTS, 11).choose(slot) for slot in range(30)}
    leases = world.serve(world.member, 0)
    assert [lease.slot for lease in leases] == [0, 1, 2, 3, 4, 5, 7, 8]
    assert world.state.open_slots == [6]
    world.acknowledge()
    world.crash(0)  # a slot that was passed over is known after a restart
    world.member = world.register("g", version=0)
    for version in range(8):
        if version and version % 2 == 0:
            assert world.state.filled[version] == 2
        leases = world.serve(world.member, version)
        if version and version % 2 == 0:
            fresh = leases[0]
            assert (fresh.slot, fresh.policy_version) == (3 * version, version)
            assert fresh.prompt.index == prompts[3 * version]
        check_consistency(world)
        assert world.next("t").action is NextAction.TRAIN
        world.report("t", version)
        world.publish("t")
    assert world.state.lineage.staleness_max <= 2


def test_on_policy_slot_excludes_versions_of_lost_lineage(monkeypatch):
    """A member keeps version 3 of the lost lineage while another version 3 is trained."""
    monkeypatch.setattr(slots, "ON_POLICY_EVERY", 1)
    monkeypatch.setattr(slots, "_MIN_ON_POLICY", 1)
    world = ready(World(make_settings(evaluation_every=100)))
    train(world)
    assert not world.plan("t", 0).ambiguous
    world.checkpoint("t", [1])
    for _ in range(2):
        world.beat(world.member, world.state.version)
        train(world)
    world.beat(world.member, 3)
    assert world.state.open_slots == [9]
    world.hello("t2", 1)
    # Slots do not wait for ambiguous versions; the ones after them do.
    (lease,) = world.serve(world.register("h", version=2), 2, 1)
    assert (lease.slot, lease.lost_version) == (9, 3)
    for version in range(1, 6):
        world.publish("t2")
        world.beat(world.member, max(3, version))
        leases = world.serve(world.member, max(3, version))
        assert world.next("t2").action is NextAction.TRAIN
        plan = world.plan("t2", version)
        assert plan.ambiguous == (version <= 3)
        assert fill_shard(replace(plan, items=[]), {}).ambiguous == plan.ambiguous
        world.report("t2", version)
        check_consistency(world)
        assert version > 3 or 12 not in {lease.slot for lease in leases}


def test_push_drops_stale_group_and_reissues_slot():
    world = ready(World(make_settings(max_staleness_steps=0, evaluation_every=100)))
    train(world)
    leases = world.lease(world.member, 1)
    assert [lease.slot for lease in leases] == [3, 4, 5]
    assert world.push(world.member, make_group(leases[0], version=0)) is PushResult.STALE
    assert world.state.counts.stale == 2
    assert world.state.open_slots == [3]


def test_retries_back_off_and_show_in_status(world):
    for _ in range(5):
        world.pass_time(20, {world.member: 0})
        lease = world.lease(world.member, 0, 1)[0]
        assert lease.slot == 0
        release(world, world.member, lease, wire.ReleaseCause.UNSERVED)
    assert world.lease(world.member, 0, 1)[0].slot == 1
    assert world.state.counts.given_up == 0
    assert "slot 0, which failed 5 times" in build_status(world.core).waiting_for


def release(world: World, member: str, lease: wire.Lease, cause: wire.ReleaseCause) -> None:
    message = wire.Release(member_id=member, lease_ids=[lease.lease_id], reason="why", cause=cause)
    world.generator_requests.release(message, world.now)


def proven(world: World, name: str) -> str:
    """A generator that holds version 0 and has served a group."""
    member = world.register(name)
    world.beat(member, 0)
    world.serve(member, 0, 1)
    return member


def test_slot_failed_by_two_members_is_given_up(world, caplog):
    proven(world, "g")
    world.member = world.core.membership.named("g").member_id
    other = proven(world, "h")
    lease = world.lease(world.member, 0, 1)[0]
    assert lease.slot == 2
    release(world, world.member, lease, wire.ReleaseCause.FAILED)
    assert world.lease(world.member, 0, 1)[0].slot == 3  # somebody else should try slot 2
    again = world.lease(other, 0, 1)[0]
    assert again.slot == 2
    release(world, other, again, wire.ReleaseCause.FAILED)
    assert world.state.closed(0)
    counts = build_status(world.core).counts
    assert (counts.given_up, counts.too_long, counts.acknowledged) == (2, 0, 4)
    assert any("gave up slot 2" in m and "failed 2 times" in m for m in caplog.messages)
    assert world.core.closed_slots == {"": 2, "failed": 1}
    assert world.next("t").action is NextAction.TRAIN
    plan = world.plan("t", 0)
    assert [(g.slot, len(g.scores), g.filtered) for g in plan.groups] == [
        (0, 2, False),
        (1, 2, False),
        (2, 0, True),
    ]
    row = world.report("t", 0)
    assert (row["filtered_groups"], row["given_up_groups"], row["rollouts"]) == (1, 1, 4)
    counts = build_status(world.core).counts
    assert counts.trained + counts.filtered + counts.given_up == 3 * 2
    assert world.push(other, make_group(again)) is PushResult.LATE
    check_consistency(world)
    world.acknowledge()
    before = world.state.encode()
    assert world.replay().encode() == before


def test_given_up_slots_are_counted(world):
    figures = Metrics(
        lambda: build_status(world.core),
        JournalCounters(),
        refusing=lambda: False,
        staleness_bound=1,
        closed_slots=world.core.closed_slots,
        partial_bytes=lambda: 0,
    )
    release(world, world.member, world.lease(world.member, 0, 1)[0], wire.ReleaseCause.TOO_LONG)
    world.serve(world.member, 0, 1)
    assert {
        'scalerl_coordinator_given_up_slots_total{why="failed"} 0.0',
        'scalerl_coordinator_given_up_slots_total{why="too_long"} 1.0',
        "scalerl_coordinator_closed_slots_total 2.0",
    } <= set(figures.text().decode().splitlines())


def test_single_generator_gives_up_slot_after_five_failures(world):
    for attempt in range(5):
        world.pass_time(20, {world.member: 0})
        lease = world.lease(world.member, 0, 1)[0]
        assert lease.slot == 0, attempt
        if attempt % 2:
            assert world.push(world.member, make_group(lease, logprob=1.0)) is PushResult.INVALID
        else:
            release(world, world.member, lease, wire.ReleaseCause.FAILED)
    assert (world.state.counts.given_up, world.state.counts.invalid) == (2, 4)
    assert world.state.open_slots == [1, 2, 3, 4, 5]
    check_consistency(world)


def test_slot_is_kept_after_failures_of_unproven_members():
    world = World(make_settings(evaluation_every=100))
    world.hello("t")
    members = [world.register(name) for name in ("g", "h")]
    world.publish("t")
    for member in members:
        world.beat(member, 0)
    held_out, *_ = world.lease(members[0], 0, 1)
    for attempt in range(4):
        release(world, members[attempt % 2], held_out, wire.ReleaseCause.FAILED)
        assert world.state.counts.held_out_given_up == 0
        world.pass_time(20, dict.fromkeys(members, 0))
        leases = world.lease(members[(attempt + 1) % 2], 0)
        held_out = next(lease for lease in leases if lease.slot == held_out.slot)
    release(world, members[0], held_out, wire.ReleaseCause.FAILED)
    assert world.state.counts.held_out_given_up == 2


def test_slot_failed_by_new_member_goes_to_proven_one(world):
    proven(world, "g")
    world.member = world.core.membership.named("g").member_id
    slots = set()
    for broken in [world.register(f"broken-{n}", version=0) for n in range(6)]:
        for lease in world.lease(broken, 0):
            slots.add(lease.slot)
            release(world, broken, lease, wire.ReleaseCause.FAILED)
        world.pass_time(60, {m.member_id: 0 for m in world.core.membership.members.values()})
        assert world.lease(broken, 0) == []
    assert max(s.failures for s in world.core.book.retries.values()) == 6
    assert world.state.counts.given_up == 0
    assert slots <= {lease.slot for lease in world.serve(world.member, 0)}
    check_consistency(world)


def test_slot_failed_by_proven_member_is_not_left_to_unproven_one(world):
    proven(world, "g")
    world.member = world.core.membership.named("g").member_id
    broken = world.register("broken", version=0)
    slot = world.lease(broken, 0, 1)[0]
    release(world, broken, slot, wire.ReleaseCause.FAILED)
    for attempt in range(5):
        assert world.state.counts.given_up == 0, attempt
        lease = world.lease(world.member, 0, 1)[0]
        assert lease.slot == slot.slot
        release(world, world.member, lease, wire.ReleaseCause.FAILED)
        world.pass_time(60, {world.member: 0, broken: 0})
        assert slot.slot not in {other.slot for other in world.lease(broken, 0)}
    assert world.state.counts.given_up == 2


def test_slot_without_progress_is_given_up(world):
    for _ in range(5):
        assert world.lease(world.member, 0, 1)[0].slot == 0
        world.pass_time(110, {world.member: 0})
    assert world.state.counts.given_up == 2
    assert world.state.counts.expired_leases == 5


def test_too_long_prompt_is_given_up_at_once(world):
    lease = world.lease(world.member, 0, 1)[0]
    release(world, world.member, lease, wire.ReleaseCause.TOO_LONG)
    counts = build_status(world.core).counts
    assert (counts.given_up, counts.too_long) == (2, 2)
    check_consistency(world)
    copy = world.state.detached()
    assert (copy.counts.given_up, copy.counts.too_long, copy.open_slots) == (0, 0, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("keep", [0, 1], ids=["replayed", "from-a-snapshot"])
def test_given_up_slot_survives_restart_without_tokens(tmp_path, keep):
    world = ready(JournalWorld(make_settings(), tmp_path))
    good, bad = world.lease(world.member, 0, 2)
    assert world.push(world.member, make_group(good)) is PushResult.ACCEPTED
    release(world, world.member, bad, wire.ReleaseCause.TOO_LONG)
    world.acknowledge()
    world.crash(keep)
    assert (world.state.counts.given_up, sorted(world.state.groups)) == (2, [good.slot, bad.slot])
    world.close()
    world.loop.close()


def test_step_with_all_slots_given_up_is_trained(world):
    for lease in world.lease(world.member, 0, 3):
        release(world, world.member, lease, wire.ReleaseCause.TOO_LONG)
    assert world.next("t").action is NextAction.TRAIN
    plan = world.plan("t", 0)
    assert (plan.lease_ids, plan.items) == (["", "", ""], [])
    row = world.report("t", 0)
    assert "reward" not in row
    assert (row["given_up_groups"], row["mean_completion_tokens"]) == (3, 0)


def test_held_out_too_long_prompt_scores_0():
    world = World(make_settings(evaluation_every=1))
    world.hello("t")
    world.member = world.register("g")
    for version in (0, 1):
        if version:
            world.serve(world.member, 0)
            world.report("t", 0)
        world.publish("t")
        world.beat(world.member, version)
        good, bad = world.lease(world.member, version, 2)
        assert world.push(world.member, make_group(good, scores=[1.0, 1.0])) is PushResult.ACCEPTED
        release(world, world.member, bad, wire.ReleaseCause.TOO_LONG)
    assert [(p.prompts, p.samples, p.reward, p.given_up_prompts) for p in world.state.points] == [
        (2, 4, 0.5, 1)
    ] * 2
    assert [p.mean_tokens for p in world.state.points] == [4.0, 4.0]
    assert build_status(world.core).counts.held_out_given_up == 4


def test_register_refuses_another_task(world):
    request = wire.Register(name="x", control_url="u", task_digest="other")
    with pytest.raises(Refusal, match="same version of the task library"):
        world.generator_requests.register(request, "x/1", world.now)


def test_register_refuses_other_code_of_the_verifier():
    """A generator that starts after an edit of the file would score with another reward than the curve's."""
    world = World(make_settings(grading=("a", "")))
    for grading in (["b", ""], ["", ""], []):
        request = wire.Register(name="x", control_url="u", task_digest="train", grading=grading)
        with pytest.raises(Refusal, match=r"other code of the verifier"):
            world.generator_requests.register(request, "x/1", world.now)
    request = wire.Register(name="x", control_url="u", task_digest="train", grading=["a", ""])
    assert world.generator_requests.register(request, "x/1", world.now).member_id


def test_code_of_the_verifier_is_part_of_what_a_point_measures():
    plain, one, other = (make_settings(grading=grading).identity for grading in ((), ("a",), ("b",)))
    assert len({plain.measured(0), one.measured(0), other.measured(0)}) == 3
    assert one.fixed == other.fixed == plain.fixed  # prompts keep their meaning
    assert make_settings(grading=("", "b")).identity.measured(0) == plain.measured(0)


def test_status_names_the_reward_service_that_generators_wait_for(world):
    problem = "the reward service http://rewards/score answered with status 500"
    member = world.register("g")
    world.beat(member, 0, reward_problem=problem)
    status = build_status(world.core)
    assert status.reward_problem == f"g: {problem}"
    world.publish("t")
    world.beat(member, 0, reward_problem=problem)
    assert build_status(world.core).waiting_for == f"the reward service: g: {problem}"
    world.beat(member, 0, environment_problem="the environment game.py:Game failed")
    assert build_status(world.core).waiting_for == "the environment: g: the environment game.py:Game failed"
    world.beat(member, 0)
    status = build_status(world.core)
    assert (status.reward_problem, status.environment_problem) == ("", "")
