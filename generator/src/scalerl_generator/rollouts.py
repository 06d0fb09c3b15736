"""Makes a graded group from a lease.

A *strategy* is the function that samples the completions of a prompt; today :func:`sample_plain` is the only one.
Encoding, waiting for weights, grading and packing do not depend on it. A strategy with forced interruption of long
thoughts would be a second one: two requests, the phrase's tokens between them, and a mask of the forced tokens.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from scalerl_api.wire import MASKED, Completion, Group, Lease, Split, VersionSpan
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.prompt_codec import EncodedPrompt, PromptCodec
from scalerl_generator.registration import ServerMonitor
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient, gather_all
from scalerl_generator.vllm_replies import GenerationFailed, Sampled, ServerRefused, VllmError
from scalerl_tasks.grading.grading_pool import GradingPool
from scalerl_tasks.prompts import Prompt, PromptSource

logger = logging.getLogger("scalerl.actor.rollouts")

Argument = TypeVar("Argument")
Result = TypeVar("Result")

_ATTEMPTS = 3
_LEASE_MARGIN_SECONDS = 60.0
"""Margin over the lease's deadline, which ends the request: with equal timeouts, either could hide the other."""

_VARYING = re.compile(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"")
_ERROR_KIND_CHARACTERS = 80
_MAX_ERROR_KINDS = 50
"""Bound on logged kinds of errors: their texts derive from model output, and must not fill the log."""


class ServerLost(Exception):
    """The server failed with this group in flight, or holds weights that were not published to it."""


class PromptMismatch(Exception):
    """The lease names a prompt that this actor's source does not have at that index."""


def version_spans(sampled: Sampled) -> list[VersionSpan]:
    """Which weights sampled which tokens, in the wire's form; masked tokens have spans of their own."""
    if not sampled.masked.any():
        return [VersionSpan(span.version, span.start) for span in sampled.weight_versions]
    spans = sampled.weight_versions
    versions = np.repeat([span.version for span in spans], [span.end - span.start for span in spans])
    versions[sampled.masked] = MASKED
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1)]
    return [VersionSpan(int(versions[start]), int(start)) for start in starts]


@dataclass(frozen=True)
class SampleRequest:
    """Input of a strategy: generate ``lease.completions`` completions of ``prompt``."""

    lease: Lease
    prompt: EncodedPrompt
    stop_token_ids: Sequence[int]
    cache_salt: str
    """:attr:`ServerState.cache_salt <scalerl_generator.server_state.ServerState.cache_salt>` as the request is sent."""
    max_sequences: int
    """The server's maximum of completions in one request."""
    on_tokens: Callable[[int], None]
    """Called with the number of new tokens, as far as the server reports them."""


Strategy = Callable[[VllmClient, SampleRequest], Awaitable[list[Sampled]]]


async def sample_plain(server: VllmClient, request: SampleRequest) -> list[Sampled]:
    """Independent completions, each until an end token or ``max_tokens``.

    No request has a seed: the result depends on the times of updates anyway, vLLM samples seeded sequences one after
    another, and its CPU engine crashes when it discards a seeded request's draw ("CPU Generator does not use offset", 0.32).
    """
    lease = request.lease
    most = (
        request.max_sequences if lease.temperature > 0 else 1
    )  # vLLM accepts greedy requests only one by one
    parts = [
        server.generate(
            request.prompt.token_ids,
            n=min(most, lease.completions - start),
            max_tokens=lease.max_tokens,
            temperature=lease.temperature,
            stop_token_ids=request.stop_token_ids,
            cache_salt=request.cache_salt,
            timeout_seconds=lease.remaining_seconds + _LEASE_MARGIN_SECONDS,
            on_tokens=request.on_tokens,
        )
        for start in range(0, lease.completions, most)
    ]
    return [completion for part in await gather_all(parts) for completion in part]


@dataclass(frozen=True)
class Generated:
    """A sampled group that is not graded yet."""

    lease: Lease
    prompt: Prompt
    encoded: EncodedPrompt
    completions: list[Sampled]
    seconds: float


class RolloutGenerator:
    """Makes groups from leases, with the run's prompts, server and verifier.

    Args:
        sources: the prompts of each split; leases index into them.
        thread: generates and tokenizes prompts and decodes completions, which can take seconds (a generated puzzle, a long
            context); with one thread, leases are served in order of arrival.
        max_sequences: maximum of completions in one request (the server's limit).
    """

    def __init__(
        self,
        server: VllmClient,
        monitor: ServerMonitor,
        state: ServerState,
        busy: BusyClock,
        codec: PromptCodec,
        grader: GradingPool,
        metrics: ActorMetrics,
        sources: Mapping[Split, PromptSource],
        thread: Executor,
        *,
        max_sequences: int,
        strategy: Strategy = sample_plain,
    ) -> None:
        self._server, self._monitor, self._state, self._busy = server, monitor, state, busy
        self._codec, self._grader, self._metrics = codec, grader, metrics
        self._sources = sources
        self._thread = thread
        self._logged_grading_errors: set[str] = set()
        self._max_sequences = max_sequences
        self._strategy = strategy

    async def generate(self, lease: Lease, on_tokens: Callable[[int], None]) -> Generated:
        """Sample the completions of a lease; waits while the server holds no weights or receives new ones.

        ``on_tokens`` is called as tokens are sampled, unless completions are short.

        Raises:
            ServerLost: this server can no longer serve the lease.
            ServerRefused, BadReply, GenerationFailed: the server is healthy, and returned nothing to train on.
            PromptTooLong: no server of this run can serve this prompt.
            PromptMismatch, SourceError: the run's configuration or data are wrong.
        """
        prompt, encoded = await self._in_thread(self._encoded, lease)
        for attempt in range(1, _ATTEMPTS + 1):
            await self._state.serving()
            salt = self._state.cache_salt
            stop = self._codec.stop_token_ids
            request = SampleRequest(lease, encoded, stop, salt, self._max_sequences, on_tokens)
            started = time.monotonic()
            self._busy.request_started()
            try:
                completions = await self._strategy(self._server, request)
            except VllmError as error:
                if not await self._monitor.check_alive():
                    raise ServerLost(str(error)) from error
                refused = isinstance(error, ServerRefused) and error.status < 500
                if refused or attempt == _ATTEMPTS:
                    raise
                logger.warning("attempt %d of lease %s: %s", attempt, lease.lease_id, error)
                self._metrics.resubmitted.inc()
                continue
            finally:
                self._busy.request_ended()
            self._check_versions(completions)
            seconds = time.monotonic() - started
            self._record(lease, completions, seconds)
            return Generated(lease, prompt, encoded, completions, seconds)
        raise AssertionError("the last attempt returns or raises")

    async def grade(self, generated: Generated, on_graded: Callable[[], None]) -> Group:
        """Score the completions and pack the group.

        ``on_graded`` is called for each completion of this group that is graded. A completion on which the verifier fails or
        exceeds its limits has an error instead of a score.

        Raises:
            GradingError: the verifier's processes cannot be kept running; nothing was scored.
        """
        lease = generated.lease
        started = time.monotonic()
        texts = await self._in_thread(self._codec.texts, [c.token_ids for c in generated.completions])
        in_thought = generated.encoded.in_thought
        scores = await self._grader.score_group(
            generated.prompt, texts, in_thought=in_thought, on_graded=on_graded
        )
        self._metrics.grading_seconds.observe(time.monotonic() - started)
        self._log_grading_errors(generated.prompt, [s.error for s in scores if s.error is not None])
        completions = [
            Completion(
                token_ids=c.token_ids.tobytes(),
                logprobs=c.logprobs.tobytes(),
                versions=version_spans(c),
                finish_reason=c.finish_reason,
                score=score.score,
                grading_error=score.error,
            )
            for c, score in zip(generated.completions, scores, strict=True)
        ]
        return Group(
            lease_id=lease.lease_id,
            split=lease.split,
            slot=lease.slot,
            prompt_index=lease.prompt_index,
            prompt_id=lease.prompt_id,
            prompt_token_ids=generated.encoded.wire,
            completions=completions,
            generation_seconds=generated.seconds,
        )

    async def _in_thread(self, work: Callable[[Argument], Result], argument: Argument) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)

    def _encoded(self, lease: Lease) -> tuple[Prompt, EncodedPrompt]:
        prompt = self._prompt(lease)
        return prompt, self._codec.encode(prompt, lease.max_tokens)

    def _prompt(self, lease: Lease) -> Prompt:
        source = self._sources[lease.split]
        where = f"{lease.split.value} prompt {lease.prompt_index}"
        if not 0 <= lease.prompt_index < len(source):
            raise PromptMismatch(
                f"lease {lease.lease_id}: {where} is outside the {len(source)} of this actor's source"
            )
        prompt = source[lease.prompt_index]
        if prompt.id != lease.prompt_id:
            raise PromptMismatch(
                f"lease {lease.lease_id}: {where} is {prompt.id!r} here, the coordinator means {lease.prompt_id!r}: "
                "coordinator and actor must read the same data with the same versions of the task libraries"
            )
        return prompt

    def _log_grading_errors(self, prompt: Prompt, errors: Sequence[str]) -> None:
        """Count all errors, and log each kind (the error without its numbers and quotations) once."""
        self._metrics.grading_errors.inc(len(errors))
        for error in errors:
            kind = _VARYING.sub("", error)[:_ERROR_KIND_CHARACTERS]
            if (
                kind not in self._logged_grading_errors
                and len(self._logged_grading_errors) < _MAX_ERROR_KINDS
            ):
                self._logged_grading_errors.add(kind)
                logger.warning(
                    "prompt %s: could not grade a completion, which is left out: %s (later ones of this kind are only counted)",
                    prompt.id,
                    error,
                )

    def _check_versions(self, completions: Sequence[Sampled]) -> None:
        sampled = {span.version for c in completions for span in c.weight_versions}
        covered = (sum(span.end - span.start for span in c.weight_versions) for c in completions)
        if any(len(c.token_ids) != tokens for c, tokens in zip(completions, covered, strict=True)):
            raise GenerationFailed("the answer lacks the weight versions of its tokens")
        if foreign := sorted(v for v in sampled if not self._state.has_held(v)):
            reason = (
                f"it sampled with weight versions {foreign}, which were not published to it since its start"
            )
            self._monitor.server_lost(reason)
            raise ServerLost(reason)

    def _record(self, lease: Lease, completions: Sequence[Sampled], seconds: float) -> None:
        metrics = self._metrics
        metrics.generation_seconds.observe(seconds)
        metrics.rollouts.labels(lease.split.value).inc(len(completions))
        metrics.tokens.labels(lease.split.value).inc(sum(len(c.token_ids) for c in completions))
        metrics.masked_tokens.inc(sum(int(c.masked.sum()) for c in completions))
        metrics.truncated.inc(sum(c.finish_reason == "length" for c in completions))
        oldest = min((c.weight_versions[0].version for c in completions if c.weight_versions), default=None)
        if oldest is not None:
            metrics.staleness.observe(max(0, self._state.version - oldest))
