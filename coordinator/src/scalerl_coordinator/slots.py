"""Slots, steps and versions: the arithmetic that bounds staleness by construction.

Step ``t`` consumes slots ``[t·B, (t+1)·B)`` and is trained by the weights of version ``t``. A member that
holds version ``v`` may be given slot ``q`` only while ``q < (v + k + 1)·B``; then ``q // B − v ≤ k``, and
since a member's version only grows while it generates, no token of the slot is older than ``k`` updates at
its step. This is PipelineRL-k (arXiv 2510.13786 §3 [P]); ``k = 0`` is fully synchronous.

Where generators keep ahead of the trainer, every token is older than its step, and no sampled token compares the two
sides at equal weights. So every :data:`FRESH_EVERY` · k steps a small share of the step's slots waits for the weights
that will train them. Cost: such a step cannot begin before its fresh groups are done, one generation of a group after
its weights went out. With k sized as it should be (a generation takes at most k steps), that is k steps in
``FRESH_EVERY`` · k: at most 4 % of the trainer's time, and of the generators' only what the bound k makes them wait.
"""

from __future__ import annotations

FRESH_EVERY = 25
"""Steps between measurements, for each step of allowed staleness: the wait grows with k, its share of time does not."""

_FRESH_SHARE = 0.05
_LEAST_FRESH = 4
"""Groups that all score alike are filtered and measure nothing: with four some are likely to be trained on."""


def step_of(slot: int, prompts_per_step: int) -> int:
    """The step that consumes ``slot``."""
    return slot // prompts_per_step


def slots_of(step: int, prompts_per_step: int) -> range:
    """The slots that ``step`` consumes."""
    return range(step * prompts_per_step, (step + 1) * prompts_per_step)


def lease_limit(version: int, prompts_per_step: int, max_staleness_steps: int, max_steps: int | None) -> int:
    """First slot that a member holding ``version`` may not be given; 0 for a member without weights.

    >>> lease_limit(0, 8, 2, None), lease_limit(5, 8, 0, None), lease_limit(5, 8, 2, 6), lease_limit(-1, 8, 2, 6)
    (24, 48, 48, 0)
    """
    if version < 0:
        return 0
    steps = version + max_staleness_steps + 1
    return (steps if max_steps is None else min(steps, max_steps)) * prompts_per_step


def is_fresh(slot: int, prompts_per_step: int, max_staleness_steps: int) -> bool:
    """Whether ``slot`` waits for the weights that will train it. It is the same for a slot whenever it is asked.

    >>> [slot for slot in range(3000) if is_fresh(slot, 100, 1)]
    [0, 1, 2, 3, 4, 2500, 2501, 2502, 2503, 2504]
    """
    step, place = divmod(slot, prompts_per_step)
    if max_staleness_steps == 0 or step % (FRESH_EVERY * max_staleness_steps):
        return False
    return place < max(_LEAST_FRESH, round(_FRESH_SHARE * prompts_per_step))


def staleness(step: int, version: int) -> int:
    """Updates between the version that sampled a token and the one that trains on it.

    Never negative: after a trainer's return to an older checkpoint, tokens can come from weights ahead of it.
    """
    return max(0, step - version)
