"""Points of the curve: when one is due, which prompts it still needs, and its value."""

from __future__ import annotations

import math

import msgspec

from scalerl_api.wire import EvaluationPoint


class PromptResult(msgspec.Struct, array_like=True, frozen=True):
    """Result of one held-out prompt over all its samples."""

    lease_id: str
    score_sum: float
    samples: int
    tokens: int
    truncated: int
    mixed: bool
    given_up: bool = False
    """It could not be generated: it scores 0, so that the set stays the same."""


class Evaluation(msgspec.Struct, array_like=True):
    """The evaluation of one version, incomplete."""

    version: int
    work_tokens: int
    todo: list[int]
    """Positions in the held-out set that are neither leased nor done, ascending."""
    results: dict[int, PromptResult]
    prompts: int
    released: bool = False
    """The hold has ended: newer weights may finish the evaluation, and the point records that."""

    @property
    def complete(self) -> bool:
        return len(self.results) == self.prompts


def due(version: int, every_steps: int, max_steps: int | None, published_every: int = 1) -> bool:
    """Whether ``version`` is evaluated: 0, every ``every_steps``-th, and the last of the budget; where not every version is
    published, the first one that is after each of those.

    >>> [v for v in range(11) if due(v, 4, 10)], [v for v in range(26) if due(v, 5, None, 8)]
    ([0, 4, 8, 10], [0, 8, 16, 24])
    """
    if version == max_steps:
        return True
    before = version - published_every
    return version % published_every == 0 and version // every_steps > before // every_steps


def summarize(
    evaluation: Evaluation, set_digest: str, wall_seconds: float, device_seconds: float
) -> EvaluationPoint:
    """The point of a complete evaluation.

    ``reward`` is the mean over prompts of each prompt's mean score. ``standard_error`` is the standard error of the mean
    over prompts, s/√n with the n − 1 form of s (the set is fixed: it measures how well n prompts represent all); 0 with one
    prompt. A prompt that could not be generated scores 0: without it, the point would be of another set.
    """
    results = [evaluation.results[position] for position in sorted(evaluation.results)]
    means = [r.score_sum / r.samples for r in results]
    reward = math.fsum(means) / len(means)
    spread = math.fsum((m - reward) ** 2 for m in means)
    samples = sum(r.samples for r in results)
    sampled = max(1, sum(r.samples for r in results if not r.given_up))
    return EvaluationPoint(
        version=evaluation.version,
        work_tokens=evaluation.work_tokens,
        reward=reward,
        standard_error=math.sqrt(spread / (len(means) - 1) / len(means)) if len(means) > 1 else 0.0,
        samples=samples,
        prompts=len(results),
        set_digest=set_digest,
        mixed_versions=any(r.mixed for r in results),
        truncated_fraction=sum(r.truncated for r in results) / sampled,
        mean_tokens=sum(r.tokens for r in results) / sampled,
        wall_seconds=wall_seconds,
        device_seconds=device_seconds,
        given_up_prompts=sum(r.given_up for r in results),
    )
