"""What a fit assumes beyond the points, in one place, each value with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from .errors import SettingsError
from .families import Family


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Priors and choices of a fit. The defaults are those for real runs.

    burn_in_fraction: share of the first points that count less, while `burn_in_keeps` others remain:
        the sigmoid holds after the first epoch (ScaleRL starts its window at ~1.5k GPU-h of 100k [P]).
        burn_in_sd_factor: their noise sd counts as this many times that of the others. Leaving them
        out altogether costs more where the equation holds than it gains where it does not.
    r0_sd: prior sd of R0 around the first reward; weak, since R0 is where the fitted window points
        to and not the step-0 evaluation.
    b_median, ln_b_sd: log-normal prior of B; the published values run from 1.09 to 2.44 [P].
    cmid_below, cmid_above: ln Cmid is uniform from C_first/cmid_below to cmid_above·C_now.
    a_lowest, a_highest: A is uniform between them.
    rho, rho_weights: AR(1) coefficients of the noise and their prior weights. Little weight on 0:
        short series understate their correlation, and taking it for 0 makes intervals too narrow.
    noise_floor: smallest credible sd of an evaluation, added in quadrature to the binomial sd where
        samples are known. noise_guess: the sd where they are not. noise_dof, guess_dof: weight of
        either in pseudo-points.
    discrepancy, discrepancy_weights: sd τ that a forecast gains with each doubling of compute beyond
        now, since no run follows the equation exactly, and prior weights; see `hindcast`.
    doubtful_factor: τ counts so many times while the asymptote is not identifiable: then the forecast
        rests on the assumed shape more than on the points.
    doubtful_trust: and so much of what past forecasts say of τ is believed then, the rest stays with the
        prior: what a curve has not shown yet can break as its beginning did not.
    flat_gain, flat_share: once it is, what has stopped moving departs less: τ counts in full where the
        curve gained at least flat_gain over its last doubling, in proportion below, never less than
        flat_share.
    look_back: past moments, as C_now divided by these, whose forecasts are checked to learn τ; none
        leaves τ at its prior.
    families: shapes that forecasts average over, by their evidence. A, B, Cmid are the sigmoid's.
    """

    burn_in_fraction: float = 0.2
    burn_in_keeps: int = 10
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
    noise_floor: float = 0.004
    noise_guess: float = 0.01
    noise_dof: float = 4.0
    guess_dof: float = 1.0
    discrepancy: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
    discrepancy_weights: tuple[float, ...] = (0.15, 0.25, 0.25, 0.15, 0.12, 0.08)
    doubtful_factor: float = 2.5
    doubtful_trust: float = 0.5
    flat_gain: float = 0.04
    flat_share: float = 0.25
    look_back: tuple[float, ...] = (2.0, 4.0)
    families: tuple[Family, ...] = (Family.SIGMOID,)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingsError(f"{item.name} is {value}; it must be finite")
        for name in (
            "r0_sd",
            "b_median",
            "ln_b_sd",
            "noise_floor",
            "noise_guess",
            "noise_dof",
            "guess_dof",
            "burn_in_sd_factor",
            "doubtful_factor",
        ):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} is {getattr(self, name):g}; it must be positive")
        if self.flat_gain < 0 or not 0 < self.flat_share <= 1:
            raise SettingsError(
                f"flat_gain is {self.flat_gain:g} and flat_share {self.flat_share:g}; "
                "the gain must not be negative and the share in (0, 1]"
            )
        if not 0 <= self.doubtful_trust <= 1:
            raise SettingsError(f"doubtful_trust is {self.doubtful_trust:g}; it is a share in [0, 1]")
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
        if any(not 0 <= tau < math.inf for tau in self.discrepancy):
            raise SettingsError(f"discrepancy is {self.discrepancy}; values must not be negative")
        for name in ("rho", "discrepancy"):
            values, weights = getattr(self, name), getattr(self, f"{name}_weights")
            if not values or len(weights) != len(values) or any(not 0 < w < math.inf for w in weights):
                raise SettingsError(
                    f"{name}_weights is {weights} for {name} {values}; give one positive weight each"
                )
        if any(not 1.5 <= back < math.inf for back in self.look_back):
            raise SettingsError(f"look_back is {self.look_back}; give factors of at least 1.5")
        if not self.families or len(set(self.families)) != len(self.families):
            raise SettingsError(f"families is {self.families}; give at least one, each once")


DEFAULTS: Final = FitSettings()
"""Checked once."""
