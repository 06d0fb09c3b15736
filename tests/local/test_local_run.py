"""One undisturbed run, as `make run` does it but shorter: what it says, leaves, and promises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import LocalRun, assert_counts_add_up, assert_nothing_left, small_spec, start_run

SUMMARY_KEYS = {
    "steps",
    "first_reward",
    "last_reward",
    "wall_seconds",
    "device_hours",
    "tokens_generated",
    "tokens_trained",
    "generator_busy_fraction",
    "trainer_busy_fraction",
    "max_staleness_steps",
    "sampled_kl",
    "probe_kl",
    "ratio_kl",
    "mismatch_by_position",
    "stop_reason",
}
RUN = small_spec(recipe__maxStalenessSteps=3)


def path_without_compilers(tmp: Path) -> str:
    """A PATH with what a bare Linux has, and no compiler, linker or ninja."""
    folder = tmp / "bin"
    folder.mkdir()
    for tool in (
        "sh",
        "bash",
        "env",
        "uname",
        "cat",
        "ls",
        "git",
        "make",
        "lscpu",
        "which",
        "ldconfig",
        "id",
        "stat",
    ):
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    return str(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    tmp = tmp_path_factory.mktemp("undisturbed")
    environment = {"PATH": path_without_compilers(tmp), "CC": "", "CXX": ""}
    with start_run(tmp, RUN, environment=environment) as run:
        code = run.finish(420)
        assert code == 0, run.tail()
    assert_nothing_left(run.directory)
    return run


pytestmark = pytest.mark.timeout(480)


def test_it_runs_to_its_budget_without_a_compiler(finished: LocalRun) -> None:
    summary = finished.summary()
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 20
    assert summary["stop_reason"] == "maxSteps"
    assert summary["tokens_trained"] > 0
    assert_counts_add_up(summary, RUN)


def test_staleness_is_bounded_and_the_two_sides_agree(finished: LocalRun) -> None:
    summary = finished.summary()
    assert 0 <= summary["max_staleness_steps"] <= 3
    for source in ("sampled", "probe"):
        assert 0 <= summary[f"{source}_kl"] < 0.01
        assert summary["mismatch_by_position"][source].keys() == {"0_256"}


def test_it_leaves_what_a_person_can_look_at(finished: LocalRun) -> None:
    for name in ("curve.png", "curve.csv", "metrics.jsonl", "summary.json", "run.yaml"):
        assert (finished.directory / name).stat().st_size > 0, name
    assert [row["version"] for row in finished.curve()] == ["0", "10", "20"]
    assert [row["step"] for row in finished.metrics()] == list(range(20))
    assert [p.name for p in sorted((finished.directory / "checkpoints").iterdir())] == [
        "step-00000015",
        "step-00000020",
    ]
    names = {p.name for p in (finished.directory / "logs").iterdir()}
    assert any(n.startswith("coordinator") for n in names)


def test_plot_draws_it_again(finished: LocalRun) -> None:
    picture = finished.directory / "curve.png"
    picture.unlink()
    command = [sys.executable, "-m", "scalerl_cli.main", "plot", str(finished.directory)]
    subprocess.run(command, check=True, timeout=60, env=os.environ)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_directory_is_not_used_twice(finished: LocalRun) -> None:
    with start_run(finished.directory.parent, RUN) as again:
        assert again.finish(60) == 2
    assert "--resume" in again.output.read_text()
