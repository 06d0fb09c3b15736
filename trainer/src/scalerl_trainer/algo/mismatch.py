"""Mismatch between the log-probabilities of trainer and generator.

With d = log π_train(y) - log π_gen(y) at tokens that π_gen sampled, and ρ = exp(d):

- k1 = -d and k3 = (ρ - 1) - d both estimate KL(π_gen ‖ π_train), unbiased; k1 may be negative, k3 is never negative and
  has the lower variance (Schulman's estimators [S]).
- Σρ / N is 1 in expectation when both are the same policy.

For tokens sampled with the trainer's present weights, d measures numerical differences only; over a step's whole batch it
includes staleness. Separate statistics of these two sets of tokens separate the two causes.

Statistics are sums, so that those of micro-batches and ranks can be added. Shapes: see the package's legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scalerl_api.mismatch import ALL, POSITION_EDGES, POSITIONS, key
from scalerl_trainer.errors import NonFiniteLogprobError

# log ρ is clamped before exp, so that one broken token gives a large finite ratio instead of an infinite sum.
LOG_RATIO_LIMIT = 30.0

BEYOND_RATIO = 10.0
"""Limit of ρ and 1/ρ, beyond which a token is an outlier. Two bfloat16 implementations agree within .1 on nearly every
token, and a policy that changes within the losses' clip ranges stays far below the limit."""


@dataclass(frozen=True, slots=True)
class RatioStatistics:
    """Sums over ``tokens`` tokens; the properties are means.

    Without tokens all values are 0, except for ``ratio_mean`` and ``effective_sample_fraction``, which are 1.

    >>> both = ratio_statistics(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0]))
    >>> both.kl_k3, both.ratio_mean, both.ratio_max
    (0.0, 1.0, 1.0)
    """

    tokens: float = 0.0
    k3_sum: float = 0.0
    ratio_sum: float = 0.0
    ratio_square_sum: float = 0.0
    absolute_difference_sum: float = 0.0
    beyond: float = 0.0
    """Number of outliers (``BEYOND_RATIO``)."""
    ratio_max: float = 0.0
    """Largest ρ, the only field that is not a sum."""

    @property
    def kl_k3(self) -> float:
        """Mean k3 estimate of KL(generator ‖ trainer), nats per token, never negative."""
        return self.k3_sum / max(self.tokens, 1.0)

    @property
    def ratio_mean(self) -> float:
        """Mean ρ."""
        return self.ratio_sum / self.tokens if self.tokens else 1.0

    @property
    def beyond_fraction(self) -> float:
        """Fraction of tokens with ρ or 1/ρ above :data:`BEYOND_RATIO`, or ρ NaN; robust to single tokens."""
        return self.beyond / max(self.tokens, 1.0)

    @property
    def absolute_difference(self) -> float:
        """Mean |log π_train - log π_gen|, nats per token."""
        return self.absolute_difference_sum / max(self.tokens, 1.0)

    @property
    def effective_sample_fraction(self) -> float:
        """(Σρ)² / (N Σρ²), in [0, 1]: effective sample size of the importance weights, as a fraction of the tokens.

        It is 0 if every ρ² underflows.
        """
        if not self.tokens:
            return 1.0
        return self.ratio_sum**2 / (self.tokens * self.ratio_square_sum) if self.ratio_square_sum else 0.0

    def __add__(self, other: RatioStatistics) -> RatioStatistics:
        return RatioStatistics(
            self.tokens + other.tokens,
            self.k3_sum + other.k3_sum,
            self.ratio_sum + other.ratio_sum,
            self.ratio_square_sum + other.ratio_square_sum,
            self.absolute_difference_sum + other.absolute_difference_sum,
            self.beyond + other.beyond,
            max(self.ratio_max, other.ratio_max),
        )


FIELDS = 7
"""Number of fields of :class:`RatioStatistics`; all are sums except for the last, which is a maximum."""


def ratio_table(
    logprobs_n: torch.Tensor, generator_logprobs_n: torch.Tensor, bucket_n: torch.Tensor, buckets: int
) -> torch.Tensor:
    """The fields of ``RatioStatistics`` by bucket, in their order, float64 ``[buckets, 7]``.

    ``bucket_n`` is the bucket of each token, int64. The result is on the device of the arguments.
    """
    difference_n = (logprobs_n.detach() - generator_logprobs_n).double()
    ratio_n = difference_n.clamp(max=LOG_RATIO_LIMIT).exp()
    columns = torch.stack(
        [
            torch.ones_like(ratio_n),
            ratio_n - 1 - difference_n,
            ratio_n,
            ratio_n.square(),
            difference_n.abs(),
            beyond_ratio(logprobs_n, generator_logprobs_n).double(),
        ],
        dim=1,
    )
    sums = columns.new_zeros(buckets, FIELDS - 1).index_add_(0, bucket_n, columns)
    largest = ratio_n.new_zeros(buckets).scatter_reduce_(0, bucket_n, ratio_n, "amax")
    return torch.cat([sums, largest[:, None]], dim=1)


def k3_estimates(logprobs_n: torch.Tensor, generator_logprobs_n: torch.Tensor) -> torch.Tensor:
    """k3 = ρ − 1 − log ρ of each token, nats, float64 ``[N]``; their mean estimates KL(generator ‖ trainer).

    >>> k3_estimates(torch.tensor([-1.0]), torch.tensor([-1.0])).tolist()
    [0.0]
    """
    difference_n = (logprobs_n.detach() - generator_logprobs_n).double()
    return difference_n.clamp(max=LOG_RATIO_LIMIT).exp() - 1 - difference_n


def beyond_ratio(logprobs_n: torch.Tensor, generator_logprobs_n: torch.Tensor) -> torch.Tensor:
    """Whether ρ or 1/ρ of each token is above ``BEYOND_RATIO``, or ρ is NaN; bool ``[N]``."""
    within_n = (logprobs_n.detach() - generator_logprobs_n).abs() <= math.log(BEYOND_RATIO)
    return ~within_n


def add_tables(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The sum of two tables ``[..., 7]`` of ``ratio_table``."""
    total = left + right
    total[..., -1] = torch.maximum(left[..., -1], right[..., -1])
    return total


def ratio_statistics(logprobs_n: torch.Tensor, generator_logprobs_n: torch.Tensor) -> RatioStatistics:
    """Statistics of one set of tokens; unlike ``ratio_table``, each call copies from device to host."""
    bucket_n = torch.zeros_like(logprobs_n, dtype=torch.long)
    return RatioStatistics(*ratio_table(logprobs_n, generator_logprobs_n, bucket_n, 1)[0].tolist())


def position_buckets(position_n: torch.Tensor) -> torch.Tensor:
    """Index in ``scalerl_api.mismatch.POSITIONS`` of each token's position in its sequence, int64 ``[N]``.

    >>> position_buckets(torch.tensor([0, 255, 256, 16383, 16384])).tolist()
    [0, 0, 1, 3, 4]
    """
    return torch.bucketize(position_n, torch.tensor(POSITION_EDGES, device=position_n.device), right=True)


def by_position(source: str, positions: Sequence[RatioStatistics]) -> dict[str, float]:
    """A step's scalars of ``source``: KL (k3, nats per token) and tokens, over all positions and by position.

    Ranges without tokens are left out. ``positions`` has one entry for each of ``scalerl_api.mismatch.POSITIONS``.
    """
    parts = {ALL: sum(positions, RatioStatistics()), **dict(zip(POSITIONS, positions, strict=True))}
    found = {}
    for name, part in parts.items():
        if part.tokens:
            found[key(source, "kl", name)] = part.kl_k3
            found[key(source, "tokens", name)] = part.tokens
    return found


def check_generator_logprobs(generator_logprobs_n: torch.Tensor) -> None:
    """Raise ``NonFiniteLogprobError`` if a trainable token's log-probability is NaN or infinite.

    >>> check_generator_logprobs(torch.tensor([-1.0, float("-inf")]))
    Traceback (most recent call last):
    ...
    scalerl_trainer.errors.NonFiniteLogprobError: 1 of 2 generator log-probabilities are not finite \
(first at flat token 1): the rollout is damaged, or forced tokens are not masked
    """
    bad_n = ~torch.isfinite(generator_logprobs_n)
    count = int(bad_n.sum())
    if count:
        raise NonFiniteLogprobError(count, generator_logprobs_n.numel(), int(bad_n.nonzero()[0]))


@dataclass(frozen=True, slots=True)
class RatioGuard:
    """Skips an update if too large a fraction of its tokens are ratio outliers (``BEYOND_RATIO``).

    One broken token can change a mean ratio or a KL without limit, but not this fraction. The default is not from a paper;
    it is wide, to detect generators with wrong weights, and not calibrated on long runs.
    """

    max_beyond_fraction: float = 0.1

    def problem(self, statistics: RatioStatistics) -> str | None:
        """Why the update must be skipped; None if it may be applied.

        >>> RatioGuard().problem(RatioStatistics(tokens=10.0, beyond=5.0))
        '50.0 % of tokens have a ratio beyond 10 between trainer and generator, 10 % are allowed'
        """
        share = statistics.beyond_fraction
        if share <= self.max_beyond_fraction:
            return None
        return (
            f"{share:.1%} of tokens have a ratio beyond {BEYOND_RATIO:g} between trainer and generator, "
            f"{self.max_beyond_fraction:.0%} are allowed"
        ).replace("%", " %")
