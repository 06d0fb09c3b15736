"""``python -m scalerl_coordinator.tracking.tracker_process NAME``: writes every line of ``metrics.jsonl`` and every row of
``curve.csv`` to one tracker.

The process writes its :class:`~scalerl_api.wire.Tracker` to standard output as a line of JSON whenever it changes. At the
end of standard input, it writes the remaining rows and exits with 0, so it does not outlive the coordinator. If the
tracker fails, it exits with 1, and its last line has the reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from scalerl_api.paths import RunPaths
from scalerl_api.process import ProcessEnvironment
from scalerl_api.registry import Kind, make
from scalerl_api.spec import ScaleRLRun
from scalerl_api.wire import Tracker
from scalerl_coordinator.step_figures import Row
from scalerl_coordinator.tracking.sink import Sink
from scalerl_coordinator.tracking.tail import CurveTail, MetricsTail, sample_of_evaluation

POLL_SECONDS: Final = 2.0
_SAMPLE_POLLS: Final = 5
"""Polls for which an evaluation waits for its rollouts, which the coordinator writes in another thread."""
_PROBLEM_CHARACTERS: Final = 600


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; returns the exit code (see the module)."""
    (name,) = sys.argv[1:] if argv is None else argv
    # Libraries' standard output goes to standard error, so that it does not mix with the reported lines.
    report = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    with contextlib.suppress(OSError):
        os.nice(10)  # the run has priority
    # tensorboardX imports torch if it is installed, which takes half a GB of memory and is not needed here.
    sys.modules["torch"] = None  # type: ignore[assignment]
    state = Tracker(name=name)

    def report_step(**changes: object) -> None:
        nonlocal state
        state = msgspec.structs.replace(state, **changes)
        report.write(msgspec.json.encode(state) + b"\n")

    try:
        environment = ProcessEnvironment.read()
        paths = environment.paths
        sink = open_sink(name, environment.load_run(), paths)
        follow(paths, sink, lambda step: report_step(step=step), _end_of_input)
    except BrokenPipeError:
        return 1  # the coordinator has exited
    except Exception as problem:
        logging.getLogger(__name__).debug("%s failed", name, exc_info=True)
        # Memory addresses differ in every attempt; without them an equal problem is logged once.
        said = re.sub(r" at 0x[0-9a-f]+", "", f"{type(problem).__name__}: {problem}")
        report_step(problem=said[:_PROBLEM_CHARACTERS])
        return 1
    return 0


def open_sink(name: str, run: ScaleRLRun, paths: RunPaths) -> Sink:
    """The sink for a field of ``spec.trackers``; imports the tracker's library."""
    trackers = run.spec.trackers
    if name == "tensorBoard" and trackers.tensor_board is not None:
        from scalerl_coordinator.tracking.tensorboard_sink import TensorBoardSink

        shared = trackers.tensor_board.directory
        return TensorBoardSink(run, paths.tensorboard if shared is None else Path(shared) / run.metadata.name)
    if name == "wandb" and trackers.wandb is not None:
        from scalerl_coordinator.tracking.wandb_sink import WandbSink

        return WandbSink(run, paths, trackers.wandb)
    if name == "mlflow" and trackers.mlflow is not None:
        from scalerl_coordinator.tracking.mlflow_sink import MLflowSink

        return MLflowSink(run, paths, trackers.mlflow)
    if name == "plugin" and trackers.plugin is not None:
        made: Sink = make(Kind.TRACKER, trackers.plugin.name, trackers.plugin.parameters, run, paths)
        return made
    raise ValueError(f"spec.trackers.{name} is not given")


def follow(
    paths: RunPaths, sink: Sink, report_step: Callable[[int], None], wait: Callable[[float], bool]
) -> None:
    """Write the rows of both files, and appended rows until ``wait`` returns True, then once more.

    Args:
        report_step: called with the sink's newest step (-1 while it has none) when all rows are written.
        wait: sleeps for at most the given seconds; True ends the loop.
    """
    metrics, curve = MetricsTail(paths.metrics), CurveTail(paths.curve)
    (missing, measured), reported, ending = sink.open(), -1, False
    held: list[tuple[int, Row]] = []
    polls = 0
    while True:
        rows, points = metrics.read(), curve.read()
        if rows is None or points is None:
            # Both files are read again from the start; rows that the sink already has are skipped.
            metrics.rewind()
            curve.rewind()
            held = []
            if sink.clears_on_open:
                sink.close()
                missing, measured = sink.open()
            continue
        steps = [(step, row) for step, row in rows if step >= missing]
        held += [(version, row) for version, row in points if version not in measured]
        written = [] if paths.rollouts.exists() else held
        if steps or written:
            sink.write(steps, written, {})
            missing = steps[-1][0] + 1 if steps else missing
        while held and not written:  # one by one: the samples of a long run need much memory
            (version, row), *later = held
            sample = sample_of_evaluation(paths.rollouts, version)
            if not (sample or later or ending or polls >= _SAMPLE_POLLS):
                break
            sink.write([], [(version, row)], {version: sample})
            measured.add(version)
            held, polls = later, 0
        if written:
            measured |= {version for version, _ in held}
            held = []
        if rows or points:
            continue
        polls += bool(held)
        if missing != reported:
            reported = missing
            report_step(missing - 1)
        if ending:
            break
        ending = wait(POLL_SECONDS)
    sink.close()


def _end_of_input(seconds: float) -> bool:
    return bool(select.select([0], [], [], seconds)[0]) and os.read(0, 1) == b""


if __name__ == "__main__":
    sys.exit(main())
