"""Verdicts: results of a verifier for a completion."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from scalerl_tasks.errors import VerifierError

SCORE_RANGE: Final = (0.0, 1.0)
"""Lowest and highest score of every verifier, so that a mean score is a pass rate, as the curve fit requires."""
REWARD: Final = "reward"
"""Part with the reward of a verifier whose rewards have another range."""
NOT_APPLICABLE: Final = "not applicable: the verifier gave None"
"""In place of a verdict, where a verifier does not apply to a prompt."""


class _NoAnswer(float):
    """A score of 0 with the reason that the completion has no answer."""


NO_ANSWER: Final = _NoAnswer(0.0)
"""The score of a completion in which the verifier found no answer."""

MAX_PARTS: Final = 16
_PART_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's result for one completion.

    Attributes:
        score: in :data:`SCORE_RANGE`; the reward is computed from it.
        parts: finite numbers that explain the score, by the names that the verifier declares. Their means are reported; they
            do not change the reward.
        answered: whether the completion has an answer, right or wrong; None if the verifier cannot tell.
    """

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    answered: bool | None = field(default=None, compare=False)


def declared_parts(verifier: object) -> tuple[str, ...]:
    """The names of the parts that a verifier declares in its attribute ``part_names``; empty without the attribute. One with another
    ``range`` than :data:`SCORE_RANGE` has its reward as the part :data:`REWARD`.

    Raises:
        VerifierError: a name cannot be the name of a column or is repeated, or there are more than :data:`MAX_PARTS`.
    """
    names = tuple(getattr(verifier, "part_names", ()))
    if getattr(verifier, "range", SCORE_RANGE) != SCORE_RANGE:
        names = (*names, REWARD)
    where = f"the verifier {getattr(verifier, 'name', type(verifier).__name__)!r}"
    for name in names:
        if not (isinstance(name, str) and _PART_NAME.fullmatch(name)):
            raise VerifierError(
                f"{where} declares the part {name!r}: write up to 40 lower-case letters, digits and _, a letter first"
            )
    if len(set(names)) < len(names) or len(names) > MAX_PARTS:
        raise VerifierError(f"{where} declares the parts {names}: name at most {MAX_PARTS}, each once")
    return names


def as_verdict(
    found: Verdict | float, part_names: Sequence[str], bounds: tuple[float, float] = SCORE_RANGE
) -> Verdict:
    """Convert and check the result of a verifier; a number or bool is the score of a verdict without parts. The lowest of ``bounds``
    becomes a score of 0, and the highest 1.

    Raises:
        ValueError: the score is outside ``bounds``, a part is not finite, or the parts are not those declared.

    >>> as_verdict(True, ()), as_verdict(Verdict(0.5, {"process": 0.25}), ["process"])
    (Verdict(score=1.0, parts={}, answered=None), Verdict(score=0.5, parts={'process': 0.25}, answered=None))
    >>> as_verdict(0.0, ["reward"], (-1.0, 1.0)), as_verdict(NO_ANSWER, ()).answered
    (Verdict(score=0.5, parts={'reward': 0.0}, answered=None), False)
    """
    given, parts, answered = (
        (found.score, found.parts, found.answered)
        if isinstance(found, Verdict)
        else (found, {}, False if found is NO_ANSWER else None)
    )
    score, (low, high) = float(given), bounds
    if not low <= score <= high:  # NaN is not
        raise ValueError(f"the verifier gave {score:g}, which is not in [{low:g}, {high:g}]")
    if bounds != SCORE_RANGE:
        parts = {**parts, REWARD: score}
        score = min(1.0, (score - low) / (high - low))
    if not (parts or part_names):
        return Verdict(score, answered=answered)
    if parts.keys() != set(part_names):
        raise ValueError(f"the verifier gave the parts {sorted(parts)}, and declares {sorted(part_names)}")
    parts = {name: float(parts[name]) for name in part_names}
    for name, value in parts.items():
        if not math.isfinite(value):
            raise ValueError(f"the verifier gave {value} as its part {name!r}, which is not finite")
    return Verdict(score, parts, answered)
