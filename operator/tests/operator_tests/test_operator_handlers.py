"""kopf's part. (With an API server: tests/cluster/test_operator_io.py.)"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from kubernetes.aio.client.configuration import Configuration

from operator_tests.test_operator_main import LEAST
from scalerl_operator.controller.claimed_runs import ReconcileContext, reconciler
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.errors import Forbidden
from scalerl_operator.kube.namespace_claims import NamespaceClaims
from scalerl_operator.kube.run_stream import Watches
from scalerl_operator.main import Operator
from scalerl_operator.settings import Settings


class NoRuns:
    """An API server without runs, as far as lists go."""

    def __init__(self, *refused: str) -> None:
        """``refused``: namespaces without a Role."""
        self.refused = refused

    async def pages(
        self, kind: str, namespace: str | None, **_: object
    ) -> AsyncIterator[tuple[list[Any], str]]:
        if namespace in self.refused:
            raise Forbidden(f"{kind} in {namespace}", code=403)
        yield [], "1"


async def test_kopf_starts_without_name_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup keeps the event loop for as long as the DNS takes, and with it the renewal of the Lease."""

    def looked_up(name: str) -> Any:
        raise AssertionError(f"{name} is looked up")

    for function in ("gethostbyaddr", "gethostbyname", "getfqdn"):
        monkeypatch.setattr(socket, function, looked_up)
    nowhere = Configuration(host="http://127.0.0.1:9")
    watches = Watches(cast(Any, NoRuns()), nowhere, Cache(lambda key: None))
    task = asyncio.create_task(watches.run())
    try:
        await asyncio.wait_for(watches.started.wait(), 120)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_deleted_namespace_keeps_no_operator_from_being_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its runs wait, after it returns, until its objects have been listed; those of other namespaces do not."""
    settings = Settings.read(LEAST | {"SCALERL_WATCH_NAMESPACES": "here,gone"})
    operator = Operator(settings, Configuration(), reconciler)
    monkeypatch.setattr(operator.watches, "_api", NoRuns("gone"))
    await asyncio.wait_for(operator.watches._list(), 60)
    assert "gone was deleted, or lacks the chart's Role: ScaleRLRun in gone" in caplog.text
    informers = [each for each in operator._informers if not each.kind.optional]
    for informer in informers:
        if informer.namespace == "here":
            assert informer.what in operator._awaited()
            informer.synced.set()
    await asyncio.wait_for(operator._fill_cache(), 60)
    reconciled: list[Any] = []

    async def noted(self: Reconciler, key: Any) -> None:
        reconciled.append(key)

    async def mine(self: NamespaceClaims, namespace: str) -> bool:
        return True

    monkeypatch.setattr(Reconciler, "reconcile", noted)
    monkeypatch.setattr(NamespaceClaims, "mine", mine)
    monkeypatch.setattr(operator.cache, "run", lambda *key: {"metadata": {}})
    parts = ReconcileContext(
        *(settings, operator.api, operator.cache, operator.metrics, lambda key: None),
        namespace_known=operator._namespace_known,
    )
    async with reconciler(parts) as reconcile:
        assert await reconcile(("gone", "math")) is not None
        await reconcile(("here", "math"))
        assert reconciled == [("here", "math")]
        for informer in informers:
            informer.synced.set()
        await reconcile(("gone", "math"))
        assert reconciled[1:] == [("gone", "math")]


async def test_namespace_deleted_after_the_list_of_runs_keeps_no_operator_from_being_ready() -> None:
    """A kind that is refused in all namespaces does: its Roles lack it."""
    settings = Settings.read(LEAST | {"SCALERL_WATCH_NAMESPACES": "here,gone"})
    operator = Operator(settings, Configuration(), reconciler, wait_log_seconds=0.01)
    operator.watches.listed.set()
    needed = [each for each in operator._informers if not each.kind.optional]
    here = next(each for each in needed if each.namespace == "here")
    for each in needed:
        each.api = cast(Any, NoRuns("gone", *(["here"] if each.kind is here.kind else [])))
    tasks = [asyncio.create_task(each.run()) for each in needed]
    filled = asyncio.create_task(operator._fill_cache())
    try:
        await asyncio.sleep(0.2)
        assert not filled.done()
        assert all(each.what in operator._awaited() for each in needed if each.kind is here.kind)
        here.api = cast(Any, NoRuns("gone"))
        await asyncio.wait_for(filled, 60)
        assert not operator._namespace_known("gone")
        assert operator._namespace_known("here")
    finally:
        for task in (*tasks, filled):
            task.cancel()
        await asyncio.gather(*tasks, filled, return_exceptions=True)


async def test_operator_without_any_namespace_is_not_ready() -> None:
    """A missing Role is an error of the installation."""
    watches = Watches(cast(Any, NoRuns("a", "b")), Configuration(), Cache(lambda key: None), ("a", "b"))
    task = asyncio.create_task(watches._list())
    await asyncio.sleep(0.1)
    assert not watches.listed.is_set()
    assert not task.done()
    task.cancel()
