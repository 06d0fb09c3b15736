"""``scalerl run``: executes a run's plan as processes of this machine, and displays the progress."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scalerl_api.spec import ScaleRLRun
from scalerl_api.spec_warnings import local_warnings_of, warnings_of
from scalerl_api.wire import BROKEN
from scalerl_autoscaling.decision_log import RecordError
from scalerl_cli.exits import BAD_INPUT, DONE, FAILED, INTERRUPTED, Refused, options_named
from scalerl_cli.inputs import load, problems
from scalerl_cli.machine import cpus_problem
from scalerl_cli.output import echo
from scalerl_cli.progress import Progress
from scalerl_lifecycle.coordinator_client import CoordinatorRefused
from scalerl_lifecycle.lifecycle_types import OutcomeKind
from scalerl_lifecycle.workloads import Plan, Role
from scalerl_local.commands import LocalSettings
from scalerl_local.local_runtime import LocalRuntime
from scalerl_local.run_directory import DirectoryLost, RunDirectory, latest_directory, next_directory
from scalerl_local.run_view import Event, Failure, RunResult

RUNS = Path("runs")
_LOG_LINES = 20


def run(arguments: argparse.Namespace) -> int:
    """Execute the run of a file until it ends; returns the exit code. No process of the run is left."""
    if arguments.runtime is not None:
        from scalerl_cli.run_in_runtime import run_in_runtime

        return run_in_runtime(arguments)
    spec = read_spec(arguments.file)
    for warning in (*warnings_of(spec.spec), *local_warnings_of(spec.spec)):
        echo(f"{arguments.file}: warning: {warning}", error=True)
    return run_spec(
        spec, arguments.dir, arguments.planner, arguments.started, resume=arguments.resume, pins=arguments.pin
    )


def run_spec(
    spec: ScaleRLRun,
    directory: Path | None,
    planner: Callable[[ScaleRLRun], Plan],
    started: float,
    *,
    resume: bool,
    pins: Sequence[str] = (),
) -> int:
    """Same as :func:`run`, for a spec from :func:`read_spec`."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = LocalSettings(pin=parse_pins(pins, os.sched_getaffinity(0)))
    claim, choose = (
        (RunDirectory.resume, latest_directory) if resume else (RunDirectory.create, next_directory)
    )
    claimed = claim(directory or choose(RUNS, spec.metadata.name), spec)
    echo(f"{spec.metadata.name} in {_shown(claimed.paths.root)}")
    echo(f"its page: {command('view', claimed.paths.root)}")
    for edit in claimed.edits:
        echo(f"edited: {edit}")
    try:
        outcome, interrupts = asyncio.run(_run_displayed(spec, planner(spec), claimed, settings, started))
        code = _finish(spec, claimed, outcome, interrupts, fresh=not resume)
        if (outcome.interrupted or _is_suspended(outcome)) and claimed.paths.root.exists():
            options = ["--resume", "--dir", claimed.paths.root, *(f"--pin={pin}" for pin in pins)]
            echo(f"continue with: {command('run', claimed.paths.run_file, *options)}")
        return code
    except RecordError as problem:
        raise Refused(f"the record of decisions cannot be used: {problem}", code=FAILED) from problem
    except CoordinatorRefused as refused:
        raise Refused(f"the coordinator refuses this command: {refused}", code=FAILED) from refused
    except DirectoryLost as lost:
        raise Refused(str(lost), code=FAILED) from lost
    finally:
        claimed.release()


def parse_pins(pins: Sequence[str], allowed: set[int]) -> dict[Role, tuple[int, ...]]:
    """CPUs of each role, from pins of the form ``role=cpu,cpu``; they must be among ``allowed``.

    Raises:
        Refused: a pin of another form, or a CPU that is not allowed.

    >>> parse_pins(["trainer=0", "generator=1,2"], {0, 1, 2})
    {<Role.TRAINER: 'trainer'>: (0,), <Role.GENERATOR: 'generator'>: (1, 2)}
    """
    parsed: dict[Role, tuple[int, ...]] = {}
    for pin in pins:
        role, _, cpus = pin.partition("=")
        try:
            parsed[Role(role)] = tuple(int(cpu) for cpu in cpus.split(","))
        except ValueError:
            raise Refused(
                f"--pin {pin}: write ROLE=CPUS like trainer=0,1; roles: {', '.join(Role)}"
            ) from None
        if missing := cpus_problem(parsed[Role(role)], allowed):
            raise Refused(f"--pin {pin}: {missing}")
    return parsed


def read_spec(file: Path, changes: Mapping[str, Any] | None = None) -> ScaleRLRun:
    """Load a run file, with ``changes`` (see :func:`scalerl_cli.inputs.load`), and check that it can be run here.

    Raises:
        Refused, SpecError: lists every problem.
    """
    spec = load(file, changes)
    if found := problems(spec, thorough=False):
        raise Refused(*(f"{file}: {problem}" for problem in found))
    return spec


async def _run_displayed(
    run: ScaleRLRun, plan: Plan, claimed: RunDirectory, settings: LocalSettings, started: float
) -> tuple[RunResult, int]:
    show = Progress(run)
    local = LocalRuntime(
        run, plan, claimed, settings=settings, started=started, on_event=show.event, on_snapshot=show.snapshot
    )
    interrupts = 0

    def interrupt(number: int) -> None:
        nonlocal interrupts
        interrupts += 1
        first = "finishing the step and writing a checkpoint; interrupt again to end everything now"
        local.interrupt()
        what = first if interrupts == 1 else "ending everything now"
        show.event(Event(signal.Signals(number).name, what))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The parent process may have set signals to be ignored: nohup, or a shell's `&`.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, partial(interrupt, number))
    return await local.run(), interrupts


def _finish(
    spec: ScaleRLRun, directory: RunDirectory, outcome: RunResult, interrupts: int, *, fresh: bool
) -> int:
    if interrupts > 1:
        return INTERRUPTED
    failure = outcome.failure
    if failure is not None:
        removed = failure.bad_input and failure.role is Role.PREPARE and fresh
        _explain(failure, whole=removed)
        if removed:
            # No role started with this input. Removing the directory, which was empty before, lets the user
            # correct the input and use the same --dir again.
            shutil.rmtree(directory.paths.root, ignore_errors=True)
            return BAD_INPUT
    _report_results(spec, directory, outcome)
    if failure is not None or _is_suspended(outcome):
        return BAD_INPUT if failure is not None and failure.bad_input else FAILED
    return INTERRUPTED if outcome.interrupted else DONE


def _explain(failure: Failure, *, whole: bool) -> None:
    """Print why a process failed, with the end of its log, or all of it; then its file is not named."""
    echo(f"\n{failure.unit} failed: {failure.reason}", error=True)
    if not failure.log:
        return
    try:
        lines = Path(failure.log).read_text(errors="replace").splitlines()
    except OSError as error:
        lines = [f"(no log: {error.strerror})"]
    for line in lines if whole else lines[-_LOG_LINES:]:
        echo(f"  | {line}", error=True)
    if not whole:
        echo(f"  whole log: {_shown(Path(failure.log))}", error=True)


def _report_results(spec: ScaleRLRun, directory: RunDirectory, outcome: RunResult) -> None:
    from scalerl_analysis.problem import AnalysisProblem
    from scalerl_cli.summary import summarize, table, write

    paths, end = directory.paths, outcome.outcome
    if outcome.status is None:
        if end is not None and end.kind is OutcomeKind.COMPLETED:
            echo(f"the run is complete ({end.message}); it continues with a higher limit in its file")
        else:
            echo(f"this command generated and trained nothing; see {_shown(paths.logs)}")
        return
    summary = summarize(spec, outcome)
    echo(table(summary))
    try:
        write(paths.summary, summary)
    except AnalysisProblem as problem:
        echo(str(problem), error=True)
    from scalerl_analysis.pictures import draw_run  # after the summary, which needs less memory

    try:
        draw_run(paths, spec)
        echo(f"curve: {_shown(paths.curve_picture)}")
    except AnalysisProblem as problem:
        echo(f"no picture: {options_named(str(problem))}")
    echo(f"page: {command('view', paths.root)}")
    if _is_suspended(outcome):
        reasons = ["see decisions.jsonl"] if outcome.decision is None else outcome.decision.reasons
        echo(f"suspended, because it was found broken: {'; '.join(reasons)}", error=True)
        echo('see docs/autoscaling.md, "A run that is held"', error=True)


def _is_suspended(outcome: RunResult) -> bool:
    return outcome.status is not None and outcome.status.stop_reason == BROKEN


def command(*words: object) -> str:
    """A command to paste: the name of this one as it was called, unless it is on the search path, and ``words``."""
    called = Path(sys.argv[0])
    name = called.name if shutil.which(called.name) else called.absolute()
    return shlex.join(str(_shown(Path(str(word)))) for word in (name, *words))


def _shown(path: Path) -> Path:
    """The path relative to the working directory, for a path inside it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
