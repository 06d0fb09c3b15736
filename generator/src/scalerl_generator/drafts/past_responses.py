"""Sends past responses to a prompt from the coordinator to the server, before the prompt is sampled again.

The server keeps its own responses until it restarts or other text overwrites them. It lacks the responses of other
generators, and those from before a restart. Past responses are optional for drafts: failures are only counted, and
generation starts without them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from scalerl_api.wire import Lease, PastResponse, Split, prompt_digest
from scalerl_generator.coordinator_client import CoordinatorClient, CoordinatorError
from scalerl_generator.drafts.draft_protocol import DraftReport, DraftTally, PastResponses
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.prompt_codec import EncodedPrompt
from scalerl_generator.server_state import ServerState
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.vllm_replies import VllmError

logger = logging.getLogger("scalerl.actor.drafts")

_BYTES_A_CALL = 1 << 18
"""Bound on the responses of one call: the server needs a few seconds for a million tokens, and samples nothing meanwhile."""
_OVERHEAD_TOKENS = 76
"""Upper bound on the memory of a response beyond its tokens: a page, and the end of its prompt."""


class PastResponseFeed:
    """Tracks which responses the server has, and sends it the others.

    Args:
        memory_tokens: number of tokens that the server keeps.
        wait_seconds: maximum time that generation waits for past responses.
        report_seconds: between two reports of drafts.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        server: VllmClient,
        state: ServerState,
        metrics: ActorMetrics,
        memory_tokens: int,
        *,
        wait_seconds: float = 2.0,
        report_seconds: float = 5.0,
    ) -> None:
        self._wait_seconds, self._report_seconds = wait_seconds, report_seconds
        self._coordinator, self._server, self._state, self._metrics = coordinator, server, state, metrics
        # Pages of running prompts are kept, at most half of the default memory, so the others are overwritten earlier.
        self._memory_tokens = memory_tokens // 2
        self._server_start = 0
        self._known: OrderedDict[bytes, int] = OrderedDict()
        """Responses that the server has, by :func:`_identity`, with the value of ``_tokens`` after each."""
        self._tokens = 0
        """Tokens of all responses so far, overhead included."""
        self._reported = DraftReport()
        self._warned = False

    async def prepare(self, lease: Lease, prompt: EncodedPrompt) -> None:
        """Send past responses to a lease's prompt to the server. Does not raise, and takes at most ``wait_seconds``."""
        if lease.split is not Split.TRAIN:
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._pass_on(lease, prompt)
        except (TimeoutError, CoordinatorError, VllmError) as error:
            self._metrics.past_responses_failed.inc()
            if not self._warned:
                self._warned = True
                logger.warning(
                    "cannot send past responses to the server; later failures are only counted: %s",
                    error or f"no answer in {self._wait_seconds:g} s",
                )

    async def _pass_on(self, lease: Lease, prompt: EncodedPrompt) -> None:
        past = await self._coordinator.responses(lease.prompt, prompt_digest(prompt.wire))
        self._follow_restart()
        missing = [one for one in past if _identity(prompt, one.token_ids) not in self._known]
        for batch in _batches(missing):
            await self._server.remember(
                PastResponses(prompt.key, prompt.wire, [one.token_ids for one in batch])
            )
            for one in batch:
                self._add(prompt, one.token_ids)
            self._metrics.past_responses.inc(len(batch))

    async def sampled(
        self, prompt: EncodedPrompt, completions: Iterable[PartialCompletion]
    ) -> DraftTally | None:
        """Record that the server sampled these completions, and so has them.

        Returns:
            Their drafted and accepted tokens; None if the server does not report them.
        """
        self._follow_restart()
        for completion in completions:
            self._add(prompt, completion.token_ids.astype("<i4").tobytes())
        try:
            async with asyncio.timeout(self._wait_seconds):
                return await self._server.take_draft_tally(prompt.key)
        except (TimeoutError, VllmError):
            return None

    async def report(self) -> None:
        """Update the metrics of drafts until cancelled."""
        while True:
            await asyncio.sleep(self._report_seconds)
            if self._state.up:
                try:
                    report = await self._server.draft_report()
                except VllmError as error:
                    logger.debug("no report of drafts: %s", error)
                else:
                    self._record(report)

    def _record(self, report: DraftReport) -> None:
        self._follow_restart()
        before, self._reported = self._reported, report
        metrics = self._metrics
        metrics.drafted_tokens.inc(max(report.drafted_tokens - before.drafted_tokens, 0))
        metrics.accepted_tokens.inc(max(report.accepted_tokens - before.accepted_tokens, 0))
        metrics.draft_seconds.inc(max(report.draft_seconds - before.draft_seconds, 0.0))
        metrics.draft_threshold.set(report.threshold)
        metrics.draft_gain.set(report.gain)
        metrics.draft_paused_steps.inc(max(report.paused_steps - before.paused_steps, 0))
        for running, tokens, earlier in (
            ("false", report.evicted_tokens, before.evicted_tokens),
            ("true", report.evicted_running_tokens, before.evicted_running_tokens),
        ):
            metrics.draft_evicted_tokens.labels(running).inc(max(tokens - earlier, 0))

    def _follow_restart(self) -> None:
        if self._server_start != self._state.start_count:
            self._server_start = self._state.start_count
            self._known.clear()
            self._reported = DraftReport()

    def _add(self, prompt: EncodedPrompt, token_ids: bytes) -> None:
        self._tokens += len(token_ids) // 4 + _OVERHEAD_TOKENS
        identity = _identity(prompt, token_ids)
        self._known[identity] = self._tokens
        self._known.move_to_end(identity)
        while next(iter(self._known.values())) <= self._tokens - self._memory_tokens:
            self._known.popitem(last=False)


def _identity(prompt: EncodedPrompt, token_ids: bytes) -> bytes:
    return prompt_digest(prompt.wire + token_ids)


def _batches(responses: list[PastResponse]) -> Iterable[list[PastResponse]]:
    """Split responses into batches of about ``_BYTES_A_CALL``, so that the server samples in between."""
    ends = np.cumsum([len(one.token_ids) for one in responses]) // _BYTES_A_CALL
    for number in np.unique(ends):
        yield [one for one, end in zip(responses, ends, strict=True) if end == number]
