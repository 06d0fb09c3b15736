"""Slots, steps and versions: the arithmetic that bounds staleness.

Slots are one sequence over the whole run. Step ``t`` consumes ``B`` consecutive slots and is trained by the weights of
version ``t``. A member that holds version ``v`` may be issued slot ``q`` only while its step is below
:meth:`OffPolicy.may_lease`. For PipelineRL-k that is ``v + k + 1``; then ``step_of(q) − v ≤ k``, and since a
member's version only grows while it generates, no token of the slot is older than ``k`` updates at its step. ``k = 0`` is
fully synchronous.

``B`` may change during a run: every :class:`BatchSize` holds from its first step to the first step of the next one.

If generators stay ahead of the trainer, every token is older than its step, and no token is scored by trainer and
generator at equal weights. Therefore, every :data:`ON_POLICY_EVERY` · k steps, a small fraction of the step's slots is
on-policy: they wait for the weights that will train them. The cost: such a step cannot begin before these groups are
complete, one group's generation after its weights are published. If k is sized as recommended (a generation takes at most
k steps), that is k steps in ``ON_POLICY_EVERY`` · k: at most 4 % of the trainer's time. Generators only lose the time for
which the bound k makes them wait.

For which steps a version may generate, and which versions are published, is the off-policy scheme's:

======================  ==============================================  ==================================================
scheme                  weights of version v generate for               the trainer publishes
======================  ==============================================  ==================================================
PipelineRL-k            steps up to v + k, continued by newer ones      after every update
PPO-off-policy-k        the k steps from the last multiple of k on      after k updates: versions 0, k, 2k, …
======================  ==============================================  ==================================================

The staleness bound is k for PipelineRL and k − 1 for PPO-off-policy. With PipelineRL, generators and trainer are busy at the
same time; with PPO-off-policy they alternate (ScaleRL, arXiv 2510.13786 §3 [P]).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from scalerl_coordinator.settings import Identity

ON_POLICY_EVERY = 25
"""Steps between on-policy slots, per step of allowed staleness: the wait grows with k, but its share of the time does not."""

_ON_POLICY_FRACTION = 0.05
_MIN_ON_POLICY = 4
"""At least this many slots, because filtered groups (equal scores) measure nothing."""


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """The scheme: batches of one step, and ``steps_ahead`` steps beyond them, are PipelineRL; batches alone are PPO-off-policy.

    A generator that joins within a batch gets the trainer's current weights, the only ones that it has.

    >>> pipeline, ppo = OffPolicy(8), OffPolicy(steps_per_batch=8)
    >>> pipeline.may_lease(5), pipeline.publishes(5), pipeline.oldest(5)
    (14, True, 5)
    >>> [ppo.may_lease(v) for v in (0, 7, 8)], [ppo.publishes(v) for v in (0, 7, 8)], ppo.oldest(13)
    ([8, 8, 16], [True, False, True], 8)
    """

    steps_ahead: int = 0
    steps_per_batch: int = 1

    def may_lease(self, version: int) -> int:
        """The first step for which a generator with weights of ``version`` may not generate."""
        return self.oldest(version) + self.steps_per_batch + self.steps_ahead

    def publishes(self, version: int) -> bool:
        """Whether the trainer publishes ``version`` right after the step that produced it."""
        return self.oldest(version) == version

    def oldest(self, version: int) -> int:
        """The oldest version that may generate while the trainer has ``version``; generators with older weights are updated."""
        return version - version % self.steps_per_batch


def scheme(identity: Identity) -> OffPolicy:
    """The scheme of ``recipe.offPolicy``."""
    if identity.steps_per_batch:
        return OffPolicy(steps_per_batch=identity.steps_per_batch)
    return OffPolicy(identity.max_staleness_steps)


class BatchSize(msgspec.Struct, frozen=True, array_like=True):
    """From ``first_step`` on, every step consumes ``prompts_per_step`` slots, starting at ``first_slot``."""

    first_step: int
    first_slot: int
    prompts_per_step: int


def size_of(step: int, sizes: Sequence[BatchSize]) -> BatchSize:
    """The batch size of ``step``. ``sizes`` are ascending, starting with that of step 0 or of the first kept step."""
    return next((size for size in reversed(sizes) if size.first_step <= step), sizes[0])


def first_slot(step: int, sizes: Sequence[BatchSize]) -> int:
    """The first slot that ``step`` consumes.

    >>> first_slot(3, [BatchSize(0, 0, 4), BatchSize(2, 8, 10)])
    18
    """
    size = size_of(step, sizes)
    return size.first_slot + (step - size.first_step) * size.prompts_per_step


def slots_of(step: int, sizes: Sequence[BatchSize]) -> range:
    return range(first_slot(step, sizes), first_slot(step, sizes) + size_of(step, sizes).prompts_per_step)


def step_of(slot: int, sizes: Sequence[BatchSize]) -> int:
    """The step that consumes ``slot``.

    >>> [step_of(slot, [BatchSize(0, 0, 4), BatchSize(2, 8, 10)]) for slot in (7, 8, 17, 18)]
    [1, 2, 2, 3]
    """
    size = next((size for size in reversed(sizes) if size.first_slot <= slot), sizes[0])
    return size.first_step + (slot - size.first_slot) // size.prompts_per_step


def lease_limit(
    version: int, sizes: Sequence[BatchSize], off_policy: OffPolicy, max_steps: int | None
) -> int:
    """First slot that may not be issued to a member with ``version``; 0 for a member without weights.

    >>> eight = [BatchSize(0, 0, 8)]
    >>> [lease_limit(v, eight, OffPolicy(k), end) for v, k, end in ((0, 2, None), (5, 0, None), (5, 2, 6), (-1, 2, 6))]
    [24, 48, 48, 0]
    """
    if version < 0:
        return 0
    steps = off_policy.may_lease(version)
    return first_slot(steps if max_steps is None else min(steps, max_steps), sizes)


def on_policy_slots(step: int, sizes: Sequence[BatchSize], max_staleness_steps: int) -> range:
    """The slots of ``step`` that wait for the weights that will train them. Constant for a step while settings are.

    >>> [slot for step in range(30) for slot in on_policy_slots(step, [BatchSize(0, 0, 100)], 1)]
    [0, 1, 2, 3, 4, 2500, 2501, 2502, 2503, 2504]
    """
    if max_staleness_steps == 0 or step % (ON_POLICY_EVERY * max_staleness_steps):
        return range(0)
    slots = slots_of(step, sizes)
    return slots[: max(_MIN_ON_POLICY, round(_ON_POLICY_FRACTION * len(slots)))]


def staleness(step: int, version: int) -> int:
    """Number of updates between the version that sampled a token and the one that trains on it.

    Tokens from newer weights, which exist after the trainer returned to a checkpoint, have staleness 0.
    """
    return max(0, step - version)
