"""The supervised warm start, with the same engine as the updates that follow; resets the optimizer at its end.

A policy that never succeeds gets no reward signal. ScaleRL starts from a supervised model (arXiv 2510.13786 [P]);
Interplay (arXiv 2512.07783 [P]) finds that reinforcement learning raises pass@k only where pass@1 is low and pass@k above
zero. So the aim is a base that succeeds sometimes, not a good one.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch

from scalerl_trainer.algo.losses import Supervised
from scalerl_trainer.engine import Engine, StepStats, TrainBatch
from scalerl_trainer.errors import BadBatchError, DivergedError
from scalerl_trainer.packing import Sequence

# Number of the last examples whose mean probability is compared with ``stop_at``: ±.03 at .25 if each were 0 or 1.
STOP_WINDOW_EXAMPLES = 256
# Share of the steps with a rising learning rate; it falls linearly to a tenth over the rest.
WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class WarmStartStats:
    """Result of a warm start; ``loss`` and ``solved`` are over the last 256 examples, each before it was trained on.

    loss: mean negative log-likelihood per solution token, nats.
    solved: mean probability of sampling exactly the worked solution.
    """

    steps: int
    loss: float
    solved: float
    trainable_tokens: int
    tokens: int
    seconds: float


def encode_pair(tokenizer: Any, prompt: str | Items[int], solution: str) -> Sequence:
    """Encode a prompt (text, or token ids from a chat template) and its solution, with the end token.

    They are encoded separately, because the generator appends to the prompt's tokens. Raises ``BadBatchError`` if either
    has no tokens.
    """
    ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else list(prompt)
    completion = tokenizer.encode(solution, add_special_tokens=False)
    if not ids or not completion:
        raise BadBatchError(f"prompt {prompt!r} or solution {solution!r} has no tokens")
    return Sequence(ids, [*completion, tokenizer.eos_token_id])


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Linear rise over the first 5 % of the steps, linear fall to a tenth of ``peak`` at the last.

    >>> [round(learning_rate_at(step, 100, 1.0), 6) for step in (0, 4, 99)]
    [0.2, 1.0, 0.1]
    """
    rising = max(1, round(steps * WARMUP_FRACTION))
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising + 1) / max(1, steps - rising)
    return peak * (1 - done * (1 - FINAL_FRACTION))


def warm_start(
    engine: Engine,
    tokenizer: Any,
    pairs: Items[tuple[str | Items[int], str]],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    rank: int,
    world: int,
    seed: int = 0,
    stop_at: float | None = None,
    on_step: Callable[[int, StepStats], None] | None = None,
) -> WarmStartStats:
    """Train on (prompt, worked solution) pairs; a collective: every rank passes the same arguments but ``rank``.

    Each of ``steps`` updates takes ``batch_size`` pairs over all ranks, drawn without replacement until all were seen,
    in an order that ``seed`` fixes. The loss is the mean over the batch's solution tokens.

    ``stop_at``: ends early once the mean probability of solving the last examples reaches this. Small models learn
    suddenly, at a step that differs between seeds: with a fixed number of steps the base never succeeds or always does.
    While there are unused pairs, this is measured on unseen examples.

    Raises ``BadBatchError`` for empty pairs, ``DivergedError`` for a step that cannot be applied, and what
    ``Engine.step`` raises.
    """
    if not pairs:
        raise BadBatchError("a warm start needs at least one pair of prompt and solution")
    if steps < 1 or batch_size < world:
        raise BadBatchError(f"a warm start needs steps ≥ 1 and batch_size ≥ {world} ranks")
    begin = time.perf_counter()
    order = _endless(len(pairs), seed)
    encoded: dict[int, Sequence] = {}
    window = deque[StepStats](maxlen=max(1, STOP_WINDOW_EXAMPLES // batch_size))
    trainable = tokens = 0
    for step in range(steps):
        batch = []
        for index in (next(order) for _ in range(batch_size)):
            if index not in encoded:
                encoded[index] = encode_pair(tokenizer, *pairs[index])
            batch.append(encoded[index])
        total = sum(len(sequence.completion) for sequence in batch)
        share = batch[rank::world]
        stats = engine.step(
            TrainBatch(share, torch.full((len(share),), 1.0 / total), torch.ones(len(share))),
            Supervised(),
            learning_rate=learning_rate_at(step, steps, learning_rate),
        )
        if stats.skipped:
            raise DivergedError(
                f"step {step} of the warm start: {stats.skipped}; lower warmStart.learningRate"
            )
        trainable += stats.trainable_tokens
        tokens += stats.tokens
        window.append(stats)
        if on_step is not None:
            on_step(step, stats)
        if stop_at is not None and len(window) == window.maxlen and _solved(window) >= stop_at:
            break
    engine.reset_optimizer()
    loss = sum(stats.loss for stats in window) / len(window)
    return WarmStartStats(step + 1, loss, _solved(window), trainable, tokens, time.perf_counter() - begin)


def _solved(window: Iterable[StepStats]) -> float:
    """Mean probability of a whole solution; the loss reports its sum per trainable token."""
    sums = [stats.loss_means["solved"] * stats.trainable_tokens for stats in window]
    return sum(sums) / sum(stats.sequences for stats in window)


def _endless(count: int, seed: int) -> Iterator[int]:
    generator = random.Random(seed)
    indices = list(range(count))
    while True:
        generator.shuffle(indices)
        yield from indices
