"""MLflow, with its own library: each step of metrics.jsonl and each evaluation of curve.csv once, whatever ends its process."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from coordinator_client import run_text
from tracker_runs import figures, finish, record_evaluation, row, rows, specify, start, wait_for, write_curve

from scalerl_api.paths import RunPaths
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.tracking.sink import tracker_id
from scalerl_coordinator.tracking.tail import SAMPLE_COLUMNS, SAMPLE_ROWS


def mlflow_run(uri: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The one run of the experiment, and the history of each of its metrics."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("scalerl").experiment_id])
    names = run.data.metrics
    return run, {n: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, n)] for n in names}


def metrics_in(database: Path) -> int:
    """How many figures MLflow's database has."""
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as found:
            return int(found.execute("select count(*) from metrics").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_has_a_table_of_rollouts(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(paths.root)  # where MLflow keeps artifacts of a database file
    uri = f"sqlite:///{paths.root}/mlflow.db"
    specify(paths, mlflow={"uri": uri})
    write_curve(paths, [0, 20])
    record_evaluation(paths, 20)
    for _ in range(2):
        finish(start(paths, "mlflow"))
    run, _ = mlflow_run(uri)
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": "rollouts/version-00000020.json", "type": "table"}
    ]
    table = json.loads(Path(run.info.artifact_uri, "rollouts/version-00000020.json").read_text())
    assert table["columns"] == list(SAMPLE_COLUMNS)
    assert len(table["data"]) == SAMPLE_ROWS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_kill_writes_each_step_once(paths: RunPaths) -> None:
    uri = f"sqlite:///{paths.root}/mlflow.db"
    specify(paths, mlflow={"uri": uri})
    files = RunFiles(paths)
    files.write_rows(rows(900), 900, whole=True)
    write_curve(paths, range(0, 900, 100))
    process = start(paths, "mlflow")
    wait_for(lambda: metrics_in(paths.root / "mlflow.db"), process)
    process.kill()
    process.communicate()
    # A step back: what the tracker has of the steps that are trained again keeps its first figures.
    files.write_rows(rows(890), 890, whole=True)
    files.write_rows(rows(890) | {s: row(s, 7.0) for s in range(890, 903)}, 903)
    measured = [*range(0, 901, 100), 850]
    write_curve(paths, measured)
    paths.run_file.write_text(
        run_text(trackers={"mlflow": {"uri": uri}}, evaluation={"everySteps": 3, "samplesPerPrompt": 2})
    )
    assert finish(start(paths, "mlflow"))["step"] == 902
    run, histories = mlflow_run(uri)
    for name in figures(0):
        history = histories.pop(name)
        assert sorted(history) == [(v, figures(v)[name]) for v in sorted(measured)], name
    assert set(histories) == {"step", "loss", "work_tokens"}
    assert all([step for step, _ in history] == list(range(903)) for history in histories.values())
    losses = [loss for _, loss in histories["loss"]]
    assert losses[:890] == [row(s)["loss"] for s in range(890)]
    assert all(losses[s] in (row(s)["loss"], 7.0) for s in range(890, 900))
    assert losses[900:] == [7.0, 7.0, 7.0]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "test"
    assert run.data.params["recipe.loss.cispo.ratioCap"] == "5"
    assert run.data.params["evaluation.everySteps"] == "2"
    assert run.data.tags["spec.evaluation.everySteps"] == "3"
    assert run.data.tags["scalerl.run"] == tracker_id(paths)
