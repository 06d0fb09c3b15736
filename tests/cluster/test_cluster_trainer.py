"""The trainer's pods on real nodes: two pods of two ranks each, as rendered, and how a rank's failure reaches the pod."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from installed import ROOT, until
from testcluster import Cluster

from scalerl_api.load import run_from_object
from scalerl_lifecycle.lifecycle_types import Wanted
from scalerl_operator.manifests import render
from scalerl_operator.manifests.scope import Desired, Images, Scope

NAMESPACE = "trainer-pods"
# In the trainer's place: no GPU is needed, and rank 3 fails while the others wait for it in a collective.
RANK = """
import datetime, os, sys, torch, torch.distributed as dist
from scalerl_trainer.engine.distributed import Rank, init_process_group
rank = Rank.from_environment(os.environ)
init_process_group(rank, device="cpu", timeout_seconds=600)
total = torch.tensor([rank.rank])
dist.all_reduce(total)
memory = os.statvfs("/dev/shm")
size = memory.f_blocks * memory.f_frsize // 2**20
print("sum", int(total), "local", rank.local_rank, "name", os.environ["SCALERL_NAME"], "shm", size, flush=True)
dist.barrier()
if rank.rank == 3:
    print("2026-01-01 00:00:00,000 ERROR scalerl_trainer.main training diverged", flush=True)
    os._exit(3)
dist.barrier()
"""


def objects(image: str) -> list[dict[str, Any]]:
    """Namespace, headless Service and Job; without the GPUs and the volumes of a whole run."""
    run = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
    run["metadata"] = {"name": "pods", "namespace": NAMESPACE}
    run["spec"]["trainer"] = {"replicas": 2, "devices": 2, "cpuThreads": 1}
    desired = Desired(Wanted(prepare=True, coordinator=True, generators=True, trainer=1))
    made = render(Scope(run_from_object(run), "0", Images(image, image, image), "operators", desired=desired))
    job, service = (
        next(
            o
            for o in made
            if o["kind"] == kind and o["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer"
        )
        for kind in ("Job", "Service")
    )
    pod = job["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    at = trainer["command"].index("scalerl_trainer.launch") + 1
    trainer["command"] = [*trainer["command"][:at], "python", "-c", RANK]
    trainer["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}}
    kept = {"scalerl-shm", "scalerl-tmp-trainer"}
    trainer["volumeMounts"] = [mount for mount in trainer["volumeMounts"] if mount["name"] in kept]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] in kept]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        del trainer[probe]
    for each in (job, service):
        del each["metadata"]["ownerReferences"]
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}},
        service,
        job,
    ]


@pytest.mark.timeout(1800)
def test_ranks_of_two_pods_connect_and_fail_together(cluster: Cluster, images: dict[str, str]) -> None:
    """Exit code and termination message as the kubelet reports them, and the log by rank."""
    cluster.apply(*objects(images["trainer"]))

    def ended() -> dict[str, Any] | None:
        """State of the pod with ranks 2 and 3."""
        index = "batch.kubernetes.io/job-completion-index=1"
        for pod in cluster.get("pods", "-n", NAMESPACE, "-l", index)["items"]:
            for status in pod["status"].get("containerStatuses", []):
                if "terminated" in status["state"]:
                    found.update(status["state"]["terminated"], pod=pod["metadata"]["name"])
        return found or None

    found: dict[str, Any] = {}
    try:
        until(ended, 1500, "the end of the second pod")
        log = cluster.kubectl("logs", found["pod"], "-n", NAMESPACE)
        assert found["exitCode"] == 3, log
        last = found["message"].splitlines()[-1]
        assert last.endswith("ERROR scalerl_trainer.launch rank 3 exited with code 3: training diverged")
        for local, rank in enumerate((2, 3)):
            assert f"[rank {rank}] sum 6 local {local} name trainer-{rank} shm 2048" in log
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
