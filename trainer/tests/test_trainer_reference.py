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


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), ValueError("other shapes")])
def test_failed_write_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def write(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise failure

    monkeypatch.setattr(reference, "write_tensors", write)
    engine: Any = SimpleNamespace(
        settings=SimpleNamespace(dtype="float32"),
        weights=SimpleNamespace(parameter_shapes=list, gather_parameters=lambda size: []),
    )
    ranks: Any = SimpleNamespace(is_leader=True, broadcast=lambda value, kind: value)
    with pytest.raises(type(failure)):
        reference.write_weights(engine, tmp_path / "weights", ranks)
    assert list(tmp_path.iterdir()) == []


def test_load_reference_names_the_fields_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "open_model", lambda *_, **__: (torch.nn.Linear(1, 1), None))
    paths = RunPaths(tmp_path)
    spec: Any = SimpleNamespace(
        model=SimpleNamespace(dtype="float32", attention="sdpa"), warm_start=SimpleNamespace()
    )
    with pytest.raises(ModelError) as error:
        reference.load_reference(paths, spec)
    for part in ("recipe.kl.penalty", "warmStart", str(paths.warm_started_weights), "{none: {}}"):
        assert part in str(error.value)
