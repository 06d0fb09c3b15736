"""35 more families of simulated runs for `decisions.py --families others`, which bounds and patience of the rule were not chosen on.

They were written without sight of `run_families.py`. Two faults of the policy were found and fixed on other draws of them
(seeds 0, 1 and 7 to 9): the noise of the alarm, and the threshold from which a fit keeps a run from being called flat. Other parameters, 10 to 80 evaluations of a run, some of
them evenly spaced in log compute, noise of sd .003 to .02 with autocorrelation 0 to .7, heavier at one end, with outliers
or drift, or the binomial noise of 64 to 8,000 samples. Kinds are those of `run_families.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scalerl_curvefit.simulate import ar1_noise

F = Callable[[np.ndarray], np.ndarray]
Families = dict[str, tuple[str, Callable[[np.random.Generator], "Shape"]]]


@dataclass(frozen=True)
class Shape:
    """One run without noise, over the share u of the plan. binomial: samples that the reward seen is a share of.

    noise: ar1, hetero, outliers or drift. n: evaluations. log_spaced: whether they are, in compute.
    """

    trend: F
    wave: F = np.zeros_like
    falls_at: float | None = None
    truncated: F | None = None
    binomial: int | None = None
    noise: str = "ar1"
    n: int | None = None
    log_spaced: bool = False


@dataclass(frozen=True, eq=False)
class Seen:
    """One run with its evaluations. u: share of the plan at each. clean: without noise."""

    name: str
    kind: str
    shape: Shape
    u: np.ndarray
    clean: np.ndarray
    rewards: np.ndarray
    samples: int


def seen_run(name: str, i: int, seed: int, families: Families | None = None) -> Seen:
    """Run i of a family, of these by default."""
    kind, draw = (families or OTHERS)[name]
    r = np.random.default_rng([seed, i, zlib.crc32(name.encode())])
    s = draw(r)
    n = s.n or int(r.choice([20, 40, 40, 40, 80]))
    sigma, rho = float(np.exp(r.uniform(np.log(0.003), np.log(0.02)))), float(r.choice([0, 0.2, 0.5, 0.7]))
    u = np.geomspace(1 / (2 * n), 1, n) if s.log_spaced else np.arange(1, n + 1) / n
    clean = np.clip(s.trend(u) + s.wave(u), 0, 1)
    if s.binomial is not None:
        return Seen(name, kind, s, u, clean, r.binomial(s.binomial, clean) / s.binomial, max(s.binomial, 2))
    rate = float(np.clip(clean.mean(), 0.05, 0.95))
    explain = rate * (1 - rate) / sigma**2
    counts = {"explain": round(explain), "many": 16000, "paired": round(explain * r.uniform(0.43, 0.65) ** 2)}
    samples = max(counts[str(r.choice(["explain", "many", "paired"]))], 2)
    noise = ar1_noise(n, sigma, rho, r)
    if s.noise == "drift":
        noise = noise + ar1_noise(n, float(r.uniform(0.006, 0.02)), 0.97, r)
    if s.noise == "hetero":
        noise = noise * np.linspace(*[(2, 0.4), (0.4, 2.2)][int(r.integers(2))], n)
    if s.noise == "outliers":
        noise = noise + (r.random(n) < 0.06) * r.uniform(-0.25, 0.08, n)
    return Seen(name, kind, s, u, clean, np.clip(clean + noise, 0, 1), samples)


def sig(u, mid, b):
    return 1 / (1 + (mid / np.maximum(u, 1e-9)) ** b)


def logistic(u, mid, w):
    return 1 / (1 + np.exp(-(u - mid) / w))


def U(r, a, b):
    """Uniform."""
    return float(r.uniform(a, b))


def LU(r, a, b):
    """Uniform in the logarithm."""
    return float(np.exp(r.uniform(np.log(a), np.log(b))))


def level(r, gain, low=0.01, high=0.95):
    """Starting reward that leaves room for the gain."""
    return U(r, low, max(low, high - gain))


# smooth
def sig_early(r):
    g = U(r, 0.05, 0.5)
    r0 = level(r, g)
    m, b = LU(r, 0.01, 0.1), U(r, 0.6, 1.3)
    return Shape(lambda u: r0 + g * sig(u, m, b))


def sig_mid(r):
    g = U(r, 0.06, 0.6)
    r0 = level(r, g)
    m, b = U(r, 0.15, 0.5), U(r, 1.1, 3)
    return Shape(lambda u: r0 + g * sig(u, m, b))


def sig_late(r):
    g = U(r, 0.1, 0.7)
    r0 = level(r, g)
    m, b = U(r, 0.6, 1.3), U(r, 1.5, 4)
    return Shape(lambda u: r0 + g * sig(u, m, b))


def sig_steep(r):
    g = U(r, 0.06, 0.6)
    r0 = level(r, g)
    m, b = U(r, 0.1, 0.7), U(r, 4, 8)
    return Shape(lambda u: r0 + g * sig(u, m, b))


def stretched(r):
    g = U(r, 0.04, 0.5)
    r0 = level(r, g)
    t, b = LU(r, 0.03, 0.7), U(r, 0.35, 0.85)
    return Shape(lambda u: r0 + g * (1 - np.exp(-((u / t) ** b))))


def power(r):
    g = U(r, 0.05, 0.5)
    r0 = level(r, g)
    u0, a = LU(r, 0.01, 0.2), U(r, 0.15, 0.9)
    return Shape(lambda u: r0 + g * (1 - (1 + u / u0) ** -a))


def loglinear(r):
    g = U(r, 0.04, 0.35)
    r0 = level(r, g)
    u0 = LU(r, 0.01, 0.3)
    return Shape(lambda u: r0 + g * np.log1p(u / u0) / np.log1p(2 / u0))


def two_phase(r):
    a, b2 = U(r, 0.04, 0.25), U(r, 0.05, 0.25)
    r0 = level(r, a + b2)
    m1, m2 = LU(r, 0.03, 0.12), U(r, 0.35, 0.8)
    e1, e2 = U(r, 1, 2), U(r, 1.3, 2.5)
    return Shape(lambda u: r0 + a * sig(u, m1, e1) + b2 * sig(u, m2, e2))


def fast_high(r):
    top = U(r, 0.85, 0.995)
    g = U(r, 0.1, 0.6)
    t = LU(r, 0.02, 0.12)
    return Shape(lambda u: top - g * np.exp(-u / t))


def fast_low(r):
    top = U(r, 0.03, 0.2)
    g = U(r, 0.5, 0.95) * top
    t = LU(r, 0.02, 0.12)
    return Shape(lambda u: top - g * np.exp(-u / t))


def slow_start(r):
    g = U(r, 0.1, 0.6)
    r0 = level(r, g)
    m = U(r, 0.35, 0.8)
    w = U(r, 0.08, 0.18)
    return Shape(lambda u: r0 + g * logistic(u, m, w))


def linear(r):
    g = U(r, 0.05, 0.5)
    r0 = level(r, g)
    return Shape(lambda u: r0 + g * u / 2)


# late
def second_rise(r):
    a, g = U(r, 0.05, 0.3), U(r, 0.03, 0.2)
    r0 = level(r, a + g)
    m = LU(r, 0.02, 0.08)
    at, w = U(r, 0.3, 0.9), U(r, 0.01, 0.06)
    return Shape(lambda u: r0 + a * sig(u, m, 2.2) + g * logistic(u, at, w))


def step(r):
    g = U(r, 0.04, 0.3)
    a = U(r, 0, 0.15)
    r0 = level(r, g + a)
    at = U(r, 0.15, 0.8)
    t = U(r, 0.03, 0.2)
    return Shape(lambda u: r0 + a * (1 - np.exp(-u / t)) + g * (u > at))


def staircase(r):
    k = int(r.integers(3, 7))
    ats = np.sort(r.uniform(0.05, 1.1, k))
    gs = r.uniform(0.02, 0.1, k)
    r0 = level(r, gs.sum())
    w = U(r, 0.004, 0.03)
    return Shape(lambda u: r0 + sum(g * logistic(u, a, w) for g, a in zip(gs, ats, strict=True)))


def curriculum(r):
    """A harder stage begins: a small dip, then a rise past the old level."""
    ats = np.array([0, U(r, 0.2, 0.4), U(r, 0.5, 0.8)])
    gs = r.uniform(0.04, 0.15, 3)
    r0 = level(r, gs.sum(), 0.05)
    t = U(r, 0.05, 0.12)
    dip = U(r, 0, 0.012)

    def f(u):
        y = np.full_like(u, r0)
        for i, (a, g) in enumerate(zip(ats, gs, strict=True)):
            y = y + (u > a) * (
                (g + (dip if i else 0)) * (1 - np.exp(-np.maximum(u - a, 0) / t)) - (dip if i else 0)
            )
        return y

    return Shape(f)


def flat_then_rise(r):
    g = U(r, 0.08, 0.6)
    r0 = level(r, g, 0.005, 0.9)
    at, w = U(r, 0.2, 0.8), U(r, 0.01, 0.08)
    return Shape(lambda u: r0 + g * logistic(u, at, w))


def zeros_then_rise(r):
    g = U(r, 0.1, 0.6)
    at, w = U(r, 0.15, 0.6), U(r, 0.02, 0.08)
    p = LU(r, 0.0002, 0.003)
    return Shape(lambda u: p + g * logistic(u, at, w) * (u > at - 5 * w), binomial=int(LU(r, 128, 4000)))


# nothing
def flat(r):
    r0 = U(r, 0.02, 0.9)
    s = U(r, -0.008, 0.008)
    return Shape(lambda u: r0 + s * u)


def small_gain(r):
    g = U(r, 0.01, 0.06)
    r0 = level(r, g)
    m, b = U(r, 0.03, 0.3), U(r, 1, 3)
    return Shape(lambda u: r0 + g * sig(u, m, b))


def few_samples_flat(r):
    g = U(r, 0, 0.03)
    r0 = level(r, g, 0.1, 0.9)
    t = U(r, 0.03, 0.2)
    return Shape(lambda u: r0 + g * (1 - np.exp(-u / t)), binomial=int(LU(r, 64, 512)))


def rare_passes(r):
    p = float(r.choice([0, LU(r, 1e-5, 0.003)]))
    return Shape(lambda u: p + 0 * u, binomial=int(LU(r, 64, 8000)))


# falls
def base(r):
    g = U(r, 0.1, 0.5)
    r0 = level(r, g, 0.1)
    m, b = LU(r, 0.05, 0.3), U(r, 1.2, 3)
    return lambda u: r0 + g * sig(u, m, b)


def collapse_fast(r):
    f, at, w = base(r), U(r, 0.3, 0.85), U(r, 0.02, 0.1)
    keep = U(r, 0, 0.6)
    return Shape(lambda u: f(np.minimum(u, at)) * (1 - (1 - keep) * np.clip((u - at) / w, 0, 1)), falls_at=at)


def collapse_slow(r):
    f, at, w = base(r), U(r, 0.25, 0.65), U(r, 0.2, 0.5)
    keep = U(r, 0.4, 0.85)
    return Shape(lambda u: f(np.minimum(u, at)) * (1 - (1 - keep) * np.clip((u - at) / w, 0, 1)), falls_at=at)


def drop_plateau(r):
    f, at, d = base(r), U(r, 0.3, 0.8), U(r, 0.03, 0.09)
    return Shape(lambda u: f(np.minimum(u, at)) - d * np.clip((u - at) / 0.04, 0, 1), falls_at=at)


def fall_recover(r):
    f, at, d = base(r), U(r, 0.25, 0.65), U(r, 0.05, 0.25)
    w, back = U(r, 0.02, 0.06), U(r, 0.1, 0.3)
    return Shape(
        lambda u: (
            f(u)
            - min(d, 0.9 * float(f(np.array([at]))[0]))
            * np.clip((u - at) / w, 0, 1)
            * np.exp(-np.maximum(u - at - w, 0) / back)
        ),
        falls_at=at,
    )


def truncation(r):
    f, at = base(r), U(r, 0.3, 0.8)
    s, top, d = U(r, 0.1, 0.3), U(r, 0.15, 0.6), U(r, 0.02, 0.2)
    return Shape(
        lambda u: f(np.minimum(u, at)) - d * np.clip((u - at) / (2 * s), 0, 1),
        falls_at=at,
        truncated=lambda u: 0.02 + top * np.clip((u - at) / s, 0, 1),
    )


def slow_decay(r):
    f, at, d = base(r), U(r, 0.3, 0.6), U(r, 0.03, 0.1)
    return Shape(lambda u: f(np.minimum(u, at)) - d * np.clip((u - at) / (1 - at), 0, 2), falls_at=at)


# wavers
def oscillation(r):
    f = base(r)
    a, p, ph = U(r, 0.008, 0.025), U(r, 0.08, 0.4), U(r, 0, 6.28)
    return Shape(f, wave=lambda u: a * np.sin(6.2832 * u / p + ph))


def drift(r):
    return Shape(base(r), noise="drift")


def hetero(r):
    return Shape(base(r), noise="hetero")


def outliers(r):
    return Shape(base(r), noise="outliers")


def few_samples(r):
    return Shape(base(r), binomial=int(LU(r, 64, 512)))


def log_spaced(r):
    g = U(r, 0.03, 0.5)
    r0 = level(r, g)
    m, b = LU(r, 0.03, 0.9), U(r, 0.8, 3)
    return Shape(lambda u: r0 + g * sig(u, m, b), log_spaced=True)


def few_evaluations(r):
    g = U(r, 0.03, 0.5)
    r0 = level(r, g)
    m, b = LU(r, 0.03, 0.6), U(r, 0.8, 3)
    return Shape(lambda u: r0 + g * sig(u, m, b), n=int(r.choice([10, 14])))


KINDS = {
    "smooth": [
        sig_early,
        sig_mid,
        sig_late,
        sig_steep,
        stretched,
        power,
        loglinear,
        two_phase,
        fast_high,
        fast_low,
        slow_start,
        linear,
    ],
    "late": [second_rise, step, staircase, curriculum, flat_then_rise, zeros_then_rise],
    "nothing": [flat, small_gain, few_samples_flat, rare_passes],
    "falls": [collapse_fast, collapse_slow, drop_plateau, fall_recover, truncation, slow_decay],
    "wavers": [oscillation, drift, hetero, outliers, few_samples, log_spaced, few_evaluations],
}
OTHERS = {f.__name__: (k, f) for k, fs in KINDS.items() for f in fs}
