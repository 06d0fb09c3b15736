"""The groups of closed steps, as they are read from the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Refusal
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.journal import Journal
from scalerl_coordinator.shards import ShardPlan


class StepGroups:
    """Reads the groups of a step once for all ranks.

    Args:
        fail: called with an error after which the coordinator cannot continue; returns what its request gets.
    """

    def __init__(self, journal: Journal, fail: Callable[[BaseException], Exception]) -> None:
        self._journal = journal
        self._fail = fail
        self._by_step: dict[int, tuple[list[str], dict[str, r.StoredGroup]]] = {}
        self._lock = asyncio.Lock()

    def cached(self, step: int) -> dict[str, r.StoredGroup] | None:
        """The groups of a step by lease id, if they have been read and not been forgotten."""
        cached = self._by_step.get(step)
        return None if cached is None else cached[1]

    def clear(self) -> None:
        """Forget all groups: the state has changed."""
        self._by_step.clear()

    def forget(self, last: int) -> None:
        """Forget the groups of the steps up to ``last``, which have been trained."""
        for step in [step for step in self._by_step if step <= last]:
            del self._by_step[step]

    async def of_plan(self, plan: ShardPlan) -> dict[str, r.StoredGroup]:
        """The groups of a step by lease id, read once for all ranks and cached until the step's report: those of the step that is
        trained, and of the next."""
        async with self._lock:
            cached = self._by_step.get(plan.step)
            if cached is None or cached[0] != plan.lease_ids:
                self._by_step.pop(plan.step, None)
                if len(self._by_step) > 1:
                    del self._by_step[min(self._by_step)]
                try:
                    groups = await asyncio.to_thread(self.read, plan.lease_ids)
                except KeyError as problem:
                    raise Refusal(
                        "not-ready", f"step {plan.step} was deleted before it was read (group {problem})"
                    ) from None
                except (CorruptJournal, OSError) as problem:
                    raise self._fail(problem) from problem
                self._by_step[plan.step] = cached = (plan.lease_ids, groups)
            return cached[1]

    def read(self, lease_ids: list[str]) -> dict[str, r.StoredGroup]:
        """The groups of these leases; blocks. Raises KeyError, CorruptJournal, OSError."""
        wanted = [lease_id for lease_id in lease_ids if lease_id]
        blobs = self._journal.blobs.read(wanted)
        try:
            return {lease_id: r.decode_stored(blob) for lease_id, blob in zip(wanted, blobs, strict=True)}
        except msgspec.DecodeError as problem:
            raise CorruptJournal(
                str(self._journal.directory), 0, f"a group cannot be decoded: {problem}"
            ) from problem
