"""Two releases of the operator, as real processes, that watch the same namespace of a real API server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from replicas import a_run, leader, replica
from testcluster import Cluster
from testcluster.handle import KubectlError

pytestmark = pytest.mark.cluster


async def holds(condition: object, what: str, seconds: float = 120.0) -> None:
    assert callable(condition)
    for _ in range(int(seconds / 0.5)):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.5)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


async def test_second_release_leaves_the_runs_of_the_first_alone(
    served: Cluster, namespace: str, tmp_path: Path
) -> None:
    other = f"{namespace}-other"
    served.kubectl("create", "namespace", other)
    log = tmp_path / "second.log"

    def claim() -> str:
        try:
            return str(served.get("configmap", "scalerl-operator", "-n", namespace)["data"]["operator"])
        except KubectlError:
            return ""

    def written_by_the_first() -> bool:
        jobs = served.get("jobs", "-n", namespace)["items"]
        images = [j["spec"]["template"]["spec"]["containers"][0]["image"] for j in jobs]
        return bool(images) and set(images) == {"t"}

    try:
        async with replica(served, namespace, "first") as first:
            await leader([first])
            served.kubectl("apply", "-f", "-", stdin=json.dumps(a_run(namespace, "mine")))
            await holds(lambda: claim() == f"{namespace}/scalerl-operator", "the claim of the first")
            more = {"POD_NAMESPACE": other, "SCALERL_TRAINER_IMAGE": "another", "SCALERL_LEASE": "theirs"}
            async with replica(served, namespace, "second", log=log, **more) as second:
                await leader([second])
                await holds(lambda: "leaves them alone" in log.read_text(), "a line in the log of the second")
                served.kubectl("apply", "-f", "-", stdin=json.dumps(a_run(namespace, "later")))
                await holds(written_by_the_first, "objects of the first")
                await holds(
                    lambda: len(served.get("jobs", "-n", namespace)["items"]) == 2, "both runs' objects"
                )
                assert written_by_the_first()
                assert claim() == f"{namespace}/scalerl-operator"
                assert f"the operator {namespace}/scalerl-operator reconciles" in log.read_text()
    finally:
        served.kubectl("delete", "scalerlruns", "--all", "-n", namespace, "--wait=false")
        served.kubectl("delete", "namespace", other, "--wait=false")
