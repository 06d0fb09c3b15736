"""One fit of one file: what text, JSON and picture are made of, so that they cannot disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.source import CurveFile
from scalerl_curvefit import (
    CurveError,
    Estimate,
    Fit,
    Forecast,
    GuardResult,
    Reach,
    RequestError,
    compute_to,
    draws,
    fit,
    forecast,
    guard,
)
from scalerl_curvefit.curve import FloatArray
from scalerl_curvefit.forecasting import rewards
from scalerl_curvefit.sampling import interval


class State(StrEnum):
    """What may be done with the fit.

    INSUFFICIENT: the asymptote is not identifiable yet. OK: it is. BROKEN: the guard says that the
    run no longer follows its own curve, so nothing is forecast.
    """

    INSUFFICIENT = "INSUFFICIENT"
    OK = "OK"
    BROKEN = "BROKEN"


@dataclass(frozen=True, eq=False)
class Study:
    """A file, its fit, and the forecasts; all compute on the axis of the file.

    forecasts: at 2× now first, then as asked; none if the run is broken.
    """

    file: CurveFile
    fitted: Fit
    guarded: GuardResult
    forecasts: tuple[Forecast, ...]

    @property
    def state(self) -> State:
        """BROKEN by the guard, INSUFFICIENT by any doubt, else OK."""
        if self.guarded.broken:
            return State.BROKEN
        return State.INSUFFICIENT if self.fitted.doubts else State.OK

    @property
    def start(self) -> float:
        """Compute spent on earlier recipes: what the fit's own axis lacks."""
        return self.file.segment.start

    @property
    def now(self) -> float:
        """Compute of the last point."""
        return self.fitted.now + self.start

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
        drawn = rewards(self.fitted, draws(self.fitted), compute - self.start)
        return np.asarray(np.quantile(drawn, (0.05, 0.25, 0.5, 0.75, 0.95), axis=0))

    def gain_bands(self, more: FloatArray) -> FloatArray:
        """(5, c) quantiles .05, .25, .5, .75, .95 of R(now + more) − R(now), by further compute (c,)."""
        drawn = rewards(self.fitted, draws(self.fitted), np.concatenate([[0.0], more]) + self.fitted.now)
        return np.asarray(np.quantile(drawn[:, 1:] - drawn[:, :1], (0.05, 0.25, 0.5, 0.75, 0.95), axis=0))

    def left_to_asymptote(self) -> Estimate:
        """A − R(now)."""
        drawn = draws(self.fitted)
        low, median, high = interval(drawn.A - drawn.reward(np.array([self.fitted.now]))[:, 0])
        return Estimate(float(median), float(low), float(high))

    def reach(self, target: float) -> Reach:
        """Compute to a target, on the file's axis.

        Raises:
            CurveProblem: for a target outside (0, 1).
        """
        try:
            found = compute_to(self.fitted, target)
        except RequestError as error:
            raise CurveProblem(f"--target: {error}") from error
        return replace(
            found,
            median=found.median + self.start,
            low=found.low + self.start,
            high=found.high + self.start,
        )

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints; 90 % intervals."""
        fitted = self.fitted
        return {
            "A": _interval(fitted.A),
            "B": _interval(fitted.B),
            "Cmid": _interval(fitted.Cmid),
            "R0": _interval(fitted.R0),
            "identifiable": self.state is State.OK,
            "state": str(self.state),
            "forecasts": [{"compute": point.compute, **_interval(point)} for point in self.forecasts],
        }


def study(file: CurveFile, at: Sequence[float] = ()) -> Study:
    """Fit the last segment, ask the guard, and forecast at 2× now and at each of ``at``.

    Raises:
        CurveProblem: points that no curve can be fitted to, or a compute that cannot be forecast at.
    """
    segment = file.segment.curve
    try:
        fitted = fit(segment)
        guarded = guard(segment, None if file.truncation is None else [file.truncation[-1]])
    except RequestError as error:
        raise CurveProblem(f"{file.path}, column truncated_fraction: {error}") from error
    except CurveError as error:
        part = f", from line {file.first_line} on (the last recipe)" if file.segments > 1 else ""
        raise CurveProblem(f"{file.path}{part}: {error}") from error
    made = Study(file, fitted, guarded, ())
    points = made.ahead([made.twice], "forecast") + (made.ahead(at, "--at") if at else [])
    return made if guarded.broken else replace(made, forecasts=tuple(points))


def _interval(estimate: Estimate | Forecast) -> dict[str, float]:
    return {"median": estimate.median, "low": estimate.low, "high": estimate.high}
