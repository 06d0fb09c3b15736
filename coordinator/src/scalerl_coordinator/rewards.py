"""Computes the reward of a completion from its verdict's score and its length, and the zero-variance filter. Pure.

The score is in [0, 1]. Without length control, the reward of a correct answer is 1 and of a wrong one −1 (ScaleRL [P])::

    r = 2 · score − 1                                                     ``none``, ``interruption``
      + clip((maxCompletionTokens − buffer − |y|) / buffer, −1, 0)   if score = 1   ``penalty``: ScaleRL's alternative [P]
                                                                     for all        ``overlong``: DAPO's [P]

With ``recipe.advantage.credit`` other than ``Episode``, an episode of turns 1 … T has a return for each turn, from the rewards q of its
turns but the last, in units of scores (:attr:`~scalerl_api.wire.MessageSpan.reward`)::

    r_t = 2 · q_t for t < T,   r_T = r + 1 − Σ_{t<T} r_t,   R_t = Σ_{u≥t} γ^(u−t) r_u

So the rewards of the turns always sum to that of the episode, from 0 instead of −1, since a discount must not make a late failure better than
an early one. Without rewards of turns and with γ = 1, R_t = r + 1 for all of them.

The length term is 0 up to the buffer before the limit, and −1 at the limit. Rewards are computed once, when a group is accepted,
and journaled, so a change of ``recipe.length`` does not affect earlier groups. The curve and pass rates use scores, not rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from scalerl_api.recipe import Credit, LengthSpec
from scalerl_api.wire import MessageSpan, Verdicts

PENALTY_SHARE: Final = 7
OVERLONG_SHARE: Final = 5
"""The buffers are maxCompletionTokens divided by these: 2,048 of 14,336 in ScaleRL, 4,096 of 20,480 in DAPO [P]."""

_DECIMALS: Final = 9


def rewards(
    verdicts: Verdicts, lengths: Sequence[int], length: LengthSpec, max_completion_tokens: int
) -> list[float]:
    """Reward of each completion of a group; ``lengths`` are in tokens.

    >>> from scalerl_api.recipe.spec import LengthPenaltySpec
    >>> penalty = LengthSpec(penalty=LengthPenaltySpec())
    >>> rewards(Verdicts(scores=[1, 1, 1, 0]), [12288, 13312, 14336, 14336], penalty, 14336)
    [1.0, 0.5, 0.0, -1.0]
    """
    return [
        2.0 * score - 1.0 + _shaping(score, tokens, length, max_completion_tokens)
        for score, tokens in zip(verdicts.scores, lengths, strict=True)
    ]


def turn_returns(reward: float, turns: Sequence[MessageSpan], discount: float) -> list[float]:
    """Return of each turn of an episode with the reward ``reward``; ``turns`` are its messages.

    >>> turn_returns(1.0, [MessageSpan(3, 5, 0.25), MessageSpan(8, 9)], 1.0)
    [2.0, 1.5, 1.5]
    >>> turn_returns(1.0, [MessageSpan(3, 5)], 0.5), turn_returns(-1.0, [], 0.5)
    ([1.0, 2.0], [0.0])
    """
    earlier = [2.0 * turn.reward for turn in turns]
    found = [reward + 1.0 - math.fsum(earlier)]
    for earned in reversed(earlier):
        found.append(earned + discount * found[-1])
    return found[::-1]


def zero_variance(
    rewards: Sequence[float], returns: Sequence[Sequence[float]] = (), credit: Credit = "Episode"
) -> bool:
    """Whether a group has no gradient, because all its advantages are zero: its rewards are all equal, or it has none.

    This compares rewards, not scores: of two correct answers, the longer one may have the lower reward. ScaleRL drops such
    groups from the effective batch without refilling it (arXiv 2510.13786 §2 [P]). With another ``credit``, the returns of turns
    decide in their place (:func:`turn_returns`): all of them, or those of each turn among themselves. They are given
    without a discount, which is a preference among episodes that differ in their rewards, and no reason to train on others. They
    are sums, so they are compared to nine decimals.

    >>> returns = [[1.0, 0.0], [1.0]]  # the second reply of the first episode earned nothing
    >>> zero_variance([1.0, 1.0], returns), zero_variance([1.0, 1.0], returns, "Return"), zero_variance([1.0, 1.0], returns, "Turn")
    (True, False, True)
    """
    if credit == "Episode" or not returns:
        return len(set(rewards)) <= 1
    if credit == "Return":
        return len({round(one, _DECIMALS) for of_episode in returns for one in of_episode}) <= 1
    at_turn: dict[int, float] = {}
    rounded = ((turn, round(one, _DECIMALS)) for each in returns for turn, one in enumerate(each))
    return all(at_turn.setdefault(turn, one) == one for turn, one in rounded)


def _shaping(score: float, tokens: int, length: LengthSpec, max_completion_tokens: int) -> float:
    if length.penalty is not None and score >= 1.0:
        return _from_buffer(tokens, max_completion_tokens, PENALTY_SHARE)
    if length.overlong is not None:
        return _from_buffer(tokens, max_completion_tokens, OVERLONG_SHARE)
    return 0.0


def _from_buffer(tokens: int, limit: int, share: int) -> float:
    buffer = max(1, limit // share)
    return min(0.0, max(-1.0, (limit - tokens) / buffer - 1.0))
