"""The operator alone loses the API server: its connections are not reset, they are silent for half a minute."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import yaml
from replicas import a_run, leader, replica, until
from testcluster import Cluster

from scalerl_operator.kube import connection
from scalerl_operator.kube.client import KubeApi

pytestmark = pytest.mark.cluster

AWAY_SECONDS = 30.0
BACK_SECONDS = 120.0
"""A stream that is silent ends by itself, as the server was asked, more than so long after it is back."""


class Gate:
    """A way to the API server that can be shut: what is sent meanwhile waits, as in a network that drops packets."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """On a port of loopback."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.closing(writer):
            await self._open.wait()
            there, back = await asyncio.open_connection(*self._target)
            with contextlib.closing(back):
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(self._carry(reader, back))
                        both.create_task(self._carry(there, writer))
                except* (ConnectionError, asyncio.IncompleteReadError):
                    pass  # one side has gone, and so does the other

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


@contextlib.asynccontextmanager
async def gated(served: Cluster, folder: Path) -> AsyncIterator[tuple[Cluster, Gate]]:
    """The same cluster by another way."""
    config = yaml.safe_load(served.kubeconfig.read_text())
    (cluster,) = config["clusters"]
    server = urlsplit(cluster["cluster"]["server"])
    assert server.hostname is not None
    assert server.port is not None
    gate = Gate(server.hostname, server.port)
    async with gate.serving() as port:
        cluster["cluster"]["server"] = f"https://127.0.0.1:{port}"
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        yield Cluster(path, served.kubectl_program), gate


async def test_disconnected_operator_stops_leading_and_resumes(
    served: Cluster, namespace: str, tmp_path: Path
) -> None:
    async def prepare_of(run: str) -> str:
        job = await api.get("Job", namespace, f"{run}-prepare")
        return "" if job is None else str(job["metadata"]["uid"])

    async with (
        KubeApi(await connection.load(str(served.kubeconfig))) as api,
        gated(served, tmp_path) as (through, gate),
        replica(through, namespace, "only") as only,
    ):
        await leader([only])
        data = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"data.jsonl": "{}"}}
        await api.create(data | {"metadata": {"name": "tiny-addition-data", "namespace": namespace}})
        await api.create(a_run(namespace, "first"))
        await _until(lambda: prepare_of("first"), 120)
        before = await prepare_of("first")

        gate.shut()
        began = time.monotonic()
        await api.create(a_run(namespace, "second"))
        await api.delete("ConfigMap", namespace, "first-spec")

        async def lost() -> bool:
            return await only.holder() != only.identity

        print(f"measured: API server silent, operator leads no more: {await _until(lost, 120):.1f} s")
        await asyncio.sleep(AWAY_SECONDS - (time.monotonic() - began))
        assert await prepare_of("second") == "", "it was cut off"
        gate.open()

        async def caught_up() -> bool:
            spec = await api.get("ConfigMap", namespace, "first-spec")
            return spec is not None and bool(await prepare_of("second"))

        took = await _until(caught_up, BACK_SECONDS)
        print(f"measured: API server back after 30 s, operator has caught up: {took:.1f} s")
        await leader([only])
        assert await prepare_of("first") == before, "nothing is made twice"
        assert only.process.returncode is None


async def test_cancelled_watch_of_a_silent_server_leaves_no_connection(
    served: Cluster, namespace: str, tmp_path: Path
) -> None:
    events = asyncio.Queue[str]()

    async def follow(version: str) -> None:
        async for event in api.watch("ConfigMap", namespace, since=version):
            events.put_nowait(event.type)

    async with gated(served, tmp_path) as (through, gate):
        configuration = await connection.load(str(through.kubeconfig))
        async with KubeApi(configuration) as api:
            data = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "a", "namespace": namespace},
            }
            made = await api.create(data)
            following = asyncio.create_task(follow(made["metadata"]["resourceVersion"]))
            await api.delete("ConfigMap", namespace, "a")
            assert await asyncio.wait_for(events.get(), 120) == "DELETED"
            gate.shut()
            following.cancel()
            await asyncio.wait([following])
        port = urlsplit(configuration.host).port
        await until(
            lambda: not [c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port],
            20,
        )


async def _until(true: Callable[[], Awaitable[object]], seconds: float) -> float:
    """Seconds until it is true; an assertion if it never is."""
    began = time.monotonic()
    for _ in itertools.count():
        if await true():
            break
        assert time.monotonic() - began < seconds, f"not within {seconds} s"
        await asyncio.sleep(0.1)
    return time.monotonic() - began
