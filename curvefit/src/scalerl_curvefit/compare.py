"""Compares two recipes by the paper's rule."""

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
"""Half width of the interval of A in the refit."""


class Better(StrEnum):
    """The better recipe. TIE: both fitted values are equal. UNDECIDED: the rule does not apply yet."""

    FIRST = "first"
    SECOND = "second"
    TIE = "tie"
    UNDECIDED = "undecided"


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of the paper's rule for two recipes.

    first, second: the fits; with `same_asymptote`, the refits at the mean A (`shared_a`).
    same_asymptote: the fitted A differ by at most .02. The larger B is better then, else the larger A.
    by: "A" or "B".
    better: UNDECIDED while either run is probably below its own midpoint, where recipes must not be compared [P].
    probability: that the better recipe (the first, if none is better) has the larger A or B, from the two posteriors;
        ties count half.
    doubts: reasons to distrust the result, such as an A that is set by its bound.
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
    """A sentence for each parameter of the curve that a prior bound determines. ρ is left out: it describes the noise."""
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
