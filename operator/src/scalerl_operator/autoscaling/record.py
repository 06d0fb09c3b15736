"""``decisions.jsonl``: every decision with all it rests on, one JSON object a line, each sealed by a digest.

A line is on disk before its action is carried out. Each line's digest covers the line and the digest
before it, so that a changed, a missing and an added line are found. Points are recorded as what
changed: ``kept`` of those known before, then ``added``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec
from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_operator.autoscaling.observation import Point
from scalerl_operator.policy.facts import Decision, Fact, History, Observation

FORMAT: Final = 1

Policy = Literal["autoscale", "balance"]


class Line(Fact, frozen=True, kw_only=True):
    """One decision. time: of this machine, for people. spec: ``spec.autoscaling`` as it was then."""

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
    digest: str = ""


class RecordError(Exception):
    """The record cannot be read or written; the message says why. Nothing may be acted on that is not in it."""


@dataclass(frozen=True)
class Read:
    """A line as it stands in a file. line: None if it is none, and then ``problem`` says why."""

    number: int
    line: Line | None
    problem: str = ""


@dataclass
class Known:
    """What the lines so far come to: the next sequence number, the digest to go on from, points, history."""

    sequence: int = 0
    digest: str = ""
    points: list[Point] = field(default_factory=list)
    history: History = field(default_factory=History)

    def add(self, line: Line) -> None:
        """Take one more line in."""
        self.sequence = line.sequence + 1
        self.digest = line.digest
        del self.points[line.kept :]
        self.points.extend(line.added)
        self.history = line.decision.history


def seal(line: Line, previous: str) -> Line:
    """The line with its digest, given that of the line before (empty for the first)."""
    content = msgspec.json.encode(replace(line, digest=""))
    return replace(line, digest=hashlib.blake2b(previous.encode() + content, digest_size=16).hexdigest())


def read(content: bytes) -> Iterator[Read]:
    """The lines of a record in order. Not checked here: digests, and whether the decisions can be made again."""
    *whole, rest = content.split(b"\n")
    for number, raw in enumerate(whole, 1):
        try:
            format_ = msgspec.json.decode(raw, type=_Format).format
            if format_ != FORMAT:
                yield Read(number, None, f"format {format_}; this program reads format {FORMAT}")
                continue
            line = msgspec.json.decode(raw, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield Read(number, None, str(error))
            continue
        if msgspec.json.encode(line) != raw:
            yield Read(number, None, "not as it was written")
            continue
        yield Read(number, line)
    if rest:
        yield Read(len(whole) + 1, None, "unfinished: its end is missing")


class _Format(msgspec.Struct):
    format: int


class DecisionRecord:
    """The record of one run, open for appending by its one owner.

    known: what the lines so far come to. notes: what was found and done at opening, in words.
    """

    def __init__(self, path: Path, fd: int, known: Known, size: int, notes: list[str]) -> None:
        self.path = path
        self.known = known
        self.notes = notes
        self._fd: int | None = fd
        self._size = size
        # An append whose caller was cancelled goes on in its thread; the file is not closed under it.
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or begin the record. An unfinished last line is cut off; a record that cannot be trusted is set aside.

        Raises:
            RecordError: it cannot be read, or a newer program wrote it.
        """
        notes: list[str] = []
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            known, problem = _known(whole)
            if problem:
                aside = _free_name(path)
                os.replace(path, aside)
                notes.append(
                    f"{path.name}: {problem}; set aside as {aside.name}, and decisions begin anew: nothing that "
                    "cannot be trusted is acted on"
                )
                whole, known = b"", Known()
            elif len(content) > len(whole):
                notes.append(
                    f"{path.name}: cut off {len(content) - len(whole)} bytes of an unfinished last line"
                )
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(fd, len(whole))
                os.fsync(fd)
                _sync_directory(path.parent)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            raise RecordError(f"{path}: {error.strerror or error}") from error
        return cls(path, fd, known, len(whole), notes)

    def close(self) -> None:
        """Give the file up, once a write under way has ended."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None

    def append(
        self,
        policy: Policy,
        spec: AutoscalingSpec,
        points: Sequence[Point],
        observation: Observation,
        decision: Decision,
    ) -> Line:
        """Write one decision, made from ``known.history``, and have it on disk.

        Raises:
            RecordError: it could not be written, or the record is closed; it is as it was, and so is ``known``.
        """
        with self._lock:
            return self._append(policy, spec, points, observation, decision)

    def _append(
        self,
        policy: Policy,
        spec: AutoscalingSpec,
        points: Sequence[Point],
        observation: Observation,
        decision: Decision,
    ) -> Line:
        known = self.known
        kept = _common(known.points, points)
        line = seal(
            Line(
                format=FORMAT,
                sequence=known.sequence,
                time=datetime.fromtimestamp(observation.unix_seconds, UTC).isoformat(timespec="seconds"),
                policy=policy,
                spec=spec.model_dump(mode="json", by_alias=True, exclude_none=True),
                kept=kept,
                added=list(points[kept:]),
                observation=observation,
                before=known.history,
                decision=decision,
            ),
            known.digest,
        )
        self._write(msgspec.json.encode(line) + b"\n")
        known.add(line)
        return line

    def _write(self, content: bytes) -> None:
        fd = self._fd
        if fd is None:
            raise RecordError(f"{self.path}: closed")
        try:
            # What an earlier failure may have left beyond the last whole line goes first.
            os.ftruncate(fd, self._size)
            done = 0
            while done < len(content):
                done += os.pwrite(fd, content[done:], self._size + done)
            os.fsync(fd)
        except OSError as error:
            # If this fails too, the next append begins with it, and so does the next opening.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._size)
            raise RecordError(f"{self.path}: {error.strerror or error}") from error
        self._size += len(content)


def _known(content: bytes) -> tuple[Known, str]:
    """What the lines come to, and the first thing wrong with them."""
    known = Known()
    for one in read(content):
        if one.line is None:
            if one.problem.startswith("format"):
                raise RecordError(f"line {one.number}: {one.problem}")
            return known, f"line {one.number}: {one.problem}"
        if seal(one.line, known.digest).digest != one.line.digest:
            return known, f"line {one.number}: its digest does not fit"
        known.add(one.line)
    return known, ""


def _common(before: Sequence[Point], now: Sequence[Point]) -> int:
    count = 0
    for a, b in zip(before, now, strict=False):
        if a != b:
            break
        count += 1
    return count


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}-untrusted-{number}{path.suffix}")).exists():
        number += 1
    return aside


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
