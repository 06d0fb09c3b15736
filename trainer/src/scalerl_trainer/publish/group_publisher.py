"""Publishes one version of the weights to a set of members.

In a round, the publisher opens a process group over the members (or keeps that of the last publish if the members are the
same), sends each member a ``receive`` request, and broadcasts the buckets. Bucket n+1 is gathered, packed and checksummed
while bucket n is sent.

A member is the cause of a failed round if it does not answer, reports that its server is gone, or is the first to refuse
to join. What its answer means for the next round (:class:`Rounds`):

========================  =========================  ========================================================
answer of a member        rounds without a cause     effect
========================  =========================  ========================================================
weights received          any                        updated
an error, it is a cause   any                        failed; the others retry together
an error, it is cleared   0 or 1                     retries with the others
an error, it is cleared   2 or more                  failed: it was alone in its group
========================  =========================  ========================================================

When a peer dies in a broadcast, all members get an error, and possibly none of their answers shows the cause. Therefore a
round without a cause is repeated once. After a second one, each member gets a separate group, so that a member that breaks
every group fails alone.

A publish takes at most :attr:`GroupPublisher.max_seconds`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from scalerl_api import endpoints, wire
from scalerl_api.weight_layout import Bucket, lay_out
from scalerl_api.wire.control import GroupBackend
from scalerl_trainer.publish.actor_control import ActorControl, Answer, Calls
from scalerl_trainer.publish.published_weights import NamedTensors, WeightSource, fill
from scalerl_trainer.publish.publisher import MAX_TIMEOUTS, Outcome, PhaseSeconds, decode_received, stats_of
from scalerl_trainer.publish.sender_group import GroupError, SenderGroup, Store, open_group

log = logging.getLogger(__name__)

TOGETHER = 2
"""Consecutive rounds without a cause before each member gets a separate group."""


@dataclass(frozen=True)
class Rounds:
    """State of a publish; pure. Each member is in one of ``waiting``, ``updated`` and ``failed``, by its id."""

    waiting: tuple[str, ...]
    updated: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    count: int = 0
    """Number of rounds so far."""
    without_cause: int = 0
    """Number of consecutive failed rounds in which no member was the cause."""

    def groups(self) -> list[tuple[str, ...]]:
        """The groups of the next round, which run one after the other; empty when the publish is over."""
        if not self.waiting:
            return []
        return [(member,) for member in self.waiting] if self._alone else [self.waiting]

    def after(self, answers: Mapping[str, Answer]) -> Rounds:
        """The state after a round; ``answers`` has the answer of each waiting member."""
        updated = tuple(m for m in self.waiting if answers[m].ok)
        retried = tuple(
            m for m in self.waiting if answers[m].cleared and not answers[m].ok and not self._alone
        )
        failed = tuple(m for m in self.waiting if m not in updated and m not in retried)
        return replace(
            self,
            waiting=retried,
            updated=self.updated + updated,
            failed=self.failed + failed,
            count=self.count + 1,
            without_cause=0 if failed else self.without_cause + 1,
        )

    @property
    def _alone(self) -> bool:
        """Whether each member has a separate group."""
        return self.without_cause >= TOGETHER


@dataclass(frozen=True)
class PublishSettings:
    host: str
    """Address of the group's rendezvous, which members can reach."""
    backend: GroupBackend
    bucket_bytes: int
    timeout_seconds: float
    """Of one join, and of one transfer."""
    workers_per_member: int = 1
    """Tensor-parallel workers of a server, each of which is a rank of the group."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    answer_grace_seconds: float = 5.0
    """Healthy members answer within this time after their timeout."""


class GroupPublisher:
    """Executes the publishes of a run on rank 0. Keeps the group from one publish to the next."""

    def __init__(self, settings: PublishSettings, control: ActorControl) -> None:
        self._settings = settings
        self._control = control
        self._epoch = time.time_ns() // 1000  # above every epoch of an earlier incarnation of the trainer
        self._group: SenderGroup | None = None
        self._member_ids: list[str] = []
        self._buffers: list[torch.Tensor] = []

    @property
    def max_seconds(self) -> float:
        """Limit of a publish, in seconds."""
        return MAX_TIMEOUTS * self._settings.timeout_seconds

    def close(self) -> None:
        """Close the group, if one is open."""
        if self._group is not None:
            self._group.close()
        self._group, self._member_ids = None, []

    def publish(
        self,
        version: int,
        weights: WeightSource,
        members: list[wire.Member],
        have_read: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """See :meth:`.Publisher.publish`. The weights may change after the last attempt."""
        started = time.perf_counter()
        deadline = time.monotonic() + self.max_seconds
        buckets = lay_out(weights.manifest, self._settings.bucket_bytes)
        updated: dict[str, wire.WeightReceived] = {}
        by_id = {member.member_id: member for member in members}
        rounds, clock, last_error = Rounds(tuple(by_id)), PhaseSeconds(), ""
        while groups := rounds.groups():
            answers: dict[str, Answer] = {}
            for group in groups:
                clock = PhaseSeconds()
                if time.monotonic() < deadline:
                    group_members = [by_id[member] for member in group]
                    answers |= self._attempt(version, weights, buckets, group_members, deadline, clock)
                else:
                    answers |= {member: Answer(error="the publish timed out") for member in group}
            rounds = rounds.after(answers)
            for member_id, answer in answers.items():
                name = by_id[member_id].name
                if answer.body is not None:
                    updated[member_id] = decode_received(answer.body)
                elif member_id in rounds.waiting:
                    log.warning("cannot publish version %d to %s, retrying: %s", version, name, answer.error)
                else:
                    log.error("gave up publishing version %d to %s: %s", version, name, answer.error)
                    last_error = last_error or answer.error
        have_read()
        stats = stats_of(list(updated.values()), clock, time.perf_counter() - started)
        stats |= {
            "publish_rounds": float(rounds.count),
            "publish_members": float(len(updated)),
            "publish_failed_members": float(len(rounds.failed)),
            "publish_bytes": float(sum(bucket.payload_bytes for bucket in buckets)),
        }
        return Outcome(version, list(updated), list(rounds.failed), last_error, stats)

    def _attempt(
        self,
        version: int,
        weights: WeightSource,
        buckets: tuple[Bucket, ...],
        members: list[wire.Member],
        deadline: float,
        clock: PhaseSeconds,
    ) -> dict[str, Answer]:
        """Make one attempt; returns the members' answers. Raises only :class:`SourceError`."""
        failed_join = self._join(members, deadline, clock)
        if failed_join is not None:
            return failed_join
        stream = weights.stream()
        try:
            return self._send(version, weights, buckets, stream, members, deadline, clock)
        finally:
            for _ in stream:  # exhaust it: the other ranks take part in the collective to its end
                pass

    def _join(
        self, members: list[wire.Member], deadline: float, clock: PhaseSeconds
    ) -> dict[str, Answer] | None:
        """Open the group of ``members`` unless it is open. Returns None, or the members' answers if that failed."""
        member_ids = [m.member_id for m in members]
        if self._group is not None and member_ids == self._member_ids:
            return None
        self.close()
        started = time.perf_counter()
        s = self._settings
        timeout_seconds = max(0.1, min(s.timeout_seconds, deadline - time.monotonic()))
        self._epoch += 1
        store = Store(s.host, timeout_seconds)
        joined = (self._epoch, s.backend, 1 + len(members) * s.workers_per_member, timeout_seconds)
        joins = {
            member.member_id: store.join(*joined, rank=1 + i * s.workers_per_member)
            for i, member in enumerate(members)
        }
        calls = self._control.start(members, endpoints.WEIGHTS_JOIN, joins, timeout_seconds)
        try:
            group = open_group(store.join(*joined), store, s.device, lambda: _raise_first_failure(calls))
        except GroupError as error:
            log.warning("%s", error)
            # Members that failed before the store was closed are possible causes. Closing the store ends the wait of members
            # that have connected to it; the grace period lets the others connect first.
            causes = {m for m, answer in calls.answers.items() if not answer.ok}
            time.sleep(JOIN_GRACE_SECONDS)
            store.close()
            answers = _after_failure(calls, s.answer_grace_seconds)
            # If a member is gone, it is the cause: the errors of the others are lost connections to it.
            causes = {m for m, a in answers.items() if not (a.ok or a.cleared)} or causes
            return {m: _failed_join(a, str(error), m in causes) for m, a in answers.items()}
        answers = calls.wait()
        clock.open += time.perf_counter() - started
        if not all(answer.ok for answer in answers.values()):
            group.close()
            return {
                m: _failed_join(a, "another member did not join the group", not a.ok)
                for m, a in answers.items()
            }
        self._group, self._member_ids = group, member_ids
        return None

    def _send(
        self,
        version: int,
        weights: WeightSource,
        buckets: tuple[Bucket, ...],
        stream: NamedTensors,
        members: list[wire.Member],
        deadline: float,
        clock: PhaseSeconds,
    ) -> dict[str, Answer]:
        """Request the members to receive, and broadcast all buckets; returns the members' answers."""
        group = self._group
        assert group is not None
        s = self._settings
        timeout_seconds = max(0.1, min(s.timeout_seconds, deadline - time.monotonic()))
        message = wire.WeightReceive(
            epoch=group.epoch,
            version=version,
            tensors=weights.manifest,
            bucket_bytes=s.bucket_bytes,
            timeout_seconds=timeout_seconds,
            adapter_scale=weights.adapter_scale,
        )
        self._reserve(buckets)
        # Fill the first bucket before generation is paused.
        ready = self._fill(buckets[0], version, stream, clock)
        calls = self._control.start(
            members, endpoints.WEIGHTS_RECEIVE, {m.member_id: message for m in members}, timeout_seconds
        )
        problem = self._broadcast_all(version, buckets, ready, stream, group, calls, clock)
        if problem is not None:
            log.warning("%s", problem)
            # Closing the group ends the broadcast at the peers, over gloo only at its timeout. The buffers may still be sent
            # until then, so they must not be reused.
            self.close()
            self._buffers = []
            return _after_failure(calls, s.answer_grace_seconds, group.busy_until)
        answers = calls.wait()
        if not all(answer.ok for answer in answers.values()):
            self.close()
        return answers

    def _broadcast_all(
        self,
        version: int,
        buckets: tuple[Bucket, ...],
        ready: torch.Tensor,
        stream: NamedTensors,
        group: SenderGroup,
        calls: Calls,
        clock: PhaseSeconds,
    ) -> str | None:
        """Broadcast all buckets; returns None or an error message.

        It does not raise, because an exception's traceback would keep the group's connections open.
        """
        try:
            for bucket in buckets:
                work = group.start_broadcast(ready, self._settings.timeout_seconds)
                if bucket.index + 1 < len(buckets):
                    ready = self._fill(buckets[bucket.index + 1], version, stream, clock)
                started = time.perf_counter()
                group.wait(work, calls.deadline, lambda: _raise_first_failure(calls))
                clock.send += time.perf_counter() - started
        except GroupError as error:
            return str(error)
        return None

    def _fill(self, bucket: Bucket, version: int, stream: NamedTensors, clock: PhaseSeconds) -> torch.Tensor:
        started = time.perf_counter()
        filled = fill(bucket, version, stream, self._buffers[bucket.index % 2])
        clock.gather += time.perf_counter() - started
        return filled

    def _reserve(self, buckets: tuple[Bucket, ...]) -> None:
        """Allocate the buffers: two, so that one is filled while the other is sent."""
        largest = max(bucket.total_bytes for bucket in buckets)
        count = min(2, len(buckets))
        if len(self._buffers) != count or self._buffers[0].numel() != largest:
            self._buffers = [
                torch.empty(largest, dtype=torch.uint8, device=self._settings.device) for _ in range(count)
            ]


def _raise_first_failure(calls: Calls) -> None:
    failure = calls.first_failure()
    if failure is not None:
        raise GroupError(failure)


JOIN_GRACE_SECONDS = 0.5


def _after_failure(calls: Calls, grace_seconds: float, busy_until: float = 0.0) -> dict[str, Answer]:
    """The members' answers after the group failed. The group's operation ends by ``busy_until`` (monotonic)."""
    calls.deadline = max(calls.deadline, max(time.monotonic(), busy_until) + grace_seconds)
    return calls.wait()


def _failed_join(answer: Answer, reason: str, is_cause: bool) -> Answer:
    """A member's answer to a failed join. Members that are not its cause are ``cleared``."""
    if is_cause:
        return Answer(error=answer.error or reason)
    return Answer(error=reason, cleared=True) if answer.ok else answer
