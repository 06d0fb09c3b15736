"""The sampler of ``recipe.curriculum.sec``: a bandit over categories of difficulty (SEC, arXiv 2505.14970 [P])."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from scalerl_coordinator.prompt_history import KnownHistory, PromptHistory, Tried
from scalerl_coordinator.sampler_interface import MAX_WALK, Sampler, SamplerInput, chance
from scalerl_tasks import SourceError

log = logging.getLogger(__name__)

_KEPT = 256
"""Maximum number of known steps whose values are cached: more than the steps of one k."""
_UNREAD = 255
LEARNING_RATE: Final = 0.5
"""Weight of a step's mean absolute advantage in the value of its category, as in the authors' commands for mathematics [S]."""


class SelfEvolvingCurriculum(Sampler):
    """Draws a category from the Boltzmann distribution exp(Q(c) / temperature), and chooses the next prompt of that category.

    After each step, Q(c) ← learning_rate · r(c) + (1 - learning_rate) · Q(c) for every category with groups in the step (TD(0)),
    where r(c) is the mean absolute advantage of its completions. Q is initially 0. It is computed from the last
    :data:`~.prompt_history.RECENT_STEPS` known steps, so a category without a prompt in them has its initial value.

    ``edges`` divide difficulties into categories. Prompts without a difficulty, including those that the source cannot read,
    are one more category. A category without a prompt among the next :data:`~.sampler_interface.MAX_WALK` is excluded.
    """

    def __init__(
        self,
        prompts: int,
        seed: int,
        difficulty: Callable[[int], float | None],
        edges: Sequence[float],
        learning_rate: float,
        temperature: float,
    ) -> None:
        super().__init__(prompts, seed)
        self._difficulty, self._edges = difficulty, tuple(edges)
        self._learning_rate, self._temperature = learning_rate, temperature
        self._categories = bytearray([_UNREAD]) * prompts
        self._history: PromptHistory | None = None
        self._unreadable = False
        self._values_at: dict[int, list[float]] = {}
        self._rewards: dict[int, dict[int, float]] = {}

    def choose(self, inputs: SamplerInput) -> tuple[int, int]:
        values = self._values(inputs.history)
        drawn = self._draw(values, range(len(values)), inputs.cursor, "category")
        first: dict[int, tuple[int, int]] = {}  # by category: its next prompt, and the cursor after it
        for cursor in range(inputs.cursor, inputs.cursor + min(self._prompts, MAX_WALK)):
            prompt = self._epochs.choose(cursor)
            if (category := self._category(prompt)) == drawn:
                return prompt, cursor + 1
            first.setdefault(category, (prompt, cursor + 1))
        # The category is empty or rare. A second draw among those found preserves their proportions, and does not depend on
        # which prompts this process has read.
        return first[self._draw(values, sorted(first), inputs.cursor, "category found")]

    def _draw(self, values: Sequence[float], categories: Sequence[int], cursor: int, purpose: str) -> int:
        """Draw one of ``categories`` from the Boltzmann distribution over them."""
        highest = max(values[category] for category in categories)
        weights = (math.exp((values[category] - highest) / self._temperature) for category in categories)
        cumulated = list(accumulate(weights))
        drawn = bisect_right(cumulated, chance(self._seed, cursor, purpose) * cumulated[-1])
        return categories[min(drawn, len(categories) - 1)]

    def _category(self, prompt: int) -> int:
        """The category of a prompt, which is read from the source once."""
        if (category := self._categories[prompt]) == _UNREAD:
            difficulty = self._read_difficulty(prompt)
            category = len(self._edges) + 1 if difficulty is None else bisect_right(self._edges, difficulty)
            self._categories[prompt] = category
        return category

    def _read_difficulty(self, prompt: int) -> float | None:
        """The difficulty of a prompt; None if it has none or the source cannot read it.

        If the prompt is chosen, reading its text fails as well, which gives up its slot or ends the run.
        """
        try:
            return self._difficulty(prompt)
        except SourceError as error:
            if not self._unreadable:
                log.warning(
                    "recipe.curriculum.sec: training prompt %d has no difficulty, because it cannot be read: %s. Further prompts "
                    "that cannot be read are not reported",
                    *(prompt, error),
                )
            self._unreadable = True
            return None

    def _values(self, known: KnownHistory) -> list[float]:
        """Q by category, cached by step: the results known up to a step do not change."""
        if self._history is not known.history or len(self._values_at) >= _KEPT:
            self._history, self._values_at, self._rewards = known.history, {}, {}
        if (values := self._values_at.get(known.until)) is None:
            values = self._values_at[known.until] = self._compute_values(known)
        return values

    def _compute_values(self, known: KnownHistory) -> list[float]:
        values = [0.0] * (len(self._edges) + 2)
        for step, groups in reversed(list(known.recent_steps())):
            if (rewards := self._rewards.get(step)) is None:
                rewards = self._rewards[step] = self._mean_advantages(groups)
            for category, reward in rewards.items():
                values[category] += self._learning_rate * (reward - values[category])
        return values

    def _mean_advantages(self, groups: Sequence[Tried]) -> dict[int, float]:
        """Mean absolute advantage of a step's completions, by category."""
        sums: dict[int, tuple[int, float]] = {}
        for group in groups:
            category = self._category(group.prompt)
            completions, advantage = sums.get(category, (0, 0.0))
            advantage += group.completions * group.absolute_advantage
            sums[category] = completions + group.completions, advantage
        return {category: advantage / completions for category, (completions, advantage) in sums.items()}
