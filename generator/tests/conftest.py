"""Stand-ins that several test modules share are modules of this folder (``import actor_stand_ins``)."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
async def scene(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """An :class:`actor_scene.Scene`; parameters are those of ``actor_scene.playing``."""
    from actor_scene import playing

    async with playing(tmp_path, **getattr(request, "param", {})) as made:
        yield made
