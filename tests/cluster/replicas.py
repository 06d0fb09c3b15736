"""Operators for tests: in the test's process with a stub reconcile, or as separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.sslproto import SSLProtocolState
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import yaml
from free_port import free_port
from stage import ROOT
from testcluster import Cluster

from scalerl_operator import main, names
from scalerl_operator.kube import connection
from scalerl_operator.kube.types import Key, Object
from scalerl_operator.manifests.scope import Images
from scalerl_operator.settings import Settings

LONG_LEASE_SECONDS = 90
"""A machine that stands still for a while does not end an operator's lead."""
_ENDING = (SSLProtocolState.FLUSHING, SSLProtocolState.SHUTDOWN)


def config_map(namespace: str, name: str, run: str | None = "r", **data: str) -> Object:
    """A ConfigMap with the label of ``run``, or without it (None)."""
    metadata: Object = {"name": name, "namespace": namespace}
    if run is not None:
        metadata["labels"] = {names.RUN: names.label_value(run)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def a_run(namespace: str, name: str) -> Object:
    """The tiny example."""
    run: Object = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
    return {**run, "metadata": {"name": name, "namespace": namespace}}


async def until(condition: Callable[[], object], limit: float = 120.0) -> float:
    """Wait for a condition; returns the seconds. Raises ``AssertionError`` after ``limit`` seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit, f"not within {limit} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


# In this process


def settings(served: Cluster, namespace: str, identity: str = "test") -> Settings:
    return Settings(
        images=Images("t", "g", "c"),
        namespaces=(namespace,),
        host="127.0.0.1",
        port=0,
        operator_namespace=namespace,
        identity=identity,
        kubeconfig=str(served.kubeconfig),
        resync_seconds=3600.0,
    )


@contextlib.asynccontextmanager
async def running(operator: main.Operator) -> AsyncIterator[main.Operator]:
    task = asyncio.create_task(operator.run())
    try:
        yield operator
    finally:
        operator.stop()
        await asyncio.wait_for(task, 120)
        # kopf does not wait until the API server has acknowledged the end of its TLS connections.
        await until(lambda: not _connections_that_end())


def _connections_that_end() -> list[object]:
    """This event loop's TLS connections that are closed and still wait for the other side."""
    transports = list(asyncio.get_running_loop()._transports.values())  # type: ignore[attr-defined]
    found = [t for t in transports if t._sock is not None]
    return [t for t in found if t.is_closing() or getattr(t.get_protocol(), "_state", None) in _ENDING]


def noting(reconciled: list[Key]) -> main.MakeReconcile:
    """A stub reconcile that records the keys it is called with."""

    @contextlib.asynccontextmanager
    async def make(parts: main.Parts) -> AsyncIterator[main.Reconcile]:
        async def reconcile(key: Key) -> float | None:
            reconciled.append(key)
            return None

        yield reconcile

    return make


async def an_operator(
    served: Cluster,
    namespace: str,
    reconciled: list[Key],
    identity: str = "test",
    *,
    lease_seconds: int = LONG_LEASE_SECONDS,
    **timings: float,
) -> main.Operator:
    """lease_seconds: for how long it leads without a renewal."""
    chosen = settings(served, namespace, identity)
    made = main.Operator(chosen, await connection.load(chosen.kubeconfig), noting(reconciled), **timings)
    made.leader.duration_seconds = lease_seconds
    return made


async def asked(operator: main.Operator, path: str) -> tuple[int, str]:
    """Status code and body of the operator's response at ``path``."""
    assert operator.address is not None
    return await _answer(*operator.address, path)


# As separate processes


class Replica:
    """A process of ``python -m scalerl_operator.main``."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, identity: str) -> None:
        self.process, self.port, self.identity = process, port, identity
        self.said = "nothing yet"

    async def holder(self) -> str | None:
        """The leader's identity according to this replica; None while it is not ready or does not know the leader."""
        assert self.process.returncode is None, f"{self.identity} has ended with {self.process.returncode}"
        try:
            code, text = await _answer("127.0.0.1", self.port, "/readyz")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.said = f"{type(error).__name__}: {error}"
            return None
        self.said = f"{code} {text.strip()}"
        if (code, text) == (200, "leads\n"):
            return self.identity
        return text.removesuffix(" leads\n") if code == 200 and text.endswith(" leads\n") else None


async def leader(among: list[Replica], seconds: float = 120.0) -> Replica:
    """Wait until a replica reports that it is the leader, and return that replica."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for each in among:
            if await each.holder() == each.identity:
                return each
        await asyncio.sleep(0.1)
    raise AssertionError(f"no replica leads: {[(each.identity, each.said) for each in among]}")


async def follow(among: list[Replica], first: Replica, seconds: float = 120.0) -> None:
    """Wait until all replicas report ``first`` as the leader."""
    deadline = time.monotonic() + seconds
    for each in among:
        while await each.holder() != first.identity:
            late = f"{first.identity} leads, and {each.identity} says: {each.said}"
            assert time.monotonic() < deadline, late
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def replica(
    served: Cluster, namespace: str, identity: str, *, log: Path | None = None, **more: str
) -> AsyncIterator[Replica]:
    """Start a replica, and kill it at the end of the block if it still runs.

    log: file for its standard error.
    more: additional environment variables.
    """
    port = free_port()
    environ = {
        **os.environ,
        "KUBECONFIG": str(served.kubeconfig),
        "POD_NAME": identity,
        "POD_NAMESPACE": namespace,
        "SCALERL_WATCH_NAMESPACES": namespace,
        "SCALERL_LISTEN": f"127.0.0.1:{port}",
        "SCALERL_TRAINER_IMAGE": "t",
        "SCALERL_GENERATOR_IMAGE": "g",
        "SCALERL_COORDINATOR_IMAGE": "c",
        **more,
    }
    with contextlib.ExitStack() as until_begun:
        words = None if log is None else until_begun.enter_context(log.open("wb"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scalerl_operator.main"), env=environ, stderr=words
        )
    try:
        yield Replica(process, port, identity)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _answer(host: str, port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.get(f"http://{host}:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()
