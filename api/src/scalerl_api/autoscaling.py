"""``spec.autoscaling``: who acts on the forecast of the curve, and by what rules.

The rules themselves, with their sources, are in ``docs/autoscaling.md``; every default is ours unless
a field says otherwise.
"""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from scalerl_api.fields import HorizonDecimal, Matches, Model, OpenUnitDecimal, PositiveDecimal, Rule


def timestamp_input(value: Any) -> Any:
    """YAML reads an unquoted time by itself; here it is text again."""
    return value.isoformat() if isinstance(value, date) else value


MOMENT = Matches(
    r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$",
    "must be a time with its time zone: end it with Z (UTC) or an offset, like 2026-08-01T12:00:00Z",
)
"""RFC 3339."""


def on_the_calendar(value: str) -> str:
    """Not the 30th of February."""
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
"""A moment with its time zone, as RFC 3339 writes it."""


class GeneratorRange(Model):
    """How many generators there may be; without one the autoscaler leaves their number alone."""

    min: Annotated[int, Field(ge=1, le=1024)] = 1
    """Fewest."""
    max: Annotated[int, Field(ge=1, le=1024)]
    """Most."""

    rules = (
        Rule(
            "self.max >= self.min",
            "%(max)s must be at least %(min)s",
            "max",
            lambda allowed: allowed.max >= allowed.min,
        ),
    )


class AutoscalingSpec(Model):
    """Who acts on the forecast, and when going on no longer pays."""

    mode: Literal["Off", "Advisory", "Auto"] = "Off"
    """``Advisory`` decides and records, but changes nothing; ``Auto`` acts."""
    min_gain: OpenUnitDecimal = "0.02"
    """Gain of reward at the horizon below which going on does not pay. The paper's margin is ±.02 [P]."""
    horizon: HorizonDecimal = "2"
    """Multiple of the compute used so far at which the gain is looked at."""
    target: OpenUnitDecimal | None = None
    """A reward without which the run is worth nothing: it stops once that is out of the budget's reach."""
    price_per_device_hour: PositiveDecimal | None = None
    """In any currency."""
    value_per_point: PositiveDecimal | None = None
    """Of one point, .01 of reward, in the currency of the price. With both, money decides in place of minGain."""
    prior: Literal["OwnRuns", "None"] = "OwnRuns"
    """Finished runs that the forecast also learns from. ``OwnRuns``: those of the same namespace (locally: beside the run's
    directory) of the same task and model, the newest 50; ``None``: no run but this one."""
    max_device_hours: PositiveDecimal | None = None
    """What the autoscaler may plan with, if that is less than the budget's own."""
    deadline: Timestamp | None = None
    """When the result is wanted. It ends nothing by itself: generators are added if it binds."""
    generators: GeneratorRange | None = None
    """How many generators there may be; none: their number is left alone."""
    cooldown_seconds: Annotated[int, Field(ge=1, le=604_800)] = 600
    """At least so long between two changes of the number of generators."""
    stop_after: Annotated[int, Field(ge=1, le=100)] = 3
    """New evaluations in a row that must agree before the run is stopped."""
    on_stop: Literal["Suspend", "Complete"] = "Suspend"
    """``Suspend`` can be taken back; the last checkpoint stays either way."""
    on_broken: Literal["Hold", "Alert", "Tell"] = "Hold"
    """In ``Auto``, once ``stopAfter`` new evaluations in a row find the run broken: ``Hold`` suspends it after a
    checkpoint, which can be taken back; ``Alert`` only reports it.
    ``Tell`` is the earlier name of ``Alert``, read for one release."""

    rules = (
        Rule(
            "!has(self.pricePerDeviceHour) || has(self.valuePerPoint)",
            "pricePerDeviceHour says nothing without valuePerPoint; give both or none",
            "pricePerDeviceHour",
            lambda spec: spec.price_per_device_hour is None or spec.value_per_point is not None,
        ),
        Rule(
            "!has(self.valuePerPoint) || has(self.pricePerDeviceHour)",
            "valuePerPoint says nothing without pricePerDeviceHour; give both or none",
            "valuePerPoint",
            lambda spec: spec.value_per_point is None or spec.price_per_device_hour is not None,
        ),
    )
