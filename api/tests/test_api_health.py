"""The health of a run that goes on: a problem is reported late, stays as it is, and does not flap."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from scalerl_api.health import LAST, LONG, RAISED, HealthMonitor, Steps, health, rows_of, since

Row = dict[str, float]


def row(step: int, truncated: float = 0.0, skipped: int = 0) -> Row:
    return {"step": step, "rollouts": 10, "truncated_fraction": truncated, "skipped": skipped}


def after(*parts: tuple[int, Row]) -> list[str]:
    """The problem after each step: so many steps with such figures, one part after the other."""
    monitor, said = HealthMonitor(), []
    for steps, figures in parts:
        for _ in range(steps):
            monitor.add(figures | {"step": len(said)})
            said.append(monitor.problem)
    return said


def test_problem_is_reported_after_some_steps_and_keeps_its_figures() -> None:
    said = after((20, row(0)), (LAST, row(0, 0.5)), (20, row(0, 0.9)))
    # 10 % of the last 10 are cut off as soon as two of them have 50 %.
    begin = 20 + 1 + RAISED
    assert not any(said[: begin - 1])
    assert set(said[begin:]) == {"20% of the completions are cut off at their maximum length (at step 24)"}


def test_problem_is_reported_until_ten_steps_without() -> None:
    said = after((20, row(0, 0.5)), (40, row(0)))
    # Of the last 10 steps, less than 10 % are cut off from the ninth of them on.
    assert [bool(text) for text in said[20:]].index(False) == 8 + LAST - 1
    assert not any(said[-20:])


@pytest.mark.parametrize("every", [2, 3, 7])
def test_figures_around_a_threshold_change_nothing_often(every: int) -> None:
    monitor, said = HealthMonitor(), []
    for step in range(200):
        monitor.add(row(step, 1.0 if step % (LAST + every) == 0 else 0.0))
        said.append(monitor.problem)
    assert sum(a != b for a, b in pairwise(said)) <= 1


def test_more_harmful_problem_replaces_another() -> None:
    said = after((20, row(0, 0.5)), (30, row(0, 0.5, 1)))
    assert "cut off" in said[20]
    assert "were not applied" in said[-1]
    assert len(set(said)) == 3


def test_short_run_is_not_judged() -> None:
    assert not any(after((LAST - 1, row(0, 1.0))))


def test_first_steps_are_compared_in_a_long_run_alone() -> None:
    for steps in (LONG, LONG + RAISED):
        monitor = HealthMonitor()
        for step in range(steps):
            monitor.add({"step": step, "entropy": 1.0 if step < LAST else 0.01})
        assert ("entropy" in monitor.problem) == (steps >= LONG + RAISED - 1)


def test_verifier_fails_since_the_step_at_which_it_began() -> None:
    """Not since the oldest of the judged steps; an earlier failure that ended is another one."""
    monitor = HealthMonitor()
    for step in range(60):
        monitor.add({"step": step, "rollouts": 100, "grading_errors": 5 * (step == 2) or 20 * (step >= 40)})
    assert monitor.problem == "the verifier failed for 6% of the completions since step 41 (at step 43)"
    last = [{"step": step, "rollouts": 100, "grading_errors": 20.0} for step in range(50, 60)]
    assert health(Steps([], last, since([2, *range(20, 60)]))) == (
        "the verifier failed for 20% of the completions since step 21"
    )


def test_load_as_after_the_steps() -> None:
    monitor = HealthMonitor()
    rows = [row(step, 0.5 * (step > 12)) for step in range(60)]
    for one in rows:
        monitor.add(one)
    loaded = HealthMonitor()
    loaded.add(row(0, 1.0))
    loaded.load(rows_of(json.dumps(one).encode() for one in [*rows[:LAST], *rows[-LONG:]]))
    assert loaded.problem.partition(" (")[0][-30:] == monitor.problem.partition(" (")[0][-30:] != ""
    loaded.load([])
    assert loaded.problem == ""
