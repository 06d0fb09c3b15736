"""``scalerl fork``: of a directory, and of a run on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl_api.load import load_run, parse_run, to_yaml
from scalerl_api.paths import RunPaths
from scalerl_cli.clusters.fork import fork
from scalerl_cli.clusters.session import ClusterProblem, Session
from scalerl_cli.main import main, parser
from scalerl_local.run_directory import RunDirectory
from scalerl_operator.kube.kinds import Kind
from scalerl_operator.kube.types import Object
from scalerl_trainer.checkpoints.volume import CheckpointStore, files_in

SPEC: dict[str, Any] = {
    "model": {"path": "/models/a", "contextTokens": 64},
    "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "exact"}},
    "recipe": {"maxCompletionTokens": 16},
    "budget": {"maxSteps": 100},
}


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": "math", "labels": {"team": "a"}},
        "spec": SPEC | spec,
    }


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run with checkpoints of steps 10 and 20."""
    monkeypatch.chdir(tmp_path)
    paths = RunPaths(tmp_path / "runs/math-1")
    paths.base_model.mkdir(parents=True)
    paths.run_file.write_text(to_yaml(parse_run(to_yaml(manifest()), "run.yaml").to_manifest()))
    for step in (10, 20):
        store = CheckpointStore(paths, 3)
        staged = store.stage(step)
        (staged.directory / "weights").write_bytes(b"%d" % step)
        store.commit(staged, b"snapshot", store.flush_and_hash(staged, files_in(staged.directory)), {})
    return paths.root


def test_directory_is_forked_and_can_be_resumed(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "recipe.temperature=0.7", "--set", "spec.budget.maxSteps=200"]
    assert main(["fork", str(source), *words]) == 0
    said = capsys.readouterr().out
    assert "step 20 of math is in runs/math-fork-1" in said
    target = Path("runs/math-fork-1")
    assert f"scalerl run {target}/run.yaml --resume --dir {target}" in said
    run = load_run(target / "run.yaml")
    assert run.metadata.name == "math-fork"
    assert run.to_manifest()["spec"]["from"] == {"run": "math", "step": 20}
    assert (run.spec.recipe.temperature, run.spec.budget.max_steps) == ("0.7", 200)
    assert json.loads((target / "fork.json").read_text()) == {"run": "math", "step": 20}
    RunDirectory.resume(target, run).release()  # as `scalerl run --resume` does
    assert main(["fork", str(source), "--step", "10", *words]) == 0
    assert "step 10 of math is in runs/math-fork-2" in capsys.readouterr().out


def test_run_file_gives_spec_and_name(source: Path, tmp_path: Path) -> None:
    given = manifest(evaluation={"everySteps": 5})
    given["metadata"]["name"] = "other"
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(given))
    assert main(["fork", str(source), "-f", "other.yaml", "--out", "here/new", "--step", "10"]) == 0
    run = load_run(Path("here/new/run.yaml"))
    assert (run.metadata.name, run.spec.evaluation.every_steps) == ("other", 5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--step", "15"], "no checkpoint of step 15, only of 10, 20"),
        (["--set", "seed=3"], "spec.seed: 0 → 3 (a fork continues the source's"),
        (["--set", "recipe.temperature"], "is not FIELD=VALUE"),
        (["--set", "recipe.temprature=1"], "did you mean temperature?"),
        (["--set", "budget.maxSteps=20"], "the checkpoint has 20 steps"),
        (["--name", "Other"], "metadata.name"),
        (["--out", "runs"], "exists and is not empty"),
    ],
)
def test_wrong_fork_is_refused_and_makes_nothing(
    source: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["fork", str(source), *words]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in Path("runs").iterdir()] == ["math-1"]


def test_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fork", str(tmp_path)]) == 2
    assert "run.yaml is missing" in capsys.readouterr().err
    assert main(["fork", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err


class Cluster(Session):
    """A cluster with one run."""

    def __init__(self) -> None:
        self.namespace = "team"

    def get(self, kind: Kind | str, namespace: str | None, name: str) -> Object | None:
        run = manifest(suspend=True, storage={"claimName": "shared"})
        metadata = run["metadata"] | {"namespace": "team", "uid": "u", "resourceVersion": "7"}
        return run | {"metadata": metadata, "status": {"phase": "Running"}} if name == "math" else None

    def list(
        self, kind: Kind | str, namespace: str | None, labels: str = "", fields: str = ""
    ) -> list[Object]:
        return []


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Object:
    assert fork(Cluster(), parser().parse_args(["fork", "math", *words])) == 0
    return dict(yaml.safe_load(capsys.readouterr().out))


def test_fork_of_a_cluster_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run = printed(capsys, "--step", "20", "--set", "recipe.optimizer.learningRate=1e-6")
    assert run["metadata"] == {"name": "math-fork", "namespace": "team", "labels": {"team": "a"}}
    assert run["spec"]["from"] == {"run": "math", "step": 20}
    assert run["spec"]["recipe"]["optimizer"] == {"learningRate": "1e-6"}
    assert run["spec"]["storage"] == {"claimName": "shared"}
    assert "suspend" not in run["spec"]
    assert "status" not in run
    assert printed(capsys, "--name", "b")["spec"]["from"] == {"run": "math"}


def test_fork_of_a_cluster_by_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = manifest(evaluation={"everySteps": 5})
    given["metadata"] = {"name": "other"}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(given))
    run = printed(capsys, "-f", str(tmp_path / "other.yaml"))
    assert run["metadata"] == {"name": "other", "namespace": "team"}
    assert run["spec"]["evaluation"] == {"everySteps": 5}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none"], "there is no run 'none' in the namespace team"),
        (["math", "--out", "x"], "--out is for the directory"),
        (["math", "--step", "0"], "from.step"),
        (["math", "--set", "recipe.temprature=1"], "did you mean temperature?"),
    ],
)
def test_wrong_fork_of_a_cluster_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ClusterProblem) as refused:
        fork(Cluster(), parser().parse_args(["fork", *words]))
    assert says in str(refused.value)
