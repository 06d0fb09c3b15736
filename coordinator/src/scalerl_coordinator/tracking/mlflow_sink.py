"""Sink for MLflow, through its own client."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun
from scalerl_api.trackers import MLflowSpec
from scalerl_coordinator.tracking.sink import (
    HELD_OUT,
    Points,
    Samples,
    Steps,
    flat,
    hyperparameters,
    tracker_id,
)
from scalerl_coordinator.tracking.tail import SAMPLE_COLUMNS

# Set before the import, which reads them: no telemetry, and few retries, because the supervisor restarts this process.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

log = logging.getLogger(__name__)

_TABLES: Final = 50
"""Newest tables of rollouts that MLflow's user interface lists: their paths are one tag. All are artifacts."""
_ID_TAG: Final = "scalerl.run"
_METRICS_A_CALL: Final = 1000
_PARAMETERS_A_CALL: Final = 100
_PARAMETER_CHARACTERS: Final = 6000
"""MLflow's limit; so are the two constants above."""


class MLflowSink:
    """One MLflow run, found by a tag.

    A call writes whole steps and evaluations in one transaction of the server's database, so the server's newest step and
    versions identify all rows that it has.
    """

    clears_on_open = False

    def __init__(self, run: ScaleRLRun, paths: RunPaths, spec: MLflowSpec) -> None:
        self._run = run
        self._paths = paths
        self._spec = spec
        self._client: Any = None
        self._run_id = ""
        self._tables: list[dict[str, str]] = []

    def open(self) -> tuple[int, set[int]]:
        self._client = MlflowClient(tracking_uri=self._spec.uri)
        experiment, id_ = self._experiment(), tracker_id(self._paths)
        found = self._client.search_runs([experiment], f"tags.`{_ID_TAG}` = '{id_}'", max_results=1)
        run = (
            found[0]
            if found
            else self._client.create_run(experiment, tags={_ID_TAG: id_}, run_name=self._run.metadata.name)
        )
        self._run_id = run.info.run_id
        self._tables = json.loads(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        self._client.update_run(self._run_id, status="RUNNING")
        self._write_hyperparameters(run.data.params)
        measured = self._client.get_metric_history(self._run_id, f"{HELD_OUT}version")
        return int(run.data.metrics.get("step", -1)) + 1, {metric.step for metric in measured}

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._spec.experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self._spec.experiment))
            except MlflowException:  # another run may have created it
                found = self._client.get_experiment_by_name(self._spec.experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _write_hyperparameters(self, present: dict[str, str]) -> None:
        """Write the spec's fields as parameters.

        MLflow's parameters are immutable, so an edited field becomes the tag ``spec.FIELD``.
        """
        now = {name: str(value)[:_PARAMETER_CHARACTERS] for name, value in flat(hyperparameters(self._run))}
        new = [Param(name, value) for name, value in now.items() if name not in present]
        for begin in range(0, len(new), _PARAMETERS_A_CALL):
            self._client.log_batch(self._run_id, params=new[begin : begin + _PARAMETERS_A_CALL])
        changed = [
            RunTag(f"spec.{name}", value) for name, value in now.items() if present.get(name, value) != value
        ]
        if changed:
            self._client.log_batch(self._run_id, tags=changed)

    def write(self, steps: Steps, points: Points, samples: Samples) -> None:
        for version, _ in points:
            if samples.get(version):
                self._write_sample(version, samples[version])
        now = int(time.time() * 1000)
        call: list[Metric] = []
        for step, row in (*steps, *points):
            if len(call) + len(row) > _METRICS_A_CALL:
                self._client.log_batch(self._run_id, metrics=call)
                call = []
            call += [Metric(name, float(value), now, step) for name, value in row.items()]
        self._client.log_batch(self._run_id, metrics=call)

    def _write_sample(self, version: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table as ``MlflowClient.log_table`` does, which needs pandas. Metrics do not depend on the server's artifact store."""
        path = f"rollouts/version-{version:08d}.json"
        table = {"columns": SAMPLE_COLUMNS, "data": [[row[name] for name in SAMPLE_COLUMNS] for row in rows]}
        tables = [one for one in self._tables if one["path"] != path][1 - _TABLES :]
        self._tables = [*tables, {"path": path, "type": "table"}]
        try:
            self._client.log_dict(self._run_id, table, path)
            self._client.set_tag(self._run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(self._tables))
        except Exception as error:
            log.warning("the rollouts of version %d are not logged to MLflow: %s", version, error)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
