"""Which members may get a version of the weights now, and which evaluations a publish waits for."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Core
from scalerl_coordinator.evaluation import Evaluation
from scalerl_coordinator.evaluators import Evaluators
from scalerl_coordinator.membership import Member
from scalerl_coordinator.slots import scheme

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Block:
    """An evaluation that a publish leaves generators to, or waits for."""

    last_measurable: float
    """When a healthy member last held the evaluated version."""
    since: float | None = None
    """Since when the publish has waited; None while it can go to other members."""
    waited_before: float = 0.0
    """Seconds for which publishes waited before that."""

    def count(self, now: float, *, waits: bool) -> None:
        """Start or pause the count of the seconds waited."""
        if not waits:
            self.waited_before, self.since = self.waited(now), None
        elif self.since is None:
            self.since = now

    def waited(self, now: float) -> float:
        """Seconds for which publishes have waited so far."""
        return self.waited_before + (0.0 if self.since is None else now - self.since)


@dataclass(frozen=True, slots=True)
class Permit:
    """Who may get a version of the weights now."""

    to_update: list[Member]
    """The outdated members that may get it: not those that keep a version which an evaluation holds, and none at all while an
    evaluation holds one that no member has."""
    blocking: set[int]
    """Versions whose evaluation blocks the publish."""


class PublishPermits:
    """Decides on a :class:`~.core.Core` which members get the trainer's weights."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._evaluators = Evaluators(core)
        self._blocks: dict[int, _Block] = {}
        """Evaluations that block a publish, by evaluated version."""
        self._ticked_at = 0.0

    def publishes(self, version: int) -> bool:
        """Whether the trainer publishes ``version`` right after the step that produced it."""
        return scheme(self.core.settings.identity).publishes(version)

    def _outdated(self, now: float) -> list[Member]:
        """Members that need the trainer's current weights.

        After the trainer returned to a checkpoint, members may hold newer weights of the lost lineage, up to the published
        version. They keep them until the next version is published, or until the run ends and its last version is evaluated.
        """
        version, newest = self.core.state.version, self.core.newest_possible
        unpublished = version > self.core.state.published and self.publishes(version)
        requires_version = bool(self.core.end_reason) or unpublished
        oldest = version if requires_version else scheme(self.core.settings.identity).oldest(version)
        return [
            m
            for m in self.core.membership.publishable(now)
            if m.version < oldest or m.version > newest or (requires_version and m.version != version)
        ]

    def decide(self, version: int, now: float) -> Permit:
        """Who may get ``version`` now. Counts for how long evaluations have blocked it, and releases those that have for too long."""
        evaluated = {e.version for e in self.core.state.evaluations.values() if self._blocks_publish(e)}
        kept = self._keepers(evaluated)
        overwritten = {m.version for m in self._outdated(now) if m.member_id in kept}
        blocking = self._evaluations_in_the_way(version, overwritten)
        self._blocks = {v: self._blocks.get(v, _Block(now)) for v in blocking}
        waits = self._waits(version, blocking, now)
        for block in self._blocks.values():
            block.count(now, waits=waits)
        self._end_blocks(now)
        blocking &= self._blocks.keys()
        return Permit(self._to_update(blocking, now), blocking)

    def _to_update(self, held: set[int], now: float) -> list[Member]:
        present = {m.version for m in self.core.membership.members.values() if m.healthy}
        if not held <= present:
            return []
        kept = self._keepers(held)
        return [m for m in self._outdated(now) if m.member_id not in kept]

    def in_backoff(self, version: int, now: float) -> bool:
        """Whether members have older weights than ``version`` and failed to get it: they will be sent it again after their back-off."""
        members = self.core.membership
        ready = members.publishable(now)
        return any(
            m.healthy and m.version_reported and m.version != version and m not in ready
            for m in members.members.values()
        )

    def _waits(self, version: int, blocking: set[int], now: float) -> bool:
        """Whether the run waits for evaluations of ``blocking`` before ``version`` gets to a generator. It does not while other members
        can be sent it, or have it and sample the next steps with it. A run that has ended waits in any case."""
        core = self.core
        if core.end_reason:
            return True
        held = any(m.healthy and m.version == version for m in core.membership.members.values())
        unserved = version > core.state.published or not held
        return unserved and not self._to_update(blocking, now)

    def _keepers(self, versions: set[int]) -> set[str]:
        """Ids of the members that keep one of ``versions``, which are evaluated: those that generate the evaluation, and those that
        have a prompt of it from when they did."""
        chosen = set[str]().union(*map(self._evaluators.of, versions))
        holders = (m for m in self.core.membership.members.values() if m.version in versions)
        return chosen | {
            m.member_id for m in holders if m.member_id not in chosen and self._evaluators.evaluates(m)
        }

    def _blocks_publish(self, evaluation: Evaluation) -> bool:
        """Whether the forecast follows its evaluation set and it is not released (it has not waited too long)."""
        return self.core.settings.follows(evaluation.task) and not evaluation.released

    def _evaluations_in_the_way(self, version: int, overwritten: set[int]) -> set[int]:
        """Versions under evaluation that a publish of ``version`` must wait for.

        These are the versions in ``overwritten``, which members to update would keep for them, and, if ``version`` is not published
        yet, those that no healthy member holds. A publish of an already published version, to a generator that joins within a
        batch of PPO-off-policy, does not affect members that hold the batch's weights and continue its evaluation.
        """
        state = self.core.state
        held = {m.version for m in self.core.membership.members.values() if m.healthy}
        return {
            v
            for (v, _), evaluation in state.evaluations.items()
            if v < version and self._blocks_publish(evaluation)
            if v in overwritten or (version > state.published and v not in held)
        }

    def _end_blocks(self, now: float) -> None:
        """Release the evaluations that have held a publish for too long, or whose version no member holds any more."""
        core = self.core
        for version in list(self._blocks):
            evaluations = [
                e for e in core.state.evaluations.values() if e.version == version and self._blocks_publish(e)
            ]
            if not evaluations:
                del self._blocks[version]
                continue
            block = self._blocks[version]
            if any(m.healthy and m.version == version for m in core.membership.members.values()):
                block.last_measurable = now
            waited, unserved = block.waited(now), now - block.last_measurable
            if waited >= core.settings.hold_seconds or unserved >= core.membership.timeout_seconds:
                for evaluation in evaluations:
                    log.warning(
                        "the evaluation of version %d has %d of %d prompts after %.0f s; newer weights will complete it",
                        *(version, len(evaluation.results), evaluation.prompts, waited),
                    )
                    core.commit(r.EvaluationReleased(version, evaluation.task))
                del self._blocks[version]

    def reset(self) -> None:
        """Forget the blocks: a new trainer publishes."""
        self._blocks.clear()

    def tick(self, now: float) -> bool:
        """End blocks that are over; returns whether one may time out, or a member's back-off has ended since the last tick."""
        before, self._ticked_at = self._ticked_at, now
        if self._blocks:
            self._end_blocks(now)
        return bool(self._blocks) or self.core.membership.backoff_over(before, now)
