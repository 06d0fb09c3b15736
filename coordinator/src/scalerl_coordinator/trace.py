"""Writes ``trace.jsonl`` from the journal's records (``spec.trace``).

The trace is for measurements; nothing in the run reads it. A line may be lost in a crash or with a full disk, and a line may
be repeated for a record whose write to disk failed. If the volume is nearly full, the earlier file is deleted first, and then
lines are lost. Only :meth:`Trace.write` blocks on I/O.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from scalerl_api import trace
from scalerl_api.generator_spec import GeneratorSpec
from scalerl_api.speculation import MAX_DRAFT_TOKENS
from scalerl_api.wire import VersionSpan
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Core
from scalerl_coordinator.disk import Disk, LineFile

log = logging.getLogger(__name__)

MAX_BYTES = 2**26
"""Maximum size of the file. Beyond it the file is renamed to ``trace.jsonl.1`` and replaces the earlier one. A group of 16
completions takes 400 bytes."""
MAX_WAITING = 10_000
"""Maximum number of lines that wait for the disk."""


class _Completion(msgspec.Struct):
    versions: list[VersionSpan]
    finish_reason: Literal["stop", "length"]


class _Group(msgspec.Struct):
    """The fields of a pushed group that the trace needs."""

    completions: list[_Completion]
    generation_seconds: float
    drafted_tokens: list[int] | None = None
    accepted_tokens: list[int] | None = None


_decode_group = msgspec.msgpack.Decoder(_Group).decode


class Trace:
    """Writes the trace of one run.

    Args:
        generator: the section of the run's spec.
        on_lost: called with the number of lines that could not be written.
    """

    def __init__(
        self,
        path: Path,
        core: Core,
        generator: GeneratorSpec,
        on_lost: Callable[[int], None],
        disk: Disk | None = None,
    ) -> None:
        self._path, self._core, self._on_lost = path, core, on_lost
        self._earlier = path.with_name(f"{path.name}.1")
        self._disk = disk or Disk()
        self._file = LineFile(path, self._disk)
        self._lines: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._leases: dict[str, tuple[float, str, int]] = {}
        self._generators: dict[str, str] = {}
        self._generator = generator
        self._failed = False
        self._header = self._make_header()

    def _make_header(self) -> bytes:
        settings = self._core.settings
        identity = settings.identity
        speculation = self._generator.speculation
        history = speculation.history if speculation else None
        line = trace.RunLine(
            t=self._core.run_seconds(self._core.meter.last),
            format=trace.FORMAT,
            prompts_per_step=identity.prompts_per_step,
            completions_per_prompt=identity.completions_per_prompt,
            max_completion_tokens=identity.max_completion_tokens,
            max_staleness_steps=identity.max_staleness_steps,
            steps_per_batch=identity.steps_per_batch,
            concurrency=self._generator.max_concurrent_sequences,
            max_draft_tokens=MAX_DRAFT_TOKENS if history else 0,
            schedule=settings.schedule.name,
        )
        return trace.encode(line) + b"\n"

    def record(self, record: r.Record, blob: bytes, now: float) -> None:
        """Add the line of a record that was applied to the state. Never raises: the run continues without the line."""
        try:
            self._record(record, blob, self._core.run_seconds(now))
        except Exception as error:
            self._lose(1, f"cannot trace a {type(record).__name__}", error)

    def _record(self, record: r.Record, blob: bytes, t: float) -> None:
        state = self._core.state
        match record:
            case r.LeasesIssued():
                for issue in record.issues:
                    self._leases[state.lease_id(issue.number)] = t, record.holder, issue.policy_version
                if len(self._leases) > 1000 + 2 * len(state.leases):
                    wanted = {*state.leases, *state.expired_lease_of.values()}
                    self._leases = {i: lease for i, lease in self._leases.items() if i in wanted}
            case r.GroupAccepted():
                self._add(self._group(record, blob, t))
            case r.StepTrained() | r.StepSkipped():
                skipped = isinstance(record, r.StepSkipped)
                tokens = 0 if isinstance(record, r.StepSkipped) else record.trained_tokens
                self._add(
                    trace.StepLine(
                        t=t,
                        step=record.step,
                        busy_seconds=record.busy_seconds,
                        trained_tokens=tokens,
                        skipped=skipped,
                    )
                )
            case r.Published():
                self._add(trace.PublishLine(t=t, version=record.version))

    def _group(self, record: r.GroupAccepted, blob: bytes, t: float) -> trace.GroupLine:
        leased, generator, version = self._leases.pop(record.lease_id, (None, "", -1))
        state = self._core.state
        tries = state.tries.get(record.slot, [])
        refilled = record.next_prompt is not None
        prompt = tries[-1].prompt if refilled else state.prompts[record.slot]
        group = _decode_group(blob) if blob else _Group([], 0.0)
        tokens: dict[int, int] = {}
        for completion, length in zip(group.completions, record.lengths, strict=False):
            ends = [*(span.start for span in completion.versions[1:]), length]
            for span, end in zip(completion.versions, ends, strict=True):
                tokens[span.version] = tokens.get(span.version, 0) + end - span.start
        return trace.GroupLine(
            t=t,
            slot=record.slot,
            step=state.step_of(record.slot),
            task=prompt.task,
            prompt=prompt.index,
            generator=generator,
            leased=leased,
            lease_version=version,
            seconds=group.generation_seconds,
            prompt_tokens=record.prompt_tokens,
            lengths=record.lengths,
            finish_reasons=[completion.finish_reason for completion in group.completions],
            version_tokens=tokens,
            drafted_tokens=None if group.drafted_tokens is None else sum(group.drafted_tokens),
            accepted_tokens=None if group.accepted_tokens is None else sum(group.accepted_tokens),
            refilled=refilled,
        )

    def tick(self, now: float) -> bool:
        """Add the lines of members that registered or were lost; returns whether there are lines to write."""
        members = {member.name: member.member_id for member in self._core.membership.members.values()}
        t = self._core.run_seconds(now)
        for name, member_id in self._generators.items():
            if members.get(name) != member_id:
                self._add(trace.GeneratorLine(t=t, name=name, event="lost"))
        for name, member_id in members.items():
            if self._generators.get(name) != member_id:
                self._add(trace.GeneratorLine(t=t, name=name, event="registered"))
        self._generators = members
        return bool(self._lines)

    def _add(self, line: trace.AnyLine) -> None:
        if len(self._lines) == MAX_WAITING:
            self._on_lost(1)  # the deque drops the oldest line
        self._lines.append(trace.encode(line) + b"\n")

    def write(self) -> None:
        """Append the waiting lines to the file. After a failure they are lost."""
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        size = len(self._header) + sum(map(len, lines))
        try:
            if not self._disk.leaves_reserve(self._path.parent, size):
                self._earlier.unlink(missing_ok=True)
            if self._path.exists() and self._path.stat().st_size + size > MAX_BYTES:
                os.replace(self._path, self._earlier)
                self._file = LineFile(self._path, self._disk)
            # Without a header: a new file, one that another process has begun, and one that lacks lines.
            self._file.append(b"".join([b"" if self._file.continues else self._header, *lines]))
        except OSError as error:
            self._lose(len(lines), f"cannot write {self._path.name}", error)

    def _lose(self, lines: int, what: str, error: Exception) -> None:
        self._on_lost(lines)
        if not self._failed:
            log.error("%s; further errors are only counted: %s", what, error)
        self._failed = True
