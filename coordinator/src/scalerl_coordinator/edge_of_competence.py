"""The sampler of ``recipe.curriculum.edgeOfCompetence``: prompts that the model solves now and then.

RL raises what a model can do only on prompts with a low pass@1 and a pass@k above 0 (arXiv 2512.07783 [P]). Which those are
changes as it learns, so a share of the slots measures the others again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from scalerl_coordinator.prompt_history import KnownHistory, PromptHistory
from scalerl_coordinator.prompt_sequence import LONGEST_WALK, Sampler, View

_GROUPS = 2
"""A prompt is judged by so many of its newest groups: 32 completions with ScaleRL's 16. Of prompts with a pass rate of 3 %, one group
takes 61 % for hopeless and two 38 %; more would hold on to what the model was."""
_TURN_BITS = 20
"""Of the cursor: the number of choices at the edge. Above them is the place in the sequence of epochs. After 2^20 choices the place moves on by
one, which passes over one prompt."""
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: multiples modulo 2^64 are spread evenly, however many there are."""
_KEPT = 256
"""Numbers of known steps whose prompts at the edge are kept in memory: more than the steps of one k."""


@dataclass(frozen=True, slots=True)
class _Edge:
    prompts: list[int]
    """Ascending."""
    groups: int
    """Of the newest step with any."""

    def __contains__(self, prompt: int) -> bool:
        at = bisect_left(self.prompts, prompt)
        return at < len(self.prompts) and self.prompts[at] == prompt


class EdgeOfCompetence(Sampler):
    """A prompt is at the edge if it has groups in the last :data:`~.prompt_history.RECENT_STEPS` known steps, and the pass
    rate of the two newest is above 0 and below ``pass_rate``. Completions pass with a score of 1: a verifier that gives wrong answers a
    part of it would put prompts without a success at the edge.

    ``remeasure_share`` of the slots have the next prompt of the sequence that is not at the edge: one never tried, solved,
    hopeless, or not tried lately. Each of these prompts so has its turn once an epoch. The others go round the prompts at the edge,
    each about once a step at most: where fewer are known, more slots measure.
    """

    def __init__(self, prompts: int, seed: int, pass_rate: float, remeasure_share: float) -> None:
        super().__init__(prompts, seed)
        self._pass_rate, self._remeasure_share = pass_rate, remeasure_share
        self._history: PromptHistory | None = None
        self._edges: dict[int, _Edge] = {}

    def choose(self, view: View) -> tuple[int, int]:
        place, turn = divmod(view.cursor, 1 << _TURN_BITS)
        edge = self._edge(view.history)
        known = len(edge.prompts)
        share = min(1 - self._remeasure_share, known / edge.groups) if known else 0.0
        if self._chance(view.cursor, "edge") < share:
            around = (turn + self._seed) * _GOLDEN % 2**64
            return edge.prompts[around * known >> 64], view.cursor + 1
        for at in range(place, place + min(self._prompts, LONGEST_WALK)):
            if (prompt := self._epochs.choose(at)) not in edge:
                break
        else:
            at, prompt = place, self._epochs.choose(place)
        return prompt, (at + 1 << _TURN_BITS) + turn

    def _edge(self, known: KnownHistory) -> _Edge:
        """Computed once a step: what is known up to a step does not change (:mod:`.prompt_history`)."""
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
