"""Comparison of any number of recipes with one or more runs each: the paper's rule, and the reward at equal compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from scalerl_analysis import formatting
from scalerl_analysis.curve_columns import Columns
from scalerl_analysis.curve_file import CurveFile, read_curve
from scalerl_analysis.fit_text import left_out
from scalerl_analysis.fitted_curve import FittedCurve, State, fit_curve
from scalerl_analysis.problem import AnalysisProblem
from scalerl_analysis.reward_scale import RewardScale
from scalerl_analysis.table import Column, Table
from scalerl_curvefit import Better, CurveError, Estimate, SeedComparison, compare_seeds, draws
from scalerl_curvefit.compare import A_MARGIN

SETTLED: Final = 0.9
"""Probability from which on two recipes are distinguished: a one-sided 90 % bound then excludes equality."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """A recipe with the results of its runs."""

    label: str
    files: tuple[CurveFile, ...] = ()
    """Curves of the runs that have one."""
    made: tuple[FittedCurve, ...] = ()
    """Fits of the curves that can be fitted."""
    problems: tuple[str, ...] = ()
    """Reason for each curve that cannot be fitted."""
    failures: tuple[str, ...] = ()
    """Reason for each failed run, whose curve is not fitted."""

    def parameter(self, name: str) -> Estimate | None:
        """Median and 90 % interval of a parameter of one run of this recipe, over the draws of all its fits."""
        drawn = [getattr(draws(made.fitted), name) for made in self.made]
        return Estimate.of(np.concatenate(drawn)) if drawn else None

    @property
    def state(self) -> str:
        """The worst state of its fits, and the numbers of failed runs and of runs without a fit."""
        states = {made.state for made in self.made}
        worst = [s for s in (State.BROKEN, State.INSUFFICIENT, State.OK) if s in states][:1]
        counts = [(len(self.failures), "failed"), (len(self.problems), "without a fit")]
        return ", ".join([*map(str, worst), *(f"{n} {what}" for n, what in counts if n)])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to distrust its fits, including active alarms, without duplicates."""
        every = ((*made.collapse_check.reasons, *made.warnings, *_bounds(made)) for made in self.made)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(every)))

    def reward_at(self, compute: float) -> EqualCompute | None:
        """Mean reward of the runs at ``compute``; None if no curve reaches it."""
        return EqualCompute.of([at for file in self.files if (at := _interpolated(file, compute))])


Runs = str | Path | Iterable[str | Path]
"""Directories or files of the runs of a recipe; one alone is one run."""


def read_recipe(
    label: str, paths: Runs, columns: Columns | None = None, failures: Sequence[str] = ()
) -> Recipe:
    """Curves and fits of the runs of a recipe, such as its seeds; the reasons of those without are ``problems``.

    Args:
        paths: directories of runs, or files as for :func:`read_curve`.
        failures: reason for each failed run, which is not among ``paths``.
    """
    files, made, problems = [], [], []
    for path in (paths,) if isinstance(paths, str | Path) else paths:
        try:
            files.append(read_curve(path, columns))
            made.append(fit_curve(files[-1]))
        except AnalysisProblem as problem:
            problems.append(str(problem))
    return Recipe(label, tuple(files), tuple(made), tuple(problems), tuple(failures))


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


def _bounds(made: FittedCurve) -> Iterator[str]:
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
class Against:
    """A recipe against the first one: by the paper's rule, and by the reward at equal compute."""

    base: Recipe
    """The first recipe."""
    recipe: Recipe
    ruled: SeedComparison | None
    """Result of the rule, also for runs that are BROKEN; None if either recipe has no fit."""
    apart: Estimate | None
    """Difference of the rewards at equal compute; None if unknown."""

    @property
    def is_broken(self) -> bool:
        """Whether a run is BROKEN, so that its curve has ended."""
        return any(made.state is State.BROKEN for made in (*self.base.made, *self.recipe.made))

    @property
    def better(self) -> Better:
        """The better recipe by the rule; UNDECIDED without a fit and if a run is BROKEN."""
        return Better.UNDECIDED if self.ruled is None or self.is_broken else self.ruled.better

    @property
    def separates(self) -> bool:
        """Whether the rule decides with a probability of at least ``SETTLED``, and the fits of both have no doubts."""
        if self.ruled is None or self.better not in (Better.FIRST, Better.SECOND):
            return False
        has_warnings = any(made.warnings for made in (*self.base.made, *self.recipe.made))
        return self.ruled.probability >= SETTLED and not has_warnings

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the 90 % interval of the difference at equal compute excludes 0."""
        return self.apart is not None and not self.apart.low <= 0.0 <= self.apart.high

    @property
    def separates_at_equal_compute(self) -> bool:
        """Whether the difference is beyond noise and each side has at least two runs, which show the spread between seeds."""
        return self.is_beyond_noise and min(len(self.base.files), len(self.recipe.files)) > 1

    def findings(self, scale: RewardScale) -> Iterator[str]:
        """The results as lines."""
        yield f"{self.recipe.label} against {self.base.label}: {self._by_rule(scale)}"
        if self.apart is not None:
            how = "separates" if self.separates_at_equal_compute else "does not separate"
            if self.is_beyond_noise and not self.separates_at_equal_compute:
                how = "more than the samples explain, but one run does not show the spread between seeds"
            yield f"  reward at equal compute: {scale.gains(self.apart)}: {how}"

    def _by_rule(self, scale: RewardScale) -> str:
        """Result of the paper's rule as text."""
        ruled = self.ruled
        if ruled is None:
            return "nothing to fit on one side"
        one, two = (
            float(np.mean([getattr(fitted.point, ruled.by) for fitted in fits]))
            for fits in (ruled.first, ruled.second)
        )
        if ruled.shared_a is None:
            what = f"A {scale.reward(two, 3)} against {scale.reward(one, 3)}"
        else:
            what = f"B {formatting.significant(two)} against {formatting.significant(one)} at A = {scale.reward(ruled.shared_a, 3)}"
        if self.better is Better.UNDECIDED:
            why = "a run is BROKEN" if self.is_broken else "a run is below its own midpoint"
            return f"undecided, {why} ({what})"
        if self.better is Better.TIE:
            return f"no difference ({what})"
        word = "better" if self.better is Better.SECOND else "worse"
        probability = formatting.probability(ruled.probability)
        if self.separates:
            return f"separates: {word}, {what}, with probability {probability}"
        why = "the fits are in doubt" if ruled.probability >= SETTLED else "not settled"
        return f"does not separate, {why} ({word}, {what}, with probability {probability})"

    @property
    def row(self) -> dict[str, Any]:
        """The values of ``comparison.csv``."""
        names = {Better.FIRST: "base", Better.SECOND: "this"}
        ruled = self.ruled
        return {
            "difference": self.apart,
            "by": None if ruled is None else ruled.by,
            "better": names.get(self.better, str(self.better)),
            "probability": None if ruled is None else ruled.probability,
            "separates": self.separates,
            "separates_at_equal_compute": self.separates_at_equal_compute,
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Recipes in the order given; the others are compared with the first one."""

    recipes: tuple[Recipe, ...]
    scale: RewardScale

    @property
    def unit(self) -> str:
        """Unit of compute; empty if unknown or not the same in all files."""
        units = {file.unit for file in self.files}
        return units.pop() if len(units) == 1 else ""

    @property
    def files(self) -> list[CurveFile]:
        return [file for recipe in self.recipes for file in recipe.files]

    @cached_property
    def compute(self) -> float | None:
        """Largest compute that all fitted curves reach, in the unit of the files; None without a fit."""
        fitted = [made.fitted.curve for recipe in self.recipes for made in recipe.made]
        return min((float(curve.compute[-1]) for curve in fitted), default=None)

    @cached_property
    def against(self) -> tuple[Against, ...]:
        """The comparison of each other recipe with the first one.

        Raises:
            AnalysisProblem: the refit at the common asymptote is not possible.
        """
        return tuple(self._against(self.recipes[0], recipe) for recipe in self.recipes[1:])

    def _against(self, base: Recipe, recipe: Recipe) -> Against:
        curves, others = ([made.fitted.curve for made in side.made] for side in (base, recipe))
        try:
            ruled = compare_seeds(curves, others) if curves and others else None
        except CurveError as error:
            raise AnalysisProblem(f"{base.label} against {recipe.label}: {error}") from error
        one, two = self.reward(base), self.reward(recipe)
        return Against(base, recipe, ruled, two.minus(one) if one and two else None)

    def reward(self, recipe: Recipe) -> EqualCompute | None:
        return None if self.compute is None else recipe.reward_at(self.compute)

    def table(self) -> Table:
        """A row for each recipe; its comparison with the first one is in the CSV alone."""
        scale = self.scale
        at = "–" if self.compute is None else formatting.amount(self.compute)

        def reached(found: EqualCompute) -> str:
            return scale.reward(found.mean, 3) if found.interval is None else scale.rewards(found.interval)

        def level(found: EqualCompute) -> Estimate | float:
            return scale.level(found.mean) if found.interval is None else scale.levels(found.interval)

        columns = [
            Column("recipe", "recipe"),
            Column("runs", "runs"),
            Column("A", "A", scale.rewards, scale.levels, interval=True),
            Column("B", "B", formatting.amounts, interval=True),
            Column("Cmid", "Cmid", formatting.amounts, interval=True),
            Column("R0", exported=scale.levels, interval=True),
            Column("compute"),
            Column("reward", f"reward at {at}", reached, level, interval=True),
            Column("state", "state", lambda state: state or "no run"),
            Column("failed"),
            Column("difference", exported=scale.changes, interval=True),
            *map(Column, ("by", "better", "probability", "separates", "separates_at_equal_compute")),
        ]
        nothing = dict.fromkeys(column.name for column in columns)
        rows = [
            nothing
            | {
                "recipe": recipe.label,
                "runs": len(recipe.files),
                **{name: recipe.parameter(name) for name in ("A", "B", "Cmid", "R0")},
                "reward": self.reward(recipe),
                "state": recipe.state,
                "failed": len(recipe.failures),
                "compute": self.compute,
            }
            | (both.row if both else {})
            for recipe, both in zip(self.recipes, (None, *self.against), strict=True)
        ]
        return Table(columns, rows, unknown="–")

    def csv(self) -> str:
        """``comparison.csv``: the table, with the states first."""
        table, first = self.table(), ("recipe", "runs", "state", "failed")
        rank = {name: number for number, name in enumerate(first)}
        columns = sorted(table.columns, key=lambda column: rank.get(column.name, len(rank)))
        return Table(columns, table.rows).csv()

    def findings(self) -> Iterator[str]:
        """Result of each comparison, then failures, problems and doubts of each recipe, as lines."""
        for both in self.against:
            yield from both.findings(self.scale)
        for recipe in self.recipes:
            yield from (
                f"{recipe.label}: {why}" for why in (*recipe.failures, *recipe.problems, *recipe.warnings)
            )
        if len({file.unit for file in self.files}) > 1:
            yield "compute is in different units: B, Cmid and the reward at equal compute are not comparable"

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


def compare(recipes: Mapping[str, Runs], columns: Columns | None = None) -> Comparison:
    """Compare recipes, by label the directories or files of their runs; all are compared with the first one."""
    made = tuple(read_recipe(label, paths, columns) for label, paths in recipes.items())
    return Comparison(made, RewardScale(*(columns or Columns()).scale))
