"""The process: its settings, its metrics, its exit codes. (With an API server: tests/cluster/test_operator_io.py.)"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from operator_tests.test_operator_metrics import FIGURES, OUTLOOK
from scalerl_api import operator_metric_names as metric_names
from scalerl_api.conditions import Phase
from scalerl_api.status import Condition, RunStatus
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.leader_election import Leader
from scalerl_operator.kube.work_queue import WorkQueue
from scalerl_operator.process_metrics import Metrics
from scalerl_operator.settings import Settings, SettingsError

LEAST = {
    "SCALERL_TRAINER_IMAGE": "trainer:1",
    "SCALERL_GENERATOR_IMAGE": "generator:1",
    "SCALERL_COORDINATOR_IMAGE": "operator:1",
}


def test_settings_with_nothing_but_images() -> None:
    settings = Settings.read(LEAST)
    assert (settings.images.trainer, settings.images.pull_policy) == ("trainer:1", "IfNotPresent")
    assert (settings.namespaces, settings.sidecar_url, settings.kubeconfig) == ((), None, None)
    assert (settings.host, settings.port) == ("0.0.0.0", 8080)
    assert settings.identity != Settings.read(LEAST).identity, "two processes of one host are two"


def test_settings_as_the_chart_gives_them() -> None:
    settings = Settings.read(
        LEAST
        | {
            "POD_NAME": "scalerl-0",
            "POD_NAMESPACE": "scalerl-system",
            "SCALERL_WATCH_NAMESPACES": "a, b,,a",
            "SCALERL_LISTEN": "[::1]:9090",
            "SCALERL_SIDECAR_URL": "http://127.0.0.1:8090/",
            "SCALERL_WORKERS": "4",
            "SCALERL_IMAGE_PULL_POLICY": "Always",
            "SCALERL_LOG_LEVEL": "DEBUG",
            "SCALERL_LEASE": "mine",
        }
    )
    assert settings.namespaces == ("a", "b")
    assert (settings.host, settings.port) == ("::1", 9090)
    assert (settings.sidecar_url, settings.workers) == ("http://127.0.0.1:8090", 4)
    assert (settings.identity, settings.operator_namespace) == ("scalerl-0", "scalerl-system")
    assert (settings.images.pull_policy, settings.log_level, settings.lease) == ("Always", "DEBUG", "mine")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SCALERL_TRAINER_IMAGE", " "),
        ("SCALERL_LISTEN", "8080"),
        ("SCALERL_LISTEN", "0.0.0.0:http"),
        ("SCALERL_LISTEN", "0.0.0.0:99999"),
        ("SCALERL_WORKERS", "0"),
        ("SCALERL_WORKERS", "many"),
        ("SCALERL_SIDECAR_URL", "127.0.0.1:8090"),
        ("SCALERL_IMAGE_PULL_POLICY", "Sometimes"),
        ("SCALERL_LOG_LEVEL", "chatty"),
    ],
)
def test_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.read(LEAST | {name: value})


def test_exit_code_2_and_one_line_without_a_cluster() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SCALERL_", "KUBE"))}
    command = [sys.executable, "-m", "scalerl_operator.main"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr.strip().count("\n")) == (2, 0)
    assert "SCALERL_TRAINER_IMAGE" in done.stderr
    environ |= LEAST | {"KUBECONFIG": "/nonexistent/kubeconfig"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "/nonexistent/kubeconfig" in done.stderr.strip().splitlines()[-1]


async def test_every_metric_is_in_the_first_scrape() -> None:
    async def nothing(key: tuple[str, str]) -> None: ...

    class NoLeases:
        async def get(self, *_: object) -> None: ...
        async def create(self, obj: dict[str, object]) -> dict[str, object]:
            return obj

        async def replace(self, obj: dict[str, object]) -> dict[str, object]:
            return obj

    metrics = Metrics()
    queue = WorkQueue(nothing)
    metrics.watch(queue, Cache(queue.wake), Leader(NoLeases(), namespace="n", identity="i"))
    metrics.called("apply", "Job", 200, 0.1)
    metrics.called("apply", "Job", 409, 0.1)
    metrics.called("watch", "Job", 200, 0.1)
    metrics.finished(("n", "r"), "ok", 0.2)
    degraded = Condition(
        type="Degraded",
        status="True",
        reason="BackOff",
        message="m",
        last_transition_time="2026-01-01T00:00:00Z",
    )
    status = RunStatus(phase=Phase.RUNNING, conditions=[degraded], decision="STOP", outlook=OUTLOOK)
    metrics.run(("n", "r"), status, FIGURES)
    metrics.event("Job")
    metrics.decision("CONTINUE")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    said = {name for name, *_ in samples}
    for constant, name in vars(metric_names).items():
        if constant.isupper() and constant != "PREFIX" and isinstance(name, str):
            assert name in said or f"{name}_count" in said, name
    assert samples[metric_names.WRITES, "Job"] == 1, "neither a refusal nor a watch is a write"
    assert samples[metric_names.RUNS, "Running"] == 1
    assert samples[metric_names.RUNS, "Failed"] == 0
    assert samples[metric_names.LEADER,] == 0
    assert samples["process_resident_memory_bytes",] > 1e6
    metrics.runs.clear()
    assert f'{metric_names.RUNS}{{phase="Running"}} 0.0' in metrics.text().decode()
