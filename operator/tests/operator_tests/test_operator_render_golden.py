"""All objects of three runs, compared with stored files; without the run file, which every new field of a spec changes.

After an intended change: ``UPDATE_GOLDEN=1 pytest <this file>``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from operator_tests.manifests import EVERYTHING, IMAGES, UID, cluster_run, example
from scalerl_api.spec import ScaleRLRun
from scalerl_operator.manifests import render
from scalerl_operator.manifests.scope import Scope
from scalerl_operator.names import RENDERED_HASH

GOLDEN = Path(__file__).parent / "golden"

RUNS = {
    "tiny": example("tiny/run-kubernetes.yaml"),
    "gpu": cluster_run(
        "math-7b",
        labels={"kueue.x-k8s.io/queue-name": "research"},
        model={"hub": {"name": "example/math-7b"}},
        storage={"claimName": "team-volume"},
        generator={"devices": 2, "podTemplate": {"shmSize": "16Gi"}},
        trainer={
            "replicas": 2,
            "devices": 8,
            "zeroStage": 3,
            "podTemplate": {
                "env": [
                    {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
                    {"name": "NCCL_IB_HCA", "value": "mlx5"},
                ],
                "resources": {"requests": {"cpu": "12", "memory": "256Gi"}, "limits": {"rdma/ib": "1"}},
                "shmSize": "64Gi",
            },
        },
        podTemplate={
            "nodeSelector": {"cloud.example/accelerator": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "imagePullSecrets": [{"name": "registry"}],
        },
    ),
    "without-shared-claim": cluster_run(
        storage={"mountedBy": "Coordinator", "accessMode": "ReadWriteOnce", "size": "1Gi"},
        checkpoint={"to": "s3://checkpoints/run"},
        generator={"speculation": {"history": {}}, "podTemplate": {"env": [{"name": "A", "value": "1"}]}},
        trainer={
            "podTemplate": {
                "env": [
                    {"name": "AWS_REGION", "value": "eu-north-1"},
                    {
                        "name": "AWS_SECRET_ACCESS_KEY",
                        "valueFrom": {"secretKeyRef": {"name": "bucket", "key": "secret"}},
                    },
                ],
                "imagePullSecrets": [{"name": "trainer-registry"}],
                "volumes": [{"name": "scratch", "emptyDir": {}}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            },
        },
        podTemplate={
            "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
        },
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_render_equals_the_golden_file(name: str) -> None:
    run: ScaleRLRun = RUNS[name]
    objects = render(Scope(run, UID, IMAGES, "scalerl-system", desired=EVERYTHING))
    for obj in objects:
        if obj["kind"] == "ConfigMap":
            obj["data"] = dict.fromkeys(obj["data"], "the run file")
            obj["metadata"]["annotations"][RENDERED_HASH] = "its hash"
    text = yaml.safe_dump_all(objects, sort_keys=True, width=110, allow_unicode=True)
    file = GOLDEN / f"render-{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
