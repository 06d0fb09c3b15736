"""Comparison of any number of recipes with one or more runs each: the paper's rule, and the reward at equal compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from scalerl_cli.curves import formatting
from scalerl_cli.curves.analysis import Analysis, State
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.report import left_out
from scalerl_cli.curves.scale import RewardScale
from scalerl_cli.curves.source import CurveFile
from scalerl_curvefit import Better, CurveError, Estimate, SeedComparison, compare_seeds, draws
from scalerl_curvefit.compare import A_MARGIN
from scalerl_curvefit.sampling import interval

SETTLED: Final = 0.9
"""Probability from which on two recipes are distinguished: a one-sided 90 % bound then excludes equality."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """A recipe with the results of its runs."""

    label: str
    files: tuple[CurveFile, ...] = ()
    """Curves of the runs that have one."""
    made: tuple[Analysis, ...] = ()
    """Fits of the curves that can be fitted."""
    problems: tuple[str, ...] = ()
    """Reason for each curve that cannot be fitted."""
    failures: tuple[str, ...] = ()
    """Reason for each failed run, whose curve is not fitted."""

    def parameter(self, name: str) -> Estimate | None:
        """Median and 90 % interval of a parameter of one run of this recipe, over the draws of all its fits."""
        if not self.made:
            return None
        low, median, high = interval(
            np.concatenate([getattr(draws(made.fitted), name) for made in self.made])
        )
        return Estimate(float(median), float(low), float(high))

    @property
    def state(self) -> str:
        """The worst state of its fits, and the numbers of failed runs and of runs without a fit."""
        states = {made.state for made in self.made}
        worst = [s for s in (State.BROKEN, State.INSUFFICIENT, State.OK) if s in states][:1]
        counts = [(len(self.failures), "failed"), (len(self.problems), "without a fit")]
        return ", ".join([*map(str, worst), *(f"{n} {what}" for n, what in counts if n)])

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons to distrust its fits, including active alarms, without duplicates."""
        every = ((*made.guarded.reasons, *made.doubts, *_bounds(made)) for made in self.made)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(every)))

    def reward_at(self, compute: float) -> EqualCompute | None:
        """Mean reward of the runs at ``compute``; None if no curve reaches it."""
        return EqualCompute.of([at for file in self.files if (at := _interpolated(file, compute))])


@dataclass(frozen=True)
class EqualCompute:
    """The mean reward of the runs of a recipe at one compute, interpolated between evaluations, without a fit."""

    mean: float
    """Mean over the runs."""
    variance: float
    """Variance of one run: between the runs, but at least that of the samples of an evaluation; 0 if unknown."""
    runs: int
    """Number of runs."""

    @classmethod
    def of(cls, found: Sequence[tuple[float, float]]) -> EqualCompute | None:
        """The mean of runs with these (reward, variance of the evaluation); None without runs."""
        if not found:
            return None
        rewards, noise = np.array(found).T
        between = float(np.var(rewards, ddof=1)) if len(found) > 1 else 0.0
        return cls(float(rewards.mean()), max(between, float(noise.mean())), len(found))

    @property
    def interval(self) -> Estimate | None:
        """90 % interval: Student's t over the runs, or, for one run, from the samples of its evaluation; None if the noise is
        unknown.
        """
        if not self.variance:
            return None
        half = _t90(self.runs - 1) * math.sqrt(self.variance / self.runs)
        return Estimate(self.mean, self.mean - half, self.mean + half)

    def minus(self, other: EqualCompute) -> Estimate | None:
        """Difference of the means with its 90 % interval; None if the noise of either is unknown."""
        if not (self.variance and other.variance):
            return None
        freedom = (self.runs - 1) + (other.runs - 1) if min(self.runs, other.runs) > 1 else 0
        half = _t90(freedom) * math.sqrt(self.variance / self.runs + other.variance / other.runs)
        apart = self.mean - other.mean
        return Estimate(apart, apart - half, apart + half)


def _bounds(made: Analysis) -> Iterator[str]:
    """Parameters that a bound of the prior determines instead of the points; without ρ, which describes the noise."""
    for edge in made.fitted.edges:
        if edge.parameter != "rho":
            at = f"{edge.parameter} is at its {edge.side} bound, {made.bound(edge)}"
            yield f"{at}, with probability {formatting.probability(edge.mass)}"
    highest = made.fitted.settings.a_highest
    if highest <= made.fitted.point.A:
        yield f"the least-squares A is at its high bound, {formatting.amount(made.scale.level(highest))}"


def _t90(freedom: int) -> float:
    """Half width of a 90 % interval in standard errors, by Student's t; by the normal distribution for ``freedom`` 0."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.95)) if freedom else 1.645


def _interpolated(file: CurveFile, compute: float) -> tuple[float, float] | None:
    """Reward at ``compute`` on the file's axis, interpolated between evaluations, and variance of its noise; None outside them."""
    curve = file.segment.curve
    x, y = curve.compute + file.segment.start, curve.reward
    if not x[0] <= compute <= x[-1]:
        return None
    noise = np.zeros_like(y) if curve.samples is None else y * (1.0 - y) / curve.samples
    right = max(int(np.searchsorted(x, compute)), 1) if len(x) > 1 else 0
    left = max(right - 1, 0)
    share = (compute - x[left]) / (x[right] - x[left]) if right > left else 0.0
    variance = (1 - share) ** 2 * noise[left] + share**2 * noise[right]
    return float((1 - share) * y[left] + share * y[right]), float(variance)


@dataclass(frozen=True, eq=False)
class Rule:
    """The paper's rule for two recipes that have fits."""

    recipes: tuple[Recipe, Recipe]
    ruled: SeedComparison
    """Its result, also for runs that are BROKEN."""

    @classmethod
    def of(cls, first: Recipe, second: Recipe) -> Rule:
        """Raises CurveProblem: the refit at the common asymptote is not possible."""
        curves, others = ([made.fitted.curve for made in side.made] for side in (first, second))
        try:
            return cls((first, second), compare_seeds(curves, others))
        except CurveError as error:
            raise CurveProblem(f"{first.label} against {second.label}: {error}") from error

    @property
    def studies(self) -> tuple[Analysis, ...]:
        """The fits of both."""
        return (*self.recipes[0].made, *self.recipes[1].made)

    @property
    def better(self) -> Better:
        """The better recipe; UNDECIDED if a run is BROKEN, because its curve has ended."""
        broken = any(made.state is State.BROKEN for made in self.studies)
        return Better.UNDECIDED if broken else self.ruled.better

    @property
    def why_undecided(self) -> str:
        return "a run is below its own midpoint" if self.better is self.ruled.better else "a run is BROKEN"

    @property
    def probability(self) -> float | None:
        """Probability that a run of the better recipe has the larger A or B; None if undecided."""
        return None if self.better is Better.UNDECIDED else self.ruled.probability

    @property
    def separates(self) -> bool:
        """Whether it decides with a probability of at least ``SETTLED``, and the fits of both have no doubts."""
        decided = self.better in (Better.FIRST, Better.SECOND)
        doubted = any(made.doubts for made in self.studies)
        return decided and self.ruled.probability >= SETTLED and not doubted

    @property
    def values(self) -> tuple[float, float]:
        """The compared least-squares A or B of both, each a mean over its runs."""
        one, two = (
            float(np.mean([getattr(fitted.point, self.ruled.by) for fitted in fits]))
            for fits in (self.ruled.first, self.ruled.second)
        )
        return one, two


@dataclass(frozen=True, eq=False)
class Against:
    """Comparison of a recipe with the first one."""

    base: Recipe
    """The first recipe."""
    recipe: Recipe
    rule: Rule | None
    """None if either recipe has no fit."""
    apart: Estimate | None
    """Difference of the rewards at equal compute; None if unknown."""

    @property
    def beyond_noise(self) -> bool:
        """Whether the 90 % interval of the difference at equal compute excludes 0."""
        return self.apart is not None and not self.apart.low <= 0.0 <= self.apart.high

    @property
    def separates_at_equal_compute(self) -> bool:
        """Whether the difference is beyond noise and each side has at least two runs, which show the spread between seeds."""
        return self.beyond_noise and min(len(self.base.files), len(self.recipe.files)) > 1


@dataclass(frozen=True, eq=False)
class Table:
    """Recipes in the order given; the others are compared with the first one."""

    recipes: tuple[Recipe, ...]
    scale: RewardScale
    unit: str
    """Unit of compute; empty if unknown or not the same in all files."""

    @cached_property
    def compute(self) -> float | None:
        """Largest compute that all fitted curves reach, in the unit of the files; None without a fit."""
        fitted = [made.fitted.curve for recipe in self.recipes for made in recipe.made]
        ends = [float(curve.compute[-1]) for curve in fitted]
        return min(ends, default=None)

    @cached_property
    def against(self) -> tuple[Against, ...]:
        """The comparison of each other recipe with the first one."""
        base = self.recipes[0]
        return tuple(self._against(base, recipe) for recipe in self.recipes[1:])

    def _against(self, base: Recipe, recipe: Recipe) -> Against:
        rule = Rule.of(base, recipe) if base.made and recipe.made else None
        one, two = self.reward(base), self.reward(recipe)
        return Against(base, recipe, rule, two.minus(one) if one and two else None)

    def reward(self, recipe: Recipe) -> EqualCompute | None:
        """Mean reward of a recipe at the common compute."""
        return None if self.compute is None else recipe.reward_at(self.compute)

    def rows(self) -> list[list[str]]:
        """Rows of the printed table; the first one is the header."""
        at = "–" if self.compute is None else formatting.amount(self.compute)
        rows = [["recipe", "runs", "A", "B", "Cmid", f"reward at {at}", "state"]]
        for recipe in self.recipes:
            reached = self.reward(recipe)
            rows.append(
                [
                    recipe.label,
                    str(len(recipe.files)),
                    _cell(recipe.parameter("A"), self.scale.rewards),
                    _cell(recipe.parameter("B"), formatting.amounts),
                    _cell(recipe.parameter("Cmid"), formatting.amounts),
                    self._reached(reached),
                    recipe.state or "no run",
                ]
            )
        return rows

    def _reached(self, reached: EqualCompute | None) -> str:
        if reached is None or reached.interval is None:
            return "–" if reached is None else self.scale.reward(reached.mean, 3)
        return self.scale.rewards(reached.interval)

    def findings(self) -> Iterator[str]:
        """Result of each comparison, then failures, problems and doubts of each recipe, as lines."""
        for both in self.against:
            yield f"{both.recipe.label} against {both.base.label}: {self._rule(both.rule)}"
            if both.apart is not None:
                seeds = both.beyond_noise and not both.separates_at_equal_compute
                how = (
                    "more than the samples explain, but one run does not show the spread between seeds"
                    if seeds
                    else "separates"
                    if both.separates_at_equal_compute
                    else "does not separate"
                )
                yield f"  reward at equal compute: {self.scale.gains(both.apart)}: {how}"
        for recipe in self.recipes:
            yield from (
                f"{recipe.label}: {why}" for why in (*recipe.failures, *recipe.problems, *recipe.doubts)
            )

    def _rule(self, rule: Rule | None) -> str:
        """Result of the paper's rule as text."""
        if rule is None:
            return "nothing to fit on one side"
        ruled = rule.ruled
        if ruled.shared_a is None:
            one, two = (self.scale.reward(v, 3) for v in rule.values)
            what = f"A {two} against {one}"
        else:
            one, two = (formatting.significant(v) for v in rule.values)
            what = f"B {two} against {one} at A = {self.scale.reward(ruled.shared_a, 3)}"
        if rule.better is Better.UNDECIDED:
            return f"undecided, {rule.why_undecided} ({what})"
        if rule.better is Better.TIE:
            return f"no difference ({what})"
        word = "better" if rule.better is Better.SECOND else "worse"
        probability = formatting.probability(ruled.probability)
        if rule.separates:
            return f"separates: {word}, {what}, with probability {probability}"
        why = "the fits are in doubt" if ruled.probability >= SETTLED else "not settled"
        return f"does not separate, {why} ({word}, {what}, with probability {probability})"

    def notes(self) -> Iterator[str]:
        """Explanations of the numbers, for below the table."""
        margin = self.scale.difference(A_MARGIN, 2)
        yield (
            "A, B, Cmid: median and 90 % interval for one run of a recipe (not for the mean), over the fits of all its runs."
        )
        yield (
            f"A recipe separates from the first one by A where the least-squares A differ by more than {margin}, else by B at "
            f"their mean A, if a run of the better one is ahead with a probability of {formatting.reward(SETTLED)} or more."
        )
        yield (
            "Reward at equal compute: evaluations, interpolated, at the most compute that all runs have; mean and 90 % interval "
            "over the runs. With one run the interval is of the evaluation's samples alone, without the spread between seeds."
        )
        if len(self.against) > 1:
            chance = formatting.amount(0.1 * len(self.against))
            yield f"Of {len(self.against)} comparisons at 90 % about {chance} separate by chance."
        if self.unit:
            yield f"Compute is in {self.unit}."
        for recipe in self.recipes:
            lines = (line.strip() for made in recipe.made for line in left_out(made))
            yield from dict.fromkeys(f"{recipe.label}: {line}." for line in lines)

    def csv_rows(self) -> Iterator[dict[str, Any]]:
        """Rows of ``comparison.csv``, one per recipe, with all digits."""
        against = {id(both.recipe): both for both in self.against}
        for recipe in self.recipes:
            row: dict[str, Any] = {"recipe": recipe.label, "runs": len(recipe.files), "state": recipe.state}
            row |= {"failed": len(recipe.failures)}
            for name in ("A", "B", "Cmid", "R0"):
                found = recipe.parameter(name)
                if found is not None and name in ("A", "R0"):
                    found = self.scale.levels(found)
                row |= _columns(name, found)
            reached = self.reward(recipe)
            row |= {"compute": self.compute}
            ends = None if reached is None else reached.interval
            row |= _columns("reward", ends and self.scale.levels(ends))
            row["reward"] = None if reached is None else self.scale.level(reached.mean)
            both = against.get(id(recipe))
            row |= _columns("difference", both.apart and self.scale.changes(both.apart) if both else None)
            rule = None if both is None else both.rule
            better = (
                {Better.FIRST: "base", Better.SECOND: "this"}.get(rule.better, str(rule.better))
                if rule
                else None
            )
            row |= {
                "by": rule and rule.ruled.by,
                "better": better if rule or both is None else str(Better.UNDECIDED),
                "probability": rule and rule.ruled.probability,
                "separates": both and bool(rule and rule.separates),
                "separates_at_equal_compute": both and both.separates_at_equal_compute,
            }
            yield row


def _cell(found: Estimate | None, shown: Callable[[Estimate], str]) -> str:
    return "–" if found is None else shown(found)


def _columns(name: str, found: Estimate | None) -> dict[str, float | None]:
    ends = (None, None, None) if found is None else (found.median, found.low, found.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
