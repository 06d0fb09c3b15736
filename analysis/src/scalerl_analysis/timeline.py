"""What trainer and generators did when, from ``metrics.jsonl`` and ``trace.jsonl``; also as a trace for Perfetto.

The trainer's phases are exact in their duration. Their order within a step is that of the trainer: publish of
the version before, as far as it delayed the trainer, checkpoint, export, wait, fetch of the batch, forward and backward, optimizer, which ends with the report of the step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from scalerl_analysis.appended import Appended
from scalerl_analysis.metric_series import MetricSeries, decimated
from scalerl_api import trace
from scalerl_api.paths import RunPaths

_AFTER: Final = {
    "publish": "publish_wait_seconds",
    "checkpoint": "checkpoint_seconds",
    "export": "export_seconds",
}
"""Phases after the report of the step before, with their metrics."""
_BEFORE: Final = {
    "optimizer": "optimizer_seconds",
    "forward, backward": "forward_backward_seconds",
    "fetch": "shard_seconds",
    "wait": "wait_seconds",
}
"""Phases before the report, the last one first."""
BUSY: Final = ("forward, backward", "optimizer", "warm start", "lost step")
"""Phases that ``trainer_busy_fraction`` counts; a ``lost step`` was trained again."""
_LEADING: Final = ("warm start", "start")
"""Phases before the first step: ``start`` lasts until generators and trainer have started."""
_MIN_SECONDS: Final = 1e-3
MAX_STEPS: Final = 200
_WAITS: Final = 10
_MIN_WAIT: Final = 0.005
"""Shortest wait that is listed, as a part of the window."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the trainer, in seconds of the run."""

    name: str
    begin: float
    end: float
    step: int


@dataclass(frozen=True, slots=True)
class Group:
    """A group of the trace, without its lists."""

    leased: float
    accepted: float
    generator: str
    slot: int
    step: int
    version: int
    tokens: int
    longest: int


class Timeline:
    """Phases of the trainer and groups of the generators, in seconds of the run. Grows with its files."""

    def __init__(self, path: Path, series: MetricSeries) -> None:
        self._series = series
        self._files = [Appended(path.with_name(f"{path.name}.1")), Appended(path)]
        self._groups: dict[tuple[int, float], Group] = {}
        self._publishes: dict[float, int] = {}

    @classmethod
    def read(cls, directory: str | Path) -> Timeline:
        """The timeline of a run that is read once.

        Raises:
            AnalysisProblem: ``metrics.jsonl`` cannot be read.
        """
        paths = RunPaths(Path(directory))
        made = cls(paths.trace, MetricSeries.read(paths.metrics))
        made.update()
        return made

    def update(self) -> None:
        """Read the new lines of the trace; those that cannot be decoded are left out.

        A file that was renamed is read again; lines that are known already change nothing.
        """
        for _, lines in chain.from_iterable(file.read() for file in self._files):
            for line in lines:
                try:
                    self._add(trace.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue

    def _add(self, line: trace.AnyLine) -> None:
        if isinstance(line, trace.PublishLine):
            self._publishes[line.t] = line.version
        if isinstance(line, trace.GroupLine) and line.leased is not None and line.lengths:
            group = Group(
                *(line.leased, max(line.t, line.leased), line.generator, line.slot, line.step),
                *(line.lease_version, sum(line.lengths), max(line.lengths)),
            )
            self._groups[line.slot, line.leased] = group

    # --- the trainer ------------------------------------------------------------------------------------

    def phases(self, first: int = 0, end: int | None = None) -> Iterator[Phase]:
        names = {*_AFTER.values(), *_BEFORE.values(), "busy_seconds"}
        columns = {name: np.nan_to_num(self._series.column(name)).tolist() for name in names}
        waited, *whole = (
            self._series.column(f"{name}_seconds") for name in ("publish_wait", "publish", "probe")
        )
        # Earlier trainers waited for the whole publish.
        columns["publish_wait_seconds"] = np.where(
            np.isnan(waited), np.nan_to_num(whole).sum(0), waited
        ).tolist()
        reported = self._series.column("wall_seconds").tolist()
        busy = (self._series.column("trainer_busy_fraction") * reported).tolist()
        steps = self._series.column("step").tolist()
        for at in range(first, self._series.rows if end is None else end):
            begin, busy_before = (reported[at - 1], busy[at - 1]) if at else (0.0, 0.0)
            end_, step = reported[at], int(steps[at])
            if not begin <= end_:
                continue  # the clock is not known
            # What the coordinator counts beyond the step: supervised training, or a step that was lost with the trainer.
            more = busy[at] - busy_before - columns["busy_seconds"][at]
            if _MIN_SECONDS < more < end_ - begin:
                yield Phase("lost step" if at else "warm start", begin, begin + more, step if at else -1)
                begin += more
            after, before = [], []
            edge = end_
            for name, metric in _BEFORE.items():
                edge, last = max(begin, edge - columns[metric][at]), edge
                before.append(Phase(name, edge, last, step))
            limit, edge = edge, begin
            for name, metric in _AFTER.items():
                edge, last = min(limit, edge + columns[metric][at]), edge
                after.append(Phase(name, last, edge, step))
            if not at:
                after.append(Phase("start", edge, limit, step))
            yield from (phase for phase in [*after, *reversed(before)] if phase.end > phase.begin)

    def busy_fraction(self) -> float | None:
        """Share of the run's time in which the trainer was busy; None without times."""
        if not self._series.rows:
            return None
        wall = self._series.row(-1).get("wall_seconds", 0.0)
        return sum(p.end - p.begin for p in self.phases() if p.name in BUSY) / wall if wall > 0 else None

    # --- a window ---------------------------------------------------------------------------------------

    def window(
        self, last: int | None, count: int, evaluated: Mapping[int, float] | None = None
    ) -> dict[str, Any]:
        """``count`` steps up to the step ``last`` (default: the newest), as JSON values.

        Args:
            evaluated: versions with an evaluation, and when it ended, in seconds of the run.
        """
        series = self._series
        steps = series.column("step")
        if not series.rows:
            return {"problem": "no step was trained yet"}
        end = series.rows if last is None else max(1, int(np.searchsorted(steps, last, side="right")))
        first = max(0, end - min(count, MAX_STEPS))
        phases = list(self.phases(first, end))
        if not phases:
            return {"problem": "the metrics of these steps have no times"}
        begin, until = phases[0].begin, max(phase.end for phase in phases)
        if leading := [phase.end for phase in phases if phase.name in _LEADING]:
            begin = max(begin, leading[-1] - 0.1 * (until - leading[-1]))
            phases = [phase for phase in phases if phase.end > begin]
        groups = [one for one in self._groups.values() if one.accepted >= begin and one.leased <= until]
        names = sorted({one.generator for one in groups})
        shares: dict[str, float] = {}
        for phase in phases:
            shares[phase.name] = shares.get(phase.name, 0.0) + phase.end - max(begin, phase.begin)
        known = sum(shares.values())
        return {
            "first": int(steps[first]),
            "last": int(steps[end - 1]),
            "of": int(steps[-1]),
            "begin": begin,
            "end": until,
            "trainer": [[p.name, max(begin, p.begin), p.end, p.step] for p in phases],
            "shares": shares | {"other": max(0.0, until - begin - known)},
            "generators": [_in_flight(name, groups, begin, until) for name in names],
            "publishes": [one for one in self._publishes.items() if begin <= one[0] <= until],
            "waits": self._waits(phases, until - begin, evaluated or {}),
            "busy": self.busy_fraction(),
            "traced": bool(self._groups),
        }

    def _waits(
        self, phases: list[Phase], whole: float, evaluated: Mapping[int, float]
    ) -> list[dict[str, Any]]:
        """The longest waits of the trainer in a window of ``whole`` seconds, each with what ended it."""
        waits = [
            phase for phase in phases if phase.name == "wait" and phase.end - phase.begin > _MIN_WAIT * whole
        ]
        longest = heapq.nlargest(_WAITS, waits, key=lambda phase: phase.end - phase.begin)
        by_step: dict[int, list[Group]] = {phase.step: [] for phase in longest}
        for group in self._groups.values():
            if group.step in by_step:
                by_step[group.step].append(group)
        return [
            {
                "step": wait.step,
                "seconds": wait.end - wait.begin,
                "why": _why(wait, by_step[wait.step], evaluated),
            }
            for wait in longest
        ]

    # --- Perfetto ---------------------------------------------------------------------------------------

    def perfetto(self) -> dict[str, Any]:
        """All of it in the JSON format of Chrome's traces, which Perfetto opens: a process for the trainer and for each generator."""
        events: list[dict[str, Any]] = [*_named(1, "trainer"), _thread(1, 1, "steps")]
        events += [_slice(p.name, 1, 1, p.begin, p.end, {"step": p.step}) for p in self.phases()]
        for at, version in self._publishes.items():
            events.append(
                {"ph": "i", "s": "g", "name": f"version {version}", "ts": 1e6 * at, "pid": 1, "tid": 1}
            )
        names = sorted({one.generator for one in self._groups.values()})
        for process, name in enumerate(names, 2):
            events += _named(process, name or "generator not known")
            free: list[float] = []  # ends of the last slice, by thread
            for one in sorted(
                (one for one in self._groups.values() if one.generator == name), key=lambda one: one.leased
            ):
                thread = next((at for at, end in enumerate(free) if end <= one.leased), len(free))
                if thread == len(free):
                    free.append(0.0)
                    events.append(_thread(process, thread + 1, f"group {thread + 1}"))
                free[thread] = one.accepted
                figures = {
                    "slot": one.slot,
                    "step": one.step,
                    "version": one.version,
                    "tokens": one.tokens,
                    "longest": one.longest,
                }
                events.append(
                    _slice(f"slot {one.slot}", process, thread + 1, one.leased, one.accepted, figures)
                )
        return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(process: int, name: str) -> list[dict[str, Any]]:
    return [{"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}]


def _thread(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, process: int, thread: int, begin: float, end: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; times in microseconds."""
    times = {"ts": round(1e6 * begin, 3), "dur": round(1e6 * (end - begin), 3)}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": arguments}


def _in_flight(name: str, groups: list[Group], begin: float, end: float) -> dict[str, Any]:
    """The number of a generator's leased groups over time, and the part of the time with none."""
    own = [one for one in groups if one.generator == name]
    times = np.array([max(begin, one.leased) for one in own] + [min(end, one.accepted) for one in own])
    order = np.argsort(times, kind="stable")
    times, counts = times[order], np.cumsum(np.repeat([1, -1], len(own))[order])
    ends = np.append(times[1:], end)
    idle = (times[0] - begin) + float(np.sum((ends - times)[counts == 0]))
    shown_times, shown_counts = decimated(times, counts)
    return {
        "name": name,
        "groups": len(own),
        "idle": idle / (end - begin) if end > begin else 0.0,
        "times": shown_times,
        "counts": shown_counts,
    }


def _why(wait: Phase, groups: list[Group], evaluated: Mapping[int, float]) -> str:
    """What ended a wait, as far as the trace shows."""
    ends = [(end, version) for version, end in evaluated.items() if wait.begin < end <= wait.end]
    first = "".join(
        f"the evaluation of version {version}, which generators sampled for its first {end - wait.begin:.1f} s; then "
        for end, version in sorted(ends)[-1:]
    )
    if not groups:
        return f"{first}which group came last is not known: the run has no trace of it (spec.trace)"
    last = max(groups, key=lambda one: one.accepted)
    if last.accepted < wait.begin:
        held = f"the evaluation of version {wait.step - 1}, or " if wait.step - 1 in evaluated else ""
        return (
            f"not for rollouts, which were complete {wait.begin - last.accepted:.1f} s before: for {held}the permission to "
            f"publish version {wait.step}"
        )
    age = max(0, wait.step - last.version) if last.version >= 0 else None
    into = last.leased - wait.begin
    leased = f", leased {into:.1f} s into the wait" if into > 0 else ""
    old = f"{age} step{'s' * (age != 1)} old"
    lag = "" if age is None else f", with weights {old}" if age else ", with the newest weights"
    return (
        f"{first}the last of its {len(groups)} groups (slot {last.slot}{leased}) came from {last.generator}, which took "
        f"{last.accepted - last.leased:.1f} s from its lease{lag}; its longest completion has {last.longest:,} tokens"
    )
