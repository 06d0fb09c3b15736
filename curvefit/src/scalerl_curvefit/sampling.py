"""Curves drawn from the grid posterior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from .curve import FloatArray
from .families import Family, gain_share
from .posterior import Nodes


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Curves drawn from the posterior; all arrays are (d,), one entry per draw.

    Attributes:
        ln_b, ln_cmid: ln B and ln Cmid.
        sigma: stationary sd of the evaluation noise.
        rho: AR(1) coefficient of the noise.
        family: index into `families`.
    """

    A: FloatArray
    ln_b: FloatArray
    ln_cmid: FloatArray
    R0: FloatArray
    sigma: FloatArray
    rho: FloatArray
    family: NDArray[np.intp]
    families: tuple[Family, ...]

    def __len__(self) -> int:
        return int(self.A.size)

    @property
    def B(self) -> FloatArray:
        """(d,) exponents."""
        return np.exp(self.ln_b)

    @property
    def Cmid(self) -> FloatArray:
        """(d,) midpoints."""
        return np.exp(self.ln_cmid)

    def share(self, compute: FloatArray) -> FloatArray:
        """(d, c) share of the gain reached at compute (c,), values ≥ 0."""
        with np.errstate(divide="ignore"):
            ln_compute_c1 = np.log(np.asarray(compute, dtype=np.float64))[:, None]
        # The long index comes last until the transposition: NumPy is several times slower over rows of a few columns.
        if len(self.families) == 1:
            return gain_share(self.families[0], ln_compute_c1, self.ln_cmid, self.ln_b).T
        share_cd = np.empty((ln_compute_c1.size, len(self)))
        for index, family in enumerate(self.families):
            of = np.flatnonzero(self.family == index)
            share_cd[:, of] = gain_share(family, ln_compute_c1, self.ln_cmid[of], self.ln_b[of])
        return share_cd.T

    def reward(self, compute: FloatArray) -> FloatArray:
        """(d, c) rewards of the drawn curves at compute (c,), without departures, late rises and evaluation noise."""
        share = self.share(compute)
        return np.asarray(self.R0[:, None] + (self.A - self.R0)[:, None] * share)


def interval(values: FloatArray) -> FloatArray:
    """(3, ...) quantiles .05, .5, .95 over the first axis, linear between order statistics."""
    ordered = np.sort(values, axis=0)
    place = np.array([0.05, 0.5, 0.95]) * (len(ordered) - 1)
    below = place.astype(np.intp)
    above = np.minimum(below + 1, len(ordered) - 1)
    part = (place - below).reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray(ordered[below] * (1.0 - part) + ordered[above] * part)


def sample(nodes: Sequence[Nodes], weights: FloatArray, n: int, random: np.random.Generator) -> Draws:
    """`n` draws from the posteriors of several families with the given weights: systematic over nodes, exact within a node."""
    counts = systematic(weights, n, random)
    parts = [_sample_family(node, count, random) for node, count in zip(nodes, counts, strict=True)]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    a, ln_b, ln_cmid, r0, sigma, rho = columns
    order = random.permutation(n)  # nodes are sorted, and a prefix of the draws must be a fair sample too
    return Draws(
        A=a[order],
        ln_b=ln_b[order],
        ln_cmid=ln_cmid[order],
        R0=r0[order],
        sigma=sigma[order],
        rho=rho[order],
        family=np.repeat(np.arange(len(nodes)), counts)[order],
        families=tuple(node.family for node in nodes),
    )


def systematic(weights: FloatArray, n: int, random: np.random.Generator) -> NDArray[np.intp]:
    """Systematic sampling: number of draws of each index."""
    return np.bincount(_systematic_indices(np.cumsum(weights), n, random), minlength=weights.size)


def _systematic_indices(edges: FloatArray, n: int, random: np.random.Generator) -> NDArray[np.intp]:
    """(n,) indices, ascending, at n evenly spaced quantiles with one random offset of the weights whose sums are `edges`."""
    at = (np.arange(n) + random.random()) * (edges[-1] / n)
    # Rounding may put the last one at the end of the edges.
    return np.asarray(np.minimum(edges.searchsorted(at, side="right"), edges.size - 1))


def _sample_family(nodes: Nodes, n: int, random: np.random.Generator) -> tuple[FloatArray, ...]:
    s, j = np.divmod(_systematic_indices(nodes.upto_sj, n, random), len(nodes.a_js))
    a = nodes.a_js[j, s] + nodes.a_step_s[s] * (random.random(n) - 0.5)
    variance = nodes.spread_js[j, s] / random.chisquare(nodes.dof, n)
    mean = nodes.r0_at_zero_s[s] - nodes.r0_slope_s[s] * a
    sd = np.sqrt(variance / nodes.precision_s[s])
    below = np.maximum(random.random(n) * ndtr((a - mean) / sd), 1e-300)
    r0 = np.minimum(mean + sd * ndtri(below), a)
    rho = nodes.rho_s[s]
    sigma = np.sqrt(variance / (1.0 - rho * rho))
    return a, nodes.ln_b_s[s], nodes.ln_cmid_s[s], r0, sigma, rho
