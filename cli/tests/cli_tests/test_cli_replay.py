"""``scalerl replay`` on a record of real decisions."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from cli_tests.recorded_decisions import opened
from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import EarlierUse
from scalerl_api.load import parse_run
from scalerl_api.paths import RunPaths
from scalerl_api.wire import Counts, EvaluationPoint, Phase, Status
from scalerl_autoscaling.decide import decide
from scalerl_autoscaling.decision_log import Line
from scalerl_autoscaling.forecast_request import build_request
from scalerl_autoscaling.models import Generators, History
from scalerl_autoscaling.observation import observe, point
from scalerl_autoscaling.replay import verify
from scalerl_cli.main import main
from scalerl_curvefit.sidecar.forecast_answers import answer_forecast
from scalerl_curvefit.simulate import simulated

RUN = """
metadata: {{name: replayed}}
spec:
  model: {{scratch: {{}}}}
  task: {{reasoningGym: {{name: chain_sum}}, verifier: {{name: reasoning-gym}}}}
  budget: {{maxSteps: 500}}
  autoscaling: {autoscaling}
"""


def evaluation(index: int, reward: float) -> EvaluationPoint:
    return EvaluationPoint(
        version=10 * index,
        work_tokens=1000 * index,
        reward=reward,
        standard_error=0.01,
        samples=4000,
        prompts=1000,
        set_digest="set",
        mixed_versions=False,
        truncated_fraction=0.01,
        mean_tokens=5.0,
        wall_seconds=100.0 * index,
        device_seconds=300.0 * index,
    )


def status(points: list[EvaluationPoint]) -> Status:
    last = points[-1]
    return Status(
        phase=Phase.RUNNING,
        waiting_for="",
        step=last.version,
        published_version=last.version,
        stop_reason="",
        counts=Counts(**dict.fromkeys(Counts.__struct_fields__, 0)),
        members=[],
        points=points,
        last_step_stats={},
        wall_seconds=last.wall_seconds,
        device_seconds=last.device_seconds,
        tokens_generated=0,
        tokens_trained=0,
        generator_busy_fraction=0.5,
        trainer_busy_fraction=0.5,
        max_staleness_steps=1,
        mean_staleness_steps=0.5,
    )


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A run that has long become flat, looked at by a policy that stops after three evaluations."""
    rules = AutoscalingSpec(mode="Auto")
    spec = parse_run(RUN.format(autoscaling="{mode: Auto}"), "test").spec
    curve = [
        evaluation(i, float(r))
        for i, r in enumerate(simulated(n=40, reach=16, sigma=0.005, seed=3).reward, 1)
    ]
    path = tmp_path_factory.mktemp("recorded") / "decisions.jsonl"
    record = asyncio.run(opened(path))
    for count in range(28, 41):
        points = [point(e) for e in curve[:count]]
        one = Generators(wanted=1, ready=1)
        seen = observe(spec, status(curve[:count]), points, one, unix_seconds=1.7e9)
        asked = build_request(rules, points, seen, record.summary.history)
        assert not isinstance(asked, str)
        seen = replace(seen, forecast=answer_forecast(asked))
        decision = decide(rules, seen, record.summary.history)
        asyncio.run(record.append("autoscale", rules, points, seen, decision))
    return path.read_bytes()


@pytest.fixture
def directory(tmp_path: Path, content: bytes) -> Path:
    RunPaths(tmp_path).decisions.write_bytes(content)
    return tmp_path


def policy(tmp_path: Path, autoscaling: str) -> Path:
    path = tmp_path / "other.yaml"
    path.write_text(RUN.format(autoscaling=autoscaling))
    return path


def test_record_that_holds(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(directory)]) == 0
    said = capsys.readouterr().out
    assert "13 decisions, all reproduced" in said
    assert "STOP, stop (Suspend): P(gain at 2× the compute > 0.04) is" in said


def test_earlier_runs_that_counted_are_shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = verify(RunPaths(directory).decisions.read_bytes())
    recorded: list[Line] = []
    for line in lines:
        assert line.observation.forecast is not None
        earlier = [EarlierUse(name=n, weight=w, reason="") for n, w in (("a", 0.9), ("b", 0.3), ("c", 0.0))]
        seen = replace(line.observation, forecast=replace(line.observation.forecast, earlier=earlier))
        before = recorded[-1].decision.history if recorded else History()
        decision = decide(AutoscalingSpec(mode="Auto"), seen, before)
        recorded.append(replace(line, observation=seen, before=before, decision=decision))
    RunPaths(directory).decisions.write_bytes(
        b"".join(msgspec.json.encode(line) + b"\n" for line in recorded)
    )
    assert main(["replay", str(directory)]) == 0
    said = capsys.readouterr().out
    stops = [line for line in said.splitlines() if "STOP" in line]
    assert stops
    assert all(line.endswith(" (2 earlier runs as prior)") for line in stops)


def test_replay_names_line_and_field_of_a_changed_byte(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = RunPaths(directory).decisions
    lines = path.read_bytes().split(b"\n")
    lines[5] = lines[5].replace(b'"state":"STOP"', b'"state":"GROW"', 1)
    path.write_bytes(b"\n".join(lines))
    assert main(["replay", str(directory)]) == 1
    said = capsys.readouterr().err
    assert "line 6: before.state: recorded 'GROW', 'STOP' follows" in said


@pytest.mark.parametrize(
    ("autoscaling", "says", "stop"),
    [
        ("{mode: Advisory}", "0 of 13 decisions", "at version 300"),
        ("{mode: Auto, stopAfter: 5}", "2 of 13 decisions", "at version 320"),
        ('{mode: Auto, minGain: "0.0001"}', "13 of 13 decisions", "never"),
    ],
)
def test_replay_under_another_policy(
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    autoscaling: str,
    says: str,
    stop: str,
) -> None:
    assert main(["replay", str(directory), "--policy", str(policy(tmp_path, autoscaling))]) == 0
    said = capsys.readouterr().out
    assert says in said
    assert f"first stop: recorded at version 300, other {stop}" in said


# --- from a cluster --------------------------------------------------------------------------------


def test_standard_input(
    content: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["replay", "-"]) == 0
    assert "-: 13 decisions" in capsys.readouterr().out


@pytest.mark.parametrize("garbage", [b"", b"{", b"apiVersion: v1"])
def test_replay_names_the_number_of_a_garbage_line(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str], garbage: bytes
) -> None:
    path = tmp_path / "decisions.jsonl"
    lines = content.split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], garbage, *lines[5:]]))
    assert main(["replay", str(path)]) == 1
    assert f"{path}: line 5: line: " in capsys.readouterr().err


def test_bad_input_is_reported_and_nothing_replayed(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert main(["replay", str(directory), "--policy", str(tmp_path / "no.yaml")]) == 2
    assert main(["replay", str(directory), "--policy", str(policy(tmp_path, "{mode: Off}"))]) == 2
    assert main(["replay", str(directory), "--policy", str(policy(tmp_path, "{minGain: 1}"))]) == 2
    said = capsys.readouterr().err
    assert "Advisory or Auto" in said
    assert "spec.autoscaling.minGain" in said


def test_empty_record_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / RunPaths(Path()).decisions.name
    path.write_bytes(b"")
    assert main(["replay", str(path)]) == 2
    assert "empty; wait for the run's first decision" in capsys.readouterr().err
