"""A penalty added to a warm-started run whose weights after the warm start were not kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalerl_api.paths import RunPaths
from scalerl_trainer import reference
from scalerl_trainer.errors import ModelError


def test_load_reference_names_the_fields_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "load_model", lambda *_, **__: torch.nn.Linear(1, 1))
    paths = RunPaths(tmp_path)
    spec: Any = SimpleNamespace(
        model=SimpleNamespace(dtype="float32", attention="sdpa"), warm_start=SimpleNamespace()
    )
    with pytest.raises(ModelError) as error:
        reference.load_reference(paths, spec)
    for part in ("recipe.kl.penalty", "warmStart", str(paths.warm_started_weights), "{none: {}}"):
        assert part in str(error.value)
