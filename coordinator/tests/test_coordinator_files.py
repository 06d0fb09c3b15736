"""metrics.jsonl and curve.csv: appends, and repairs after a crash, a return to a checkpoint or a full disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalerl_api.paths import RunPaths
from scalerl_coordinator.files import RunFiles


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(RunPaths(tmp_path))


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return RunPaths(tmp_path).metrics


def rows(*steps: int, loss: float = 0.5) -> dict[int, dict[str, int | float]]:
    return {step: {"step": step, "loss": loss} for step in steps}


def held(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]


def test_write_rows_appends_each_row_once(files, metrics):
    files.write_rows(rows(0), 1)
    inode = metrics.stat().st_ino
    files.write_rows(rows(0, 1), 2)
    files.write_rows(rows(0, 1), 2)  # the report came twice
    files.write_rows(rows(1, 2), 3)  # a checkpoint has made the state forget row 0
    assert held(metrics) == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert metrics.stat().st_ino == inode


@pytest.mark.parametrize(
    "torn", ['{"step": 2, "lo', '{"step": 2, "loss": 0.5}', "\x00" * 30, "[1]\n", "{}\n"]
)
def test_write_rows_repairs_partial_and_missing_lines(files, metrics, torn):
    metrics.write_text('{"step": 0, "loss": 0.5}\n{"step": 1, "loss": 0.5}\n' + torn)
    files.write_rows(rows(1, 2), 3)
    assert held(metrics) == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_write_rows_drops_lines_of_lost_lineage(files, metrics):
    files.write_rows(rows(0, 1, 2), 3)
    files.write_rows(rows(0), 1, whole=True)
    assert held(metrics) == [(0, 0.5)]
    files.write_rows(rows(0) | rows(1, loss=0.25), 2)
    assert held(metrics) == [(0, 0.5), (1, 0.25)]


def test_write_rows_replaces_outdated_line(files, metrics):
    """The step back found the disk full; by now its steps are trained again."""
    metrics.write_text('{"step": 0, "loss": 0.5}\n{"step": 1, "loss": 9.0}\n')
    files.write_rows(rows(0, 1), 2)
    assert held(metrics) == [(0, 0.5), (1, 0.5)]


def test_write_rows_adds_rows_after_write_error(files, metrics):
    files.write_rows(rows(0), 1)
    aside = metrics.with_name("aside")
    metrics.rename(aside)
    metrics.mkdir()
    with pytest.raises(OSError, match="directory"):
        files.write_rows(rows(0, 1), 2)
    metrics.rmdir()
    aside.rename(metrics)
    files.write_rows(rows(0, 1, 2), 3)
    assert held(metrics) == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_repair_does_not_write_correct_file(files, metrics):
    files.write_rows(rows(0, 1), 2)
    inode = metrics.stat().st_ino
    files.repair(rows(0, 1), 2)
    assert metrics.stat().st_ino == inode
