"""Places whose groups teach nothing are filled again."""

from __future__ import annotations

import numpy as np
import pytest
from coordinator_client import make_group
from coordinator_world import World, make_settings, ready
from scipy.stats import ks_2samp

from scalerl_api.wire import Lease, NextAction, PushResult, Split

FLAT, MIXED = [1.0, 1.0], [1.0, 0.0]


def world_with(**settings: object) -> World:
    return ready(World(make_settings(max_tries=3, evaluation_every=1000, **settings)))


def push(world: World, lease: Lease, scores: list[float]) -> PushResult:
    return world.push(world.member, make_group(lease, version=world.state.version, scores=scores))


def test_place_of_equal_rewards_is_issued_again_with_another_prompt() -> None:
    world = world_with()
    first, *others = world.lease(world.member, 0, 3)
    flat = make_group(first, scores=FLAT)
    assert world.push(world.member, flat) is PushResult.ACCEPTED
    assert world.push(world.member, flat) is PushResult.DUPLICATE
    (again,) = world.lease(world.member, 0, 1)
    assert (again.slot, again.split) == (first.slot, Split.TRAIN)
    assert again.prompt != first.prompt
    for lease in (again, *others):
        push(world, lease, MIXED)
    assert world.next("t").action is NextAction.TRAIN
    plan = world.plan("t", 0)
    assert [g.filtered for g in plan.groups] == [False] * 3
    assert first.lease_id not in plan.lease_ids
    row = world.report("t", 0)
    assert row is not None
    assert (row["groups"], row["filtered_groups"], row["refilled_groups"]) == (4, 1, 1)
    assert row["completion_tokens"] == sum(len(c.token_ids) // 4 for c in flat.completions) * 4
    counts = world.state.counts
    assert (counts.acknowledged, counts.trained, counts.filtered, counts.refilled) == (8, 6, 2, 2)
    assert {t.prompt for t in world.state.histories[0].pending[0]} >= {first.prompt.index, again.prompt.index}
    world.checkpoint("t", [1])
    assert world.state.tries == {}


def test_place_stays_without_a_group_after_the_last_try() -> None:
    world = world_with()
    prompts = []
    for _ in range(3):
        (lease,) = world.lease(world.member, 0, 1)
        assert lease.slot == 0
        prompts.append(lease.prompt.index)
        push(world, lease, FLAT)
    assert len(set(prompts)) == 3
    for lease in world.lease(world.member, 0, 2):
        push(world, lease, MIXED)
    assert [g.filtered for g in world.plan("t", 0).groups] == [True, False, False]
    row = world.report("t", 0)
    assert row is not None
    assert (row["filtered_groups"], row["refilled_groups"]) == (3, 2)


def test_no_refill_without_the_filter() -> None:
    world = world_with(zero_variance_filter=False)
    (lease,) = world.lease(world.member, 0, 1)
    push(world, lease, FLAT)
    assert world.lease(world.member, 0, 1)[0].slot == 1


def test_refills_survive_a_restart() -> None:
    world = world_with()
    (first,) = world.lease(world.member, 0, 1)
    push(world, first, FLAT)
    (again,) = world.lease(world.member, 0, 1)
    world.acknowledge()
    world.crash(0)
    assert world.state.prompts[0] == again.prompt
    snapshot = world.checkpoint("t", [0])
    world.lose_volume()
    world.hello("t2", 0, snapshot)
    assert (world.state.prompts[0], world.state.tries) == (first.prompt, {})
    assert world.state.counts.refilled == world.state.counts.filtered == 0


@pytest.mark.parametrize("max_tries", [1, 3])
def test_lengths_of_what_is_trained_are_not_biased(max_tries: int) -> None:
    """Short completions arrive first, and every place waits for its own: a batch is not the first B to arrive."""
    world = ready(World(make_settings(max_tries=max_tries, evaluation_every=1000, max_completion_tokens=64)))
    rng = np.random.default_rng(0)
    trained: list[int] = []
    while world.state.version < 60:
        version = world.state.version
        work = [(int(rng.integers(1, 65)), lease) for lease in world.lease(world.member, version, 12)]
        for tokens, lease in sorted(work, key=lambda item: item[0]):
            scores = FLAT if rng.random() < 0.5 else MIXED
            group = make_group(lease, version=version, scores=scores, tokens=tokens)
            world.push(world.member, group)
        following = world.next("t")
        if following is None or following.action is not NextAction.TRAIN:
            continue
        trained += [
            length
            for group in world.state.step_groups(version)
            if not group.filtered
            for length in group.lengths
        ]
        world.report("t", version)
        world.publish("t")
        world.beat(world.member, version + 1)
    issued = rng.integers(1, 65, size=20_000)
    assert ks_2samp(trained[::2], issued).pvalue > 0.05
