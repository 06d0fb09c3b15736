"""How many sequences the server samples at once: as many as its KV cache holds.

A server whose cache is full preempts sequences and computes their tokens again, which costs more the longer they are. What a sequence
needs depends on its length, which is not known in advance and changes as the policy learns. So the actor measures how full the
cache is every two seconds, and changes the limit by::

    more run than the actor sends for it       no change: an earlier cut has not taken effect yet
    preemptions since the last measurement     a quarter fewer, or than run if these are fewer
    more than .8 in use                        an eighth fewer
    less than .6 in use, and the limit binds   an eighth more, at most maxConcurrentSequences
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
_LOW, _HIGH = 0.6, 0.8


class Concurrency:
    """The limit on sequences at the server.

    Args:
        most: ``generator.maxConcurrentSequences``, with which it begins.
        least: a group, so that generation never stops.
    """

    def __init__(self, most: int, least: int) -> None:
        self._most, self._least = most, min(least, most)
        self.limit = most
        self._preemptions = 0

    def follow(self, pressure: CachePressure) -> None:
        """Adapt the limit.

        >>> concurrency = Concurrency(most=256, least=16)
        >>> concurrency.follow(CachePressure(used=0.9, preemptions=3, running=256)); concurrency.limit
        192
        >>> concurrency.follow(CachePressure(used=0.9, preemptions=4, running=240)); concurrency.limit
        192
        >>> concurrency.follow(CachePressure(used=0.85, preemptions=4, running=190)); concurrency.limit
        168
        >>> concurrency.follow(CachePressure(used=0.7, preemptions=4, running=168)); concurrency.limit
        168
        >>> concurrency.follow(CachePressure(used=0.5, preemptions=4, running=160)); concurrency.limit
        189
        """
        preempted = pressure.preemptions > self._preemptions  # fewer than before: the server is a new one
        self._preemptions = pressure.preemptions
        limit = self.limit
        if pressure.running > limit + max(limit // 8, self._least):  # the actor's surplus
            return
        if preempted:
            limit = 3 * min(limit, pressure.running) // 4
        elif pressure.used > _HIGH:
            limit -= limit // 8
        elif pressure.used < _LOW and pressure.running >= 7 * limit // 8:
            limit += max(limit // 8, 1)
        self.limit = min(max(limit, self._least), self._most)

    async def run(self, server: VllmClient, state: ServerState, metrics: ActorMetrics) -> None:
        """Follow a server's cache, until cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            if state.is_serving:
                try:
                    self.follow(await server.cache_pressure())
                except VllmError as error:
                    logger.debug("the limit stays: %s", error)
                metrics.concurrency.set(self.limit)
