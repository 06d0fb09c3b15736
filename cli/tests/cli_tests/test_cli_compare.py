"""``scalerl compare``: what is run, resumed and left alone, and what the table says of it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from curve_files import ink, write_plain, write_run

from cli_tests import small_roles
from scalerl_api.edits import Effect, edit_of, leaves
from scalerl_api.load import to_yaml
from scalerl_api.paths import RunPaths
from scalerl_cli import inputs
from scalerl_cli.compare import run_compare
from scalerl_cli.exits import Refused, exit_code
from scalerl_cli.inputs import load
from scalerl_cli.main import main, parser
from scalerl_cli.variants import NOT_OF_THE_RESULT, parse_variant, planned
from scalerl_local.resume_changes import OF_A_CLUSTER

TASK = {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "reasoning-gym"}}


def write_spec(path: Path, **spec: Any) -> Path:
    given = {"model": {"scratch": {}}, "task": TASK, "budget": {"maxSteps": 60}} | spec
    run = {"apiVersion": "scalerl.dev/v1alpha1", "kind": "ScaleRLRun", "metadata": {"name": "small"}}
    path.write_text(yaml.safe_dump(run | {"spec": given}))
    return path


class FakeRunner:
    """In place of ``scalerl run``: leaves the files of a run, ended as ``ends`` says by label."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.ends: dict[str, str] = {}
        self.collapse: dict[str, float] = {}
        self.calls: list[tuple[str, int, bool]] = []

    def __call__(self, plan: Any, directory: Path, resume: bool) -> int:
        self.calls.append((plan.recipe, plan.run.spec.seed, resume))
        directory.mkdir(parents=True, exist_ok=resume)
        (directory / "run.yaml").write_text(to_yaml(plan.run.to_manifest()))
        end = self.ends.get(plan.recipe, "maxSteps")
        write_run(directory / "curve.csv", collapse=self.collapse.get(plan.recipe, 0.0))
        (directory / "summary.json").write_text(json.dumps({"stop_reason": end}))
        return {"maxSteps": 0, "interrupted": 130}.get(end, 1)

    def compare(self, *words: str | Path) -> int:
        """``scalerl compare`` on these runs; ``calls`` are those of this command."""
        self.calls = []
        arguments = parser().parse_args(["compare", *map(str, words), "--dir", str(self.tmp / "compare")])
        return exit_code(lambda: run_compare(arguments, runner=self))

    def rows(self) -> dict[str, dict[str, str]]:
        with (self.tmp / "compare/comparison.csv").open() as file:
            return {row["recipe"]: row for row in csv.DictReader(file)}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    monkeypatch.setattr(inputs, "vllm_problem", lambda spec: None)
    return FakeRunner(tmp_path)


def test_compare_runs_each_variant_and_seed_once(
    runs: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (write_spec(tmp_path / "run.yaml"), "--vary", "dapo: recipe.loss={ppoClip: {}}", "--seeds", "2")
    assert runs.compare(*words) == 0
    assert runs.calls == [("small", 0, False), ("small", 1, False), ("dapo", 0, False), ("dapo", 1, False)]
    names = sorted(path.name for path in (tmp_path / "compare").iterdir() if path.is_dir())
    assert [name[:-9] for name in names] == [
        *("small-dapo-seed-0", "small-dapo-seed-1", "small-seed-0", "small-seed-1"),
    ]
    assert {label: row["runs"] for label, row in runs.rows().items()} == {"small": "2", "dapo": "2"}
    assert ink(tmp_path / "compare/comparison.png") > 0.01
    text = (tmp_path / "compare/comparison.md").read_text()
    assert text.startswith("| recipe | runs | A | B | Cmid | reward at ")
    assert "- dapo against small: no difference" in text  # the runs are equal
    capsys.readouterr()
    assert runs.compare(*words) == 0
    assert runs.calls == []
    assert "1 of 4: small, seed 0: already finished" in capsys.readouterr().out


def test_compare_resumes_what_was_interrupted(
    runs: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (write_spec(tmp_path / "run.yaml"), "--vary", "b: seed=5", "--vary", "c: seed=6")
    runs.ends = {"b": "interrupted"}
    assert runs.compare(*words) == 130
    assert runs.calls == [("small", 0, False), ("b", 5, False)]
    assert "the same command resumes it" in capsys.readouterr().err
    assert not (tmp_path / "compare/comparison.md").exists()
    runs.ends = {}
    assert runs.compare(*words) == 0
    assert runs.calls == [("b", 5, True), ("c", 6, False)]


def test_compare_reports_and_retries_a_failed_run(
    runs: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (write_spec(tmp_path / "run.yaml"), "--vary", "b: recipe.fp32Logits=None", "--vary", "c: seed=6")
    runs.ends = {"b": "failed: trainer-0: out of memory"}
    assert runs.compare(*words) == 1
    assert [call[0] for call in runs.calls] == ["small", "b", "c"]
    assert "failed: trainer-0: out of memory" in capsys.readouterr().out
    row = runs.rows()["b"]
    assert (row["runs"], row["failed"], row["state"], row["A"]) == ("0", "1", "1 failed", "")
    assert runs.rows()["c"]["better"] == "tie"
    runs.ends = {}
    assert runs.compare(*words) == 0
    assert runs.calls == [("b", 0, True)]


def test_compare_counts_a_held_run_as_ended(
    runs: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (write_spec(tmp_path / "run.yaml"), "--vary", "b: seed=5")
    runs.ends, runs.collapse = {"b": "broken"}, {"b": 0.06}
    for calls in (2, 0):
        assert runs.compare(*words) == 1
        assert len(runs.calls) == calls
        said = capsys.readouterr()
        assert "undecided, a run is BROKEN" in said.out
        assert "suspended, because it was found broken" in said.err
    assert runs.rows()["b"]["state"] == "BROKEN"


def test_compare_says_that_a_spec_changed(
    runs: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs.compare(write_spec(tmp_path / "run.yaml")) == 0
    capsys.readouterr()
    assert runs.compare(write_spec(tmp_path / "run.yaml", budget={"maxSteps": 70})) == 0
    assert runs.calls == [("small", 0, False)]
    said = capsys.readouterr().out
    assert "new, for its spec is not that of" in said
    assert "(spec.budget.maxSteps: 60 → 70)" in said


def test_compare_keeps_runs_of_an_earlier_release(
    runs: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had not all fields, and perhaps another default."""
    spec = write_spec(tmp_path / "run.yaml")
    assert runs.compare(spec) == 0
    (directory,) = (path for path in (tmp_path / "compare").iterdir() if path.is_dir())
    file = RunPaths(directory).run_file
    manifest = yaml.safe_load(file.read_text())
    del manifest["spec"]["recipe"]["kl"]
    file.write_text(yaml.safe_dump(manifest))
    assert runs.compare(spec) == 0
    assert runs.calls == []
    manifest["spec"]["recipe"]["temperature"] = "0.9"
    manifest["spec"]["recipe"]["curriculum"] = {"uniform": {}}
    file.write_text(yaml.safe_dump(manifest))
    capsys.readouterr()
    assert runs.compare(spec) == 2
    error = capsys.readouterr().err
    assert 'other defaults (spec.recipe.temperature: "0.9" → "1"' in error
    assert "spec.recipe.curriculum: uniform → noPositiveResampling" in error


def test_compare_checks_everything_before_it_runs_anything(
    runs: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_spec(tmp_path / "run.yaml")
    same = ("--vary", "same: recipe.fp32Logits=Both")
    assert runs.compare(spec, tmp_path / "no.csv", "--vary", "recipe.lss=1", "--vary", "x", *same) == 2
    said = capsys.readouterr().err
    assert "spec.recipe.lss: unknown field (did you mean loss?)" in said
    assert "'x' is not FIELD=VALUE" in said
    assert "no.csv: neither a spec (.yaml), nor a curve" in said
    assert "same (seed 0) is the same run as small (seed 0)" in said
    assert runs.compare(write_plain(tmp_path / "c.csv"), "--seeds", "2") == 2
    assert "--vary and --seeds apply to spec files" in capsys.readouterr().err
    assert runs.calls == []


def test_compare_mixes_specs_with_runs_and_files(runs: FakeRunner, tmp_path: Path) -> None:
    done = tmp_path / "done"
    done.mkdir()
    write_run(done / "curve.csv")
    assert runs.compare(done, write_spec(tmp_path / "run.yaml"), write_run(tmp_path / "c.csv")) == 0
    assert list(runs.rows()) == ["done", "small", "c.csv"]


def test_compare_separates_what_is_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rule decides by A or by B; one run never separates at equal compute."""
    base = write_plain(tmp_path / "base.csv", n=60)
    slow = write_plain(tmp_path / "slow.csv", n=60, cmid=3200.0)
    (tmp_path / "low.csv").write_text(
        "compute,reward\n"
        + "".join(f"{c},{0.7 * float(r)}\n" for c, r in csv.reader(base.read_text().splitlines()[1:]))
    )
    words = [str(path) for path in (base, tmp_path / "low.csv", slow, base)]
    assert main(["compare", *words, "--samples", "16000", "--dir", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "low.csv against base.csv" not in said  # base.csv is there twice, so it goes by its path
    assert f"low.csv against {base}: separates: worse, A .4" in said
    assert "does not separate" in said
    assert "one run does not show the spread between seeds" in said


def test_load_replaces_fields(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "run.yaml", recipe={"offPolicy": {"pipeline": {"maxStalenessSteps": 1}}})
    changes = parse_variant(
        "recipe.offPolicy={ppo: {stepsPerBatch: 4}};spec.recipe.optimizer.learningRate=1.5e-4"
    )
    recipe = load(spec, changes.changes).spec.recipe
    assert recipe.off_policy.pipeline is None
    assert recipe.off_policy.ppo is not None
    assert recipe.optimizer.learning_rate == "1.5e-4"
    left = load(spec, parse_variant("recipe.offPolicy=null").changes).spec.recipe
    assert left.off_policy.pipeline is not None
    assert left.off_policy.pipeline.max_staleness_steps == 8


@pytest.mark.parametrize("text", ["", "a", "a b=1", "x:", "a={", "a=1;", "a.=1"])
def test_parse_variant_refuses(text: str) -> None:
    with pytest.raises(Refused, match="--vary"):
        parse_variant(text)


def test_hash_is_of_what_decides_the_result(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n')
    task = {"jsonl": {"path": "data.jsonl"}, "verifier": {"name": "exact"}}

    def digest(**spec: Any) -> str:
        return planned(load(write_spec(tmp_path / "r.yaml", task=task, **spec)), "r", None).digest

    one = digest()
    assert one == digest(checkpoint={"keep": 5}, trackers={"tensorBoard": {}}, images={"trainer": "x:1"})
    assert one == digest(recipe={"preset": "scalerl", "fp32Logits": "Both"})
    others = [
        digest(recipe={"preset": "dapo"}),
        digest(seed=1),
        digest(budget={"maxSteps": 61}),
        digest(evaluation={"everySteps": 7}),
        digest(generator={"replicas": 2}),
    ]
    data.write_text('{"prompt": "1+2", "answer": "3"}\n')
    others.append(digest())
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    for content in (b"one", b"two"):
        weights.write_bytes(content)
        others.append(digest(model={"path": "model"}))
    assert len({one, *others}) == 9


def test_fields_outside_the_hash_may_change() -> None:
    """Else a run with the same hash could not be resumed. Data that moved is refused, with the reason."""
    for leaf in leaves():
        path = f"spec.{leaf.path}"
        left_out = [p for p in NOT_OF_THE_RESULT if path == p or path.startswith(f"{p}.")]
        if left_out and not set(left_out) & {
            *OF_A_CLUSTER,
            "spec.task.jsonl.path",
            "spec.task.dataset.files",
        }:
            assert edit_of(leaf.path).effect is not Effect.REFUSED, path


def test_compare_of_real_processes_resumes_after_sigterm(tmp_path: Path) -> None:
    """Through ``scalerl run``'s own code, on small roles."""
    spec = write_spec(tmp_path / "run.yaml", trainer={"replicas": 1})
    folder = tmp_path / "compare"
    command = [sys.executable, small_roles.__file__, "compare", str(spec), "--vary", "b: seed=7"]
    environment = {**os.environ, "COLUMNS": "200", "SMALL_COORDINATOR": "curve"}
    go = tmp_path / "go"  # until then the second run does not end
    environment["SMALL_COORDINATOR_WAITS_FOR"] = str(go)

    def until(process: subprocess.Popen[str], condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert process.poll() is None or condition(), process.stdout and process.stdout.read()
            assert time.monotonic() < end
            time.sleep(0.01)

    def steps(part: str) -> int:
        return max((int(p.read_text()) for p in folder.glob(f"{part}*/step")), default=0)

    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as first:
        until(first, lambda: steps("small-b-seed-7") >= 5)
        first.send_signal(signal.SIGTERM)
        said, _ = first.communicate(timeout=200)
    assert first.returncode == 130, said
    assert "the same command resumes it" in said
    go.touch()
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2: small, seed 0: already finished" in done.stdout
    assert "2 of 2: b, seed 7: resumed" in done.stdout
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        *("comparison.md", "comparison.csv", "comparison.png")
    }
