"""The interface between a tracker's library and the process that follows ``metrics.jsonl`` and ``curve.csv``."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.step_figures import Row

Steps = Sequence[tuple[int, Row]]
"""Training steps: the step and its row."""
Points = Sequence[tuple[int, Row]]
"""Evaluations: the version and its columns, whose names begin with :data:`HELD_OUT`."""
Samples = Mapping[int, Sequence[Mapping[str, Any]]]
"""Recorded rollouts of evaluations, by version: rows with the columns of :data:`~.tail.SAMPLE_COLUMNS`."""
HELD_OUT: Final = "held_out/"


class Sink(Protocol):
    """Destination of a run's rows.

    Methods block and may raise any exception; the process then ends, and a new one starts over.
    """

    clears_on_open: bool
    """Whether :meth:`open` deletes the sink's data, so that the sink can follow a return to a checkpoint.

    Other sinks keep the first values of a step or evaluation.
    """

    def open(self) -> tuple[int, set[int]]:
        """Connect; returns the first step that the sink lacks, and the versions whose evaluations it has."""

    def write(self, steps: Steps, points: Points, samples: Samples) -> None:
        """Write new steps in ascending order, all above earlier ones, and new evaluations in order of their versions, with the
        rollouts of those that have any.

        With ``clears_on_open``, the versions too are above all earlier ones.
        """

    def close(self) -> None:
        """Deliver pending rows and disconnect."""


def hyperparameters(run: ScaleRLRun) -> dict[str, Any]:
    """The spec with all defaults, without pod templates, whose variables may hold secrets."""
    return _without_templates(run.to_manifest()["spec"])


def _without_templates(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_templates(value) if isinstance(value, dict) else value
        for name, value in section.items()
        if name != "podTemplate"
    }


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | bool]]:
    """Fields by path; lists are JSON.

    >>> dict(flat({"a": {"b": 1, "c": ["x"]}}))
    {'a.b': 1, 'a.c': '["x"]'}
    """
    for name, value in section.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str | int) else json.dumps(value)


def tracker_id(paths: RunPaths) -> str:
    """The run's id in all trackers, kept in its directory: generated once, constant over restarts."""
    staging = paths.tracker_id.with_name(f"tracker-id.{os.getpid()}.tmp")
    if not paths.tracker_id.exists():
        Disk().write_synced(staging, uuid.uuid4().hex[:16].encode() + b"\n")
        try:
            os.link(staging, paths.tracker_id)
        except FileExistsError:
            pass  # another tracker's process created it first
        finally:
            staging.unlink()
    return paths.tracker_id.read_text().strip()
