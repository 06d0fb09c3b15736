"""Evaluations: when one is due, which prompts it still needs, and the point that it yields."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from scalerl_api.curve import label_order
from scalerl_api.wire import EvaluationPoint, LabelMean, PassAt, Split
from scalerl_coordinator.pass_at_k import pass_at_k, tries


class PromptResult(msgspec.Struct, array_like=True, frozen=True):
    """Result of one held-out prompt, summed over its samples."""

    lease_id: str
    score_sum: float
    samples: int
    tokens: int
    truncated: int
    mixed: bool
    given_up: bool = False
    """The prompt could not be generated. It scores 0, so that all points are over the same prompts."""
    part_sums: dict[str, float] = {}
    """Sums of the verdicts' parts, by name."""
    passed: int = 0
    """Number of completions with score 1."""
    labels: dict[str, str] = {}
    """The prompt's labels, with their values."""


EvaluationKey = tuple[int, int]
"""Version, and the task of the evaluation set."""


class Evaluation(msgspec.Struct, array_like=True):
    """An incomplete evaluation of one version on one evaluation set."""

    version: int
    work_tokens: int
    todo: list[int]
    """Positions in the held-out set that are neither leased nor done, ascending."""
    results: dict[int, PromptResult]
    prompts: int
    released: bool = False
    """It no longer holds a publish: newer weights may complete it, and its point records that."""
    task: int = 0
    """With ``split``, the evaluation set."""
    split: Split = Split.HELD_OUT

    @property
    def complete(self) -> bool:
        return len(self.results) == self.prompts


def due(version: int, every_steps: int, max_steps: int | None, published_every: int = 1) -> bool:
    """Whether ``version`` is evaluated: version 0, every ``every_steps``-th, and the last one of the budget.

    If only every ``published_every``-th version is published, the first published one from each of these on is evaluated.

    >>> [v for v in range(11) if due(v, 4, 10)], [v for v in range(26) if due(v, 5, None, 8)]
    ([0, 4, 8, 10], [0, 8, 16, 24])
    """
    if version == max_steps:
        return True
    previous = version - published_every
    return version % published_every == 0 and version // every_steps > previous // every_steps


def summarize(
    evaluation: Evaluation,
    set_name: str,
    set_digest: str,
    wall_seconds: float,
    device_seconds: float,
    largest_k: int = 0,
) -> EvaluationPoint:
    """The point of a complete evaluation.

    ``reward`` is the mean over prompts of each prompt's mean score; each of ``parts`` is the same mean of one part.
    ``standard_error`` is s/√n over the n prompts, with the n − 1 form of s; 0 with one prompt. The set is fixed, so it
    measures how well n prompts represent their population. A given-up prompt scores 0: without it, the point would be
    over another set of prompts.

    Args:
        largest_k: largest k of pass@k; 0 for the number of samples.
    """
    results = [evaluation.results[position] for position in sorted(evaluation.results)]
    means = [r.score_sum / r.samples for r in results]
    reward = math.fsum(means) / len(means)
    spread = math.fsum((m - reward) ** 2 for m in means)
    samples = sum(r.samples for r in results)
    sampled = max(1, sum(r.samples for r in results if not r.given_up))
    fewest = min(r.samples for r in results)
    ks = tries(min(largest_k or fewest, fewest))
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
        task=evaluation.task,
        split=evaluation.split,
        set_name=set_name,
        by_label=_by_label(results, ks),
        parts={
            name: math.fsum(r.part_sums.get(name, 0.0) / r.samples for r in results) / len(results)
            for name in sorted({name for r in results for name in r.part_sums})
        },
        pass_at=_pass_at(results, ks),
    )


def _by_label(results: list[PromptResult], ks: Sequence[int]) -> list[LabelMean]:
    """Mean reward and pass@k of the prompts with each value of each label."""
    with_value: dict[tuple[str, str], list[PromptResult]] = {}
    for result in results:
        for label, value in result.labels.items():
            with_value.setdefault((label, value), []).append(result)
    return [
        LabelMean(
            label,
            value,
            math.fsum(r.score_sum / r.samples for r in subset) / len(subset),
            len(subset),
            _pass_at(subset, ks),
        )
        for (label, value), subset in sorted(with_value.items(), key=lambda item: label_order(*item[0]))
    ]


def _pass_at(results: list[PromptResult], ks: Sequence[int]) -> list[PassAt]:
    return [pass_at_k([(r.passed, r.samples) for r in results], k) for k in ks]
