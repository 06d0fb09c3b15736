"""Bounds of the prior that limit a posterior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .posterior import Prior
from .sampling import Draws
from .settings import FitSettings

EDGE_MASS: Final = 0.05
"""A bound of the prior is reported from this posterior mass next to it."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A prior bound with posterior mass next to it: the bound, not the data, sets the interval.

    Attributes:
        parameter: A, B, Cmid, rho or A - R0 (at least 0, since a curve does not fall).
        side: "low" or "high".
        bound: value of the bound.
        mass: posterior probability next to the bound.
    """

    parameter: str
    side: str
    bound: float
    mass: float


def edges_of_prior(drawn: Draws, prior: Prior, settings: FitSettings) -> tuple[Edge, ...]:
    """The bounds of `prior` with more than `EDGE_MASS` of the drawn curves next to them."""
    ln_cmid, ln_b = drawn.ln_cmid, drawn.ln_b
    margin_cmid = 0.03 * (prior.ln_cmid[1] - prior.ln_cmid[0])
    margin_b = 0.03 * (prior.ln_b[1] - prior.ln_b[0])
    candidates = [
        ("A", "high", prior.a_highest, prior.a_highest - drawn.A < 0.005),
        ("A", "low", prior.a_lowest, drawn.A - prior.a_lowest < 0.005),
        ("Cmid", "high", float(np.exp(prior.ln_cmid[1])), ln_cmid > prior.ln_cmid[1] - margin_cmid),
        ("Cmid", "low", float(np.exp(prior.ln_cmid[0])), ln_cmid < prior.ln_cmid[0] + margin_cmid),
        ("B", "high", float(np.exp(prior.ln_b[1])), ln_b > prior.ln_b[1] - margin_b),
        ("B", "low", float(np.exp(prior.ln_b[0])), ln_b < prior.ln_b[0] + margin_b),
        # A falling curve is outside the model: R0 is cut off at A, and B and Cmid then mean nothing.
        ("A - R0", "low", 0.0, drawn.A - drawn.R0 < 0.002),
    ]
    edges = [Edge(name, side, bound, float(np.mean(hit))) for name, side, bound, hit in candidates]
    if len(settings.rho) > 1:
        top = max(settings.rho)
        edges.append(Edge("rho", "high", top, float(np.mean(drawn.rho == top)) - 0.5))
    return tuple(edge for edge in edges if edge.mass > EDGE_MASS)
