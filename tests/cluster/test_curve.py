"""The ConfigMap of a run's curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from stage import evaluations
from testcluster import Cluster

from scalerl_api.load import run_from_object
from scalerl_api.spec import ScaleRLRun
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.manifests.storage import CURVE_DIGEST, curve_config_map

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]


async def created(api: KubeApi, namespace: str) -> tuple[ScaleRLRun, str]:
    run: dict[str, Any] = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
    run["metadata"] = {"name": "decided", "namespace": namespace}
    made = await api.create(run)
    return run_from_object(made), made["metadata"]["uid"]


async def test_unchanged_curve_is_not_written(api: KubeApi, namespace: str, served: Cluster) -> None:
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
        "--timeout=500s",
    )
