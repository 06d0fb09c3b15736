"""How many sequences the server samples at once: as many as its KV cache holds.

A server whose cache is full preempts sequences and computes their tokens again; of completions of thousands of tokens it may compute
more again than it samples. How many fit depends on their lengths, which are not known in advance and change as the policy learns. So
the actor measures every two seconds which share of the cache a running sequence takes, and::

    limit = 0.9 / mean share of a sequence        at least a group, at most maxConcurrentSequences

The mean is a running one over the time in which as many sequences end as run, so that it is of young and old ones. It begins
with half of a sequence as long as the context. Every share is of what the cache really holds, shared prompts once.

That is a mean: for the moments in which more is needed, vLLM itself leaves a tenth of the cache free when it admits a
sequence (``--watermark``).
"""

from __future__ import annotations

import asyncio
import logging

from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.server_state import ServerState
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.vllm_replies import CachePressure, VllmError

logger = logging.getLogger("scalerl.actor.concurrency")

_SECONDS = 2.0
_FULL = 0.9


class Concurrency:
    """The limit on sequences at the server.

    Args:
        most: ``generator.maxConcurrentSequences``.
        least: a group, so that generation never stops.
        adaptive: begin with ``least`` and follow the cache; otherwise the limit is ``most``.
    """

    def __init__(self, most: int, least: int, *, adaptive: bool) -> None:
        self._most, self._least = most, min(least, most)
        self.limit = self._least if adaptive else most
        self._share: float | None = None
        self._ended = 0

    def follow(self, pressure: CachePressure) -> None:
        """Adapt the limit.

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
        # Where fewer run than may, as at the end of a batch, those left are the long ones, and say little of the next.
        binds = pressure.running >= 7 * self.limit // 8 or pressure.used > _FULL
        if pressure.running and binds:
            weight = min(ended / pressure.running, 1.0)
            self._share += weight * (pressure.used / pressure.running - self._share)
        self.limit = int(min(max(_FULL / max(self._share, 1e-9), self._least), self._most))

    async def run(self, server: VllmClient, state: ServerState, metrics: ActorMetrics) -> None:
        """Follow a server's cache, until cancelled."""
        problem = ""
        while True:
            if state.is_serving:
                try:
                    self.follow(await server.cache_pressure())
                except VllmError as error:
                    if str(error) != problem:
                        problem = str(error)
                        logger.warning("at most %d sequences are sampled at once: %s", self.limit, problem)
                metrics.concurrency.set(self.limit)
            await asyncio.sleep(_SECONDS)
