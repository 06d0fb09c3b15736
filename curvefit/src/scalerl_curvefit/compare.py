"""Compares two recipes by the paper's rule."""

from __future__ import annotations

from collections.abc import Sequence
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

    Attributes:
        first, second: the fits; with `same_asymptote`, the refits at the mean A (`shared_a`).
        same_asymptote: the fitted A differ by at most .02. The larger B is better then, else the larger A.
        by: "A" or "B".
        better: UNDECIDED while either run is probably below its own midpoint, where recipes must not be compared [P].
        shared_a: mean of the fitted A; None unless `same_asymptote`.
        probability: probability that the better recipe (the first, if none is better) has the larger A or B, from the two
            posteriors; ties count half.
        warnings: reasons to distrust the result, such as an A that is set by its bound.
    """

    first: Fit
    second: Fit
    same_asymptote: bool
    shared_a: float | None
    by: str
    better: Better
    probability: float
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SeedComparison:
    """The result of the paper's rule for two recipes with one or more runs each; other fields as in `Comparison`.

    Attributes:
        first, second: the fits of each run; with a `shared_a`, the refits.
        same_asymptote: whether the means of the fitted A differ by at most .02.
        better: the recipe with the larger mean over its runs.
        probability: probability that a run of the better recipe has a larger A or B than a run of the other one.
    """

    first: tuple[Fit, ...]
    second: tuple[Fit, ...]
    same_asymptote: bool
    shared_a: float | None
    by: str
    better: Better
    probability: float


def compare(a: Curve, b: Curve, settings: FitSettings | None = None) -> Comparison:
    """Compare two recipes: by A, or, where A differs by at most .02, by B at the mean A (ScaleRL [P]).

    Both curves need the same unit of compute and the same evaluation set. Raises what `fit` raises.
    """
    warnings = tuple(
        f"{name} curve: {warning}"
        for name, fitted in (("first", fit(a, settings)), ("second", fit(b, settings)))
        for warning in (*fitted.warnings, *bounds_met(fitted))
    )
    ruled = compare_seeds((a,), (b,), settings)
    return Comparison(
        ruled.first[0],
        ruled.second[0],
        ruled.same_asymptote,
        ruled.shared_a,
        ruled.by,
        ruled.better,
        ruled.probability,
        warnings,
    )


def compare_seeds(
    a: Sequence[Curve], b: Sequence[Curve], settings: FitSettings | None = None
) -> SeedComparison:
    """Compare two recipes with one or more runs each: by their means of A, or of B at the mean A, as in `compare`.

    Raises what `fit` raises.
    """
    settings = settings or FitSettings()
    first, second = _fits(a, settings), _fits(b, settings)
    young = max(fitted.p_before_cmid for fitted in (*first, *second)) > MAX_P_BEFORE_CMID
    levels = _mean(first, "A"), _mean(second, "A")
    same = abs(levels[0] - levels[1]) <= A_MARGIN
    shared = None
    if same:
        shared = 0.5 * (levels[0] + levels[1])
        low, high = max(shared - PINNED, 0.0), min(shared + PINNED, settings.a_highest)
        pinned = replace(settings, a_lowest=low, a_highest=high)
        first, second = _fits(a, pinned), _fits(b, pinned)
    by = "B" if same else "A"
    pairs = [(getattr(draws(x), by), getattr(draws(y), by)) for x in first for y in second]
    probability = float(np.mean([np.mean(x > y) + 0.5 * np.mean(x == y) for x, y in pairs]))
    better = Better.UNDECIDED if young else _larger(_mean(first, by), _mean(second, by))
    if better is Better.SECOND:
        probability = 1.0 - probability
    return SeedComparison(first, second, same, shared, by, better, probability)


def _fits(curves: Sequence[Curve], settings: FitSettings) -> tuple[Fit, ...]:
    return tuple(fit(curve, settings) for curve in curves)


def _mean(fits: Sequence[Fit], name: str) -> float:
    """Mean of a least-squares parameter over the runs."""
    return float(np.mean([getattr(fitted.point, name) for fitted in fits]))


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
