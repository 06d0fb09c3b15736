"""A real Prometheus scrapes a live run and a live operator: every query of every dashboard and alert finds its data."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
import yaml
from charts import NAMESPACE, RELEASE, Object, render
from live_operator import CurveFit, LiveOperator, as_account, curve_fit, operator
from live_prometheus import Prometheus, Target
from live_prometheus import prometheus as started
from promql import selectors
from queries import ALERTS, CHART, ROOT, Asked, alerts, concrete, dashboards
from releases import Helm
from runs import LocalRun, small_spec, start_run

from scalerl_api import forecast as wire

if TYPE_CHECKING:
    from testcluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.local, pytest.mark.timeout(900)]
RUNS = "scalerlruns.scalerl.dev"
RUN, HERE = "small", "measured"
STEPS = 12
WINDOW = "5m"
START_SECONDS = 420.0
CURVE = msgspec.json.encode(
    wire.FitRequest(
        points=wire.Points(
            compute=[1000.0 * (i + 1) for i in range(20)], reward=[0.6 - 0.5 / (i + 2) for i in range(20)]
        )
    )
)

# Metrics, or labels of them, where there is nothing to see while all is well; the test says so when one has data after all.
EMPTY = {
    "scalerl_operator_decisions_total": "no run of this operator has reached its first evaluation",
    'name="teacher_kl"': "the run has no teacher",
    "scalerl_coordinator_task_": "the run has one task",
    "scalerl_coordinator_history_": "the run has no speculation",
}


def targets_of(run: LocalRun) -> list[Target]:
    """The processes of a run that have metrics, labelled as the chart's PodMonitor would."""
    found = []
    roles = {
        "scalerl_coordinator.main": "coordinator",
        "scalerl_trainer.main": "trainer",
        "scalerl_generator.actor": "generator",
    }
    for module, role in roles.items():
        for process in run.find(module):
            listen = re.search(r"--listen (\S+:\d+)", process.command)
            if listen is not None:
                labels = {
                    "job": "scalerl-run",
                    "namespace": HERE,
                    "run": RUN,
                    "role": role,
                    "pod": process.name,
                }
                found.append(Target(listen[1], labels))
    return found


@pytest.fixture(scope="module")
def live_operator(
    helm: str, control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveOperator]:
    """An operator that leads, with a run whose pods run nothing."""
    folder = tmp_path_factory.mktemp("operator")
    for name in (NAMESPACE, HERE):
        control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    release = Helm(helm, control_plane.env, NAMESPACE)
    release("install", RELEASE, str(CHART), "--set", "replicas=0")
    (deployment,) = (obj for obj in render(helm) if obj["kind"] == "Deployment")
    kubeconfig = as_account(control_plane, NAMESPACE, RELEASE, folder)
    run: Object = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
    try:
        with operator(deployment, kubeconfig, NAMESPACE, folder / "log", SCALERL_SIDECAR_URL="") as made:
            control_plane.apply(run, namespace=HERE)
            yield made
            control_plane.kubectl("delete", RUNS, run["metadata"]["name"], "-n", HERE, "--timeout=180s")
    finally:
        release("uninstall", RELEASE)
        control_plane.kubectl("delete", "crd", RUNS, "--timeout=180s")


@pytest.fixture(scope="module")
def live_curve_fit(helm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CurveFit]:
    """The service as it stands beside the operator."""
    (deployment,) = (obj for obj in render(helm) if obj["kind"] == "Deployment")
    with curve_fit(deployment, tmp_path_factory.mktemp("curvefit") / "log") as made:
        yield made


@pytest.fixture(scope="module")
def scraped(
    prometheus: str,
    live_operator: LiveOperator,
    live_curve_fit: CurveFit,
    control_plane: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Prometheus]:
    """Prometheus, once a run has trained some steps, evaluated, checkpointed, and been scraped after that."""
    folder = tmp_path_factory.mktemp("prometheus")
    # Unfiltered: of the first step, which has tokens of age 0, some are trained for certain.
    spec = small_spec(
        recipe__zeroVarianceFilter=False,
        recipe__kl={"penalty": {"coefficient": "0.001"}},
        budget__maxSteps=5000,
        evaluation__everySteps=4,
        checkpoint__everySteps=4,
        trackers__tensorBoard={},
    )
    address = live_operator.url.removeprefix("http://")
    itself = Target(address, {"job": "scalerl-operator", "namespace": NAMESPACE, "pod": "operator-0"})
    beside = Target(
        live_curve_fit.metrics, {"job": "scalerl-curvefit", "namespace": NAMESPACE, "pod": "operator-0"}
    )
    with (
        started(prometheus, folder, ALERTS) as made,
        start_run(tmp_path_factory.mktemp("run"), spec) as run,
    ):
        made.aim([itself, beside])
        run.until(
            lambda: len({t.labels["role"] for t in targets_of(run)}) == 3, START_SECONDS, "all roles are up"
        )
        made.aim([itself, beside, *targets_of(run)])
        run.until(lambda: run.step() >= STEPS, START_SECONDS, f"step {STEPS}")
        seen = f'max(scalerl_coordinator_step{{run="{RUN}"}}) >= {STEPS} and max(scalerl_trainer_checkpoint_step{{run="{RUN}"}}) > 0'
        run.until(lambda: made.query(seen), 120, "Prometheus has seen it")

        def timed() -> bool:
            # An operator whose runs are well reconciles none: somebody touches this one, so that there are reconciles to time.
            word = f"touched={time.time()}"
            control_plane.kubectl("annotate", RUNS, "--all", "-n", HERE, word, "--overwrite")
            return bool(made.query(f"sum(rate(scalerl_operator_reconcile_seconds_count[{WINDOW}])) > 0"))

        run.until(timed, 120, "reconciles have been timed")

        def forecast() -> bool:
            assert live_curve_fit.ask(wire.FIT, CURVE) == 200
            assert live_curve_fit.ask(wire.FIT, b"{}") == 400
            asked = f"sum(rate({wire.REQUESTS_METRIC}_total[{WINDOW}]))"
            refused = f"sum(rate({wire.REFUSED_METRIC}_total[{WINDOW}]))"
            return bool(made.query(f"{asked} > 0 and {refused} > 0"))

        run.until(forecast, 120, "curves have been fitted, and refused")
        yield made
        run.kill_everything()


def put(asked: Asked, namespace: str) -> str:
    return concrete(asked.expr, namespace=namespace, run=RUN, interval=WINDOW)


@pytest.mark.parametrize("asked", dashboards(), ids=lambda asked: asked.where)
def test_every_panel_shows_something(scraped, asked):
    namespace = NAMESPACE if asked.where.startswith("operator") else HERE
    series = scraped.query(put(asked, namespace))
    excuse = next((why for metric, why in EMPTY.items() if metric in asked.expr), None)
    if excuse is not None and not series:
        return
    assert series, f"nothing for {asked.expr}"
    values = [float(s["value"][1]) for s in series]
    assert any(math.isfinite(value) for value in values), f"{values} for {asked.expr}"


def test_every_alert_reads_existing_metrics(scraped):
    groups = scraped.get("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert len(rules) == len(alerts())
    for name, rule in rules.items():
        assert rule["health"] == "ok", f"{name}: {rule.get('lastError')}"
    for asked in alerts():
        for selector in selectors(asked.expr):
            assert scraped.query(f"count({selector.metric})"), f"{asked.where}: no {selector.metric}"


def test_healthy_run_has_no_critical_alert(scraped):
    about = [
        alert["labels"]
        for alert in scraped.get("alerts")["alerts"]
        if alert["state"] == "firing" and alert["labels"].get("run") == RUN
    ]
    assert about == []


def test_every_target_is_scraped_without_an_error(scraped):
    targets = scraped.get("targets")["activeTargets"]
    jobs = {"scalerl-run", "scalerl-operator", "scalerl-curvefit"}
    assert {t["labels"]["job"] for t in targets} == jobs
    assert [t["lastError"] for t in targets if t["health"] != "up"] == []


def test_empty_panels_have_a_known_reason(scraped):
    for metric in EMPTY:
        query = f"{{{metric}}}" if "=" in metric else metric
        assert not scraped.query(query), f"{metric} has data now: take it from EMPTY"
