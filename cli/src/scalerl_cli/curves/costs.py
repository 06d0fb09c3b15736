"""What each choice costs and gives: the rows of ``scalerl plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scalerl_cli.curves import formatting
from scalerl_cli.curves.analysis import Analysis, State
from scalerl_cli.curves.pace import Pace
from scalerl_cli.curves.problem import CurveProblem
from scalerl_curvefit import Block, Estimate, Forecast, best_block, gain

MULTIPLES: Final = (2, 4)
POINTS: Final = 100.0
"""Points of reward from 0 to 1: a value per point is a hundredth of the value of a pass rate of 1."""


@dataclass(frozen=True, slots=True)
class Prices:
    """price: of a device-hour. value: of a point (.01) of reward. None if not given."""

    price: float | None
    value: float | None

    def worth(self, gained: Estimate | None, device_hours: float | None) -> tuple[float | None, float | None]:
        """Cost of so many device-hours, and value of the median gain − cost; None where not known."""
        if self.price is None or device_hours is None:
            return None, None
        cost = self.price * device_hours
        points = 0.0 if gained is None else gained.median * POINTS
        return cost, None if self.value is None else self.value * points - cost


@dataclass(frozen=True, slots=True)
class Option:
    """One choice, counted from now.

    compute: in total, on the file's axis. more: of it still to be spent. forecast: of an evaluation
    there. gain: of the reward itself, None for stopping. device_hours, wall_hours, cost, net (value of
    the expected gain − cost): None where the file and the arguments do not say.
    """

    name: str
    compute: float
    more: float
    forecast: Forecast
    gain: Estimate | None
    device_hours: float | None
    wall_hours: float | None
    cost: float | None
    net: float | None


@dataclass(frozen=True, slots=True)
class Growth:
    """So many generators: growing changes how fast compute is spent, not the curve.

    speed: compute per hour against now. spent: (device_hours, wall_hours) of each option. worth: its
    (cost, value − cost), None where not known.
    """

    generators: int
    devices: float
    speed: float
    spent: tuple[tuple[float, float], ...]
    worth: tuple[tuple[float | None, float | None], ...]


def options(made: Analysis, pace: Pace, prices: Prices, budgets: Sequence[float]) -> list[Option]:
    """Stop now, 2×, 4× and each budget of further device-hours, by compute; none if the run is broken.

    Raises:
        CurveProblem: for a budget or a price without a known rate.
    """
    if pace.rate is None and (budgets or prices.price is not None):
        given = "--budget" if budgets else "--price"
        raise CurveProblem(f"{given}: compute per device-hour is {pace.how}")
    if made.state is State.BROKEN:
        return []
    now = made.fitted.now
    wanted = [("stop now", 0.0), *((f"{k}× compute", (k - 1) * now) for k in MULTIPLES)]
    wanted += [
        (f"+{formatting.significant(budget, 6)} device-hours", budget * (pace.rate or 0.0))
        for budget in budgets
    ]
    wanted.sort(key=lambda choice: choice[1])
    ahead = made.ahead([made.now + more for _, more in wanted], "--budget")
    return [
        _option(made, pace, prices, name, more, point)
        for (name, more), point in zip(wanted, ahead, strict=True)
    ]


def _option(made: Analysis, pace: Pace, prices: Prices, name: str, more: float, point: Forecast) -> Option:
    # A budget of less than a float's last digit of now moves nothing.
    moves = made.fitted.now + more > made.fitted.now
    gained = gain(made.fitted, made.fitted.now + more) if moves else None
    device_hours = None if pace.rate is None else more / pace.rate
    wall_hours = None if device_hours is None or pace.devices is None else device_hours / pace.devices
    cost, net = prices.worth(gained, device_hours)
    return Option(name, point.compute, more, point, gained, device_hours, wall_hours, cost, net)


def growths(
    pace: Pace,
    prices: Prices,
    choices: Sequence[Option],
    generators: Sequence[int],
    devices_per_generator: float,
    elasticity: float | None,
) -> list[Growth]:
    """Device-hours and time of each option with so many generators; the first is what the run has now.

    Speed goes with devices to the power of the elasticity, so that device-hours go with their power of
    1 − elasticity.

    Raises:
        CurveProblem: for what has to be known and is not.
    """
    if not generators:
        return []
    given = pace.elasticity if elasticity is None else elasticity
    if pace.rate is None:
        raise CurveProblem(f"--generators: compute per device-hour is {pace.how}")
    if pace.devices is None:
        raise CurveProblem("--generators: how many devices work now is not known; give --devices")
    if given is None:
        raise CurveProblem(
            "--generators: how speed goes with devices was never measured in this run (their number has not changed); "
            "give --elasticity, such as .8"
        )
    made = []
    for count in generators:
        devices = pace.devices + (count - generators[0]) * devices_per_generator
        if devices <= 0:
            raise CurveProblem(
                f"--generators: {count} of them leave {formatting.significant(devices)} devices of the {formatting.significant(pace.devices)} that work now; "
                f"the first number is what the run has now, with {formatting.significant(devices_per_generator)} devices each"
            )
        speed = (devices / pace.devices) ** given
        wall = [option.more / (pace.rate * pace.devices * speed) for option in choices]
        worth = [
            prices.worth(option.gain, hours * devices) for option, hours in zip(choices, wall, strict=True)
        ]
        spent = tuple((hours * devices, hours) for hours in wall)
        made.append(Growth(count, devices, speed, spent, tuple(worth)))
    return made


def paying_block(made: Analysis, pace: Pace, prices: Prices, choices: Sequence[Option]) -> Block | None:
    """The block of further compute that pays best, up to the largest option; None without price and value."""
    if prices.price is None or prices.value is None or pace.rate is None or not choices:
        return None
    horizon = made.fitted.now + max(option.more for option in choices)
    return best_block(made.fitted, POINTS * prices.value, prices.price / pace.rate, horizon)
