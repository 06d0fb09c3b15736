"""Two recipes side by side, as the paper compares them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from .curve import Curve
from .fitting import Fit, draws, fit
from .settings import FitSettings

SAME_A: Final = 0.02
"""The paper's error margin of A, from three seeds [P]. It states none for B."""
PINNED: Final = 0.0005
"""Half width of the interval A is pinned to in the refit."""


class Better(StrEnum):
    """Which recipe, by the paper's rule."""

    FIRST = "first"
    SECOND = "second"


@dataclass(frozen=True, eq=False)
class Comparison:
    """What the paper's rule says of two recipes.

    same_asymptote: the fitted A differ by at most .02. If so, `first` and `second` are the refits at
    the mean A (`shared_a`), and the larger B is better; if not, they are the fits, and the larger A is.
    by: "A" or "B". probability: P(better) of that parameter, from the two posteriors.
    doubts: why this should not be believed yet, such as a run below its own midpoint.
    """

    first: Fit
    second: Fit
    same_asymptote: bool
    shared_a: float | None
    by: str
    better: Better
    probability: float
    doubts: tuple[str, ...]


def compare(a: Curve, b: Curve, settings: FitSettings | None = None) -> Comparison:
    """Compare two recipes: by A, or, where A differs by at most .02, by B at the mean A (ScaleRL [P]).

    Both curves need the same unit of compute and the same evaluation set. Raises what `fit` raises.
    """
    settings = settings or FitSettings()
    first, second = fit(a, settings), fit(b, settings)
    doubts = tuple(
        f"{name} curve: {doubt}"
        for name, fitted in (("first", first), ("second", second))
        for doubt in fitted.doubts
    )
    same = abs(first.point.A - second.point.A) <= SAME_A
    shared = None
    if same:
        shared = 0.5 * (first.point.A + second.point.A)
        low, high = max(shared - PINNED, 0.0), min(shared + PINNED, settings.a_highest)
        pinned = replace(settings, a_lowest=low, a_highest=high)
        first, second = fit(a, pinned), fit(b, pinned)
    by = "B" if same else "A"
    one, two = (getattr(draws(fitted), by) for fitted in (first, second))
    better = Better.FIRST if getattr(first.point, by) >= getattr(second.point, by) else Better.SECOND
    p_first = float(np.mean(one > two))
    probability = p_first if better is Better.FIRST else 1.0 - p_first
    return Comparison(first, second, same, shared, by, better, probability, doubts)
