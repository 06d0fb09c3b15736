"""What the operator and the curve-fit sidecar say to each other: msgspec structs, sent as JSON.

``POST /v1/fit`` takes a :class:`FitRequest` and answers a :class:`FitAnswer`; ``POST /v1/forecast``
takes a :class:`ForecastRequest` and answers a :class:`ForecastAnswer`. Anything refused is answered
with an :class:`ErrorAnswer`: 400 for what is no request, 401 for a wrong token, 413 for too much of
it, 422 for points that cannot be fitted (``code`` says why), 503 with ``retry-after`` when busy or
out of time. The same request gets the same answer, bit for bit: its draws are seeded by its content.

Units: compute in whatever unit the points have (useful work: trained tokens or samples, or
device-hours at a constant efficiency); rewards as pass rates in [0, 1] after ``scale``. Intervals
are 90 % intervals.
"""

from __future__ import annotations

import msgspec

FIT = "/v1/fit"
FORECAST = "/v1/forecast"
OPENAPI = "/openapi.json"

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_POINTS = 200_000
"""Of a request, those of earlier runs included."""
MAX_FORECASTS = 200
"""Computes that one request may ask forecasts at."""
MAX_DRAWS = 20_000
MAX_EARLIER_RUNS = 50
METHOD = 3
"""Version of what is answered and decided. 1: an alarm held the last evaluations against a forecast. 2: against the best
before. 3: a run whose fit expects a gain is not flat."""

REQUESTS_METRIC = "scalerl_curvefit_requests"
"""Counter by ``path`` and ``status``."""
SECONDS_METRIC = "scalerl_curvefit_request_seconds"
"""Histogram by ``path``: from the first byte read to the answer."""
POINTS_METRIC = "scalerl_curvefit_points"
"""Histogram of points a request."""
PENDING_METRIC = "scalerl_curvefit_pending_requests"
"""Gauge: requests being computed or waiting for it."""
REFUSED_METRIC = "scalerl_curvefit_refused"
"""Counter by ``code``."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every message."""


# --- asked ---------------------------------------------------------------------------------------


class Points(Message, frozen=True, kw_only=True):
    """The measured points of one run, oldest first. Only the last segment is fitted."""

    compute: list[float]
    reward: list[float]
    samples: list[float] | float | None = None
    """Evaluation samples behind a point, one a point or one number."""
    eval_version: list[str] | str | None = None
    recipe: list[str] | str | None = None
    """Where the evaluation version or the recipe changes, a new segment starts."""
    scale: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest possible reward."""


class FitRequest(Message, frozen=True, kw_only=True):
    """``POST /v1/fit``."""

    points: Points


class EarlierRun(Message, frozen=True, kw_only=True):
    """A finished run of the same task and model, as a prior: its last segment, on the same axis of compute."""

    name: str
    points: Points


class ForecastRequest(Message, frozen=True, kw_only=True):
    """``POST /v1/forecast``."""

    points: Points
    at: list[float] = []
    """Total compute to forecast at; twice the last point's if empty."""
    horizon: float = 2.0
    """How far the gain questions look ahead: to this multiple of the last point's compute."""
    min_gain: float = 0.02
    target: float | None = None
    max_compute: float | None = None
    """With a target: P(R(max_compute) > target)."""
    value: float | None = None
    """Of one unit of reward. With a price: the block of further compute that pays best."""
    price: float | None = None
    """Of one unit of compute."""
    truncation: list[float] | None = None
    """Share of rollouts cut off at the length limit, one a point or only the latest; for the check for collapse."""
    budget: float | None = None
    """Total compute that may be used, as far as it is known: with 10 evaluations or more in the
    last two doublings the answer says how flat the run is (``ForecastAnswer.flat``), also where all rewards are equal."""
    alarms_after: float = 0.0
    """Evaluations up to this compute set no best and raise no alarm of a fall: somebody knows of them."""
    draws: int = 2000
    earlier: list[EarlierRun] = []
    """What they gained from the same compute on counts, as far as they are like this run."""


# --- answered ------------------------------------------------------------------------------------


class Interval(Message, frozen=True, kw_only=True):
    median: float
    low: float
    high: float


class LeastSquares(Message, frozen=True, kw_only=True):
    """The single best curve."""

    A: float
    B: float
    Cmid: float
    R0: float
    residual_sd: float


class PriorEdge(Message, frozen=True, kw_only=True):
    """A bound of the prior that the posterior leans on: there the bound sets the interval, not the data."""

    parameter: str
    side: str
    bound: float
    mass: float


class PastForecast(Message, frozen=True, kw_only=True):
    """In answers by method 1: what an earlier forecast of this run came to. Over the doubling of compute up to
    ``until`` the rewards departed from it by ``departure``, of which noise and uncertainty explain ``sd``."""

    made_at: float
    until: float
    departure: float
    sd: float


class FitAnswer(Message, frozen=True, kw_only=True):
    """The fit of the last segment. Cmid and all compute count from the start of its recipe."""

    A: Interval
    B: Interval
    Cmid: Interval
    R0: Interval
    sigma: Interval
    rho: float
    point: LeastSquares
    identifiable: bool
    doubts: list[str]
    edges: list[PriorEdge]
    hindcasts: list[PastForecast]
    discrepancy: float
    """sd that forecasts gain with each doubling of compute."""
    p_before_cmid: float
    points_used: int
    now: float
    segment_start: float
    """Compute spent on earlier recipes; add it to get back to the axis of the request."""
    seed: int


class ForecastPoint(Message, frozen=True, kw_only=True):
    """``compute`` is on the axis of the request. low–high is for what an evaluation will show,
    curve_low–curve_high for the reward itself."""

    compute: float
    median: float
    low: float
    high: float
    curve_low: float
    curve_high: float


class Reached(Message, frozen=True, kw_only=True):
    """Total compute at which the target is reached, on the axis of the request; None is never."""

    probability: float
    median: float | None
    low: float | None
    high: float | None


class BestBlock(Message, frozen=True, kw_only=True):
    """The further compute that pays best; all zero if none pays."""

    compute: float
    gain: float
    net: float


class Outlook(Message, frozen=True, kw_only=True):
    """What is still to be gained."""

    marginal_gain: Interval
    """dR/dC now, per unit of compute."""
    gain: Interval
    """R(horizon·now) − R(now)."""
    p_gain_above_min: float
    """Late rises that no fit announces counted in."""
    p_asymptote_above_target: float | None = None
    p_target_at_max_compute: float | None = None
    to_target: Reached | None = None
    best_block: BestBlock | None = None
    p_late_rise: float | msgspec.UnsetType = msgspec.UNSET
    """That a rise of ``min_gain`` or more which no fit announces begins up to the horizon."""
    late_rise: Interval | msgspec.UnsetType = msgspec.UNSET
    """What such rises gained in public curves: median, least, most. A stop gives that away where it is wrong."""


class Fall(Message, frozen=True, kw_only=True):
    """The mean of the last three evaluations lies below the best mean of three by more than noise."""

    compute: float
    """Of the first evaluation after the last one that was within noise of the best."""
    best: float
    best_compute: float
    newest: float
    noise: float
    """By how much noise lets a mean of three lie lower."""


class GuardAnswer(Message, frozen=True, kw_only=True):
    """broken: the reward fell and has not come back, or too much is truncated."""

    broken: bool
    checked: bool
    reasons: list[str]
    seen: list[float]
    """The last three evaluations."""
    floor: list[float]
    """The mean of three that ends a fall; empty without one. By method 1: what each of ``seen`` had to stay above."""
    fall: Fall | msgspec.UnsetType = msgspec.UNSET


class Flat(Message, frozen=True, kw_only=True):
    """What says, without any curve, that nothing more comes of a run."""

    share: float
    """Of ``budget``, used."""
    gained: float
    """The best mean of three evaluations above the first."""
    slope: Interval
    """Reward gained with each doubling of compute, over the last two."""
    p_trend: float
    """That by this trend the gain at the horizon exceeds ``min_gain``."""
    p_late: float
    """That a run which has gained nothing by now still rises, from public curves."""
    p_gain: float
    """P(gain > min_gain): either."""


class EarlierUse(Message, frozen=True, kw_only=True):
    """What an earlier run counted for: ``weight`` from 0 to 1, and why less than nearly all, else empty."""

    name: str
    weight: float
    reason: str


class ForecastAnswer(Message, frozen=True, kw_only=True):
    """A broken run gets no forecasts and no outlook: a curve says nothing about a run that left it."""

    fit: FitAnswer
    guard: GuardAnswer
    forecasts: list[ForecastPoint]
    outlook: Outlook | None
    method: int | msgspec.UnsetType = msgspec.UNSET
    """``METHOD`` of the program that answered; not given by method 1. Recorded decisions are replayed by it."""
    flat: Flat | msgspec.UnsetType = msgspec.UNSET
    """With a budget, 10 evaluations in the last two doublings, and no alarm."""
    earlier: list[EarlierUse] | msgspec.UnsetType = msgspec.UNSET
    """Those of the request, in its order; not given where there were none."""


class ErrorAnswer(Message, frozen=True, kw_only=True):
    """code: stable, for programs, e.g. ``too_few_points``. message: for people."""

    code: str
    message: str
