"""What the status says of a run that completes its steps and learns nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from coordinator_client import make_group
from coordinator_world import World, make_settings, ready, train
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api import wire
from scalerl_coordinator.learning import FLAT_STEPS, bounded
from scalerl_coordinator.run_status import build_status

SAMPLE = wire.Sample(
    prompt_id="p", reply="It is\n\x1b[2J\u202e5.", answer="5.", reference=r"\boxed{5}", score=0.0
)
ZERO, ONE, MIXED = [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]


def step(world: World, *scores: list[float], sample: wire.Sample | None = SAMPLE, unusable: int = 0) -> None:
    """Train a step whose three groups have these scores."""
    for lease, group in zip(world.lease(world.member, 0, 3), scores, strict=True):
        flat = len(set(group)) == 1
        pushed = make_group(lease, scores=group, version=0)
        pushed = msgspec.structs.replace(pushed, sample=sample if flat else None, unusable_tokens=unusable)
        assert world.push(world.member, pushed) == "accepted"
    world.report("t", world.state.version)


def make(**changes: Any) -> World:
    return ready(World(make_settings(max_staleness_steps=64, evaluation_every=100, **changes)))


def problem(world: World) -> str:
    return build_status(world.core).learning_problem


def test_nothing_solved_is_a_problem_after_three_steps_and_has_a_sample():
    world = make()
    for done in range(1, FLAT_STEPS + 2):
        step(world, ZERO, ZERO, ZERO)
        assert bool(problem(world)) == (done >= FLAT_STEPS)
    text = problem(world)
    assert "no completion of the last 3 steps or more scored above 0" in text
    assert (
        r"reply 'It is\n\x1b[2J\u202e5.', extracted answer '5.', reference answer '\\boxed{5}', score 0"
        in text
    )
    assert text.isprintable()
    again = text
    step(world, ZERO, ZERO, ZERO, sample=bounded(msgspec.structs.replace(SAMPLE, reply="another")))
    assert problem(world) == again, "an event for each step"
    step(world, ZERO, MIXED, ZERO)
    assert problem(world) == ""
    assert world.state.sample is None


def test_everything_solved_and_equal_rewards_have_their_own_texts():
    world = make()
    for _ in range(3):
        step(world, ONE, ONE, ONE)
    assert "every completion of the last 3 steps or more scored 1" in problem(world)
    step(world, ONE, ZERO, ONE)
    assert "the completions of each prompt had equal rewards" in problem(world)
    # A constant partial score: reasoning-gym gives .01 for any answer.
    world = make()
    for _ in range(3):
        step(world, [0.01, 0.01], [0.01, 0.01], [0.01, 0.01])
    assert "the completions of each prompt had equal rewards" in problem(world)


def test_without_the_filter_only_a_run_without_success_is_a_problem():
    """Groups that are not filtered may have a gradient, for instance of a penalty on their length."""
    world = make(zero_variance_filter=False)
    for _ in range(3):
        step(world, ONE, ONE, ZERO)
    assert problem(world) == ""
    for _ in range(3):
        step(world, ZERO, ZERO, ZERO)
    assert "scored above 0" in problem(world)


def test_steps_of_a_short_run_are_a_problem_at_its_end():
    world = make(max_steps=2)
    step(world, ZERO, ZERO, ZERO)
    assert problem(world) == ""
    step(world, ZERO, ZERO, ZERO)
    assert "no completion of all steps of the run scored above 0" in problem(world)


def test_policy_with_a_teacher_learns_without_rewards():
    world = World(make_settings(max_staleness_steps=64, evaluation_every=100, teacher=True))
    ready(world)
    for _ in range(4):
        leases = world.lease(world.member, 0, 3)
        for lease in leases:
            world.push(world.member, make_group(lease, scores=ZERO, version=0, teacher=-1.0))
        world.report("t", world.state.version)
    assert world.state.lineage.flat_steps == 4
    assert problem(world) == ""


KINDS = {"zero": (ZERO,) * 3, "one": (ONE,) * 3, "flat": (ONE, ZERO, ZERO), "good": (ONE, MIXED, ZERO)}


@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=12), st.data())
@settings(max_examples=40, deadline=None)
def test_count_is_that_of_consecutive_steps_also_after_restarts(names: list[str], data: st.DataObject):
    """The coordinator is killed between some steps: it counts on, keeps its sample, and a replay has the same state."""
    world = make()
    streak: list[str] = []
    for name in names:
        step(world, *KINDS[name])
        streak = [] if name == "good" else [*streak, name]
        if data.draw(st.booleans()):
            world.acknowledge()
            before = world.state.sample
            world.crash(0)
            assert world.state.sample == before
            world.member = world.register("g", version=0)
            world.hello("t", world.state.version)
        assert world.state.lineage.flat_steps == len(streak)
        assert (world.state.sample is not None) == bool(streak)
        text = problem(world)
        assert bool(text) == (len(streak) >= FLAT_STEPS)
        if text:
            says = {"zero": "scored above 0", "one": "scored 1,"}
            expected = says.get(streak[0], "equal rewards") if len(set(streak)) == 1 else "equal rewards"
            assert expected in text
        assert not world.state.samples, "those of trained steps are dropped"


def test_return_to_a_checkpoint_returns_the_count():
    world = make()
    step(world, ONE, MIXED, ZERO)
    world.checkpoint("t", [0])
    for _ in range(3):
        step(world, ZERO, ZERO, ZERO)
    assert problem(world)
    world.hello("t2", 1)
    assert problem(world) == ""
    for version in (1, 2, 3):
        world.report("t2", version)
    assert "reply" in problem(world)


def test_sample_of_the_next_steps_is_kept_until_they_are_trained():
    """Groups arrive steps ahead: the sample of a step with success must not take that of the later ones along."""
    world = make()
    step(world, ONE, MIXED, ZERO)
    leases = world.lease(world.member, 0, 9)
    for at, lease in enumerate(leases):
        sample = msgspec.structs.replace(SAMPLE, prompt_id=f"p{at}")
        group = make_group(lease, scores=ZERO, version=0)
        assert world.push(world.member, msgspec.structs.replace(group, sample=sample)) == "accepted"
    for version in (1, 2, 3):
        world.report("t", version)
    assert "prompt 'p0'" in problem(world)


def test_bounded_cuts_texts_of_any_sender():
    long = wire.Sample(
        prompt_id="p" * 999, reply="r" * 10**6, answer="a" * 999, reference="b" * 999, score=0.0
    )
    assert {len(text) for text in msgspec.structs.astuple(bounded(long))[:4]} == {400}


@pytest.mark.parametrize(("unusable", "bad"), [(0, False), (1, True), (8, True)])
def test_tokens_without_logprobs_are_a_problem(unusable: int, bad: bool):
    world = make()
    step(world, MIXED, MIXED, MIXED, unusable=unusable)
    text = build_status(world.core).logprob_problem
    assert bool(text) is bad
    assert world.state.last_row["unusable_tokens"] == 3 * unusable
    assert [group.unusable_tokens for group in world.plan("t", 0).groups] == [unusable] * 3
    world.publish("t")
    for _ in range(12):
        train(world)
    assert build_status(world.core).logprob_problem == "", "once they are a small part of the latest"


def test_unusable_tokens_are_at_most_all():
    world = make()
    step(world, MIXED, MIXED, MIXED, unusable=10**9)
    assert [group.unusable_tokens for group in world.plan("t", 0).groups] == [8] * 3
