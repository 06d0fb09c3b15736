"""Unfinished completions between the leases of a slot."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from coordinator_client import make_group
from coordinator_world import World, make_settings, ready, train
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api import wire
from scalerl_api.wire import MASKED, PromptRef, PushResult, ReleaseCause, Split, VersionSpan
from scalerl_coordinator.partials import PartialStore, partial_key


@pytest.fixture
def world() -> World:
    return ready(World(make_settings()))


def partial(tokens: list[int], start: int = 0, version: int = 0, **changes: Any) -> wire.Partial:
    fields: dict[str, Any] = {
        "start": start,
        "token_ids": struct.pack(f"<{len(tokens)}i", *tokens),
        "logprobs": struct.pack(f"<{len(tokens)}f", *(-t / 8 for t in tokens)),
        "versions": [VersionSpan(version, 0)] if tokens else [],
    }
    return wire.Partial(**fields | changes)


def group(lease: wire.Lease, *completions: wire.Partial) -> wire.PartialGroup:
    return wire.PartialGroup(
        lease_id=lease.lease_id,
        prompt=lease.prompt,
        slot=lease.slot,
        temperature=lease.temperature,
        prompt_token_ids=b"prompt!!",
        completions=[*completions, *(partial([]) for _ in range(lease.completions - len(completions)))],
    )


def report(world: World, member: str, *groups: wire.PartialGroup) -> list[str]:
    return world.generator_requests.receive_partials(
        wire.Partials(member_id=member, groups=list(groups)), world.now
    ).missing


def release(world: World, lease: wire.Lease, cause: ReleaseCause = ReleaseCause.UNSERVED) -> None:
    request = wire.Release(member_id=world.member, lease_ids=[lease.lease_id], reason="drained", cause=cause)
    world.generator_requests.release(request, world.now)


def expire(world: World, lease: wire.Lease) -> None:
    world.beat(world.member, 0, healthy=False)
    world.beat(world.member, 0)


@pytest.mark.parametrize("end", [release, expire], ids=["released", "expired"])
def test_next_lease_continues_with_reported_tokens(world, end):
    (lease,) = world.lease(world.member, 0, 1)
    assert lease.partial is None
    assert not report(world, world.member, group(lease, partial([1, 2]), partial([3], finish_reason="stop")))
    assert not report(
        world, world.member, group(lease, partial([4, 5], 2), partial([], 1, finish_reason="stop"))
    )
    end(world, lease)
    other = world.register("h", version=0)
    (again,) = world.lease(other, 0, 1)
    assert (again.slot, again.partial.lease_id) == (lease.slot, again.lease_id)
    assert again.partial.prompt_token_ids == b"prompt!!"
    assert again.partial.completions == [partial([1, 2, 4, 5]), partial([3], finish_reason="stop")]
    # It stays until the group is accepted: the next holder may be killed before its first report.
    assert not report(world, other, group(again, partial([6], 4), partial([], 1, finish_reason="stop")))
    world.now += 100
    world.generator_requests.tick(world.now)
    member = world.register("i", version=0)
    (third,) = world.lease(member, 0, 1)
    assert third.partial.completions[0] == partial([1, 2, 4, 5, 6])
    assert world.push(member, make_group(third)) is PushResult.ACCEPTED
    assert world.generator_requests._partials.nbytes == 0
    assert world.state.counts.acknowledged == 2


def test_report_after_expiry_counts_until_slot_is_leased_again(world):
    """A server that is lost makes the member unhealthy before the release arrives."""
    (lease,) = world.lease(world.member, 0, 1)
    expire(world, lease)
    assert not report(world, world.member, group(lease, partial([1])))
    other = world.register("h", version=0)
    (again,) = world.lease(other, 0, 1)
    assert again.partial.completions[0] == partial([1])
    report(world, world.member, group(lease, partial([7])))
    report(world, world.member, group(again, partial([8])))  # another member's lease
    release_other = wire.Release(member_id=other, lease_ids=[again.lease_id], reason="")
    world.generator_requests.release(release_other, world.now)
    assert world.lease(world.member, 0, 1)[0].partial.completions[0] == partial([1])


def test_restarted_coordinator_asks_for_missing_tokens(world):
    (lease,) = world.lease(world.member, 0, 1)
    assert not report(world, world.member, group(lease, partial([1, 2])))
    world.acknowledge()
    world.crash(0)
    world.member = world.register("g", held=[lease.lease_id], version=0)
    assert report(world, world.member, group(lease, partial([3], 2))) == [lease.lease_id]
    assert not report(world, world.member, group(lease, partial([1, 2, 3])))
    release(world, lease)
    assert world.lease(world.member, 0, 1)[0].partial.completions[0] == partial([1, 2, 3])


@pytest.mark.parametrize(
    "bad",
    [
        [partial([1], logprobs=b"\0\0\xc0\x7f")],
        [partial([1], logprobs=b"")],
        [partial([1] * 9)],
        [partial([1] * 4, 5)],
        [partial([1], -1)],
        [partial([1], version=1)],
        [partial([1], versions=[])],
        [partial([-1])],
        [partial([], versions=[VersionSpan(0, 0)])],
        [partial([])] * 3,
    ],
)
def test_invalid_report_drops_completions(world, bad):
    (lease,) = world.lease(world.member, 0, 1)
    report(world, world.member, group(lease, partial([1])))
    assert report(world, world.member, group(lease, *bad)) == []
    release(world, lease)
    assert world.lease(world.member, 0, 1)[0].partial is None


def test_completions_of_slots_that_are_not_issued_again_are_dropped(world):
    kept, given_up = world.lease(world.member, 0, 2)
    for lease in (kept, given_up):
        assert not report(world, world.member, group(lease, partial([1])))
    both = world.generator_requests.partial_bytes
    release(world, given_up, ReleaseCause.TOO_LONG)
    report(world, world.member)
    assert world.generator_requests.partial_bytes == both / 2
    release(world, kept)
    report(world, world.member)
    assert world.generator_requests.partial_bytes == both / 2


def test_completions_of_an_evaluation_are_kept_until_its_end():
    world = World(make_settings())
    world.member = world.register("g")
    world.hello("t")
    world.next("t")
    world.publish("t")
    lease, other = world.lease(world.member, 0, 2)
    assert lease.split is Split.HELD_OUT
    assert not report(world, world.member, group(lease, partial([1])))
    release(world, lease)
    report(world, world.member)
    assert world.generator_requests.partial_bytes > 0
    assert world.push(world.member, make_group(other)) is PushResult.ACCEPTED
    (again,) = world.lease(world.member, 0, 1)
    assert again.partial.completions[0] == partial([1])
    release(world, again, ReleaseCause.TOO_LONG)
    assert not world.state.evaluations
    report(world, world.member)
    assert world.generator_requests.partial_bytes == 0


def test_failed_lease_drops_completions(world):
    (lease,) = world.lease(world.member, 0, 1)
    report(world, world.member, group(lease, partial([1])))
    release(world, lease, ReleaseCause.FAILED)
    assert world.lease(world.member, 0, 1)[0].partial is None


def test_completions_without_new_token_are_dropped(world):
    """They may be why their holders end."""
    (lease,) = world.lease(world.member, 0, 1)
    report(world, world.member, group(lease, partial([1])))
    given = []
    for tokens in ([], [2], [], []):
        world.generator_requests._core.book.retries.clear()
        release(world, lease)
        (lease,) = world.lease(world.member, 0, 1)
        given.append(lease.partial is not None)
        if tokens:
            report(world, world.member, group(lease, partial(tokens, 1)))
    world.generator_requests._core.book.retries.clear()
    release(world, lease)
    given.append(world.lease(world.member, 0, 1)[0].partial is not None)
    assert given == [True, True, True, True, False]


def test_stale_tokens_are_not_continued():
    """A token of version 0 is too old for step 2 where k is 1, as after an edit of k."""
    world = ready(World(make_settings(max_staleness_steps=2)))
    leases = world.lease(world.member, 0)
    for lease in leases[:6]:
        world.push(world.member, make_group(lease))
    of_step_2 = [lease for lease in leases if lease.split is Split.TRAIN and lease.slot in (6, 7)]
    first, second = of_step_2
    report(
        world,
        world.member,
        group(first, partial([1])),
        group(second, partial([1, 2], version=MASKED)),
    )
    train(world)
    world.beat(world.member, 1)
    for lease in of_step_2:
        release(world, lease)
    identity = msgspec.structs.replace(world.settings.identity, max_staleness_steps=1)
    world.core.settings = replace(world.settings, identity=identity)
    assert [lease.partial is None for lease in world.lease(world.member, 1, 2)] == [True, False]


def test_tokens_of_lost_lineage_are_continued(world):
    """As a generator that was not killed continues them. To begin again what has not ended favors short completions."""
    train(world)
    world.checkpoint("t", [1])
    world.beat(world.member, 1)
    (lease,) = world.lease(world.member, 1, 1)
    report(world, world.member, group(lease, partial([1], version=1)))
    train(world)
    world.hello("t2", 1)
    release(world, lease)
    world.beat(world.member, 2)
    again = next(x for x in world.lease(world.member, 2) if x.slot == lease.slot)
    assert again.lost_version == 2
    assert again.partial.completions[0] == partial([1], version=1)


def test_tokens_of_newer_weights_are_continued(world):
    of_step_0, of_step_1 = (
        [lease for lease in world.lease(world.member, 0, 3) if lease.split is Split.TRAIN] for _ in range(2)
    )
    for lease in of_step_0:
        world.push(world.member, make_group(lease))
    world.next("t")
    world.report("t", 0)
    world.publish("t")
    world.beat(world.member, 1)
    (slot, *_) = [lease.slot for lease in of_step_1]
    report(world, world.member, group(of_step_1[0], partial([1], version=1)))
    release(world, of_step_1[0])
    older = world.register("h", version=0)
    again = next(lease for lease in world.lease(older, 0) if lease.slot == slot)
    assert again.partial.completions[0] == partial([1], version=1)


def test_evaluation_continues_with_its_version_only():
    world = World(make_settings())
    world.member = world.register("g")
    world.hello("t")
    world.next("t")
    world.publish("t")
    world.beat(world.member, 0)
    first, second = world.lease(world.member, 0, 2)
    assert first.split is second.split is Split.HELD_OUT
    report(world, world.member, group(first, partial([1, 2])))
    release(world, first)
    (again,) = world.lease(world.member, 0, 1)
    assert again.slot == first.slot
    assert again.partial.completions[0] == partial([1, 2])
    key = partial_key(first.prompt, first.slot, 1)
    assert key != partial_key(first.prompt, first.slot, 0)
    assert world.generator_requests._partials.take(key, again, range(1), 100) is None


def lease(number: int = 0, **changes: Any) -> wire.Lease:
    fields: dict[str, Any] = {
        "lease_id": f"l{number}",
        "prompt": PromptRef(0, Split.TRAIN, 0),
        "slot": number,
        "policy_version": 9,
    }
    return wire.Lease(
        **fields
        | {"prompt_id": "p", "completions": 1, "max_tokens": 9999, "temperature": 1.0}
        | {"remaining_seconds": 1.0}
        | changes
    )


def test_store_is_bounded():
    store = PartialStore(max_bytes=100)
    outcomes = [
        store.put(((0, Split.TRAIN, slot), -1), group(lease(slot), partial([slot] * 4))) for slot in range(5)
    ]
    assert outcomes == ["stored"] * 3 + ["full"] * 2
    assert store.put(((0, Split.TRAIN, 0), -1), group(lease(0), partial([7], 4))) == "full"
    assert store.put(((0, Split.TRAIN, 0), -1), group(lease(0), partial([7], 3))) == "stored", (
        "replaces a token"
    )
    assert store.nbytes == 96
    kept = [slot for slot in range(5) if store.take(((0, Split.TRAIN, slot), -1), lease(slot), range(1), 100)]
    assert kept == [0, 1, 2]
    store.drop(((0, Split.TRAIN, 1), -1))
    assert store.put(((0, Split.TRAIN, 3), -1), group(lease(3), partial([3] * 4))) == "stored"


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, {"completions": 2}])
def test_store_gives_no_completions_of_other_settings(changes):
    store = PartialStore()
    store.put(((0, Split.TRAIN, 0), -1), group(lease(), partial([1])))
    assert store.take(((0, Split.TRAIN, 0), -1), lease(**changes), range(1), 100) is None


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 12), st.lists(st.integers(0, 99), max_size=6), st.integers(0, 3), st.booleans()
        ),
        max_size=25,
    )
)
def test_store_is_what_was_reported(reports):
    """Reports that extend, replace or miss what is kept, and leases between them."""
    store, key = PartialStore(), ((0, Split.TRAIN, 0), -1)
    tokens: list[int] = []
    versions: list[int] = []
    number, newest = 0, 0
    for start, new, rise, leased in reports:
        newest += rise
        missing = start > len(tokens)
        sent = group(lease(0, lease_id=f"l{number}"), partial(new, start, newest))
        assert store.put(key, sent) == ("missing" if missing else "stored")
        if not missing:
            tokens[start:], versions[start:] = new, [newest] * len(new)
        assert store.nbytes == 8 * len(tokens)
        if leased:
            number += 1
            given = store.take(key, lease(0, lease_id=f"l{number}", policy_version=99), range(100), 9999)
            if given is None:  # leased twice in a row without a report that adds
                tokens, versions = [], []
                continue
            (whole,) = given.completions
            assert list(struct.unpack(f"<{len(tokens)}i", whole.token_ids)) == tokens
            assert whole.logprobs == partial(tokens).logprobs
            starts = [span.start for span in whole.versions]
            assert starts == sorted(set(starts))
            ends = [*starts[1:], len(tokens)]
            assert [
                s.version for s, e in zip(whole.versions, ends, strict=False) for _ in range(s.start, e)
            ] == versions


def test_leases_beyond_answers_bound_start_again(world, monkeypatch):
    monkeypatch.setattr("scalerl_coordinator.generator_requests.MAX_ANSWER_BYTES", 20)
    leases = world.lease(world.member, 0, 2)
    report(world, world.member, *(group(lease, partial([1, 2])) for lease in leases))
    for lease in leases:
        release(world, lease)
    again = world.lease(world.member, 0, 2)
    assert [lease.partial is None for lease in again] == [False, True]
    release(world, again[1])
    world.now += 5.0
    world.generator_requests.tick(world.now)
    assert world.lease(world.member, 0, 1)[0].partial is not None, "kept for the next answer"
