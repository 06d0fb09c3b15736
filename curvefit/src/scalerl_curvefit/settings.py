"""What a fit assumes beyond the points, in one place, each value with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .errors import SettingsError
from .families import Family


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Priors and choices of a fit. The defaults are those for real runs.

    burn_in_fraction: share of the first points left out (the sigmoid holds after the first epoch;
        ScaleRL starts its window at ~1.5k GPU-h of 100k [P]), while `burn_in_keeps` points remain.
    r0_sd: prior sd of R0 around the first reward; weak, since R0 is where the fitted window points
        to and not the step-0 evaluation.
    b_median, ln_b_sd: log-normal prior of B; the published values run from 1.09 to 2.44 [P].
    cmid_below, cmid_above: ln Cmid is uniform from C_first/cmid_below to cmid_above·C_now.
    a_highest: A is uniform on [0, a_highest].
    rho: AR(1) coefficients of the noise, equally probable beforehand.
    noise_floor: smallest credible sd of an evaluation; noise_dof: weight of the binomial sd as a
        guess of the noise, in pseudo-points.
    discrepancy: sd that the forecast gains with each doubling of compute beyond now, since no run
        follows the equation exactly.
    families: shapes that forecasts average over, by their evidence. A, B, Cmid are the sigmoid's.
    """

    burn_in_fraction: float = 0.2
    burn_in_keeps: int = 10
    r0_sd: float = 0.3
    b_median: float = 1.85
    ln_b_sd: float = 0.5
    cmid_below: float = 4.0
    cmid_above: float = 8.0
    a_highest: float = 1.0
    rho: tuple[float, ...] = (0.0, 0.3, 0.6, 0.85)
    noise_floor: float = 0.004
    noise_dof: float = 4.0
    discrepancy: float = 0.015
    families: tuple[Family, ...] = (Family.SIGMOID,)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingsError(f"{item.name} is {value}; it must be finite")
        for name in ("r0_sd", "b_median", "ln_b_sd", "noise_floor", "noise_dof"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} is {getattr(self, name):g}; it must be positive")
        for name in ("cmid_below", "cmid_above"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name):g}; it is a factor of at least 1")
        if not 0 <= self.burn_in_fraction < 1:
            raise SettingsError(f"burn_in_fraction is {self.burn_in_fraction:g}; it must be in [0, 1)")
        if not 0 < self.a_highest <= 1:
            raise SettingsError(f"a_highest is {self.a_highest:g}; it must be in (0, 1]")
        if not self.rho or any(not 0 <= r < 1 for r in self.rho):
            raise SettingsError(f"rho is {self.rho}; give at least one coefficient in [0, 1)")
        if self.discrepancy < 0:
            raise SettingsError(f"discrepancy is {self.discrepancy:g}; it must not be negative")
        if not self.families or len(set(self.families)) != len(self.families):
            raise SettingsError(f"families is {self.families}; give at least one, each once")
