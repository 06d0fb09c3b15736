"""Decisions of a run whose coordinator keeps no log, in a real status; and the curve's ConfigMap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from stage import evaluations
from testcluster import Cluster

from scalerl_api.load import run_from_object
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import RECENT_DECISIONS
from scalerl_api.wire import DecisionLines
from scalerl_operator.autoscaling.decide import decide
from scalerl_operator.autoscaling.decision_log import DecisionRecord, Line
from scalerl_operator.autoscaling.models import (
    Generators,
    Latest,
    Limits,
    Observation,
    Recipe,
    Spent,
    Staleness,
)
from scalerl_operator.autoscaling.observation import Point, point, point_set
from scalerl_operator.build.storage import CURVE_DIGEST, curve_config_map
from scalerl_operator.controller.cluster_autoscaler import CoordinatorStorage
from scalerl_operator.coordinator_client import EndpointMissing
from scalerl_operator.kube.client import KubeApi

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]


class EarlierCoordinator:
    """Of a release without the endpoint."""

    async def decisions(self, uid: str, offset: int) -> DecisionLines:
        raise EndpointMissing("GET /v1/decisions: HTTP 404: Not Found")

    async def record_decision(self, uid: str, offset: int, line: bytes) -> None:
        raise EndpointMissing("POST /v1/decisions: HTTP 404: Not Found")


async def created(api: KubeApi, namespace: str) -> tuple[ScaleRLRun, str]:
    run: dict[str, Any] = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
    run["metadata"] = {"name": "decided", "namespace": namespace}
    made = await api.create(run)
    return run_from_object(made), made["metadata"]["uid"]


async def write(record: DecisionRecord, run: ScaleRLRun, points: list[Point]) -> Line:
    last = points[-1]
    seen = Observation(
        unix_seconds=1.7e9,
        spent=Spent(seconds=last.seconds, device_seconds=last.device_seconds, steps=last.version),
        limits=Limits(steps=10_000),
        recent=[],
        latest=Latest(version=last.version, reward=last.reward, truncated=last.truncated),
        points=point_set(points),
        generators=Generators(wanted=1, ready=1),
        staleness=Staleness(allowed=8, most=1),
        recipe=Recipe(batch_completions=64, context_tokens=64, fp32_head=True, loss="cispo"),
        trouble="no forecast: none was asked for",
    )
    rules = run.spec.autoscaling
    return await record.append("autoscale", rules, points, seen, decide(rules, seen, record.known.history))


async def test_status_keeps_the_decisions_of_an_earlier_coordinator(api: KubeApi, namespace: str) -> None:
    run, uid = await created(api, namespace)
    await api.patch("ScaleRLRun", namespace, "decided", {"status": {"phase": "Running"}}, "status")
    record = await DecisionRecord.load(CoordinatorStorage(run, uid, EarlierCoordinator(), api))
    points = [point(e) for e in evaluations(40)]
    for count in range(1, RECENT_DECISIONS + 3):
        line = await write(record, run, points[:count])
        made = await api.get("ScaleRLRun", namespace, "decided")
        assert made is not None
        newest = made["status"]["decisions"][-1]
        assert (newest["sequence"], newest["state"]) == (line.sequence, line.decision.state)
    assert [one["sequence"] for one in made["status"]["decisions"]] == [2, 3, 4, 5, 6]
    assert made["status"]["phase"] == "Running"


async def test_an_unchanged_curve_is_not_written_and_goes_with_the_run(
    api: KubeApi, namespace: str, served: Cluster
) -> None:
    run, uid = await created(api, namespace)
    curve = curve_config_map(run, uid, evaluations(50))
    first = await api.apply(curve)
    digests = [of["metadata"]["annotations"][CURVE_DIGEST] for of in (first, curve)]
    assert digests[0] == digests[1]
    second = await api.apply(curve)
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"], "nothing written"

    await api.delete("ScaleRLRun", namespace, "decided", propagation="Foreground")
    served.kubectl(
        "wait",
        "--for=delete",
        "-n",
        namespace,
        "configmap",
        "-l",
        "scalerl.dev/run=decided",
        "--timeout=180s",
    )
