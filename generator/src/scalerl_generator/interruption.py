"""Forced interruption: ends long thoughts by a phrase that the policy did not choose (ScaleRL, arXiv 2510.13786 [P])."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalerl_api.wire import Lease
from scalerl_generator.completion_streams import CompletionStreams
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.vllm_client import gather_all
from scalerl_tasks.text import THOUGHT, ends_inside_thought


@dataclass(frozen=True)
class Interruption:
    """``recipe.length.interruption`` of one run."""

    min_tokens: int
    """First position at which a thought may be interrupted, in tokens of the completion."""
    max_tokens: int
    """Last position."""
    phrase: Sequence[int]
    """Token ids of what is appended there; it ends the thought."""


class ThoughtInterrupter:
    """The strategy that samples with forced interruption.

    A completion that is inside a thought at a position drawn from the interruption's range has the phrase appended, and
    continues after it with the rest of its length budget. One that has ended, has closed its thought or has opened none is
    left alone. The phrase's tokens are not the policy's: version ``MASKED``, log-probability 0.

    Evaluations are interrupted too: a policy is measured under the length control that it is trained with, and thoughts
    that training never sees at full length would be cut off there and score 0. The paper does not say what its
    evaluations do [?].

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
        """Where completion ``sample`` is interrupted: uniform in the range, and the same whoever samples it."""
        draw = random.Random(f"{self._seed}/{lease.split.value}/{lease.slot}/{sample}")
        return draw.randint(self._interruption.min_tokens, self._interruption.max_tokens)

    async def _sample(self, streams: CompletionStreams, sample: int) -> None:
        completion, position = streams.completions[sample], self.position(streams.lease, sample)
        # One that goes beyond its position came from an earlier server, where its thought was closed at that position.
        if not completion.has_forced and completion.tokens <= position:
            await streams.extend([completion], position)
            if completion.finish_reason is None:
                (text,) = await self._texts([completion.token_ids])
                if ends_inside_thought((THOUGHT if streams.prompt.in_thought else "") + text):
                    completion.force(self._phrase)
                    self._metrics.interrupted.inc()
        await streams.extend([completion], streams.lease.max_tokens)
