"""Which prompt a slot has: the samplers of ``recipe.curriculum``.

In a mix, each task has a sampler of its own (:class:`TaskSamplers`).

The choice is made once, when a slot is first issued, and journaled with the cursor that follows it: a restart, a re-issue
or a rollback does not choose again. It rests on the seed, the cursor and the history up to a step that does not depend
on timing (:mod:`.prompt_history`), so a resumed run has the prompts of an uninterrupted one.

Those here walk one sequence, :class:`~.prompt_sequence.SeededEpochs`, and differ in what they pass over. To add one of them: a class with
``passes_over``, a model in ``CurriculumSpec``, a case in :func:`make_sampler`. One that needs more is a
:class:`~.prompt_sequence.Sampler` in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import Protocol

from scalerl_api.recipe import CurriculumSpec
from scalerl_coordinator.edge_of_competence import EdgeOfCompetence
from scalerl_coordinator.prompt_history import KnownHistory
from scalerl_coordinator.prompt_sequence import LONGEST_WALK, Sampler, View
from scalerl_coordinator.self_evolving_curriculum import SelfEvolvingCurriculum
from scalerl_tasks import Mixture, PromptSource


class Rule(Protocol):
    """What a sampler passes over."""

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool: ...


class RuleSampler(Sampler):
    """The next prompt of the sequence that ``rule`` does not pass over.

    Where it passes over an epoch, or :data:`~.prompt_sequence.LONGEST_WALK` prompts in a row, the next prompt is taken all
    the same: a run continues with all prompts rather than with none, and no choice takes long.
    """

    def __init__(self, prompts: int, seed: int, rule: Rule) -> None:
        super().__init__(prompts, seed)
        self._rule = rule

    def choose(self, view: View) -> tuple[int, int]:
        for cursor in range(view.cursor, view.cursor + min(self._prompts, LONGEST_WALK)):
            prompt = self._epochs.choose(cursor)
            if not self._rule.passes_over(prompt, cursor, view.history):
                return prompt, cursor + 1
        return self._epochs.choose(view.cursor), view.cursor + 1


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every prompt once an epoch."""

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class NoPositiveResampling:
    """Prompts whose historic pass rate is at least ``pass_rate`` leave all later epochs (ScaleRL [P])."""

    pass_rate: float

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        rate = history.pass_rate(prompt)
        return rate is not None and rate >= self.pass_rate


@dataclass(frozen=True, slots=True)
class PassRateBand:
    """Prompts whose historic pass rate is outside [low, high] wait; prompts that were never tried do not."""

    low: float
    high: float

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        rate = history.pass_rate(prompt)
        return rate is not None and not self.low <= rate <= self.high


@dataclass(frozen=True, slots=True)
class DifficultyPools:
    """A prompt is taken with the probability of its pool's weight over the largest weight.

    ``edges`` divide pass rates into pools; the chance is drawn by seed and cursor. Prompts that were never tried are in
    the middle pool.
    """

    edges: tuple[float, ...]
    weights: tuple[float, ...]
    seed: int

    def passes_over(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        rate = history.pass_rate(prompt)
        pool = len(self.weights) // 2 if rate is None else sum(rate >= edge for edge in self.edges)
        drawn = blake2b(f"{self.seed}/{cursor}/pool".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "little") / 2**64 >= self.weights[pool] / max(self.weights)


def make_sampler(
    spec: CurriculumSpec, prompts: int, seed: int, difficulty: Callable[[int], float | None]
) -> Sampler:
    """The sampler of ``recipe.curriculum``.

    Args:
        spec: the curriculum.
        prompts: number of training prompts.
        seed: the run's.
        difficulty: of a training prompt by its index, where known; only SEC asks.
    """
    if spec.edge_of_competence is not None:
        edge = spec.edge_of_competence
        return EdgeOfCompetence(prompts, seed, float(edge.pass_rate), float(edge.remeasure_share))
    if spec.sec is not None:
        sec = spec.sec
        edges = list(map(float, sec.edges))
        return SelfEvolvingCurriculum(
            prompts, seed, difficulty, edges, float(sec.learning_rate), float(sec.temperature)
        )
    rule: Rule = Uniform()
    if spec.no_positive_resampling is not None:
        rule = NoPositiveResampling(float(spec.no_positive_resampling.pass_rate))
    elif spec.pass_rate_band is not None:
        rule = PassRateBand(float(spec.pass_rate_band.low), float(spec.pass_rate_band.high))
    elif spec.difficulty_pools is not None:
        pools = spec.difficulty_pools
        rule = DifficultyPools(tuple(map(float, pools.edges)), tuple(map(float, pools.weights)), seed)
    return RuleSampler(prompts, seed, rule)


class TaskSamplers:
    """A sampler for each task of the run, and which task a slot has. Tasks share nothing but the slots: each sampler has its
    own cursor and history, and a slot is of the same task whatever the others choose."""

    def __init__(self, samplers: Sequence[Sampler], mixture: Mixture | None = None) -> None:
        self._samplers, self._mixture = list(samplers), mixture

    def task(self, slot: int) -> int:
        """The task of a slot."""
        return 0 if self._mixture is None else self._mixture.task(slot)

    def __getitem__(self, task: int) -> Sampler:
        return self._samplers[task]


def make_samplers(
    spec: CurriculumSpec,
    train: Sequence[PromptSource],
    names: Sequence[str],
    weights: Sequence[Fraction],
    seed: int,
) -> TaskSamplers:
    """The samplers of a run's tasks, by ``task``: training prompts, names and weights. seed: the run's."""
    if len(train) == 1:
        return TaskSamplers([make_sampler(spec, len(train[0]), seed, train[0].difficulty)])
    samplers = [
        make_sampler(spec, len(prompts), _seed(seed, name), prompts.difficulty)
        for prompts, name in zip(train, names, strict=True)
    ]
    return TaskSamplers(samplers, Mixture(weights, seed))


def _seed(seed: int, task: str) -> int:
    """Of a task of a mix: tasks with equally many prompts get different orders."""
    return int.from_bytes(blake2b(f"{seed}/{task}".encode(), digest_size=6).digest(), "little")
