"""Totals of a run: rollouts by outcome, sums over the trained lineage, and usage of time and devices.

They differ in what happens when the trainer returns to a checkpoint: :class:`RolloutCounts` moves rollouts between counts
and loses none, :class:`Lineage` is reset to its value at that version, :class:`Usage` never decreases.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scalerl_api.mismatch import ALL, POSITIONS, SOURCES, key
from scalerl_coordinator.step_figures import StepSums


class RolloutCounts(msgspec.Struct, array_like=True):
    """Training rollouts by outcome: ``acknowledged = trained + filtered + queued + skipped`` after every record."""

    acknowledged: int = 0
    trained: int = 0
    filtered: int = 0
    queued: int = 0
    late: int = 0
    stale: int = 0
    invalid: int = 0
    duplicate: int = 0
    expired_leases: int = 0
    held_out_invalid: int = 0
    """Evaluation rollouts that were rejected as invalid."""
    grading_errors: int = 0
    """Accepted rollouts, held-out ones included, for which the verifier failed."""
    given_up: int = 0
    """Rollouts that the given-up slots would have had; not part of any other count."""
    too_long: int = 0
    """The part of ``given_up`` whose prompt leaves no room for a completion."""
    ungraded: int = 0
    """The part of ``acknowledged`` that is not trained on because the verifier failed."""
    masked_tokens: int = 0
    """Masked tokens of acknowledged rollouts."""
    skipped: int = 0
    """Rollouts of steps whose update was not applied."""
    held_out_given_up: int = 0
    """Held-out rollouts that score 0 because they could not be generated."""
    timed_out_leases: int = 0
    """The part of ``expired_leases`` that passed its deadline."""
    refilled: int = 0
    """The part of ``filtered`` whose slots were issued again with another prompt."""


class Lineage(msgspec.Struct, array_like=True, frozen=True):
    """Sums over the steps trained on one lineage, from version 0 on."""

    work_tokens: int = 0
    """Completion tokens consumed, filtered groups included: the compute axis of the curve."""
    trained_tokens: int = 0
    """Tokens in the loss, as reported by the trainer."""
    staleness_tokens: int = 0
    """Completion tokens of trained (unfiltered) groups."""
    staleness_sum: int = 0
    """Sum of the staleness, in steps, of these tokens."""
    staleness_max: int = 0
    consecutive_skipped_steps: int = 0
    reference_tokens: int = 0
    """The part of ``work_tokens`` that a reference policy scored."""
    flat_steps: int = 0
    """Consecutive last steps that taught nothing: no completion scored above 0, or all groups were filtered. Steps without a
    score are passed over."""
    flat_low: float = 1.0
    """Lowest score of these steps."""
    flat_high: float = 0.0
    """Highest score of these steps."""
    recent_tokens: float = 0.0
    """Completion tokens of recent steps: the sum is halved before each step."""
    recent_unusable_tokens: float = 0.0
    """The part of ``recent_tokens`` without a finite log-probability."""

    @property
    def mean_staleness(self) -> float:
        return self.staleness_sum / self.staleness_tokens if self.staleness_tokens else 0.0


def extend(
    lineage: Lineage, sums: StepSums, trained_tokens: int, *, skipped: bool, reference: bool = False
) -> Lineage:
    """The lineage extended by one step. A skipped step consumes its tokens and trains on none."""
    reference_tokens = lineage.reference_tokens + sums.work_tokens * reference
    recent = _recent(lineage, sums)
    if skipped:
        return msgspec.structs.replace(
            lineage,
            work_tokens=lineage.work_tokens + sums.work_tokens,
            consecutive_skipped_steps=lineage.consecutive_skipped_steps + 1,
            reference_tokens=reference_tokens,
            **recent,
        )
    return Lineage(
        work_tokens=lineage.work_tokens + sums.work_tokens,
        trained_tokens=lineage.trained_tokens + trained_tokens,
        staleness_tokens=lineage.staleness_tokens + sums.staleness_tokens,
        staleness_sum=lineage.staleness_sum + max(0, sums.staleness_sum),
        staleness_max=max(lineage.staleness_max, sums.staleness_max),
        reference_tokens=reference_tokens,
        **recent,
    )


def _recent(lineage: Lineage, sums: StepSums) -> dict[str, Any]:
    """The fields of the lineage about its last steps, after one more."""
    recent: dict[str, Any] = {
        "recent_tokens": lineage.recent_tokens / 2 + sums.work_tokens,
        "recent_unusable_tokens": lineage.recent_unusable_tokens / 2 + sums.unusable_tokens,
    }
    if not sums.graded:
        names = ("flat_steps", "flat_low", "flat_high")
        return recent | {name: getattr(lineage, name) for name in names}
    if sums.high > 0 and sums.filtered_groups < sums.groups:
        return recent
    return recent | {
        "flat_steps": lineage.flat_steps + 1,
        "flat_low": min(lineage.flat_low, sums.low),
        "flat_high": max(lineage.flat_high, sums.high),
    }


class MismatchSums(msgspec.Struct, array_like=True):
    """One KL estimate between trainer and generators, summed over tokens: of the whole run, and of recent measurements.

    The recent sums are halved before each new measurement. An alert reads their quotient, which should react to a few
    measurements but not to a few tokens.
    """

    kl: float = 0.0
    tokens: float = 0.0
    recent_kl: float = 0.0
    recent_tokens: float = 0.0

    def add(self, kl: float, tokens: float) -> None:
        """Add a measurement: ``kl`` is the mean over ``tokens`` (> 0) tokens."""
        self.kl += kl * tokens
        self.tokens += tokens
        self.recent_kl = self.recent_kl / 2 + kl * tokens
        self.recent_tokens = self.recent_tokens / 2 + tokens


def add_mismatches(sums: dict[str, MismatchSums], stats: dict[str, float]) -> None:
    """Add the measurements in the ``stats`` of a step or a publish to ``sums``, by the key of the KL estimate."""
    for source in SOURCES:
        for positions in (ALL, *POSITIONS):
            name = key(source, "kl", positions)
            tokens = stats.get(key(source, "tokens", positions), 0.0)
            if name in stats and tokens > 0:
                sums.setdefault(name, MismatchSums()).add(stats[name], tokens)


class Usage(msgspec.Struct, array_like=True):
    """Usage since the first lease, and of mid-training, over all processes. Never decreases."""

    wall_seconds: float = 0.0
    device_seconds: float = 0.0
    generator_alive_seconds: float = 0.0
    generator_busy_seconds: float = 0.0
    generated_tokens: int = 0
    trainer_busy_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Time of coordinators before the first lease, without that of mid-training."""

    @property
    def generator_busy_fraction(self) -> float:
        return _fraction(self.generator_busy_seconds, self.generator_alive_seconds)

    @property
    def trainer_busy_fraction(self) -> float:
        return _fraction(self.trainer_busy_seconds, self.wall_seconds)


def _fraction(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
