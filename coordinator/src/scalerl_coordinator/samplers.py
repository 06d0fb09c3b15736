"""Chooses the prompt of each slot: the samplers of ``recipe.curriculum``.

In a mix, each task has a separate sampler (:class:`TaskSamplers`).

A prompt is chosen once, when the window reaches its slot, and journaled with the next cursor: a restart, a re-issue or a
return to a checkpoint does not choose again. The choice depends on the seed, the cursor, and the history up to a step that
does not depend on timing (:mod:`.prompt_history`), so a resumed run has the same prompts as an uninterrupted one.

The samplers in this module iterate over one sequence, :class:`~.sampler_interface.SeededEpochs`, and differ in the prompts that
they pass over. To add one, write a :data:`Rule`, a model in ``CurriculumSpec`` and a case in
:func:`make_sampler`. A sampler that needs more is a :class:`~.sampler_interface.Sampler` in a separate file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b

from scalerl_api.recipe import CurriculumSpec
from scalerl_coordinator.edge_of_competence import EdgeOfCompetence
from scalerl_coordinator.prompt_history import KnownHistory
from scalerl_coordinator.sampler_interface import MAX_WALK, Sampler, SamplerInput, chance
from scalerl_coordinator.self_evolving_curriculum import LEARNING_RATE, SelfEvolvingCurriculum
from scalerl_tasks import Mixture, PromptSource

Rule = Callable[[int, int, KnownHistory], bool]
"""Whether a sampler passes over a prompt, at a cursor."""


class RuleSampler(Sampler):
    """Chooses the next prompt of the sequence that ``rule`` does not pass over.

    If the rule passes over a whole epoch, or :data:`~.sampler_interface.MAX_WALK` consecutive prompts, the next prompt is
    chosen regardless: a run continues with all prompts rather than with none, and no choice takes long.
    """

    def __init__(self, prompts: int, seed: int, rule: Rule) -> None:
        super().__init__(prompts, seed)
        self._rule = rule

    def choose(self, inputs: SamplerInput) -> tuple[int, int]:
        for cursor in range(inputs.cursor, inputs.cursor + min(self._prompts, MAX_WALK)):
            prompt = self._epochs.choose(cursor)
            if not self._rule(prompt, cursor, inputs.history):
                return prompt, cursor + 1
        return self._epochs.choose(inputs.cursor), inputs.cursor + 1


@dataclass(frozen=True, slots=True)
class NoPositiveResampling:
    """Prompts whose historical pass rate is at least ``pass_rate`` are excluded from all later epochs (ScaleRL [P])."""

    pass_rate: float

    def __call__(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        rate = history.pass_rate(prompt)
        return rate is not None and rate >= self.pass_rate


@dataclass(frozen=True, slots=True)
class PassRateBand:
    """Prompts whose historical pass rate is outside [low, high] are passed over; prompts that were never tried are not."""

    low: float
    high: float

    def __call__(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        rate = history.pass_rate(prompt)
        return rate is not None and not self.low <= rate <= self.high


@dataclass(frozen=True, slots=True)
class DifficultyPools:
    """Chooses a prompt with a probability proportional to the weight of its pool; that of the largest weight is 1.

    ``edges`` divide pass rates into pools. Prompts that were never tried are in the middle pool. The random number depends
    on seed and cursor.
    """

    edges: tuple[float, ...]
    weights: tuple[float, ...]
    seed: int

    def __call__(self, prompt: int, cursor: int, history: KnownHistory) -> bool:
        rate = history.pass_rate(prompt)
        pool = len(self.weights) // 2 if rate is None else sum(rate >= edge for edge in self.edges)
        return chance(self.seed, cursor, "pool") >= self.weights[pool] / max(self.weights)


def make_sampler(
    spec: CurriculumSpec, prompts: int, seed: int, difficulty: Callable[[int], float | None]
) -> Sampler:
    """The sampler of ``recipe.curriculum``.

    Args:
        spec: the curriculum.
        prompts: number of training prompts.
        seed: the run's seed.
        difficulty: returns the difficulty of a training prompt, by index, or None if unknown; only SEC calls it.
    """
    if spec.edge_of_competence is not None:
        return EdgeOfCompetence(prompts, seed)
    if spec.sec is not None:
        edges, temperature = list(map(float, spec.sec.edges)), float(spec.sec.temperature)
        return SelfEvolvingCurriculum(prompts, seed, difficulty, edges, LEARNING_RATE, temperature)
    rule: Rule = PassRateBand(0.0, 1.0)  # every prompt once per epoch
    if spec.no_positive_resampling is not None:
        rule = NoPositiveResampling(float(spec.no_positive_resampling.pass_rate))
    elif spec.pass_rate_band is not None:
        rule = PassRateBand(float(spec.pass_rate_band.low), float(spec.pass_rate_band.high))
    elif spec.difficulty_pools is not None:
        pools = spec.difficulty_pools
        rule = DifficultyPools(tuple(map(float, pools.edges)), tuple(map(float, pools.weights)), seed)
    return RuleSampler(prompts, seed, rule)


class TaskSamplers:
    """The samplers of a run's tasks, and the task of each slot.

    Tasks are independent: each sampler has a separate cursor and history, and the task of a slot does not depend on choices.
    """

    def __init__(self, samplers: Sequence[Sampler], mixture: Mixture | None = None) -> None:
        self._samplers, self._mixture = list(samplers), mixture

    def task(self, slot: int) -> int:
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
    """The samplers of a run's tasks.

    Args:
        spec: the curriculum.
        train: training prompts of each task.
        names: name of each task.
        weights: weight of each task in the mix.
        seed: the run's seed.
    """
    if len(train) == 1:
        return TaskSamplers([make_sampler(spec, len(train[0]), seed, train[0].difficulty)])
    samplers = [
        make_sampler(spec, len(prompts), _seed(seed, name), prompts.difficulty)
        for prompts, name in zip(train, names, strict=True)
    ]
    return TaskSamplers(samplers, Mixture(weights, seed))


def _seed(seed: int, task: str) -> int:
    """The seed of a task of a mix. It differs between tasks, so that equally many prompts get different orders."""
    return int.from_bytes(blake2b(f"{seed}/{task}".encode(), digest_size=6).digest(), "little")
