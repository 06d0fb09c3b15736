"""Runs with a mix of tasks: which task a slot has, the tasks' own samplers, lengths, figures and curves."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from coordinator_client import make_group
from coordinator_world import World, check_consistency, make_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from test_coordinator_evaluation_sets import ready_for_both
from test_coordinator_samplers import CURRICULA, curriculum

from scalerl_api import wire
from scalerl_api.wire import MEAN_SET, EvaluationPoint, PassAt, PushResult, Split
from scalerl_coordinator.journal import JournalCounters
from scalerl_coordinator.metrics import Metrics
from scalerl_coordinator.run_status import build_status
from scalerl_coordinator.settings import EvaluationSet
from scalerl_coordinator.weighted_mean import MEAN_TASK, weighted_mean
from scalerl_tasks import Mixture

WEIGHTS = (Fraction("0.7"), Fraction("0.3"))
SETS = (EvaluationSet("words", "digest-words", 3, 2),)


def mixed(**changes: Any) -> World:
    given = {
        "tasks": ("sums", "words"),
        "weights": WEIGHTS,
        "held_out_name": "sums",
        "sets": SETS,
        "set_every": (2,),
        "task_max_tokens": (4, 8),
        "forecast_task": MEAN_TASK,
        "zero_variance_filter": False,
    }
    return ready_for_both(World(make_settings(**given | changes)))


def step(world: World, seen: dict[int, wire.PromptRef]) -> None:
    """Serve all that can be leased, with scores that follow from the prompt, and train one step."""
    version = world.state.version
    while leases := world.lease(world.member, version, 3):
        for lease in leases:
            if lease.split is Split.TRAIN:
                assert seen.setdefault(lease.slot, lease.prompt) == lease.prompt
            scores = [float((lease.prompt.index + at) % 3 == 0) for at in range(lease.completions)]
            assert world.push(world.member, make_group(lease, scores=scores, version=version)) == "accepted"
    world.report("t", version)
    world.publish("t")


def walk(name: str, crashes: frozenset[int] = frozenset()) -> dict[int, wire.PromptRef]:
    """The prompts of eight steps, of a process that is killed after some of them."""
    world = mixed(curriculum=curriculum(name))
    seen: dict[int, wire.PromptRef] = {}
    for number in range(8):
        step(world, seen)
        world.write()
        world.acknowledge()
        if number in crashes:
            world.crash(0)
            world.member = world.register("g", version=world.state.version)
            world.trainer_requests.hello(
                wire.TrainerHello(incarnation="t", version=world.state.version, world_size=1, snapshot=None),
                world.now,
            )
        check_consistency(world)
        points = world.state.points
        assert world.core.points == points + weighted_mean(points, WEIGHTS)
    return seen


@pytest.mark.parametrize("name", sorted(CURRICULA))
def test_tasks_of_slots_follow_the_mixture_under_every_curriculum(name: str) -> None:
    seen = walk(name)
    mixture = Mixture(WEIGHTS, make_settings().identity.seed)
    assert [seen[slot].task for slot in sorted(seen)] == [mixture.task(slot) for slot in sorted(seen)]
    counts = Counter(prompt.task for prompt in seen.values())
    assert abs(counts[0] - len(seen) * WEIGHTS[0]) < 1


@settings(max_examples=5, deadline=None)
@given(crashes=st.frozensets(st.integers(0, 7), max_size=4), name=st.sampled_from(sorted(CURRICULA)))
def test_restart_changes_no_prompt_of_any_task(crashes: frozenset[int], name: str) -> None:
    assert walk(name, crashes) == walk(name)


def test_each_task_goes_through_its_own_epoch() -> None:
    seen = walk("uniform")
    for task in (0, 1):
        own = [seen[slot].index for slot in sorted(seen) if seen[slot].task == task]
        assert sorted(own[:7]) == list(range(7))[: len(own)], "each of 7 prompts once"


def test_leases_and_groups_have_the_length_of_their_task() -> None:
    world = mixed()
    leases = world.lease(world.member, 0)
    assert {(lease.prompt.task, lease.max_tokens) for lease in leases} == {(0, 4), (1, 8)}
    assert Counter((lease.prompt.task, lease.split) for lease in leases)[1, Split.HELD_OUT] == 3
    of_sums = next(lease for lease in leases if lease.prompt.task == 0)
    of_words = next(lease for lease in leases if lease.prompt.task == 1)
    assert world.push(world.member, make_group(of_sums, tokens=5)) is PushResult.INVALID
    assert world.push(world.member, make_group(of_words, tokens=5)) is PushResult.ACCEPTED


@pytest.mark.parametrize("crash", [False, True])
def test_refilled_slot_keeps_its_task(crash: bool) -> None:
    world = mixed(zero_variance_filter=True, max_tries=3)
    identity = world.settings.identity
    prompts: dict[int, list[wire.PromptRef]] = {}
    for _ in range(3):
        for lease in world.lease(world.member, 0):
            if lease.split is Split.TRAIN:
                prompts.setdefault(lease.slot, []).append(lease.prompt)
                assert lease.max_tokens == identity.max_tokens(lease.prompt.task)
            flat = make_group(lease, version=0, scores=[1.0] * lease.completions)
            assert world.push(world.member, flat) is PushResult.ACCEPTED
        world.acknowledge()
        if crash:
            world.crash(0)
            world.member = world.register("g", version=0)
        check_consistency(world)
    mixture = Mixture(WEIGHTS, identity.seed)
    assert {mixture.task(slot) for slot in prompts} == {0, 1}
    for slot, tried in prompts.items():
        assert len(tried) == 3
        assert {prompt.task for prompt in tried} == {mixture.task(slot)}
    row = world.report("t", 0)
    assert row is not None
    groups = row["groups_task_sums"] + row["groups_task_words"]
    assert (groups, row["refilled_groups"]) == (9, 6)


def test_edited_length_of_a_task_applies_to_what_is_issued_afterwards() -> None:
    world = mixed()
    leases = world.lease(world.member, 0)
    trained = next(lease for lease in leases if lease.split is Split.TRAIN)
    evaluated = [
        next(lease for lease in leases if lease.split is Split.HELD_OUT and lease.prompt.task == task)
        for task in (0, 1)
    ]
    for lease in (trained, *evaluated):
        assert world.push(world.member, make_group(lease)) is PushResult.ACCEPTED
    world.acknowledge()
    world.change(task_max_tokens=(4, 3))
    assert trained.slot in world.state.groups
    assert len(world.state.evaluations[0, 0].results) == 1
    assert world.state.evaluations[0, 1].results == {}, "its points are no longer of one curve"
    world.member = world.register("g", version=0)
    again = world.lease(world.member, 0)
    assert {(lease.prompt.task, lease.max_tokens) for lease in again} == {(0, 4), (1, 3)}
    check_consistency(world)


def test_rows_and_metrics_have_figures_of_each_task() -> None:
    world = mixed()
    seen: dict[int, wire.PromptRef] = {}
    step(world, seen)
    row = world.state.rows[0]
    assert row["groups_task_sums"] + row["groups_task_words"] == row["groups"] == 3
    total = row["reward_task_sums"] * row["rollouts_task_sums"]
    total += row.get("reward_task_words", 0.0) * row["rollouts_task_words"]
    assert total / row["rollouts"] == pytest.approx(row["reward"])
    metrics = Metrics(
        lambda: build_status(world.core),
        JournalCounters(),
        refusing=lambda: False,
        staleness_bound=1,
        closed_slots={},
        partial_bytes=lambda: 0,
    )
    text = metrics.text().decode()
    assert f'scalerl_coordinator_task_groups{{task="sums"}} {float(row["groups_task_sums"])}' in text
    assert 'scalerl_coordinator_evaluation_set_reward{set="words"}' in text


def test_publish_waits_for_all_tasks_of_the_weighted_mean() -> None:
    world = mixed()
    leases = world.lease(world.member, 0)
    last = [lease for lease in leases if lease.split is Split.HELD_OUT][-1]
    for lease in leases:
        if lease is not last:
            world.push(world.member, make_group(lease, version=0))
    world.report("t", 0)
    assert world.begin_publish("t") is None
    assert build_status(world.core).points == []
    world.push(world.member, make_group(last, version=0))
    assert world.begin_publish("t") is not None
    status = build_status(world.core)
    assert [point.set_name for point in status.points] == [MEAN_SET]
    assert set(status.set_points) == {"sums", "words"}


def test_publish_waits_for_the_followed_task_alone() -> None:
    world = mixed(forecast_task=0)
    for lease in world.lease(world.member, 0):
        if lease.split is Split.TRAIN or lease.prompt.task == 0:
            world.push(world.member, make_group(lease, version=0))
    world.report("t", 0)
    assert world.begin_publish("t") is not None
    assert [point.set_name for point in build_status(world.core).points] == ["sums"]


def point(task: int, version: int, reward: float, error: float, **changes: Any) -> EvaluationPoint:
    return EvaluationPoint(
        version=version,
        work_tokens=100 * version,
        reward=reward,
        standard_error=error,
        samples=8,
        prompts=4,
        set_digest=f"digest-{task}",
        mixed_versions=False,
        truncated_fraction=0.0,
        mean_tokens=10.0,
        wall_seconds=1.0,
        device_seconds=2.0,
        task=task,
        **changes,
    )


def test_weighted_mean_has_the_versions_that_all_tasks_have() -> None:
    points = [
        point(0, 0, 0.2, 0.03, pass_at=[PassAt(2, 0.4, 0.3, 0.5), PassAt(4, 0.6, 0.5, 0.7)]),
        point(1, 0, 0.6, 0.04, pass_at=[PassAt(2, 0.8, 0.7, 0.9)]),
        point(0, 2, 0.3, 0.03),
        point(2, 2, 0.9, 0.01),
        point(0, 4, 0.4, 0.03),
        point(1, 4, 0.8, 0.04),
    ]
    first, last = weighted_mean(points, WEIGHTS)
    assert (first.version, last.version) == (0, 4)
    assert first.reward == pytest.approx(0.7 * 0.2 + 0.3 * 0.6)
    assert first.standard_error == pytest.approx(((0.7 * 0.03) ** 2 + (0.3 * 0.04) ** 2) ** 0.5)
    assert [(at.k, round(at.mean, 9)) for at in first.pass_at] == [(2, 0.52)]
    assert (first.samples, first.prompts, first.task) == (16, 8, MEAN_TASK)
    assert first.set_digest == last.set_digest
