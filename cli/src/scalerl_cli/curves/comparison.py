"""Comparison of two recipes: the paper's rule, and the reasons to distrust its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scalerl_cli.curves import formatting
from scalerl_cli.curves.analysis import Analysis, State, interval_json
from scalerl_cli.curves.recipes import SETTLED, Recipe, Rule, Table
from scalerl_cli.curves.report import left_out
from scalerl_curvefit import Better
from scalerl_curvefit.compare import A_MARGIN


def pair(first: Analysis, second: Analysis) -> Table:
    """Two files as recipes with one run each, named by their files, or by whole paths where the names are equal."""
    paths = [made.file.path for made in (first, second)]
    names = [str(path) if paths[0].name == paths[1].name else path.name for path in paths]
    recipes = [Recipe(name, (made.file,), (made,)) for name, made in zip(names, (first, second), strict=True)]
    return Table(tuple(recipes), first.scale, first.file.unit)


def doubts(both: Rule) -> list[str]:
    """Reasons to distrust the result, including active alarms."""
    reasons = []
    for recipe in both.recipes:
        (made,) = recipe.made
        if made.state is State.BROKEN:
            reasons += [f"{recipe.label}: BROKEN: {reason}" for reason in made.guarded.reasons]
        reasons += [f"{recipe.label}: {doubt}" for doubt in (*made.doubts, *_bounds(made))]
    one, two = (recipe.files[0] for recipe in both.recipes)
    if one.unit != two.unit and one.named_unit and two.named_unit:
        reasons.append(
            f"compute is in {one.unit} on one side and in {two.unit} on the other; B and Cmid cannot be compared"
        )
    return reasons


def comparison_json(both: Rule) -> dict[str, Any]:
    """The object of ``--json --compare``."""
    ruled, (first, second) = both.ruled, both.studies
    return {
        "first": first.as_json(),
        "second": second.as_json(),
        "comparison": {
            "better": str(both.better),
            "by": ruled.by,
            "probability": both.probability,
            "same_asymptote": ruled.same_asymptote,
            "shared_A": None if ruled.shared_a is None else both.studies[0].scale.level(ruled.shared_a),
            "refit_B": None
            if ruled.shared_a is None
            else {"first": interval_json(ruled.first[0].B), "second": interval_json(ruled.second[0].B)},
            "doubts": doubts(both),
        },
    }


def _bounds(made: Analysis) -> Iterator[str]:
    """Parameters that a bound of the prior determines instead of the points; without ρ, which describes the noise."""
    for edge in made.fitted.edges:
        if edge.parameter != "rho":
            at = f"{edge.parameter} is at its {edge.side} bound, {made.bound(edge)}"
            yield f"{at}, with probability {formatting.probability(edge.mass)}"
    highest = made.fitted.settings.a_highest
    if highest <= made.fitted.point.A:
        yield f"the least-squares A is at its high bound, {formatting.amount(made.scale.level(highest))}"


def comparison_report(both: Rule) -> Iterator[str]:
    """The lines of the report."""
    ruled, studies, scale = both.ruled, both.studies, both.studies[0].scale
    names = [recipe.label for recipe in both.recipes]
    fits = [made.fitted for made in studies]
    points = [fitted.point for fitted in fits]
    rows = [
        ["", *names],
        ["A", *(scale.rewards(fitted.A) for fitted in fits)],
        ["A, least squares", *(scale.reward(point.A, 3) for point in points)],
        ["B", *(formatting.amounts(fitted.B) for fitted in fits)],
        ["Cmid", *(formatting.amounts(fitted.Cmid) for fitted in fits)],
        ["R0", *(scale.rewards(fitted.R0) for fitted in fits)],
        ["at 2×", *(scale.rewards(made.forecasts[0]) if made.forecasts else "–" for made in studies)],
        *_asked(both),
        ["state", *(str(made.state) for made in studies)],
    ]
    if ruled.shared_a is not None:
        refits = (ruled.first[0], ruled.second[0])
        shared = scale.reward(ruled.shared_a, 3)
        rows.append([f"B at A = {shared}", *(formatting.amounts(fitted.B) for fitted in refits)])
        rows.append(["  least squares", *(formatting.significant(fitted.point.B) for fitted in refits)])
    yield f"{names[0]} against {names[1]}, median (90 % interval)"
    yield from formatting.table(rows)
    for name, made in zip(names, studies, strict=True):
        yield from (f"  {name}: {line.strip()}" for line in left_out(made))
    yield ""
    apart = f"the least-squares A differ by {scale.difference(abs(points[0].A - points[1].A))}"
    margin = f"the margin of {scale.difference(A_MARGIN, 2)}"
    if ruled.same_asymptote:
        yield f"{apart}, within {margin}: both are fitted again at the mean A, and the larger B is better"
    else:
        yield f"{apart}, more than {margin}: the larger A is better"
    yield verdict(both)
    if reasons := doubts(both):
        yield "do not rely on it yet"
        yield from (f"  {doubt}" for doubt in reasons)


def _asked(both: Rule) -> Iterator[list[str]]:
    """A table row for each compute of ``--at``."""
    forecasts = [made.forecasts[1:] for made in both.studies]
    for i, point in enumerate(forecasts[0] or forecasts[1]):
        cells = [both.studies[0].scale.rewards(made[i]) if made else "–" for made in forecasts]
        yield [f"at {formatting.amount(point.compute)}", *cells]


def verdict(both: Rule) -> str:
    """Message with the better recipe, the compared parameter, and the probability."""
    by = both.ruled.by
    shown = [
        both.studies[0].scale.reward(v, 3) if by == "A" else formatting.significant(v) for v in both.values
    ]
    if both.probability is None:
        return f"undecided: {both.why_undecided}, so the rule does not apply yet ({by} {shown[0]} against {shown[1]}, least squares)"
    if both.better is Better.TIE:
        return f"no difference: {by} {shown[0]} on both sides (least squares)"
    best, rest = (0, 1) if both.better is Better.FIRST else (1, 0)
    settled = "" if both.probability >= SETTLED else " (not settled)"
    return (
        f"better: {both.recipes[best].label}, by {by} {shown[best]} against {shown[rest]} (least squares), "
        f"with probability {formatting.probability(both.probability)}{settled}"
    )
