"""Whole files under `validate`: several at once, the examples, warnings, the recipe that they give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from cli_tests.good_run import REMOVE, ROOT, Check, changed
from scalerl_api.load import load_run, to_yaml
from scalerl_api.recipe import RecipeSpec
from scalerl_cli.inputs import load
from scalerl_cli.main import main
from scalerl_cli.validate import problems
from scalerl_coordinator.tracking import supervisor

pytestmark = pytest.mark.usefixtures("any_vllm", "without_the_check_in_torch")


def test_tracker_without_its_package(tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(changed(spec__trackers={"mlflow": {"uri": "https://mlflow"}}))
    assert problems(file) == []
    monkeypatch.setitem(supervisor._PACKAGES, "mlflow", "scalerl_no_such_package")
    check(
        file,
        ["spec.trackers.mlflow", "package scalerl_no_such_package is missing", "requirements/trackers.txt"],
    )


def test_all_problems_of_all_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(
        changed(spec__trainer__replicas=0, spec__generator__replicas=0, kind="x")
    )
    (tmp_path / "b.yaml").write_text(changed())
    (tmp_path / "c.yaml").write_text(
        changed(
            spec__task__reasoningGym__name="nope",
            spec__trainer={"devices": 1, "replicas": 4096},
            spec__recipe__promptsPerStep=4096,
        )
    )
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml", "c.yaml", "missing.yaml")]
    assert main(["validate", *files]) == 2
    out, err = capsys.readouterr()
    assert out == f"{files[1]}: ok\n"
    lines = err.splitlines()
    assert [sum(line.startswith(file) for line in lines) for file in files] == [3, 0, 2, 1]
    assert "missing.yaml: file: No such file or directory (check the path)" in err
    assert lines[-1] == "3 of 4 files cannot be used"


def test_files_of_tools_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = ["calculator", {"search": {"path": "passages.jsonl", "results": 2}}]
    environment = {"name": "tools", "parameters": {"tools": tools}}
    (run := tmp_path / "run").mkdir()
    (run / "passages.jsonl").write_text('{"text": "a"}\n')
    (run / "run.yaml").write_text(changed(spec__task__environment=environment))
    monkeypatch.chdir(tmp_path)
    spec = load(Path("run/run.yaml")).spec
    assert spec.task.environment is not None
    assert list(spec.task.environment.tool_files.values()) == [str(run / "passages.jsonl")]
    assert main(["validate", "run/run.yaml"]) == 0
    own = {"python": {"path": "own.py", "className": "A"}, "parameters": {"path": "a"}}
    (run / "run.yaml").write_text(changed(spec__task__environment=own, spec__task__verifier=REMOVE))
    spec = load(Path("run/run.yaml")).spec
    assert spec.task.environment is not None
    assert spec.task.environment.parameters == {"path": "a"}


def test_suspended_run_is_fine_but_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(changed(spec__suspend=True))
    assert main(["validate", str(file)]) == 0
    assert main(["run", str(file), "--dir", str(tmp_path / "run")]) == 2
    assert "spec.suspend: a suspended run is not started (set it to false)" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]


# Those for a cluster name paths in its pods.
EXAMPLES = sorted(
    f
    for f in ROOT.glob("examples/**/*.yaml")
    if f.name not in ("run-kubernetes.yaml", "server.yaml", "agent-sandbox.yaml")
)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_example_is_valid(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--any-machine", str(file)]) == 0, capsys.readouterr().err


def test_servers_of_one_machine_need_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word of it that names a file beside the run file is that file, from wherever the run is started."""
    (tmp_path / "game.py").write_text("")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "1"}}\n' for n in range(99)))
    spec = yaml.safe_load((ROOT / "examples/tiny-nim/run.yaml").read_text())
    spec["spec"].pop("warmStart")
    spec["spec"]["task"] |= {
        "jsonl": {"path": "rows.jsonl"},
        "environment": {"name": "server"},
        "heldOut": {"size": 2},
    }
    spec["spec"]["environment"] = {"image": "game:1"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    assert main(["validate", str(tmp_path / "run.yaml")]) == 2
    assert "spec.environment.command: no image is started on one machine" in capsys.readouterr().err
    assert main(["validate", "--any-machine", str(tmp_path / "run.yaml")]) == 0
    (tmp_path / "python3").symlink_to(sys.executable)
    words = [str(tmp_path / "python3"), "game.py", "--port=$(PORT)", "-c" + 300 * "x"]
    spec["spec"]["environment"]["command"] = words
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    found = load(tmp_path / "run.yaml").spec.environment
    assert found is not None
    assert found.command == [words[0], str(tmp_path / "game.py"), *words[2:]]
    monkeypatch.delenv("SCALERL_ENVIRONMENT_URL", raising=False)
    (tmp_path / "done.jsonl").write_text('{"prompt": "1", "answer": "1", "completion": "1"}\n')
    given = ["score", str(tmp_path / "run.yaml"), "--completions", str(tmp_path / "done.jsonl")]
    assert main(given) == 2
    assert "the servers of spec.environment run with a run" in capsys.readouterr().err


def test_examples_exist() -> None:
    assert {f.parent.name for f in EXAMPLES} >= {"tiny", "gsm-hub", "agent-hub", "own-jsonl"}


def test_validate_prints_warnings_and_takes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        changed(spec__recipe__optimizer={"learningRate": "0.5"}, spec__checkpoint__everySteps=500)
    )
    assert main(["validate", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{file}: ok\n"
    assert err.splitlines() == [
        f"{file}: warning: spec.recipe.optimizer.learningRate: 0.5 is more than policies are trained with "
        "(1e-7 to 1e-5 for pretrained models, at most 1e-3 for tiny ones)",
        f"{file}: warning: spec.checkpoint.everySteps: 500 is more than budget.maxSteps (200): "
        "a failure costs the whole run",
    ]


@pytest.mark.parametrize(("mode", "code"), [("Auto", 2), ("Advisory", 2), ("Off", 0)])
def test_validate_refuses_a_deadline_that_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, code: int
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(changed(spec__autoscaling={"mode": mode, "deadline": "2020-01-01T00:00:00Z"}))
    assert main(["validate", str(file)]) == code
    said = capsys.readouterr().err
    over = "2020-01-01T00:00:00Z is over (set a later time, or leave it out)"
    unread = "warning: spec.autoscaling.deadline: is not used with mode: Off (set mode to Advisory or Auto)"
    assert (over if code else unread) in said


def test_validate_shows_every_value_of_the_recipe_and_its_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a run's own file, which has all values written out."""
    recipe = {
        "preset": "dapo",
        "promptsPerStep": 8,
        "maxCompletionTokens": 6,
        "loss": {"ppoClip": {"clipLow": "0.1"}},
    }
    (tmp_path / "run.yaml").write_text(changed(spec__recipe=recipe))
    (tmp_path / "written.yaml").write_text(to_yaml(load_run(tmp_path / "run.yaml").to_manifest()))
    shown = []
    for file in (tmp_path / "run.yaml", tmp_path / "written.yaml"):
        assert main(["validate", "--show", str(file)]) == 0
        head, *lines, end = capsys.readouterr().out.splitlines()
        assert (head, end) == (f"{file}: recipe dapo", f"{file}: ok")
        shown.append(lines)
    assert shown[0] == shown[1]
    for line in (
        "loss.ppoClip.clipLow: 0.1 (spec)",
        "loss.ppoClip.clipHigh: 0.26 (preset: as rebuilt in ScaleRL, arXiv 2510.13786 [P])",
        "advantage.normalization: Group (preset: DAPO, arXiv 2503.14476 [P])",
        "length.none: {} (preset: the papers do not say [?])",
        "kl.none: {} (default)",
        "completionsPerPrompt: 16 (default: ScaleRL, arXiv 2510.13786 [P])",
        "promptsPerStep: 8 (spec)",
    ):
        assert f"  {line}" in shown[0]
    said = {line.strip().split(":")[0] for line in shown[0]}
    sections = {field.partition(".")[0] for field in said}
    assert sections == {field.alias for field in RecipeSpec.model_fields.values()} - {
        "preset",
        "distillation",
        "offPolicyMask",
        "refill",
    }
