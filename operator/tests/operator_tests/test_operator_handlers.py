"""kopf's part. (With an API server: tests/cluster/test_operator_io.py.)"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from kubernetes.aio.client.configuration import Configuration

from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.run_stream import Watches


class NoRuns:
    """An API server without runs, as far as lists go."""

    async def pages(self, *_: object, **__: object) -> AsyncIterator[tuple[list[Any], str]]:
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
