"""What a library owes a notebook: no command line, nothing printed, nothing loaded before it is used, errors of its own."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from curve_files import write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_rollouts import record

import scalerl_analysis
from scalerl_analysis import (
    AnalysisProblem,
    MetricSeries,
    Prices,
    RolloutConditions,
    compare,
    find_rollouts,
    fit_curve,
    plan,
    read_curve,
    read_recipe,
)

SOURCES = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_command_line_and_no_printing(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {one.name for one in node.names} & {"argparse", "sys"}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print"


def test_nothing_heavy_is_loaded_for_a_name() -> None:
    code = (
        "import sys, scalerl_analysis; scalerl_analysis.Table, scalerl_analysis.RolloutConditions;"
        "print(sorted({'numpy', 'scipy', 'matplotlib', 'pyarrow', 'scalerl_cli'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "[]\n", done.stderr


def test_every_name_is_there_and_no_other() -> None:
    for name in scalerl_analysis.__all__:
        assert getattr(scalerl_analysis, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        scalerl_analysis.fit  # noqa: B018


def test_plan_needs_a_price_for_a_value(tmp_path: Path) -> None:
    fitted = fit_curve(read_curve(str(write_run(tmp_path / "c.csv"))))
    with pytest.raises(AnalysisProblem, match=r"^`value` needs `price`, "):
        plan(fitted, prices=Prices(None, 1.0))
    made = plan(fitted, budgets=[10.0], prices=Prices(2.0, 0.0))
    (option,) = [one for one in made.options if one.name == "+10 device-hours"]
    assert option.cost == pytest.approx(20.0)
    assert option.net == pytest.approx(-20.0)


LINES = [
    b'{"step": 0, "a": 1}\n',
    b'{"step": 1, "a": NaN}\n',
    b'{"step": 1}\n',
    b"\xff\n",
    b"[1]\n",
    b"null\n",
    b'{"st',
    b"\n",
]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.sampled_from(LINES), max_size=8))
def test_any_metrics_are_read(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    series = MetricSeries.read(path)
    assert series.column("step").tolist() == sorted(set(series.column("step").tolist()))
    assert all(len(column) == series.rows for column in series.columns.values())
    assert len(series.dicts()) == series.rows


def test_metrics_at_their_edges(tmp_path: Path) -> None:
    assert MetricSeries.read(tmp_path / "none.jsonl").rows == 0
    last = tmp_path / "metrics.jsonl"
    last.write_text('{"step": 0}\n{"step": 1, "a": 2}')
    assert MetricSeries.read(last).dicts() == [{"step": 0}, {"step": 1, "a": 2}], (
        "its last line lacks a newline"
    )
    with pytest.raises(AnalysisProblem, match="Is a directory"):
        MetricSeries.read(tmp_path)


def test_rollouts_are_found_by_conditions(tmp_path: Path) -> None:
    rows = [{"step": step, "sample": at, "reward": at / 4} for step in (1, 2) for at in range(4)]
    record(tmp_path, rows)
    found = find_rollouts(str(tmp_path), RolloutConditions(step=(2, 2), reward=(0.25, 0.5)), limit=1)
    assert (found.matching, found.total, [row["sample"] for row in found.rows]) == (2, 8, [1])
    ordered = find_rollouts(tmp_path, RolloutConditions(sort="reward", descending=True), limit=None, offset=2)
    assert [row["reward"] for row in ordered.rows] == [0.5, 0.5, 0.25, 0.25, 0.0, 0.0]
    assert find_rollouts(tmp_path, RolloutConditions(labels=[("hard", "yes")])).matching == 0
    assert find_rollouts(tmp_path, RolloutConditions(labels=[("hard", "no")])).matching == 8
    with pytest.raises(AnalysisProblem, match="no such directory"):
        find_rollouts(tmp_path / "none")


def test_torn_file_of_rollouts_is_a_warning(tmp_path: Path) -> None:
    whole = record(tmp_path, [{"step": 1}])
    torn = whole.with_name("train-00000002-00000002-00000001.parquet")
    torn.write_bytes(whole.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="left out, not a complete Parquet file"):
        assert find_rollouts(tmp_path).total == 1
    with warnings.catch_warnings(action="error"):
        assert find_rollouts(tmp_path, report=lambda _: None).matching == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("split", "heldout", "split: 'heldout' is not one of train, held-out"),
        ("sort", "rewards", "sort: 'rewards' is not one of step, reward, advantage, tokens, age, difference"),
        ("step", "first", "step: 'first' is not a pair of numbers or one of last"),
    ],
)
def test_condition_that_is_none_of_its_choices_is_refused(field: str, value: str, said: str) -> None:
    with pytest.raises(AnalysisProblem) as caught:
        RolloutConditions(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == said


def test_rollouts_are_searched_where_the_system_names_no_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    record(tmp_path, [{"step": 1}])
    monkeypatch.delattr(os, "sched_getaffinity")
    assert find_rollouts(tmp_path).matching == 1


def test_search_changes_no_setting_of_its_process_and_says_that_files_are_too_many(tmp_path: Path) -> None:
    first = record(tmp_path, [{"step": 1}])
    for at in range(2, 40):
        shutil.copyfile(first, first.with_name(f"train-{at:08}-{at:08}-00000001.parquet"))
    code = (
        "import os, resource, sys, pyarrow.parquet; from scalerl_analysis import AnalysisProblem, find_rollouts;"
        "before = dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE);"
        "print(find_rollouts(sys.argv[1]).total);"
        "assert before == (dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE));"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30)); find_rollouts(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "39\n"
    assert "more files than this process may open; raise its limit (ulimit -n)" in done.stderr


@pytest.mark.parametrize("kind", [str, Path])
def test_single_path_is_one_run_of_its_recipe(tmp_path: Path, kind: type) -> None:
    path = kind(write_run(tmp_path / "c.csv"))
    (alone,) = compare({"base": path}).recipes
    assert (len(alone.files), alone.problems) == (1, ())
    assert len(read_recipe("base", path).files) == 1
