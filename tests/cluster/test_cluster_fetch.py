"""``scalerl fetch`` and ``logs`` with a real kubelet: from the volume of a run without pods, and of one with a coordinator."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from pathlib import Path

import pytest
from stage import serve_runs, tiny
from testcluster import Cluster

from scalerl_cli.main import main, parser
from scalerl_cli.page.mirror import mirrored
from scalerl_operator.names import RUN_DIR, labels

NAMESPACE = "fetch-test"
IMAGE = "localhost/busybox:1"
BYTES = 3_000_000
WRITE = f"""
mkdir -p {RUN_DIR}/checkpoints/hf/step-00000003/deep {RUN_DIR}/coordinator && cd {RUN_DIR}
head -c {BYTES} /dev/urandom > checkpoints/hf/step-00000003/model.safetensors
echo '{{}}' > 'checkpoints/hf/step-00000003/deep/a file.json'
echo journal > coordinator/0001
echo '{{"step": 0, "reward": 0.5}}' > metrics.jsonl
sha256sum checkpoints/hf/step-00000003/model.safetensors; sleep 1000 & wait
"""


def test_files_of_a_run_come_from_its_coordinator_or_from_a_pod_of_its_own(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_runs(cluster)
    cluster.kubectl("create", "namespace", NAMESPACE)
    try:
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "tiny-addition-data", "namespace": NAMESPACE},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        }
        run = copy.deepcopy(tiny())
        run["metadata"]["namespace"] = NAMESPACE
        cluster.apply(claim, run)
        uid = cluster.kubectl(
            "get", "scalerlrun", "tiny-addition", "-n", NAMESPACE, "-o", "jsonpath={.metadata.uid}"
        )
        model = {
            "version": 3,
            "reward": "0.5",
            "path": "checkpoints/hf/step-00000003",
            "time": "2026-01-01T00:00:00Z",
        }
        status = json.dumps({"status": {"phase": "Running", "exports": {"best": model}}})
        patch = (
            "patch",
            "scalerlrun",
            "tiny-addition",
            "-n",
            NAMESPACE,
            "--subresource=status",
            "--type=merge",
        )
        cluster.kubectl(*patch, "-p", status)
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "tiny-addition-coordinator-0",
                "namespace": NAMESPACE,
                "labels": labels("tiny-addition", uid, "coordinator"),
            },
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "securityContext": {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001},
                "containers": [
                    {
                        "name": "coordinator",
                        "image": IMAGE,
                        "command": ["bash", "-c", WRITE],
                        "volumeMounts": [{"name": "run", "mountPath": RUN_DIR, "subPath": "tiny-addition"}],
                    }
                ],
                "volumes": [{"name": "run", "persistentVolumeClaim": {"claimName": "tiny-addition-data"}}],
            },
        }
        cluster.apply(pod)
        where = ("-n", NAMESPACE, "--kubeconfig", str(cluster.kubeconfig))
        cluster.kubectl(
            "wait", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--for=condition=Ready", "--timeout=500s"
        )
        for _ in range(1200):
            capsys.readouterr()
            if main(["logs", "tiny-addition", "coordinator", *where]) == 0:
                break
            time.sleep(0.1)
        prefix, digest, _ = capsys.readouterr().out.split()
        assert prefix == "tiny-addition-coordinator-0/coordinator"

        fetch = ("fetch", "tiny-addition")
        assert main([*fetch, "model", *where, "-o", str(tmp_path / "live")]) == 0
        assert main([*fetch, "rollouts", *where, "-o", str(tmp_path / "live")]) == 0
        assert (tmp_path / "live/tiny-addition-rollouts/coordinator/0001").read_text() == "journal\n"
        arguments = parser().parse_args(["view", f"{NAMESPACE}/tiny-addition", *where[2:]])
        with mirrored(str(arguments.dirs[0]), arguments) as shown:
            assert (shown.state()["steps"], shown.name) == (1, f"{NAMESPACE}/tiny-addition")
        cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", NAMESPACE)
        assert main([*fetch, "model", *where, "-o", str(tmp_path / "later")]) == 2
        assert "--image" in capsys.readouterr().err
        assert main([*fetch, "model", *where, "-o", str(tmp_path / "later"), "--image", IMAGE]) == 0
        for folder in ("live", "later"):
            model_folder = tmp_path / folder / "tiny-addition-step-00000003"
            data = (model_folder / "model.safetensors").read_bytes()
            assert len(data) == BYTES
            assert hashlib.sha256(data).hexdigest() == digest
            assert (model_folder / "deep/a file.json").read_text() == "{}\n"
        assert cluster.kubectl("get", "pods", "-n", NAMESPACE, "-l", "scalerl.dev/fetch", "-o", "name") == ""
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE)
        # The chart, which later tests install on this cluster, does not take over a definition that it has not created.
        cluster.kubectl("delete", "crd", "scalerlruns.scalerl.dev", "--ignore-not-found")
