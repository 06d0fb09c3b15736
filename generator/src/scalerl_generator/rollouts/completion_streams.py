"""Samples the completions of one group, and resumes them when requests fail.

Tokens are streamed in parts, and a completion keeps those that have arrived
(:class:`~.partial_completion.PartialCompletion`). After an error of the server or a broken connection, only the missing
tokens are requested: the prompt of the next request is the original prompt plus the tokens so far. The log-probability of a
token is conditional on all tokens before it in both cases; only the KV cache is computed again.

=====================  ==========================================================================================
maximum completion     first request
=====================  ==========================================================================================
64 tokens              one per group, not streamed: each part takes time of the server
                       (``vllm_client.UNSTREAMED_TOKENS``)
1024 tokens            one per group, streamed: with a small model, a request costs the server as much as a few
                       dozen tokens (``benchmarks/streams.py``)
more                   one per completion, streamed
=====================  ==========================================================================================

The requests of a group share the cached KV of their prompt (equal salts). vLLM registers a prompt's blocks when it schedules
the first request, before they are computed, so that requests of the same scheduling step find them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from scalerl_api.wire import Lease, Split
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import ServerMonitor
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.prompt_codec import EncodedPrompt
from scalerl_generator.server_state import ServerState
from scalerl_generator.vllm_client import UNSTREAMED_TOKENS, VllmClient, gather_all
from scalerl_generator.vllm_replies import (
    GenerationFailed,
    Part,
    RoutedRows,
    Sampled,
    ServerRefused,
    VllmError,
)

logger = logging.getLogger("scalerl.actor.streams")

_ATTEMPTS = 3
"""A group fails when one of its requests failed this often consecutively without a new token."""
TOGETHER_TOKENS = 1024
"""Longer completions have separate requests, and are reported to the coordinator (:mod:`.partial_reports`)."""
_LEASE_MARGIN_SECONDS = 60.0
"""A request's timeout exceeds the lease's deadline by this margin, so that it is the deadline that ends the request."""


class ServerLost(Exception):
    """The server failed while this group was in flight, or has weights that were not published to it."""


class CompletionStreams:
    """The completions of one lease so far, and the requests for their missing tokens.

    Args:
        stop_token_ids: each of them ends a completion.
        max_sequences: the server's maximum number of completions in one request.
        on_tokens: called with the number of new tokens.
        completions: unfinished completions to continue, from an earlier server or another actor.
    """

    def __init__(
        self,
        server: VllmClient,
        monitor: ServerMonitor,
        state: ServerState,
        metrics: ActorMetrics,
        lease: Lease,
        prompt: EncodedPrompt,
        *,
        stop_token_ids: Sequence[int],
        max_sequences: int,
        on_tokens: Callable[[int], None],
        completions: list[PartialCompletion] | None = None,
    ) -> None:
        self._server, self._monitor, self._state, self._metrics = server, monitor, state, metrics
        self.lease = lease
        self.prompt = prompt
        self._stop_token_ids = stop_token_ids
        # vLLM accepts only one completion in a greedy request.
        self._per_request = max_sequences if lease.temperature > 0 else 1
        self._on_tokens = on_tokens
        self.completions = completions or [PartialCompletion() for _ in range(lease.completions)]
        self._warned = False

    @property
    def tokens(self) -> int:
        """Number of tokens so far, of all completions."""
        return sum(completion.tokens for completion in self.completions)

    def batches(self) -> list[list[PartialCompletion]]:
        """The completions in batches for :meth:`extend`, one for each first request (see the module's table)."""
        size = self._per_request if self.lease.max_tokens <= TOGETHER_TOKENS else 1
        return [self.completions[i : i + size] for i in range(0, len(self.completions), size)]

    async def extend(self, batch: Sequence[PartialCompletion], limit: int) -> None:
        """Sample until each completion of ``batch`` ends or has ``limit`` tokens.

        A batch is one request as long as none of its completions has a token; after that each has a separate request.

        Raises:
            ServerLost: this server can no longer serve the lease. The completions keep the tokens that arrived; they are
                unusable if the server had unpublished weights (:attr:`ServerState.unpublished_start`).
            ServerRefused, BadReply, GenerationFailed: the server is healthy, but the request failed.
        """
        failed = 0
        while missing := [c for c in batch if c.finish_reason is None and c.tokens < limit]:
            if len(batch) > 1 and any(c.tokens for c in batch):
                await gather_all(self.extend([completion], limit) for completion in missing)
                return
            await self._state.serving()
            before, start = missing[0].tokens, self._state.start_count
            try:
                await self._request(missing, limit)
            except VllmError as error:
                if not await self._monitor.check_same_server(start):
                    raise ServerLost(str(error)) from error
                failed = 0 if missing[0].tokens > before else failed + 1
                refused = isinstance(error, ServerRefused) and error.status < 500
                if refused or failed == _ATTEMPTS:
                    raise
                self._warn(error)
                self._metrics.resubmitted.inc()

    async def _request(self, batch: Sequence[PartialCompletion], limit: int) -> None:
        """Make one request for completions that have the same tokens so far.

        Until the response is complete and names the versions of its tokens, each token gets the version at the time of the
        request: the actor cannot know whether an update took place before it was sampled. An evaluation is of one version, so
        its tokens that arrive after an update began are added only together with the complete response.
        """
        since, version = batch[0].tokens, self._state.version
        routed_from = self._unrouted_from(batch[0])
        is_evaluation = self.lease.split is Split.HELD_OUT
        deferred: list[list[Part]] = [[] for _ in batch]
        prompt = self.prompt.token_ids + batch[0].token_ids.tolist()
        arguments: dict[str, Any] = {
            "n": len(batch),
            "max_tokens": limit - since,
            "temperature": self.lease.temperature,
            "stop_token_ids": self._stop_token_ids,
            "cache_salt": self._state.cache_salt,
            # Evaluations are not drafted, so that points of the curve depend on the weights alone.
            "prompt_key": self.prompt.key if self.lease.split is Split.TRAIN else None,
            "timeout_seconds": self.lease.remaining_seconds + _LEASE_MARGIN_SECONDS,
        }
        if self._server.routed_experts and not is_evaluation:
            arguments["routed_from"] = len(self.prompt.token_ids) + routed_from

        def on_part(index: int, part: Part) -> None:
            weights_changed = self._state.updating or self._state.version != version
            if is_evaluation and weights_changed and not isinstance(part, Sampled):
                deferred[index].append(part)
            else:
                for earlier in deferred[index]:
                    batch[index].append(earlier, version)
                deferred[index].clear()
                self._add(batch[index], part, version, since, limit, routed_from)
            self._on_tokens(len(part.token_ids))

        if limit - since > UNSTREAMED_TOKENS:
            await self._server.stream(prompt, on_part=on_part, **arguments)
        else:
            for index, sampled in enumerate(await self._server.generate(prompt, **arguments)):
                self._add(batch[index], sampled, version, since, limit, routed_from)
                self._on_tokens(len(sampled.token_ids))

    def _add(
        self,
        completion: PartialCompletion,
        part: Part,
        version: int,
        since: int,
        limit: int,
        routed_from: int,
    ) -> None:
        """Add tokens to a completion. With the last part, check the versions of all, and set the finish reason if it ended."""
        completion.append(part, version)
        if not isinstance(part, Sampled):
            return
        self._check_held(part)
        try:
            completion.settle(since, part.weight_versions)
        except GenerationFailed:
            completion.truncate(since)
            raise
        self._add_routed(completion, part, routed_from)
        # A completion that reached a strategy's own limit continues. One that ended below it has filled the model's context.
        if part.finish_reason == "stop" or completion.tokens < limit or limit == self.lease.max_tokens:
            completion.finish_reason = part.finish_reason

    def _add_routed(self, completion: PartialCompletion, answer: Sampled, routed_from: int) -> None:
        """Keep the experts of an answer if they are those of its positions. Without them the trainer's routers choose, and it counts
        the tokens."""
        if not self._server.routed_experts or self.lease.split is not Split.TRAIN:
            return
        positions = completion.tokens - 1 - routed_from  # nothing is computed with the last token
        reported = 0 if answer.experts is None else len(answer.experts)
        if reported != positions:
            if not self._server.record_problem_logged:
                self._server.record_problem_logged = True
                logger.warning(
                    "lease %s: trainer.routerReplay: an answer of vLLM has the experts of %d tokens, not of %d: the trainer routes the "
                    "tokens of such answers itself and counts them as unreplayed_tokens; later ones are not logged",
                    self.lease.lease_id,
                    reported,
                    positions,
                )
            return
        if answer.experts is not None:
            completion.add_routed(RoutedRows(routed_from, answer.experts))

    def _unrouted_from(self, completion: PartialCompletion) -> int:
        """The first position, as :attr:`.RoutedRows.start` counts, that no request has computed: all of the prompt, or the last sampled
        token. Positions of a request that broke off have no record, as another version may compute them again."""
        return completion.sampled_end - 1 if completion.sampled_end else -len(self.prompt.token_ids)

    def _check_held(self, answer: Sampled) -> None:
        sampled = {span.version for span in answer.weight_versions}
        if foreign := sorted(version for version in sampled if not self._state.has_held(version)):
            reason = (
                f"it sampled with weight versions {foreign}, which were not published to it after its start"
            )
            self._monitor.server_lost(reason, unpublished=True)
            raise ServerLost(reason)

    def _warn(self, error: VllmError) -> None:
        if not self._warned:  # once per group, because a broken server fails all requests of a group
            logger.warning("lease %s: requesting the missing tokens again: %s", self.lease.lease_id, error)
            self._warned = True


Strategy = Callable[[CompletionStreams], Awaitable[None]]
"""Samples all completions of a lease."""


async def sample_plain(streams: CompletionStreams) -> None:
    """Sample independent completions, each until an end token or the lease's ``max_tokens``."""
    await gather_all(streams.extend(batch, streams.lease.max_tokens) for batch in streams.batches())
