"""An autoscaler on a desk: its clocks and its record in hand, a sidecar at an address."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from autoscaler_inputs import run
from coordinator_statuses import EVERY, status
from decision_service import DecisionService

from scalerl_api.wire import EvaluationPoint
from scalerl_autoscaling.autoscaler import Autoscaler, Step
from scalerl_autoscaling.earlier_runs import ReadEarlier
from scalerl_autoscaling.forecast_client import Sidecar
from scalerl_autoscaling.models import Generators, State
from scalerl_autoscaling.replay import verify

ONE = Generators(wanted=1, ready=1)


class Clock:
    def __init__(self) -> None:
        self.unix, self.monotonic = 1.7e9, 0.0


class Watched:
    """An autoscaler with its clocks and its record in hand."""

    def __init__(
        self,
        path: Path,
        url: str,
        autoscaling: dict[str, Any] | None = None,
        *,
        resumed: bool = False,
        earlier: ReadEarlier | None = None,
        **sidecar: Any,
    ) -> None:
        self.path, self.clock = path, Clock()
        self.record = DecisionService(path=path).record()
        quick = {"timeout_seconds": 60.0, "attempts": 2, "backoff_seconds": 0.01} | sidecar
        self.scaler = Autoscaler(
            "a run",
            run({"stopAfter": 2} | (autoscaling or {}), budget={"maxSeconds": 1_000_000}),
            self.record,
            Sidecar(lambda: url, **quick),
            earlier=earlier,
            unix=lambda: self.clock.unix,
            monotonic=lambda: self.clock.monotonic,
        )
        self.scaler.resumed = resumed

    async def step(
        self, points: list[EvaluationPoint], generators: Generators = ONE, **changes: Any
    ) -> Step | None:
        self.clock.unix += EVERY
        if not self.record.loaded:
            await self.record.load()
        return await asyncio.wait_for(self.scaler.step(status(points, **changes), generators), 120)

    async def must(self, points: list[EvaluationPoint], **changes: Any) -> Step:
        step = await self.step(points, **changes)
        assert step is not None
        assert verify(self.path.read_bytes())[1] == []
        return step


def no_stop(step: Step, state: State, says: str) -> None:
    assert step.action.kind != "stop"
    assert step.decision.action.kind != "stop"
    assert step.decision.state is state
    assert says in " ".join(step.decision.reasons), step.decision.reasons
