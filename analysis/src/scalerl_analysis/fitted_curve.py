"""The fit of a file. Text, JSON and picture are all made from it, so that they cannot disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

import numpy as np

from scalerl_analysis import formatting
from scalerl_analysis.curve_file import CurveFile
from scalerl_analysis.prior import Prior, none_counts
from scalerl_analysis.problem import AnalysisProblem
from scalerl_analysis.reward_scale import RewardScale
from scalerl_analysis.table import interval_json
from scalerl_curvefit import (
    BY_RISES,
    Collapse,
    CollapseCheck,
    ComputeToTarget,
    CurveError,
    EarlierUse,
    Edge,
    Estimate,
    Fit,
    Forecast,
    Hindcast,
    LateRises,
    RequestError,
    compute_to,
    detect_collapse,
    draws,
    fit,
    forecast,
    forecast_pool,
    hindcasts,
)
from scalerl_curvefit.collapse import CONSECUTIVE, MAX_TRUNCATION
from scalerl_curvefit.curve import FloatArray
from scalerl_curvefit.fitting import MAX_A_WIDTH, MIN_POINTS

ComputeT = TypeVar("ComputeT", Estimate, ComputeToTarget)

HEALTHY_TRUNCATED: Final = 0.05
"""An alarm of truncation ends below this fraction of the completions, as for the autoscaler [P]."""
MIN_HINDCAST_PROBABILITY: Final = 0.01
"""A hindcast whose probability of a reward below the observed one is less than this makes the fit doubtful."""


class State(StrEnum):
    """State of the fit.

    INSUFFICIENT: the asymptote is not identifiable yet.
    OK: the asymptote is identifiable.
    BROKEN: an alarm of the collapse check is active (the reward fell below its best, or completions are truncated), so there
        are no forecasts.
    """

    INSUFFICIENT = "INSUFFICIENT"
    OK = "OK"
    BROKEN = "BROKEN"


@dataclass(frozen=True, eq=False)
class FittedCurve:
    """A file, its fit, and the forecasts; all compute is on the axis of the file.

    Attributes:
        fitted: the fit of all points of the last segment, or, after a fall of the reward, of those before the fall.
        collapse_check: the collapse check, with the active alarms.
        hindcasts: forecasts from earlier points, compared with later ones.
        forecasts: first at 2× now, then at each requested compute; empty if the run is broken.
        not_in_prior: name and reason of each given earlier run that cannot be used.
    """

    file: CurveFile
    fitted: Fit
    collapse_check: CollapseCheck
    hindcasts: tuple[Hindcast, ...]
    forecasts: tuple[Forecast, ...]
    not_in_prior: tuple[tuple[str, str], ...] = ()

    @property
    def state(self) -> State:
        """BROKEN by an alarm, INSUFFICIENT by any doubt, else OK."""
        if self.collapse_check.broken:
            return State.BROKEN
        return State.INSUFFICIENT if self.warnings else State.OK

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to distrust the asymptote: those of the fit, and hindcasts far above the observed reward."""
        return (
            *(self._worded(warning) for warning in self.fitted.warnings),
            *(
                f"the reward at {formatting.amount(past.until + self.start)}, {self.scale.reward(past.observed)}, lies below "
                f"{1 - MIN_HINDCAST_PROBABILITY:.0%} of the forecast made at {formatting.amount(past.made_at + self.start)}"
                for past in self.hindcasts
                if past.below < MIN_HINDCAST_PROBABILITY
            ),
        )

    def _worded(self, warning: str) -> str:
        """The message of a doubt, with rewards on the scale of the file."""
        if warning.startswith("90 % interval of A is "):
            widest = self.scale.difference(MAX_A_WIDTH, 2)
            return f"90 % interval of A is {self.scale.width(self.fitted.A)} wide, more than {widest}"
        return formatting.plain(warning)

    def bound(self, edge: Edge) -> str:
        """The prior bound as text; those of A and A − R0 are on the scale of the file."""
        value = {"A": self.scale.level, "A - R0": self.scale.change}.get(edge.parameter, float)(edge.bound)
        return formatting.amount(value)

    @property
    def scale(self) -> RewardScale:
        """Scale of the rewards in the file; the fit and the forecasts use pass rates."""
        return RewardScale(*self.file.curve.scale)

    @property
    def collapse(self) -> Collapse | None:
        """The active fall of the reward; None if there is none."""
        return self.collapse_check.collapse

    @property
    def why_broken(self) -> str:
        """Cause of BROKEN in a few words; ``collapse_check.reasons`` has the numbers."""
        if self.collapse is None:
            return "completions are cut off at the length limit"
        return "the reward fell below its best"

    @property
    def fallen(self) -> int:
        """Number of evaluations after the fall, which are not fitted; 0 where too few are before it, so that all are."""
        return len(self.file.segment.curve) - len(self.fitted.curve)

    @property
    def start(self) -> float:
        """Compute spent on earlier recipes: the offset of the fit's axis on the axis of the file."""
        return self.file.segment.start

    @property
    def first(self) -> float:
        """Compute of the first trained point of this recipe."""
        curve = self.file.segment.curve
        return float(curve.compute[curve.compute > 0][0]) + self.start

    @property
    def now(self) -> float:
        """Compute of the last point."""
        return self.file.segment.curve.now + self.start

    @property
    def twice(self) -> float:
        """Compute at which this recipe has had twice as much as now."""
        return 2.0 * self.fitted.now + self.start

    def on_axis(self, compute: ComputeT) -> ComputeT:
        """A compute of this recipe with its interval, on the axis of the file."""
        ends = {name: end + self.start for name, end in interval_json(compute).items()}
        return replace(compute, **ends)

    def ahead(self, at: Sequence[float], given_as: str) -> list[Forecast]:
        """Forecasts at compute on the file's axis.

        Raises:
            AnalysisProblem: a compute lies before the start of this recipe; the message names ``given_as``.
        """
        try:
            made = forecast(self.fitted, [compute - self.start for compute in at])
        except RequestError as error:
            begin = f" (this recipe begins at {self.start:g})" if self.start else ""
            raise AnalysisProblem(f"{given_as}: {error}{begin}") from error
        return [replace(point, compute=point.compute + self.start) for point in made]

    def bands(self, compute: FloatArray) -> FloatArray:
        """(5, c) quantiles .05, .25, .5, .75, .95 of the reward at compute (c,) on the file's axis.

        They are without evaluation noise and late rises: few runs rise late, and far, so that a quantile jumps where they reach it.
        """
        pool = forecast_pool(self.fitted)
        drawn = replace(pool, rise=np.zeros(len(pool))).reward(compute - self.start)
        return np.asarray(np.quantile(drawn, (0.05, 0.25, 0.5, 0.75, 0.95), axis=0))

    def after_late_rise(self, compute: FloatArray) -> FloatArray:
        """(2, c) quantiles .05 and .95 of the reward of runs that have risen late, as `bands`."""
        pool = forecast_pool(self.fitted)
        risen = replace(pool, rise_after=np.zeros(len(pool)))
        return np.asarray(np.quantile(risen.reward(compute - self.start), (0.05, 0.95), axis=0))

    def left_to_asymptote(self) -> Estimate:
        """A − R(now)."""
        drawn = draws(self.fitted)
        return Estimate.of(drawn.A - drawn.reward(np.array([self.fitted.now]))[:, 0])

    @property
    def earlier(self) -> tuple[EarlierUse, ...]:
        """All given earlier runs; those that cannot be used come last, with weight 0."""
        return (*self.fitted.earlier, *(EarlierUse(name, 0.0, reason) for name, reason in self.not_in_prior))

    @property
    def prior_json(self) -> list[dict[str, Any]]:
        """``earlier`` as JSON values."""
        return [{"run": use.name, "weight": use.weight, "reason": use.reason} for use in self.earlier]

    def reach(self, target: float) -> ComputeToTarget:
        """Compute to a target, on the file's axis.

        Raises:
            AnalysisProblem: the target is outside the scale of the file.
        """
        try:
            found = compute_to(self.fitted, self.scale.rate(target))
        except RequestError as error:
            low, high = self.scale.low, self.scale.high
            raise AnalysisProblem(
                f"`target`: {target:g} is not between {low:g} and {high:g}, the lowest and the highest reward"
            ) from error
        return self.on_axis(found)

    def as_json(self, target: float | None = None, budget: float | None = None) -> dict[str, Any]:
        """The fit as JSON values; intervals are 90 %.

        Raises:
            AnalysisProblem: the target is outside the scale of the file, or the budget lies before this recipe.
        """
        fitted, going = self.fitted, self.state is not State.BROKEN
        points = [
            *self.forecasts,
            *(self.ahead([budget], "`budget`") if budget is not None and going else ()),
        ]
        shown: dict[str, Any] = {
            "A": interval_json(self.scale.levels(fitted.A)),
            "B": interval_json(fitted.B),
            "Cmid": interval_json(fitted.Cmid),
            "R0": interval_json(self.scale.levels(fitted.R0)),
            "identifiable": self.state is State.OK,
            "state": str(self.state),
            "forecasts": [
                {"compute": point.compute, **interval_json(self.scale.levels(point))} for point in points
            ],
        }
        if self.file.chosen.skipped:
            shown["skipped"] = self.file.chosen.skipped
        if self.file.chosen.replaced:
            shown["replaced"] = self.file.chosen.replaced
        if self.earlier:
            shown["prior"] = self.prior_json
        if target is not None and going:
            reached = self.reach(target)
            ends = {name: end if math.isfinite(end) else None for name, end in interval_json(reached).items()}
            shown["target"] = {"reward": target, **ends, "probability": reached.probability}
        return shown


def fit_curve(
    file: CurveFile,
    at: Sequence[float] = (),
    prior: Prior | None = None,
    late_rises: str = LateRises.LANGUAGE_MODELS,
) -> FittedCurve:
    """Fit the last segment with the runs of ``prior``, check for collapse, and forecast at 2× now and at each of ``at``.

    Raises:
        AnalysisProblem: no curve can be fitted to the points, a compute lies before this recipe, or none of the earlier runs
            can be used.
    """
    segment, settings = file.segment.curve, BY_RISES[LateRises(late_rises)]
    try:
        collapse_check = detect_collapse(segment)
        collapse = collapse_check.collapse
        before = segment if collapse is None else segment.head(collapse.points)
        # With too few points before the fall, all are fitted; the run is BROKEN either way.
        fitted = fit(
            before if len(before) - before.first_trained >= MIN_POINTS else segment,
            settings,
            earlier=() if prior is None else prior.runs,
        )
    except CurveError as error:
        part = f", from line {file.first_line} on (the last recipe)" if file.segments > 1 else ""
        few = (
            f" ({file.chosen.skipped:,} rows are empty in {file.chosen.x} or {file.chosen.y})"
            if file.chosen.skipped
            else ""
        )
        raise AnalysisProblem(f"{file.path}{part}: {error}{few}") from error
    reasons = [*_fallen(file, collapse), *_truncated(file)]
    made = FittedCurve(
        file,
        fitted,
        replace(collapse_check, broken=bool(reasons), reasons=tuple(reasons)),
        hindcasts(fitted.curve, settings),
        (),
        () if prior is None else prior.left_out,
    )
    if made.earlier and not any(use.weight > 0 for use in made.earlier):
        raise none_counts((use.name, use.reason) for use in made.earlier)
    points = made.ahead([made.twice], "forecast") + (made.ahead(at, "`at`") if at else [])
    return made if reasons else replace(made, forecasts=tuple(points))


def _fallen(file: CurveFile, collapse: Collapse | None) -> tuple[str, ...]:
    """The message about the fall, with rewards on the scale of the file."""
    if collapse is None:
        return ()
    scale = RewardScale(*file.curve.scale)
    return (
        f"the mean of the last {CONSECUTIVE} evaluations, {scale.reward(collapse.newest, 3)}, is "
        f"{scale.difference(collapse.depth)} below the best of {CONSECUTIVE} in a row, {scale.reward(collapse.best, 3)} at compute "
        f"{formatting.amount(collapse.best_compute + file.segment.start)}; noise explains {scale.difference(collapse.noise)}",
    )


def _truncated(file: CurveFile) -> tuple[str, ...]:
    """The message about an active alarm of truncation, whether it was raised by the newest evaluation or an earlier one."""
    if file.truncation is None:
        return ()
    over = np.flatnonzero(file.truncation < HEALTHY_TRUNCATED)
    since = file.truncation[over[-1] + 1 if over.size else 0 :]
    if not since.size or since.max() < MAX_TRUNCATION:
        return ()
    now, most = float(since[-1]), float(since.max())
    if now >= MAX_TRUNCATION:
        return (
            f"{100 * now:.1f} % of the completions are cut off at the length limit, {100 * MAX_TRUNCATION:.0f} % or more",
        )
    return (
        f"{100 * now:.1f} % of the completions are cut off at the length limit, after {100 * most:.1f} %: "
        f"healthy is below {100 * HEALTHY_TRUNCATED:.0f} %",
    )
