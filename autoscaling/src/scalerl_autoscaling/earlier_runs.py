"""Selects the finished runs that are a prior of a run's forecast, and their points."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

from scalerl_api.comparable import comparable
from scalerl_api.curve import curve_points
from scalerl_api.forecast import MAX_EARLIER_RUNS, EarlierRun, Points
from scalerl_api.spec import RunSpec
from scalerl_autoscaling.observation import point, usable

MAX_EXAMINED: Final = 200
"""Most finished runs whose specs are compared, the newest first: each takes some milliseconds."""
_SHOWN: Final = 5
"""Runs that the summary names."""
MAX_POINTS: Final = 100
"""Points of one run; more do not identify its asymptote better."""
MIN_POINTS: Final = 4
"""Fewest points at a compute above 0: a curve has four parameters. A run that failed at its start has fewer."""

ReadEarlier = Callable[[RunSpec], Awaitable[Sequence[EarlierRun]]]
"""Reads the earlier runs of a run, at most ``MAX_EARLIER_RUNS``; leaves out what cannot be read."""
LoadRun = Callable[[], tuple[RunSpec, str]]
"""Loads a finished run: its spec, as it was accepted, and its ``curve.csv``."""


async def select(
    candidates: Iterable[tuple[str, LoadRun]], run: RunSpec, on_read: Callable[[str], None]
) -> list[EarlierRun]:
    """The finished runs that may be a prior of ``run``, at most ``MAX_EARLIER_RUNS``.

    Args:
        candidates: names of finished runs and what loads them, the newest first.
        on_read: called with a summary of what was found.
    """
    runs, left_out = list[EarlierRun](), dict[str, str]()
    for name, load in itertools.islice(candidates, MAX_EXAMINED):
        # In a thread: a curve has up to 16 MiB.
        found = await asyncio.to_thread(_comparable_run, name, load, run)
        if isinstance(found, EarlierRun):
            runs.append(found)
        else:
            left_out[name] = found
        if len(runs) == MAX_EARLIER_RUNS:
            break
    if runs or left_out:
        on_read(_summary(runs, left_out))
    return runs


def _comparable_run(name: str, load: LoadRun, run: RunSpec) -> EarlierRun | str:
    """A finished run for the forecast request of ``run``, or why it is left out."""
    try:
        spec, table = load()
        if spec.fork is not None or (run.fork is not None and run.fork.run == name):
            # Counted twice, the points of both would narrow the forecast.
            return "a fork and its source have points in common"
        why = comparable(spec, run)
        return why or earlier_run(name, table) or f"fewer than {MIN_POINTS} evaluations after its start"
    except Exception as error:
        # Another user or an older release may have written the files; one unreadable run must not prevent the forecast.
        return f"it cannot be read: {error}"


def _summary(runs: Sequence[EarlierRun], left_out: Mapping[str, str]) -> str:
    count = f"{len(runs)} finished run{'s' if len(runs) != 1 else ''}"
    found = f"{count} may be a prior of the forecast"
    if runs:
        found += f": {_listed([run.name for run in runs])}"
    if left_out:
        found += (
            f"; {len(left_out)} left out: {_listed([f'{name} ({why})' for name, why in left_out.items()])}"
        )
    return found


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", …" if len(items) > _SHOWN else "")


def earlier_run(name: str, table: str) -> EarlierRun | None:
    """A finished run for a forecast request; None with fewer than ``MIN_POINTS``.

    Args:
        table: its ``curve.csv``. The evaluations of the last evaluation set, each of one weight version, at most ``MAX_POINTS``.

    Raises:
        ValueError: ``table`` is not a curve.
    """
    used = usable([point(evaluation) for evaluation in curve_points(table)])
    last = list(itertools.takewhile(lambda p: p.eval_version == used[-1].eval_version, reversed(used)))[::-1]
    if sum(p.tokens > 0 for p in last) < MIN_POINTS:
        return None
    thinned = [last[i] for i in evenly([p.tokens for p in last], MAX_POINTS)]
    return EarlierRun(
        name=name,
        points=Points(
            compute=[float(p.tokens) for p in thinned],
            reward=[p.reward for p in thinned if p.reward is not None],
            samples=[float(p.samples) for p in thinned],
            eval_version=last[-1].eval_version,
        ),
    )


def evenly(compute: Sequence[float], most: int) -> list[int]:
    """Indices of at most ``most`` points, evenly in log compute; the first and the last point are among them.

    Args:
        compute: ascending, from 0.

    >>> evenly([0, 1, 2, 3, 4, 5, 6, 7, 8], 5)
    [0, 1, 2, 4, 8]
    """
    if len(compute) <= most:
        return list(range(len(compute)))
    first = next(i for i, c in enumerate(compute) if c > 0)
    low, high = math.log(compute[first]), math.log(compute[-1])
    kept, i = {0, len(compute) - 1}, first
    for step in range(most - 2):
        aim = math.exp(low + (high - low) * step / (most - 2))
        while compute[i] < aim * (1.0 - 1e-12):
            i += 1
        kept.add(i)
    return sorted(kept)
