"""docs/analysis.md: its examples run, one after the other, as the cells of a notebook."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from curve_files import ink, write_run
from recorded_rollouts import record

import scalerl_analysis

PAGE = (Path(__file__).parents[2] / "docs/analysis.md").read_text(encoding="utf-8")
CELLS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)


def make_run(directory: Path, reach: float) -> None:
    directory.mkdir(parents=True)
    write_run(directory / "curve.csv", reach=reach)
    lines = [
        f'{{"step": {step}, "reward": {step / 100}, "wall_seconds": {10 * step + 10}, "wait_seconds": 4}}\n'
        for step in range(3)
    ]
    (directory / "metrics.jsonl").write_text("".join(lines))
    (directory / "labels.csv").write_text(
        "set,version,compute,label,value,reward,prompts\nheld-out,0,0,difficulty,9,0.25,8\n"
    )
    record(directory, [{"step": 2, "split": "held_out", "reward": at / 4} for at in (3, 1, 2)])


def test_cells_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, reach in (("a-1", 4.0), ("a-2", 4.2), ("b-1", 4.4), ("b-2", 4.6)):
        make_run(Path("runs", name), reach)
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    names: dict[str, Any] = {}
    for cell in CELLS:
        exec(cell, names)
    assert all(ink(Path(picture)) > 0.01 for picture in ("fit.png", "plan.png", "comparison.png"))
    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before
    assert names["reward"].tolist() == [0.0, 0.01, 0.02]
    assert [row["reward"] for row in names["worst"].rows] == [0.25, 0.5, 0.75]
    assert [row["last_reward"] for row in names["rows"]] == [0.25, 0.25]
    assert names["planned"].options[0].name == "stop now"
    assert names["seconds"]["wait"] == 12.0
    printed = capsys.readouterr()
    assert "dapo against cispo" in printed.out
    assert printed.err == ""


def test_page_has_the_names_that_there_are() -> None:
    nodes = [node for cell in CELLS for node in ast.walk(ast.parse(cell))]
    names = {one.name for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names}
    assert names <= set(scalerl_analysis.__all__)
    for name in scalerl_analysis.__all__:
        assert getattr(scalerl_analysis, name).__doc__, name
