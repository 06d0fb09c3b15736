"""Computes the reward of a completion from its verdict's score and its length. Pure.

The score is in [0, 1]. Without length control, the reward of a correct answer is 1 and of a wrong one −1 (ScaleRL [P])::

    r = 2 · score − 1                                                     ``none``, ``interruption``
      + clip((maxTokens − |y|) / bufferTokens − 1, −1, 0)   if score = 1   ``penalty``: ScaleRL's alternative [P]
      + clip((maxCompletionTokens − bufferTokens − |y|) / bufferTokens, −1, 0)     ``overlong``: DAPO's [P]

Both length terms are 0 up to ``bufferTokens`` before the limit, and −1 from the limit on. Rewards are computed once, when a
group is accepted, and journaled, so a change of ``recipe.length`` does not affect earlier groups. The curve and pass rates use
scores, not rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

from scalerl_api.recipe import LengthSpec
from scalerl_api.wire import Verdicts


def rewards(
    verdicts: Verdicts, lengths: Sequence[int], length: LengthSpec, max_completion_tokens: int
) -> list[float]:
    """Reward of each completion of a group; ``lengths`` are in tokens.

    >>> from scalerl_api.recipe import LengthPenaltySpec
    >>> penalty = LengthSpec(penalty=LengthPenaltySpec(max_tokens=14000, buffer_tokens=2000))
    >>> rewards(Verdicts(scores=[1, 1, 1, 0]), [12000, 13000, 14000, 14000], penalty, 14336)
    [1.0, 0.5, 0.0, -1.0]
    """
    return [
        2.0 * score - 1.0 + _shaping(score, tokens, length, max_completion_tokens)
        for score, tokens in zip(verdicts.scores, lengths, strict=True)
    ]


def _shaping(score: float, tokens: int, length: LengthSpec, max_completion_tokens: int) -> float:
    if length.penalty is not None and score >= 1.0:
        limit, buffer = length.penalty.limits(max_completion_tokens)
        return _clipped((limit - tokens) / buffer - 1.0)
    if length.overlong is not None:
        buffer = length.overlong.buffer(max_completion_tokens)
        return _clipped((max_completion_tokens - buffer - tokens) / buffer)
    return 0.0


def _clipped(value: float) -> float:
    return min(0.0, max(-1.0, value))
