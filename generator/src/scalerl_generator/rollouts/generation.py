"""Generates and grades the group of a lease.

A *strategy* is the function that samples the completions of a prompt: :func:`~.completion_streams.sample_plain` or
:class:`~.interruption.ThoughtInterrupter`; :class:`~.episodes.EpisodeSampler`, of a task with an environment, also grades.
Encoding, waiting for weights, grading and packing are the same for all.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from scalerl_api.wire import MASKED, Group, GroupText, Lease, Sample, Split, Verdicts
from scalerl_generator.drafts.draft_protocol import DraftTally
from scalerl_generator.drafts.past_responses import PastResponseFeed
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import ServerMonitor
from scalerl_generator.rollouts.completion_streams import (
    CompletionStreams,
    ServerLost,
    Strategy,
    sample_plain,
)
from scalerl_generator.rollouts.episodes import Grading, ungraded
from scalerl_generator.rollouts.group_packing import (
    count_loops,
    group_text,
    group_verdicts,
    packed_completions,
    sample_of,
)
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.partial_reports import KeptCompletions, PartialReports
from scalerl_generator.rollouts.prompt_codec import EncodedPrompt
from scalerl_generator.rollouts.task_runtimes import TaskRuntime
from scalerl_generator.rollouts.teacher import Teacher
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient
from scalerl_processes.waiting import cancel
from scalerl_tasks.grading.grading_pool import Graded
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.thoughts import THOUGHT
from scalerl_tasks.verdict import NOT_APPLICABLE

logger = logging.getLogger("scalerl.actor.rollouts")

Argument = TypeVar("Argument")
Result = TypeVar("Result")

_VARYING = re.compile(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"")
"""Numbers and quotations in an error's text, which are removed to get its kind."""
_ERROR_KIND_CHARACTERS = 80
_MAX_ERROR_KINDS = 50
"""Bound on the kinds of errors that are logged: their texts derive from model output and must not fill the log."""


class PromptMismatch(Exception):
    """The lease names a prompt that this actor's source does not have at that index."""


@dataclass(frozen=True)
class Generated:
    """A sampled group that is not graded yet."""

    lease: Lease
    task: TaskRuntime
    prompt: Prompt
    encoded: EncodedPrompt
    completions: list[PartialCompletion]
    """With their turns and outcomes, if the task has an environment."""
    seconds: float
    """Duration of the sampling."""


class RolloutGenerator:
    """Generates the groups of leases, with the run's prompts, server and verifiers.

    Args:
        tasks: by the task and split of a lease's prompt.
        thread: generates and tokenizes prompts and decodes completions, which can take seconds (a generated puzzle, a long
            context); with one thread, leases are served in order of arrival.
        max_sequences: maximum number of completions in one request (the server's limit).
        kept: completions that a lost server left unfinished.
        partials: reports unfinished completions to the coordinator, and reads those that a lease hands over.
    """

    def __init__(
        self,
        server: VllmClient,
        monitor: ServerMonitor,
        state: ServerState,
        busy: BusyClock,
        metrics: ActorMetrics,
        tasks: Mapping[tuple[int, Split], TaskRuntime],
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
        self._metrics, self._tasks = metrics, tasks
        self._thread = thread
        self._logged_grading_errors: set[str] = set()
        self._logged_unusable = False
        self._max_sequences = max_sequences
        self._kept, self._partials, self._strategy = kept, partials, strategy
        self._teacher = teacher
        self._past_responses = past_responses

    async def generate(
        self, lease: Lease, on_tokens: Callable[[int], None], grading: Grading = ungraded
    ) -> Generated:
        """Sample the completions of a lease. Waits while the server has no weights or receives new ones.

        ``on_tokens`` is called with the number of new tokens: of short completions when they are complete, of longer ones as they
        arrive. ``grading`` is entered for each step of an environment.

        Raises:
            ServerLost: this server can no longer serve the lease. Its tokens are kept for the next lease of the slot.
            ServerRefused, BadReply, GenerationFailed: the server is healthy, but this request failed.
            PromptTooLong: no server of this run can serve this prompt.
            PromptMismatch, SourceError: the run's configuration or data are wrong.
        """
        task, prompt, encoded = await self._in_thread(self._prompt, lease)
        await self._state.serving()
        if self._past_responses is not None:
            await self._past_responses.prepare(lease, encoded)
        started, server_start = time.monotonic(), self._state.start_count
        kept, reported = self._kept.take(lease), self._partials.read(lease, encoded)
        # Both may exist: ``kept`` from an earlier server of this actor, ``reported`` from another actor. The longer ones
        # are the newer ones.
        resumed_from = max(kept or [], reported or [], key=lambda group: sum(c.tokens for c in group))
        streams = CompletionStreams(
            self._server,
            self._monitor,
            self._state,
            self._metrics,
            lease,
            encoded,
            stop_token_ids=task.codec.tokenizer.stop_token_ids,
            max_sequences=self._max_sequences,
            on_tokens=on_tokens,
            completions=resumed_from,
        )
        metrics, resumed = self._metrics, streams.tokens
        counter = metrics.handed_over_tokens if resumed_from is reported else metrics.resumed_tokens
        counter.inc(resumed)
        self._partials.track(streams)
        try:
            if task.episodes is None:
                with self._busy.request():
                    await self._strategy(streams)
            else:
                await task.episodes.sample(streams, prompt, grading)
        except (ServerLost, asyncio.CancelledError):
            # Completions without a new token are not kept, because they may have made the server fail. Nor are tokens from
            # weights that were not published to the server, whose version is unknown.
            version_known = self._state.unpublished_start != server_start
            if version_known and not self._state.is_serving and streams.tokens > resumed:
                self._kept.put(lease, streams.completions)
            raise
        seconds = time.monotonic() - started
        self._record(lease, streams.completions, seconds)
        return Generated(lease, task, prompt, encoded, streams.completions, seconds)

    async def grade(
        self,
        generated: Generated,
        on_graded: Callable[[], None],
        on_teacher_wait: Callable[[], None] = lambda: None,
        on_teacher_answer: Callable[[], None] = lambda: None,
    ) -> Group:
        """Grade the completions, score them by the teacher if there is one, and pack the group.

        A completion on which the verifier fails or exceeds its limits has an error instead of a score.

        Args:
            on_graded: called for each completion of this group that is graded.
            on_teacher_wait: called every second until the teacher has answered, which may take arbitrarily long.
            on_teacher_answer: called once the teacher has answered.

        Raises:
            GradingError: the verifier's processes cannot be kept running; nothing was graded.
            ServerDown, ServerRefused, BadReply, GenerationFailed: the teacher is up, but the request for these completions
                failed.
        """
        lease = generated.lease
        teacher_task = asyncio.create_task(
            self._teacher_logprobs(generated, on_teacher_wait, on_teacher_answer)
        )
        try:
            (verdicts, sample, text), drafts = await asyncio.gather(
                self._verdicts(generated, on_graded), self._draft_tally(generated)
            )
            teacher_logprobs = await teacher_task
        finally:
            await cancel(teacher_task)
        return Group(
            lease_id=lease.lease_id,
            prompt=lease.prompt,
            slot=lease.slot,
            prompt_id=lease.prompt_id,
            prompt_token_ids=generated.encoded.wire,
            completions=packed_completions(
                generated.completions, teacher_logprobs, len(generated.encoded.token_ids)
            ),
            verdicts=verdicts,
            generation_seconds=generated.seconds,
            drafted_tokens=drafts and drafts[0],
            accepted_tokens=drafts and drafts[1],
            unusable_tokens=sum(int(c.masked.sum()) for c in generated.completions),
            sample=sample,
            text=text,
            episode_seconds=None
            if generated.task.episodes is None
            else (
                sum(one.sampling_seconds for one in generated.completions),
                sum(one.environment_seconds for one in generated.completions),
            ),
            looped=await self._in_thread(count_loops, generated.completions)
            if lease.split is Split.TRAIN
            else None,
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
        return [completion_logprobs.astype("<f4").tobytes() for completion_logprobs in logprobs]

    async def _verdicts(
        self, generated: Generated, on_graded: Callable[[], None]
    ) -> tuple[Verdicts, Sample | None, GroupText | None]:
        started = time.monotonic()
        task = generated.task
        texts = [one.text for one in generated.completions if one.text is not None]
        if len(texts) < len(generated.completions):
            texts = await self._in_thread(task.codec.texts, [c.token_ids for c in generated.completions])
        if task.episodes is None:
            graded = await task.grader.score_group(
                generated.prompt, texts, in_thought=generated.encoded.in_thought, on_graded=on_graded
            )
        else:
            nothing = Graded(None, "the episode has no outcome")
            graded = [one.outcome or nothing for one in generated.completions]
        self._metrics.grading_seconds.observe(time.monotonic() - started)
        verdicts = group_verdicts(graded, task.grader.part_names)
        errors = [error for error in verdicts.errors.values() if error != NOT_APPLICABLE]
        self._log_grading_errors(generated.prompt, errors)
        text = None
        if generated.lease.record:
            text = await self._in_thread(
                partial(
                    group_text, task.codec.tokenizer, generated.prompt, generated.encoded.token_ids, texts
                ),
                generated.completions,
            )
        if generated.lease.split is not Split.TRAIN:
            return verdicts, None, text
        if generated.encoded.in_thought:
            texts = [THOUGHT + text for text in texts]
        return verdicts, sample_of(generated.prompt, texts, graded), text

    async def _in_thread(self, work: Callable[[Argument], Result], argument: Argument) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)

    def _prompt(self, lease: Lease) -> tuple[TaskRuntime, Prompt, EncodedPrompt]:
        task, index = self._tasks.get((lease.prompt.task, lease.split)), lease.prompt.index
        where = f"{lease.split.value} prompt {index} of task {lease.prompt.task}"
        if task is None or not 0 <= index < len(task.source):
            known = "has no such task" if task is None else f"has {len(task.source)} prompts"
            raise PromptMismatch(
                f"lease {lease.lease_id}: {where} is not among this actor's prompts: it {known}"
            )
        prompt = task.source[index]
        if prompt.id != lease.prompt_id:
            raise PromptMismatch(
                f"lease {lease.lease_id}: {where} is {prompt.id!r}, but {lease.prompt_id!r} at the coordinator: "
                "coordinator and actor must read the same data with the same versions of the task libraries"
            )
        return task, prompt, task.codec.encode(prompt, lease.max_tokens)

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
                    "prompt %s: could not grade a completion, which is not trained on: %s (later errors of this kind are only "
                    "counted)",
                    prompt.id,
                    error,
                )

    def _record(self, lease: Lease, completions: Sequence[PartialCompletion], seconds: float) -> None:
        metrics = self._metrics
        metrics.generation_seconds.observe(seconds)
        metrics.rollouts.labels(lease.split.value).inc(len(completions))
        metrics.tokens.labels(lease.split.value).inc(sum(c.tokens for c in completions))
        unusable = sum(int(c.masked.sum()) for c in completions)
        metrics.masked_tokens.inc(unusable)
        if unusable and not self._logged_unusable:
            self._logged_unusable = True
            logger.warning(
                "%s: vLLM gave no finite log-probability for %d of %d tokens, which are not trained on: the model's weights may "
                "have values that are not numbers (later ones are only counted)",
                *(lease.lease_id, unusable, sum(c.tokens for c in completions)),
            )
        metrics.truncated.inc(sum(c.finish_reason == "length" for c in completions))
        sampled = {span.version for c in completions for span in c.weight_versions} - {MASKED}
        oldest = min(sampled, default=None)
        if oldest is not None:
            metrics.staleness.observe(max(0, self._state.version - oldest))
