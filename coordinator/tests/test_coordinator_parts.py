"""The pure parts: slots, curriculum, shards, clock, evaluation, membership, leases, checks, accounting."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest
from coordinator_client import make_group
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api import wire
from scalerl_api.metrics_fields import TASK_FIGURES
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.accepted_group import Accepted
from scalerl_coordinator.accounting import RolloutCounts
from scalerl_coordinator.evaluation import Evaluation, PromptResult, due, summarize
from scalerl_coordinator.group_checks import InvalidGroup, summarize_group
from scalerl_coordinator.journaled_core import LogicalClock
from scalerl_coordinator.leases import LeaseBook
from scalerl_coordinator.membership import Membership, UnknownMember, name_of, new_member_id
from scalerl_coordinator.rewards import zero_variance
from scalerl_coordinator.sampler_interface import SeededEpochs
from scalerl_coordinator.shards import Item, balance
from scalerl_coordinator.slots import (
    BatchSize,
    OffPolicy,
    lease_limit,
    slots_of,
    staleness,
    step_of,
)
from scalerl_coordinator.step_figures import figures, sum_step

# --- slots ---------------------------------------------------------------------------------------


@st.composite
def batch_sizes(draw):
    """A run that changed its batch size a few times."""
    sizes = [BatchSize(0, 0, draw(st.integers(1, 9)))]
    for steps in draw(st.lists(st.integers(1, 9), max_size=3)):
        last = sizes[-1]
        first = last.first_slot + steps * last.prompts_per_step
        sizes.append(BatchSize(last.first_step + steps, first, draw(st.integers(1, 9))))
    return sizes


@given(version=st.integers(0, 50), sizes=batch_sizes(), k=st.integers(0, 9))
def test_lease_limit_bounds_staleness(version, sizes, k):
    limit = lease_limit(version, sizes, OffPolicy(k), None)
    assert staleness(step_of(limit - 1, sizes), version) == k
    assert staleness(step_of(limit, sizes), version) == k + 1
    assert limit - 1 in slots_of(step_of(limit - 1, sizes), sizes)


@given(version=st.integers(0, 50), sizes=batch_sizes(), k=st.integers(1, 9))
def test_ppo_off_policy_generates_the_rest_of_a_batch(version, sizes, k):
    scheme = OffPolicy(steps_per_batch=k)
    limit = lease_limit(version, sizes, scheme, None)
    last = step_of(limit - 1, sizes)
    assert last // k == version // k
    assert (last + 1) % k == 0
    assert staleness(last, version) <= k - 1
    assert scheme.oldest(version) == max(v for v in range(version + 1) if scheme.publishes(v))
    assert due(scheme.oldest(version), 1, None, k)


@given(every=st.integers(1, 20), k=st.integers(1, 9))
def test_evaluations_are_of_published_versions_and_as_many(every, k):
    found = [v for v in range(200) if due(v, every, None, k)]
    assert all(v % k == 0 for v in found)
    assert found == sorted({-(-v // k) * k for v in range(0, 200, every) if -(-v // k) * k < 200})


@given(sizes=batch_sizes())
def test_slots_partition_into_steps(sizes):
    slots = [slot for step in range(40) for slot in slots_of(step, sizes)]
    assert slots == list(range(len(slots)))
    assert all(slot in slots_of(step_of(slot, sizes), sizes) for slot in slots)


# --- curriculum ----------------------------------------------------------------------------------


@given(prompts=st.integers(1, 300), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_curriculum_epoch_has_every_prompt_once(prompts, seed, epoch):
    curriculum = SeededEpochs(prompts, seed)
    chosen = [curriculum.choose(epoch * prompts + i) for i in range(prompts)]
    assert sorted(chosen) == list(range(prompts))


def test_curriculum_order_depends_on_epoch_and_seed():
    first = [SeededEpochs(1000, 0).choose(i) for i in range(6)]
    assert first == [295, 609, 508, 276, 986, 206]
    assert [SeededEpochs(1000, 0).choose(1000 + i) for i in range(6)] != first
    assert [SeededEpochs(1000, 1).choose(i) for i in range(6)] != first
    assert 0 <= SeededEpochs(10**8, 0).choose(10**12) < 10**8


# --- shards --------------------------------------------------------------------------------------


def test_zero_variance_compares_scores_only():
    assert zero_variance([1.0, 1.0])
    assert zero_variance([0.0])
    assert not zero_variance([0.0, 1e-9])


@given(tokens=st.lists(st.integers(1, 2000), max_size=60), ranks=st.integers(1, 7), order=st.randoms())
def test_balance_partitions_independent_of_order(tokens, ranks, order):
    items = [Item(at // 4, at % 4, n) for at, n in enumerate(tokens)]
    shares = balance(items, ranks)
    assert sorted((i.group, i.sample) for share in shares for i in share) == [
        (i.group, i.sample) for i in items
    ]
    loads = [sum(i.tokens for i in share) for share in shares]
    # Greedy: no rank is above the lightest by more than its last sequence.
    assert max(loads) - min(loads) <= max(tokens, default=0)
    if len(items) >= ranks:
        assert all(shares)
    shuffled = list(items)
    order.shuffle(shuffled)
    assert balance(shuffled, ranks) == shares


# --- clock ---------------------------------------------------------------------------------------


@given(readings=st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_clock_is_monotonic_and_bounds_gaps(readings):
    clock = LogicalClock(0.0, max_gap_seconds=2.0)
    times = [clock.read(reading) for reading in readings]
    steps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert all(0 <= step <= 2.0 + 1e-6 for step in steps)


def test_clock_stops_while_not_awake():
    clock = LogicalClock(0.0)
    assert clock.read(1.0) == 1.0
    assert clock.read(2.0, awake=False) == 1.0
    assert clock.read(3.0) == 2.0


# --- evaluation ----------------------------------------------------------------------------------


def test_summarize_computes_mean_and_standard_error():
    results = {
        0: PromptResult("a", 4.0, 4, 40, 0, False),
        1: PromptResult("b", 1.0, 4, 20, 2, True),
        2: PromptResult("c", 0.0, 4, 12, 1, False),
    }
    point = summarize(Evaluation(8, 1234, [], results, 3), "held-out", "digest", 10.0, 30.0)
    assert point.reward == pytest.approx((1 + 0.25 + 0) / 3)
    variance = sum((m - point.reward) ** 2 for m in (1, 0.25, 0)) / 2
    assert point.standard_error == pytest.approx(math.sqrt(variance / 3))
    assert (point.samples, point.prompts, point.mixed_versions) == (12, 3, True)
    assert (point.truncated_fraction, point.mean_tokens) == (3 / 12, 6.0)
    assert (point.work_tokens, point.wall_seconds, point.device_seconds) == (1234, 10.0, 30.0)


def test_due_includes_last_version():
    assert due(0, 10, 25)
    assert due(25, 10, 25)
    assert not due(25, 10, None)


# --- membership ----------------------------------------------------------------------------------


def test_membership_loses_silent_and_replaces_registered_members():
    membership = Membership(2.0)
    first = membership.register("g/1", "g", "u", 0.0)
    assert membership.lost(8.0) == []
    membership.get("g/1", 8.0)
    assert membership.lost(16.0) == []
    assert membership.lost(16.1) == ["g"]
    with pytest.raises(UnknownMember, match="register again"):
        membership.get("g/1", 17.0)
    ids = [new_member_id("g") for _ in range(2)]
    for member_id in ids:
        membership.register(member_id, name_of(member_id), "u", 17.0)
    assert list(membership.members) == ids[1:] != ids[:1]
    assert first.name == "g"


def test_membership_expects_lease_holders_after_restart():
    membership = Membership(2.0)
    membership.expect({"g", "h"}, 0.0)
    membership.register("h/1", "h", "u", 1.0)
    assert membership.lost(8.5) == ["g"]
    assert membership.lost(8.9) == []


def test_membership_ignores_version_reported_before_publish():
    membership = Membership(2.0)
    member = membership.register("g/1", "g", "u", 0.0)
    membership.set_version(member, 5, 10.0)
    assert membership.report_version(member, 4, 10.5) is False
    assert member.version == 5
    assert membership.report_version(member, 4, 12.0)  # a heartbeat later
    assert membership.report_version(member, -1, 13.0)  # its server has restarted
    assert member.version == -1


def test_membership_backs_off_failed_publishes():
    membership = Membership(2.0)
    waits = []
    now = 0.0
    for _ in range(9):
        member = membership.register("g/1", "g", "u", now)
        assert membership.publishable(now) == []  # it has not said what it holds
        membership.report_version(member, -1, now)
        membership.failed_publish("g", now)
        start = now
        while not membership.publishable(now):
            now += 0.5
        assert membership.backoff_over(now - 0.5, now)
        assert not membership.backoff_over(now, now + 0.5)
        waits.append(now - start)
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    membership.set_version(member, 1, now)
    membership.failed_publish("g", now)
    assert not membership.publishable(now + 4.5)
    assert membership.publishable(now + 5)


# --- leases --------------------------------------------------------------------------------------


def test_lease_book_expires_open_leases_in_order():
    book = LeaseBook(10.0)
    for at, name in enumerate("abc"):
        book.add(name, "g", float(at))
    book.remove("a")
    assert book.expired(10.5) == []
    assert book.expired(11.0) == ["b"]
    assert book.of("g") == {"b", "c"}
    assert book.abandoned("g", ["c"], 5.0) == ["b"]
    assert book.abandoned("g", ["c"], 1.0) == []
    book.add("d", "g", 3.0, sent=False)
    assert book.abandoned("g", ["b", "c"], 100.0) == []
    book.mark_sent(["d", "ended"], 8.0)
    assert book.abandoned("g", ["b", "c"], 8.0) == []
    assert book.abandoned("g", ["b", "c"], 8.5) == ["d"]
    assert (book.remaining_seconds("d", 9.0), book.remaining_seconds("ended", 9.0)) == (4.0, None)


def test_lease_book_knows_the_holders_time_and_the_prompt_of_open_leases():
    book = LeaseBook(10.0)
    book.add("a", "g", 1.0, sent=False)
    assert book.open_seconds("a", 4.0) == 0.0
    book.mark_sent(["a"], 3.0)
    assert (book.open_seconds("a", 4.5), book.open_seconds("ended", 4.5)) == (1.5, 0.0)
    for lease_id in ("a", "ended"):
        book.set_prompt_id(lease_id, "p")
    assert (book.prompt_id("a"), book.prompt_id("ended")) == ("p", None)


def test_lease_book_resync_keeps_deadlines():
    book = LeaseBook(10.0)
    book.add("a", "g", 0.0)
    book.resync({"a": "g", "b": "h"}, 5.0)
    assert book.expired(10.0) == ["a"]
    book.resync({"b": "h"}, 10.0)
    assert book.of("g") == set()
    assert book.expired(14.9) == []
    assert book.expired(15.0) == ["b"]


def test_lease_book_retry_back_off_grows():
    book = LeaseBook(10.0)
    waits = []
    for _ in range(9):
        retries = book.add_retry((0, wire.Split.TRAIN, 3), "bad", 0.0)
        waits.append(retries.not_before)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert book.waits((0, wire.Split.TRAIN, 3), 59.0)
    assert not book.waits((0, wire.Split.TRAIN, 3), 60.0)
    assert not book.waits((0, wire.Split.HELD_OUT, 3), 59.0)
    assert book.wait_over(59.0, 60.0)
    assert not book.wait_over(58.0, 59.0)
    assert not book.wait_over(60.0, 61.0)
    assert book.attempts((0, wire.Split.TRAIN, 3)) == 9
    assert book.attempts((0, wire.Split.HELD_OUT, 3)) == 0


# --- checks --------------------------------------------------------------------------------------

LEASE = wire.Lease(
    lease_id="x-0",
    prompt=wire.PromptRef(0, wire.Split.TRAIN, 1),
    slot=0,
    prompt_id="p",
    completions=2,
    max_tokens=8,
    temperature=1.0,
    remaining_seconds=1.0,
    policy_version=3,
)
GOOD = make_group(LEASE, tokens=4)


def changed(**changes: object) -> wire.Group:
    """The good group with its second completion changed."""
    broken = msgspec.structs.replace(GOOD.completions[1], **changes)
    return msgspec.structs.replace(GOOD, completions=[GOOD.completions[0], broken])


def judged(
    scores: list[float],
    errors: dict[int, str] | None = None,
    unanswered: list[int] | None = None,
    **parts: list[float],
) -> wire.Group:
    """The good group with other verdicts."""
    return msgspec.structs.replace(
        GOOD, verdicts=wire.Verdicts(scores=scores, parts=parts, errors=errors or {}, unanswered=unanswered)
    )


def test_summarize_group_counts_graded_completions_without_an_answer():
    found = [
        summarize_group(judged([0.0, 0.0], errors, unanswered), 2, 8, 3).unanswered
        for errors, unanswered in (({}, None), ({}, []), ({}, [1, 1]), ({1: "timeout"}, [0, 1]))
    ]
    assert found == [-1, 0, 1, 1]


def test_summarize_group_sums():
    spans = [wire.VersionSpan(2, 0), wire.VersionSpan(3, 1)]
    group = changed(versions=spans, finish_reason="length")
    verdicts = wire.Verdicts(scores=[0.0, 0.0], errors={1: "timeout"})
    measured = summarize_group(msgspec.structs.replace(group, verdicts=verdicts), 2, 8, 3)
    assert measured.lengths == [4, 4]
    assert (measured.truncated, measured.oldest_version, measured.newest_version) == (1, 2, 3)
    assert (measured.ungraded, measured.masked_tokens) == ([1], [])
    assert measured.version_tokens == 4 * 3  # what is not trained on has no age


def test_summarize_group_counts_masked_tokens():
    spans = [wire.VersionSpan(2, 0), wire.VersionSpan(wire.MASKED, 1), wire.VersionSpan(3, 3)]
    measured = summarize_group(changed(versions=spans), 2, 8, 3)
    assert (measured.oldest_version, measured.newest_version) == (2, 3)
    assert (measured.masked_tokens, measured.version_tokens) == ([0, 2], 4 * 3 + 2 + 3)
    nothing = summarize_group(changed(versions=[wire.VersionSpan(wire.MASKED, 0)]), 2, 8, 3)
    assert (nothing.oldest_version, nothing.newest_version, nothing.masked_tokens) == (3, 3, [0, 4])


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (msgspec.structs.replace(GOOD, completions=GOOD.completions[:1]), "1 completions, leased for 2"),
        (msgspec.structs.replace(GOOD, prompt_token_ids=b"abc"), "prompt_token_ids has 3 bytes"),
        (changed(token_ids=b""), r"completions\[1\]: token_ids has 0 bytes"),
        (changed(token_ids=b"\0" * 15), "token_ids has 15 bytes"),
        (changed(logprobs=b"\0" * 12), "4 tokens but 3 log-probabilities"),
        (changed(token_ids=b"\0" * 36, logprobs=b"\0" * 36), "9 tokens, leased for at most 8"),
        (changed(logprobs=struct.pack("<4f", -1, math.nan, -1, -1)), "not finite"),
        (changed(logprobs=struct.pack("<4f", -1, -math.inf, -1, -1)), "not finite"),
        (changed(logprobs=struct.pack("<4f", -1, 0.5, -1, -1)), "above 0"),
        (changed(token_ids=struct.pack("<4i", 1, 2, -3, 4)), "a token id is negative"),
        (changed(versions=[]), "does not start at token 0"),
        (changed(versions=[wire.VersionSpan(3, 1)]), "does not start at token 0"),
        (changed(versions=[wire.VersionSpan(2, 0), wire.VersionSpan(3, 4)]), "not ascending inside"),
        (changed(versions=[wire.VersionSpan(2, 0), wire.VersionSpan(3, 0)]), "not ascending inside"),
        (changed(versions=[wire.VersionSpan(4, 0)]), r"version 4 is outside 0\.\.3"),
        (changed(versions=[wire.VersionSpan(-2, 0)]), "version -2 is outside"),
        (judged([0.0, math.nan]), r"completions\[1\]: score nan is outside \[0, 1\]"),
        (judged([1.5, 0.0]), r"completions\[0\]: score 1.5 is outside"),
        (judged([1.0]), "1 values of 'score' for 2 completions"),
        (judged([1.0, 0.0], process=[1.0]), "1 values of 'process' for 2 completions"),
        (
            judged([1.0, 0.0], process=[1.0, math.nan]),
            r"completions\[1\]: part 'process' .* is nan, not finite",
        ),
        (judged([1.0, 0.0], {2: "timeout"}), r"errors of the completions \[2\], of 2"),
        (judged([1.0, 0.0], {}, [2]), r"no answer in the completions \[2\], of 2"),
    ],
)
def test_summarize_group_refuses_invalid_group(group, message):
    with pytest.raises(InvalidGroup, match=message):
        summarize_group(group, 2, 8, 3)


# --- accounting ----------------------------------------------------------------------------------


def test_sum_step_counts_staleness_of_trained_tokens():
    trained = Accepted("a", 3, [4, 6], [0.0, 1.0], 1, 2, 4 * 2 + 6 * 4)
    filtered = Accepted("b", 3, [5, 5], [1.0, 1.0], 0, 0, 0, filtered=True)
    sums = sum_step(5, [trained, filtered])
    assert (sums.groups, sums.filtered_groups, sums.rollouts, sums.trained_rollouts) == (2, 1, 4, 2)
    assert (sums.work_tokens, sums.truncated, sums.score_sum) == (20, 1, 3.0)
    assert (sums.staleness_tokens, sums.staleness_max) == (10, 3)
    assert sums.staleness_sum == 4 * 3 + 6 * 1


def test_sum_step_excludes_ungraded_masked_and_given_up():
    ungraded = Accepted("a", 3, [4, 6], [0.0, 1.0], 0, 2, 6 * 4, ungraded=[0], grading_errors=1)
    masked = Accepted("b", 3, [4, 6], [0.0, 1.0], 0, 2, 4 * 5 + 4 * 5, masked_tokens=[0, 2])
    given_up = Accepted("", 0, [], [], 0, 5, 0, True, given_up="failed")
    sums = sum_step(5, [ungraded, masked, given_up])
    assert (sums.groups, sums.filtered_groups, sums.given_up_groups) == (3, 1, 1)
    assert (sums.rollouts, sums.graded, sums.score_sum) == (4, 3, 2.0)
    assert (sums.staleness_tokens, sums.staleness_sum, sums.masked_tokens) == (6 + 8, 6 * 1, 2)


def test_figures_of_a_step_by_right_and_wrong():
    mixed = Accepted(
        *("a", 3, [40, 6, 9], [0.0, 1.0, 0.5], 1, 2, 0), ungraded=[0], looped=1, unanswered=1, distinct=3
    )
    unsolved = Accepted("b", 3, [4, 8], [0.0, 0.0], 0, 2, 0, True, looped=0, unanswered=0, distinct=1)
    solved = Accepted("c", 3, [2, 3], [1.0, 1.0], 0, 2, 0, True)
    nothing = Accepted("", 0, [], [], 0, 5, 0, True, given_up="failed")
    found = figures(sum_step(5, [mixed, unsolved, solved, nothing]))
    assert (found["right_completion_tokens"], found["wrong_completion_tokens"]) == (20 / 4, 12 / 2)
    assert (found["unsolved_groups_fraction"], found["solved_groups_fraction"]) == (1 / 3, 1 / 3)
    assert found["completion_tokens_p90"] == 40
    # What is not known of a group, as of the third one, is left out.
    assert (found["looped_fraction"], found["unanswered_fraction"]) == (1 / 5, 1 / 4)
    assert found["distinct_fraction"] == (1 + 1 / 2) / 2
    tenth = Accepted("d", 3, [*range(1, 11)], [0.0] * 10, 0, 2, 0)
    assert figures(sum_step(5, [tenth]))["completion_tokens_p90"] == 9
    episodes = Accepted(
        *("e", 3, [9, 9, 9, 9], [1.0, 1.0, 1.0, 0.0], 0, 2, 0),
        ungraded=[2],
        turns=[1, 2, 7, 6],
        message_tokens=9,
        episode_seconds=(1.0, 3.0),
        parts={"calls": [1.0, 1.0, 9.0, 0.0], "malformed": [0.0, 1.0, 9.0, 1.0]},
    )
    short = Accepted("f", 3, [6, 6], [1.0, 0.0], 0, 2, 0, episode_seconds=(1.0, 0.0))
    by_turn = figures(sum_step(5, [mixed, episodes, short]))
    assert by_turn["episode_turns"] == (1 + 2 + 7 + 6 + 2) / 6
    assert [by_turn[f"solved_at_turn_{turn}"] for turn in (1, 2, 3, 4)] == [2 / 5, 1 / 5, 0, 0]
    assert by_turn["malformed_calls_fraction"] == 2 / 4
    assert by_turn["environment_tokens_fraction"] == 9 / 48
    assert by_turn["environment_seconds_fraction"] == 3 / 5
    assert "episode_turns" not in found
    assert set(found) | set(by_turn) == set(TASK_FIGURES)


def test_figures_over_nothing_are_absent():
    found = figures(sum_step(5, [Accepted("", 0, [], [], 0, 5, 0, True, given_up="failed")]))
    assert not {
        name for name in found if "right" in name or "wrong" in name or name.endswith(("p90", "fraction"))
    } - {"truncated_fraction"}


def test_zero_variance_uses_graded_scores():
    group = Accepted("a", 3, [4, 6, 5], [0.0, 1.0, 1.0], 0, 2, 0, ungraded=[0])
    assert group.graded(group.scores) == [1.0, 1.0]
    assert all(zero_variance(scores) for scores in ([], [1.0], [1.0, 1.0]))
    assert not zero_variance([0.0, 1.0])


# --- journals of before --------------------------------------------------------------------------


def test_decode_reads_old_records():
    old = ["group", "p1-0", 0, 3, [4, 6], [0.0, 1.0], 1, 2, 20, 1]
    group = r.decode(msgspec.msgpack.encode(old))
    assert (group.grading_errors, group.ungraded, group.masked_tokens) == (1, [], [])
    kept = msgspec.msgpack.decode(
        msgspec.msgpack.encode(["p1-0", 3, [4, 6], [0.0, 1.0], 1, 2, 20, False, 1]), type=Accepted
    )
    assert kept.trained_tokens == [4, 6]
    counts = msgspec.msgpack.decode(
        msgspec.msgpack.encode([8, 4, 2, 2, 0, 0, 0, 0, 0, 0, 1]), type=RolloutCounts
    )
    assert (counts.acknowledged, counts.grading_errors, counts.given_up) == (8, 1, 0)
