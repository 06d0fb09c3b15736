"""Parts of verdicts: journaled with a group, and reported as means of a step and of an evaluation."""

from __future__ import annotations

import math

import msgspec
import pytest
from coordinator_client import make_group
from coordinator_world import World, check_consistency, make_settings, ready

from scalerl_api import wire
from scalerl_api.metrics_fields import RUN_FIGURES, STEP_FIGURES, TASK_FIGURES
from scalerl_api.wire import PushResult, Split
from scalerl_coordinator.accepted_group import Accepted
from scalerl_coordinator.step_figures import sum_step


def push(world: World, lease: wire.Lease, process: list[float], **changes: object) -> PushResult:
    group = make_group(lease, version=world.state.version, parts={"process": process})
    return world.push(world.member, msgspec.structs.replace(group, **changes))


def test_step_row_has_the_mean_of_each_part() -> None:
    """Of the completions with a verdict, refilled and filtered groups included."""
    world = ready(World(make_settings(max_tries=2)))
    first, second, third = world.lease(world.member, 0, 3)
    flat = make_group(first, scores=[1.0, 1.0], parts={"process": [0.5, 0.5]})
    assert world.push(world.member, flat) is PushResult.ACCEPTED
    (again,) = world.lease(world.member, 0, 1)
    assert push(world, again, [0.0, 1.0]) is PushResult.ACCEPTED
    verdicts = wire.Verdicts(scores=[0.0, 1.0], parts={"process": [0.0, -3.0]}, errors={0: "timeout"})
    assert push(world, second, [], verdicts=verdicts) is PushResult.ACCEPTED
    assert world.push(world.member, make_group(third)) is PushResult.ACCEPTED  # of a verifier without parts
    world.acknowledge()
    world.crash(0)
    check_consistency(world)
    row = world.report("t", 0)
    assert row is not None
    assert row["reward_part_process"] == pytest.approx((0.5 + 0.5 + 0.0 + 1.0 - 3.0) / 5)
    assert set(row) - {"reward_part_process"} == set(_row_without_parts())


def test_step_row_has_the_documented_fields() -> None:
    written = _row_without_parts().keys() - TASK_FIGURES.keys() - STEP_FIGURES.keys()
    assert written - {"busy_seconds"} == RUN_FIGURES.keys(), "with no figures of the trainer but its seconds"


def _row_without_parts() -> dict[str, float]:
    world = ready(World(make_settings()))
    world.serve(world.member, 0, 3)
    row = world.report("t", 0)
    assert row is not None
    return row


def test_group_without_a_graded_completion_has_no_part_mean() -> None:
    group = Accepted("a", 3, [4], [0.0], 0, 2, 0, ungraded=[0], parts={"process": [0.0]})
    assert sum_step(2, [group]).part_means == {}


def test_point_has_the_mean_of_each_part_over_prompts() -> None:
    world = World(make_settings())
    world.member = world.register("g")
    world.hello("t")
    world.next("t")
    world.publish("t")
    world.beat(world.member, 0)
    one, other = world.lease(world.member, 0, 2)
    assert (one.prompt.split, other.prompt.split) == (Split.HELD_OUT, Split.HELD_OUT)
    assert push(world, one, [0.5, 1.5]) is PushResult.ACCEPTED
    assert push(world, other, [0.0, -1.0]) is PushResult.ACCEPTED
    world.acknowledge()
    world.crash(0)
    (point,) = world.state.points
    assert point.parts == {"process": pytest.approx(0.25)}
    assert (point.task, point.split) == (0, Split.HELD_OUT)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize(
    ("verdicts", "says"),
    [
        (
            wire.Verdicts(scores=[1.0, 0.0], parts={"process": [0.5, math.inf]}),
            "completions[1]: part 'process' of its verdict is inf, not finite",
        ),
        (wire.Verdicts(scores=[0.0, 1.5]), "completions[1]: score 1.5 is outside [0, 1]"),
        (wire.Verdicts(scores=[-0.1, 0.0]), "completions[0]: score -0.1 is outside [0, 1]"),
        (wire.Verdicts(scores=[0.0, math.nan]), "completions[1]: score nan is outside [0, 1]"),
    ],
)
def test_verdict_out_of_range_is_refused_with_prompt_and_completion(
    split: Split, verdicts: wire.Verdicts, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(make_settings())
    world.member = world.register("g")
    world.hello("t")
    world.next("t")
    world.publish("t")
    world.beat(world.member, 0)
    lease = next(lease for lease in world.lease(world.member, 0) if lease.split is split)
    assert push(world, lease, [], verdicts=verdicts, prompt_id="algebra-7") is PushResult.INVALID
    (message,) = [m for m in caplog.messages if says in m]
    assert f"prompt {lease.prompt.index} (algebra-7)" in message
    assert f"{split} slot {lease.slot}" in message
    check_consistency(world)
    assert world.state.counts.acknowledged == 0
