"""A real Prometheus scrapes a live run and a live operator: every query of every dashboard and alert finds its data."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from charts import NAMESPACE, RELEASE, Object, render
from live_operator import CurveFit, LiveOperator, as_account, curve_fit, operator, until
from live_prometheus import Prometheus, Target
from live_prometheus import prometheus as started
from promql import selectors
from queries import ALERTS, CHART, ROOT, Asked, alerts, concrete, dashboards
from releases import Helm
from runs import LocalRun, small_spec, start_run
from stage import Coordinator, tiny

from scalerl_api import forecast as wire
from scalerl_api.wire import EvaluationPoint, Status
from scalerl_coordinator.decisions import DecisionLog

if TYPE_CHECKING:
    from testcluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.local, pytest.mark.timeout(2400)]
RUNS = "scalerlruns.scalerl.dev"
RUN, HERE = "small", "measured"
LATE, NEVER = "late", "never"
"""Runs of the operator beside :data:`RUN`: one with all that the alerts are about, and one that cannot start."""
STEPS = 12
WINDOW = "5m"
START_SECONDS = 420.0
LATE_SECONDS = 120.0
"""Prometheus asks every second and waits no longer: what a busy process answers too late is missing until it is asked again."""
CURVE = msgspec.json.encode(
    wire.FitRequest(
        points=wire.Points(
            compute=[1000.0 * (i + 1) for i in range(20)], reward=[0.6 - 0.5 / (i + 2) for i in range(20)]
        )
    )
)

# Metrics, or labels of them, where there is nothing to see while all is well; the test says so when one has data after all.
EMPTY = {
    'name="teacher_kl"': "the run has no teacher",
    'name="mfu"': "the run is on CPUs, whose peak is not known",
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


class Scripted(Coordinator):
    """A coordinator that says what it is given: a run after 40 evaluations, one each ten steps."""

    def __init__(self, rewards: list[float], step_seconds: float, log: Path) -> None:
        super().__init__()
        self.step = 10 * (len(rewards) - 1)
        self.decisions = DecisionLog(log)
        self._step_seconds = step_seconds
        self.points = [
            EvaluationPoint(
                version=10 * i, work_tokens=10_000 * i, reward=reward, standard_error=0.01, samples=4000, prompts=1000,
                set_digest="set", mixed_versions=False, truncated_fraction=0.02, mean_tokens=5.0,
                wall_seconds=10 * step_seconds * i, device_seconds=20 * step_seconds * i,
            )
            for i, reward in enumerate(rewards)
        ]  # fmt: skip

    def status(self) -> Status:
        spent = self._step_seconds * self.step
        return msgspec.structs.replace(super().status(), wall_seconds=spent, device_seconds=2 * spent)


def curve(rise: float) -> list[float]:
    """A sigmoid of so many midpoints' compute, with noise; of many, it rises no more."""
    spent = [rise * i / 40 for i in range(41)]
    return [0.2 + 0.4 * x**2 / (1 + x**2) + 0.004 * (-1) ** i for i, x in enumerate(spent)]


@contextlib.contextmanager
def served(*coordinators: Coordinator) -> Iterator[None]:
    """Answers for all of them, in a thread."""
    loop, stop, up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for each in coordinators:
                await stack.enter_async_context(each.serving())
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert up.wait(120)
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        loop.close()


def runs_of_the_operator() -> list[Object]:
    """Their manifests."""
    now = datetime.now(UTC)

    def storage(name: str) -> Object:
        return {"storage": {"size": "1Gi", "accessMode": "ReadWriteOnce", "storageClassName": name}}

    def of(name: str, steps: int, hours: float) -> Object:
        deadline = f"{now + timedelta(hours=hours):%Y-%m-%dT%H:%M:%SZ}"
        rules = {"mode": "Advisory", "stopAfter": 1, "deadline": deadline}
        return tiny(
            name,
            **storage("standing"),
            budget={"maxSteps": steps, "maxSeconds": 100_000_000},
            autoscaling=rules,
        )

    never = tiny(NEVER, **storage("missing"))
    return [of(RUN, 800, 5000.0), of(LATE, 410, 1.0), never]


def train(cluster: Cluster, run: str, coordinator: Coordinator, state: Any) -> None:
    """Plays the kubelet until the run trains: its preparation has ended well, and its coordinator has an address."""

    def patched(role: str, **status: Any) -> bool:
        selector = f"scalerl.dev/run={run},app.kubernetes.io/component={role}"
        found = cluster.get("pods", "-n", HERE, "-l", selector)["items"]
        for pod in found:
            patch = json.dumps({"status": status})
            where = ("pod", pod["metadata"]["name"], "-n", HERE, "--subresource=status", "--type=merge")
            cluster.kubectl("patch", *where, "-p", patch)
        return bool(found)

    until(lambda: patched("prepare", phase="Succeeded"), 180, state)
    address = coordinator.address
    ready = [{"type": "Ready", "status": "True"}]
    until(
        lambda: patched(
            "coordinator", phase="Running", podIP=address, podIPs=[{"ip": address}], conditions=ready
        ),
        180,
        state,
    )


@pytest.fixture(scope="module")
def live_operator(
    helm: str, control_plane: Cluster, live_curve_fit: CurveFit, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveOperator]:
    """An operator that leads, with runs whose pods run nothing but their coordinators, and their forecasts."""
    folder = tmp_path_factory.mktemp("operator")
    for name in (NAMESPACE, HERE):
        control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    release = Helm(helm, control_plane.env, NAMESPACE)
    release("install", RELEASE, str(CHART), "--set", "replicas=0")
    (deployment,) = (obj for obj in render(helm) if obj["kind"] == "Deployment")
    kubeconfig = as_account(control_plane, NAMESPACE, RELEASE, folder)
    data = f"--from-file={ROOT / 'examples/tiny/data.jsonl'}"
    control_plane.kubectl("create", "configmap", "tiny-addition-data", "-n", HERE, data)
    storage = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "standing"}}
    control_plane.apply(storage | {"provisioner": "kubernetes.io/no-provisioner"})
    rising = Scripted(curve(1.5), 1000.0, folder / "rising.jsonl")
    flat = Scripted(curve(20.0), 1000.0, folder / "flat.jsonl")
    runs = runs_of_the_operator()
    try:
        with (
            operator(
                deployment, kubeconfig, NAMESPACE, folder / "log", SCALERL_SIDECAR_URL=live_curve_fit.url
            ) as made,
            served(rising, flat),
        ):
            state = made.tail
            for run in runs:
                control_plane.apply(run, namespace=HERE)
            for name, coordinator in ((RUN, rising), (LATE, flat)):
                train(control_plane, name, coordinator, state)
            until(lambda: made.get("/metrics").count("run_forecast_tokens{") == 2, 180, state)
            yield made
        # They are not drained: without the operator, and without its finalizer, they are gone at once.
        for name in (RUN, LATE):
            without = json.dumps({"metadata": {"finalizers": None}})
            control_plane.kubectl("patch", RUNS, name, "-n", HERE, "--type=merge", "-p", without)
            control_plane.kubectl("delete", RUNS, name, "-n", HERE, "--timeout=500s")
    finally:
        release("uninstall", RELEASE)
        control_plane.kubectl("delete", "crd", RUNS, "--timeout=500s")


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
    expr = put(asked, namespace)
    excused = any(metric in asked.expr for metric in EMPTY)

    def shows() -> bool:
        series = scraped.query(expr)
        return any(math.isfinite(float(s["value"][1])) for s in series) or (excused and not series)

    until(shows, LATE_SECONDS, lambda: f"{scraped.query(expr)} for {asked.expr}")


def test_every_alert_reads_existing_metrics(scraped):
    groups = scraped.get("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert len(rules) == len(alerts())
    for name, rule in rules.items():
        assert rule["health"] == "ok", f"{name}: {rule.get('lastError')}"
    for asked in alerts():
        for selector in selectors(asked.expr):
            found, where = f"count({selector.metric})", asked.where
            until(partial(scraped.query, found), LATE_SECONDS, f"{where}: nothing for {found}".format)


def test_healthy_run_has_no_critical_alert(scraped):
    about = [
        alert["labels"]
        for alert in scraped.get("alerts")["alerts"]
        if alert["state"] == "firing" and alert["labels"].get("run") == RUN
    ]
    assert about == []


def test_every_target_is_scraped_without_an_error(scraped):
    jobs = {"scalerl-run", "scalerl-operator", "scalerl-curvefit"}
    assert {t["labels"]["job"] for t in scraped.get("targets")["activeTargets"]} == jobs

    def errors() -> list[str]:
        return [t["lastError"] for t in scraped.get("targets")["activeTargets"] if t["health"] != "up"]

    until(lambda: not errors(), LATE_SECONDS, lambda: str(errors()))


def test_empty_panels_have_a_known_reason(scraped):
    for metric in EMPTY:
        query = f"{{{metric}}}" if "=" in metric else metric
        assert not scraped.query(query), f"{metric} has data now: take it from EMPTY"


@pytest.mark.parametrize(
    "name", ["ScaleRLStopAdvised", "ScaleRLBudgetUsed", "ScaleRLDeadlineUnreachable", "ScaleRLRunNotScraped"]
)
def test_alert_is_raised_for_the_run_that_it_is_about_and_no_other(scraped, name):
    (asked,) = (asked for asked in alerts() if asked.where == f"alert {name}")

    def about() -> tuple[set[str], list[str]]:
        """The runs of which the expression is true now, and those of which it is pending or firing."""
        now = {series["metric"]["run"] for series in scraped.query(asked.expr)}
        alerts = scraped.get("alerts")["alerts"]
        return now, [a["labels"]["run"] for a in alerts if a["labels"]["alertname"] == name]

    until(lambda: about() == ({LATE}, [LATE]), LATE_SECONDS, lambda: str(about()))


def test_run_that_cannot_start_is_shown_until_it_is_deleted(scraped, control_plane):
    about = f'{{__name__=~"scalerl_operator_run_.*", run="{NEVER}"}}'
    until(lambda: scraped.query(about), LATE_SECONDS, lambda: f"nothing for {about}")
    (phase,) = (s["metric"] for s in scraped.query(about) if s["metric"]["__name__"].endswith("_phase"))
    assert (phase["phase"], phase["reason"]) == ("Pending", "ReferenceNotFound")
    control_plane.kubectl("delete", RUNS, NEVER, "-n", HERE, "--timeout=500s")
    until(lambda: not scraped.query(about), 120, lambda: str(scraped.query(about)))
    late = f'scalerl_operator_run_phase{{run="{LATE}"}}'
    until(lambda: scraped.query(late), LATE_SECONDS, lambda: f"nothing for {late}")


def test_columns_of_kubectl_get(scraped, control_plane):
    def rows(*options: str) -> list[dict[str, str]]:
        """By header; a column begins where its header does."""
        header, *lines = control_plane.kubectl("get", RUNS, "-n", HERE, *options).splitlines()
        starts = [match.start() for match in re.finditer(r"\S+", header)] + [None]
        return [
            {header[a:b].strip(): line[a:b].strip() for a, b in itertools.pairwise(starts)} for line in lines
        ]

    found = {row["NAME"]: row for row in rows("-o", "wide")}
    plain = ["NAME", "PHASE", "REASON", "STEP", "REWARD", "DECISION", "ETA", "AGE"]
    assert list(rows()[0]) == plain
    assert set(found[LATE]) - set(plain) == {"FORECAST", "BUDGET", "GENERATORS", "DEVICE-HOURS"}
    late = found[LATE]
    assert (late["PHASE"], late["STEP"], late["DECISION"]) == ("Running", "400/410", "STOP")
    assert (late["ETA"], late["BUDGET"]) == ("3h", "98% of maxSteps")
    assert re.fullmatch(r"0\.\d\d \(0\.\d\d-0\.\d\d\)", late["FORECAST"])
    assert found[RUN]["STEP"] == "400/800"
