"""Reads a trace: the work of a run, and the times of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scalerl_api import trace
from scalerl_cli.exits import Refused
from scalerl_extras.simulation.workload import Drafts, Group, Workload

_SHOWN = 5
_MAX_DRAFT = 64


class TraceProblem(Refused):
    """The file is not a trace, or has no complete step; the message names lines."""


@dataclass(frozen=True, slots=True)
class RunTrace:
    """The lines of a trace, in order."""

    settings: trace.RunLine
    """The last run line."""
    groups: list[trace.GroupLine]
    """Groups of the complete steps, by slot."""
    generated: list[trace.GroupLine]
    """All generated groups, including those dropped for equal rewards and those of incomplete steps."""
    steps: list[trace.StepLine]
    publishes: list[trace.PublishLine]
    generators: int
    """Generators that delivered a group."""
    refilled: int
    """Number of groups dropped for equal rewards, which the simulation leaves out."""

    @property
    def work(self) -> Workload:
        groups = [
            Group((line.task, line.prompt), tuple(line.lengths), Drafts.measured(*verification(line)))
            for line in self.groups
        ]
        return Workload(groups, self.settings.prompts_per_step)

    @property
    def makespan(self) -> float:
        """Seconds from the first lease to the last trained step."""
        leased = [line.leased for line in self.groups if line.leased is not None]
        return self.steps[-1].t - min(leased, default=0.0)


def verification(line: trace.GroupLine) -> tuple[float, float]:
    """Mean tokens that a completion of the group gets, and drafts, per decoding step: 1 and 0 without speculation."""
    tokens, accepted = sum(line.lengths), line.accepted_tokens or 0
    # In a group that was restarted, the accepted tokens include those of lost completions: limit them to the longest draft.
    steps = max(tokens - accepted, tokens / (1 + _MAX_DRAFT), 1)
    return max(tokens, 1) / steps, (line.drafted_tokens or 0) / steps


def read_trace(path: Path) -> RunTrace:
    """Read a trace file of ``spec.trace``, preceded by the rotated ``trace.jsonl.1`` if there is one.

    Raises:
        TraceProblem: a line is invalid, or there is no complete step.
        OSError: the file cannot be read.
    """
    lines: list[trace.AnyLine] = []
    problems: list[str] = []
    for where, text in _whole_lines(path):
        try:
            lines.append(trace.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            problems.append(f"{where}: {problem}")
            continue
        problems += [f"{where}: {what}" for what in _faults(lines[-1])]
    if problems:
        more = f"\nand {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise TraceProblem("\n".join(problems[:_SHOWN]) + more)
    return _run_trace(lines)


def _whole_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Complete lines of both files, each with its place. After a crash during rotation, only the earlier file exists."""
    earlier = path.with_name(f"{path.name}.1")
    for at in [one for one in (earlier, path) if one.exists()] or [path]:
        with at.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.endswith(b"\n"):  # otherwise it is being written, or a kill cut it off
                    yield f"line {number}" if at == path else f"{at.name}: line {number}", text


def _faults(line: trace.AnyLine) -> list[str]:
    """Values out of range in a line that decodes."""
    found = []
    if not 0 <= line.t < float("inf"):
        found.append(f"t is {line.t}")
    if isinstance(line, trace.RunLine):
        if line.format != trace.FORMAT:
            found.append(f"format {line.format}, this release reads {trace.FORMAT}")
        if min(line.prompts_per_step, line.completions_per_prompt, line.concurrency) < 1:
            found.append("prompts_per_step, completions_per_prompt and concurrency must be at least 1")
        if not 0 <= line.max_draft_tokens <= _MAX_DRAFT:
            found.append(f"max_draft_tokens must be from 0 to {_MAX_DRAFT}")
    if isinstance(line, trace.GroupLine) and (not line.lengths or min(line.lengths) < 0):
        found.append("lengths must be numbers of tokens, one or more")
    if isinstance(line, trace.GroupLine) and min(line.slot, line.step) < 0:
        found.append("slot and step must not be negative")
    if isinstance(line, trace.GroupLine) and not 0 <= min(line.seconds, line.leased or 0.0) < float("inf"):
        found.append("seconds and leased must not be negative")
    return found


def _run_trace(lines: list[trace.AnyLine]) -> RunTrace:
    settings = [line for line in lines if isinstance(line, trace.RunLine)]
    if not settings:
        raise TraceProblem('the trace has no line of kind "run"')
    # A later line of a slot or step replaces an earlier one: the trainer may have returned to a checkpoint.
    # A line of the same slot and lease was written twice.
    generated = {(line.slot, line.leased): line for line in lines if isinstance(line, trace.GroupLine)}
    groups = {line.slot: line for line in generated.values() if not line.refilled}
    steps = {line.step: line for line in lines if isinstance(line, trace.StepLine)}
    size = settings[-1].prompts_per_step
    by_step: dict[int, list[trace.GroupLine]] = {}
    for slot in sorted(groups):
        by_step.setdefault(groups[slot].step, []).append(groups[slot])
    complete = [step for step in sorted(steps) if len(by_step.get(step, ())) == size]
    if not complete:
        raise TraceProblem(
            "the trace has no trained step with all its groups; steps with abandoned groups are left out"
        )
    kept = [line for step in complete for line in by_step[step]]
    return RunTrace(
        settings[-1],
        kept,
        list(generated.values()),
        [steps[step] for step in complete],
        [line for line in lines if isinstance(line, trace.PublishLine)],
        max(1, len({line.generator for line in kept if line.generator})),
        sum(line.refilled for line in generated.values()),
    )
