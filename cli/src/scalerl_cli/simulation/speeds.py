"""How fast the cluster of a trace generates and trains."""

from __future__ import annotations

import statistics

import numpy as np
from scipy.optimize import nnls

from scalerl_api import trace
from scalerl_cli.simulation.trace_file import RunTrace, verification
from scalerl_cli.simulation.workload import DecodeSpeed


def fit_decode(run: RunTrace) -> DecodeSpeed:
    """Seconds of a decoding step by running sequences and drafted tokens, from the groups' durations by least squares; no part
    is negative. In a trace without drafts, a drafted token is taken to cost as much as a sequence.

    A group of which the longest completion has n tokens took n decoding steps, with drafts fewer. How many sequences ran meanwhile
    follows from the other groups of its generator, each completion's duration being proportional to its length. 0 without measured
    groups.
    """
    groups = [
        line for line in run.groups if line.leased is not None and line.seconds > 0 and max(line.lengths)
    ]
    if not groups:
        return DecodeSpeed(0.0, 0.0)
    rows, seconds = [], []
    for name in {line.generator for line in groups}:
        own = [line for line in groups if line.generator == name]
        begins = np.array([line.leased for line in own for _ in line.lengths], float)
        per_token = np.array([line.seconds / max(line.lengths) for line in own for _ in line.lengths])
        ends = begins + per_token * np.array([n for line in own for n in line.lengths], float)
        drafted = np.array([verification(line)[1] for line in own for _ in line.lengths])
        for line in own:
            begin = line.leased or 0.0
            end = begin + line.seconds
            beside = np.clip(np.minimum(ends, end) - np.maximum(begins, begin), 0, None) / line.seconds
            beside *= min(1, run.settings.concurrency / beside.sum())
            steps = max(line.lengths) / verification(line)[0]
            # Weighted by steps: a long group measures the speed more exactly, and matters more.
            rows.append([steps, steps * beside.sum(), steps * (beside @ drafted)])
            seconds.append(line.seconds)
    base, per_sequence, per_draft = map(float, nnls(np.array(rows), np.array(seconds))[0])
    drafts = any(row[2] for row in rows)
    return DecodeSpeed(base, per_sequence, per_draft if drafts else per_sequence)


def fit_trainer(run: RunTrace) -> tuple[float, float]:
    """Seconds of a step, and seconds a token, by least squares; neither is negative.

    A step begins with its last group or with the publish before it, and ends with the trainer's report.
    """
    published = {line.version: line.t for line in run.publishes}
    tokens: dict[int, int] = {}
    last_group: dict[int, float] = {}
    for line in run.groups:
        tokens[line.step] = tokens.get(line.step, 0) + sum(line.lengths)
        last_group[line.step] = max(line.t, last_group.get(line.step, 0.0))
    rows, seconds = [], []
    for step in run.steps:
        begin = max(last_group[step.step], published.get(step.step, 0.0))
        rows.append([1.0, tokens[step.step]])
        seconds.append(max(step.busy_seconds, step.t - begin))
    fixed, per_token = nnls(np.array(rows), np.array(seconds))[0]
    return float(fixed), float(per_token)


def publish_seconds(run: RunTrace) -> float:
    """Median of the seconds between a step's report and the publish of its weights."""
    published: dict[int, trace.PublishLine] = {line.version: line for line in run.publishes}
    waits = [
        published[step.step + 1].t - step.t
        for step in run.steps
        if step.step + 1 in published and published[step.step + 1].t >= step.t
    ]
    return statistics.median(waits) if waits else 0.0
