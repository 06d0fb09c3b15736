"""The state machine of one publish: which members the next round addresses, and what its answers decide. Pure.

========================  =========================  ========================================================
answer of a member        rounds without a cause     then
========================  =========================  ========================================================
weights received          any                        updated
an error, it is a cause   any                        failed; the others try again together
an error, it is cleared   0 or 1                     tries again, with the others
an error, it is cleared   2 or more                  failed: it was in a group of its own
========================  =========================  ========================================================

When a peer dies in a broadcast, all members get an error, and possibly none of them is the cause. So a round without a
cause is repeated once; after a second one each member gets a group of its own, so that a member that breaks every group
fails alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scalerl_trainer.publish.actor_control import Answer

TOGETHER = 2
"""Rounds without a cause before each member is tried in a group of its own."""


@dataclass(frozen=True)
class Rounds:
    """State of a publish.

    waiting, updated, failed: member ids; each member is in one of them.
    count: rounds so far.
    without_cause: consecutive failed rounds without a member that was the cause.
    """

    waiting: tuple[str, ...]
    updated: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    count: int = 0
    without_cause: int = 0

    def groups(self) -> list[tuple[str, ...]]:
        """The groups of the next round, one after the other; none when the publish is over."""
        if not self.waiting:
            return []
        return [(member,) for member in self.waiting] if self._alone else [self.waiting]

    def after(self, answers: Mapping[str, Answer]) -> Rounds:
        """The state after a round; ``answers`` has one of each waiting member."""
        updated = tuple(m for m in self.waiting if answers[m].ok)
        again = tuple(m for m in self.waiting if answers[m].cleared and not answers[m].ok and not self._alone)
        failed = tuple(m for m in self.waiting if m not in updated and m not in again)
        return replace(
            self,
            waiting=again,
            updated=self.updated + updated,
            failed=self.failed + failed,
            count=self.count + 1,
            without_cause=0 if failed else self.without_cause + 1,
        )

    @property
    def _alone(self) -> bool:
        return self.without_cause >= TOGETHER
