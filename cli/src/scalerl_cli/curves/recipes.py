"""Any number of recipes side by side, each with one or more runs: the paper's rule, and the reward at equal compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scalerl_cli.curves import formatting
from scalerl_cli.curves.analysis import Analysis, State
from scalerl_cli.curves.comparison import SETTLED
from scalerl_cli.curves.scale import RewardScale
from scalerl_cli.curves.source import CurveFile
from scalerl_curvefit import Better, Estimate, SeedComparison, compare_seeds, draws
from scalerl_curvefit.compare import A_MARGIN
from scalerl_curvefit.sampling import interval


@dataclass(frozen=True, eq=False)
class Recipe:
    """A recipe and what its runs left.

    files: curves of the runs that have one. made: fits of those that can be fitted. problems: why a curve cannot be.
    failures: a reason for each run that failed; its curve is in no fit.
    """

    label: str
    files: tuple[CurveFile, ...] = ()
    made: tuple[Analysis, ...] = ()
    problems: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    def parameter(self, name: str) -> Estimate | None:
        """Median and 90 % interval of a parameter of a run of this recipe, over the draws of all its fits."""
        if not self.made:
            return None
        low, median, high = interval(
            np.concatenate([getattr(draws(made.fitted), name) for made in self.made])
        )
        return Estimate(float(median), float(low), float(high))

    @property
    def state(self) -> str:
        """The worst of its fits, and how many runs failed or cannot be fitted."""
        states = {made.state for made in self.made}
        worst = [s for s in (State.BROKEN, State.INSUFFICIENT, State.OK) if s in states][:1]
        counts = [(len(self.failures), "failed"), (len(self.problems), "without a fit")]
        return ", ".join([*map(str, worst), *(f"{n} {what}" for n, what in counts if n)])

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why its fits are not to be believed yet, each once."""
        return tuple(dict.fromkeys(doubt for made in self.made for doubt in made.doubts))

    def reward_at(self, compute: float) -> EqualCompute | None:
        """None where no curve reaches so far."""
        return EqualCompute.of([at for file in self.files if (at := _interpolated(file, compute))])


@dataclass(frozen=True)
class EqualCompute:
    """The mean reward of a recipe's runs at one compute, as evaluated: no fit is in it.

    mean: over the runs. variance: of one run: that between the runs, but at least that of an evaluation's samples; 0 where
    it is unknown. runs: how many.
    """

    mean: float
    variance: float
    runs: int

    @classmethod
    def of(cls, found: Sequence[tuple[float, float]]) -> EqualCompute | None:
        """From (reward, variance of the evaluation) of each run."""
        if not found:
            return None
        rewards, noise = np.array(found).T
        between = float(np.var(rewards, ddof=1)) if len(found) > 1 else 0.0
        return cls(float(rewards.mean()), max(between, float(noise.mean())), len(found))

    @property
    def interval(self) -> Estimate | None:
        """90 %: Student's t over the runs; of one run the evaluation's samples alone. None where the noise is unknown."""
        if not self.variance:
            return None
        half = _t90(self.runs - 1) * math.sqrt(self.variance / self.runs)
        return Estimate(self.mean, self.mean - half, self.mean + half)

    def minus(self, other: EqualCompute) -> Estimate | None:
        """The difference with its 90 % interval."""
        if not (self.variance and other.variance):
            return None
        freedom = (self.runs - 1) + (other.runs - 1) if min(self.runs, other.runs) > 1 else 0
        half = _t90(freedom) * math.sqrt(self.variance / self.runs + other.variance / other.runs)
        apart = self.mean - other.mean
        return Estimate(apart, apart - half, apart + half)


def _t90(freedom: int) -> float:
    """Half width of a 90 % interval in standard errors; the normal distribution's where the spread of runs is unknown."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.95)) if freedom else 1.645


def _interpolated(file: CurveFile, compute: float) -> tuple[float, float] | None:
    """Reward and variance of its noise between the two evaluations around ``compute``, on the file's axis."""
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
    """A recipe against the first one. ruled: None where either has no fit. apart: of the reward at equal compute."""

    base: Recipe
    recipe: Recipe
    ruled: SeedComparison | None
    apart: Estimate | None

    @property
    def better(self) -> Better:
        """By the paper's rule; undecided where a run is BROKEN, for its curve has ended."""
        broken = any(made.state is State.BROKEN for made in (*self.base.made, *self.recipe.made))
        return Better.UNDECIDED if self.ruled is None or broken else self.ruled.better

    @property
    def separates(self) -> bool:
        """By the rule, with a probability of `SETTLED` and without a doubt of either fit."""
        decided = self.better in (Better.FIRST, Better.SECOND)
        doubted = self.base.doubts or self.recipe.doubts
        return decided and self.ruled is not None and self.ruled.probability >= SETTLED and not doubted

    @property
    def beyond_noise(self) -> bool:
        """The 90 % interval of the difference at equal compute leaves out 0."""
        return self.apart is not None and not self.apart.low <= 0.0 <= self.apart.high

    @property
    def separates_at_equal_compute(self) -> bool:
        """The same, where each side has the runs that tell the spread between seeds."""
        return self.beyond_noise and min(len(self.base.files), len(self.recipe.files)) > 1

    def values(self) -> tuple[float, float] | None:
        """Mean over the runs of the least-squares A or B that the rule compares, of base and recipe."""
        if self.ruled is None:
            return None
        one, two = (
            float(np.mean([getattr(fitted.point, self.ruled.by) for fitted in fits]))
            for fits in (self.ruled.first, self.ruled.second)
        )
        return one, two


@dataclass(frozen=True, eq=False)
class Table:
    """Recipes in the order they were given, the first one the base that the others are compared with."""

    recipes: tuple[Recipe, ...]
    scale: RewardScale
    unit: str

    @cached_property
    def compute(self) -> float | None:
        """The most that every curve with a fit reaches. One that ended before it could be fitted compares nothing."""
        fitted = [made.fitted.curve for recipe in self.recipes for made in recipe.made]
        ends = [float(curve.compute[-1]) for curve in fitted]
        return min(ends, default=None)

    @cached_property
    def against(self) -> tuple[Against, ...]:
        """All but the first, each against the first."""
        base = self.recipes[0]
        return tuple(self._against(base, recipe) for recipe in self.recipes[1:])

    def _against(self, base: Recipe, recipe: Recipe) -> Against:
        ruled = None
        if base.made and recipe.made:
            one_side, other = ([made.fitted.curve for made in side.made] for side in (base, recipe))
            ruled = compare_seeds(one_side, other)
        one, two = self.reward(base), self.reward(recipe)
        return Against(base, recipe, ruled, two.minus(one) if one and two else None)

    def reward(self, recipe: Recipe) -> EqualCompute | None:
        """At the common compute."""
        return None if self.compute is None else recipe.reward_at(self.compute)

    def rows(self) -> list[list[str]]:
        """The table as it is printed, its heads first."""
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
        """What separates and what does not, a line or more a recipe."""
        for both in self.against:
            yield f"{both.recipe.label} against {both.base.label}: {self._rule(both)}"
            if both.apart is not None:
                seeds = both.beyond_noise and not both.separates_at_equal_compute
                how = (
                    "more than the samples explain, but one run says nothing of other seeds"
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

    def _rule(self, both: Against) -> str:
        """The paper's rule in words."""
        values = both.values()
        if both.ruled is None or values is None:
            return "nothing to fit on one side"
        by_a = both.ruled.by == "A"
        one, two = (self.scale.reward(v, 3) if by_a else formatting.significant(v) for v in values)
        what = f"A {two} against {one}" if by_a else f"B {two} against {one} at A = {self._shared(both)}"
        if both.better is Better.UNDECIDED:
            broken = both.ruled.better is not Better.UNDECIDED
            why = "a run is BROKEN" if broken else "a run is below its own midpoint"
            return f"undecided, {why} ({what})"
        if both.better is Better.TIE:
            return f"no difference ({what})"
        word = "better" if both.better is Better.SECOND else "worse"
        probability = formatting.probability(both.ruled.probability)
        if both.separates:
            return f"separates: {word}, {what}, with probability {probability}"
        why = "the fits are in doubt" if both.ruled.probability >= SETTLED else "not settled"
        return f"does not separate, {why} ({word}, {what}, with probability {probability})"

    def _shared(self, both: Against) -> str:
        shared = None if both.ruled is None else both.ruled.shared_a
        return "–" if shared is None else self.scale.reward(shared, 3)

    def notes(self) -> Iterator[str]:
        """What the numbers are."""
        margin = self.scale.difference(A_MARGIN, 2)
        yield (
            "A, B, Cmid: median and 90 % interval of the fit, over all runs of a recipe: of one run of it, not of their mean."
        )
        yield (
            f"A recipe separates from the first one by A where the least-squares A differ by more than {margin}, else by B at "
            f"their mean A, if a run of the better one is ahead with a probability of {formatting.reward(SETTLED)} or more."
        )
        yield (
            "Reward at equal compute: evaluations, interpolated, at the most compute that all runs have; mean and 90 % interval "
            "over the runs. With one run the interval is of the evaluation's samples alone, and says nothing of other seeds."
        )
        if len(self.against) > 1:
            chance = formatting.amount(0.1 * len(self.against))
            yield f"Of {len(self.against)} comparisons at 90 % about {chance} separate by chance."
        if self.unit:
            yield f"Compute is in {self.unit}."

    def csv_rows(self) -> Iterator[dict[str, Any]]:
        """A row a recipe, as numbers."""
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
            ruled = None if both is None else both.ruled
            row |= {
                "by": ruled and ruled.by,
                "better": {Better.FIRST: "base", Better.SECOND: "this"}.get(both.better, str(both.better))
                if both
                else None,
                "probability": ruled and ruled.probability,
                "separates": both and both.separates,
                "separates_at_equal_compute": both and both.separates_at_equal_compute,
            }
            yield row


def _cell(found: Estimate | None, shown: Callable[[Estimate], str]) -> str:
    return "–" if found is None else shown(found)


def _columns(name: str, found: Estimate | None) -> dict[str, float | None]:
    ends = (None, None, None) if found is None else (found.median, found.low, found.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
