"""Samples episodes of several turns: the model replies, the environment answers, until the episode ends.

One completion holds an episode::

    reply, end token │ messages (masked) │ reply, end token │ messages (masked) │ … │ reply, end token
    sampled            turns[0]            sampled            turns[1]

A reply is sampled from the tokens before it, as they are: no sampled text is encoded again. The environment gets the replies as
text, and its messages are encoded by themselves (:meth:`scalerl_tasks.tokenizer.ModelTokenizer.encode_messages`). While it answers,
no request is open, so vLLM holds no sequence.

A step replays all replies (:mod:`scalerl_tasks.environments`), and its result depends on them alone. So an episode that a lost
server or another actor left unfinished continues from its tokens and ``turns``: if it has a complete reply without an answer, the step is
made again. The reward is that of the episode's last step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from scalerl_api.spec import ProblemSpec
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.rollouts.completion_streams import CompletionStreams
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.server_state import BusyClock
from scalerl_generator.vllm_client import gather_all
from scalerl_tasks.environments.gate import EnvironmentGate
from scalerl_tasks.errors import TokenizerError
from scalerl_tasks.grading.combined import GroupGrader
from scalerl_tasks.grading.grading_pool import Graded
from scalerl_tasks.open_graders import open_episodes
from scalerl_tasks.prompts import Prompt

Grading = Callable[[], AbstractContextManager[Callable[[], None]]]
"""Entered while an environment makes a step; gives what is called for each episode that has one, and while a verifier waits."""


def ungraded() -> AbstractContextManager[Callable[[], None]]:
    """A :data:`Grading` that records nothing."""
    return nullcontext(lambda: None)


@dataclass(frozen=True)
class EpisodeSampler:
    """Samples and grades the episodes of a task."""

    grader: EnvironmentGate
    codec: PromptCodec
    max_turns: int
    """Maximum number of replies."""
    max_tokens_per_turn: int | None
    """Maximum length of a reply, in tokens; None: that of the completion."""
    thread: Executor
    """Encodes and decodes."""
    metrics: ActorMetrics
    busy: BusyClock
    """Runs while a request is open."""

    async def sample(self, streams: CompletionStreams, prompt: Prompt, grading: Grading = ungraded) -> None:
        """Sample until every completion has an outcome.

        Raises:
            ServerLost, ServerRefused, BadReply, GenerationFailed: as :meth:`CompletionStreams.extend`.
            GradingError: the environment's processes cannot be kept running.
        """
        await gather_all(self._sample(streams, batch, prompt, grading) for batch in streams.batches())
        # Also what another generator, or an earlier lease, has sampled of them: that was not counted, since it has not ended.
        self._count(streams.completions)
        if self.codec.tools is not None:
            self._count_calls(streams.completions)

    def _count(self, completions: Sequence[PartialCompletion]) -> None:
        messages = sum(turn.end - turn.start for one in completions for turn in one.turns)
        tokens, seconds = self.metrics.episode_tokens, self.metrics.episode_seconds
        self.metrics.episode_turns.inc(sum(len(one.turns) + bool(one.tokens) for one in completions))
        tokens.labels("environment").inc(messages)
        tokens.labels("model").inc(sum(one.tokens for one in completions) - messages)
        seconds.labels("environment").inc(sum(one.environment_seconds for one in completions))
        seconds.labels("model").inc(sum(one.sampling_seconds for one in completions))

    def _count_calls(self, completions: Sequence[PartialCompletion]) -> None:
        verdicts = [c.outcome.verdict for c in completions if c.outcome is not None]
        for result, part in (("made", "calls"), ("malformed", "malformed")):
            count = sum(verdict.parts.get(part, 0.0) for verdict in verdicts if verdict is not None)
            self.metrics.tool_calls.labels(result).inc(count)

    async def _sample(
        self,
        streams: CompletionStreams,
        batch: Sequence[PartialCompletion],
        prompt: Prompt,
        grading: Grading,
    ) -> None:
        """Sample a batch. Its first replies are one request, and their steps another."""
        fresh = [completion for completion in batch if not completion.tokens]
        if fresh:
            await self._extend(streams, fresh)
            await self._step(streams, fresh, prompt, grading)
        unfinished = [completion for completion in batch if completion.outcome is None]
        if unfinished:
            await gather_all(self._continue(streams, one, prompt, grading) for one in unfinished)

    async def _continue(
        self, streams: CompletionStreams, completion: PartialCompletion, prompt: Prompt, grading: Grading
    ) -> None:
        while completion.outcome is None:
            await self._extend(streams, [completion])
            await self._step(streams, [completion], prompt, grading)

    async def _extend(self, streams: CompletionStreams, batch: Sequence[PartialCompletion]) -> None:
        """Sample a reply of each completion, and measure for how long each holds a sequence."""
        before, started = [completion.tokens for completion in batch], time.monotonic()
        with self.busy.request():
            await streams.extend(batch, self._limit(streams, batch[0]))
        seconds = time.monotonic() - started
        sampled = [completion.tokens - tokens for completion, tokens in zip(batch, before, strict=True)]
        for completion, tokens in zip(batch, sampled, strict=True):
            completion.sampling_seconds += seconds * tokens / max(1, *sampled)

    def _limit(self, streams: CompletionStreams, completion: PartialCompletion) -> int:
        """Position at which the current reply is cut."""
        start = completion.turns[-1].end if completion.turns else 0
        most = streams.lease.max_tokens
        return most if self.max_tokens_per_turn is None else min(most, start + self.max_tokens_per_turn)

    async def _step(
        self,
        streams: CompletionStreams,
        completions: Sequence[PartialCompletion],
        prompt: Prompt,
        grading: Grading,
    ) -> None:
        """End each episode, or continue it with the environment's messages."""
        loop, started = asyncio.get_running_loop(), time.monotonic()
        replies = await loop.run_in_executor(self.thread, self._replies, completions)
        with grading() as on_graded:
            steps = await self.grader.steps(
                prompt, replies, in_thought=streams.prompt.in_thought, on_graded=on_graded
            )
        seconds = time.monotonic() - started
        self.metrics.environment_seconds.observe(seconds)
        for completion, step, texts in zip(completions, steps, replies, strict=True):
            completion.environment_seconds += seconds
            completion.waited_seconds += step.waited
            completion.text = texts[0] if len(texts) == 1 else None
            if completion.finish_reason is None:  # the reply is as long as a turn may be
                completion.finish_reason = "length"
            ended = completion.finish_reason == "length" or len(completion.turns) + 1 >= self.max_turns
            if step.messages and not ended:
                try:
                    message_ids = await loop.run_in_executor(self.thread, self.codec.messages, step.messages)
                except TokenizerError as error:
                    completion.outcome = Graded(None, str(error))
                    continue
                if completion.tokens + len(message_ids) < streams.lease.max_tokens:
                    completion.reopen(message_ids, step.turn_reward)
                    continue
            completion.outcome = Graded(step.verdict, step.error) if step.messages else step
            if step.error is None:
                self.grader.ended(1)

    def _replies(self, completions: Sequence[PartialCompletion]) -> list[list[str]]:
        """The texts of all replies of each episode."""
        if not any(completion.turns for completion in completions):  # the common case, which is twice as fast
            return [[text] for text in self.codec.texts([completion.token_ids for completion in completions])]
        chunks, counts = [], []
        for completion in completions:
            ids, starts = completion.token_ids, [0, *(turn.end for turn in completion.turns)]
            ends = [*(turn.start for turn in completion.turns), completion.tokens]
            chunks += [ids[start:end] for start, end in zip(starts, ends, strict=True)]
            counts.append(len(starts))
        texts = iter(self.codec.texts(chunks))
        return [[next(texts) for _ in range(count)] for count in counts]


def episode_sampler(
    spec: ProblemSpec,
    codec: PromptCodec,
    grader: GroupGrader,
    thread: Executor,
    metrics: ActorMetrics,
    busy: BusyClock,
) -> EpisodeSampler | None:
    """The sampler of a task or an evaluation set; None if it has no environment.

    Raises:
        VerifierError: the environment has no such parameter.
        TokenizerError: the chat template is not append-only.
    """
    episodes = open_episodes(spec, grader)
    if episodes is None or spec.environment is None:
        return None
    codec.tokenizer.check_turns()
    given = spec.environment
    gate = EnvironmentGate(episodes, f"the environment {given.title}")
    turns = (given.max_turns, given.max_tokens_per_turn)
    return EpisodeSampler(gate, codec, *turns, thread, metrics, busy)
