"""Which prompts are drawn."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final

from pydantic import Field

from scalerl_api.fields import (
    Model,
    NonNegativeDecimal,
    PositiveDecimal,
    PositiveUnitDecimal,
    Rule,
    UnitDecimal,
)
from scalerl_api.recipe.alternatives import OneOf


class UniformSpec(Model):
    """Every prompt once per epoch."""


class NoPositiveResamplingSpec(Model):
    """Excludes solved prompts from later epochs (ScaleRL [P])."""

    pass_rate: PositiveUnitDecimal = "0.9"
    """Historical pass rate from which a prompt counts as solved."""


class PassRateBandSpec(Model):
    """Only prompts with a historical pass rate within the band, and prompts not used yet."""

    low: UnitDecimal = "0.1"
    """Minimum pass rate."""
    high: UnitDecimal = "0.9"
    """Maximum pass rate."""

    rules = (
        Rule(
            "double(string(self.low)) < double(string(self.high))",
            "%(low)s must be less than %(high)s",
            "low",
            lambda band: float(band.low) < float(band.high),
        ),
    )


_ASCENDING_EDGES: Final = Rule(
    "self.edges.all(e, self.edges.indexOf(e) == 0 || "
    "double(string(self.edges[self.edges.indexOf(e) - 1])) < double(string(e)))",
    "edges must ascend",
    "edges",
    lambda section: all(float(a) < float(b) for a, b in pairwise(section.edges)),
)


class DifficultyPoolsSpec(Model):
    """Pools of prompts by historical pass rate; prompts move between pools as it changes."""

    edges: Annotated[list[UnitDecimal], Field(min_length=1, max_length=16)]
    """Pass rates between the pools, ascending."""
    weights: Annotated[list[NonNegativeDecimal], Field(min_length=2, max_length=17)]
    """Sampling weight of each pool, relative to the largest; one more than edges. Prompts not used yet are in the
    middle pool."""

    rules = (
        Rule(
            "size(self.weights) == size(self.edges) + 1",
            "weights must be one more than edges",
            "weights",
            lambda pools: len(pools.weights) == len(pools.edges) + 1,
        ),
        _ASCENDING_EDGES,
        Rule(
            "self.weights.exists(w, double(string(w)) > 0.0)",
            "at least one of weights must be positive",
            "weights",
            lambda pools: any(float(w) > 0 for w in pools.weights),
        ),
    )


class EdgeOfCompetenceSpec(Model):
    """Prompts that the model solves sometimes, by its last two groups of each: with a pass rate above 0 and below .8. The others
    are measured again as it learns (arXiv 2512.07783 [P]; the bounds [?])."""


class SecSpec(Model):
    """A bandit over difficulty categories that prefers those with a large mean absolute advantage (SEC,
    arXiv 2505.14970 [P]). The task's prompts need a difficulty."""

    edges: Annotated[list[NonNegativeDecimal], Field(min_length=1, max_length=16)]
    """Difficulties between the categories, ascending; an edge belongs to the category above it."""
    temperature: PositiveDecimal = "0.4"
    """Temperature of the softmax over the values of the categories; lower is greedier."""

    rules = (_ASCENDING_EDGES,)


class CurriculumSpec(OneOf):
    """Selection of prompts: one of these."""

    uniform: UniformSpec | None = None
    """Every prompt once per epoch."""
    no_positive_resampling: NoPositiveResamplingSpec | None = None
    """Uniform without solved prompts, as in ScaleRL."""
    pass_rate_band: PassRateBandSpec | None = None
    """Uniform over prompts with a pass rate within a band."""
    difficulty_pools: DifficultyPoolsSpec | None = None
    """Weighted pools by pass rate."""
    edge_of_competence: EdgeOfCompetenceSpec | None = None
    """Prompts that the model solves sometimes, but not reliably."""
    sec: SecSpec | None = None
    """A bandit over difficulty categories, as in SEC."""
