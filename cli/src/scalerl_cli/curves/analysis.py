"""One fit of one file: what text, JSON and picture are made of, so that they cannot disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np

from scalerl_cli.curves import formatting
from scalerl_cli.curves.prior import Prior, none_counts
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.scale import RewardScale
from scalerl_cli.curves.source import CurveFile
from scalerl_curvefit import (
    CollapseCheck,
    ComputeToTarget,
    CurveError,
    EarlierUse,
    Edge,
    Estimate,
    Fall,
    Fit,
    Forecast,
    Hindcast,
    PowerLaw,
    RequestError,
    compute_to,
    detect_collapse,
    draws,
    fit,
    forecast,
    forecast_pool,
    hindcasts,
    power_law,
)
from scalerl_curvefit.collapse import CONSECUTIVE, MAX_TRUNCATION
from scalerl_curvefit.curve import FloatArray
from scalerl_curvefit.fitting import MAX_A_WIDTH, MIN_POINTS
from scalerl_curvefit.sampling import interval

HEALTHY_TRUNCATED: Final = 0.05
"""An alarm of truncation is over below this, as for the autoscaler [P]."""
SAGS: Final = 0.01
"""A past forecast that gave a reward as low as the one that came less than this probability makes the fit doubtful."""


class State(StrEnum):
    """What may be done with the fit.

    INSUFFICIENT: the asymptote is not identifiable yet. OK: it is. BROKEN: an alarm of the check for collapse stands: the reward
    fell below its best, or completions are cut off, so nothing is forecast.
    """

    INSUFFICIENT = "INSUFFICIENT"
    OK = "OK"
    BROKEN = "BROKEN"


@dataclass(frozen=True, eq=False)
class Analysis:
    """A file, its fit, and the forecasts; all compute on the axis of the file.

    fitted: of all points of the segment; of those before the fall where the reward fell below its best, for what came
    after is not of that curve.
    guarded: with the alarms that still stand.
    hindcasts: forecasts that the fitted points allow to check. forecasts: at 2× now first, then as asked; none if
    the run is broken. not_in_prior: earlier runs that were given and cannot count, with the reason.
    """

    file: CurveFile
    fitted: Fit
    guarded: CollapseCheck
    hindcasts: tuple[Hindcast, ...]
    forecasts: tuple[Forecast, ...]
    not_in_prior: tuple[tuple[str, str], ...] = ()

    @property
    def state(self) -> State:
        """BROKEN by an alarm, INSUFFICIENT by any doubt, else OK."""
        if self.guarded.broken:
            return State.BROKEN
        return State.INSUFFICIENT if self.doubts else State.OK

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the asymptote should not be believed: those of the fit, and those of a fit that sags."""
        return (
            *(self._worded(doubt) for doubt in self.fitted.doubts),
            *(
                f"the reward at {formatting.amount(past.until + self.start)}, {self.scale.reward(past.observed)}, lies below "
                f"{1 - SAGS:.0%} of the forecast made at {formatting.amount(past.made_at + self.start)}"
                for past in self.hindcasts
                if past.below < SAGS
            ),
        )

    def _worded(self, doubt: str) -> str:
        """A doubt of the fit, with rewards on the scale of the file."""
        if doubt.startswith("90 % interval of A is "):
            widest = self.scale.difference(MAX_A_WIDTH, 2)
            return f"90 % interval of A is {self.scale.width(self.fitted.A)} wide, more than {widest}"
        return formatting.plain(doubt)

    def bound(self, edge: Edge) -> str:
        """The bound that was met; of A and of A − R0 on the scale of the file."""
        value = {"A": self.scale.level, "A - R0": self.scale.change}.get(edge.parameter, float)(edge.bound)
        return formatting.amount(value)

    @property
    def scale(self) -> RewardScale:
        """Of the rewards of the file; those of the fit and the forecasts are pass rates."""
        return RewardScale(*self.file.curve.scale)

    @property
    def fall(self) -> Fall | None:
        """None where the reward has not fallen."""
        return self.guarded.fall

    @property
    def why_broken(self) -> str:
        """In a few words; ``guarded.reasons`` has the numbers."""
        if self.fall is None:
            return "completions are cut off at the length limit"
        return "the reward fell below its best"

    @property
    def fallen(self) -> int:
        """How many of the last evaluations lie after the fall, and are not fitted."""
        return 0 if self.fall is None else self.fall.over

    @property
    def start(self) -> float:
        """Compute spent on earlier recipes: what the fit's own axis lacks."""
        return self.file.segment.start

    @property
    def now(self) -> float:
        """Compute of the last point."""
        return self.file.segment.curve.now + self.start

    @property
    def twice(self) -> float:
        """Twice the compute that this recipe has had."""
        return 2.0 * self.fitted.now + self.start

    def ahead(self, at: Sequence[float], option: str) -> list[Forecast]:
        """Forecasts at compute on the file's axis.

        Raises:
            CurveProblem: naming ``option``, for compute that lies before this recipe.
        """
        try:
            made = forecast(self.fitted, [compute - self.start for compute in at])
        except RequestError as error:
            begin = f" (this recipe begins at {self.start:g})" if self.start else ""
            raise CurveProblem(f"{option}: {error}{begin}") from error
        return [replace(point, compute=point.compute + self.start) for point in made]

    def bands(self, compute: FloatArray) -> FloatArray:
        """(5, c) quantiles .05, .25, .5, .75, .95 of the reward itself at compute (c,) of the file's axis."""
        drawn = forecast_pool(self.fitted).reward(compute - self.start)
        return np.asarray(np.quantile(drawn, (0.05, 0.25, 0.5, 0.75, 0.95), axis=0))

    def left_to_asymptote(self) -> Estimate:
        """A − R(now)."""
        drawn = draws(self.fitted)
        low, median, high = interval(drawn.A - drawn.reward(np.array([self.fitted.now]))[:, 0])
        return Estimate(float(median), float(low), float(high))

    @property
    def earlier(self) -> tuple[EarlierUse, ...]:
        """All earlier runs that were given, those that cannot count last."""
        return (*self.fitted.earlier, *(EarlierUse(name, 0.0, reason) for name, reason in self.not_in_prior))

    @property
    def prior_json(self) -> list[dict[str, Any]]:
        """`earlier` as ``--json`` prints it."""
        return [{"run": use.name, "weight": use.weight, "reason": use.reason} for use in self.earlier]

    @property
    def power_law(self) -> PowerLaw:
        """By least squares, for comparison only."""
        return power_law(self.fitted.curve)

    def reach(self, target: float) -> ComputeToTarget:
        """Compute to a target, on the file's axis.

        Raises:
            CurveProblem: for a target outside the scale of the file.
        """
        try:
            found = compute_to(self.fitted, self.scale.rate(target))
        except RequestError as error:
            low, high = self.scale.low, self.scale.high
            raise CurveProblem(
                f"--target: {target:g} is not between {low:g} and {high:g}, the lowest and the highest reward"
            ) from error
        return replace(
            found,
            median=found.median + self.start,
            low=found.low + self.start,
            high=found.high + self.start,
        )

    def as_json(
        self, target: float | None = None, budget: float | None = None, *, alternatives: bool = False
    ) -> dict[str, Any]:
        """What ``--json`` prints; 90 % intervals.

        Raises:
            CurveProblem: for a target or a budget that cannot be asked about.
        """
        fitted, going = self.fitted, self.state is not State.BROKEN
        points = [
            *self.forecasts,
            *(self.ahead([budget], "--budget") if budget is not None and going else ()),
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
        if self.file.skipped:
            shown["skipped"] = self.file.skipped
        if self.earlier:
            shown["prior"] = self.prior_json
        if target is not None and going:
            reached = self.reach(target)
            ends = {name: end if math.isfinite(end) else None for name, end in interval_json(reached).items()}
            shown["target"] = {"reward": target, **ends, "probability": reached.probability}
        if alternatives and going:
            law, last = self.power_law, self.scale.level(float(fitted.curve.reward[-1]))
            at_2x = self.scale.level(float(law.reward(np.array(2.0 * fitted.now))))
            shown["alternatives"] = {
                "power_law": {"A": self.scale.level(law.A), "B": law.B, "at_2x": at_2x},
                "last_value": last,
            }
        return shown


def analyse(file: CurveFile, at: Sequence[float] = (), prior: Prior | None = None) -> Analysis:
    """Fit the last segment with the runs of ``prior``, check for collapse, and forecast at 2× now and at each of ``at``.

    Raises:
        CurveProblem: points that no curve can be fitted to, a compute that cannot be forecast at, or earlier runs
            none of which can count.
    """
    segment = file.segment.curve
    try:
        guarded = detect_collapse(segment)
        fall = guarded.fall
        before = segment if fall is None else segment.head(fall.points)
        # A run that fell at once has no curve before the fall: it is BROKEN all the same.
        fitted = fit(
            before if len(before) - before.first_trained >= MIN_POINTS else segment,
            earlier=() if prior is None else prior.runs,
        )
    except CurveError as error:
        part = f", from line {file.first_line} on (the last recipe)" if file.segments > 1 else ""
        few = f" ({file.skipped:,} rows are empty in {file.x} or {file.y})" if file.skipped else ""
        raise CurveProblem(f"{file.path}{part}: {error}{few}") from error
    reasons = [*_fallen(file, fall), *_truncated(file)]
    made = Analysis(
        file,
        fitted,
        replace(guarded, broken=bool(reasons), reasons=tuple(reasons)),
        hindcasts(fitted.curve),
        (),
        () if prior is None else prior.left_out,
    )
    if made.earlier and not any(use.weight > 0 for use in made.earlier):
        raise none_counts((use.name, use.reason) for use in made.earlier)
    points = made.ahead([made.twice], "forecast") + (made.ahead(at, "--at") if at else [])
    return made if reasons else replace(made, forecasts=tuple(points))


def _fallen(file: CurveFile, fall: Fall | None) -> tuple[str, ...]:
    """The fall, in words, with rewards on the scale of the file."""
    if fall is None:
        return ()
    scale = RewardScale(*file.curve.scale)
    return (
        f"the mean of the last {CONSECUTIVE} evaluations, {scale.reward(fall.newest, 3)}, is "
        f"{scale.difference(fall.depth)} below the best of {CONSECUTIVE} in a row, {scale.reward(fall.best, 3)} at compute "
        f"{formatting.amount(fall.best_compute + file.segment.start)}; noise explains {scale.difference(fall.noise)}",
    )


def _truncated(file: CurveFile) -> tuple[str, ...]:
    """An alarm of truncation, of now or from before, that is not over."""
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


def interval_json(estimate: Estimate | Forecast | ComputeToTarget) -> dict[str, float]:
    """Median and 90 % bounds."""
    return {"median": estimate.median, "low": estimate.low, "high": estimate.high}
