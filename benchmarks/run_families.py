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
    share: Reward, random: Random, gain: tuple[float, float] = (0.15, 0.5), start: float = 0.0
) -> Reward:
    """From R0 by a gain, both drawn, along a share that runs from 0 to 1."""
    r0, rise = start or random.uniform(0.05, 0.4), random.uniform(*gain)
    return lambda u: r0 + rise * share(u)


def _rising(random: Random, mid: tuple[float, float] = (0.06, 0.4)) -> Reward:
    m, b = random.uniform(*mid), random.uniform(1.2, 2.4)
    return _scaled(lambda u: sigmoid(u, m, b), random)


def _family(name: str, random: Random) -> Shape:
    uniform = random.uniform
    at, m, b = uniform(0.3, 0.8), uniform(0.06, 0.3), uniform(1.2, 2.4)
    more = uniform(0.05, 0.15)
    if name == "sigmoid":
        return Shape(_rising(random))
    if name == "early sigmoid":
        return Shape(_rising(random, (0.02, 0.05)))
    if name == "stretched exponential":
        power = uniform(0.5, 0.9)
        return Shape(_scaled(lambda u: 1 - np.exp(-((u / m) ** power)), random))
    if name == "power law":
        u0, power = uniform(0.01, 0.1), uniform(0.4, 1.0)
        return Shape(_scaled(lambda u: 1 - (1 + u / u0) ** -power, random))
    if name == "log-linear":
        u0 = uniform(0.02, 0.1)
        return Shape(_scaled(lambda u: np.log1p(u / u0) / np.log1p(2 / u0), random))
    if name == "linear":
        return Shape(_scaled(lambda u: u / 2, random))
    if name == "Gompertz":
        scale, shift = uniform(0.06, 0.2), uniform(2.0, 5.0)
        return Shape(_scaled(lambda u: np.exp(-shift * np.exp(-u / scale)), random))
    if name == "exponential":
        return Shape(_scaled(lambda u: 1 - np.exp(-u / m), random))
    if name == "high start":
        return Shape(_scaled(lambda u: sigmoid(u, m, b), random, (0.05, 0.1), uniform(0.8, 0.88)))
    if name == "slow start":
        mid, steep = uniform(0.25, 0.6), uniform(3.0, 5.0)
        return Shape(_scaled(lambda u: sigmoid(u, mid, steep), random, start=uniform(0.001, 0.3)))
    if name == "double sigmoid":
        first, second = uniform(0.05, 0.1), uniform(0.3, 0.5)
        return Shape(_scaled(lambda u: 0.6 * sigmoid(u, first, 2) + 0.4 * sigmoid(u, second, 5), random))
    if name == "second rise":
        base, late = _rising(random, (0.04, 0.15)), uniform(0.5, 0.95)
        return Shape(lambda u: base(u) + more * step(u, late, 0.04))
    if name == "step":
        return Shape(_scaled(lambda u: step(u, at, 0.01), random, (0.1, 0.4)))
    if name == "staircase":
        stairs = np.sort(uniform(0.05, 0.9, 4))
        return Shape(_scaled(lambda u: sum(step(u, s, 0.01) for s in stairs) / 4, random))
    if name == "plateau then rise":
        base, late = _rising(random, (0.02, 0.06)), uniform(0.3, 0.6)
        return Shape(lambda u: base(u) + 2 * more * np.clip((u - late) / 0.4, 0, 1))
    if name == "learns nothing":
        return Shape(_scaled(np.zeros_like, random))
    if name == "passes nothing":
        return Shape(lambda u: 0.0003 + 0 * u, zeros=True)
    if name == "learns .02":
        return Shape(_scaled(lambda u: sigmoid(u, m, b), random, (0.015, 0.02)))
    if name == "learns .06":
        return Shape(_scaled(lambda u: sigmoid(u, m, b), random, (0.04, 0.06)))
    if name == "oscillating":
        size, period = uniform(0.008, 0.025), uniform(0.1, 0.25)
        return Shape(_rising(random), lambda u: size * np.sin(2 * np.pi * u / period))
    if name == "sawtooth":
        size, period = uniform(0.02, 0.04), uniform(0.12, 0.2)
        return Shape(_rising(random), lambda u: size * (u / period % 1.0 - 0.5))
    if name == "drift":
        return Shape(_rising(random), drift=uniform(0.005, 0.012))
    if name == "spike":
        deep, where = uniform(0.1, 0.3), round(at * 40) / 40
        return Shape(_rising(random), lambda u: -deep * (np.abs(u - where) < 0.02))
    base = _rising(random)
    share = uniform(1 / 3, 1)
    if name == "collapse fast":
        lost: Reward = lambda u: np.clip((u - at) / uniform_fast, 0, 1)  # noqa: E731
        uniform_fast = uniform(0.025, 0.08)
    elif name == "collapse slow":
        slow = uniform(0.2, 0.35)
        lost = lambda u: np.clip((u - at) / slow, 0, 1)  # noqa: E731
    elif name == "collapse and recovery":
        back, where = uniform(0.15, 0.3), uniform(0.3, 0.55)
        return Shape(
            base, lambda u: -share * (base(u) - base(u[:1] * 0 + 1e-9)) * _dent(u, where, back), where
        )
    elif name == "hump":
        decline, at = uniform(0.5, 0.9), uniform(0.25, 0.5)
        lost = lambda u: decline * np.clip(u - at, 0, None)  # noqa: E731
        share = 1.0
    else:
        assert name == "truncation"
        cut: Reward = lambda u: np.clip(0.03 + (u - at) * 1.2, 0.02, 0.6)  # noqa: E731
        return Shape(
            _falling(base, lambda u: np.clip((u - at - 0.05) / 0.3, 0, 1) * share), falls_at=at, truncated=cut
        )
    return Shape(_falling(base, lambda u: share * lost(u)), falls_at=at)


def _falling(base: Reward, lost: Reward) -> Reward:
    start = base(np.array([1e-9]))
    return lambda u: base(u) - np.clip(lost(u), 0, 1) * (base(u) - start)


def _dent(u: np.ndarray, at: float, back: float) -> np.ndarray:
    return np.clip((u - at) / 0.05, 0, 1) - np.clip((u - at - back) / 0.1, 0, 1)


FAMILIES = {
    "sigmoid": "smooth",
    "early sigmoid": "smooth",
    "stretched exponential": "smooth",
    "power law": "smooth",
    "log-linear": "smooth",
    "linear": "smooth",
    "Gompertz": "smooth",
    "exponential": "smooth",
    "high start": "smooth",
    "slow start": "smooth",
    "double sigmoid": "late",
    "second rise": "late",
    "step": "late",
    "staircase": "late",
    "plateau then rise": "late",
    "learns nothing": "nothing",
    "passes nothing": "nothing",
    "learns .02": "nothing",
    "learns .06": "nothing",
    "oscillating": "wavers",
    "sawtooth": "wavers",
    "drift": "wavers",
    "spike": "wavers",
    "collapse fast": "falls",
    "collapse slow": "falls",
    "collapse and recovery": "falls",
    "hump": "falls",
    "truncation": "falls",
}
"""Kind by name."""


def family(name: str, random: Random) -> Shape:
    """A run of a family, its parameters drawn."""
    return _family(name, random)
