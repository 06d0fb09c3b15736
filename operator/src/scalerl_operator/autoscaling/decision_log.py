"""``decisions.jsonl``: every decision with all its inputs, one JSON object a line.

A line is written before its action is carried out. Each line carries its number and the history
that it was decided with, so that a missing and an added line are found. Points are recorded as what changed: ``kept`` of
those known before, then ``added``.
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
from scalerl_operator.autoscaling.models import Decision, History, Observation, Recorded
from scalerl_operator.autoscaling.observation import Point
from scalerl_operator.coordinator_client import (
    CoordinatorRefused,
    CoordinatorUnreachable,
    EndpointMissing,
    OffsetSuperseded,
)
from scalerl_operator.kube.errors import Fenced

FORMAT: Final = 2
FILE: Final = "decisions.jsonl"
PAGE_BYTES: Final = 2**20
REASON_CHARACTERS: Final = 1000
"""Of a reason in the status."""

Policy = Literal["autoscale", "balance"]


class RecordError(Exception):
    """The record cannot be read or written; the message says why. Nothing may be acted on that is not in it."""


class Line(Recorded, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """One decision. time: of this machine, for people. spec: ``spec.autoscaling`` as it was then.

    Unknown fields are ignored: earlier releases wrote a digest with each line.
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


@dataclass(frozen=True)
class Read:
    """A line as it stands in a record. line: None if it is none, and then ``problem`` says why."""

    number: int
    line: Line | None
    problem: str = ""


@dataclass
class Known:
    """What the lines so far come to: the next sequence number, points, history.

    last: the newest line. last_evaluated: the newest on an evaluation, not on the balance. recent: the newest few, oldest first.
    """

    sequence: int = 0
    points: list[Point] = field(default_factory=list)
    history: History = field(default_factory=History)
    last: Line | None = None
    last_evaluated: Line | None = None
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=RECENT_DECISIONS))

    @property
    def generators(self) -> int | None:
        """How many there were to be after the last line; None before the first."""
        if self.last is None:
            return None
        action = self.last.decision.action
        acted = self.last.spec.get("mode") == "Auto" and action.kind == "scale"
        return action.generators if acted else self.last.observation.generators.wanted

    def add(self, line: Line) -> None:
        """Take one more line in."""
        self.last = line
        if line.policy == "autoscale":
            self.last_evaluated = line
        self.recent.append(line)
        self.sequence = line.sequence + 1
        del self.points[line.kept :]
        self.points.extend(line.added)
        self.history = line.decision.history


def decision_status(line: Line) -> DecisionStatus:
    """The line's decision as the status has it."""
    decision, action = line.decision, line.decision.action
    moment = datetime.fromisoformat(line.time).astimezone(UTC)
    return DecisionStatus(
        sequence=line.sequence,
        time=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        state=decision.state.value,
        action=f"scale to {action.generators}" if action.kind == "scale" else action.kind,
        reason=decision.reasons[0][:REASON_CHARACTERS] if decision.reasons else "",
    )


def read(content: bytes, first: int = 1) -> Iterator[Read]:
    """The lines of a record in order, numbered from ``first``. Not checked here: whether the decisions can be made again."""
    *whole, rest = content.split(b"\n")
    for number, raw in enumerate(whole, first):
        try:
            format_ = msgspec.json.decode(raw, type=_Format).format
            if format_ != FORMAT:
                yield Read(number, None, f"format {format_}; this program reads format {FORMAT}")
                continue
            line = msgspec.json.decode(raw, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield Read(number, None, str(error))
            continue
        yield Read(number, line)
    if rest:
        yield Read(first + len(whole), None, "unfinished: its end is missing")


class _Format(msgspec.Struct):
    format: int


class DecisionRecord:
    """The record of one run, in ``decisions.jsonl`` on the run's volume, which its coordinator reads and writes.

    Two operators may write at once, when one has lost its lease and does not know yet. Every line therefore names the offset that
    it follows: of two lines at one offset the coordinator refuses the second, and its sender reads the log again.

    read_page, write_line: see :class:`.CoordinatorClient`. known: what its lines come to. loaded: it was read once.
    """

    def __init__(
        self,
        read_page: Callable[[int], Awaitable[DecisionLines]],
        write_line: Callable[[int, bytes], Awaitable[None]],
    ) -> None:
        self.known = Known()
        self.loaded = False
        self._read_page = read_page
        self._write_line = write_line
        self._size = 0
        self._stale = True

    async def load(self) -> None:
        """Read the log.

        Raises:
            RecordError: it cannot be read, another release wrote it, or it was edited and is to be repaired where it is.
        """
        content, offset, size = _Reader(), 0, 1
        try:
            while offset < size:
                page = await self._read_page(offset)
                if not page.content and page.size > offset:
                    text = f"{FILE} ends at byte {offset} of {page.size}: it was cut while it was read"
                    raise RecordError(text)
                # In a thread: a long record takes its time.
                await asyncio.to_thread(content.add, page.content)
                offset += len(page.content)
                size = page.size if page.size >= 0 else offset
        except EndpointMissing as error:
            text = "the run's coordinator, of an earlier release, keeps no decisions; suspend and resume the run to replace it"
            raise RecordError(text) from error
        except (CoordinatorUnreachable, CoordinatorRefused) as error:
            raise RecordError(f"{FILE} cannot be read: {error}") from error
        self._size, self.known, self.loaded, self._stale = content.size, content.known, True, False

    async def append(
        self,
        policy: Policy,
        spec: AutoscalingSpec,
        points: Sequence[Point],
        observation: Observation,
        decision: Decision,
    ) -> Line:
        """Write one decision, made from ``known.history``; it is on disk when this returns.

        Raises:
            RecordError: it is not in the record, or it is unknown whether it is. Where another operator has written meanwhile, the
                record was read again, and the decision has to be made again from the new ``known``.
        """
        if self._stale:
            await self.load()
            raise RecordError(f"{FILE} was read again; the decision has to be made again")
        kept = _common(self.known.points, points)
        line = Line(
            format=FORMAT,
            sequence=self.known.sequence,
            time=datetime.fromtimestamp(observation.unix_seconds, UTC).isoformat(timespec="seconds"),
            policy=policy,
            spec=as_recorded(spec),
            kept=kept,
            added=list(points[kept:]),
            observation=observation,
            before=self.known.history,
            decision=decision,
        )
        content = msgspec.json.encode(line) + b"\n"
        self._stale = True  # also for a caller that is cancelled meanwhile
        try:
            await self._write_line(self._size, content)
        except (CoordinatorUnreachable, OffsetSuperseded) as error:
            # Another operator wrote, or it is unknown whether this line was written.
            with contextlib.suppress(RecordError):
                await self.load()
            raise RecordError(f"{FILE} could not be written: {error}") from error
        except (CoordinatorRefused, Fenced) as error:
            self._stale = False
            raise RecordError(f"{FILE} cannot be written: {error}") from error
        self._stale = False
        self._size += len(content)
        self.known.add(line)
        return line


def known_of(path: Path) -> Known:
    """What the lines of a file come to; there is none before the first decision.

    Raises:
        RecordError: as :meth:`DecisionRecord.load`.
    """
    content = _Reader()
    try:
        with path.open("rb") as file:
            while page := file.read(PAGE_BYTES):
                content.add(page)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    return content.known


def as_recorded(spec: AutoscalingSpec) -> dict[str, Any]:
    """The spec as a line has it."""
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True)


class _Reader:
    """Adds up a record that is read in pages, which may end within a line.

    known: what its whole lines come to. size: their bytes.
    """

    def __init__(self) -> None:
        self.known = Known()
        self.size = 0
        self._partial = b""
        self._next_line = 1

    def add(self, page: bytes) -> None:
        """The next page.

        Raises:
            RecordError: a line is not what it should be, or of another release.
        """
        content = self._partial + page
        end = content.rfind(b"\n") + 1
        for one in read(content[:end], self._next_line):
            line, problem = one.line, one.problem
            if line is not None and (line.sequence, line.before) != (self.known.sequence, self.known.history):
                line, problem = None, "does not follow from the line before"
            if line is None:
                repair = "repair it, or move it away on the run's volume to start an empty one"
                raise RecordError(f"{FILE}: line {one.number}: {problem}; {repair}")
            self.known.add(line)
            self._next_line = one.number + 1
        self.size += end
        self._partial = content[end:]


def _common(before: Sequence[Point], now: Sequence[Point]) -> int:
    """How many points they begin with that are the same."""
    pairs = zip(before, now, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
