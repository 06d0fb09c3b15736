"""A run on this machine that its forecast steers: a real sidecar, small roles for the rest."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli_tests.test_cli_run import Shell, shell
from scalerl_cli.main import main

AUTO: dict[str, Any] = {"mode": "Auto", "minGain": "0.02", "stopAfter": 2}
LONG: dict[str, Any] = {"maxSteps": 100_000}


def decisions(run: Shell) -> list[dict[str, Any]]:
    path = run.directory / "decisions.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def states(run: Shell) -> list[str]:
    return [line["decision"]["state"] for line in decisions(run)]


@pytest.mark.timeout(180)
def test_a_flat_curve_ends_the_run_and_a_resume_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"autoscaling": AUTO, "budget": LONG}
    with shell(tmp_path, spec=spec, SMALL_COORDINATOR="flattens") as run:
        assert run.finish(90) == 0, run.text()
    assert run.summary()["stop_reason"] == "forecast"
    assert run.summary()["decision"]["state"] == "STOP"
    assert states(run)[0] == "INSUFFICIENT"
    assert states(run)[-1] == "STOP"
    assert "autoscaler: STOP: " in run.text()
    assert main(["replay", str(run.directory)]) == 0
    before = len(decisions(run))

    with shell(
        tmp_path, "--dir", str(run.directory), "--resume", spec=spec, SMALL_COORDINATOR="flattens"
    ) as again:
        again.until(lambda: len(decisions(again)) > before)
        again.process.send_signal(signal.SIGINT)
        assert again.finish(30) == 130
    assert "going on after: forecast" in again.text()
    assert decisions(again)[before]["decision"]["action"]["kind"] == "none", "a stop that was taken back"


@pytest.mark.timeout(120)
def test_advisory_says_so_and_changes_nothing(tmp_path: Path) -> None:
    spec = {"autoscaling": AUTO | {"mode": "Advisory"}, "budget": LONG}
    with shell(tmp_path, spec=spec, SMALL_COORDINATOR="flattens") as run:
        run.until(lambda: "autoscaler: STOP: " in run.text(), 60)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        assert run.finish(30) == 130


@pytest.mark.timeout(120)
def test_without_its_sidecar_the_run_goes_on_and_says_why(tmp_path: Path) -> None:
    spec = {"autoscaling": AUTO, "budget": LONG}
    with shell(tmp_path, spec=spec, SMALL_COORDINATOR="flattens") as run:

        def sidecars() -> list[int]:
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in run.left()}
            return [p for p, c in commands.items() if b"scalerl_curvefit.sidecar" in c and b"leash" not in c]

        run.until(sidecars)
        os.kill(sidecars()[-1], signal.SIGSTOP)  # there, and never answers
        run.until(
            lambda: any("no forecast" in str(line["decision"]["reasons"]) for line in decisions(run)), 80
        )
        assert set(states(run)) == {"INSUFFICIENT"}
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        assert run.finish(40) == 130
