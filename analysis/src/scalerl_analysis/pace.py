"""Compute per device-hour, number of devices, and elasticity of the speed in the number of devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from scalerl_analysis.curve_file import CurveFile
from scalerl_analysis.formatting import amount

MIN_CHANGE: Final = 1.25
"""Smallest ratio of the most to the fewest devices from which an elasticity can be measured."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Pace of a run over the last doubling of its compute."""

    rate: float | None
    """Compute per device-hour; None if unknown."""
    how: str
    """Source of the rate, or what is missing to determine it."""
    devices: float | None
    """Mean number of devices in use; None if unknown."""
    elasticity: float | None
    """d ln(compute per hour)/d ln(devices); None unless the number of devices has changed."""


def pace_of(file: CurveFile, rate: float | None = None, devices: float | None = None) -> Pace:
    """The pace over the last doubling of compute, so that it describes the present.

    Args:
        rate, devices: values of the user, which replace the measured ones.
    """
    compute = file.curve.compute
    begin = len(compute) - len(file.segment.curve)
    now, start = compute[-1], file.segment.start
    half = int(np.searchsorted(compute, start + 0.5 * (now - start), side="right")) - 1
    first = min(max(half, begin), len(compute) - 2) if len(compute) > 1 else 0
    measured: float | None = None
    how = "unknown: the file has no device_seconds; give `rate` or `device_hours`"
    used = walled = 0.0
    if file.device_hours is not None:
        used = float(file.device_hours[-1] - file.device_hours[first])
        if used > 0:
            measured = float(now - compute[first]) / used
            how = f"measured from compute {amount(float(compute[first]))} to {amount(float(now))}"
        else:
            how = "unknown: no device-hours were counted over the last doubling of compute; give `rate`"
    if file.wall_hours is not None:
        walled = float(file.wall_hours[-1] - file.wall_hours[first])
    if devices is None and used > 0 and walled > 0:
        devices = used / walled
    if rate is not None:
        measured, how = rate, "as given"
    return Pace(measured, how, devices, _elasticity(file))


def _elasticity(file: CurveFile) -> float | None:
    """Slope of ln(compute per hour) on ln(devices) over the points, weighted by time."""
    if file.device_hours is None or file.wall_hours is None:
        return None
    wall, used, done = (
        np.diff(column) for column in (file.wall_hours, file.device_hours, file.curve.compute)
    )
    going = (wall > 0) & (used > 0)
    if not going.any():
        return None
    wall, used, done = wall[going], used[going], done[going]
    devices = used / wall
    if devices.max() < MIN_CHANGE * devices.min():
        return None
    x, y = np.log(devices), np.log(done / wall)
    x = x - np.average(x, weights=wall)
    y = y - np.average(y, weights=wall)
    return float((wall * x * y).sum() / (wall * x * x).sum())
