"""The state machine of one publish: the members of the next round, and the effect of its answers. Pure.

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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scalerl_trainer.publish.actor_control import Answer

TOGETHER = 2
"""Consecutive rounds without a cause before each member gets a separate group."""


@dataclass(frozen=True)
class Rounds:
    """State of a publish. Each member is in one of ``waiting``, ``updated`` and ``failed``, by its id."""

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
