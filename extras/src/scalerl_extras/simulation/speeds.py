"""Estimates the speeds of generation and training of a traced cluster."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from scalerl_api import trace
from scalerl_extras.simulation.fleet import Fleet
from scalerl_extras.simulation.trace_file import RunTrace, verification
from scalerl_extras.simulation.workload import Cluster, DecodeSpeed, Drafts, Group, Workload

_SEQUENCES = 4000
"""Number of sequences that determines a fit, which simulates them about a hundred times."""


@dataclass(frozen=True)
class _Lease:
    """A measured group in a sample. Of a group that was already running when the sample begins, only the rest."""

    line: trace.GroupLine
    time: float
    """Seconds since the start of the run at which it begins in the sample."""
    lengths: list[int]
    """Tokens of each completion in the sample."""
    timed: bool
    """Whether the sample has all concurrent groups from start to end, so that the duration of this one can be compared."""


def fit_decode(run: RunTrace) -> DecodeSpeed:
    """Seconds of a decoding step by running sequences and drafted tokens; 0 without measured groups.

    Least squares (soft L1) between the durations of groups in the trace and in a simulation that starts them at the times of
    their leases. In a long trace, the groups of a few generators are enough. Without drafts in the trace, a drafted token is
    assumed to cost as much as a sequence.
    """
    samples = _samples(run)
    leases = [lease for sample in samples for lease in sample]
    if not leases:
        return DecodeSpeed(0.0, 0.0)
    generators = _Generators(run, samples)
    lines = [lease.line for lease in leases]
    timed_n = [lease.timed for lease in leases]
    seconds_n = np.array([line.seconds for line in lines])
    per_token_n = seconds_n / [max(line.lengths) for line in lines]
    sequence_seconds = per_token_n @ [sum(line.lengths) for line in lines]
    spans = [max(one.line.t for one in sample) - min(one.time for one in sample) for sample in samples]
    running = float(np.clip(sequence_seconds / max(sum(spans), 1e-6), 1, run.settings.concurrency))
    drafts = any(line.drafted_tokens for line in lines)
    # Initial guess: half of the time is fixed, half is for the sequences, and a drafted token costs as much as a sequence.
    guess = np.array([1.0, 1 / running, 1 / running])[: 2 + drafts] * np.median(per_token_n) / 2

    def errors(multiples: NDArray[np.float64]) -> NDArray[np.float64]:
        error_n: NDArray[np.float64] = generators.durations(DecodeSpeed(*(guess * multiples))) - seconds_n
        return error_n[timed_n]

    found = least_squares(
        errors,
        np.ones(len(guess)),
        bounds=(0, np.inf),
        diff_step=1e-3,  # the next sequence that starts depends on the speeds: smaller differences meet kinks
        loss="soft_l1",
        f_scale=0.1 * float(np.median(seconds_n)),
        max_nfev=30,
    )
    base, per_sequence, *per_draft = map(float, guess * found.x)
    return DecodeSpeed(base, per_sequence, per_draft[0] if drafts else per_sequence)


def _samples(run: RunTrace) -> list[list[_Lease]]:
    """Measured groups, enough for a fit: alternately the first and the last groups of a generator."""
    by_generator: dict[str, list[trace.GroupLine]] = {}
    for line in run.generated:
        # A coordinator that lost its last records to a full disk restarts at an earlier run time, so t may be before leased.
        if line.leased is not None and line.leased < line.t and line.seconds > 1e-6 and max(line.lengths):
            by_generator.setdefault(line.generator, []).append(line)
    most = max(_SEQUENCES, 16 * run.settings.concurrency) // run.settings.completions_per_prompt
    half = max(1, most // 2)
    each = list(by_generator.values())
    found: list[list[_Lease]] = []
    for number, own in enumerate(each * 2 if len(each) == 1 and len(each[0]) > half else each):
        own.sort(key=lambda line: line.leased or 0.0)
        first = max(0, len(own) - half) if number % 2 else 0
        found.append(_sample(own, first, min(first + half, len(own))))
        if sum(map(len, found)) >= most:
            break
    return found


def _sample(own: Sequence[trace.GroupLine], first: int, last: int) -> list[_Lease]:
    """Groups ``first`` to ``last`` (exclusive) of a generator, and the rest of the groups that run when these begin."""
    begin = own[first].leased or 0.0
    end = own[last].leased or 0.0 if last < len(own) else np.inf
    sample = []
    for line in own[:last]:
        leased = line.leased or 0.0
        done = int(max(0.0, begin - leased) / line.seconds * max(line.lengths))
        if lengths := [tokens - done for tokens in line.lengths if tokens > done]:
            sample.append(_Lease(line, max(leased, begin), lengths, leased >= begin and line.t <= end))
    return sample


class _Generators:
    """Simulates each sample on its own generator."""

    def __init__(self, run: RunTrace, samples: Sequence[Sequence[_Lease]]) -> None:
        self._leases = [(at, lease) for at, sample in enumerate(samples) for lease in sample]
        groups = [
            Group((0, n), tuple(lease.lengths), Drafts.measured(*verification(lease.line), fixed=True))
            for n, (_, lease) in enumerate(self._leases)
        ]
        self._work = Workload(groups, 1)
        self._count, self._concurrency = len(samples), run.settings.concurrency
        events = [(lease.time, "lease", n) for n, (_, lease) in enumerate(self._leases)]
        for begin, end in _pauses(run):
            events += [(begin, "pause", 0), (end, "resume", 0)]
        self._events = sorted(events, key=lambda event: event[0])

    def durations(self, decode: DecodeSpeed) -> NDArray[np.float64]:
        """(n,) seconds from the lease of each group to its end."""
        fleet = Fleet(Cluster(self._count, self._concurrency, decode, 0.0, 0.0, 0.0), self._work)
        unfinished = [len(group.lengths) for group in self._work.groups]
        seconds = np.zeros(len(unfinished))
        events = self._events[::-1]
        while events or fleet.next_time() < np.inf:
            if events and events[-1][0] <= fleet.next_time():
                now, event, n = events.pop()
                if event == "lease":
                    at, lease = self._leases[n]
                    fleet.start(at, n, list(enumerate(lease.lengths)), now)
                elif event == "pause":
                    fleet.pause(now)
                else:
                    fleet.resume(0, now)
            else:
                ended = fleet.finish()
                unfinished[ended.group] -= 1
                if not unfinished[ended.group]:
                    seconds[ended.group] = ended.time - self._leases[ended.group][1].time
        return seconds


def fit_trainer(run: RunTrace) -> tuple[float, float]:
    """Fixed seconds of a training step, and seconds per token, by non-negative least squares.

    A step begins with its last group or with the publish before it, whichever is later, and ends with the trainer's report.
    """
    publishes = _publishes(run)
    tokens: dict[int, int] = {}
    last_group: dict[int, float] = {}
    for line in run.groups:
        tokens[line.step] = tokens.get(line.step, 0) + sum(line.lengths)
        last_group[line.step] = max(line.t, last_group.get(line.step, 0.0))
    rows, seconds = [], []
    for step in run.steps:
        _, published = publishes.get(step.step, (0.0, 0.0))
        begin = max(last_group[step.step], published)
        rows.append([1.0, tokens[step.step]])
        seconds.append(max(step.busy_seconds, step.t - begin))
    fixed, per_token = nnls(np.array(rows), np.array(seconds))[0]
    return float(fixed), float(per_token)


def publish_seconds(run: RunTrace) -> float:
    """Median of the seconds between the report of a step and the publish of its weights."""
    return statistics.median([end - begin for begin, end in _publishes(run).values()] or [0.0])


def _pauses(run: RunTrace) -> list[tuple[float, float]]:
    """Assumed pauses of generators for new weights: (begin, end) in seconds.

    A pause is at most the median: a publish that waited for an evaluation did not pause generators meanwhile.
    """
    longest = publish_seconds(run)
    return [(max(begin, end - longest), end) for begin, end in _publishes(run).values()]


def _publishes(run: RunTrace) -> dict[int, tuple[float, float]]:
    """Time of the step's report and of the first publish, in seconds, by version; the trace has another publish for a member
    that joins later.
    """
    found = {}
    published = sorted((line.version, line.t) for line in run.publishes)
    for step in run.steps:
        at = bisect_left(published, (step.step + 1, step.t))
        if at < len(published) and published[at][0] == step.step + 1:
            found[step.step + 1] = step.t, published[at][1]
    return found
