"""HTTP probes, as a kubelet makes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from scalerl_operator.policy.restarts import Cause
from scalerl_operator.workloads import Container, Probe

_READY_PERIOD_SECONDS = 10.0
"""Once ready, readiness only informs the view; asking every second would cost the machine for nothing."""


async def succeeds(probe: Probe, host: str, port: int) -> bool:
    """One ``GET``: True on a 2xx within the probe's timeout."""
    try:
        async with asyncio.timeout(probe.timeout_seconds):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(
                    f"GET {probe.path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
                )
                await writer.drain()
                status = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ValueError):
        return False
    words = status.split()
    return len(words) >= 2 and words[0].startswith(b"HTTP/") and words[1].startswith(b"2")


async def watch(
    container: Container, host: str, ports: dict[str, int], on_ready: Callable[[bool], None]
) -> Cause:
    """Probe until one threshold is passed; returns which. Never returns for a container without probes.

    ``on_ready`` is told each change of readiness.
    """
    if container.startup is not None and not await _starts(container.startup, host, ports):
        return Cause.STARTUP_PROBE
    readiness = asyncio.create_task(_readiness(container, host, ports, on_ready))
    try:
        await _lives(container.liveness, host, ports)
        return Cause.LIVENESS_PROBE
    finally:
        readiness.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await readiness


async def _starts(probe: Probe, host: str, ports: dict[str, int]) -> bool:
    for _ in range(probe.failure_threshold):
        if await succeeds(probe, host, ports[probe.port]):
            return True
        await asyncio.sleep(probe.period_seconds)
    return False


async def _lives(probe: Probe | None, host: str, ports: dict[str, int]) -> None:
    if probe is None:
        await asyncio.get_running_loop().create_future()  # cancelled with the process
        return
    failures = 0
    while failures < probe.failure_threshold:
        await asyncio.sleep(probe.period_seconds)
        failures = 0 if await succeeds(probe, host, ports[probe.port]) else failures + 1


async def _readiness(
    container: Container, host: str, ports: dict[str, int], on_ready: Callable[[bool], None]
) -> None:
    probe = container.readiness
    if probe is None:
        on_ready(True)
        return
    ready = False
    while True:
        now = await succeeds(probe, host, ports[probe.port])
        if now != ready:
            ready = now
            on_ready(ready)
        await asyncio.sleep(
            max(probe.period_seconds, _READY_PERIOD_SECONDS) if ready else probe.period_seconds
        )
