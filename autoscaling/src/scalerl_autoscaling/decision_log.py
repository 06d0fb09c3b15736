"""``decisions.jsonl``: every decision with all its inputs, one JSON object a line.

A line is written before its action is carried out. Its sequence number and the history before it reveal lines that were
removed or added. Of the points it has the changes only: ``kept`` of those before, then ``added``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.status import RECENT_DECISIONS, DecisionStatus
from scalerl_api.wire import DecisionLines
from scalerl_autoscaling.models import Decision, History, Observation, Recorded
from scalerl_autoscaling.observation import Point
from scalerl_lifecycle.coordinator_client import CoordinatorRefused, CoordinatorUnreachable, StaleOffset

FORMAT: Final = 2
FILE: Final = "decisions.jsonl"
PAGE_BYTES: Final = 2**20
MAX_LINE_BYTES: Final = 2**23
"""Of a line, as the coordinator accepts it."""
MAX_LOG_BYTES: Final = 2**28
REASON_CHARACTERS: Final = 1000
"""Longest reason or message in the status."""

Policy = Literal["autoscale", "balance"]


class RecordError(Exception):
    """The record cannot be read or written; the message says why. No decision that is not in it may be acted on."""


class Line(Recorded, frozen=True, kw_only=True):
    """One decision.

    Attributes:
        time: by the machine's clock, for people only.
        spec: ``spec.autoscaling`` at the decision.
        kept, added: the points, see the module.
        before: the history that the decision was made with.
    """

    format: int
    sequence: int
    time: str
    policy: Policy
    spec: dict[str, Any]
    kept: int
    added: list[Point]
    observation: Observation
    before: History
    decision: Decision


@dataclass
class LogSummary:
    """Summary of the lines so far.

    Attributes:
        sequence: of the next line.
        last: the newest line.
        last_evaluated: the newest line on an evaluation, not on the balance.
        recent: the newest lines, oldest first.
    """

    sequence: int = 0
    points: list[Point] = field(default_factory=list)
    history: History = field(default_factory=History)
    last: Line | None = None
    last_evaluated: Line | None = None
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=RECENT_DECISIONS))

    @property
    def requested_generators(self) -> int | None:
        """The number of generators requested by the last line; None before the first."""
        if self.last is None:
            return None
        action = self.last.decision.action
        acted = self.last.spec.get("mode") == "Auto" and action.kind == "scale"
        return action.scale_to if acted else self.last.observation.generators.wanted

    def add(self, line: Line) -> None:
        self.last = line
        if line.policy == "autoscale":
            self.last_evaluated = line
        self.recent.append(line)
        self.sequence = line.sequence + 1
        del self.points[line.kept :]
        self.points.extend(line.added)
        self.history = line.decision.history


def decision_status(line: Line) -> DecisionStatus:
    decision, action = line.decision, line.decision.action
    moment = datetime.fromisoformat(line.time).astimezone(UTC)
    return DecisionStatus(
        sequence=line.sequence,
        time=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        state=decision.state.value,
        action=f"scale to {action.scale_to}" if action.kind == "scale" else action.kind,
        reason=decision.reasons[0][:REASON_CHARACTERS] if decision.reasons else "",
    )


class _Format(msgspec.Struct):
    format: int


def read(content: bytes, first: int = 1) -> Iterator[tuple[int, Line | str]]:
    """The lines of a record in order, numbered from ``first``; in place of an invalid line, what is wrong with it."""
    *whole, rest = content.split(b"\n")
    for number, raw in enumerate(whole, first):
        try:
            found = msgspec.json.decode(raw, type=_Format).format
            if found != FORMAT:
                yield number, f"format {found}; this program reads format {FORMAT}"
            else:
                yield number, msgspec.json.decode(raw, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield number, str(error)[:200]
    if rest:
        yield first + len(whole), "unfinished: its end is missing"


class DecisionRecord:
    """The record of one run, in ``decisions.jsonl`` on the run's volume, which its coordinator reads and writes.

    Two operators may write at once: one that has lost its lease learns of it late. Every line therefore names the offset that
    it follows. Of two lines at one offset, the coordinator refuses the second, and its sender reads the log again.

    read_page, write_line: see :class:`.CoordinatorClient`.
    summary: of the lines read and written.
    loaded: the log was read once.
    """

    def __init__(
        self,
        read_page: Callable[[int], Awaitable[DecisionLines]],
        write_line: Callable[[int, bytes], Awaitable[None]],
    ) -> None:
        self.summary = LogSummary()
        self.loaded = False
        self._read_page = read_page
        self._write_line = write_line
        self._size = 0
        self._stale = True

    async def load(self) -> None:
        """Reads the log.

        Raises:
            RecordError: it cannot be read, or a line is invalid, of another format, or does not follow from the one before.
        """
        reader, offset, size = _PageReader(), 0, 1
        try:
            while offset < size:
                page = await self._read_page(offset)
                if not page.content and page.size > offset:
                    text = f"{FILE} ends at byte {offset} of {page.size}: it was cut while it was read"
                    raise RecordError(text)
                # In a thread: to decode a long record takes long.
                await asyncio.to_thread(reader.add, page.content)
                offset += len(page.content)
                size = page.size if page.size >= 0 else offset
        except (CoordinatorUnreachable, CoordinatorRefused) as error:
            raise RecordError(f"{FILE} cannot be read: {error}") from error
        self._size, self.summary, self.loaded, self._stale = reader.size, reader.summary, True, False

    async def append(
        self,
        policy: Policy,
        spec: AutoscalingSpec,
        points: Sequence[Point],
        observation: Observation,
        decision: Decision,
    ) -> Line:
        """Writes one decision, made with ``summary.history``; it is on disk when this returns.

        Raises:
            RecordError: the decision is not in the record, or it is unknown whether it is. After a write by another operator the
                record was read again, and the decision must be made again with the new ``summary``.
        """
        if self._stale:
            await self.load()
            raise RecordError(f"{FILE} was read again; the decision has to be made again")
        kept = _common(self.summary.points, points)
        line = Line(
            format=FORMAT,
            sequence=self.summary.sequence,
            time=datetime.fromtimestamp(observation.unix_seconds, UTC).isoformat(timespec="seconds"),
            policy=policy,
            spec=as_recorded(spec),
            kept=kept,
            added=list(points[kept:]),
            observation=observation,
            before=self.summary.history,
            decision=decision,
        )
        content = msgspec.json.encode(line) + b"\n"
        self._stale = True  # also for a caller that is cancelled meanwhile
        try:
            await self._write_line(self._size, content)
        except (CoordinatorUnreachable, StaleOffset) as error:
            # Another operator wrote, or it is unknown whether this line was written.
            with contextlib.suppress(RecordError):
                await self.load()
            raise RecordError(f"{FILE} could not be written: {error}") from error
        except CoordinatorRefused as error:
            self._stale = False
            raise RecordError(f"{FILE} cannot be written: {error}") from error
        self._stale = False
        self._size += len(content)
        self.summary.add(line)
        return line


def summary_of(path: Path) -> LogSummary:
    """The summary of a file, which is missing before the first decision.

    Raises:
        RecordError: as :meth:`DecisionRecord.load`.
    """
    reader = _PageReader()
    try:
        with path.open("rb") as file:
            while page := file.read(PAGE_BYTES):
                reader.add(page)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    return reader.summary


def as_recorded(spec: AutoscalingSpec) -> dict[str, Any]:
    """The spec as :attr:`Line.spec`."""
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True)


class _PageReader:
    """Reads a record in pages, which may end within a line.

    summary: of the complete lines.
    size: of the complete lines, in bytes.
    """

    def __init__(self) -> None:
        self.summary = LogSummary()
        self.size = 0
        self._partial = b""
        self._next_line = 1

    def add(self, page: bytes) -> None:
        """Adds the next page. Raises RecordError as :meth:`DecisionRecord.load`."""
        content = self._partial + page
        end = content.rfind(b"\n") + 1
        if len(content) - end > MAX_LINE_BYTES or self.size + end > MAX_LOG_BYTES:
            limits = f"{MAX_LINE_BYTES} bytes in a line or {MAX_LOG_BYTES} in all"
            raise RecordError(
                f"{FILE} has more than {limits}; move it away on the run's volume to start an empty one"
            )
        for number, line in read(content[:end], self._next_line):
            expected = (self.summary.sequence, self.summary.history)
            if isinstance(line, Line) and (line.sequence, line.before) != expected:
                line = "does not follow from the line before"
            if isinstance(line, str):
                repair = "repair it, or move it away on the run's volume to start an empty one"
                raise RecordError(f"{FILE}: line {number}: {line}; {repair}")
            self.summary.add(line)
            self._next_line = number + 1
        self.size += end
        self._partial = content[end:]


def _common(before: Sequence[Point], now: Sequence[Point]) -> int:
    """The number of points that both begin with."""
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False))
    )
