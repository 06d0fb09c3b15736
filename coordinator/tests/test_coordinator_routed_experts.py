"""Groups with recorded experts: what is accepted, and what the trainer gets."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_client import make_group, run_text
from coordinator_world import World, make_settings, ready

from scalerl_api import wire
from scalerl_api.load import parse_run
from scalerl_api.wire import NextAction, PushResult, RoutedExperts
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.group_checks import InvalidGroup, summarize_group
from scalerl_coordinator.settings import Settings
from scalerl_coordinator.shards import fill_shard


@pytest.fixture
def world() -> World:
    return ready(World(make_settings(zero_variance_filter=False)))


def of_group(lease: wire.Lease, routed: RoutedExperts | None) -> wire.Group:
    group = make_group(lease)
    completions = [msgspec.structs.replace(c, routed=routed) for c in group.completions]
    return msgspec.structs.replace(group, completions=completions)


def record(spans: list[tuple[int, int]], size: int, layers: int = 2, chosen: int = 3) -> RoutedExperts:
    return RoutedExperts(layers=layers, chosen=chosen, spans=spans, experts=bytes(size))


def test_experts_reach_the_trainer_through_the_journal(world: World) -> None:
    groups = {}
    routed = RoutedExperts(layers=2, chosen=3, spans=[(0, 1), (2, 4)], experts=bytes(range(18)))
    for lease in world.lease(world.member, 0, 3):
        group = of_group(lease, routed)
        assert world.push(world.member, group) is PushResult.ACCEPTED
        groups[lease.lease_id] = r.decode_stored(msgspec.msgpack.encode(group))
    assert world.next("t").action is NextAction.TRAIN  # type: ignore[union-attr]
    shard = fill_shard(world.plan("t", 0), groups)
    assert [sequence.routed for sequence in shard.sequences] == [routed] * 6


def test_bounds_of_experts(world: World) -> None:
    (lease,) = world.lease(world.member, 0, 1)
    group = make_group(lease)
    tokens = len(group.prompt_token_ids) // 4 + group.completions[0].tokens
    good = [record([(0, tokens - 1)], 6 * (tokens - 1)), record([(1, 3)], 24), None]
    good += [record([(0, 1)], 2048, 1024, 2)]
    bad = [
        record([(0, tokens)], 6 * tokens),
        record([(2, 3), (1, 2)], 12),
        record([(1, 1)], 0),
        record([], 0),
        record([(-1, 1)], 12),
        record([(0, 2)], 11),
        record([(0, 2)], 18),
        record([(0, 1)], 0, 0, 3),
        record([(0, 1)], 6, -2, -3),
        record([(0, 1)], 2052, 1026, 2),
    ]
    for routed in good:
        summarize_group(of_group(lease, routed), lease.completions, lease.max_tokens, 0)
    for routed in bad:
        with pytest.raises(InvalidGroup, match="experts"):
            summarize_group(of_group(lease, routed), lease.completions, lease.max_tokens, 0)


def test_groups_may_be_larger_with_router_replay() -> None:
    def largest(**trainer: object) -> int:
        run = parse_run(run_text(trainer=trainer, generator={"devices": 1}), "run.yaml")
        settings = Settings.of_run(run, train_digest="train", held_out=[("held-out", 2)])
        return settings.max_group_bytes

    assert largest(routerReplay=True) - largest() >= 2 * 2048 * 64
