"""The language-model curves that benchmarks score forecasts on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from support.llm_curves import FILE, LLMCurve, llm_curves  # noqa: E402

ENTRIES: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["curves"]
LICENCES = {"MIT", "Apache-2.0"}


@pytest.mark.parametrize("name", ENTRIES)
def test_llm_curve_is_well_formed(name: str) -> None:
    entry = ENTRIES[name]
    compute, reward = np.array(entry["compute"], float), np.array(entry["reward"], float)
    assert compute.shape == reward.shape
    assert np.sum(compute > 0) >= 7
    assert compute[0] >= 0
    assert np.all(np.diff(compute) > 0)
    assert np.all((reward >= 0) & (reward <= 1))
    assert entry["samples"] >= 100
    assert entry["x_unit"].endswith("step")


def test_llm_curves_name_source_and_licence_in_the_readme() -> None:
    readme = (FILE.parent / "README.md").read_text()
    for entry in ENTRIES.values():
        assert entry["licence"] in LICENCES
        assert f"github.com/{entry['source']}" in readme
    assert "MIT License" in (FILE.parent / "LICENSE.llm_curves").read_text()


def test_llm_curves_loads_every_curve() -> None:
    loaded = llm_curves()
    assert [c.name for c in loaded] == list(ENTRIES)
    assert len(loaded) == 23
    assert len({c.source for c in loaded}) == 4
    assert [len(c.curve) for c in loaded] == [len(e["compute"]) for e in ENTRIES.values()]


def test_llm_curves_that_collapsed() -> None:
    def number(curve: LLMCurve) -> str:
        return "_".join(curve.name.split("_")[1:4])

    collapsed = [number(c) for c in llm_curves() if c.collapsed]
    assert collapsed == ["grpo-batched_7_6", "main_7_3", "main_7_6"]
