"""Forced interruption: ends long thoughts by appending a phrase that the policy did not sample (ScaleRL, arXiv 2510.13786 [P])."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalerl_api.spec import RunSpec
from scalerl_api.wire import Lease
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.rollouts.completion_streams import CompletionStreams, Strategy, sample_plain
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.vllm_client import gather_all
from scalerl_tasks.interruption import check_interruption
from scalerl_tasks.thoughts import THOUGHT, ends_inside_thought

logger = logging.getLogger("scalerl.actor")


@dataclass(frozen=True)
class Interruption:
    """``recipe.length.interruption`` of a run, for one maximum completion length."""

    min_tokens: int
    """First position at which a thought may be interrupted, in tokens of the completion."""
    max_tokens: int
    """Last such position."""
    phrase: Sequence[int]
    """Token ids of the phrase that is appended; it ends the thought."""


class ThoughtInterrupter:
    """The sampling strategy with forced interruption.

    For each completion a position is drawn from the interruption's range. If the completion is inside a thought there, the
    phrase is appended, and sampling continues with the rest of the length budget. Completions that have ended, closed their
    thought or opened none are not interrupted. The phrase's tokens have version ``MASKED`` and log-probability 0, because
    the policy did not sample them.

    Evaluations are interrupted as well, so that the policy is evaluated under the length control of its training; otherwise,
    thoughts longer than in training would be truncated and score 0. The paper does not say how it evaluates [?].

    Args:
        seed: the run's.
        texts: decodes completions; the caller keeps it off the event loop.
    """

    def __init__(
        self,
        interruption: Interruption,
        seed: int,
        texts: Callable[[list[NDArray[np.int32]]], Awaitable[list[str]]],
        metrics: ActorMetrics,
    ) -> None:
        self._interruption, self._seed = interruption, seed
        self._phrase = np.array(interruption.phrase, dtype=np.int32)
        self._texts, self._metrics = texts, metrics

    async def __call__(self, streams: CompletionStreams) -> None:
        await gather_all(self._sample(streams, sample) for sample in range(len(streams.completions)))

    def position(self, lease: Lease, sample: int) -> int:
        """Position of completion ``sample``: uniform in the range, and equal for every actor that samples it."""
        draw = random.Random(f"{self._seed}/{lease.split.value}/{lease.slot}/{sample}")
        return draw.randint(self._interruption.min_tokens, self._interruption.max_tokens)

    async def _sample(self, streams: CompletionStreams, sample: int) -> None:
        completion, position = streams.completions[sample], self.position(streams.lease, sample)
        # A resumed completion may be longer than its position; then it was checked there before.
        if not completion.has_forced and completion.tokens <= position:
            await streams.extend([completion], position)
            if completion.finish_reason is None:
                (text,) = await self._texts([completion.token_ids])
                if ends_inside_thought((THOUGHT if streams.prompt.in_thought else "") + text):
                    completion.force(self._phrase)
                    self._metrics.interrupted.inc()
        await streams.extend([completion], streams.lease.max_tokens)


def choose_strategy(spec: RunSpec, codec: PromptCodec, thread: Executor, metrics: ActorMetrics) -> Strategy:
    """The sampling strategy: with forced interruption if the spec has it and it can apply."""
    section = spec.recipe.length.interruption
    if section is None:
        return sample_plain

    async def texts(completions: list[NDArray[np.int32]]) -> list[str]:
        return await asyncio.get_running_loop().run_in_executor(thread, codec.texts, completions)

    by_limit: dict[int, ThoughtInterrupter] = {}
    for max_tokens in spec.completion_limits:
        if (phrase := check_interruption(section, codec.tokenizer, max_tokens)) is not None:
            interruption = Interruption(*section.range(max_tokens), phrase)
            by_limit[max_tokens] = ThoughtInterrupter(interruption, spec.seed, texts, metrics)
    if not by_limit:
        logger.info(
            "recipe.length.interruption has no effect: the tokenizer cannot encode the end of a thought, or "
            "recipe.maxCompletionTokens is too small"
        )
        return sample_plain

    async def interrupt(streams: CompletionStreams) -> None:
        await by_limit.get(streams.lease.max_tokens, sample_plain)(streams)

    return interrupt
