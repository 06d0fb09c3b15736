"""Answers to the requests of `scalerl_api.forecast`, without I/O."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec

from scalerl_api import forecast as wire

from ..collapse import WITHIN_NOISE, CollapseCheck, detect_collapse
from ..curve import Curve, Segment
from ..decision_quantities import (
    best_block,
    compute_to,
    decidable_gain,
    expected_gain,
    gain,
    marginal_gain,
    p_asymptote_above,
    p_gain_above,
    p_reward_above,
    samples_for,
)
from ..earlier_runs import EarlierRunsPrior, EarlierUse
from ..errors import ConstantRewardError, CurveError, RequestError
from ..fitting import Estimate, Fit, fit, summarize_run, with_changed_last_reward
from ..forecasting import forecast
from ..plateau import MIN_EVALUATIONS, detect_plateau, late_rise_sizes, p_late_rise
from ..run_summary import EarlierRun, SummarizedRun
from ..settings import BY_RISES, FitSettings, LateRises


def answer_fit(request: wire.FitRequest) -> wire.FitAnswer:
    """Fit the last segment. Raises CurveError."""
    segment = _last_segment(request.points)
    return _fit_answer(fit(segment.curve), segment.start)


def answer_forecast(request: wire.ForecastRequest) -> wire.ForecastAnswer:
    """Fit, collapse check, forecasts and outlook of the last segment. Raises CurveError."""
    return next(answer for answer in forecast_steps(request) if answer is not None)


def forecast_steps(request: wire.ForecastRequest) -> Iterator[wire.ForecastAnswer | None]:
    """`answer_forecast` in steps: None after the fit of each new earlier run, then the answer. Raises CurveError."""
    if len(request.at) > wire.MAX_FORECASTS:
        raise RequestError(
            f"{len(request.at)} computes to forecast at; at most {wire.MAX_FORECASTS} a request"
        )
    if not 1 <= request.draws <= wire.MAX_DRAWS:
        raise RequestError(f"draws is {request.draws}; it must be between 1 and {wire.MAX_DRAWS}")
    if request.budget is not None and not request.budget > 0:
        raise RequestError(f"budget is {request.budget:g}; it is the total compute that may be used, above 0")
    if not (math.isfinite(request.horizon) and request.horizon > 1.0):
        raise RequestError(f"horizon is {request.horizon:g}; it must be a multiple of now above 1")
    _check_earlier(request)
    segment = _last_segment(request.points)
    settings = BY_RISES[LateRises(request.late_rises)]
    earlier, excluded = list[SummarizedRun](), dict[str, str]()
    for run in request.earlier:
        points = _HashedPoints.of(run.points)
        found = _earlier_segment(points, settings.rises)
        if points.points is None:
            yield None
        if isinstance(found, str):
            excluded[run.name] = found
        elif found.recipe_changed != (segment.start > 0):
            excluded[run.name] = "compute counts from a change of recipe in only one of the two runs"
        else:
            known = found.run
            earlier.append(SummarizedRun(run.name, known.seed, known.eval_version, known.summary))
    fitted = _fit(segment.curve, request, earlier, settings)
    checked = detect_collapse(
        segment.curve,
        request.truncation,
        least=0.25 * request.min_gain,
        after=max(request.alarms_after - segment.start, 0.0),
        start=segment.start,
    )
    ahead: list[wire.ForecastPoint] = []
    outlook = None
    if not checked.broken:
        at = [compute - segment.start for compute in request.at] or [2.0 * fitted.now]
        ahead = [
            wire.ForecastPoint(
                compute=point.compute + segment.start,
                median=point.median,
                low=point.low,
                high=point.high,
                curve_low=point.curve_low,
                curve_high=point.curve_high,
            )
            for point in forecast(fitted, at, request.draws)
        ]
        outlook = _outlook(fitted, segment.start, request)
    yield wire.ForecastAnswer(
        fit=_fit_answer(fitted, segment.start),
        collapse_check=_collapse_answer(checked, segment.start),
        forecasts=ahead,
        outlook=outlook,
        method=wire.METHOD,
        flat=msgspec.UNSET if checked.broken else _flat(segment, request, fitted.prior),
        earlier=_earlier_uses(request, fitted, excluded) if request.earlier else msgspec.UNSET,
    )


def error_code(error: CurveError) -> str:
    """`TooFewPointsError` → `too_few_points`."""
    name = type(error).__name__.removesuffix("Error")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _check_earlier(request: wire.ForecastRequest) -> None:
    runs = request.earlier
    if len(runs) > wire.MAX_EARLIER_RUNS:
        raise RequestError(f"{len(runs)} earlier runs; at most {wire.MAX_EARLIER_RUNS} a request")
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise RequestError(f"two earlier runs have the name {max(names, key=names.count)!r}")
    points = len(request.points.compute) + sum(len(run.points.compute) for run in runs)
    if points > wire.MAX_POINTS:
        raise RequestError(
            f"{points} points, those of earlier runs included; at most {wire.MAX_POINTS} a request, thin them out"
        )


@dataclass(unsafe_hash=True)
class _HashedPoints:
    """The points of an earlier run as a cache key.

    Attributes:
        digest: hash of the points.
        points: None after a cache miss, so that the cache keeps no points.
    """

    digest: bytes
    points: wire.Points | None = field(compare=False)

    @classmethod
    def of(cls, points: wire.Points) -> _HashedPoints:
        encoded = msgspec.msgpack.encode(points)
        return cls(hashlib.blake2b(encoded, digest_size=16).digest(), points)


@dataclass(frozen=True, slots=True)
class _EarlierSegment:
    """The last segment of an earlier run.

    Attributes:
        run: summarized run with an empty name, since the name is not part of the cache key.
        recipe_changed: whether another recipe precedes the segment.
    """

    run: SummarizedRun
    recipe_changed: bool


@lru_cache(maxsize=1024)
def _earlier_segment(hashed: _HashedPoints, rises: LateRises) -> _EarlierSegment | str:
    """The last segment of an earlier run, or the reason why its points are invalid; cached, since requests repeat earlier runs."""
    points, hashed.points = hashed.points, None
    assert points is not None
    try:
        segment = _last_segment(points)
    except CurveError as error:
        return str(error)
    return _EarlierSegment(summarize_run(EarlierRun("", segment.curve), BY_RISES[rises]), segment.start > 0)


def _earlier_uses(
    request: wire.ForecastRequest, fitted: Fit, excluded: dict[str, str]
) -> list[wire.EarlierUse]:
    uses = {use.name: use for use in fitted.earlier}
    uses |= {name: EarlierUse(name, 0.0, reason) for name, reason in excluded.items()}
    return [
        wire.EarlierUse(name=use.name, weight=use.weight, reason=use.reason)
        for use in (uses[run.name] for run in request.earlier)
    ]


def _fit(
    curve: Curve, request: wire.ForecastRequest, earlier: list[SummarizedRun], settings: FitSettings
) -> Fit:
    """The fit of one segment. With a budget, equal rewards are fitted too (with the last one changed slightly), for the plateau."""
    try:
        return fit(curve, settings, earlier)
    except ConstantRewardError:
        if request.budget is None or len(curve) - curve.first_trained < MIN_EVALUATIONS:
            raise
    return fit(with_changed_last_reward(curve), settings, earlier)


def _flat(
    segment: Segment, request: wire.ForecastRequest, prior: EarlierRunsPrior | None
) -> wire.Flat | msgspec.UnsetType:
    if request.budget is None or request.budget <= segment.start:
        return msgspec.UNSET
    found = detect_plateau(segment.curve, request.min_gain, request.horizon, request.budget - segment.start)
    if found is None:
        return msgspec.UNSET
    if prior is not None:
        found = replace(found, p_late=prior.p_first_rise(found.p_late, request.min_gain))
    half = WITHIN_NOISE * found.slope_sd
    return wire.Flat(
        share=found.share,
        gained=found.gained,
        slope=wire.Interval(median=found.slope, low=found.slope - half, high=found.slope + half),
        p_trend=found.p_trend,
        p_late=found.p_late,
        p_gain=found.p_gain,
    )


def _last_segment(points: wire.Points) -> Segment:
    if len(points.compute) > wire.MAX_POINTS:
        raise RequestError(
            f"{len(points.compute)} points; at most {wire.MAX_POINTS} a request, thin them out"
        )
    curve = Curve(
        points.compute,
        points.reward,
        points.samples,
        points.eval_version,
        points.recipe,
        points.scale,
    )
    return curve.segments()[-1]


def _outlook(fitted: Fit, start: float, request: wire.ForecastRequest) -> wire.Outlook:
    horizon = request.horizon * fitted.now
    asymptote_above = at_most = to_target = block = None
    if request.target is not None:
        asymptote_above = p_asymptote_above(fitted, request.target)
        reach = compute_to(fitted, request.target)
        to_target = wire.Reached(
            probability=reach.probability,
            median=_or_never(reach.median, start),
            low=_or_never(reach.low, start),
            high=_or_never(reach.high, start),
        )
        if request.max_compute is not None:
            at_most = p_reward_above(fitted, request.max_compute - start, request.target)
    if request.value is not None and request.price is not None:
        best = best_block(fitted, request.value, request.price, horizon)
        block = wire.BestBlock(compute=best.compute, gain=best.gain, net=best.net)
    # Those after a flat doubling are forecast.
    pool = fitted.pool
    rate = fitted.settings.late_rise if pool.gains is None else pool.mean_late_rise
    late = p_late_rise(math.log2(request.horizon), request.min_gain, rate, fitted.trend.headroom)
    sizes = late_rise_sizes(request.min_gain, fitted.settings.rises)
    decidable = decidable_gain(fitted)
    samples = samples_for(fitted, request.min_gain) if request.min_gain < decidable else None
    return wire.Outlook(
        marginal_gain=_interval(marginal_gain(fitted)),
        gain=_interval(gain(fitted, horizon)),
        p_gain_above_min=p_gain_above(fitted, horizon, request.min_gain),
        p_late_rise=late,
        late_rise=msgspec.UNSET
        if sizes is None
        else wire.Interval(median=sizes[0], low=sizes[1], high=sizes[2]),
        expected_gain=expected_gain(fitted, horizon),
        decidable_gain=decidable,
        samples_needed=msgspec.UNSET if samples is None else samples,
        p_asymptote_above_target=asymptote_above,
        p_target_at_max_compute=at_most,
        to_target=to_target,
        best_block=block,
    )


def _fit_answer(fitted: Fit, start: float) -> wire.FitAnswer:
    point = fitted.point
    return wire.FitAnswer(
        A=_interval(fitted.A),
        B=_interval(fitted.B),
        Cmid=_interval(fitted.Cmid),
        R0=_interval(fitted.R0),
        sigma=_interval(fitted.sigma),
        rho=fitted.rho,
        point=wire.LeastSquares(
            A=point.A, B=point.B, Cmid=point.Cmid, R0=point.R0, residual_sd=point.residual_sd
        ),
        identifiable=fitted.identifiable,
        warnings=list(fitted.warnings),
        edges=[
            wire.PriorEdge(parameter=edge.parameter, side=edge.side, bound=edge.bound, mass=edge.mass)
            for edge in fitted.edges
        ],
        discrepancy=fitted.departure,
        p_before_cmid=fitted.p_before_cmid,
        points_used=fitted.points_used,
        now=fitted.now,
        segment_start=start,
        seed=fitted.seed,
    )


def _collapse_answer(checked: CollapseCheck, start: float) -> wire.CollapseAnswer:
    fall = checked.collapse
    return wire.CollapseAnswer(
        broken=checked.broken,
        checked=checked.checked,
        reasons=list(checked.reasons),
        seen=list(checked.latest),
        floor=[] if checked.floor is None else [checked.floor],
        collapse=msgspec.UNSET
        if fall is None
        else wire.Collapse(
            compute=fall.compute + start,
            best=fall.best,
            best_compute=fall.best_compute + start,
            newest=fall.newest,
            noise=fall.noise,
        ),
    )


def _interval(estimate: Estimate) -> wire.Interval:
    return wire.Interval(median=estimate.median, low=estimate.low, high=estimate.high)


def _or_never(compute: float, start: float) -> float | None:
    return compute + start if math.isfinite(compute) else None
