"""From a lease to a graded group.

How the completions of a prompt are sampled is one function, a *strategy*; :func:`sample_plain` is the
only one today. Everything around it (encoding, waiting for weights, grading, packing) does not depend
on it. A strategy that interrupts long thoughts by force would stand beside it: two requests, the phrase's
tokens between them, and a mask of the forced ones.
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
from scalerl_generator.join import ServerWatch
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.prompts import EncodedPrompt, PromptCodec
from scalerl_generator.state import BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient, together
from scalerl_generator.vllm_replies import GenerationFailed, Sampled, ServerRefused, VllmError
from scalerl_tasks.grading.pool import GradingPool
from scalerl_tasks.prompts import Prompt, PromptSource

logger = logging.getLogger("scalerl.actor.rollouts")

Argument = TypeVar("Argument")
Result = TypeVar("Result")

_ATTEMPTS = 3
_AFTER_THE_LEASE_SECONDS = 60.0
"""The lease's own deadline ends a request; were the two timeouts one moment, either could swallow the other."""

_VARYING = re.compile(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"")
_KIND_CHARACTERS = 80
_MOST_KINDS = 50
"""Error texts come from model output, in the end: they must not fill the log."""


class ServerLost(Exception):
    """The server died with this group in flight, or turned out to hold weights nobody published to it."""


class WrongPrompt(Exception):
    """The lease names a prompt that this actor's source does not have at that index."""


def version_spans(sampled: Sampled) -> list[VersionSpan]:
    """Which weights sampled which tokens, as the wire says it; masked tokens are in spans of their own."""
    if not sampled.masked.any():
        return [VersionSpan(span.version, span.start) for span in sampled.weight_versions]
    spans = sampled.weight_versions
    versions = np.repeat([span.version for span in spans], [span.end - span.start for span in spans])
    versions[sampled.masked] = MASKED
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1)]
    return [VersionSpan(int(versions[start]), int(start)) for start in starts]


@dataclass(frozen=True)
class SampleRequest:
    """What a strategy is asked for: ``lease.completions`` completions of ``prompt``."""

    lease: Lease
    prompt: EncodedPrompt
    stop_token_ids: Sequence[int]
    cache_salt: str
    """:attr:`ServerState.cache_salt <scalerl_generator.state.ServerState.cache_salt>` as the request is sent."""
    max_sequences: int
    """The server takes no more completions than this in one request."""
    on_tokens: Callable[[int], None]
    """To be told of new tokens, as far as the server tells."""


Strategy = Callable[[VllmClient, SampleRequest], Awaitable[list[Sampled]]]


async def sample_plain(server: VllmClient, request: SampleRequest) -> list[Sampled]:
    """Independent completions, each until an end token or ``max_tokens``.

    No request carries a seed: what is sampled depends on when updates arrive anyway, vLLM draws seeded
    sequences one after another, and its CPU engine dies when it discards a seeded request's draw
    ("CPU Generator does not use offset", 0.32).
    """
    lease = request.lease
    most = request.max_sequences if lease.temperature > 0 else 1  # vLLM takes greedy requests singly
    parts = [
        server.generate(
            request.prompt.token_ids,
            n=min(most, lease.completions - start),
            max_tokens=lease.max_tokens,
            temperature=lease.temperature,
            stop_token_ids=request.stop_token_ids,
            cache_salt=request.cache_salt,
            timeout_seconds=lease.remaining_seconds + _AFTER_THE_LEASE_SECONDS,
            on_tokens=request.on_tokens,
        )
        for start in range(0, lease.completions, most)
    ]
    return [completion for part in await together(parts) for completion in part]


@dataclass(frozen=True)
class Generated:
    """A sampled group that is not graded yet."""

    lease: Lease
    prompt: Prompt
    encoded: EncodedPrompt
    completions: list[Sampled]
    seconds: float


class RolloutMaker:
    """Turns leases into groups, with the run's prompts, server and verifier.

    Args:
        sources: the prompts of each split; leases index into them.
        thread: where prompts are made and tokenized and completions turned to text, which can take seconds
            (a generated puzzle, a long context); with one thread, leases are served in the order they came.
        max_sequences: most completions in one request (the server's own limit).
    """

    def __init__(
        self,
        server: VllmClient,
        watch: ServerWatch,
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
        self._server, self._watch, self._state, self._busy = server, watch, state, busy
        self._codec, self._grader, self._metrics = codec, grader, metrics
        self._sources = sources
        self._thread = thread
        self._seen_grading_errors: set[str] = set()
        self._max_sequences = max_sequences
        self._strategy = strategy

    async def generate(self, lease: Lease, on_tokens: Callable[[int], None]) -> Generated:
        """Sample the completions of a lease; waits while the server holds no weights or takes new ones.

        ``on_tokens`` is told of tokens as they are sampled, unless completions are short.

        Raises:
            ServerLost: the lease cannot be served by this server any more.
            ServerRefused, BadReply, GenerationFailed: the server is well, and yet there is nothing to train on.
            PromptTooLong: no server of this run can serve this prompt.
            WrongPrompt, SourceError: the run's configuration or data are at fault.
        """
        prompt, encoded = await self._in_thread(self._encoded, lease)
        for attempt in range(1, _ATTEMPTS + 1):
            await self._state.serving()
            salt = self._state.cache_salt
            stop = self._codec.stop_token_ids
            request = SampleRequest(lease, encoded, stop, salt, self._max_sequences, on_tokens)
            started = time.monotonic()
            self._busy.enter()
            try:
                completions = await self._strategy(self._server, request)
            except VllmError as error:
                if not await self._watch.alive():
                    raise ServerLost(str(error)) from error
                refused = isinstance(error, ServerRefused) and error.status < 500
                if refused or attempt == _ATTEMPTS:
                    raise
                logger.warning("attempt %d at lease %s: %s", attempt, lease.lease_id, error)
                self._metrics.resubmitted.inc()
                continue
            finally:
                self._busy.leave()
            self._check_versions(completions)
            seconds = time.monotonic() - started
            self._record(lease, completions, seconds)
            return Generated(lease, prompt, encoded, completions, seconds)
        raise AssertionError("the last attempt returns or raises")

    async def grade(self, generated: Generated, on_graded: Callable[[], None]) -> Group:
        """Score the completions and pack the group.

        ``on_graded`` is called for each completion of this group that has its verdict. A completion on which the
        verifier fails or runs out of its limits has no verdict, and says why.

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
        self._note_grading_errors(generated.prompt, [s.error for s in scores if s.error is not None])
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
            raise WrongPrompt(
                f"lease {lease.lease_id}: {where} is outside the {len(source)} of this actor's source"
            )
        prompt = source[lease.prompt_index]
        if prompt.id != lease.prompt_id:
            raise WrongPrompt(
                f"lease {lease.lease_id}: {where} is {prompt.id!r} here, the coordinator means {lease.prompt_id!r}: "
                "coordinator and actor must read the same data with the same versions of the task libraries"
            )
        return prompt

    def _note_grading_errors(self, prompt: Prompt, errors: Sequence[str]) -> None:
        """Count all, and log each kind (the error but for its numbers and what it quotes) once."""
        self._metrics.grading_errors.inc(len(errors))
        for error in errors:
            kind = _VARYING.sub("", error)[:_KIND_CHARACTERS]
            if kind not in self._seen_grading_errors and len(self._seen_grading_errors) < _MOST_KINDS:
                self._seen_grading_errors.add(kind)
                logger.warning(
                    "prompt %s: a completion could not be graded and is left out: %s (more of this kind are only counted)",
                    prompt.id,
                    error,
                )

    def _check_versions(self, completions: Sequence[Sampled]) -> None:
        sampled = {span.version for c in completions for span in c.weight_versions}
        covered = (sum(span.end - span.start for span in c.weight_versions) for c in completions)
        if any(len(c.token_ids) != tokens for c, tokens in zip(completions, covered, strict=True)):
            raise GenerationFailed("the server does not say which weights sampled the tokens")
        if foreign := sorted(v for v in sampled if not self._state.has_held(v)):
            reason = f"it sampled with weight versions {foreign}, which it was not given since it came up"
            self._watch.lost(reason)
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
