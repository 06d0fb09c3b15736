"""This code reads and continues what an earlier release wrote.

``written_by_an_earlier_release`` holds bytes of commit 01aee93's own code, of wire version 1: a run of
:func:`coordinator_world.make_settings` that has trained four steps, the last of them twice; some groups are filtered,
an evaluation is half done, a lease is open. It is there as a journal, as the same journal cut at 4000 bytes with a
snapshot, and as the snapshot of a checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from coordinator_world import JournalWorld, World, check_consistency, make_settings, train

from scalerl_api.wire import NextAction, PromptRef, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.accounting import Lineage
from scalerl_coordinator.state import CoordinatorState
from scalerl_coordinator.trainer_requests import fill_shard

WRITTEN = Path(__file__).parent / "written_by_an_earlier_release"
SETTINGS = make_settings(evaluation_temperature=1.0)


def resume(world: World) -> None:
    check_consistency(world)
    line = world.state.lineage
    assert (line.work_tokens, line.trained_tokens, line.consecutive_skipped_steps) == (96, 40, 0)
    world.hello("t3", 4)
    world.member = world.register("g", version=4)
    world.publish("t3")
    world.serve(world.member, 4, 2)
    assert [point.version for point in world.state.points] == [0, 2, 4]
    train(world, "t3")
    world.beat(world.member, 5)
    train(world, "t3")
    check_consistency(world)
    assert world.state.version == 6
    assert world.state.lineage.trained_tokens == 60


@pytest.mark.parametrize("name", ["journal", "journal-with-snapshot"])
def test_journal_of_earlier_release_is_read(name: str, tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / name, tmp_path / "journal")
    world = JournalWorld(SETTINGS, tmp_path / "journal")
    try:
        counts = world.state.counts
        assert (counts.acknowledged, counts.trained, counts.filtered) == (34, 18, 8)
        assert set(world.state.progress_at) == {1, 2, 3}
        assert {lease.split for lease in world.state.leases.values()} == {Split.HELD_OUT}
        resume(world)
    finally:
        world.close()
        world.loop.close()


def test_checkpoint_of_earlier_release_is_read() -> None:
    snapshot = (WRITTEN / "checkpoint").read_bytes()
    assert isinstance(CoordinatorState.decode(snapshot).lineage, Lineage)
    world = World(SETTINGS)
    world.hello("t", 4, snapshot)
    world.acknowledge()
    resume(world)
    world.crash(0)
    check_consistency(world)


# ``written_with_wire_version_4`` is of commit 3ccfdd7's code: prompts are bare indices. The run refills slots and has
# trained four steps, the groups of which are kept from step 2 on; slot 15 is refilled and waits, slot 16 and held-out
# prompt 1 are leased. The checkpoint is of version 2.
WIRE_4 = WRITTEN.with_name("written_with_wire_version_4")
WIRE_4_SETTINGS = make_settings(evaluation_temperature=1.0, max_tries=3)
PROMPTS = {6: 1, 7: 2, 8: 3, 9: 6, 10: 1, 11: 5, 12: 0, 13: 4, 14: 4, 15: 6, 16: 5}


def train_ref(index: int) -> PromptRef:
    return PromptRef(0, Split.TRAIN, index)


def resume_wire_4(world: World) -> None:
    world.hello("t2", world.state.version)
    world.member = world.register("g", version=world.state.version)
    world.publish("t2")
    world.beat(world.member, world.state.version)
    for _ in range(3):
        world.serve(world.member, world.state.version)
        check_consistency(world)
        assert world.next("t2").action is NextAction.TRAIN
        assert world.report("t2", world.state.version) is not None
        world.publish("t2")
        world.beat(world.member, world.state.version)
    world.crash(1)
    check_consistency(world)


@pytest.mark.parametrize("name", ["journal", "journal-with-snapshot"])
def test_journal_of_wire_version_4_is_read(name: str, tmp_path: Path) -> None:
    shutil.copytree(WIRE_4 / name, tmp_path / "journal")
    world = JournalWorld(WIRE_4_SETTINGS, tmp_path / "journal")
    try:
        state = world.state
        assert state.known_identity.tasks == ("main",)
        assert state.prompts == {slot: train_ref(index) for slot, index in PROMPTS.items()}
        assert [(lease.prompt, lease.slot, lease.policy_version) for lease in state.leases.values()] == [
            (PromptRef(0, Split.HELD_OUT, 1), 1, 4),
            (train_ref(5), 16, 4),
        ]
        assert [one.prompt for one in state.tries[15]] == [train_ref(0)]
        history = state.histories[0].as_of(4)
        assert [history.pass_rate(prompt) for prompt in range(7)] == pytest.approx(
            [1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
        )
        # The trainer returns to its checkpoint, and is served the groups of that release.
        plan = world.plan("t", 2)
        groups = [r.decode_stored(blob) for blob in world.journal.blobs.read(plan.lease_ids)]
        shard = fill_shard(plan, dict(zip(plan.lease_ids, groups, strict=True)))
        assert [len(sequence.token_ids) for sequence in shard.sequences] == [16] * 6
        resume_wire_4(world)
    finally:
        world.close()
        world.loop.close()


def test_checkpoint_of_wire_version_4_is_read() -> None:
    world = World(WIRE_4_SETTINGS)
    world.hello("t", 2, (WIRE_4 / "checkpoint").read_bytes())
    world.acknowledge()
    assert world.state.prompts == {slot: train_ref(PROMPTS[slot]) for slot in range(6, 9)}
    resume_wire_4(world)


@pytest.mark.parametrize(
    "state",
    [{"leases": {"a": 1}}, {"leases": {"a": [1]}}, {"prompts": 3}, {"tries": {1: [2]}}, {"history": 1}],
)
def test_snapshot_that_no_release_wrote_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(msgspec.DecodeError):
        CoordinatorState.decode(msgspec.msgpack.encode(state))


def test_held_back_slots_of_earlier_journals_are_read() -> None:
    old = ["issued", "g", [[3, "train", 8, 2, 1]], [[7, 5]], 9]
    assert r.decode(msgspec.msgpack.encode(old)) == r.LeasesIssued(
        "g", [r.Issue(3, train_ref(2), 8, 1)], [(7, train_ref(5))], 9
    )
