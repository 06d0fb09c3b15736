"""For an edit of every field: a coordinator restarted on an existing journal uses the new value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coordinator_client import make_group
from coordinator_world import World, check_consistency
from spec_edits import Edited, edits, entry_edits

from scalerl_api.edits import Effect
from scalerl_api.spec import ScaleRLRun
from scalerl_api.wire import NextAction, PushResult, Split
from scalerl_coordinator.settings import Settings

OF_SETS = [edited for edited in entry_edits(refused=False) if edited.path.startswith("evaluation.sets.")]
TAKEN = [*edits(refused=False), *OF_SETS]
OWN_PODS = ("coordinator.podTemplate.", "images.", "trackers.", "evaluation.forecastSet")
"""It restarts for these, and its settings have nothing of them (trackers: test_coordinator_trackers.py), or nothing new
without several sets (test_coordinator_evaluation_sets.py)."""
READ = [
    edited
    for edited in TAKEN
    if edited.edit.effect in (Effect.COORDINATOR, Effect.GENERATORS) and not edited.path.startswith(OWN_PODS)
]


@pytest.fixture(autouse=True)
def schedule_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``schedule.plugin`` names, installed."""
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[scalerl.schedules]\nother = other_schedule:made\n")
    code = "from scalerl_coordinator.scheduling import LeastLoaded\ndef made(size=0):\n    return LeastLoaded()\n"
    (tmp_path / "other_schedule.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


def settings(run: ScaleRLRun) -> Settings:
    sets = [(one.name, 3) for one in run.spec.evaluation.sets or () if one.task is not None]
    return Settings.of_run(run, train_digest="train", held_out=[("held-out", 3)], sets=sets)


def before(edited: Edited) -> Settings:
    return settings(ScaleRLRun.model_validate(edited.before))


def under_way(edited: Edited) -> World:
    """Step 0 is trained, a group of step 1 is missing, an evaluation of version 0 is half done on each set."""
    world = World(before(edited))
    world.member = world.register("g")
    world.hello("t")
    world.next("t")
    world.publish("t")
    world.beat(world.member, 0)
    leases = world.lease(world.member, 0)
    assert {lease.split for lease in leases} == set(Split)
    for lease in leases:
        if not (lease.slot == 2 and lease.split is Split.HELD_OUT) and lease.slot != 7:
            world.push(world.member, make_group(lease, version=0))
    assert world.next("t").action is NextAction.TRAIN
    world.report("t", 0)
    world.acknowledge()
    return world


@pytest.mark.parametrize("edited", TAKEN, ids=str)
def test_edit_resumes_from_journal(edited: Edited) -> None:
    world = under_way(edited)
    acknowledged = world.state.counts.acknowledged
    world.settings = settings(edited.run)
    world.changed = True
    world.crash(0)
    check_consistency(world)
    state, identity = world.state, world.settings.identity
    assert state.identity == identity
    assert state.counts.acknowledged + state.counts.stale == acknowledged
    world.member = world.register("g", version=0)
    world.hello("t2", 1)
    for step in range(1, 4):
        serve(world)
        world.publish("t2")
        world.beat(world.member, step)
        serve(world)
        assert world.next("t2").action is NextAction.TRAIN
        plan = world.plan("t2", step)
        if step == 3:  # made with the new settings alone
            assert len(plan.groups) == identity.prompts_per_step
            assert {len(g.scores) for g in plan.groups} == {identity.completions_per_prompt}
        world.report("t2", step)
        check_consistency(world)


def serve(world: World) -> None:
    """All that can be generated, by the numbers of now."""
    identity, held = world.settings.identity, world.core.membership.members[world.member].version
    for lease in world.lease(world.member, held):
        training = lease.split is Split.TRAIN
        wanted: Any = (
            (identity.completions_per_prompt, world.settings.temperature)
            if training
            else (identity.evaluation_set(lease.prompt.task).samples, identity.evaluation_temperature)
        )
        assert (lease.completions, lease.temperature) == wanted
        assert lease.max_tokens == identity.max_completion_tokens
        group = make_group(lease, version=held if training else lease.policy_version)
        assert world.push(world.member, group) is PushResult.ACCEPTED


@pytest.mark.parametrize("edited", READ, ids=str)
def test_edit_is_read_after_restart(edited: Edited) -> None:
    assert settings(edited.run) != before(edited)
