"""Every row of docs/models.md is so: what trains agrees with transformers, and what does not is refused with its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import free_port
import pytest
import tables
from model_families import FAMILIES, Family, table, write_family

from scalerl_api.spec import RunSpec
from scalerl_trainer.model_checks import model_problems

WORKER = Path(__file__).parent / "families_worker.py"
BY_CONFIG = ("Gemma 2 with capped attention", "DeepSeek-V2", "DeepSeek-V3", "Bamba")
"""Refused by their config, whatever transformers makes of them."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("families")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port.free_port()),
    }
    names = [family.name for family in FAMILIES if family.name not in BY_CONFIG]
    given = json.dumps({"out": str(out), "names": names})
    done = subprocess.run(
        [sys.executable, str(WORKER), given], env=environment, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    print(json.dumps(found, indent=1))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.refused], ids=lambda f: f.name)
def test_family_trains_as_transformers_computes(results: dict[str, Any], family: Family) -> None:
    """Three steps; then sequences alone, padded in a micro-batch, and packed into rows where the model keeps them apart."""
    found = results[family.name]
    assert found.get("problems", []) == []
    assert found["applied"] == [True] * 3
    assert found["moved"] > 100 * family.max_kl, "three steps changed nothing: agreement would mean nothing"
    assert 0 <= found["kl"] <= family.max_kl
    assert 0 <= found["kl_of_rows"] <= family.max_kl
    assert found["rows"] == family.rows
    assert (found["kl_if_shared"] > family.max_kl) == (family.rows == "own")
    if (by_kernel := found.get("kl_of_kernel")) is not None:
        assert 0 <= by_kernel <= family.max_kl


OWN_ROWS_WITH_ANY_KERNEL = {
    *("StableLM", "Nemotron", "Falcon", "Falcon with ALiBi"),  # boundaries do not reach their attention
    *("Qwen3-Next", "Qwen3.5 (text)", "Falcon-H1", "LFM2"),  # recurrences and convolutions
}


@pytest.mark.slow
def test_which_families_share_rows_by_a_variable_length_kernel(results: dict[str, Any]) -> None:
    trained = {family.name for family in FAMILIES if not family.refused}
    without = {name for name in trained if results[name].get("kl_of_kernel") is None}
    assert without == OWN_ROWS_WITH_ANY_KERNEL


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.refused], ids=lambda f: f.name)
def test_family_is_refused_with_its_reason(results: dict[str, Any], family: Family, tmp_path: Path) -> None:
    if family.name in BY_CONFIG:
        spec = {
            "model": {"path": str(tmp_path), "contextTokens": 64},
            "task": {
                "reasoningGym": {"name": "chain_sum"},
                "verifier": {"name": "reasoning-gym"},
                "heldOut": {"size": 2},
            },
            "recipe": {"maxCompletionTokens": 8},
            "budget": {"maxSteps": 1},
        }
        folder = write_family(family, tmp_path)
        every = model_problems(folder, RunSpec.model_validate(spec), structure=False)
        found = [problem.message.removeprefix(f"{folder}: ") for problem in every]
    else:
        found = results[family.name]["problems"]
    (problem,) = found
    assert problem.startswith(family.refused)
    assert family.note


def test_page_of_models_is_up_to_date() -> None:
    page = (tables.DOCS / "models.md").read_text(encoding="utf-8")
    assert tables.renewed(page, tables.model_tables()) == page, "run make docs"
    assert table("trained") in page


def test_architectures_of_vllm_are_up_to_date() -> None:
    path, text = tables.vllm_architectures()
    assert path.read_text(encoding="utf-8") == text, "run make docs"
