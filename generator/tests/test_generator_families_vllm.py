"""vLLM computes the same as transformers after every weight update, in every family of models."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

EXACT = 2e-5
"""Greatest difference of log-probabilities in float32; wrong weights change them by more than one."""
QUICK = ("mixtral", "olmoe", "pythia", "qwen3-moe")
"""Families whose layout differs in vLLM's kernels or in transformers. A tied Llama: ``test_generator_vllm_updates``."""
REFUSED = "deepseek-v2"
"""vLLM's multi-head latent attention has parameters that it derives from others, so no publish sets all of the model's."""
OTHERS = sorted(set(tiny_models.FAMILIES) - {*QUICK, REFUSED})


def updates(dtype: str, families: Sequence[str], root: Path) -> dict[str, dict[str, Any]]:
    """Output of ``family_updates.py``, by family."""
    script = Path(__file__).with_name("family_updates.py")
    support = Path(tiny_models.__file__).parent
    with (root / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, str(script), dtype, *families],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=800,
            env=os.environ | {"PYTHONPATH": str(support)},
            check=False,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(families), (root / "log").read_text()[-4000:]
    return {line["family"]: line for line in lines}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return updates("float32", QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return updates("float32", [*OTHERS, REFUSED], tmp_path_factory.mktemp("others"))


def check(found: dict[str, Any]) -> None:
    assert "failed" not in found, found["failed"]
    assert found["changed"] > 0.5
    assert found["same again"] <= EXACT, "weights that the model has already change nothing"
    assert found["aborted"] == 0, "an aborted update leaves the old weights"
    for after in ("loaded", "other", "after a partial one", "back"):
        assert found[after] <= EXACT, after
    assert found["states"] == ["whole"] * 3 + ["partial"] + ["whole"] * 2 + ["partial"] * 2
    *_, unknown, incomplete = found["errors"]
    assert "cannot load the tensor 'model.layers.0.unknown." in unknown
    assert "the manifest left" in incomplete
    assert "parameter(s) unset: " in incomplete


@pytest.mark.parametrize("family", QUICK)
def test_updates_of_family(quick: dict[str, dict[str, Any]], family: str) -> None:
    check(quick[family])


@pytest.mark.full
@pytest.mark.parametrize("family", OTHERS)
def test_updates_of_other_family(others: dict[str, dict[str, Any]], family: str) -> None:
    check(others[family])


@pytest.mark.full
def test_update_that_cannot_set_all_parameters_is_refused(others: dict[str, dict[str, Any]]) -> None:
    found = others[REFUSED]
    assert found["states"] == ["partial"] * 8
    assert "parameter(s) unset: model.layers.0.self_attn.mla_attn.mla_attn.W_UK_T" in found["errors"][0]
