"""Limits the sequences at the server to as many as its KV cache holds.

A server whose cache is full preempts sequences and recomputes their tokens; with completions of thousands of tokens, it may
recompute more than it samples. How many sequences fit depends on their lengths, which are not known in advance and change as
the policy learns. Therefore the actor measures, every two seconds, the fraction of the cache that a running sequence uses::

    limit = 0.9 / mean fraction of a sequence        at least a group, at most maxConcurrentSequences

The mean is a running mean over the time in which as many sequences end as are running, so that it covers all stages of a
sequence. It starts with half of what a sequence of the full context length uses. Shared prompts are counted once, as vLLM's
metric counts blocks in use.

This is a mean: for moments of higher usage, vLLM leaves a tenth of the cache free when it admits a sequence
(``--watermark``).
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass

from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.server_state import ServerState
from scalerl_generator.vllm_client import CONTROL_SECONDS, VllmClient
from scalerl_generator.vllm_replies import BadReply, VllmError

logger = logging.getLogger("scalerl.actor.concurrency")

_SECONDS = 2.0
"""Interval of the measurements."""
_FULL = 0.9
"""Usage of the cache that the limit aims at."""


_METRIC = re.compile(
    r"^vllm:(kv_cache_usage_perc|request_success_total|num_requests_running)\{.*\} (\S+)$", re.MULTILINE
)
_LONGEST = re.compile(r'^vllm:cache_config_info\{.*kv_cache_max_concurrency="([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class CachePressure:
    """Utilisation of the server's KV cache.

    Attributes:
        used: fraction of the cache's blocks in use.
        running: sequences in the batch.
        ended: sequences finished since the server's start.
        longest: number of sequences of maximum length that the cache holds.
    """

    used: float
    running: int
    ended: int
    longest: float


async def cache_pressure(server: VllmClient) -> CachePressure:
    """How full the KV cache is. Needs a server with ``--stats``. Raises VllmError."""
    return read_cache_pressure(await server.call("GET", "/metrics", None, CONTROL_SECONDS))


def read_cache_pressure(content: bytes) -> CachePressure:
    """Utilisation of the KV cache, from vLLM's Prometheus metrics.

    Raises:
        BadReply
    """
    text = content.decode(errors="replace")
    try:
        found: dict[str, float] = {}
        for name, value in _METRIC.findall(text):  # request_success_total has one line per finish reason
            found[name] = found.get(name, 0.0) + float(value)
        return CachePressure(
            used=found["kv_cache_usage_perc"],
            running=int(found["num_requests_running"]),
            ended=int(found["request_success_total"]),
            longest=max(float(_LONGEST.findall(text)[0]), 1.0),
        )
    except (KeyError, IndexError, ValueError, OverflowError) as error:
        raise BadReply(f"vLLM's metrics lack or garble {error}: was it started with --stats?") from error


class Concurrency:
    """The limit on sequences at the server.

    Args:
        most: ``generator.maxConcurrentSequences``.
        least: the sequences of a group, so that generation never stops.
        adaptive: start with ``least`` and adapt to the cache; otherwise the limit is always ``most``.
    """

    def __init__(self, most: int, least: int, *, adaptive: bool) -> None:
        self._most, self._least = most, min(least, most)
        self.limit = self._least if adaptive else most
        self._share: float | None = None
        self._ended = 0

    def follow(self, pressure: CachePressure) -> None:
        """Adapt the limit to a measurement.

        >>> concurrency = Concurrency(most=256, least=16, adaptive=True)
        >>> concurrency.follow(CachePressure(used=0.0, running=0, ended=0, longest=16.0)); concurrency.limit
        28
        >>> concurrency.follow(CachePressure(used=0.3, running=30, ended=15, longest=16.0)); concurrency.limit
        43
        """
        if self._share is None:
            self._share = 0.5 / pressure.longest
        before, self._ended = self._ended, pressure.ended
        ended = pressure.ended - before if pressure.ended >= before else pressure.ended  # a new server
        # If far fewer sequences run than the limit allows, as at the end of a batch, the remaining ones are the long ones and
        # not representative.
        representative = pressure.running >= 7 * self.limit // 8 or pressure.used > _FULL
        if pressure.running and representative:
            weight = min(ended / pressure.running, 1.0)
            self._share += weight * (pressure.used / pressure.running - self._share)
        self.limit = int(min(max(_FULL / max(self._share, 1e-9), self._least), self._most))

    async def run(self, server: VllmClient, state: ServerState, metrics: ActorMetrics) -> None:
        """Measure the server's cache and adapt the limit, until cancelled."""
        problem = ""
        while True:
            if state.is_serving:
                try:
                    self.follow(await cache_pressure(server))
                except VllmError as error:
                    if str(error) != problem:
                        problem = str(error)
                        logger.warning(
                            "the limit on sequences stays at %d: cannot read the use of the KV cache: %s",
                            *(self.limit, problem),
                        )
                metrics.concurrency.set(self.limit)
            await asyncio.sleep(_SECONDS)
