"""Requests and responses of the curve-fit sidecar, whose client is the autoscaler: msgspec structs, sent as JSON.

``POST /v1/fit`` takes a :class:`FitRequest` and returns a :class:`FitAnswer`; ``POST /v1/forecast``
takes a :class:`ForecastRequest` and returns a :class:`ForecastAnswer`. A rejected request gets an
:class:`ErrorAnswer`: 400 for an invalid request, 401 for a wrong token, 413 for a body that is too
large, 422 for points that cannot be fitted (``code`` has the reason), 503 with ``retry-after`` when
the sidecar is busy or out of time. Equal requests get bit-identical responses: the content of the
request seeds the draws.

Units: compute in the unit of the points (useful work: trained tokens or samples, or device-hours at
a constant efficiency); rewards as pass rates in [0, 1] after ``scale``. Intervals are 90 % intervals.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FIT = "/v1/fit"
FORECAST = "/v1/forecast"
OPENAPI = "/openapi.json"

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_POINTS = 200_000
"""Maximum number of points in a request, including those of earlier runs."""
MAX_FORECASTS = 200
"""Maximum length of ``ForecastRequest.at``."""
MAX_DRAWS = 20_000
MAX_EARLIER_RUNS = 50
METHOD = 5
"""Version of the forecasts and of the decisions on them."""

REQUESTS_METRIC = "scalerl_curvefit_requests"
"""Counter by ``path`` and ``status``."""
SECONDS_METRIC = "scalerl_curvefit_request_seconds"
"""Histogram by ``path``: seconds from the first byte read to the response."""
POINTS_METRIC = "scalerl_curvefit_points"
"""Histogram of points per request."""
PENDING_METRIC = "scalerl_curvefit_pending_requests"
"""Gauge: requests that are being computed or queued."""
REFUSED_METRIC = "scalerl_curvefit_refused"
"""Counter by ``code``."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every message."""


# --- requests ------------------------------------------------------------------------------------


class Points(Message, frozen=True, kw_only=True):
    """The measured points of one run, oldest first. A list has one entry per point; a single value applies to all points.
    A change of the evaluation version or of the recipe starts a new segment; only the last segment is fitted."""

    compute: list[float]
    """Compute spent before each evaluation."""
    reward: list[float]
    samples: list[float] | float | None = None
    """Number of evaluation samples of each point."""
    eval_version: list[str] | str | None = None
    recipe: list[str] | str | None = None
    scale: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest possible reward."""


class FitRequest(Message, frozen=True, kw_only=True):
    """``POST /v1/fit``."""

    points: Points


class EarlierRun(Message, frozen=True, kw_only=True):
    """A finished run of the same task and model, used as a prior: its last segment, with compute in the same unit."""

    name: str
    points: Points


class ForecastRequest(Message, frozen=True, kw_only=True):
    """``POST /v1/forecast``."""

    points: Points
    at: list[float] = []
    """Total compute of each forecast; if empty, one forecast at twice the compute of the last point."""
    horizon: float = 2.0
    """Multiple of the last point's compute at which gains are predicted."""
    min_gain: float = 0.04
    """Minimum worthwhile gain of reward at the horizon."""
    target: float | None = None
    """Reward for ``Outlook.to_target`` and the two probabilities of exceeding it."""
    max_compute: float | None = None
    """With a target: total compute at which P(R(max_compute) > target) is computed."""
    value: float | None = None
    """Value of one unit of reward. With ``price``, ``Outlook.best_block`` is computed."""
    price: float | None = None
    """Price of one unit of compute, in the currency of ``value``."""
    truncation: list[float] | None = None
    """Fraction of the rollouts truncated at the length limit, of each point or only of the latest one; input of the
    collapse check."""
    budget: float | None = None
    """Total compute that may be used, if it is known. With it and 10 or more evaluations in the last two doublings of
    compute, the response has ``ForecastAnswer.flat``, even if all rewards are equal."""
    alarms_after: float = 0.0
    """Compute at which a broken run was last resumed. The collapse check ignores evaluations up to it: they set no best and
    raise no alarm."""
    draws: int = 2000
    late_rises: Literal["language_models", "games"] = "language_models"
    """Public curves from which the probability of late rises is taken."""
    earlier: list[EarlierRun] = []
    """Finished runs for the prior; each is weighted by its similarity to this run."""


# --- responses -----------------------------------------------------------------------------------


class Interval(Message, frozen=True, kw_only=True):
    """A 90 % interval with its median."""

    median: float
    low: float
    high: float


class LeastSquares(Message, frozen=True, kw_only=True):
    """The least-squares curve: asymptote A, exponent B, midpoint Cmid, initial reward R0."""

    A: float
    B: float
    Cmid: float
    R0: float
    residual_sd: float


class PriorEdge(Message, frozen=True, kw_only=True):
    """A bound of the prior with posterior mass next to it: the bound, not the data, determines the interval."""

    parameter: str
    side: str
    """``low`` or ``high``."""
    bound: float
    mass: float
    """Posterior probability next to the bound."""


# The record of decisions keeps the earlier key.
class FitAnswer(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=False, rename={"warnings": "doubts"}
):
    """The fit of the last segment. Cmid and all compute count from the start of its recipe.
    Recorded answers by method 4 and before have an unused field ``hindcasts``, which is skipped."""

    A: Interval
    B: Interval
    Cmid: Interval
    R0: Interval
    sigma: Interval
    rho: float
    point: LeastSquares
    identifiable: bool
    warnings: list[str]
    edges: list[PriorEdge]
    discrepancy: float
    """Standard deviation added to forecasts with each doubling of compute."""
    p_before_cmid: float
    points_used: int
    now: float
    segment_start: float
    """Compute spent on earlier recipes; add it to convert to the compute of the request."""
    seed: int


class ForecastPoint(Message, frozen=True, kw_only=True):
    """A forecast at one compute."""

    compute: float
    """Total compute, as in the request."""
    median: float
    low: float
    """Lower end of the interval of an evaluation's result, noise included."""
    high: float
    """Upper end of that interval."""
    curve_low: float
    """Lower end of the interval of the curve itself."""
    curve_high: float
    """Upper end of that interval."""


class Reached(Message, frozen=True, kw_only=True):
    """Total compute at which the target is reached, as in the request; None: never."""

    probability: float
    median: float | None
    low: float | None
    high: float | None


class BestBlock(Message, frozen=True, kw_only=True):
    """The further compute with the largest net value; all zero if no further compute is worth its price."""

    compute: float
    """Further compute."""
    gain: float
    net: float
    """Value of the gain minus the price of the compute."""


class Outlook(Message, frozen=True, kw_only=True):
    """Predicted gains from further compute."""

    marginal_gain: Interval
    """dR/dC now, per unit of compute."""
    gain: Interval
    """R(horizon·now) − R(now)."""
    p_gain_above_min: float
    """P(gain > min_gain), including late rises that no fit predicts."""
    p_asymptote_above_target: float | None = None
    p_target_at_max_compute: float | None = None
    to_target: Reached | None = None
    best_block: BestBlock | None = None
    p_late_rise: float | msgspec.UnsetType = msgspec.UNSET
    """Probability that a late rise of ``min_gain`` or more, which no fit predicts, begins before the horizon."""
    late_rise: Interval | msgspec.UnsetType = msgspec.UNSET
    """Gains of late rises in public curves: median, minimum and maximum. A wrong stop loses such a gain."""
    expected_gain: float | msgspec.UnsetType = msgspec.UNSET
    """Mean of R(horizon·now) − R(now): what a stop forgoes on average."""
    decidable_gain: float | msgspec.UnsetType = msgspec.UNSET
    """Three standard deviations of an evaluation: a smaller ``min_gain`` cannot be distinguished from noise."""
    samples_needed: int | msgspec.UnsetType = msgspec.UNSET
    """Samples of an evaluation with which ``min_gain`` could be; unset if it can be now, the samples are not known, or no
    number suffices."""


class Collapse(Message, frozen=True, kw_only=True):
    """A collapse of the reward: the mean of the last three evaluations is below the best mean of three by more than noise."""

    compute: float
    """Compute of the first evaluation after the last one that was within noise of the best."""
    best: float
    """Best mean of three consecutive evaluations."""
    best_compute: float
    """Compute of the last of those three."""
    newest: float
    """Mean of the last three evaluations."""
    noise: float
    """Fall of a mean of three that noise explains."""


# The record of decisions keeps the earlier key.
class CollapseAnswer(Message, frozen=True, kw_only=True, rename={"collapse": "fall"}):
    """Result of the collapse check."""

    broken: bool
    """The reward collapsed and has not recovered, or too many rollouts are truncated."""
    checked: bool
    """Whether there were enough evaluations to check for a collapse."""
    reasons: list[str]
    seen: list[float]
    """The last three evaluations, oldest first."""
    floor: list[float]
    """The mean of three that ends the collapse; empty without one."""
    collapse: Collapse | msgspec.UnsetType = msgspec.UNSET
    """The present collapse, if there is one."""


class Flat(Message, frozen=True, kw_only=True):
    """Evidence, without a fitted curve, on whether the run still gains."""

    share: float
    """Used fraction of ``budget``."""
    gained: float
    """Best mean of three evaluations minus the first one."""
    slope: Interval
    """Gain of reward per doubling of compute, over the last two doublings."""
    p_trend: float
    """Probability, by this trend, that the gain at the horizon exceeds ``min_gain``."""
    p_late: float
    """Probability, from public curves, that a run without a gain so far still rises."""
    p_gain: float
    """P(gain > min_gain), by the trend or by a first rise: 1 − (1 − p_trend) · (1 − p_late)."""


class EarlierUse(Message, frozen=True, kw_only=True):
    """The use of an earlier run in the prior."""

    name: str
    """Name of the run in the request."""
    weight: float
    """Weight in the prior, from 0 to 1."""
    reason: str
    """Why the weight is reduced; empty if it is close to 1."""


# The record of decisions keeps the earlier key.
class ForecastAnswer(Message, frozen=True, kw_only=True, rename={"collapse_check": "guard"}):
    """Response to a :class:`ForecastRequest`. A broken run gets no forecasts and no outlook: its rewards no longer follow
    the fitted curve."""

    fit: FitAnswer
    collapse_check: CollapseAnswer
    forecasts: list[ForecastPoint]
    """Forecasts at ``ForecastRequest.at``; empty for a broken run."""
    outlook: Outlook | None
    """Predicted gains; None for a broken run."""
    method: int = METHOD
    """``METHOD`` of the responding program."""
    flat: Flat | msgspec.UnsetType = msgspec.UNSET
    """Set with a budget, 10 or more evaluations in the last two doublings, and no alarm."""
    earlier: list[EarlierUse] | msgspec.UnsetType = msgspec.UNSET
    """Use of each earlier run, in the order of the request; unset if the request has none."""


class ErrorAnswer(Message, frozen=True, kw_only=True):
    """Body of an error response."""

    code: str
    """Stable, machine-readable code, e.g. ``too_few_points``."""
    message: str
