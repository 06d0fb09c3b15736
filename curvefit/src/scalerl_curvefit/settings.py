"""Priors and constants of a fit, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from .errors import SettingsError
from .families import Family


class LateRises(StrEnum):
    """Where the prior of late rises was counted (`plateau`, `benchmarks/late_rises.py`)."""

    LANGUAGE_MODELS = "language_models"
    GAMES = "games"


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Priors and constants of a fit. Their names and values are part of the seed of all draws (`fitting.content_seed`).

    Attributes:
        burn_in_fraction: share of the points, from the first, that have less weight: the equation holds after the first epoch
            (ScaleRL fits from ~1.5k GPU-h of 100k on [P]).
        burn_in_keeps: smallest number of points with full weight.
        burn_in_sd_factor: factor of the noise sd of the points with less weight.
        r0_sd: prior sd of R0 around the first reward; wide, since R0 extrapolates the fitted points to C → 0 and is not
            the evaluation at step 0.
        b_median, ln_b_sd: log-normal prior of B; the published values are 1.09 to 2.44 [P].
        cmid_below, cmid_above: ln Cmid is uniform from C_first/cmid_below to cmid_above·C_now.
        a_lowest, a_highest: bounds of the uniform prior of A.
        rho, rho_weights: AR(1) coefficients of the noise and their prior weights. Little weight on 0: short series
            underestimate their correlation, and a correlation of 0 makes intervals too narrow.
        noise_share: prior noise sd of an evaluation as a share of the binomial sd, where samples are known: evaluations on
            the same prompts are paired, and scatter by .4 to 1.0 of it in four sources.
        noise_floor: smallest noise sd of an evaluation, added in quadrature.
        noise_guess: prior noise sd where samples are not known.
        noise_dof, guess_dof: weights of the two noise priors in pseudo-points.
        families: curve families in the forecast pool. A, B, Cmid are those of the first.
        pool: weights of each family, in order, and of the local trend in the forecast pool.
        trend_window: doublings of compute over which the weight of a point for the present level falls by e.
        trend_damping: the trend's gain over the next doubling, as a share of its gain over the last one.
        pool_spread: factor of the experts' distances from their common mean: 1 leaves them in place, 0 moves all to the mean.
        departure, departure_headroom: scale of the departure (model discrepancy) per doubling of compute beyond now: what the
            experts' sd lacks to a floor, and a share of the distance from the present level to 1, in quadrature.
            Language models creep by .01 to .03 a doubling after a flat one, which is the floor.
        departure_dof: degrees of freedom of the departure, Student's t, above 2; infinite for a normal one. How far runs depart
            differs by source, and that of a new source is not known: a normal one whose variance is not known is a Student's t.
        misfit: factor of the curve's misfit to its own points (`predictive_check`) in the departure's scale.
        late_rise: probability of a far late rise per doubling of compute, counted in `plateau`: of language models. Its size is
            uniform between 0 and the distance from the present level to 1.
        rises: where it was counted.
    """

    burn_in_fraction: float = 0.2
    burn_in_keeps: int = 6
    burn_in_sd_factor: float = 3.0
    r0_sd: float = 0.3
    b_median: float = 1.85
    ln_b_sd: float = 0.5
    cmid_below: float = 4.0
    cmid_above: float = 8.0
    a_lowest: float = 0.0
    a_highest: float = 1.0
    rho: tuple[float, ...] = (0.0, 0.3, 0.6, 0.85)
    rho_weights: tuple[float, ...] = (0.15, 0.35, 0.35, 0.15)
    noise_share: float = 0.55
    noise_floor: float = 0.004
    noise_guess: float = 0.007
    noise_dof: float = 4.0
    guess_dof: float = 1.0
    families: tuple[Family, ...] = (Family.SIGMOID, Family.POWER_LAW)
    pool: tuple[float, ...] = (0.45, 0.25, 0.3)
    trend_window: float = 0.2
    trend_damping: float = 0.25
    pool_spread: float = 0.5
    departure: float = 0.014
    departure_headroom: float = 0.02
    departure_dof: float = 4.0
    misfit: float = 1.5
    late_rise: float = 0.016
    rises: LateRises = LateRises.LANGUAGE_MODELS

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value) and item.name != "departure_dof":
                raise SettingsError(f"{item.name} is {value}; it must be finite")
        for name in (
            "r0_sd",
            "b_median",
            "ln_b_sd",
            "noise_floor",
            "noise_guess",
            "noise_dof",
            "guess_dof",
            "noise_share",
            "burn_in_sd_factor",
            "trend_window",
        ):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} is {getattr(self, name):g}; it must be positive")
        for name in ("pool_spread", "late_rise"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingsError(f"{name} is {getattr(self, name):g}; it must be in [0, 1]")
        for name in ("departure", "departure_headroom", "misfit", "trend_damping"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} is {getattr(self, name):g}; it must not be negative")
        if not self.departure_dof > 2:
            raise SettingsError(f"departure_dof is {self.departure_dof:g}; it must be above 2")
        for name in ("cmid_below", "cmid_above"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name):g}; it is a factor of at least 1")
        if not 0 <= self.burn_in_fraction < 1:
            raise SettingsError(f"burn_in_fraction is {self.burn_in_fraction:g}; it must be in [0, 1)")
        if not 0 <= self.a_lowest < self.a_highest <= 1:
            raise SettingsError(
                f"a_lowest is {self.a_lowest:g} and a_highest {self.a_highest:g}; "
                "they must be in order and in [0, 1]"
            )
        if any(not 0 <= r < 1 for r in self.rho):
            raise SettingsError(f"rho is {self.rho}; coefficients must be in [0, 1)")
        if (
            not self.rho
            or len(self.rho_weights) != len(self.rho)
            or any(not 0 < w < math.inf for w in self.rho_weights)
        ):
            raise SettingsError(
                f"rho_weights is {self.rho_weights} for rho {self.rho}; give one positive weight each"
            )
        if not self.families or len(set(self.families)) != len(self.families):
            raise SettingsError(f"families is {self.families}; give at least one, each once")
        if (
            len(self.pool) != len(self.families) + 1
            or any(not 0 <= w < math.inf for w in self.pool)
            or self.pool[0] <= 0
        ):
            raise SettingsError(
                f"pool is {self.pool} for families {self.families}; give one weight each and one of the trend, "
                "the first positive"
            )


DEFAULTS: Final = FitSettings()
GAMES: Final = FitSettings(late_rise=0.062, rises=LateRises.GAMES)
BY_RISES: Final = {settings.rises: settings for settings in (DEFAULTS, GAMES)}
