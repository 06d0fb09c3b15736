"""Several verifiers of one task: each grades in its own processes, and their verdicts are combined."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from scalerl_tasks.errors import VerifierError
from scalerl_tasks.grading.grading_pool import Graded, PoolCounts, Tick
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import MAX_PARTS, NOT_APPLICABLE, REWARD, Verdict


class GroupGrader(Protocol):
    """Grades the completions of prompts: a :class:`~.grading_pool.GradingPool`, a service, or several of them."""

    @property
    def part_names(self) -> tuple[str, ...]: ...

    @property
    def counts(self) -> PoolCounts: ...

    @property
    def problem(self) -> str:
        """Why groups wait; empty if none does."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def score_group(
        self, prompt: Prompt, completions: Sequence[str], *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]: ...

    async def check(self, prompts: Sequence[Prompt], on_checked: Callable[[str | None], None]) -> None: ...


class CombinedGrader:
    """The verdicts of several graders as one, with a part for each.

    Args:
        graders: not started yet.
        labels: names of their parts.
        weights: positive; those of a sum.
        product: whether the scores are multiplied. Otherwise the score is their mean by weight.
    """

    def __init__(
        self,
        graders: Sequence[GroupGrader],
        labels: Sequence[str],
        weights: Sequence[float],
        *,
        product: bool,
    ) -> None:
        self._graders, self._labels, self._weights, self._product = graders, labels, weights, product
        self._stack = contextlib.AsyncExitStack()
        self.part_names: tuple[str, ...] = ()

    @property
    def counts(self) -> PoolCounts:
        return sum((one.counts for one in self._graders), PoolCounts())

    @property
    def problem(self) -> str:
        return next(filter(None, (one.problem for one in self._graders)), "")

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            for one in self._graders:
                await stack.enter_async_context(one)
            names = [
                name
                for label, one in zip(self._labels, self._graders, strict=True)
                for name in (label, *(f"{label}_{part}" for part in one.part_names if part != REWARD))
            ]
            if repeated := [name for name in names if names.count(name) > 1]:
                raise VerifierError(
                    f"verifiers: two parts have the name {repeated[0]!r}; give each verifier a label of its own"
                )
            if len(names) > MAX_PARTS:
                raise VerifierError(
                    f"verifiers: {len(names)} parts, {', '.join(names)}; the limit is {MAX_PARTS}"
                )
            self._stack = stack.pop_all()
        self.part_names = tuple(names)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def score_group(
        self, prompt: Prompt, completions: Sequence[str], *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]:
        by_grader = await asyncio.gather(
            *(
                one.score_group(prompt, completions, in_thought=in_thought, on_graded=on_graded)
                for one in self._graders
            )
        )
        return [self._combined(found) for found in zip(*by_grader, strict=True)]

    def _combined(self, found: Sequence[Graded]) -> Graded:
        """One verdict: of those that apply. An error of one is an error of all."""
        parts = dict.fromkeys(self.part_names, 0.0)
        scores, weights = [], []
        for label, weight, one in zip(self._labels, self._weights, found, strict=True):
            if one.verdict is None:
                if one.error != NOT_APPLICABLE:
                    return Graded(None, f"{label}: {one.error}")
                continue
            scores.append(one.verdict.score)
            weights.append(weight)
            parts |= {f"{label}_{name}": value for name, value in one.verdict.parts.items() if name != REWARD}
            parts[label] = one.verdict.parts.get(REWARD, one.verdict.score)
        if not scores:
            return Graded(None, NOT_APPLICABLE)
        known = [one.verdict.answered for one in found if one.verdict and one.verdict.answered is not None]
        answered = all(known) if known else None
        if self._product:
            return Graded(Verdict(math.prod(scores), parts, answered))
        total = math.fsum(score * weight for score, weight in zip(scores, weights, strict=True))
        return Graded(Verdict(min(1.0, total / math.fsum(weights)), parts, answered))

    async def check(self, prompts: Sequence[Prompt], on_checked: Callable[[str | None], None]) -> None:
        errors: list[str | None] = [None] * len(prompts)
        for label, one in zip(self._labels, self._graders, strict=True):
            found: list[str | None] = []
            await one.check(prompts, found.append)
            for at, error in enumerate(found):
                if error is not None and errors[at] is None:
                    errors[at] = f"{label}: {error}"
        for error in errors:
            on_checked(error)
