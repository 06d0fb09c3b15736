"""Slots, steps and versions: the arithmetic that bounds staleness by construction.

Slots are one sequence over the whole run. Step ``t`` consumes the ``B`` slots from its first one on and is trained by
the weights of version ``t``. A member that holds version ``v`` may be given slot ``q`` only while
``q < first_slot(v + k + 1)``; then ``step_of(q) − v ≤ k``, and since a member's version only grows while it generates,
no token of the slot is older than ``k`` updates at its step. This is PipelineRL-k (arXiv 2510.13786 §3 [P]); ``k = 0``
is fully synchronous.

``B`` may change under way: every :class:`BatchSize` holds from its first step to the first step of the next one.

Where generators keep ahead of the trainer, every token is older than its step, and no sampled token compares the two
sides at equal weights. So every :data:`FRESH_EVERY` · k steps a small share of the step's slots waits for the weights
that will train them. Cost: such a step cannot begin before its fresh groups are done, one generation of a group after
its weights went out. With k sized as it should be (a generation takes at most k steps), that is k steps in
``FRESH_EVERY`` · k: at most 4 % of the trainer's time, and of the generators' only what the bound k makes them wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

FRESH_EVERY = 25
"""Steps between measurements, for each step of allowed staleness: the wait grows with k, its share of time does not."""

_FRESH_SHARE = 0.05
_LEAST_FRESH = 4
"""Groups that all score alike are filtered and measure nothing: with four some are likely to be trained on."""


class BatchSize(msgspec.Struct, frozen=True, array_like=True):
    """From ``first_step`` on a step consumes ``prompts_per_step`` slots, the first of them ``first_slot``."""

    first_step: int
    first_slot: int
    prompts_per_step: int


def size_of(step: int, sizes: Sequence[BatchSize]) -> BatchSize:
    """What ``step`` is cut by. ``sizes`` ascend, the first is of step 0 or of the first step that is kept."""
    return next((size for size in reversed(sizes) if size.first_step <= step), sizes[0])


def first_slot(step: int, sizes: Sequence[BatchSize]) -> int:
    """The first slot that ``step`` consumes.

    >>> first_slot(3, [BatchSize(0, 0, 4), BatchSize(2, 8, 10)])
    18
    """
    size = size_of(step, sizes)
    return size.first_slot + (step - size.first_step) * size.prompts_per_step


def slots_of(step: int, sizes: Sequence[BatchSize]) -> range:
    """The slots that ``step`` consumes."""
    return range(first_slot(step, sizes), first_slot(step, sizes) + size_of(step, sizes).prompts_per_step)


def step_of(slot: int, sizes: Sequence[BatchSize]) -> int:
    """The step that consumes ``slot``.

    >>> [step_of(slot, [BatchSize(0, 0, 4), BatchSize(2, 8, 10)]) for slot in (7, 8, 17, 18)]
    [1, 2, 2, 3]
    """
    size = next((size for size in reversed(sizes) if size.first_slot <= slot), sizes[0])
    return size.first_step + (slot - size.first_slot) // size.prompts_per_step


def lease_limit(
    version: int, sizes: Sequence[BatchSize], max_staleness_steps: int, max_steps: int | None
) -> int:
    """First slot that a member holding ``version`` may not be given; 0 for a member without weights.

    >>> eight = [BatchSize(0, 0, 8)]
    >>> lease_limit(0, eight, 2, None), lease_limit(5, eight, 0, None), lease_limit(5, eight, 2, 6)
    (24, 48, 48)
    >>> lease_limit(-1, eight, 2, 6)
    0
    """
    if version < 0:
        return 0
    steps = version + max_staleness_steps + 1
    return first_slot(steps if max_steps is None else min(steps, max_steps), sizes)


def is_fresh(slot: int, sizes: Sequence[BatchSize], max_staleness_steps: int) -> bool:
    """Whether ``slot`` waits for the weights that will train it. It is the same for a slot until settings change.

    >>> [slot for slot in range(3000) if is_fresh(slot, [BatchSize(0, 0, 100)], 1)]
    [0, 1, 2, 3, 4, 2500, 2501, 2502, 2503, 2504]
    """
    step = step_of(slot, sizes)
    if max_staleness_steps == 0 or step % (FRESH_EVERY * max_staleness_steps):
        return False
    slots = slots_of(step, sizes)
    return slot - slots.start < max(_LEAST_FRESH, round(_FRESH_SHARE * len(slots)))


def staleness(step: int, version: int) -> int:
    """Updates between the version that sampled a token and the one that trains on it.

    Never negative: after a trainer's return to an older checkpoint, tokens can come from weights ahead of it.
    """
    return max(0, step - version)
