"""The sampler of ``recipe.curriculum.edgeOfCompetence``: prompts that the policy solves sometimes.

RL extends a model's capabilities only on prompts with a low pass@1 and a pass@k above 0 (arXiv 2512.07783 [P]). Which prompts
these are changes during training, so a share of the slots measures the other prompts again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from scalerl_coordinator.prompt_history import KnownHistory, PromptHistory
from scalerl_coordinator.sampler_interface import MAX_WALK, Sampler, SamplerInput, chance

_GROUPS = 2
"""Number of newest groups from which a prompt's pass rate is computed: 32 completions with ScaleRL's 16. Of prompts with a
pass rate of 3 %, one group shows no success for 61 %, two groups for 38 %; more groups would reflect older policies."""
_TURN_BITS = 20
"""Low bits of the cursor: the number of choices at the edge. The high bits are the position in the sequence of epochs. After
2^20 choices the position advances by one, which passes over one prompt."""
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: its multiples modulo 2^64 are evenly spread, for any number of them."""
_KEPT = 256
"""Maximum number of known steps whose prompts at the edge are cached: more than the steps of one k."""


@dataclass(frozen=True, slots=True)
class _Edge:
    """The prompts at the edge, as known up to a step."""

    prompts: list[int]
    """In ascending order."""
    groups: int
    """Number of groups of the newest step that has any."""

    def __contains__(self, prompt: int) -> bool:
        at = bisect_left(self.prompts, prompt)
        return at < len(self.prompts) and self.prompts[at] == prompt


SOLVED: Final = 0.8
"""Recent pass rate from which a prompt counts as solved. No paper has a value."""
REMEASURE_SHARE: Final = 0.1
"""Least share of the slots for prompts that are not at the edge. Each of these is measured again once per epoch of them, whatever
the share; a larger one takes slots from the prompts that teach most."""


class EdgeOfCompetence(Sampler):
    """Samples mostly prompts at the edge of competence.

    A prompt is at the edge if it has groups in the last :data:`~.prompt_history.RECENT_STEPS` known steps, and the pass rate of
    its two newest groups is above 0 and below ``pass_rate``. A completion passes with a score of 1: if partial scores counted,
    prompts without any success would be at the edge.

    A fraction ``remeasure_share`` of the slots gets the next prompt of the sequence that is not at the edge: one never tried,
    solved, without success, or not tried recently. Each of these prompts therefore occurs once per epoch. The other slots
    cycle through the prompts at the edge, each at most about once per step; if few are known, more slots remeasure.
    """

    def __init__(
        self, prompts: int, seed: int, pass_rate: float = SOLVED, remeasure_share: float = REMEASURE_SHARE
    ) -> None:
        super().__init__(prompts, seed)
        self._pass_rate, self._remeasure_share = pass_rate, remeasure_share
        self._history: PromptHistory | None = None
        self._edges: dict[int, _Edge] = {}

    def choose(self, inputs: SamplerInput) -> tuple[int, int]:
        place, turn = divmod(inputs.cursor, 1 << _TURN_BITS)
        edge = self._edge(inputs.history)
        known = len(edge.prompts)
        share = min(1 - self._remeasure_share, known / edge.groups) if known else 0.0
        if chance(self._seed, inputs.cursor, "edge") < share:
            around = (turn + self._seed) * _GOLDEN % 2**64
            return edge.prompts[around * known >> 64], inputs.cursor + 1
        for position in range(place, place + min(self._prompts, MAX_WALK)):
            if (prompt := self._epochs.choose(position)) not in edge:
                break
        else:
            position, prompt = place, self._epochs.choose(place)
        return prompt, (position + 1 << _TURN_BITS) + turn

    def _edge(self, known: KnownHistory) -> _Edge:
        """The edge, cached by step: the results known up to a step do not change (:mod:`.prompt_history`)."""
        if self._history is not known.history or len(self._edges) >= _KEPT:
            self._history, self._edges = known.history, {}
        if (edge := self._edges.get(known.until)) is None:
            edge = self._edges[known.until] = self._find(known)
        return edge

    def _find(self, known: KnownHistory) -> _Edge:
        tried: dict[int, tuple[int, int, int]] = {}  # groups, completions and those that passed
        newest = 0
        for _, groups in known.recent_steps():
            newest = newest or len(groups)
            for group in reversed(groups):
                count, completions, passed = tried.get(group.prompt, (0, 0, 0))
                if count < _GROUPS and group.passed >= 0:
                    tried[group.prompt] = count + 1, completions + group.completions, passed + group.passed
        at_edge = [p for p, (_, n, passed) in tried.items() if 0 < passed < self._pass_rate * n]
        return _Edge(sorted(at_edge), newest)
