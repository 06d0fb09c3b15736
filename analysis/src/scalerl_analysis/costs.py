"""Cost and expected gain of each choice: the rows of ``scalerl plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from scalerl_analysis import formatting
from scalerl_analysis.fitted_curve import FittedCurve, State
from scalerl_analysis.pace import Pace
from scalerl_analysis.problem import AnalysisProblem
from scalerl_curvefit import Block, Estimate, Forecast, best_block, expected_gain, gain

MULTIPLES: Final = (2, 4)
POINTS: Final = 100.0
"""Points in a reward of 1: the value per point is for a difference of .01 in the pass rate."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in the user's currency; None if not given."""

    price: float | None
    """Price of a device-hour."""
    value: float | None
    """Value of a point (.01) of reward."""

    def worth(self, gained: float, device_hours: float | None) -> tuple[float | None, float | None]:
        """Cost of ``device_hours``, and value of the mean gain ``gained`` − cost; None where unknown."""
        if self.price is None or device_hours is None:
            return None, None
        cost = self.price * device_hours
        return cost, None if self.value is None else self.value * POINTS * gained - cost


@dataclass(frozen=True, slots=True)
class Option:
    """One choice, counted from now. Hours and costs are None where the file and the arguments do not determine them."""

    name: str
    compute: float
    """Total compute, on the file's axis."""
    more: float
    """Compute still to be spent."""
    forecast: Forecast
    """Forecast of an evaluation at ``compute``."""
    gain: Estimate | None
    """Gain of the reward, without evaluation noise; None for stopping."""
    mean_gain: float
    """What many runs like this one gain on average, late rises included; 0 for stopping."""
    device_hours: float | None
    wall_hours: float | None
    cost: float | None
    net: float | None
    """Value of the mean gain − cost, as of the best further block."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The options with another number of generators, which changes the speed of the run but not its curve."""

    generators: int
    devices: float
    """Number of all devices."""
    speed: float
    """Compute per hour, as a multiple of the present one."""
    options: tuple[Option, ...]
    """With their hours and costs."""


def options(made: FittedCurve, pace: Pace, prices: Prices, budgets: Sequence[float]) -> list[Option]:
    """The options to stop now, to continue to 2× and 4×, and to spend each budget of device-hours, sorted by compute.

    Empty if the run is BROKEN.

    Raises:
        AnalysisProblem: a budget or a price is given, and the compute per device-hour is unknown.
    """
    if pace.rate is None and (budgets or prices.price is not None):
        given = "`budgets`" if budgets else "`price`"
        raise AnalysisProblem(f"{given}: compute per device-hour is {pace.how}")
    if made.state is State.BROKEN:
        return []
    now = made.fitted.now
    wanted = [("stop now", 0.0), *((f"{k}× compute", (k - 1) * now) for k in MULTIPLES)]
    wanted += [
        (f"+{formatting.significant(budget, 6)} device-hours", budget * (pace.rate or 0.0))
        for budget in budgets
    ]
    wanted.sort(key=lambda choice: choice[1])
    ahead = made.ahead([made.now + more for _, more in wanted], "`budgets`")
    return [
        _option(made, pace, prices, name, more, point)
        for (name, more), point in zip(wanted, ahead, strict=True)
    ]


def _option(made: FittedCurve, pace: Pace, prices: Prices, name: str, more: float, point: Forecast) -> Option:
    # A budget below the floating-point precision of now does not change it.
    moves = made.fitted.now + more > made.fitted.now
    gained = gain(made.fitted, made.fitted.now + more) if moves else None
    mean = expected_gain(made.fitted, made.fitted.now + more) if moves else 0.0
    device_hours = None if pace.rate is None else more / pace.rate
    wall_hours = None if device_hours is None or pace.devices is None else device_hours / pace.devices
    cost, net = prices.worth(mean, device_hours)
    return Option(name, point.compute, more, point, gained, mean, device_hours, wall_hours, cost, net)


def growths(
    pace: Pace,
    prices: Prices,
    choices: Sequence[Option],
    generators: Sequence[int],
    devices_per_generator: float,
    elasticity: float | None,
) -> list[Growth]:
    """Device-hours and time of each option with each number of ``generators``; the first is the present one.

    The speed is proportional to devices^elasticity, so the device-hours of an option are to devices^(1 − elasticity).

    Raises:
        AnalysisProblem: the rate, the number of devices or the elasticity is unknown, or too few generators leave no device.
    """
    if not generators:
        return []
    given = pace.elasticity if elasticity is None else elasticity
    if pace.rate is None:
        raise AnalysisProblem(f"`generators`: compute per device-hour is {pace.how}")
    if pace.devices is None:
        raise AnalysisProblem("`generators`: the present number of devices is unknown; give `devices`")
    if given is None:
        raise AnalysisProblem(
            "`generators`: the elasticity is unknown, because the number of devices of this run has not changed; "
            "give `elasticity`, such as .8"
        )
    made = []
    for count in generators:
        devices = pace.devices + (count - generators[0]) * devices_per_generator
        if devices <= 0:
            raise AnalysisProblem(
                f"`generators`: {count} would leave {formatting.significant(devices)} of the present {formatting.significant(pace.devices)} devices; "
                f"the first number is the present one, with {formatting.significant(devices_per_generator)} devices each"
            )
        speed = (devices / pace.devices) ** given
        changed = []
        for option in choices:
            wall = option.more / (pace.rate * pace.devices * speed)
            cost, net = prices.worth(option.mean_gain, wall * devices)
            hours = {"device_hours": wall * devices, "wall_hours": wall}
            changed.append(replace(option, **hours, cost=cost, net=net))
        made.append(Growth(count, devices, speed, tuple(changed)))
    return made


def paying_block(made: FittedCurve, pace: Pace, prices: Prices, choices: Sequence[Option]) -> Block | None:
    """The block of further compute with the largest net value, up to the largest option; None without price and value."""
    if prices.price is None or prices.value is None or pace.rate is None or not choices:
        return None
    horizon = made.fitted.now + max(option.more for option in choices)
    return best_block(made.fitted, POINTS * prices.value, prices.price / pace.rate, horizon)
