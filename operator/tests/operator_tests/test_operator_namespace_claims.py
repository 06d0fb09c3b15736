"""Two releases that watch one namespace: one reconciles its runs."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from operator_tests.virtual_time import run
from scalerl_api.spec import API_VERSION, KIND
from scalerl_operator.controller.claimed_runs import ReconcileContext, reconciler
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.namespace_claims import (
    DURATION_SECONDS,
    NAME,
    OF_OTHERS_SECONDS,
    RENEW_SECONDS,
    NamespaceClaims,
)
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.scope import Images
from scalerl_operator.process_metrics import Metrics
from scalerl_operator.settings import Settings


class Server:
    """The ConfigMaps of an API server, with its optimistic concurrency; ``before_write`` is called before each write."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.versions = 0
        self.writes = self.reads = 0
        self.now = 0.0
        self.refusal: errors.ApiError | None = None
        self.before_write: Callable[[], None] = lambda: None

    def _write(self) -> None:
        hook, self.before_write = self.before_write, lambda: None
        hook()
        if self.refusal is not None:
            raise self.refusal
        self.versions += 1
        self.writes += 1

    def put(self, namespace: str, data: Object) -> None:
        self.versions += 1
        self.objects[namespace] = {"metadata": {"resourceVersion": str(self.versions)}, "data": data}

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        assert (kind, name) == ("ConfigMap", NAME)
        self.reads += 1
        return copy.deepcopy(self.objects.get(namespace))

    async def create(self, obj: Object) -> None:
        self._write()
        namespace = obj["metadata"]["namespace"]
        if namespace in self.objects:
            raise errors.AlreadyExists("there already")
        self.put(namespace, obj["data"])

    async def patch(self, kind: str, namespace: str, name: str, patch: Any, *, resource_version: str) -> None:
        self._write()
        if self.objects[namespace]["metadata"]["resourceVersion"] != resource_version:
            raise errors.Conflict("changed")
        self.put(namespace, patch["data"])

    def release(self, holder: str) -> NamespaceClaims:
        return NamespaceClaims(self, holder, lambda: self.now)  # type: ignore[arg-type]


async def test_first_claims_and_the_second_leaves_its_namespace_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    first, second = server.release("a/lease"), server.release("b/lease")
    assert await first.mine("team")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert not await second.mine("team")
    assert len(caplog.records) == 1
    assert "team: the operator a/lease reconciles the runs" in caplog.text
    assert "b/lease leaves them alone" in caplog.text
    assert (first.of_others(), second.of_others()) == (0, 1)
    assert await second.mine("other")
    assert not await first.mine("other")


async def test_claim_is_renewed_once_a_minute_and_survives_a_change_of_the_leader() -> None:
    server = Server()
    first, standby, second = server.release("a/l"), server.release("a/l"), server.release("b/l")
    for _ in range(50):
        server.now += 10
        assert await first.mine("team")
        assert not await second.mine("team")
    assert server.writes == 1 + 490 // RENEW_SECONDS
    assert await standby.mine("team")


async def test_claim_that_is_not_renewed_is_taken_after_its_duration() -> None:
    server = Server()
    first, second = server.release("a/l"), server.release("b/l")
    assert await first.mine("team")
    server.now = 1000.0
    assert not await second.mine("team"), "the clock counts from the first read"
    server.now += DURATION_SECONDS - 1
    assert not await second.mine("team")
    server.now += OF_OTHERS_SECONDS
    assert await second.mine("team")
    assert second.of_others() == 0
    assert not await first.mine("team")


@pytest.mark.parametrize("there", [False, True])
async def test_of_two_at_once_one_wins(there: bool) -> None:
    server = Server()
    first, second = server.release("a/l"), server.release("b/l")
    if there:
        server.put("team", {"operator": "a/l"})
        server.before_write = lambda: server.put("team", {"operator": "b/l"})
    else:
        server.before_write = lambda: server.put("team", {"operator": "b/l", "renewed": "now"})
    assert not await first.mine("team")
    assert await second.mine("team")


@pytest.mark.parametrize(
    "refusal",
    [
        errors.NotFound("namespaces not found"),
        errors.Forbidden("is being terminated"),
        errors.Invalid("field is immutable"),
    ],
)
async def test_runs_of_a_namespace_that_goes_are_still_ended(refusal: errors.ApiError) -> None:
    server = Server()
    server.refusal = refusal
    assert await server.release("a/l").mine("team")


async def test_claim_is_read_again_after_the_lead_was_lost() -> None:
    server = Server()
    first = server.release("a/l")
    assert await first.mine("team")
    server.put("team", {"operator": "b/l", "renewed": "now"})
    assert await first.mine("team"), "within a minute"
    first.forget()
    assert not await first.mine("team")


@pytest.mark.parametrize("with_runs", [True, False])
def test_claim_is_kept_while_its_namespace_has_runs(with_runs: bool) -> None:
    """A run that is held, or has ended, is not reconciled for hours."""

    async def watch_together() -> None:
        server = Server()
        clock = asyncio.get_running_loop().time
        first = NamespaceClaims(cast(KubeApi, server), "a/l", clock)
        second = NamespaceClaims(cast(KubeApi, server), "b/l", clock)
        assert await first.mine("team")
        lost: list[str] = []
        keeping = asyncio.create_task(first.keep(lambda: {"team"} if with_runs else set(), lost.append))
        server.refusal = errors.Unreachable("for a moment")
        await asyncio.sleep(70)
        server.refusal = None
        found = []
        for _ in range(60):
            await asyncio.sleep(60)
            found.append(await second.mine("team"))
        assert any(found) != with_runs
        assert lost == []
        if with_runs:
            server.put("team", {"operator": "b/l"})
            await asyncio.sleep(2 * RENEW_SECONDS)
            assert lost == ["team"]
            assert first.of_others() == 1
        keeping.cancel()

    run(watch_together())


def test_namespace_of_another_whose_runs_are_gone_is_forgotten() -> None:
    async def keep() -> None:
        server = Server()
        server.put("team", {"operator": "b/l"})
        claims = server.release("a/l")
        assert not await claims.mine("team")
        keeping = asyncio.create_task(claims.keep(set, lambda namespace: None))
        await asyncio.sleep(RENEW_SECONDS + 1)
        assert claims.of_others() == 0
        keeping.cancel()

    run(keep())


async def test_claim_of_another_is_not_read_with_each_event() -> None:
    server = Server()
    server.put("team", {"operator": "b/l"})
    claims = server.release("a/l")
    for _ in range(100):
        server.now += OF_OTHERS_SECONDS / 20
        assert not await claims.mine("team")
    assert server.reads <= 6


async def test_full_quota_of_config_maps_does_not_make_a_namespace_everybodys() -> None:
    server = Server()
    server.refusal = errors.QuotaExceeded("count/configmaps")
    with pytest.raises(errors.QuotaExceeded):
        await server.release("a/l").mine("team")


@pytest.mark.parametrize("holder", ["", "me", "a/b/c", "A/l", "a/l\nb", "x" * 64 + "/l"])
async def test_what_no_release_writes_is_no_claim(holder: str) -> None:
    server = Server()
    server.put("team", {"operator": holder})
    assert await server.release("a/l").mine("team")
    assert server.objects["team"]["data"]["operator"] == "a/l"


async def test_own_claim_that_a_user_changes_meanwhile_is_renewed_at_once() -> None:
    server = Server()
    server.put("team", {"operator": "a/l"})
    server.before_write = lambda: server.put("team", {"operator": "a/l", "note": "a user's"})
    assert await server.release("a/l").mine("team")
    assert "renewed" in server.objects["team"]["data"]
    assert server.reads == 2


async def test_runs_of_another_release_leave_nothing_behind() -> None:
    """A run that is gone is not asked for again, one that is being deleted goes, and a claim that is lost ends what runs for it."""
    server = Server()
    server.put("team", {"operator": "b/l"})
    cache = Cache(lambda key: None)
    done: list[tuple[str, Any]] = []

    async def reconciled(self: Reconciler, key: Any) -> None:
        done.append(("reconcile", key))

    async def forgotten(self: Reconciler, key: Any) -> None:
        done.append(("forget", key))

    settings = Settings(images=Images("t", "g", "c"))
    parts = ReconcileContext(settings, cast(KubeApi, server), cache, Metrics(), lambda key: None)
    key = ("team", "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reconciler, "reconcile", reconciled)
        patch.setattr(Reconciler, "forget", forgotten)
        async with reconciler(parts) as reconcile:
            assert await reconcile(key) is None
            assert (done, server.reads) == ([("reconcile", key)], 0)
            metadata = {"name": "run", "namespace": "team", "uid": "u", "resourceVersion": "1"}
            obj = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}
            cache.observe("ADDED", obj)
            assert await reconcile(key) == RENEW_SECONDS
            assert done[1:] == [("forget", key)]
            cache.observe(
                "MODIFIED",
                obj | {"metadata": metadata | {"resourceVersion": "2", "deletionTimestamp": "now"}},
            )
            assert await reconcile(key) is None
            assert done[2:] == [("reconcile", key)]
