"""The few verbs of the API server that a record is kept with: versions, conflicts, answers that get lost."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from typing import Any

from operator_tests.children import run_spec
from scalerl_api.spec import ScaleRLRun
from scalerl_operator.kube import errors
from scalerl_operator.kube.types import Object

UID = "5b1f3a52-0000-4000-8000-000000000001"
DOWN = "down"
"""A call that is not sent."""
LOST = "lost"
"""A call that is carried out, and whose answer does not arrive."""


def cluster_run(**spec: Any) -> ScaleRLRun:
    run = run_spec(**spec)
    return run.model_copy(update={"metadata": run.metadata.model_copy(update={"namespace": "team"})})


class ConfigMaps:
    """writes: how many were carried out. fate: what becomes of the next writes, None: nothing bad."""

    def __init__(self, fate: Iterable[str | None] = ()) -> None:
        self.objects: dict[str, Object] = {}
        self.fate = list(fate)
        self.writes = 0
        self._version = 100

    def content(self) -> bytes:
        """Of all chunks in order."""
        order = sorted(self.objects, key=lambda name: (len(name), name))
        return "".join(self.objects[name]["data"]["decisions.jsonl"] for name in order).encode()

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        await asyncio.sleep(0)
        if self.fate and self.fate[0] == DOWN:
            self.fate.pop(0)
            raise errors.Unreachable("no answer within 15 s", what=f"get ConfigMap {namespace}/{name}")
        return copy.deepcopy(self.objects.get(name))

    async def create(self, obj: Object) -> Object:
        fate = await self._begin()
        name = obj["metadata"]["name"]
        if name in self.objects:
            raise errors.AlreadyExists(f'configmaps "{name}" already exists', code=409)
        return self._store(copy.deepcopy(obj), fate)

    async def patch(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        patch: dict[str, Any],
        *,
        resource_version: str | None = None,
    ) -> Object:
        fate = await self._begin()
        if name not in self.objects:
            raise errors.NotFound(f'configmaps "{name}" not found', code=404)
        if self.objects[name]["metadata"]["resourceVersion"] != resource_version:
            raise errors.Conflict("the object has been modified", code=409)
        changed = copy.deepcopy(self.objects[name])
        changed["data"] |= patch.get("data", {})
        changed["metadata"]["annotations"] |= patch.get("metadata", {}).get("annotations", {})
        return self._store(changed, fate)

    async def _begin(self) -> str | None:
        await asyncio.sleep(0)
        fate = self.fate.pop(0) if self.fate else None
        if fate == DOWN:
            raise errors.Unreachable("connection refused")
        return fate

    def _store(self, obj: Object, fate: str | None) -> Object:
        assert len(obj["data"]["decisions.jsonl"].encode()) <= 1024 * 1024
        self._version += 1
        self.writes += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self.objects[obj["metadata"]["name"]] = obj
        if fate == LOST:
            raise errors.Unreachable("no answer within 15 s")
        return copy.deepcopy(obj)
