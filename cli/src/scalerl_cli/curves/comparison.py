"""Comparison of two recipes: the paper's rule, and the reasons to distrust its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from scalerl_cli.curves import formatting
from scalerl_cli.curves.analysis import Analysis, State, interval_json
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.report import left_out
from scalerl_curvefit import Better, Comparison, CurveError, compare
from scalerl_curvefit.compare import A_MARGIN

SETTLED: Final = 0.9
"""Probability from which on two recipes are distinguished: a one-sided 90 % bound then excludes equality."""


@dataclass(frozen=True, eq=False)
class Pair:
    """The analyses of two recipes, and the result of the rule for them."""

    first: Analysis
    second: Analysis
    ruled: Comparison

    @property
    def names(self) -> tuple[str, str]:
        """File names; whole paths where the names alone are equal."""
        one, two = self.first.file.path, self.second.file.path
        return (str(one), str(two)) if one.name == two.name else (one.name, two.name)

    @property
    def better(self) -> Better:
        """The better recipe by the rule; UNDECIDED if either run is BROKEN, because its curve has ended."""
        broken = State.BROKEN in (self.first.state, self.second.state)
        return Better.UNDECIDED if broken else self.ruled.better

    @property
    def probability(self) -> float | None:
        """Probability that the better recipe has the larger A or B; None if undecided."""
        return None if self.better is Better.UNDECIDED else self.ruled.probability

    @property
    def doubts(self) -> list[str]:
        """Reasons to distrust the result, including active alarms."""
        reasons = []
        for name, made in zip(self.names, (self.first, self.second), strict=True):
            if made.state is State.BROKEN:
                reasons += [f"{name}: BROKEN: {reason}" for reason in made.guarded.reasons]
            reasons += [f"{name}: {doubt}" for doubt in (*made.doubts, *_bounds(made))]
        if self.first.file.unit != self.second.file.unit and (
            self.first.file.named_unit and self.second.file.named_unit
        ):
            reasons.append(
                f"compute is in {self.first.file.unit} on one side and in {self.second.file.unit} on the other; "
                "B and Cmid cannot be compared"
            )
        return reasons

    def as_json(self) -> dict[str, Any]:
        """The object of ``--json --compare``."""
        ruled = self.ruled
        return {
            "first": self.first.as_json(),
            "second": self.second.as_json(),
            "comparison": {
                "better": str(self.better),
                "by": ruled.by,
                "probability": self.probability,
                "same_asymptote": ruled.same_asymptote,
                "shared_A": None if ruled.shared_a is None else self.first.scale.level(ruled.shared_a),
                "refit_B": None
                if ruled.shared_a is None
                else {"first": interval_json(ruled.first.B), "second": interval_json(ruled.second.B)},
                "doubts": self.doubts,
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


def pair(first: Analysis, second: Analysis) -> Pair:
    """Compare by the paper's rule.

    Raises:
        CurveProblem: the refit at the common asymptote is not possible.
    """
    try:
        ruled = compare(first.fitted.curve, second.fitted.curve)
    except CurveError as error:
        raise CurveProblem(f"{first.file.path} against {second.file.path}: {error}") from error
    return Pair(first, second, ruled)


def comparison_report(both: Pair) -> Iterator[str]:
    """The lines of the report."""
    ruled, (one, two) = both.ruled, both.names
    fits, scale = (both.first.fitted, both.second.fitted), both.first.scale
    rows = [["", one, two]]
    rows += [
        ["A", *(scale.rewards(fitted.A) for fitted in fits)],
        ["A, least squares", *(scale.reward(fitted.point.A, 3) for fitted in fits)],
        ["B", *(formatting.amounts(fitted.B) for fitted in fits)],
        ["Cmid", *(formatting.amounts(fitted.Cmid) for fitted in fits)],
        ["R0", *(scale.rewards(fitted.R0) for fitted in fits)],
        [
            "at 2×",
            *(
                scale.rewards(made.forecasts[0]) if made.forecasts else "–"
                for made in (both.first, both.second)
            ),
        ],
        *_asked(both),
        ["state", str(both.first.state), str(both.second.state)],
    ]
    refits = ruled.first, ruled.second
    if ruled.same_asymptote and ruled.shared_a is not None:
        shared = scale.reward(ruled.shared_a, 3)
        rows.append([f"B at A = {shared}", *(formatting.amounts(fitted.B) for fitted in refits)])
        rows.append(["  least squares", *(formatting.significant(fitted.point.B) for fitted in refits)])
    yield f"{one} against {two}, median (90 % interval)"
    yield from formatting.table(rows)
    for name, made in zip(both.names, (both.first, both.second), strict=True):
        yield from (f"  {name}: {line.strip()}" for line in left_out(made))
    yield ""
    points = [fitted.point.A for fitted in fits]
    apart = scale.difference(abs(points[0] - points[1]))
    if ruled.same_asymptote:
        yield (
            f"the least-squares A differ by {apart}, within the margin of {scale.difference(A_MARGIN, 2)}: both are fitted again "
            "at the mean A, and the larger B is better"
        )
    else:
        yield f"the least-squares A differ by {apart}, more than the margin of {scale.difference(A_MARGIN, 2)}: the larger A is better"
    yield verdict(both)
    if both.doubts:
        yield "do not rely on it yet"
        yield from (f"  {doubt}" for doubt in both.doubts)


def _asked(both: Pair) -> Iterator[list[str]]:
    """A table row for each compute of ``--at``."""
    forecasts = both.first.forecasts[1:], both.second.forecasts[1:]
    for i, point in enumerate(forecasts[0] or forecasts[1]):
        cells = [both.first.scale.rewards(made[i]) if made else "–" for made in forecasts]
        yield [f"at {formatting.amount(point.compute)}", *cells]


def verdict(both: Pair) -> str:
    """Message with the better recipe, the compared parameter, and the probability."""
    ruled = both.ruled
    values = [getattr(fitted.point, ruled.by) for fitted in (ruled.first, ruled.second)]
    shown = [both.first.scale.reward(v, 3) if ruled.by == "A" else formatting.significant(v) for v in values]
    if both.probability is None:
        why = "a run is BROKEN" if both.better is not ruled.better else "a run is below its own midpoint"
        return f"undecided: {why}, so the rule does not apply yet ({ruled.by} {shown[0]} against {shown[1]}, least squares)"
    if both.better is Better.TIE:
        return f"no difference: {ruled.by} {shown[0]} on both sides (least squares)"
    best, rest = (0, 1) if both.better is Better.FIRST else (1, 0)
    settled = "" if both.probability >= SETTLED else " (not settled)"
    return (
        f"better: {both.names[best]}, by {ruled.by} {shown[best]} against {shown[rest]} (least squares), "
        f"with probability {formatting.probability(both.probability)}{settled}"
    )
