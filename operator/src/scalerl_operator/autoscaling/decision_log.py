"""``decisions.jsonl``: every decision with all its inputs, one JSON object a line.

A line is written (:mod:`.log_storage`) before its action is carried out. Each line carries its number and the history
that it was decided with, so that a missing and an added line are found. Points are recorded as what changed: ``kept`` of
those known before, then ``added``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.status import RECENT_DECISIONS, DecisionStatus
from scalerl_operator.autoscaling.log_storage import FileStorage, RecordError, RecordLost, Storage
from scalerl_operator.autoscaling.models import Decision, History, Observation, Recorded
from scalerl_operator.autoscaling.observation import Point

FORMAT: Final = 2
REASON_CHARACTERS: Final = 1000
"""Of a reason in the status."""

Policy = Literal["autoscale", "balance"]


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
    """A line as it stands in a record. line: None if it is none, and then ``problem`` says why; newer: a program of
    the future wrote it.
    """

    number: int
    line: Line | None
    problem: str = ""
    newer: bool = False


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
                problem = f"format {format_}; this program reads format {FORMAT}"
                yield Read(number, None, problem, newer=format_ > FORMAT)
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
    """The record of one run; one process and one caller at a time appends to it.

    notes: what was repaired when it was opened, for the user.
    known: what its lines come to.
    """

    def __init__(self, storage: Storage) -> None:
        self.known = Known()
        self.notes: list[str] = []
        self._storage = storage
        self._size = 0
        self._lost = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """As :meth:`load`, of a file; waits for it."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, cls.load(FileStorage(path))).result()

    @classmethod
    async def load(cls, storage: Storage) -> Self:
        """Open or begin a record. An unfinished last line is cut off; one that cannot be trusted is set aside.

        Raises:
            RecordError: it cannot be read, a newer program wrote it, or its storage sets nothing aside.
        """
        record = cls(storage)
        try:
            await record._load()
        except BaseException:
            storage.close()
            raise
        return record

    def close(self) -> None:
        """Give the record up, once a write under way has ended."""
        self._storage.close()

    async def append(
        self,
        policy: Policy,
        spec: AutoscalingSpec,
        points: Sequence[Point],
        observation: Observation,
        decision: Decision,
    ) -> Line:
        """Write one decision, made from ``known.history``, and have it kept.

        Raises:
            RecordError: it is not in the record. Where another operator has written meanwhile, the record was read again,
                and the decision has to be made again from the new ``known``.
        """
        if self._lost:
            await self._load()
            raise RecordLost(f"{self._storage.name}: read again; the decision has to be made again")
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
        self._lost = True  # also for a caller that is cancelled meanwhile
        try:
            await self._storage.append(content, self._size)
        except RecordLost:
            with contextlib.suppress(RecordError):
                await self._load()
            raise
        except RecordError:
            self._lost = False
            raise
        self._lost = False
        self._size += len(content)
        self.known.add(line)
        return line

    async def _load(self) -> None:
        content = _Reader()
        async with contextlib.aclosing(self._storage.pages()) as pages:
            async for page in pages:
                # In a thread: a long record takes its time.
                await asyncio.to_thread(content.add, page)
                if content.problem:
                    break
        note = ""
        if content.problem:
            aside = await self._storage.set_aside(content.problem)
            restart = "and decisions restart: nothing that cannot be trusted is acted on"
            note, content = f"{content.problem}; moved to {aside}, {restart}", _Reader()
        elif content.partial:
            note = f"cut off {len(content.partial)} bytes of an unfinished last line"
        await self._storage.append(b"", content.size)
        self._size, self.known, self._lost = content.size, content.known, False
        self.notes += [f"{self._storage.name}: {note}"] if note else []


def as_recorded(spec: AutoscalingSpec) -> dict[str, Any]:
    """The spec as a line has it."""
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True)


class _Reader:
    """Adds up a record that is read in pages.

    known: what its whole lines come to. size: their bytes. partial: what follows them.
    problem: the first thing wrong with the lines; what follows it is not read.
    """

    def __init__(self) -> None:
        self.known = Known()
        self.size = 0
        self.partial = b""
        self.problem = ""
        self._next_line = 1

    def add(self, page: bytes) -> None:
        """The next page.

        Raises:
            RecordError: a newer program wrote a line.
        """
        content = self.partial + page
        end = content.rfind(b"\n") + 1
        for one in read(content[:end], self._next_line):
            if one.newer:
                raise RecordError(f"line {one.number}: {one.problem}")
            if one.line is None:
                self.problem = f"line {one.number}: {one.problem}"
                return
            if (one.line.sequence, one.line.before) != (self.known.sequence, self.known.history):
                self.problem = f"line {one.number}: does not follow from the line before"
                return
            self.known.add(one.line)
            self._next_line = one.number + 1
        self.size += end
        self.partial = content[end:]


def _common(before: Sequence[Point], now: Sequence[Point]) -> int:
    """How many points they begin with that are the same."""
    pairs = zip(before, now, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
