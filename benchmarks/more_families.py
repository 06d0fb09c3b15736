"""40 more families of simulated runs for `decisions.py --families tried` and `kept`: 20 each, alternating within each kind.

Thresholds are to be chosen with the tried ones only; no run of the kept ones was made when they were written. Noise, numbers of
evaluations and kinds are those of `other_families.py`; shapes and parameters are not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from other_families import LU, F, Shape, U, level, logistic, sig
from scipy.special import erf

Random = np.random.Generator
Draw = Callable[[Random], Shape]


def _smooth(draw: Callable[[Random], F], low: float = 0.04, high: float = 0.5) -> Draw:
    """A gain along a share that starts at 0, from a start with room for it."""

    def drawn(r: Random) -> Shape:
        gain = LU(r, low, high)
        start, share = level(r, gain), draw(r)
        return Shape(lambda u: start + gain * share(u))

    return drawn


def _hyperbola(r: Random) -> F:
    k = LU(r, 0.03, 0.5)
    return lambda u: u / (u + k)


def _arctan(r: Random) -> F:
    k = LU(r, 0.05, 0.4)
    return lambda u: np.arctan(u / k) / (np.pi / 2)


def _root(r: Random) -> F:
    power = U(r, 0.3, 0.7)
    return lambda u: (u / 2) ** power


def _error_function(r: Random) -> F:
    k = LU(r, 0.1, 0.8)
    return lambda u: erf(u / k)


def _richards(r: Random) -> F:
    mid, width, skew = U(r, 0.1, 0.5), U(r, 0.04, 0.12), LU(r, 0.3, 3)
    return lambda u: (1 + np.exp(-(u - mid) / width)) ** -skew


def _three_exponentials(r: Random) -> F:
    scales, part = np.exp(r.uniform(np.log(0.02), np.log(1), 3)), r.dirichlet(np.ones(3))
    return lambda u: sum(p * (1 - np.exp(-u / t)) for p, t in zip(part, scales, strict=True))


def _accelerating(r: Random) -> F:
    end, power = U(r, 0.5, 1.6), U(r, 1.3, 2.2)
    return lambda u: np.minimum(u / end, 1.0) ** power


def _format_then_skill(r: Random) -> F:
    early, part = LU(r, 0.01, 0.06), U(r, 0.2, 0.6)
    mid, exponent = U(r, 0.2, 0.6), U(r, 1.5, 3)
    return lambda u: part * (1 - np.exp(-u / early)) + (1 - part) * sig(u, mid, exponent)


def _ramp_and_hold(r: Random) -> F:
    end = U(r, 0.2, 0.7)
    return lambda u: np.minimum(u / end, 1.0)


def _cosine(r: Random) -> F:
    end = U(r, 0.5, 1.2)
    return lambda u: 0.5 - 0.5 * np.cos(np.pi * np.minimum(u / end, 1.0))


def _slow_logarithm(r: Random) -> F:
    k = LU(r, 0.005, 0.05)
    return lambda u: np.log1p(u / k) / np.log1p(2 / k)


def _loss_power(r: Random) -> F:
    k, power = LU(r, 0.02, 0.3), U(r, 0.3, 1.5)
    return lambda u: 1 - (1 + u / k) ** -power


def _weibull(r: Random) -> F:
    k, power = LU(r, 0.1, 0.5), U(r, 1.1, 2)
    return lambda u: 1 - np.exp(-((u / k) ** power))


def _near_one(r: Random) -> Shape:
    gap, k = U(r, 0.05, 0.3), LU(r, 0.05, 0.4)
    return Shape(lambda u: 1 - gap * np.exp(-u / k) - 0.01)


def _from_zero(r: Random) -> Shape:
    gain, mid, exponent = U(r, 0.1, 0.6), U(r, 0.1, 0.4), U(r, 1.5, 3)
    return Shape(lambda u: 0.002 + gain * sig(u, mid, exponent))


def _base(r: Random) -> F:
    gain = U(r, 0.1, 0.45)
    start, k = level(r, gain, 0.08), LU(r, 0.04, 0.25)
    return lambda u: start + gain * (1 - np.exp(-u / k))


def _late(draw: Callable[[Random], F], low: float = 0.05, high: float = 0.25) -> Draw:
    """A run that levels off and then gains more."""

    def drawn(r: Random) -> Shape:
        base, more, share = _base(r), U(r, low, high), draw(r)
        return Shape(lambda u: np.minimum(base(u) + more * share(u), 0.99))

    return drawn


def _jump(r: Random) -> F:
    at = U(r, 0.4, 0.9)
    return lambda u: logistic(u, at, 0.01)


def _second_wind(r: Random) -> F:
    at = U(r, 0.35, 0.8)
    return lambda u: 1 - np.exp(-np.maximum(u - at, 0) / 0.2)


def _two_jumps(r: Random) -> F:
    first, second = U(r, 0.3, 0.5), U(r, 0.6, 1.1)
    return lambda u: 0.5 * logistic(u, first, 0.015) + 0.5 * logistic(u, second, 0.015)


def _creep(r: Random) -> F:
    at = U(r, 0.3, 0.6)
    return lambda u: np.maximum(np.log2(np.maximum(u, 1e-9) / at), 0) / 2


def _grokking(r: Random) -> Shape:
    start, gain, at = U(r, 0.01, 0.2), U(r, 0.2, 0.7), U(r, 0.3, 0.9)
    return Shape(lambda u: start + gain * logistic(u, at, 0.03))


def _still(r: Random) -> Shape:
    value = U(r, 0.02, 0.95)
    return Shape(lambda u: value + 0 * u)


def _converged_early(r: Random) -> Shape:
    value, gain = U(r, 0.2, 0.9), U(r, 0.005, 0.03)
    return Shape(lambda u: value - gain * np.exp(-u / 0.02))


def _tiny_slope(r: Random) -> Shape:
    value, slope = U(r, 0.05, 0.9), U(r, -0.01, 0.01)
    return Shape(lambda u: value + slope * u)


def _still_binomial(r: Random) -> Shape:
    value = U(r, 0.1, 0.9)
    return Shape(lambda u: value + 0 * u, binomial=int(LU(r, 500, 4000)))


def _quick_small_gain(r: Random) -> Shape:
    value, gain = U(r, 0.05, 0.85), U(r, 0.03, 0.06)
    return Shape(lambda u: value + gain * (1 - np.exp(-u / 0.03)))


def _fall(lost: Callable[[Random], tuple[float, F]]) -> Draw:
    """A run that loses a share of its reward from some time on."""

    def drawn(r: Random) -> Shape:
        base, (at, share) = _base(r), lost(r)
        return Shape(lambda u: base(np.minimum(u, at)) * (1 - np.clip(share(u), 0, 1)), falls_at=at)

    return drawn


def _cliff(r: Random) -> tuple[float, F]:
    at, deep = U(r, 0.35, 0.85), U(r, 0.3, 1)
    return at, lambda u: deep * (u > at)


def _slide(r: Random) -> tuple[float, F]:
    at, deep = U(r, 0.3, 0.6), U(r, 0.3, 0.8)
    return at, lambda u: deep * (u - at) / (1 - at)


def _half_life(r: Random) -> tuple[float, F]:
    at, scale = U(r, 0.3, 0.7), LU(r, 0.03, 0.3)
    return at, lambda u: 1 - np.exp(-np.maximum(u - at, 0) / scale)


def _stairs_down(r: Random) -> tuple[float, F]:
    at = U(r, 0.3, 0.6)
    return at, lambda u: 0.15 * np.ceil(np.clip((u - at) / 0.1, 0, 4))


def _from_the_start(r: Random) -> Shape:
    start, slope = U(r, 0.4, 0.9), U(r, 0.2, 0.6)
    return Shape(lambda u: start * (1 - slope * u / 2), falls_at=0.0)


def _dip(r: Random) -> Shape:
    base, at, deep, lasts = _base(r), U(r, 0.3, 0.6), U(r, 0.08, 0.2), U(r, 0.15, 0.3)
    return Shape(lambda u: np.maximum(base(u) - deep * ((u > at) & (u < at + lasts)), 0), falls_at=at)


def _cut_off(r: Random) -> Shape:
    base, at = _base(r), U(r, 0.35, 0.8)
    return Shape(
        lambda u: base(np.minimum(u, at)) * (1 - 0.3 * np.clip((u - at) / 0.3, 0, 1)),
        falls_at=at,
        truncated=lambda u: 0.01 + 0.6 * np.clip((u - at) / 0.2, 0, 1),
    )


def _small_drop(r: Random) -> tuple[float, F]:
    at, deep = U(r, 0.4, 0.8), U(r, 0.12, 0.25)
    return at, lambda u: deep * np.clip((u - at) / 0.05, 0, 1)


def _wave(r: Random) -> Shape:
    size, period = U(r, 0.008, 0.02), LU(r, 0.1, 0.6)
    return Shape(_base(r), wave=lambda u: size * np.sin(2 * np.pi * u / period))


def _square_wave(r: Random) -> Shape:
    size, period = U(r, 0.005, 0.015), U(r, 0.15, 0.4)
    return Shape(_base(r), wave=lambda u: size * np.sign(np.sin(2 * np.pi * u / period)))


def _one_zero(r: Random) -> Shape:
    base, at = _base(r), round(U(r, 0.3, 0.95) * 40) / 40
    return Shape(base, wave=lambda u: -base(u) * (np.abs(u - at) < 0.012))


def _noisy(noise: str) -> Draw:
    return lambda r: Shape(_base(r), noise=noise)


def _few_samples(r: Random) -> Shape:
    return Shape(_base(r), binomial=int(LU(r, 100, 600)))


def _sparse(r: Random) -> Shape:
    return Shape(_base(r), n=int(r.choice([12, 16])), log_spaced=bool(r.integers(2)))


_KINDS: dict[str, dict[str, Draw]] = {
    "smooth": {
        "hyperbola": _smooth(_hyperbola),
        "arctan": _smooth(_arctan),
        "root": _smooth(_root),
        "error function": _smooth(_error_function),
        "accelerating": _smooth(_accelerating, 0.1),
        "Richards": _smooth(_richards),
        "three exponentials": _smooth(_three_exponentials),
        "format then skill": _smooth(_format_then_skill, 0.1),
        "ramp and hold": _smooth(_ramp_and_hold),
        "cosine": _smooth(_cosine),
        "slow logarithm": _smooth(_slow_logarithm),
        "power of the loss": _smooth(_loss_power),
        "Weibull": _smooth(_weibull),
        "near one": _near_one,
        "from zero": _from_zero,
        "exponential, small": _smooth(
            lambda r: (lambda k: lambda u: 1 - np.exp(-u / k))(LU(r, 0.05, 0.6)), 0.02, 0.1
        ),
    },
    "late": {
        "jump": _late(_jump),
        "second wind": _late(_second_wind),
        "two jumps": _late(_two_jumps),
        "creep": _late(_creep, 0.03, 0.1),
        "grokking": _grokking,
    },
    "nothing": {
        "still": _still,
        "converged early": _converged_early,
        "tiny slope": _tiny_slope,
        "still, binomial": _still_binomial,
        "quick small gain": _quick_small_gain,
    },
    "falls": {
        "cliff": _fall(_cliff),
        "slide": _fall(_slide),
        "half-life": _fall(_half_life),
        "stairs down": _fall(_stairs_down),
        "from the start": _from_the_start,
        "dip": _dip,
        "cut off": _cut_off,
        "small drop": _fall(_small_drop),
    },
    "wavers": {
        "wave": _wave,
        "square wave": _square_wave,
        "one zero": _one_zero,
        "outliers": _noisy("outliers"),
        "few samples": _few_samples,
        "sparse": _sparse,
    },
}
MORE = {name: (kind, draw) for kind, families in _KINDS.items() for name, draw in families.items()}
TRIED = {name: MORE[name] for name in list(MORE)[::2]}
KEPT = {name: MORE[name] for name in list(MORE)[1::2]}
