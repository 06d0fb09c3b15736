"""The record of decisions in real ConfigMaps: two writers, full objects, what kubectl prints of them, and their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from stage import evaluations
from testcluster import Cluster

from scalerl_api.load import run_from_object
from scalerl_api.spec import ScaleRLRun
from scalerl_cli.main import main
from scalerl_operator.autoscaling.decide import decide
from scalerl_operator.autoscaling.decision_log import DecisionRecord, Line
from scalerl_operator.autoscaling.log_storage import RecordLost
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
from scalerl_operator.autoscaling.replay import verify
from scalerl_operator.build.curve import curve_config_map, digest_of
from scalerl_operator.controller import decision_config_maps
from scalerl_operator.controller.decision_config_maps import ConfigMapStorage
from scalerl_operator.kube.client import KubeApi

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]


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
        recipe=Recipe(batch_completions=64, context_tokens=64, fp32_head=True, loss="CISPO"),
        trouble="no forecast: none was asked for",
    )
    rules = run.spec.autoscaling
    return await record.append("autoscale", rules, points, seen, decide(rules, seen, record.known.history))


async def test_of_two_operators_one_fails_and_goes_on_from_the_others_line(
    api: KubeApi, namespace: str, served: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, uid = await created(api, namespace)
    old, new = [await DecisionRecord.load(ConfigMapStorage(run, uid, api)) for _ in range(2)]
    points = [point(e) for e in evaluations(40)]
    await write(new, run, points[:1])
    with pytest.raises(RecordLost):
        await write(old, run, points[:1])
    await write(old, run, points[:2])
    with pytest.raises(RecordLost):
        await write(new, run, points[:3])
    await write(new, run, points[:3])

    again = await DecisionRecord.load(ConfigMapStorage(run, uid, api))
    assert again.known == new.known
    printed = tmp_path / "printed.yaml"
    selector = ("get", "configmap", "-n", namespace, "-l", "scalerl.dev/run=decided", "-o", "yaml")
    printed.write_text(served.kubectl(*selector))
    assert main(["replay", str(printed)]) == 0
    assert "3 decisions, each the same when made again" in capsys.readouterr().out


async def test_full_objects_follow_each_other_and_go_with_the_run(
    api: KubeApi, namespace: str, served: Cluster
) -> None:
    run, uid = await created(api, namespace)
    storage = ConfigMapStorage(run, uid, api)
    record = await DecisionRecord.load(storage)
    # Each line brings two thousand other points: some 400 KB, so that every third begins a new object.
    points = [point(e) for e in evaluations(2000)]
    for turn in range(5):
        await write(record, run, [replace(p, samples=4000 + turn) for p in points])
    maps = await api.list("ConfigMap", namespace, label_selector="scalerl.dev/run=decided")
    sizes = {m["metadata"]["name"]: len(m["data"]["decisions.jsonl"]) for m in maps}
    assert sorted(sizes) == ["decided-decisions", "decided-decisions-2", "decided-decisions-3"]
    assert decision_config_maps.MAX_BYTES * 0.5 < max(sizes.values()) <= decision_config_maps.MAX_BYTES
    lines, found = verify(await storage.read())
    assert (len(lines), found) == (5, [])

    curve = curve_config_map(run, uid, evaluations(50))
    first = await api.apply(curve)
    assert digest_of(first) == digest_of(curve)
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
