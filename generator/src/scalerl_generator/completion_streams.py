"""Samples the completions of one group, over requests that fail.

Every completion is a request of its own, streamed in parts, and what has arrived stays
(:class:`~.partial_completion.PartialCompletion`). After an error of the server or a broken connection, only what is
missing is requested: the prompt and the tokens so far are the next request's prompt. The log-probability of a token is
conditional on everything before it either way, so nothing changes but the cached KV, which is computed again.

=====================  ==========================================================================================
longest completion     first request
=====================  ==========================================================================================
64 tokens              one a group, whole: each part costs the server a little (``vllm_client.UNSTREAMED_TOKENS``)
1024 tokens            one a group, in parts; a request costs the server as much as some dozens of tokens do, with
                       a small model (``benchmarks/streams.py``)
more                   one a completion, in parts
=====================  ==========================================================================================

The requests of a group share their prompt's cached KV (equal salts): vLLM registers a prompt's blocks as it schedules
the first request, before they are computed, so requests of the same scheduling step find them already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from scalerl_api.wire import Lease, Split
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.partial_completion import PartialCompletion
from scalerl_generator.prompt_codec import EncodedPrompt
from scalerl_generator.registration import ServerMonitor
from scalerl_generator.server_state import ServerState
from scalerl_generator.vllm_client import UNSTREAMED_TOKENS, VllmClient, gather_all
from scalerl_generator.vllm_replies import GenerationFailed, Part, Sampled, ServerRefused, VllmError

logger = logging.getLogger("scalerl.actor.streams")

_ATTEMPTS = 3
"""A request that failed this often in a row, without a new token, fails its group."""
TOGETHER_TOKENS = 1024
"""Longer completions have a request each, and outlive the actor (:mod:`.partial_reports`)."""
_LEASE_MARGIN_SECONDS = 60.0
"""Margin over the lease's deadline, which ends the request: with equal timeouts, either could hide the other."""


class ServerLost(Exception):
    """The server failed with this group in flight, or holds weights that were not published to it."""


class CompletionStreams:
    """The completions of one lease, as far as they are sampled, and the requests for the rest.

    Args:
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
        # vLLM accepts greedy requests only one by one.
        self._per_request = max_sequences if lease.temperature > 0 else 1
        self._on_tokens = on_tokens
        self.completions = completions or [PartialCompletion() for _ in range(lease.completions)]
        self._warned = False

    @property
    def tokens(self) -> int:
        """Number of tokens so far, of all completions."""
        return sum(completion.tokens for completion in self.completions)

    def batches(self) -> list[list[PartialCompletion]]:
        """The completions, by first requests for :meth:`extend` to the lease's ``max_tokens`` (see the module's table)."""
        size = self._per_request if self.lease.max_tokens <= TOGETHER_TOKENS else 1
        return [self.completions[at : at + size] for at in range(0, len(self.completions), size)]

    async def extend(self, batch: Sequence[PartialCompletion], limit: int) -> None:
        """Sample until each completion of ``batch`` ends or has ``limit`` tokens.

        A batch is one request while none of its completions has a token; then each is its own.

        Raises:
            ServerLost: this server can no longer serve the lease. What arrived from it stays in the completions; where it
                held unpublished weights (:attr:`ServerState.unpublished_start`), that is of no use.
            ServerRefused, BadReply, GenerationFailed: the server is healthy, and returned nothing to train on.
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
        """One request for completions that are equal so far.

        Until the server names the versions of its answer, a token has the version at the request: when it was sampled within
        that time is unknown here, as it may have waited on its way through an update. An evaluation is of one version, so
        its tokens of after the start of an update are added only with the whole answer.
        """
        since, version = batch[0].tokens, self._state.version
        measures = self.lease.split is Split.HELD_OUT
        unsure: list[list[Part]] = [[] for _ in batch]
        prompt = self.prompt.token_ids + batch[0].token_ids.tolist()
        ask: dict[str, Any] = {
            "n": len(batch),
            "max_tokens": limit - since,
            "temperature": self.lease.temperature,
            "stop_token_ids": self._stop_token_ids,
            "cache_salt": self._state.cache_salt,
            # Points of the curve depend on the weights alone, so evaluations are not drafted.
            "prompt_key": self.prompt.key if self.lease.split is Split.TRAIN else None,
            "timeout_seconds": self.lease.remaining_seconds + _LEASE_MARGIN_SECONDS,
        }

        def on_part(index: int, part: Part) -> None:
            changed = self._state.updating or self._state.version != version
            if measures and changed and not isinstance(part, Sampled):
                unsure[index].append(part)
            else:
                for earlier in unsure[index]:
                    batch[index].append(earlier, version)
                unsure[index].clear()
                self._add(batch[index], part, version, since, limit)
            self._on_tokens(len(part.token_ids))

        if limit - since > UNSTREAMED_TOKENS:
            await self._server.stream(prompt, on_part=on_part, **ask)
        else:
            for index, sampled in enumerate(await self._server.generate(prompt, **ask)):
                self._add(batch[index], sampled, version, since, limit)

    def _add(self, completion: PartialCompletion, part: Part, version: int, since: int, limit: int) -> None:
        """Add tokens to a completion; with the last part, check their versions and end it if it has ended."""
        completion.append(part, version)
        if not isinstance(part, Sampled):
            return
        self._check_held(part)
        try:
            completion.settle(since, part.weight_versions)
        except GenerationFailed:
            completion.truncate(since)
            raise
        # Cut at a strategy's own limit, it continues; cut before, the model's context is full.
        if part.finish_reason == "stop" or completion.tokens < limit or limit == self.lease.max_tokens:
            completion.finish_reason = part.finish_reason

    def _check_held(self, answer: Sampled) -> None:
        sampled = {span.version for span in answer.weight_versions}
        if foreign := sorted(version for version in sampled if not self._state.has_held(version)):
            reason = (
                f"it sampled with weight versions {foreign}, which were not published to it since its start"
            )
            self._monitor.server_lost(reason, unpublished=True)
            raise ServerLost(reason)

    def _warn(self, error: VllmError) -> None:
        if not self._warned:  # once a group: a broken server fails all its requests
            logger.warning("lease %s: requesting again what is missing: %s", self.lease.lease_id, error)
            self._warned = True
