"""Makes a graded group from a lease.

A *strategy* is the function that samples the completions of a prompt: :func:`sample_plain`, or
:class:`~.interruption.ThoughtInterrupter`. Encoding, waiting for weights, grading and packing do not depend on it.
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

from scalerl_api.wire import MASKED, Completion, Group, Lease, Split, Verdicts, VersionSpan
from scalerl_generator.completion_streams import CompletionStreams, ServerLost
from scalerl_generator.draft_protocol import DraftTally
from scalerl_generator.kept_completions import KeptCompletions
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.partial_reports import PartialReports
from scalerl_generator.past_responses import PastResponseFeed
from scalerl_generator.prompt_codec import EncodedPrompt, PromptCodec
from scalerl_generator.registration import ServerMonitor
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.teacher import Teacher
from scalerl_generator.vllm_client import VllmClient, gather_all
from scalerl_generator.vllm_replies import Sampled
from scalerl_tasks.grading.grading_pool import Graded, GradingPool
from scalerl_tasks.prompts import Prompt, PromptSource

logger = logging.getLogger("scalerl.actor.rollouts")

Argument = TypeVar("Argument")
Result = TypeVar("Result")

_VARYING = re.compile(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"")
_ERROR_KIND_CHARACTERS = 80
_MAX_ERROR_KINDS = 50
"""Bound on logged kinds of errors: their texts derive from model output, and must not fill the log."""


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


def group_verdicts(graded: Sequence[Graded], part_names: Sequence[str]) -> Verdicts:
    """Verdicts on a group's completions, in the wire's form."""
    return Verdicts(
        scores=[one.score for one in graded],
        parts={
            name: [0.0 if one.verdict is None else one.verdict.parts[name] for one in graded]
            for name in part_names
        },
        errors={at: one.error for at, one in enumerate(graded) if one.error is not None},
    )


Strategy = Callable[[CompletionStreams], Awaitable[None]]


async def sample_plain(streams: CompletionStreams) -> None:
    """Independent completions, each until an end token or the lease's ``max_tokens``."""
    await gather_all(streams.extend(batch, streams.lease.max_tokens) for batch in streams.batches())


@dataclass(frozen=True)
class Section:
    """Prompts of a run that are rendered and graded alike."""

    source: PromptSource
    codec: PromptCodec
    grader: GradingPool


@dataclass(frozen=True)
class Generated:
    """A sampled group that is not graded yet."""

    lease: Lease
    section: Section
    prompt: Prompt
    encoded: EncodedPrompt
    completions: list[Sampled]
    seconds: float


class RolloutGenerator:
    """Makes groups from leases, with the run's prompts, server and verifier.

    Args:
        sections: by task and split, as leases name them.
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
        metrics: ActorMetrics,
        sections: Mapping[tuple[int, Split], Section],
        thread: Executor,
        *,
        max_sequences: int,
        kept: KeptCompletions,
        partials: PartialReports,
        strategy: Strategy = sample_plain,
        teacher: Teacher | None = None,
        past_responses: PastResponseFeed | None = None,
    ) -> None:
        self._server, self._monitor, self._state, self._busy = server, monitor, state, busy
        self._metrics, self._sections = metrics, sections
        self._thread = thread
        self._logged_grading_errors: set[str] = set()
        self._max_sequences = max_sequences
        self._kept, self._partials, self._strategy = kept, partials, strategy
        self._teacher = teacher
        self._past_responses = past_responses

    async def generate(self, lease: Lease, on_tokens: Callable[[int], None]) -> Generated:
        """Sample the completions of a lease; waits while the server holds no weights or receives new ones.

        ``on_tokens`` is called as tokens are sampled, unless completions are short.

        Raises:
            ServerLost: this server can no longer serve the lease. What it sampled is kept for the next lease of the slot.
            ServerRefused, BadReply, GenerationFailed: the server is healthy, and returned nothing to train on.
            PromptTooLong: no server of this run can serve this prompt.
            PromptMismatch, SourceError: the run's configuration or data are wrong.
        """
        section, prompt, encoded = await self._in_thread(self._encoded, lease)
        await self._state.serving()
        if self._past_responses is not None:
            await self._past_responses.prepare(lease, encoded)
        started, server_start = time.monotonic(), self._state.start_count
        kept, handed_over = self._kept.take(lease), self._partials.read(lease, encoded)
        # The longer are the later ones: of an earlier server, or of another actor since.
        begun = max(kept or [], handed_over or [], key=lambda group: sum(c.tokens for c in group))
        streams = CompletionStreams(
            self._server,
            self._monitor,
            self._state,
            self._metrics,
            lease,
            encoded,
            stop_token_ids=section.codec.tokenizer.stop_token_ids,
            max_sequences=self._max_sequences,
            on_tokens=on_tokens,
            completions=begun,
        )
        resumed = streams.tokens
        (self._metrics.handed_over_tokens if begun is handed_over else self._metrics.resumed_tokens).inc(
            resumed
        )
        self._partials.track(streams)
        self._busy.request_started()
        try:
            await self._strategy(streams)
        except (ServerLost, asyncio.CancelledError):
            # Without a new token, these completions may be why the server is lost.
            attributable = self._state.unpublished_start != server_start
            if attributable and not self._state.is_serving and streams.tokens > resumed:
                self._kept.put(lease, streams.completions)
            raise
        finally:
            self._busy.request_ended()
        completions = [completion.sampled() for completion in streams.completions]
        seconds = time.monotonic() - started
        self._record(lease, completions, seconds)
        return Generated(lease, section, prompt, encoded, completions, seconds)

    async def grade(
        self,
        generated: Generated,
        on_graded: Callable[[], None],
        on_teacher_wait: Callable[[], None] = lambda: None,
        on_teacher_answer: Callable[[], None] = lambda: None,
    ) -> Group:
        """Score the completions, by the teacher too if there is one, and pack the group.

        ``on_graded`` is called for each completion of this group that is graded, ``on_teacher_wait`` every second until the
        teacher has answered, however long it is away, then ``on_teacher_answer``. A completion on which the verifier fails or
        exceeds its limits has an error instead of a score.

        Raises:
            GradingError: the verifier's processes cannot be kept running; nothing was scored.
            ServerDown, ServerRefused, BadReply, GenerationFailed: the teacher answers, but not for these completions.
        """
        lease = generated.lease
        asked = asyncio.create_task(self._teacher_logprobs(generated, on_teacher_wait, on_teacher_answer))
        try:  # while the teacher is asked, which may be away
            verdicts, drafts = await asyncio.gather(
                self._verdicts(generated, on_graded), self._draft_tally(generated)
            )
            teacher_logprobs = await asked
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)  # both may have failed
        completions = [
            Completion(
                token_ids=c.token_ids.tobytes(),
                logprobs=c.logprobs.tobytes(),
                teacher_logprobs=theirs,
                versions=version_spans(c),
                finish_reason=c.finish_reason,
            )
            for c, theirs in zip(generated.completions, teacher_logprobs, strict=True)
        ]
        return Group(
            lease_id=lease.lease_id,
            prompt=lease.prompt,
            slot=lease.slot,
            prompt_id=lease.prompt_id,
            prompt_token_ids=generated.encoded.wire,
            completions=completions,
            verdicts=verdicts,
            generation_seconds=generated.seconds,
            drafted_tokens=drafts and drafts[0],
            accepted_tokens=drafts and drafts[1],
        )

    async def _draft_tally(self, generated: Generated) -> DraftTally | None:
        if self._past_responses is None or generated.lease.split is not Split.TRAIN:
            return None
        return await self._past_responses.sampled(generated.encoded, generated.completions)

    async def _teacher_logprobs(
        self, generated: Generated, on_wait: Callable[[], None], on_answer: Callable[[], None]
    ) -> list[bytes]:
        if self._teacher is None or generated.lease.split is not Split.TRAIN:
            return [b""] * len(generated.completions)
        logprobs = await self._teacher.score(generated.encoded.token_ids, generated.completions, on_wait)
        on_answer()
        return [of_one.astype("<f4").tobytes() for of_one in logprobs]

    async def _verdicts(self, generated: Generated, on_graded: Callable[[], None]) -> Verdicts:
        started = time.monotonic()
        section = generated.section
        texts = await self._in_thread(section.codec.texts, [c.token_ids for c in generated.completions])
        graded = await section.grader.score_group(
            generated.prompt, texts, in_thought=generated.encoded.in_thought, on_graded=on_graded
        )
        self._metrics.grading_seconds.observe(time.monotonic() - started)
        verdicts = group_verdicts(graded, section.grader.part_names)
        self._log_grading_errors(generated.prompt, list(verdicts.errors.values()))
        return verdicts

    async def _in_thread(self, work: Callable[[Argument], Result], argument: Argument) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)

    def _encoded(self, lease: Lease) -> tuple[Section, Prompt, EncodedPrompt]:
        section, prompt = self._prompt(lease)
        return section, prompt, section.codec.encode(prompt, lease.max_tokens)

    def _prompt(self, lease: Lease) -> tuple[Section, Prompt]:
        section, index = self._sections.get((lease.prompt.task, lease.split)), lease.prompt.index
        where = f"{lease.split.value} prompt {index} of task {lease.prompt.task}"
        if section is None or not 0 <= index < len(section.source):
            there = "has no such task" if section is None else f"has {len(section.source)}"
            raise PromptMismatch(
                f"lease {lease.lease_id}: {where} is not among this actor's prompts: it {there}"
            )
        source = section.source
        prompt = source[index]
        if prompt.id != lease.prompt_id:
            raise PromptMismatch(
                f"lease {lease.lease_id}: {where} is {prompt.id!r} here, the coordinator means {lease.prompt_id!r}: "
                "coordinator and actor must read the same data with the same versions of the task libraries"
            )
        return section, prompt

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

    def _record(self, lease: Lease, completions: Sequence[Sampled], seconds: float) -> None:
        metrics = self._metrics
        metrics.generation_seconds.observe(seconds)
        metrics.rollouts.labels(lease.split.value).inc(len(completions))
        metrics.tokens.labels(lease.split.value).inc(sum(len(c.token_ids) for c in completions))
        metrics.masked_tokens.inc(sum(int(c.masked.sum()) for c in completions))
        metrics.truncated.inc(sum(c.finish_reason == "length" for c in completions))
        sampled = {span.version for c in completions for span in c.weight_versions} - {MASKED}
        oldest = min(sampled, default=None)
        if oldest is not None:
            metrics.staleness.observe(max(0, self._state.version - oldest))
