"""Rules for what is wrong first in a run, from lines of ``metrics.jsonl``: for ``scalerl status`` and, on a cluster, a condition."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

Row = dict[str, float]

LAST: Final = 10
"""Steps that are judged."""
LONG: Final = 3 * LAST
"""Steps from which on they are compared with the first ones."""
RAISED: Final = 3
"""Consecutive steps after which a problem of a run that goes on is reported."""


@dataclass(frozen=True)
class Steps:
    """Lines of ``metrics.jsonl``, by step."""

    first: Sequence[Row]
    """The first :data:`LAST` ones; empty in a run of fewer than :data:`LONG`."""
    last: Sequence[Row]
    failing_since: int | None = None
    """Step at which the verifier began to fail (:func:`since`), if all rows are known."""

    def total(self, name: str) -> float:
        return sum(row.get(name, 0.0) for row in self.last)

    def share(self, part: str, whole: str) -> float:
        """Of two sums over the last steps; 0 without a whole."""
        return self.total(part) / total if (total := self.total(whole)) else 0.0

    def means(self, name: str) -> tuple[float, float] | None:
        """Means over the first and over the last steps; None if one is not known."""
        found = [[row[name] for row in rows if name in row] for rows in (self.first, self.last)]
        return (fmean(found[0]), fmean(found[1])) if all(found) else None


def since(failing: Iterable[int]) -> int | None:
    """Where the last stretch of ``failing`` steps, ascending, begins: they follow each other within :data:`LAST` steps.

    >>> since([3, 4, 20, 25]), since([])
    (20, None)
    """
    first: int | None = None
    before: int | None = None
    for step in failing:
        first = step if before is None or step - before > LAST else first
        before = step
    return first


def failing(rows: Iterable[Row]) -> list[int]:
    """Steps in which the verifier failed."""
    return [int(row["step"]) for row in rows if row.get("grading_errors")]


def _skipped(steps: Steps) -> str | None:
    skipped, of = int(steps.total("skipped")), len(steps.last)
    text = f"{skipped} of the last {of} updates were not applied: non-finite values or exploding ratios"
    return text if skipped >= max(2, 0.2 * of) else None


def _checkpoints(steps: Steps) -> str | None:
    failures = steps.last[-1].get("checkpoint_failures", 0) - steps.last[0].get("checkpoint_failures", 0)
    return f"checkpoints could not be written: {failures:.0f} in the last steps" if failures > 0 else None


def _ungraded(steps: Steps) -> str | None:
    share = steps.share("grading_errors", "rollouts")
    if share < 0.01:
        return None
    begun = since(failing(steps.last)) if steps.failing_since is None else steps.failing_since
    return f"the verifier failed for {share:.0%} of the completions since step {(begun or 0) + 1}"


def _given_up(steps: Steps) -> str | None:
    share = steps.share("given_up_groups", "groups")
    return (
        f"{share:.0%} of the prompts got no completions: too long, or failed too often"
        if share >= 0.05
        else None
    )


def _no_reward(steps: Steps) -> str | None:
    rewards = [row["reward"] for row in steps.last if "reward" in row]
    return "no completion of the last steps scored above 0" if rewards and not any(rewards) else None


def _mismatch(steps: Steps) -> str | None:
    found = [row["ratio_kl"] for row in steps.last if "ratio_kl" in row]
    kl = fmean(found) if found else 0.0
    return f"the policy differs by {kl:.2g} nats (KL) between sampling and training" if kl > 0.05 else None


def _gradient(steps: Steps) -> str | None:
    """Medians: a single large gradient is clipped and harmless."""
    before, now = (
        [row["grad_norm"] for row in rows if row.get("applied", 1.0) and "grad_norm" in row]
        for rows in (steps.first, steps.last)
    )
    if not before or not now or median(now) <= 10 * median(before):
        return None
    return f"the gradient norm has grown from {median(before):.2g} to {median(now):.2g}"


def _entropy(steps: Steps) -> str | None:
    means = steps.means("entropy")
    if means is None or means[1] >= 0.1 * means[0]:
        return None
    return f"the entropy has fallen from {means[0]:.2g} to {means[1]:.2g} nats: completions of a prompt are nearly alike"


def _shorter(steps: Steps) -> str | None:
    rewards, tokens = steps.means("reward"), steps.means("mean_completion_tokens")
    if rewards is None or tokens is None or rewards[1] < rewards[0] + 0.05 or tokens[1] > 0.6 * tokens[0]:
        return None
    return (
        f"the reward rose from {rewards[0]:.2f} to {rewards[1]:.2f} while completions shrank from {tokens[0]:.0f} to "
        f"{tokens[1]:.0f} tokens: read some (scalerl rollouts)"
    )


def _truncated(steps: Steps) -> str | None:
    cut = sum(row.get("truncated_fraction", 0.0) * row.get("rollouts", 0.0) for row in steps.last)
    share = cut / max(1.0, steps.total("rollouts"))
    return f"{share:.0%} of the completions are cut off at their maximum length" if share >= 0.1 else None


def _no_gradient(steps: Steps) -> str | None:
    share = steps.share("filtered_groups", "groups")
    unsolved, solved = (
        fmean([row.get(f"{name}_groups_fraction", 0.0) for row in steps.last])
        for name in ("unsolved", "solved")
    )
    text = f"{share:.0%} of the prompts have no gradient: {unsolved:.0%} score only 0 and {solved:.0%} only 1"
    return text if share >= 0.8 else None


def _waiting(steps: Steps) -> str | None:
    seconds = steps.last[-1].get("wall_seconds", 0.0) - steps.last[0].get("wall_seconds", 0.0)
    waited = sum(row.get("wait_seconds", 0.0) for row in steps.last[1:])
    share = min(1.0, waited / seconds) if seconds > 0 else 0.0
    return f"the trainer waits {share:.0%} of the time for rollouts" if share >= 0.3 else None


RULES: Final[Sequence[Callable[[Steps], str | None]]] = (
    _skipped,
    _checkpoints,
    _ungraded,
    _given_up,
    _no_reward,
    _mismatch,
    _gradient,
    _entropy,
    _shorter,
    _truncated,
    _no_gradient,
    _waiting,
)
"""The most harmful first; each returns a sentence, or None. ``docs/operations.md`` has the table."""


def broken_rule(steps: Steps) -> tuple[str, str] | None:
    """Name and sentence of the first rule that says something; None if none does."""
    found = ((rule.__name__, rule(steps)) for rule in RULES)
    return next(((name, text) for name, text in found if text is not None), None)


def health(steps: Steps) -> str | None:
    """What is wrong first; None if nothing is known to be."""
    found = broken_rule(steps)
    return None if found is None else found[1]


def rows_of(lines: Iterable[bytes]) -> list[Row]:
    """The lines that are rows: the last one may be incomplete while the run goes on."""
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append({k: v for k, v in row.items() if isinstance(v, int | float) and math.isfinite(v)})
    return rows


class HealthMonitor:
    """What is wrong first in a run that goes on, as a sentence that stays the same while it is so.

    From the :data:`LAST`-th step on, a rule is reported once it is the first one for :data:`RAISED` steps, and until another, or none,
    is for :data:`LAST` steps. Figures are those of the step at which it was reported.
    """

    problem: str
    """Empty if nothing is known to be wrong."""
    rule: str

    def __init__(self) -> None:
        self.load([])

    def load(self, rows: Iterable[Row]) -> None:
        """Begin again, with the rows of a run's first and latest steps, in order."""
        self.problem = self.rule = self._found = ""
        self._steps = 0
        self._first: list[Row] = []
        self._last = deque[Row](maxlen=LAST)
        self._failing: list[int] = []
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        if len(self._first) < LAST and row["step"] == len(self._first):
            self._first.append(row)
        self._last.append(row)
        self._failing += failing([row])
        first = self._first if row["step"] + 1 >= LONG else []
        steps = Steps(first, list(self._last), since(self._failing))
        judged = broken_rule(steps) if len(self._last) == LAST else None
        rule, text = judged or ("", "")
        self._steps = self._steps + 1 if rule == self._found else 1
        self._found = rule
        if rule != self.rule and self._steps >= (LAST if self.rule else RAISED):
            self.rule, self.problem = rule, text and f"{text} (at step {row['step'] + 1:.0f})"
