"""Unfinished completions: kept here when a server is lost, until their prompt is leased again, and handed over through the
coordinator to another actor, or to this one after a restart.

Every few heartbeats, and with every release, the actor sends the coordinator the tokens of long completions that are new
since the last report (8 bytes per token). The coordinator returns them with the slot's next lease, so a killed actor loses
the tokens of one interval. Short completions are sampled again instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from typing import Literal, get_args

import numpy as np

from scalerl_api.wire import MASKED, Lease, Partial, PartialGroup, PromptRef, Split
from scalerl_generator.coordinator_client import (
    CoordinatorClient,
    CoordinatorUnreachable,
    Refused,
    UnknownMember,
)
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import Registration, ServerMonitor
from scalerl_generator.rollouts.completion_streams import TOGETHER_TOKENS, CompletionStreams
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.prompt_codec import EncodedPrompt
from scalerl_generator.server_state import ServerState
from scalerl_generator.vllm_replies import Part

logger = logging.getLogger("scalerl.actor.partials")

REPORT_HEARTBEATS = 5
"""Number of heartbeats between two reports."""
_REPORT_BYTES = 16 << 20
"""Bound on the tokens and log-probabilities of one report; the next report has the rest."""
_SKIPPED_REPORTS = 10
"""Number of reports that leave out a lease after the coordinator had no room for it."""
_MAX_LOGPROB = 0.01
"""Rounding can raise a log-probability this far above 0."""
_Key = tuple[PromptRef, int, str, int, int, float, int | None]

Reason = Literal["prompt", "lengths", "tokens", "logprobs", "versions"]


class UnusablePartials(Exception):
    """The unfinished completions of a lease cannot be continued; ``reason`` says what is wrong with them."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


def read_partials(
    group: PartialGroup,
    lease: Lease,
    prompt: EncodedPrompt,
    *,
    vocabulary_size: int,
    max_staleness_steps: int,
) -> list[PartialCompletion]:
    """Check and decode the unfinished completions of ``lease``.

    Raises:
        UnusablePartials: they do not belong to this lease, or are damaged.
    """
    if group.prompt_token_ids != prompt.wire:
        raise UnusablePartials("prompt")
    if len(group.completions) != lease.completions:
        raise UnusablePartials("lengths")
    completions = [_read(partial, lease.max_tokens, vocabulary_size) for partial in group.completions]
    if not are_usable(completions, lease, max_staleness_steps):
        raise UnusablePartials("versions")
    return completions


def _read(partial: Partial, max_tokens: int, vocabulary_size: int) -> PartialCompletion:
    nbytes = len(partial.token_ids)
    if partial.start or nbytes % 4 or len(partial.logprobs) != nbytes or nbytes // 4 > max_tokens:
        raise UnusablePartials("lengths")
    if partial.finish_reason is None and nbytes // 4 == max_tokens:
        raise UnusablePartials("lengths")
    end = 0
    for turn in partial.turns:
        if not end < turn.start < turn.end <= nbytes // 4:
            raise UnusablePartials("lengths")
        end = turn.end
    token_ids, logprobs = np.frombuffer(partial.token_ids, "<i4"), np.frombuffer(partial.logprobs, "<f4")
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocabulary_size:
        raise UnusablePartials("tokens")
    if not (np.isfinite(logprobs).all() and (logprobs <= _MAX_LOGPROB).all()):
        raise UnusablePartials("logprobs")
    starts = [span.start for span in partial.versions]
    sampled = [span.version for span in partial.versions if span.version != MASKED]
    ends = [*starts[1:], len(token_ids)]
    if starts[:1] != [0] * bool(nbytes) or any(
        end <= start for start, end in zip(starts, ends, strict=False)
    ):
        raise UnusablePartials("versions")
    if min(sampled, default=0) < 0:
        raise UnusablePartials("versions")
    completion = PartialCompletion()
    for span, end in zip(partial.versions, ends, strict=False):
        in_span = slice(span.start, end)
        masked = np.zeros(end - span.start, np.bool_)  # a masked token has the version MASKED already
        completion.append(Part(token_ids[in_span], logprobs[in_span], masked), span.version)
    completion.finish_reason, completion.turns = partial.finish_reason, partial.turns
    completion.reported = completion.tokens
    return completion


def are_usable(completions: Sequence[PartialCompletion], lease: Lease, max_staleness_steps: int) -> bool:
    """Whether the versions of completions of an earlier lease of the slot allow ``lease`` to continue them."""
    sampled = {span.version for c in completions for span in c.weight_versions} - {MASKED}
    if not sampled:
        return True
    if lease.split is Split.HELD_OUT:
        return min(sampled) > lease.lost_version
    return lease.policy_version <= min(sampled) + max_staleness_steps


class KeptCompletions:
    """Unfinished completions of leases that were released when the server was lost.

    The coordinator issues such slots again first. If this actor gets one of them, it continues the kept completions.

    Args:
        max_sequences: maximum number of kept completions; the oldest groups are dropped first.
        max_staleness_steps: of the recipe; the coordinator would reject a group with an older token.
    """

    def __init__(self, *, max_sequences: int, max_staleness_steps: int) -> None:
        self._max_sequences, self._max_staleness_steps = max_sequences, max_staleness_steps
        self._groups: dict[_Key, list[PartialCompletion]] = {}

    def put(self, lease: Lease, completions: list[PartialCompletion]) -> None:
        """Keep the completions of a lease that was not completed."""
        for completion in completions:
            completion.forget_reports()  # in the meantime another actor may report tokens for the slot
        self._groups.pop(_key(lease), None)
        self._groups[_key(lease)] = completions
        while sum(len(group) for group in self._groups.values()) > self._max_sequences:
            del self._groups[next(iter(self._groups))]

    def take(self, lease: Lease) -> list[PartialCompletion] | None:
        """The kept completions of the same slot, prompt and settings, if they can still be trained on; else None."""
        kept = self._groups.pop(_key(lease), None)
        return kept if kept is not None and are_usable(kept, lease, self._max_staleness_steps) else None


def _key(lease: Lease) -> _Key:
    # Evaluations of different versions have the same slots.
    evaluated_version = lease.policy_version if lease.split is Split.HELD_OUT else None
    return (
        *(lease.prompt, lease.slot, lease.prompt_id),
        *(lease.completions, lease.max_tokens, lease.temperature),
        evaluated_version,
    )


class PartialReports:
    """Reports the unfinished completions of this actor, and reads those that leases hand over."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        registration: Registration,
        monitor: ServerMonitor,
        state: ServerState,
        metrics: ActorMetrics,
        *,
        vocabulary_size: int,
        max_staleness_steps: int,
    ) -> None:
        self._coordinator, self._registration, self._monitor = coordinator, registration, monitor
        self._state, self._metrics = state, metrics
        self._vocabulary_size, self._max_staleness_steps = vocabulary_size, max_staleness_steps
        for reason in get_args(Reason):  # create each series at 0, so that its first event shows in a rate
            metrics.dropped_partials.labels(reason)
        self._tracked: dict[str, tuple[CompletionStreams, int]] = {}
        """Completions by lease id, with the ``start_count`` of the server that samples them."""
        self._skipped: dict[str, int] = {}
        """Leases for which the coordinator had no room, with the number of further reports that leave them out."""

    def read(self, lease: Lease, prompt: EncodedPrompt) -> list[PartialCompletion] | None:
        """The unfinished completions that ``lease`` hands over; None if there are none, or none that can be continued."""
        if lease.partial is None:
            return None
        try:
            return read_partials(
                lease.partial,
                lease,
                prompt,
                vocabulary_size=self._vocabulary_size,
                max_staleness_steps=self._max_staleness_steps,
            )
        except UnusablePartials as problem:
            logger.warning(
                "lease %s: sampling from the start, its unfinished completions are unusable: %s",
                *(lease.lease_id, problem),
            )
            self._metrics.dropped_partials.labels(problem.reason).inc()
            return None

    def track(self, streams: CompletionStreams) -> None:
        """Report these completions until their lease is released or its group is acknowledged."""
        if streams.lease.max_tokens > TOGETHER_TOKENS:
            self._tracked[streams.lease.lease_id] = streams, self._state.start_count

    def take(self, lease_ids: Collection[str]) -> list[PartialGroup]:
        """The last reports of leases that are being released."""
        groups = []
        for lease_id in lease_ids:
            if (tracked := self._tracked.pop(lease_id, None)) is None:
                continue
            streams, start = tracked
            if self._state.unpublished_start == start:
                # Some tokens may be from weights that were not published: an empty report makes the coordinator drop all.
                streams.completions = [PartialCompletion() for _ in streams.completions]
            groups.append(_report(streams))
        return groups

    async def run(self) -> None:
        """Report until cancelled. A refused report is only logged: at worst its tokens are sampled again."""
        while True:
            member_id = await self._registration.member()
            await asyncio.sleep(REPORT_HEARTBEATS * self._registration.interval_seconds)
            with contextlib.suppress(CoordinatorUnreachable, UnknownMember):  # Registration handles both
                try:
                    await self._report(member_id)
                except Refused as refused:
                    logger.warning("the coordinator refused a report of unfinished completions: %s", refused)

    async def send(self, member_id: str, groups: list[PartialGroup]) -> None:
        """Send the last reports, one group per request, since all together may exceed the coordinator's limit.

        Removes groups that are sent or refused from ``groups``.

        Raises:
            CoordinatorUnreachable, UnknownMember: the remaining ``groups`` are not sent.
        """
        while groups:
            try:
                await self._coordinator.report_partials(member_id, groups[:1])
            except Refused as refused:
                logger.warning(
                    "lease %s: the coordinator refused its unfinished completions: %s",
                    groups[0].lease_id,
                    refused,
                )
            del groups[0]

    async def _report(self, member_id: str) -> None:
        held = self._registration.held_leases
        self._tracked = {i: tracked for i, tracked in self._tracked.items() if i in held}
        self._skipped = {lease_id: skips - 1 for lease_id, skips in self._skipped.items() if skips > 1}
        start = self._state.start_count
        reports: dict[str, tuple[CompletionStreams, PartialGroup]] = {}
        truncations: dict[str, list[int]] = {}
        nbytes = 0
        for lease_id, (streams, _) in list(self._tracked.items()):
            if nbytes > _REPORT_BYTES:
                break
            if lease_id in self._skipped:
                continue
            group = _report(streams)
            if new := sum(2 * len(partial.token_ids) for partial in group.completions):
                nbytes += new
                reports[lease_id] = streams, group
                truncations[lease_id] = [completion.truncations for completion in streams.completions]
                # Move it to the end: the next report begins with the others.
                self._tracked[lease_id] = self._tracked.pop(lease_id)
        # Check after the tokens arrived, so that none is from a server whose restart was not detected.
        if not reports or not await self._monitor.check_same_server(start):
            return
        reply = await self._coordinator.report_partials(member_id, [group for _, group in reports.values()])
        if reply.full:
            logger.warning(
                "the coordinator has no room for the unfinished completions of %d leases", len(reply.full)
            )
            self._metrics.refused_partials.inc(len(reply.full))
        self._skipped |= dict.fromkeys(reply.full, _SKIPPED_REPORTS)
        for lease_id, (streams, group) in reports.items():
            if lease_id in reply.full:
                continue
            before = truncations[lease_id]
            for completion, partial, count in zip(
                streams.completions, group.completions, before, strict=True
            ):
                if lease_id in reply.missing:
                    completion.reported = 0
                elif (
                    completion.truncations == count
                ):  # otherwise the sent tokens were truncated in the meantime
                    completion.reported = partial.start + partial.tokens


def _report(streams: CompletionStreams) -> PartialGroup:
    lease = streams.lease
    return PartialGroup(
        lease_id=lease.lease_id,
        prompt=lease.prompt,
        slot=lease.slot,
        temperature=lease.temperature,
        prompt_token_ids=streams.prompt.wire,
        completions=[completion.unreported() for completion in streams.completions],
    )
