"""Finished runs as a prior of a run's forecast: which of them, and which of their points. Pure but for the reading."""

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
from scalerl_operator.autoscaling.observation import point, usable

MOST_EXAMINED: Final = 200
"""Finished runs whose spec is compared, the newest first: each costs some milliseconds."""
_SHOWN: Final = 5
MOST_POINTS: Final = 100
"""Of one run: more say no more of where it came to."""
LEAST_POINTS: Final = 4
"""At a compute above 0: a curve has four parameters. A run that failed at its start has fewer."""

ReadEarlier = Callable[[RunSpec], Awaitable[Sequence[EarlierRun]]]
"""Gives the earlier runs of a run, at most ``MAX_EARLIER_RUNS``; what cannot be read is left out."""


def consider(name: str, load: Callable[[], tuple[RunSpec, str]], run: RunSpec) -> EarlierRun | str:
    """A finished run as the forecast of ``run`` is asked with it, or why it is left out.

    load: gives its spec, as it was accepted, and its ``curve.csv``.
    """
    try:
        spec, table = load()
        why = comparable(spec, run)
        if why:
            return why
        return earlier_run(name, table) or f"fewer than {LEAST_POINTS} evaluations after its start"
    except Exception as error:
        # Anybody may have written there, and a release of any age: one run must not cost the others.
        return f"it cannot be read: {error}"


async def select(
    candidates: Iterable[tuple[str, Callable[[], tuple[RunSpec, str]]]],
    run: RunSpec,
    on_read: Callable[[str], None],
) -> list[EarlierRun]:
    """The finished runs that may be a prior of ``run``, at most ``MAX_EARLIER_RUNS``.

    candidates: names of finished runs and what loads them, see :func:`consider`; the newest first.
    on_read: called with a summary of what was found.
    """
    runs, left_out = list[EarlierRun](), dict[str, str]()
    for name, load in itertools.islice(candidates, MOST_EXAMINED):
        # In a thread: a curve has up to 16 MiB.
        found = await asyncio.to_thread(consider, name, load, run)
        if isinstance(found, EarlierRun):
            runs.append(found)
        else:
            left_out[name] = found
        if len(runs) == MAX_EARLIER_RUNS:
            break
    if runs or left_out:
        on_read(_summary(runs, left_out))
    return runs


def _summary(runs: Sequence[EarlierRun], left_out: Mapping[str, str]) -> str:
    """The runs considered, in a sentence."""
    names = ", ".join(run.name for run in runs[:_SHOWN]) + (", …" if len(runs) > _SHOWN else "")
    count = f"{len(runs)} finished run{'s' if len(runs) != 1 else ''}"
    found = f"{count} may be a prior of the forecast" + (f": {names}" if runs else "")
    if not left_out:
        return found
    shown = [f"{name} ({why})" for name, why in itertools.islice(left_out.items(), _SHOWN)]
    more = ", …" if len(left_out) > _SHOWN else ""
    return f"{found}; {len(left_out)} left out: {', '.join(shown)}{more}"


def earlier_run(name: str, table: str) -> EarlierRun | None:
    """A finished run as the forecast is asked with it; None if its curve says too little.

    table: its ``curve.csv``. The last evaluation set's evaluations, each of one weight version, at most ``MOST_POINTS``.

    Raises:
        ValueError: it is no curve.
    """
    used = usable([point(evaluation) for evaluation in curve_points(table)])
    last = list(itertools.takewhile(lambda p: p.eval_version == used[-1].eval_version, reversed(used)))[::-1]
    if sum(p.tokens > 0 for p in last) < LEAST_POINTS:
        return None
    thin = [last[i] for i in evenly([p.tokens for p in last], MOST_POINTS)]
    return EarlierRun(
        name=name,
        points=Points(
            compute=[float(p.tokens) for p in thin],
            reward=[p.reward for p in thin if p.reward is not None],
            samples=[float(p.samples) for p in thin],
            eval_version=last[-1].eval_version,
        ),
    )


def evenly(compute: Sequence[float], most: int) -> list[int]:
    """Indices of at most ``most`` points, evenly in log compute; the first and the last point are among them.

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
