"""Which fields of ``spec.autoscaling`` agreeing evaluations are counted under: an edit of one restarts the count. Pure."""

from __future__ import annotations

from typing import Final

from scalerl_api.autoscaling import AutoscalingSpec

ALWAYS: Final = ("min_gain", "horizon", "target", "price_per_device_hour", "value_per_point", "stop_after")
"""Counted, and recorded with their defaults."""
NOT_COUNTED: Final = frozenset(
    (
        *("mode", "on_stop", "on_broken"),
        *("generators", "cooldown_seconds"),
        *("max_device_hours", "deadline"),
    )
)
"""Who acts, and how; the number of generators; limits of what may be used, which an observation has beside the forecast."""


def rules(spec: AutoscalingSpec) -> str:
    """The fields that a stop is counted under, with their values.

    A field that is in neither list counts, so that a new one cannot keep the count of another question. It is left out at its
    default: records from before the field are made again with the same rules.
    """
    fields = type(spec).model_fields
    later = [name for name in fields if name not in ALWAYS and name not in NOT_COUNTED]
    given = {name: value for name in ALWAYS if (value := getattr(spec, name)) is not None}
    given |= {
        name: value
        for name in later
        if (value := getattr(spec, name)) != fields[name].get_default(call_default_factory=True)
    }
    return " ".join(f"{name}={value}" for name, value in given.items())
