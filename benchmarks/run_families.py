"""Simulated runs of 28 families whose truth is known, for `decisions.py`.

A family is a noiseless curve over u, the share of the planned compute, 0 < u ≤ 2: what comes beyond the plan counts
as a gain still to come. Parameters are drawn per run, and noise is drawn apart from them.

| kind | families | what a policy should do |
|---|---|---|
| smooth | what a fit can see coming | stop it once the rest is small, and never before |
| late | a rise that nothing announces | a stop before the rise is false; counted with all others |
| nothing | gains of 0, .02 or .06 | stop it |
| falls | a collapse, a decline, a rise of truncation | find it; a stop after the fall began is not false |
| wavers | oscillations, drift, spikes around a smooth curve | no alarm unless the reward is below its best |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

Reward = Callable[[np.ndarray], np.ndarray]
Random = np.random.Generator


@dataclass(frozen=True)
class Shape:
    """One run without noise. trend: what gains are counted on. wave: added to it, and no gain.

    falls_at: share of the plan where a fall begins. truncated: share of completions cut off, by u.
    drift: sd of slow noise (AR(1) with ρ .95). zeros: so low that most evaluations pass nothing.
    """

    trend: Reward
    wave: Reward = np.zeros_like
    falls_at: float | None = None
    truncated: Reward | None = None
    drift: float = 0.0
    zeros: bool = False


def sigmoid(u: np.ndarray, mid: float, exponent: float) -> np.ndarray:
    return 1.0 / (1.0 + (mid / u) ** exponent)


def step(u: np.ndarray, at: float, width: float) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh((u - at) / (2.0 * width))


def _scaled(
    share: Reward,
    random: Random,
    gain: tuple[float, float] = (0.15, 0.5),
    start: tuple[float, float] = (0.05, 0.4),
) -> Reward:
    """From R0 by a gain, both drawn, along a share that runs from 0 to 1."""
    r0, rise = random.uniform(*start), random.uniform(*gain)
    return lambda u: r0 + rise * share(u)


def _rising(random: Random, mid: tuple[float, float] = (0.06, 0.4)) -> Reward:
    return _scaled(_sigmoid(random, *mid), random)


def _smooth(share: Callable[[Random], Reward], **more: tuple[float, float]) -> Callable[[Random], Shape]:
    return lambda random: Shape(_scaled(share(random), random, **more))


def _stretched(random: Random) -> Reward:
    scale, power = random.uniform(0.06, 0.3), random.uniform(0.5, 0.9)
    return lambda u: 1 - np.exp(-((u / scale) ** power))


def _power_law(random: Random) -> Reward:
    start, power = random.uniform(0.01, 0.1), random.uniform(0.4, 1.0)
    return lambda u: 1 - (1 + u / start) ** -power


def _log_linear(random: Random) -> Reward:
    start = random.uniform(0.02, 0.1)
    return lambda u: np.log1p(u / start) / np.log1p(2 / start)


def _gompertz(random: Random) -> Reward:
    scale, shift = random.uniform(0.06, 0.2), random.uniform(2.0, 5.0)
    return lambda u: np.exp(-shift * np.exp(-u / scale))


def _exponential(random: Random) -> Reward:
    scale = random.uniform(0.06, 0.3)
    return lambda u: 1 - np.exp(-u / scale)


def _sigmoid(random: Random, low: float = 0.06, high: float = 0.3) -> Reward:
    mid, exponent = random.uniform(low, high), random.uniform(1.2, 2.4)
    return lambda u: sigmoid(u, mid, exponent)


def _slow_start(random: Random) -> Reward:
    mid, steep = random.uniform(0.25, 0.6), random.uniform(3.0, 5.0)
    return lambda u: sigmoid(u, mid, steep)


def _double(random: Random) -> Reward:
    first, second = random.uniform(0.05, 0.1), random.uniform(0.3, 0.5)
    return lambda u: 0.6 * sigmoid(u, first, 2) + 0.4 * sigmoid(u, second, 5)


def _step(random: Random) -> Reward:
    at = random.uniform(0.3, 0.8)
    return lambda u: step(u, at, 0.01)


def _staircase(random: Random) -> Reward:
    stairs = random.uniform(0.05, 0.9, 4)
    return lambda u: np.mean([step(u, at, 0.01) for at in stairs], axis=0)


def _second_rise(random: Random) -> Shape:
    base, more, late = _rising(random, (0.04, 0.15)), random.uniform(0.05, 0.15), random.uniform(0.5, 0.95)
    return Shape(lambda u: base(u) + more * step(u, late, 0.04))


def _plateau(random: Random) -> Shape:
    base, more, late = _rising(random, (0.02, 0.06)), random.uniform(0.1, 0.3), random.uniform(0.3, 0.6)
    return Shape(lambda u: base(u) + more * np.clip((u - late) / 0.4, 0, 1))


def _oscillating(random: Random) -> Shape:
    size, period = random.uniform(0.008, 0.025), random.uniform(0.1, 0.25)
    return Shape(_rising(random), lambda u: size * np.sin(2 * np.pi * u / period))


def _sawtooth(random: Random) -> Shape:
    size, period = random.uniform(0.02, 0.04), random.uniform(0.12, 0.2)
    return Shape(_rising(random), lambda u: size * (u / period % 1.0 - 0.5))


def _spike(random: Random) -> Shape:
    deep, at = random.uniform(0.1, 0.3), round(random.uniform(0.3, 0.8) * 40) / 40
    return Shape(_rising(random), lambda u: -deep * (np.abs(u - at) < 0.02))


def _collapse(fastest: float, slowest: float) -> Callable[[Random], Shape]:
    """A third to all of the gain is lost, within so much of the plan."""

    def drawn(random: Random) -> Shape:
        base, at = _rising(random), random.uniform(0.3, 0.8)
        share, takes = random.uniform(1 / 3, 1), random.uniform(fastest, slowest)
        return Shape(_falling(base, lambda u: share * np.clip((u - at) / takes, 0, 1)), falls_at=at)

    return drawn


def _recovering(random: Random) -> Shape:
    base, at, lasts = _rising(random), random.uniform(0.3, 0.55), random.uniform(0.15, 0.3)
    share, start = random.uniform(1 / 3, 1), base(np.array([1e-9]))

    def dent(u: np.ndarray) -> np.ndarray:
        return np.clip((u - at) / 0.05, 0, 1) - np.clip((u - at - lasts) / 0.1, 0, 1)

    return Shape(base, lambda u: -share * (base(u) - start) * dent(u), at)


def _hump(random: Random) -> Shape:
    base, at, decline = _rising(random), random.uniform(0.25, 0.5), random.uniform(0.5, 0.9)
    return Shape(_falling(base, lambda u: decline * (u - at)), falls_at=at)


def _truncated(random: Random) -> Shape:
    base, at, share = _rising(random), random.uniform(0.3, 0.8), random.uniform(1 / 3, 1)
    falling = _falling(base, lambda u: share * np.clip((u - at - 0.05) / 0.3, 0, 1))
    return Shape(falling, falls_at=at, truncated=lambda u: np.clip(0.03 + (u - at) * 1.2, 0.02, 0.6))


def _falling(base: Reward, lost: Reward) -> Reward:
    """lost: share of the gain so far."""
    start = base(np.array([1e-9]))
    return lambda u: base(u) - np.clip(lost(u), 0, 1) * (base(u) - start)


FAMILIES: dict[str, tuple[str, Callable[[Random], Shape]]] = {
    "sigmoid": ("smooth", _smooth(_sigmoid)),
    "early sigmoid": ("smooth", _smooth(partial(_sigmoid, low=0.02, high=0.05))),
    "stretched exponential": ("smooth", _smooth(_stretched)),
    "power law": ("smooth", _smooth(_power_law)),
    "log-linear": ("smooth", _smooth(_log_linear)),
    "linear": ("smooth", _smooth(lambda _: lambda u: u / 2)),
    "Gompertz": ("smooth", _smooth(_gompertz)),
    "exponential": ("smooth", _smooth(_exponential)),
    "high start": ("smooth", _smooth(_sigmoid, gain=(0.05, 0.1), start=(0.8, 0.88))),
    "slow start": ("smooth", _smooth(_slow_start, start=(0.001, 0.3))),
    "double sigmoid": ("late", _smooth(_double)),
    "second rise": ("late", _second_rise),
    "step": ("late", _smooth(_step, gain=(0.1, 0.4))),
    "staircase": ("late", _smooth(_staircase)),
    "plateau then rise": ("late", _plateau),
    "learns nothing": ("nothing", _smooth(lambda _: np.zeros_like)),
    "passes nothing": ("nothing", lambda _: Shape(lambda u: 0.0003 + 0 * u, zeros=True)),
    "learns .02": ("nothing", _smooth(_sigmoid, gain=(0.015, 0.02))),
    "learns .06": ("nothing", _smooth(_sigmoid, gain=(0.04, 0.06))),
    "oscillating": ("wavers", _oscillating),
    "sawtooth": ("wavers", _sawtooth),
    "drift": ("wavers", lambda random: Shape(_rising(random), drift=random.uniform(0.005, 0.012))),
    "spike": ("wavers", _spike),
    "collapse fast": ("falls", _collapse(0.025, 0.08)),
    "collapse slow": ("falls", _collapse(0.2, 0.35)),
    "collapse and recovery": ("falls", _recovering),
    "hump": ("falls", _hump),
    "truncation": ("falls", _truncated),
}
"""Kind and how a run is drawn, by name."""
