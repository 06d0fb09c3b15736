"""Stand-ins that several test modules share are modules of this folder (``import actor_stand_ins``)."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
async def scene(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """An :class:`actor_scene.Scene`; parameters are those of ``actor_scene.playing``."""
    from actor_scene import playing

    async with playing(tmp_path, **getattr(request, "param", {})) as made:
        yield made


@pytest.fixture
async def unhurried_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a time in which this process stood still, its event loop and its leases count a moment: they end for want of progress alone."""
    from scalerl_generator.rollouts import delivery, leasing

    loop: Any = asyncio.get_running_loop()
    moment, select = 0.1, loop._selector.select
    now = last = time.monotonic()

    def clock() -> float:
        nonlocal now, last
        now, last = now + min((real := time.monotonic()) - last, moment), real
        return now

    def short(timeout: float | None) -> Any:
        return select(moment if timeout is None else min(timeout, moment))

    monkeypatch.setattr(loop._selector, "select", short)
    monkeypatch.setattr(loop, "time", clock)
    for module in (delivery, leasing):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
