"""``spec.autoscaling``: whether the autoscaler acts on the forecast of the curve, and within which limits.

``docs/autoscaling.md`` has the decision rules with their sources. The defaults are this project's own, except where a field
cites a paper.
"""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from scalerl_api.fields import HorizonDecimal, Matches, Model, OpenUnitDecimal, PositiveDecimal, Rule


def timestamp_input(value: Any) -> Any:
    """Convert a date or time, which YAML parses from unquoted text, back to text."""
    return value.isoformat() if isinstance(value, date) else value


MOMENT = Matches(
    r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$",
    "must be a time with its time zone: end it with Z (UTC) or an offset, like 2026-08-01T12:00:00Z",
)
"""Pattern of an RFC 3339 time."""


def on_the_calendar(value: str) -> str:
    """Reject days that the calendar does not have, like 30 February."""
    try:
        datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("must be a day that the calendar has") from None
    return value


Timestamp = Annotated[
    str,
    Field(max_length=40),
    BeforeValidator(timestamp_input),
    AfterValidator(MOMENT),
    AfterValidator(on_the_calendar),
]
"""A time with its time zone, in RFC 3339 format."""


class GeneratorRange(Model):
    """Allowed number of generators."""

    min: Annotated[int, Field(ge=1, le=1024)] = 1
    """Minimum."""
    max: Annotated[int, Field(ge=1, le=1024)]
    """Maximum."""

    rules = (
        Rule(
            "self.max >= self.min",
            "%(max)s must be at least %(min)s",
            "max",
            lambda allowed: allowed.max >= allowed.min,
        ),
    )


class AutoscalingSpec(Model):
    """Whether and how decisions follow from the forecast of the curve."""

    mode: Literal["Off", "Advisory", "Auto"] = "Off"
    """``Advisory`` decides and records, but changes nothing; ``Auto`` acts."""
    min_gain: OpenUnitDecimal = "0.04"
    """Minimum worthwhile gain of reward at the horizon. No decision is made by a gain below three standard deviations of an
    evaluation, which cannot be forecast."""
    horizon: HorizonDecimal = "2"
    """Multiple of the current compute at which the gain is predicted."""
    target: OpenUnitDecimal | None = None
    """Minimum useful reward: the run stops once the budget cannot reach it."""
    price_per_device_hour: PositiveDecimal | None = None
    """Price of a device-hour, in any currency."""
    value_per_point: PositiveDecimal | None = None
    """Value of one point (.01) of reward, in the currency of the price. If both are set, cost and value replace
    minGain."""
    prior: Literal["OwnRuns", "None"] = "OwnRuns"
    """Finished runs that the forecast also uses. ``OwnRuns``: the newest 50 runs of the same task and model in the
    same namespace (locally: next to the run directory); ``None``: this run only."""
    max_device_hours: PositiveDecimal | None = None
    """Planning limit of the autoscaler, if less than the budget."""
    deadline: Timestamp | None = None
    """When the result is needed. It does not end the run: if it is binding, generators are added."""
    generators: GeneratorRange | None = None
    """Allowed number of generators; default: the number is not changed."""
    cooldown_seconds: Annotated[int, Field(ge=1, le=604_800)] = 600
    """Minimum time between two changes of the number of generators."""
    late_rises: Literal["LanguageModels", "Games"] = "LanguageModels"
    """Public curves from which the probability of late rises is taken: those of language models creep, those of game
    agents jump."""
    stop_after: Annotated[int, Field(ge=1, le=100)] = 3
    """Consecutive new evaluations that must agree before the run is stopped."""
    on_stop: Literal["Suspend", "Complete"] = "Suspend"
    """``Suspend`` can be reverted; the last checkpoint is kept in both cases."""
    on_broken: Literal["Hold", "Alert"] = "Hold"
    """In ``Auto``, after ``stopAfter`` consecutive new evaluations in the state BROKEN: ``Hold`` suspends the run
    after a checkpoint, which can be reverted; ``Alert`` only reports it."""

    rules = (
        Rule(
            "!has(self.pricePerDeviceHour) || has(self.valuePerPoint)",
            "pricePerDeviceHour needs valuePerPoint; give both or none",
            "pricePerDeviceHour",
            lambda spec: spec.price_per_device_hour is None or spec.value_per_point is not None,
        ),
        Rule(
            "!has(self.valuePerPoint) || has(self.pricePerDeviceHour)",
            "valuePerPoint needs pricePerDeviceHour; give both or none",
            "valuePerPoint",
            lambda spec: spec.value_per_point is None or spec.price_per_device_hour is not None,
        ),
    )
