"""A coordinator that keeps decisions, by its own code, and whose answers may get lost."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from scalerl_api.wire import DecisionLines
from scalerl_autoscaling.decision_log import DecisionRecord
from scalerl_coordinator import decisions
from scalerl_coordinator.decisions import DecisionLog
from scalerl_lifecycle.coordinator_client import CoordinatorUnreachable, StaleOffset

DOWN = "down"
"""A call that is not sent."""
LOST = "lost"
"""A call that is carried out, and whose answer does not arrive."""


class DecisionService:
    """fate: what becomes of the next calls, None: nothing bad. path: of the file; None: one of its own."""

    def __init__(self, fate: Iterable[str | None] = (), *, path: Path | None = None) -> None:
        if path is None:
            directory = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, directory)
            path = Path(directory) / "decisions.jsonl"
        self.path = path
        self.log = DecisionLog(path)
        self.fate = list(fate)

    def content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def record(self) -> DecisionRecord:
        """One that reads and writes here, not yet loaded."""
        return DecisionRecord(lambda at: self.decisions(at), lambda at, line: self.record_decision(at, line))

    async def decisions(self, offset: int) -> DecisionLines:
        await asyncio.sleep(0)
        if self.fate and self.fate[0] == DOWN:
            self.fate.pop(0)
            raise CoordinatorUnreachable("GET /v1/decisions: TimeoutError")
        try:
            content, size = self.log.read(offset)
        except decisions.StaleOffset as problem:
            raise StaleOffset(f"GET /v1/decisions: HTTP 409: {problem}") from problem
        return DecisionLines(content=content, size=size)

    async def record_decision(self, offset: int, line: bytes) -> None:
        await asyncio.sleep(0)
        fate = self.fate.pop(0) if self.fate else None
        if fate == DOWN:
            raise CoordinatorUnreachable("POST /v1/decisions: connection refused")
        try:
            self.log.append(offset, line)
        except decisions.StaleOffset as problem:
            raise StaleOffset(f"POST /v1/decisions: HTTP 409: {problem}") from problem
        except OSError as problem:
            raise CoordinatorUnreachable(f"POST /v1/decisions: HTTP 507: {problem.strerror}") from problem
        if fate == LOST:
            raise CoordinatorUnreachable("POST /v1/decisions: TimeoutError")


async def opened(path: Path) -> DecisionRecord:
    """The record of a file."""
    record = DecisionService(path=path).record()
    await record.load()
    return record
