"""Which generators evaluate a version (``evaluation.generators``), and which may complete an evaluation with newer weights."""

from __future__ import annotations

from scalerl_api.wire import Split
from scalerl_coordinator.core import Core
from scalerl_coordinator.evaluation import Evaluation
from scalerl_coordinator.leases import SlotKey
from scalerl_coordinator.membership import Member, name_of


class Evaluators:
    """The choice on a :class:`~.core.Core`, which follows from its state and members."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def newer_may_complete(self, evaluation: Evaluation) -> bool:
        """Whether members with newer weights may serve an evaluation: the forecast does not follow its set, or it is released."""
        return evaluation.released or not self._core.settings.follows(evaluation.task)

    def may_evaluate(self, key: SlotKey, member: Member, chosen: set[str]) -> bool:
        """Whether a member with the version under evaluation, of which ``chosen`` are the evaluators, :meth:`of`, may serve a prompt: one of
        those, or any other once the prompt failed with all of those."""
        if member.member_id in chosen:
            return True
        retries = self._core.book.retries.get(key)
        return (
            retries is not None
            and member.healthy
            and bool(chosen)
            and retries.failed_by.issuperset(map(name_of, chosen))
        )

    def of(self, version: int) -> set[str]:
        """Ids of the members that generate an evaluation of ``version`` on a set that the forecast follows: ``evaluation.generators`` of
        those that hold it, or all of them without that field, and at the end of the run, for its last version.

        Members that have prompts of it come first, then the order is by name: a coordinator that restarts chooses the same.
        """
        holders = [m for m in self._core.membership.members.values() if m.healthy and m.version == version]
        count = self._core.settings.evaluation_generators
        if count is not None and not (self._core.end_reason and version == self._core.state.version):
            holders = sorted(holders, key=lambda m: (not self.evaluates(m), m.name))[:count]
        return {m.member_id for m in holders}

    def evaluates(self, member: Member) -> bool:
        """Whether a member has leases of an evaluation of its version on a set that the forecast follows."""
        leases = (self._core.state.leases[lease_id] for lease_id in self._core.book.of(member.name))
        return any(
            lease.split is Split.HELD_OUT
            and lease.policy_version == member.version
            and self._core.settings.follows(lease.prompt.task)
            for lease in leases
        )
