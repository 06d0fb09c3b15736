"""Two releases that watch one namespace: one reconciles its runs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest

from scalerl_operator.kube import errors
from scalerl_operator.kube.namespace_claims import DURATION_SECONDS, NAME, RENEW_SECONDS, NamespaceClaims
from scalerl_operator.kube.types import Object


class Server:
    """The ConfigMaps of an API server, with its optimistic concurrency; ``before_write`` is called before each write."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.versions = 0
        self.writes = 0
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


async def test_claim_that_nobody_renews_is_taken_after_its_duration() -> None:
    server = Server()
    first, second = server.release("a/l"), server.release("b/l")
    assert await first.mine("team")
    server.now = 1000.0
    assert not await second.mine("team"), "the clock counts from the first read"
    server.now += DURATION_SECONDS - 1
    assert not await second.mine("team")
    server.now += 1
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
    "refusal", [errors.NotFound("namespaces not found"), errors.Forbidden("is being terminated")]
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
