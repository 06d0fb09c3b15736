"""A run on this machine that its forecast steers: a real sidecar, small roles for the rest."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from cli_tests.recorded_decisions import opened
from cli_tests.test_cli_run import RUN, Shell, shell
from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.curve import curve_csv
from scalerl_api.load import parse_run, to_yaml
from scalerl_api.wire import EvaluationPoint
from scalerl_autoscaling.models import Action
from scalerl_cli.main import main

pytestmark = pytest.mark.slow

AUTO: dict[str, Any] = {"mode": "Auto", "minGain": "0.04", "stopAfter": 2}
LONG: dict[str, Any] = {"maxSteps": 100_000}


def decisions(run: Shell) -> list[dict[str, Any]]:
    path = run.directory / "decisions.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def states(run: Shell) -> list[str]:
    return [line["decision"]["state"] for line in decisions(run)]


def test_flat_curve_stops_run_and_resume_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"autoscaling": AUTO, "budget": LONG}
    with shell(tmp_path, spec=spec, SMALL_COORDINATOR="flattens") as run:
        assert run.finish(120) == 0, run.text()
    assert run.summary()["stop_reason"] == "forecast"
    assert run.summary()["decision"]["state"] == "STOP"
    assert states(run)[0] == "INSUFFICIENT"
    assert states(run)[-1] == "STOP"
    assert "autoscaler: STOP: " in run.text()
    assert main(["replay", str(run.directory)]) == 0
    before = len(decisions(run))
    run.forget_end()

    with shell(
        tmp_path, "--dir", str(run.directory), "--resume", spec=spec, SMALL_COORDINATOR="flattens"
    ) as again:
        again.until(lambda: len(decisions(again)) > before)
        again.interrupt()
    assert "resumed after: forecast" in again.text()
    assert decisions(again)[before]["decision"]["action"]["kind"] == "none", "a stop that was taken back"


def finished_before(root: Path, spec: dict[str, Any]) -> None:
    """A run that has ended, on the curve that ``flattens`` has."""
    root.mkdir()
    made = parse_run(yaml.safe_dump(RUN | {"spec": RUN["spec"] | spec}), "test")
    (root / "run.yaml").write_text(to_yaml(made.to_manifest()))
    points = [
        EvaluationPoint(
            version=v,
            work_tokens=v * 1000,
            reward=0.2 + 0.4 / (1 + (30 / max(v, 1e-9)) ** 2) + 0.004 * (v * 13 % 11 / 5 - 1),
            standard_error=0.02,
            samples=128,
            prompts=32,
            set_digest="x",
            mixed_versions=False,
            truncated_fraction=0.0,
            mean_tokens=6.0,
            wall_seconds=v,
            device_seconds=v,
        )
        for v in range(0, 100_000, 10)
    ]
    (root / "curve.csv").write_text(curve_csv(points))
    (root / "summary.json").write_text("{}")


def test_advisory_reports_only_with_finished_run_as_prior(tmp_path: Path) -> None:
    spec = {"autoscaling": AUTO | {"mode": "Advisory"}, "budget": LONG}
    finished_before(tmp_path / "before", spec)
    with shell(tmp_path, spec=spec, SMALL_COORDINATOR="flattens") as run:
        run.until(lambda: "autoscaler: STOP: " in run.text(), 120)
        assert "autoscaler: 1 finished run may be a prior of the forecast: before" in run.text()
        assert run.process.poll() is None
        run.interrupt()
    (use,) = decisions(run)[-1]["observation"]["forecast"]["earlier"]
    assert (use["name"], use["weight"] > 0.1) == ("before", True)


def test_run_continues_without_sidecar_and_reports_reason(tmp_path: Path) -> None:
    spec = {"autoscaling": AUTO, "budget": LONG}
    with shell(tmp_path, spec=spec, SMALL_COORDINATOR="flattens") as run:
        run.until(lambda: run.running(b"scalerl_curvefit.sidecar"))
        sidecar = run.running(b"scalerl_curvefit.sidecar")[-1]
        os.kill(sidecar, signal.SIGSTOP)  # there, and never answers

        def unanswered() -> list[int]:
            return [i for i, d in enumerate(decisions(run)) if "no forecast" in str(d["decision"]["reasons"])]

        run.until(unanswered, 120)
        # What was under way when it was stopped may have been answered.
        assert set(states(run)[unanswered()[0] :]) == {"INSUFFICIENT"}
        assert run.process.poll() is None
        os.kill(sidecar, signal.SIGCONT)  # a stopped process ends only by SIGKILL, after half a minute
        run.interrupt()


def test_broken_run_is_held_and_resume_continues(tmp_path: Path) -> None:
    spec = {"autoscaling": AUTO, "budget": LONG}
    with shell(tmp_path, spec=spec, SMALL_COORDINATOR="cuts-off") as run:
        assert run.finish(120) == 1, run.text()
    assert run.summary()["stop_reason"] == "broken"
    assert run.summary()["decision"]["state"] == states(run)[-1] == "BROKEN"
    made = [(line["decision"]["state"], line["decision"]["action"]["kind"]) for line in decisions(run)]
    assert made[-1] == ("BROKEN", "hold")
    assert made[made.index(("BROKEN", "hold")) - 1] == ("BROKEN", "none"), "not at the first"
    said = run.text()
    assert "autoscaler: BROKEN: 30.0% of the completions" in said
    assert "suspended, because it was found broken: 30.0% of the completions" in said
    shown = said.partition("continue with: ")[2].splitlines()[0]
    assert shlex.split(shown)[1:] == ["run", "run/run.yaml", "--resume", "--dir", "run"]
    before, step = len(decisions(run)), run.step()
    run.forget_end()

    with shell(tmp_path, *shlex.split(shown)[3:], spec=spec, SMALL_COORDINATOR="cuts-off") as again:
        # It is no better, and the user has resumed it with this knowledge.
        again.until(lambda: len(decisions(again)) > before + 3, 120)
        assert again.step() > step
        again.interrupt()
    assert "resumed after: broken" in again.text()
    assert {line["decision"]["action"]["kind"] for line in decisions(again)[before:]} == {"none"}


def test_resumed_run_keeps_generator_count(tmp_path: Path) -> None:
    spec = {"autoscaling": AUTO | {"generators": {"max": 2}}, "budget": LONG}
    with shell(tmp_path, spec=spec) as run:
        run.until(lambda: decisions(run))
        run.interrupt()
    assert not list((run.directory / "logs").glob("generator-1*"))
    record = asyncio.run(opened(run.directory / "decisions.jsonl"))
    last = record.summary.last
    assert last is not None
    grown = replace(last.decision, action=Action(kind="scale", scale_to=2))
    rules = AutoscalingSpec.model_validate(spec["autoscaling"])
    asyncio.run(record.append("balance", rules, record.summary.points, last.observation, grown))
    run.forget_end()

    with shell(tmp_path, "--dir", str(run.directory), "--resume", spec=spec) as again:
        again.until(lambda: len(list((run.directory / "logs").glob("generator-1*"))) == 2)
        again.interrupt()
    assert "generators: 2, as chosen before (1 in the spec)" in again.text()
