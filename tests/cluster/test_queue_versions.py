"""A LocalQueue is found by whichever version of its API the cluster's Kueue serves."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from stage import Stage, condition, tiny
from testcluster import KubectlError

from scalerl_operator.controller.check import QUEUE_SECONDS
from scalerl_operator.names import QUEUE

pytestmark = pytest.mark.cluster

GROUP, PLURAL = "kueue.x-k8s.io", "localqueues"


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
async def test_queue_is_found_by_the_served_version(there: Stage, version: str) -> None:
    async def kubectl(*arguments: str, manifest: object = None) -> None:
        await asyncio.to_thread(there.kubectl, *arguments, stdin=json.dumps(manifest))

    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": "LocalQueue", "plural": PLURAL, "singular": "localqueue"},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object"}},
                }
            ],
        },
    }
    queue = {"apiVersion": f"{GROUP}/{version}", "kind": "LocalQueue", "metadata": {"name": "team"}}
    run = tiny()
    run["metadata"]["labels"] = {QUEUE: "team"}
    await kubectl("apply", "-f", "-", manifest=definition)
    try:
        path = f"/apis/{GROUP}/{version}/namespaces/{there.namespace}/{PLURAL}"
        for _ in range(240):  # it is served a moment after it is there
            with contextlib.suppress(KubectlError):
                await kubectl("get", "--raw", path)
                break
            await asyncio.sleep(0.5)
        await there.create(run)
        await there.reconcile_until(lambda r: condition(r, "Admitted") == "ReferenceNotFound", times=3)
        await kubectl("create", "--raw", path, "-f", "-", manifest=queue)
        there.now += QUEUE_SECONDS + 1.0
        await there.reconcile_until(
            lambda r: condition(r, "Admitted") not in ("", "ReferenceNotFound"), times=3
        )
    finally:
        await kubectl("delete", "crd", f"{PLURAL}.{GROUP}", "--wait")
