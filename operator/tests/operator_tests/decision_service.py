"""A coordinator that keeps decisions, by its own code, and whose answers may get lost."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scalerl_api.wire import DecisionLines
from scalerl_coordinator.decisions import DecisionLog, Superseded
from scalerl_operator.coordinator_client import CoordinatorUnreachable, EndpointMissing, OffsetSuperseded
from scalerl_operator.kube.types import Object

DOWN = "down"
"""A call that is not sent."""
LOST = "lost"
"""A call that is carried out, and whose answer does not arrive."""


class DecisionService:
    """fate: what becomes of the next calls, None: nothing bad. earlier: of a release without the endpoint.

    patches: what was written to the run's status.
    """

    def __init__(self, fate: Iterable[str | None] = (), *, earlier: bool = False) -> None:
        directory = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, directory)
        self.path = Path(directory) / "decisions.jsonl"
        self.log = DecisionLog(self.path)
        self.fate = list(fate)
        self.earlier = earlier
        self.patches: list[dict[str, Any]] = []

    def content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    async def decisions(self, uid: str, offset: int) -> DecisionLines:
        await asyncio.sleep(0)
        if self.fate and self.fate[0] == DOWN:
            self.fate.pop(0)
            raise CoordinatorUnreachable("GET /v1/decisions: TimeoutError")
        if self.earlier:
            raise EndpointMissing("GET /v1/decisions: HTTP 404: Not Found")
        try:
            content, size = self.log.read(offset)
        except Superseded as problem:
            raise OffsetSuperseded(f"GET /v1/decisions: HTTP 409: {problem}") from problem
        return DecisionLines(content=content, size=size)

    async def record_decision(self, uid: str, offset: int, line: bytes) -> None:
        if self.earlier:
            raise EndpointMissing("POST /v1/decisions: HTTP 404: Not Found")
        await asyncio.sleep(0)
        fate = self.fate.pop(0) if self.fate else None
        if fate == DOWN:
            raise CoordinatorUnreachable("POST /v1/decisions: connection refused")
        try:
            self.log.append(offset, line)
        except Superseded as problem:
            raise OffsetSuperseded(f"POST /v1/decisions: HTTP 409: {problem}") from problem
        if fate == LOST:
            raise CoordinatorUnreachable("POST /v1/decisions: TimeoutError")

    async def close(self) -> None:
        """As the poller's."""

    async def patch(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        patch: dict[str, Any],
        subresource: str | None = None,
    ) -> Object:
        assert (kind, subresource) == ("ScaleRLRun", "status")
        self.patches.append(patch)
        return {}
