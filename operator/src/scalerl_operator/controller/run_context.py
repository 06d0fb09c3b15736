"""Seen: one run as a look finds it, and what the last look left of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_api.conditions import Phase
from scalerl_api.status import RunStatus
from scalerl_operator.controller.owned import Place, leaving
from scalerl_operator.controller.status import Steered
from scalerl_operator.names import Names
from scalerl_operator.policy.decision import Course, Memory, Rest


@dataclass(frozen=True)
class Seen(Place):
    """A run as it is found, and what the last look left."""

    before: RunStatus
    memory: Memory

    @property
    def finalizers(self) -> list[str]:
        return list(self.run["metadata"].get("finalizers") or ())

    @property
    def at_work(self) -> list[tuple[str, str]]:
        """(kind, name) of what should work in a run that is to be suspended or deleted, as long as nothing has been done
        about it. What has never worked has nothing."""
        memory, names = self.memory, Names(self.name)
        asked = leaving(self.run) or self.run["spec"].get("suspend") is True
        done = memory.rest is not Rest.NO or memory.drain_since is not None or memory.outcome
        if not asked or done:
            return []
        found = [("Job", names.prepare)] if self.before.phase is Phase.PREPARING else []
        if memory.attempt > 0:
            found += [("Deployment", names.generator), ("StatefulSet", names.coordinator)]
            found += [("Job", names.trainer_job(memory.attempt))]
        return found

    def knows(self, course: Course, steered: Steered, accepted_spec: str | None) -> bool:
        """Whether what the next look has to know is as the last one left it."""
        known = self.before.generators
        return (
            course.memory == self.memory
            and (steered.base, steered.chosen) == (known.base, known.chosen)
            and accepted_spec == self.before.accepted_spec
        )

    @property
    def generation(self) -> int:
        return int(self.run["metadata"].get("generation", 0))
