"""This code reads and continues what an earlier release wrote.

``written_by_an_earlier_release`` holds bytes of commit 01aee93's own code: a run of
:func:`coordinator_world.make_settings` that has trained four steps, the last of them twice; some groups are filtered,
an evaluation is half done, a lease is open. It is there as a journal, as the same journal cut at 4000 bytes with a
snapshot, and as the snapshot of a checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from coordinator_world import JournalWorld, World, check_consistency, make_settings, train

from scalerl_api.wire import Split
from scalerl_coordinator.accounting import Lineage
from scalerl_coordinator.state import CoordinatorState

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
