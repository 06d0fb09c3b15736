"""Sink for TensorBoard: event files, written with tensorboardX."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import hparams

from scalerl_api.spec import ScaleRLRun
from scalerl_coordinator.tracking.sink import HELD_OUT, Points, Samples, Steps, flat, hyperparameters

_OVER_COMPUTE: Final = f"{HELD_OUT}reward_over_device_seconds"
_SUFFIX = ".scalerl"
"""Suffix of the files that this sink may delete, since the directory may be shared."""


class TensorBoardSink:
    """One event file, with one event per step and two per evaluation.

    TensorBoard's only axis is an event's step, so the held-out reward is written twice: over versions and over
    device-seconds.
    """

    clears_on_open = True

    def __init__(self, run: ScaleRLRun, directory: Path) -> None:
        self._run = run
        self._directory = directory
        self._writer: EventsWriter | None = None

    def open(self) -> tuple[int, set[int]]:
        self._directory.mkdir(parents=True, exist_ok=True)
        for old in self._directory.glob(f"events.out.tfevents.*{_SUFFIX}"):
            old.unlink()
        # The suffix distinguishes files of the same second.
        self._writer = EventsWriter(str(self._directory / "events"), f".{time.time_ns()}{_SUFFIX}")
        # Makes a running TensorBoard drop the data of the deleted file, from this step on.
        self._add(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        for summary in hparams(dict(flat(hyperparameters(self._run))), {}):
            self._add(Event(step=0, summary=summary))
        self._writer.flush()
        return 0, set()

    def write(self, steps: Steps, points: Points, samples: Samples) -> None:
        assert self._writer is not None
        for step, row in (*steps, *points):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
            self._add(Event(step=step, summary=Summary(value=values)))
        # TensorBoard drops events with a higher step than a later event.
        for _, row in sorted(points, key=lambda point: point[1][f"{HELD_OUT}device_seconds"]):
            value = Summary.Value(tag=_OVER_COMPUTE, simple_value=row[f"{HELD_OUT}reward"])
            compute = round(row[f"{HELD_OUT}device_seconds"])
            self._add(Event(step=compute, summary=Summary(value=[value])))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, event: Event) -> None:
        assert self._writer is not None
        event.wall_time = time.time()
        self._writer.write_event(event)
