"""Whole runs on a whole cluster: the chart by helm, the images by their Dockerfiles, the examples as they are shipped.

One run goes through every fault and still ends as its spec says; each fault has a bound, and prints what was measured.
What it has to learn is seen long before the example's budget is used up: while it is suspended, its budget is cut.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from installed import LEASE, OPERATORS, ROOT, Run, chart, helm, leader, say, take_off, until
from testcluster import Cluster, KubectlError

from scalerl_operator.names import RUN_DIR

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

NAMESPACE = "team"
LEARNS_WITHIN = 40
"""Steps after which its reward has risen by .18 to .30, of standard error .02; the example's 160 teach nothing else here."""


@pytest.fixture(scope="module")
def installed(cluster: Cluster, images: dict[str, str]) -> Iterator[Cluster]:
    cluster.kubectl("create", "namespace", NAMESPACE)
    label = ("pod-security.kubernetes.io/enforce=restricted",)
    cluster.kubectl("label", "namespace", NAMESPACE, *label)
    with ExitStack() as stack:
        stack.enter_context(chart(cluster, images))
        yield cluster
        cluster.kubectl("delete", "scalerlruns", "--all", "-n", NAMESPACE, "--timeout=500s")
        cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=500s")


def start(cluster: Cluster, example: str) -> Run:
    """As the example's first lines say."""
    folder = ROOT / "examples" / example
    name = {"tiny": "tiny-addition", "tiny-autostop": "tiny-autostop"}[example]
    data = f"--from-file={folder / 'data.jsonl'}"
    cluster.kubectl("create", "configmap", f"{name}-data", data, "-n", NAMESPACE)
    cluster.kubectl("apply", "-f", folder / "run-kubernetes.yaml", "-n", NAMESPACE)
    return Run(cluster, name, NAMESPACE)


def test_chart_tests_itself(installed: Cluster) -> None:
    """From a pod of its own, by the Service's name."""
    began = time.monotonic()
    said = helm(installed, "test", "scalerl", "-n", OPERATORS, "--timeout=500s")
    say("helm test", time.monotonic() - began, 60)
    assert "Succeeded" in said


@pytest.fixture(scope="module")
def run(installed: Cluster) -> Run:
    return start(installed, "tiny")


broken: list[str] = []


@pytest.fixture(autouse=True)
def report_failure(request: pytest.FixtureRequest) -> Iterator[None]:
    of_the_run = "run" in request.fixturenames
    if of_the_run and broken:
        pytest.fail(f"not tried: the run is the one that {broken[0]} has failed on")
    yield
    failed = getattr(request.node, "rep_call", None)
    if failed is not None and failed.failed and of_the_run:
        broken.append(request.node.name)
        print(request.getfixturevalue("run").tell())


def test_run_starts_and_reports_it(run: Run) -> None:
    say("to the first step", until(lambda: run.step() >= 1, 600, "the first step", every=2), 600)
    assert run.phase() == "Running"
    table = run.cluster.kubectl("get", "scalerlruns", "-n", NAMESPACE)
    assert table.splitlines()[0].split() == [
        "NAME",
        "PHASE",
        "REASON",
        "STEP",
        "REWARD",
        "DECISION",
        "ETA",
        "AGE",
    ]
    for type_ in (
        "Accepted",
        "Prepared",
        "CoordinatorReady",
        "GeneratorsReady",
        "TrainerReady",
        "Progressing",
    ):
        until(lambda type_=type_: run.condition(type_)[0] == "True", 600, type_)


def test_curve_is_copied_as_documented(run: Run, tmp_path: Path) -> None:
    until(lambda: run.status().get("reward") is not None, 600, "an evaluation")
    take_off(
        *(run.cluster, NAMESPACE, tmp_path, "its directory is `/run/scalerl/run`", "After that, a small pod"),
        NAME=run.name,
    )
    with (tmp_path / "curve.csv").open() as file:
        assert next(csv.DictReader(file))["version"] == "0"


def test_killed_trainer_pod_restarts_the_gang(run: Run) -> None:
    """Before the other faults: soon after the checkpoint of the warm start little has to be trained again."""
    attempt = run.status()["trainer"]["attempt"]
    pod = run.pods("trainer")[0]["metadata"]["name"]
    run.cluster.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--grace-period=0", "--force")
    took = until(lambda: run.status()["trainer"]["attempt"] > attempt, 600, "the next attempt")
    say("trainer pod killed, next attempt", took, 60)
    say("and it trains from its checkpoint", run.continues(600, steps=2), 240)
    assert len(run.pods("generator")) == 1, "generators stayed up"


def test_generator_is_deleted_and_replaced(run: Run) -> None:
    attempt = run.status()["trainer"]["attempt"]
    (pod,) = run.pods("generator")
    run.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--wait=false")
    replaced = until(lambda: run.pods("generator", ready=True), 600, "another generator")
    say("generator deleted, another one ready", replaced, 180)
    say("and training continues", run.continues(600), 120)
    assert run.status()["trainer"]["attempt"] == attempt, "the trainer noticed nothing"


def test_coordinator_is_killed(run: Run) -> None:
    (pod,) = run.pods("coordinator")
    run.cluster.kubectl(
        "delete", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--grace-period=0", "--force"
    )
    ready = until(lambda: run.pods("coordinator", ready=True), 600, "the coordinator")
    say("coordinator killed, ready again", ready, 90)
    say("and training continues", run.continues(600, steps=2), 120)


def test_leading_operator_is_killed(run: Run) -> None:
    cluster, first = run.cluster, leader(run.cluster)
    before = {o["metadata"]["uid"] for o in owned(run)}
    cluster.kubectl("delete", "pod", first, "-n", OPERATORS, "--grace-period=0", "--force")
    took = until(lambda: leader(cluster) not in ("", first), 600, f"another holder of {LEASE}", every=0.2)
    say("operator killed, another one leads", took, 15)
    run.continues(120)
    assert {o["metadata"]["uid"] for o in owned(run)} == before, "nothing made twice, nothing lost"


def owned(run: Run) -> list[dict[str, Any]]:
    kinds = "jobs,statefulsets,deployments,services,configmaps,secrets,networkpolicies,poddisruptionbudgets"
    found = run.cluster.get(kinds, "-n", NAMESPACE, "-l", f"scalerl.dev/run={run.name}")["items"]
    return [o for o in found if o["kind"] != "ConfigMap" or not o["metadata"]["name"].endswith("-curve")]


def scale(run: Run, count: int) -> None:
    run.cluster.kubectl("scale", "scalerlrun", run.name, f"--replicas={count}", "-n", NAMESPACE)
    took = until(lambda: len(run.pods("generator", ready=True)) == count, 600, f"{count} generators")
    say(f"kubectl scale to {count}, all ready", took, 300)


@pytest.mark.full
def test_generators_are_scaled_up_by_kubectl(run: Run) -> None:
    scale(run, 3)
    run.continues(120)


@pytest.mark.full
def test_node_drain_respects_the_disruption_budget(run: Run) -> None:
    """Of three generators one may go at a time: on the only node, which is cordoned, no other comes, and it is one.
    The trainer goes, with a checkpoint of its last step; it has no budget, which could only forbid."""
    nodes = run.cluster.get("nodes")["items"]
    if len(nodes) != 1:
        pytest.skip("what is evicted finds room on another node")
    node = nodes[0]["metadata"]["name"]
    before, attempt = names(run.pods("generator")), run.status()["trainer"]["attempt"]
    until(lambda: run.step() > run.saved(), 600, "a step that is in no checkpoint")
    trained = run.step()
    selector = f"scalerl.dev/run={run.name},app.kubernetes.io/component in (generator,trainer)"
    began = time.monotonic()
    try:
        with pytest.raises(KubectlError, match="disruption budget"):
            run.cluster.kubectl(
                *("drain", node, f"--pod-selector={selector}", "--delete-emptydir-data"),
                "--timeout=20s",  # not for an event: so long it is refused
            )
        say("drain is held by the budget", time.monotonic() - began, 60)
        assert len(before & names(run.pods("generator", ready=True))) == 2, "one of three went, two work"
        until(lambda: not names(run.pods("trainer", ready=True)), 600, "the trainer has left")
        until(lambda: run.saved() == run.step() >= trained, 600, "its last step is in a checkpoint")
        kept = run.saved()
    finally:
        run.cluster.kubectl("uncordon", node)
    took = until(lambda: len(run.pods("generator", ready=True)) == 3, 600, "the third generator")
    say("uncordoned, all generators ready", took, 180)
    say("and it trains from its checkpoint", run.continues(600, steps=2), 240)
    assert run.status()["trainer"]["attempt"] == attempt + 1
    assert run.resumed_at() == kept


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


@pytest.mark.full
def test_generators_are_scaled_down_by_kubectl(run: Run) -> None:
    scale(run, 1)
    run.continues(120)


@pytest.mark.full
def test_manual_edit_is_repaired(run: Run) -> None:
    deployment = f"{run.name}-generator"
    edit = {"spec": {"template": {"spec": {"containers": [{"name": "actor", "image": "nowhere/else:1"}]}}}}
    words = ("patch", "deployment", deployment, "-n", NAMESPACE, "-p")
    mark = {"metadata": {"annotations": {"team": "blue"}}}
    run.cluster.kubectl(*words, json.dumps(mark))
    run.cluster.kubectl(*words, json.dumps(edit))

    def repaired() -> bool:
        live = run.cluster.get("deployment", deployment, "-n", NAMESPACE)
        images = {c["image"] for c in live["spec"]["template"]["spec"]["containers"]}
        return "nowhere/else:1" not in images and live["metadata"]["annotations"]["team"] == "blue"

    say("edited by hand, repaired", until(repaired, 600, "repair", every=0.2), 15)
    assert any(event.startswith("RepairedDrift") for event in run.events())
    until(lambda: len(run.pods("generator", ready=True)) == 1, 600, "the generator")


@pytest.mark.full
def test_api_server_is_away(run: Run) -> None:
    if run.cluster.layout is None:
        pytest.skip("this cluster is not ours to stop")
    before = run.step()
    with run.cluster.without("kube-apiserver"):
        time.sleep(30)
    took = until(lambda: run.step() > before, 600, "news of the run")
    say("API server back after 30 s, the run's status is news again", took, 60)
    assert run.status()["trainer"]["attempt"] == run.status()["trainer"]["lastRecordedAttempt"] + 1, (
        "no restart"
    )


def test_suspend_and_resume_with_an_edit_that_fails(run: Run) -> None:
    run.patch({"suspend": True})
    say("suspend: drained and gone", until(lambda: run.phase() == "Suspended", 600, "Suspended"), 180)
    until(lambda: not any(run.pods(r) for r in ("coordinator", "generator", "trainer")), 600, "no pods")
    step = run.step()
    mounts = run.object()["spec"]["podTemplate"]["volumeMounts"]
    run.patch({"suspend": False, "podTemplate": {"volumeMounts": [mounts[0] | {"mountPath": "/dat"}]}})
    held = until(lambda: run.condition("Suspended")[1] == "EditFailed", 600, "EditFailed")
    say("resumed with a wrong mount path: held", held, 60)
    assert (
        "revert or fix the edit of spec.podTemplate.volumeMounts.0.mountPath" in run.condition("Suspended")[2]
    )
    run.patch(
        {
            "podTemplate": {"volumeMounts": mounts},
            "budget": {"maxSteps": max(LEARNS_WITHIN, (step // 10 + 2) * 10)},
        }
    )
    say("reverted: trains on", until(lambda: run.step() > step, 600, "a step more"), 300)


def test_run_ends_as_its_spec_says(run: Run) -> None:
    until(lambda: run.phase() in ("Completed", "Failed"), 1800, "the end", every=3)
    assert run.condition("Completed")[:2] == ("True", "BudgetReached")
    status = run.status()
    assert status["step"] == run.object()["spec"]["budget"]["maxSteps"]
    curve = run.cluster.get("configmap", f"{run.name}-curve", "-n", NAMESPACE)["data"]["curve.csv"]
    rewards = [float(row["reward"]) for row in csv.DictReader(io.StringIO(curve))]
    print("measured: reward", rewards[0], "to", rewards[-1])
    assert rewards[-1] > rewards[0] + 0.08
    until(lambda: not run.pods("generator") and not run.pods("coordinator"), 600, "no pods")


def test_model_and_curve_are_copied_as_documented(run: Run, images: dict[str, str], tmp_path: Path) -> None:
    words = {
        "NAME": run.name,
        "IMAGE_OF_THE_TRAINER": images["trainer"],
        "checkpoints/hf/step-00000300": run.status()["exports"]["last"]["path"],
    }
    take_off(run.cluster, NAMESPACE, tmp_path, "After that, a small pod", "## Alerts", **words)
    curve = run.cluster.get("configmap", f"{run.name}-curve", "-n", NAMESPACE)["data"]["curve.csv"]
    assert (tmp_path / "curve.csv").read_text() == curve
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == run.status()["step"]
    for taken in (
        "model",
        "newest",
    ):  # the last evaluation is of the last version, and so is the newest checkpoint
        assert (tmp_path / taken / "config.json").is_file()
        assert (tmp_path / taken / "tokenizer.json").is_file()
    weights = "model.safetensors"
    assert (tmp_path / "model" / weights).read_bytes() == (tmp_path / "newest" / weights).read_bytes()


def test_only_retained_objects_outlive_the_ttl(run: Run) -> None:
    run.patch({"storage": {"onDelete": "Retain"}, "ttlSecondsAfterFinished": 1})
    until(lambda: not run.cluster.get("scalerlruns", "-n", NAMESPACE)["items"], 600, "the run is gone")
    until(lambda: not owned(run), 600, "and all it owned")
    claims = [c["metadata"]["name"] for c in run.cluster.get("pvc", "-n", NAMESPACE)["items"]]
    assert claims == [f"{run.name}-data"]
    listing = in_volume(run.cluster, claims[0], "ls */checkpoints")
    assert "step-" in listing
    run.cluster.kubectl("delete", "pvc", claims[0], "-n", NAMESPACE, "--wait=false")


def in_volume(cluster: Cluster, claim: str, command: str) -> str:
    """What a command in a pod with that volume prints."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "look", "namespace": NAMESPACE},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "runAsGroup": 10001,
                "fsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "look",
                    "image": "localhost/busybox:1",
                    "command": ["sh", "-c", f"cd /data && {command}"],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }
    cluster.apply(pod)
    try:
        cluster.kubectl(
            *(
                "wait",
                "pod/look",
                "-n",
                NAMESPACE,
                "--for=jsonpath={.status.phase}=Succeeded",
                "--timeout=500s",
            )
        )
        return cluster.kubectl("logs", "look", "-n", NAMESPACE)
    finally:
        cluster.kubectl("delete", "pod", "look", "-n", NAMESPACE, "--wait=false")


@pytest.mark.full
def test_run_is_stopped_by_its_forecast(installed: Cluster) -> None:
    """Auto, on the curve that it really has; suspended as its spec says, and every decision can be made again."""
    run = start(installed, "tiny-autostop")
    decisions = ""

    def over() -> bool:
        """Reads the decisions too, while there is a coordinator to read them from."""
        nonlocal decisions
        for pod in run.pods("coordinator", ready=True):
            words = ("-c", "coordinator", pod["metadata"]["name"], "--", "cat", f"{RUN_DIR}/decisions.jsonl")
            with suppress(KubectlError):
                decisions = installed.kubectl("exec", "-n", NAMESPACE, *words)
        return run.phase() in ("Suspended", "Failed", "Completed")

    try:
        took = until(over, 1100, "the stop", every=3)
        say("started, stopped by its forecast", took, 1100)
        assert run.condition("Suspended")[:2] == ("True", "StoppedByForecast")
        status = run.status()
        print(
            "measured: stopped at step",
            status["step"],
            "forecast",
            status["forecast"],
            "reward",
            status["reward"],
        )
        assert status["step"] < run.object()["spec"]["budget"]["maxSteps"]
        assert status["decision"] == "STOP"
        assert run.object()["spec"]["suspend"] is True
        import tempfile
        from pathlib import Path

        from scalerl_cli.main import main as scalerl

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "decisions.jsonl"
            file.write_text(decisions[: decisions.rfind("\n") + 1])
            assert scalerl(["replay", str(file)]) == 0
    except AssertionError:
        print(run.tell())
        raise
