"""Summary, picture and progress from what a run leaves and says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl_api.load import SpecError, load_run, parse_run
from scalerl_api.paths import RunPaths
from scalerl_api.wire import Counts, EvaluationPoint, Mismatch, Phase, Status
from scalerl_cli import labels, run
from scalerl_cli.main import main
from scalerl_cli.progress import Progress
from scalerl_cli.summary import rows, summarize, write
from scalerl_lifecycle.budget import Rates
from scalerl_lifecycle.workloads import Role
from scalerl_local.run_view import Event, Failure, RunResult, Snapshot, Startup, UnitState, UnitStatus

RUN = parse_run(
    """
metadata: {name: pictured}
spec:
  model: {scratch: {}}
  task: {reasoningGym: {name: chain_sum}, verifier: {name: reasoning-gym}}
  budget: {maxSteps: 100}
""",
    "test",
)
HEADER = (
    "compute,reward,samples,standard_error,version,wall_seconds,device_seconds,mean_tokens,"
    "truncated_fraction,mixed_versions\n"
)


def point(version: int, reward: float, mixed: bool = False) -> EvaluationPoint:
    return EvaluationPoint(
        version=version,
        work_tokens=1000 * version,
        reward=reward,
        standard_error=0.01,
        samples=256,
        prompts=64,
        set_digest="x",
        mixed_versions=mixed,
        truncated_fraction=0.0,
        mean_tokens=5.0,
        wall_seconds=1.0,
        device_seconds=3.0,
    )


def measured(source: str, positions: str, kl: float) -> Mismatch:
    return Mismatch(source=source, positions=positions, kl=kl, recent_kl=9.0, tokens=1000)


def status(**changes: Any) -> Status:
    counts = dict.fromkeys(Counts.__struct_fields__, 0)
    base: dict[str, Any] = {
        "phase": Phase.RUNNING,
        "waiting_for": "",
        "step": 20,
        "published_version": 20,
        "stop_reason": "",
        "counts": Counts(**counts | {"acknowledged": 40, "trained": 30, "filtered": 8, "queued": 2}),
        "members": [],
        "points": [point(0, 0.3), point(10, 0.5)],
        "last_step_stats": {},
        "wall_seconds": 100.0,
        "device_seconds": 360.0,
        "tokens_generated": 12_000,
        "tokens_trained": 9_000,
        "generator_busy_fraction": 0.75,
        "trainer_busy_fraction": 0.5,
        "max_staleness_steps": 3,
        "mean_staleness_steps": 1.25,
        "mismatch": [
            measured("sampled", "all", 0.0021),
            measured("sampled", "0_256", 0.002),
            measured("sampled", "256_1k", 0.0022),
            measured("probe", "all", 0.004),
        ],
    }
    return Status(**base | changes)


def outcome(**changes: Any) -> RunResult:
    startup = Startup(12.5, {"prepare": 3.0}, {"the model and tokenizer to be prepared": 3.0, "vLLM": 9.5})
    base: dict[str, Any] = {
        "failure": None,
        "interrupted": False,
        "status": status(stop_reason="maxSteps"),
        "startup": startup,
        "peak_memory_bytes": 3 << 30,
        "restarts": {},
    }
    return RunResult(**base | changes)


def write_curve(paths: RunPaths, points: list[tuple[float, float, int]]) -> None:
    paths.curve.write_text(
        HEADER + "".join(f"{c},{r},256,0.01,{v},1.0,3.0,5.0,0.0,False\n" for c, r, v in points)
    )


# --- summary -----------------------------------------------------------------------------------


def test_summary_has_what_a_run_promises(tmp_path: Path) -> None:
    summary = summarize(RUN, outcome())
    write(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    wanted = {
        "steps": 20,
        "first_reward": 0.3,
        "last_reward": 0.5,
        "wall_seconds": 100.0,
        "device_hours": 0.1,
        "tokens_generated": 12_000,
        "tokens_trained": 9_000,
        "generator_busy_fraction": 0.75,
        "trainer_busy_fraction": 0.5,
        "max_staleness_steps": 3,
        "sampled_kl": 0.0021,
        "probe_kl": 0.004,
        "ratio_kl": None,
        "mismatch_by_position": {"sampled": {"0_256": 0.002, "256_1k": 0.0022}, "probe": {}, "ratio": {}},
        "stop_reason": "maxSteps",
        "peak_memory_bytes": 3 << 30,
    }
    assert {key: summary[key] for key in wanted} == wanted
    assert summary["counts"]["acknowledged"] == 40
    assert summary["startup"]["first_lease_seconds"] == 12.5
    table = dict(rows(summary))
    assert table["reward, last"] == "0.500 ± 0.020"
    assert table["start to first lease"] == "12 s (the model and tokenizer to be prepared 3 s, vLLM 10 s)"
    assert table["mismatch (KL)"] == "0.0021 sampled, 0.004 probe"
    assert table["rollouts"] == "40 = 30 trained + 8 filtered + 2 queued"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"interrupted": True, "status": status(stop_reason="interrupted")}, "interrupted"),
        ({"interrupted": True, "status": status()}, "interrupted"),
        (
            {"failure": Failure("trainer", Role.TRAINER, "exited", False, 1, "log")},
            "failed: trainer: exited",
        ),
    ],
)
def test_why_it_ended(changes: dict[str, Any], reason: str) -> None:
    assert summarize(RUN, outcome(**changes))["stop_reason"] == reason


def test_run_without_points_has_no_rewards() -> None:
    summary = summarize(RUN, outcome(status=status(points=[], mismatch=[])))
    assert summary["first_reward"] is None
    assert dict(rows(summary))["reward, first"] == "–"


# --- picture -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 12])
def test_plot_draws_few_and_many_points(tmp_path: Path, count: int) -> None:
    paths = RunPaths(tmp_path)
    curve = [(1000.0 * v, 0.2 + 0.4 / (1 + (8 / (v or 0.1)) ** 2), v) for v in range(0, 5 * count, 5)]
    write_curve(paths, curve)
    paths.run_file.write_text(json.dumps(RUN.to_manifest()))
    assert main(["plot", str(tmp_path)]) == 0
    assert paths.curve_picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curve.csv", "curve.png", "run.yaml"]


def test_plot_draws_a_run_that_only_an_earlier_release_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, manifest = RunPaths(tmp_path), RUN.to_manifest()
    write_curve(paths, [(1000.0 * version, 0.1 * version, version) for version in range(3)])
    manifest["spec"]["recipe"]["temperature"] = "1e5"
    manifest["spec"]["model"]["path"] = "beside/the/file"
    paths.run_file.write_text(json.dumps(manifest))
    with pytest.raises(SpecError, match=r"recipe\.temperature"):
        load_run(paths.run_file)
    assert main(["plot", str(tmp_path)]) == 0, capsys.readouterr().err
    assert paths.curve_picture.read_bytes().startswith(b"\x89PNG")
    paths.run_file.write_text("- no run\n")
    assert main(["plot", str(tmp_path)]) == 2
    assert "run.yaml" in capsys.readouterr().err


def test_run_whose_directory_was_removed_is_not_to_be_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = SimpleNamespace(unit="prepare", reason="bad", log="", bad_input=True, role=Role.PREPARE)

    async def ended(*_: object) -> tuple[Any, int]:
        return SimpleNamespace(interrupted=True, failure=failure), 1

    monkeypatch.setattr(run, "_run_displayed", ended)
    plan: Any = lambda spec: None  # noqa: E731
    assert run.run_spec(RUN, tmp_path / "run", plan, 0.0, resume=False) == 2
    assert not (tmp_path / "run").exists()
    assert "continue with" not in capsys.readouterr().out


def test_plot_of_no_run_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "run.yaml" in capsys.readouterr().err


# --- progress -------------------------------------------------------------------------------------


def snapshot(elapsed: float, current: Status | None, units: dict[str, UnitState] | None = None) -> Snapshot:
    roles = {"prepare": Role.PREPARE, "trainer": Role.TRAINER}
    made = [UnitStatus(n, roles.get(n, Role.GENERATOR), s) for n, s in (units or {}).items()]
    return Snapshot(elapsed, current, tuple(made), Rates(3210.0, 1234.5, 2.0), "", 160.0)


def test_lines_say_each_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = Progress(RUN)
    view.snapshot(snapshot(0.3, None, {"prepare": UnitState.STARTING}))
    view.snapshot(snapshot(3.0, None, {"prepare": UnitState.DONE, "trainer": UnitState.STARTING}))
    view.event(Event("trainer", "trainer-0 was killed by SIGKILL; restarting in 1 s", True))
    view.snapshot(snapshot(4.0, status(), {"prepare": UnitState.DONE, "trainer": UnitState.READY}))
    view.snapshot(snapshot(4.5, status()))
    view.snapshot(snapshot(5.0, status(step=21, points=[*status().points, point(20, 0.6, mixed=True)])))
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "· prepare: done after 3 s",
        "! trainer: trainer-0 was killed by SIGKILL; restarting in 1 s",
        "· trainer: ready after 4 s",
        "* evaluation: reward 0.300 ± 0.020 at v0",
        "* evaluation: reward 0.500 ± 0.020 at v10",
        "step 20/100  reward 0.500 (first 0.300)  generated 3,210 tok/s  trained 1,234 tok/s  "
        "staleness 1.2 (max 3)  mismatch 0.0021  left 2 min 40 s",
        "* evaluation: reward 0.600 ± 0.020 at v20 (mixed)",
        "step 21/100  reward 0.600 (first 0.300)  generated 3,210 tok/s  trained 1,234 tok/s  "
        "staleness 1.2 (max 3)  mismatch 0.0021  left 2 min 40 s",
    ]


def test_waiting_line_is_not_repeated_every_second(capsys: pytest.CaptureFixture[str]) -> None:
    view = Progress(RUN)
    waiting = status(phase=Phase.WAITING, waiting_for="generator-0 to load its weights", step=0, points=[])
    for second in range(40):
        view.snapshot(snapshot(float(second), waiting))
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 5
    assert lines[0].endswith("waiting for generator-0 to load its weights")


def test_waiting_line_has_the_last_error_of_what_it_waits_for() -> None:
    waiting = status(phase=Phase.WAITING, waiting_for="a generator to register", step=0, points=[])
    seen = snapshot(5.0, waiting, {"generator-0-server": UnitState.BACK_OFF})
    assert labels.waiting(seen) == "waiting for a generator to register"
    before = status(phase=Phase.WAITING, waiting_for="a generator to register", stop_reason="maxSteps")
    assert labels.waiting(snapshot(5.0, before)) == "waiting for a generator to register"  # it goes on
    seen.units[-1].last_error = "generator-0-server exited with code 1 before it was ready: no such layer"
    assert labels.waiting(seen) == (
        "waiting for a generator to register "
        "(generator-0-server exited with code 1 before it was ready: no such layer)"
    )
