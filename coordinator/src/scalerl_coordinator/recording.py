"""What of the rollouts goes into their record: the groups of trained steps, and those whose content is not journaled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from scalerl_api import wire
from scalerl_coordinator.core import Core
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.recorded_rows import RecordedGroup
from scalerl_coordinator.rollout_record import RolloutRecord
from scalerl_coordinator.shards import StepGroups

log = logging.getLogger(__name__)


class Recording:
    """Writes the groups of a :class:`~.core.Core` to a :class:`~.rollout_record.RolloutRecord`."""

    def __init__(self, core: Core, record: RolloutRecord, groups: StepGroups) -> None:
        self._core, self._record, self._groups = core, record, groups

    def keep_content(self, group: wire.Group, version: int) -> None:
        """Record a group whose content is not journaled: of an evaluation, or one whose slot gets another prompt."""
        state, verdicts = self._core.state, group.verdicts
        lengths = [completion.tokens for completion in group.completions]
        if group.split is wire.Split.HELD_OUT:
            self._record.keep(
                RecordedGroup(
                    *(version, group.slot, group.prompt, group, lengths),
                    *(verdicts.scores, verdicts.parts, verdicts.ungraded),
                )
            )
            return
        tries = [one.group for one in state.tries.get(group.slot, ()) if one.group.lease_id == group.lease_id]
        if tries:
            step = state.step_of(group.slot)
            one = RecordedGroup.of_training(step, group.slot, group.prompt, tries[0], group, skipped=False)
            self._record.keep(replace(one, excluded="refilled"))

    def truncate(self) -> None:
        """Delete the steps that the trainer, which has returned to a checkpoint, trains again."""
        self._record.truncate(self._core.state.version)

    async def add_step(self, step: int, sequences: Sequence[wire.TrainedSequence] = ()) -> None:
        """Record the groups of a step that was trained or skipped."""
        state, groups = self._core.state, self._groups.cached(step)
        recorded = [
            (slot, state.prompts[slot], group)
            for slot, group in zip(state.slots_of(step), state.step_groups(step), strict=True)
            if self._core.settings.records(state.prompts[slot])
        ]
        skipped, settled = step in state.skips, state.first_kept_step
        if groups is None:
            try:
                lease_ids = [group.lease_id for _, _, group in recorded]
                groups = await asyncio.to_thread(self._groups.read, lease_ids)
            except (KeyError, CorruptJournal, OSError) as problem:
                log.warning("step %d is not recorded: %s", step, problem)
                return
        self._record.add_step(
            step,
            [
                RecordedGroup.of_training(step, slot, prompt, group, groups.get(group.lease_id), skipped)
                for slot, prompt, group in recorded
            ],
            *(sequences, settled),
        )

    async def add_journaled(self) -> None:
        """Record steps of whose report a crash left no record. Without the trainer's figures, which are not journaled."""
        state = self._core.state
        for step in range(state.first_kept_step, state.version):
            if await asyncio.to_thread(self._record.has_step, step):
                continue
            await self.add_step(step)
