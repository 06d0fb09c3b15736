"""HTTP probes, as a kubelet makes them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable

from scalerl_lifecycle.restarts import Cause
from scalerl_lifecycle.workloads import Container, Probe
from scalerl_local.ports import HOST
from scalerl_processes.waiting import cancel


async def succeeds(probe: Probe, port: int) -> bool:
    """One ``GET``: True on a 2xx within the probe's timeout."""
    import aiohttp  # takes half a second, by which the first child would start later

    timeout = aiohttp.ClientTimeout(total=probe.timeout_seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.get(f"http://{HOST}:{port}{probe.path}", allow_redirects=False) as response,
        ):
            return 200 <= response.status < 300
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


async def watch(container: Container, ports: dict[str, int], on_ready: Callable[[], None]) -> Cause:
    """Probes until the startup or the liveness probe has failed, and returns which; never returns without these probes.

    Args:
        on_ready: called once, when the container is ready.
    """
    startup, liveness = container.startup, container.liveness
    if startup is not None and not await _answers(startup, ports, range(startup.failure_threshold)):
        return Cause.STARTUP_PROBE
    readiness = asyncio.create_task(_until_ready(container.readiness, ports, on_ready))
    try:
        if liveness is None:
            await asyncio.get_running_loop().create_future()  # cancelled when the process ends
        else:
            await _until_failed(liveness, ports)
        return Cause.LIVENESS_PROBE
    finally:
        await cancel(readiness)


async def _answers(probe: Probe, ports: dict[str, int], attempts: Iterable[int]) -> bool:
    for _ in attempts:
        if await succeeds(probe, ports[probe.port]):
            return True
        await asyncio.sleep(probe.period_seconds)
    return False


async def _until_failed(probe: Probe, ports: dict[str, int]) -> None:
    failures = 0
    while failures < probe.failure_threshold:
        await asyncio.sleep(probe.period_seconds)
        failures = 0 if await succeeds(probe, ports[probe.port]) else failures + 1


async def _until_ready(probe: Probe | None, ports: dict[str, int], on_ready: Callable[[], None]) -> None:
    if probe is not None:
        await _answers(probe, ports, itertools.count())
    on_ready()
