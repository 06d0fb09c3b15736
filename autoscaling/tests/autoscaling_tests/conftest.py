"""Servers of the tests on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from scalerl_curvefit.sidecar.app import Sidecar as Application


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[web.Application], Awaitable[str]]]:
    servers = []

    async def start(application: web.Application) -> str:
        server = TestServer(application)
        await server.start_server()
        servers.append(server)
        return str(server.make_url("/")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def url(serve: Callable[[web.Application], Awaitable[str]]) -> str:
    return await serve(Application().application())
