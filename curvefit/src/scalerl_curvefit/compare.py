"""Two recipes side by side, as the paper compares them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from .curve import Curve
from .fitting import MAX_P_BEFORE_CMID, Fit, draws, fit
from .settings import FitSettings

A_MARGIN: Final = 0.02
"""The paper's error margin of A, from three seeds [P]. It states none for B."""
PINNED: Final = 0.0005
"""Half width of the interval A is pinned to in the refit."""


class Better(StrEnum):
    """Which recipe, by the paper's rule. TIE: equal to the last digit. UNDECIDED: the rule does not apply yet."""

    FIRST = "first"
    SECOND = "second"
    TIE = "tie"
    UNDECIDED = "undecided"


@dataclass(frozen=True, eq=False)
class Comparison:
    """What the paper's rule says of two recipes.

    same_asymptote: the fitted A differ by at most .02. If so, `first` and `second` are the refits at
    the mean A (`shared_a`), and the larger B is better; if not, they are the fits, and the larger A is.
    by: "A" or "B". better: UNDECIDED while either run is probably below its own midpoint, where
    recipes must not be compared [P].
    probability: that the one named has the larger A or B, from the two posteriors, ties shared; of the
    first where none is named.
    doubts: why this should not be believed yet, such as an A that its bound sets and not the points.
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
        for doubt in (*fitted.doubts, *bounds_met(fitted))
    )
    young = max(first.p_before_cmid, second.p_before_cmid) > MAX_P_BEFORE_CMID
    same = abs(first.point.A - second.point.A) <= A_MARGIN
    shared = None
    if same:
        shared = 0.5 * (first.point.A + second.point.A)
        low, high = max(shared - PINNED, 0.0), min(shared + PINNED, settings.a_highest)
        pinned = replace(settings, a_lowest=low, a_highest=high)
        first, second = fit(a, pinned), fit(b, pinned)
    by = "B" if same else "A"
    one, two = (getattr(draws(fitted), by) for fitted in (first, second))
    probability = float(np.mean(one > two) + 0.5 * np.mean(one == two))
    better = Better.UNDECIDED if young else _larger(getattr(first.point, by), getattr(second.point, by))
    if better is Better.SECOND:
        probability = 1.0 - probability
    return Comparison(first, second, same, shared, by, better, probability, doubts)


def bounds_met(fitted: Fit) -> tuple[str, ...]:
    """What a bound, and not the points, says of the curve: in words, one each. ρ is noise, not the curve."""
    met = [
        f"{edge.parameter} is at its {edge.side} bound, {edge.bound:.4g}, with probability {edge.mass:.2f}"
        for edge in fitted.edges
        if edge.parameter != "rho"
    ]
    if fitted.settings.a_highest <= fitted.point.A:
        met.append(f"the least-squares A is at its high bound, {fitted.settings.a_highest:.4g}")
    return tuple(met)


def _larger(one: float, two: float) -> Better:
    if one == two:
        return Better.TIE
    return Better.FIRST if one > two else Better.SECOND
