"""The record of decisions of a run's directory, written as its coordinator does."""

from __future__ import annotations

from pathlib import Path

from scalerl_api.wire import DecisionLines
from scalerl_autoscaling.decision_log import DecisionRecord
from scalerl_coordinator.decisions import DecisionLog


async def opened(path: Path) -> DecisionRecord:
    log = DecisionLog(path)

    async def read(offset: int) -> DecisionLines:
        content, size = log.read(offset)
        return DecisionLines(content=content, size=size)

    async def write(offset: int, line: bytes) -> None:
        log.append(offset, line)

    record = DecisionRecord(read, write)
    await record.load()
    return record
