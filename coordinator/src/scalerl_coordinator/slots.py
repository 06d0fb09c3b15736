"""Slots, steps and versions: the arithmetic that bounds staleness by construction.

Step ``t`` consumes slots ``[t·B, (t+1)·B)`` and is trained by the weights of version ``t``. A member that
holds version ``v`` may be given slot ``q`` only while ``q < (v + k + 1)·B``; then ``q // B − v ≤ k``, and
since a member's version only grows while it generates, no token of the slot is older than ``k`` updates at
its step. This is PipelineRL-k (arXiv 2510.13786 §3 [P]); ``k = 0`` is fully synchronous.
"""

from __future__ import annotations


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


def staleness(step: int, version: int) -> int:
    """Updates between the version that sampled a token and the one that trains on it.

    Never negative: after a trainer's return to an older checkpoint, tokens can come from weights ahead of it.
    """
    return max(0, step - version)
