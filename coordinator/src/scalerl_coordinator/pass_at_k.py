"""pass@k of an evaluation: the probability that at least one of k completions of a prompt passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scalerl_api.wire import PassAt

_Z90 = 1.645


def pass_at_k(passed: Sequence[tuple[int, int]], k: int) -> PassAt:
    """The unbiased estimate: the mean over prompts of 1 − C(n − c, k) / C(n, k) (arXiv 2107.03374, eq. 1 [P]).

    The interval covers the mean of the population that the prompts represent. It is Wilson's, for the number of draws that
    would have the standard error over prompts, at least one per prompt. If few prompts contribute most of the variance, the
    variance is poorly known; therefore the quantile is Student's, with degrees of freedom from the kurtosis, at most the
    number of prompts less one.

    Args:
        passed: for each prompt, the number of completions that passed (c) and of all completions (n).
        k: completions per try, at most the smallest n.

    >>> pass_at_k([(1, 2), (0, 2)], 1).mean, pass_at_k([(1, 2), (0, 2)], 2).mean
    (0.25, 0.5)
    """
    chances = [1.0 - math.comb(n - c, k) / math.comb(n, k) for c, n in passed]
    prompts = len(chances)
    mean = math.fsum(chances) / prompts
    squares = [(chance - mean) ** 2 for chance in chances]
    spread, draws, z = mean * (1.0 - mean), float(prompts), _Z90
    freedom = max(1.0, prompts - 1.0)
    if (square := math.fsum(squares)) > 1e-24 * prompts:  # more than the rounding of the mean leaves
        draws = max(draws, spread * prompts * (prompts - 1) / square)
        kurtosis = prompts * math.fsum(s * s for s in squares) / square**2
        if kurtosis > 1.0:
            freedom = max(1.0, min(freedom, 2.0 * prompts / (kurtosis - 1.0)))
    # Student's quantile, to second order in 1 / freedom.
    z += (z**3 + z) / (4.0 * freedom) + (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2)
    share = z * z / draws
    centre = (mean + share / 2.0) / (1.0 + share)
    half = z * math.sqrt(spread / draws + share / (4.0 * draws)) / (1.0 + share)
    return PassAt(k, mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def tries(samples: int) -> list[int]:
    """The values of k for an evaluation with ``samples`` per prompt: the powers of two from 2 on, and ``samples``.

    >>> tries(12), tries(1)
    ([2, 4, 8, 12], [])
    """
    powers = [2**i for i in range(1, samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples} - {0, 1})
