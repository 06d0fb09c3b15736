"""Samples the completions of one group, each by a request of its own, over requests that fail.

A completion arrives in parts, and what has arrived stays (:class:`~.partial_completion.PartialCompletion`). After an
error of the server or a broken connection, only what is missing is requested: the prompt and the tokens so far are the
next request's prompt. The log-probability of a token is conditional on everything before it either way, so nothing
changes but the cached KV, which is computed again.

Completions of at most :data:`UNSTREAMED_TOKENS` have one request a group, without parts: a request costs the server as
much as the tokens of such a completion (``benchmarks/streams.py``), and there is little to keep.

The requests of a group share their prompt's cached KV (equal salts): vLLM registers a prompt's blocks as it schedules
the first request, before they are computed, so requests of the same scheduling step find them already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from scalerl_api.wire import Lease
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.partial_completion import PartialCompletion
from scalerl_generator.registration import ServerMonitor
from scalerl_generator.server_state import NO_WEIGHTS, ServerState
from scalerl_generator.vllm_client import UNSTREAMED_TOKENS, VllmClient
from scalerl_generator.vllm_replies import Finish, GenerationFailed, Part, ServerRefused, VllmError

logger = logging.getLogger("scalerl.actor.streams")

_ATTEMPTS = 3
"""A request that failed this often in a row, without a new token, fails its group."""
_LEASE_MARGIN_SECONDS = 60.0
"""Margin over the lease's deadline, which ends the request: with equal timeouts, either could hide the other."""


class ServerLost(Exception):
    """The server failed with this group in flight, or holds weights that were not published to it."""


class CompletionStreams:
    """The completions of one lease, as far as they are sampled, and the requests for the rest.

    Args:
        prompt: its token ids.
        stop_token_ids: any of them ends a completion.
        max_sequences: the server's maximum of completions in one request.
        on_tokens: called with the number of new tokens, unless completions are short.
        completions: as far as an earlier server sampled them.
    """

    def __init__(
        self,
        server: VllmClient,
        monitor: ServerMonitor,
        state: ServerState,
        metrics: ActorMetrics,
        lease: Lease,
        prompt: Sequence[int],
        *,
        stop_token_ids: Sequence[int],
        max_sequences: int,
        on_tokens: Callable[[int], None],
        completions: list[PartialCompletion] | None = None,
    ) -> None:
        self._server, self._monitor, self._state, self._metrics = server, monitor, state, metrics
        self.lease = lease
        self._prompt = list(prompt)
        self._stop_token_ids = stop_token_ids
        # vLLM accepts greedy requests only one by one.
        self._per_request = max_sequences if lease.temperature > 0 else 1
        self._on_tokens = on_tokens
        self.completions = completions or [PartialCompletion() for _ in range(lease.completions)]
        self._warned = False

    def batches(self) -> list[list[PartialCompletion]]:
        """The completions, in batches that :meth:`extend` to the lease's ``max_tokens`` samples well."""
        short = self.lease.max_tokens <= UNSTREAMED_TOKENS and not any(c.tokens for c in self.completions)
        size = self._per_request if short else 1
        return [self.completions[at : at + size] for at in range(0, len(self.completions), size)]

    async def extend(self, batch: Sequence[PartialCompletion], limit: int) -> None:
        """Sample until each completion of ``batch`` ends or has ``limit`` tokens.

        A batch of several is one request, which needs completions without a token.

        Raises:
            ServerLost: this server can no longer serve the lease. What it sampled stays in the completions.
            ServerRefused, BadReply, GenerationFailed: the server is healthy, and returned nothing to train on.
        """
        failed = 0
        while any(c.finish_reason is None and c.tokens < limit for c in batch):
            await self._state.serving()
            before = batch[0].tokens
            try:
                await self._request(batch, limit)
            except VllmError as error:
                if not await self._monitor.check_same_server():
                    raise ServerLost(str(error)) from error
                failed = 0 if batch[0].tokens > before else failed + 1
                refused = isinstance(error, ServerRefused) and error.status < 500
                if refused or failed == _ATTEMPTS:
                    raise
                self._warn(error)
                self._metrics.resubmitted.inc()

    async def _request(self, batch: Sequence[PartialCompletion], limit: int) -> None:
        first, since = batch[0], batch[0].tokens
        oldest = self._state.version
        prompt = self._prompt + first.token_ids.tolist()
        ask: dict[str, Any] = {
            "max_tokens": limit - since,
            "temperature": self.lease.temperature,
            "stop_token_ids": self._stop_token_ids,
            "cache_salt": self._state.cache_salt,
            "timeout_seconds": self.lease.remaining_seconds + _LEASE_MARGIN_SECONDS,
        }

        def on_part(part: Part) -> None:
            # Sampled after the part before it was sent, by the weights of then or by later ones.
            nonlocal oldest
            first.append(part, oldest)
            if self._state.version != NO_WEIGHTS:
                oldest = self._state.version
            self._on_tokens(len(part.token_ids))

        if limit - since > UNSTREAMED_TOKENS:
            finishes = [await self._server.stream(prompt, on_part=on_part, **ask)]
        else:
            answers = await self._server.generate(prompt, n=len(batch), **ask)
            for completion, answer in zip(batch, answers, strict=True):
                completion.append(answer, oldest)
            finishes = [Finish(answer.finish_reason, answer.weight_versions) for answer in answers]
        try:
            self._check_held(finishes)
            for completion, finish in zip(batch, finishes, strict=True):
                completion.settle(since, finish.weight_versions)
        except (ServerLost, GenerationFailed):
            for completion in batch:
                completion.truncate(since)
            raise
        for completion, finish in zip(batch, finishes, strict=True):
            # Cut at a strategy's own limit, it goes on; cut before, the model's context is full.
            if finish.reason == "stop" or completion.tokens < limit or limit == self.lease.max_tokens:
                completion.finish_reason = finish.reason

    def _check_held(self, finishes: Sequence[Finish]) -> None:
        sampled = {span.version for finish in finishes for span in finish.weight_versions}
        if foreign := sorted(version for version in sampled if not self._state.has_held(version)):
            reason = (
                f"it sampled with weight versions {foreign}, which were not published to it since its start"
            )
            self._monitor.server_lost(reason)
            raise ServerLost(reason)

    def _warn(self, error: VllmError) -> None:
        if not self._warned:  # once a group: a broken server fails all its requests
            logger.warning("lease %s: requesting again what is missing: %s", self.lease.lease_id, error)
            self._warned = True
