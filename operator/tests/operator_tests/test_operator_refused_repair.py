"""A repair that the API server refuses: it degrades the run until it is made, and keeps nothing else from being made."""

from __future__ import annotations

import copy
from typing import Any, cast

from operator_tests.manifests import IMAGES, cluster_run, context
from scalerl_api.conditions import Phase, Reason
from scalerl_operator.controller.apply import Applier
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.policy.lifecycle_types import LifecycleDecision, Memory

SPEC = ("ConfigMap", "math-spec")


class Server:
    """Holds what is created and applied; an apply of ``refused`` is forbidden, as by an admission policy."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.refused: tuple[str, str] | None = None
        self.created: list[tuple[str, str]] = []

    async def create(self, obj: Object) -> Object:
        key = obj["kind"], obj["metadata"]["name"]
        if key in self.objects:
            raise errors.AlreadyExists("it is there")
        made = copy.deepcopy(obj)
        made["metadata"] |= {"uid": f"{key[0]}-{key[1]}", "resourceVersion": str(len(self.objects) + 1)}
        self.objects[key] = made
        self.created.append(key)
        return copy.deepcopy(made)

    async def apply(self, obj: Object, *, uid: str) -> Object:
        key = obj["kind"], obj["metadata"]["name"]
        if key == self.refused:
            raise errors.Forbidden("denied by a policy")
        live = self.objects[key]
        self.objects[key] = live | copy.deepcopy(obj) | {"metadata": live["metadata"] | obj["metadata"]}
        return copy.deepcopy(self.objects[key])

    async def get(self, kind: str, namespace: str, name: str, **_: Any) -> Object | None:
        return copy.deepcopy(self.objects.get((kind, name)))

    async def list(self, *_: Any, **__: Any) -> list[Object]:
        return []

    async def event(self, *_: Any) -> None:
        pass


class Reconciles:
    """The applier's part of one run's reconciles."""

    def __init__(self) -> None:
        self.server, self.state = Server(), RunState()
        cache = Cache(lambda key: None)
        api = cast(KubeApi, self.server)
        self.applier = Applier(api, cache, IMAGES, "scalerl-system", namespaced=False)

    async def __call__(self, at: float, **wanted: Any) -> Reason | None:
        """Why the run is blocked after it."""
        found = context(
            cluster_run(),
            unix_seconds=1e9 + at,
            objects=copy.deepcopy(self.server.objects),
            state=self.state,
            decision=LifecycleDecision(Phase.RUNNING, Memory(attempt=1), **wanted),
        )
        await self.applier.apply(found)
        return None if found.blocked is None else found.blocked.reason


async def test_refused_repair_degrades_until_it_is_made_and_blocks_nothing_else() -> None:
    reconcile = Reconciles()
    server = reconcile.server
    assert await reconcile(0, coordinator=True) is None
    server.objects[SPEC]["data"]["run.yaml"] = "{}"
    server.refused = SPEC
    assert await reconcile(1, coordinator=True) is Reason.OBJECT_REFUSED
    assert await reconcile(2, coordinator=True, trainer=1) is Reason.OBJECT_REFUSED, "withheld, and still so"
    assert ("Job", "math-trainer-1") in server.created
    server.refused = None
    assert await reconcile(1000, coordinator=True, trainer=1) is None
    assert server.objects[SPEC]["data"]["run.yaml"] != "{}"


async def test_object_that_is_changed_back_is_no_longer_refused() -> None:
    reconcile = Reconciles()
    server = reconcile.server
    assert await reconcile(0) is None
    data = server.objects[SPEC]["data"]
    before, data["run.yaml"] = data["run.yaml"], "{}"
    server.refused = SPEC
    assert await reconcile(1) is Reason.OBJECT_REFUSED
    data["run.yaml"] = before
    assert await reconcile(2) is None
