"""Finished runs beside a run's directory as a prior of its forecasts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from coordinator_statuses import evaluations
from minimal_run import run_spec

from scalerl_api.curve import curve_csv
from scalerl_api.load import to_yaml
from scalerl_local.run_directory import DirectoryRuns

TABLE = curve_csv(evaluations([0.2 + 0.01 * i for i in range(12)]))


def finished(root: Path, *, table: str = TABLE, end: float = 1e9, **changes: Any) -> Path:
    root.mkdir()
    (root / "run.yaml").write_text(to_yaml(run_spec(**changes).to_manifest()))
    (root / "curve.csv").write_text(table)
    (root / "summary.json").write_text("{}")
    os.utime(root / "summary.json", (end, end))
    (root / "lock").write_text("999999999\n")
    return root


async def test_finished_runs_beside_a_runs_directory(tmp_path: Path) -> None:
    own = finished(tmp_path / "tiny-9")
    finished(tmp_path / "tiny-1", end=1e9)
    finished(tmp_path / "tiny-2", end=2e9)
    finished(tmp_path / "another-model", model={"scratch": {"layers": 3}})
    finished(tmp_path / "no-run-file").joinpath("run.yaml").unlink()
    finished(tmp_path / "no-curve").joinpath("curve.csv").unlink()
    finished(tmp_path / "binary").joinpath("curve.csv").write_bytes(b"\xff\xfe")
    finished(tmp_path / "works-still").joinpath("lock").write_text(f"{os.getpid()}\n")
    finished(tmp_path / "was-killed").joinpath("summary.json").unlink()
    (tmp_path / "a-file").write_text("")
    (tmp_path / "latest").symlink_to(tmp_path / "tiny-2")
    said: list[str] = []
    found = await DirectoryRuns(own, said.append)(run_spec().spec)
    assert [one.name for one in found] == ["tiny-2", "tiny-1"]
    (text,) = said
    assert text.startswith("2 finished runs may be a prior of the forecast: tiny-2, tiny-1; 4 left out: ")
    assert "another-model (model.scratch.layers is 3, this run's is" in text


async def test_first_run_has_no_earlier_runs(tmp_path: Path) -> None:
    said: list[str] = []
    assert await DirectoryRuns(finished(tmp_path / "tiny-1"), said.append)(run_spec().spec) == []
    assert said == []
