"""Supervised warm start: a policy that never succeeds has nothing to reinforce.

ScaleRL starts from a supervised model (arXiv 2510.13786 [P]); Interplay (arXiv 2512.07783 [P]) finds that
reinforcement learning raises pass@k only where pass@1 is low and pass@k above zero. So the aim is a base that
succeeds now and then, not a good one.

It runs through the same engine as the updates that follow, and leaves an optimizer as new.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch

from scalerl_trainer.algo.losses import Supervised
from scalerl_trainer.engine import Engine, StepStats, TrainBatch
from scalerl_trainer.errors import BadBatchError
from scalerl_trainer.packing import Sequence

# Share of the steps over which the learning rate rises; it falls linearly to a tenth over the rest.
WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class WarmStartStats:
    """``loss``: mean negative log-likelihood per solution token (nats) over the last tenth of the steps."""

    steps: int
    loss: float
    trainable_tokens: int
    tokens: int
    seconds: float


def encode_pair(tokenizer: Any, prompt: str | Items[int], solution: str) -> Sequence:
    """Prompt (text, or ids where a chat template made them) and solution as a sequence that ends with the end token.

    Encoded apart, as they will be met: the generator appends to the prompt's tokens. Raises ``BadBatchError`` when
    either has no tokens.
    """
    ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else list(prompt)
    completion = tokenizer.encode(solution, add_special_tokens=False)
    if not ids or not completion:
        raise BadBatchError(f"prompt {prompt!r} or solution {solution!r} has no tokens")
    return Sequence(ids, [*completion, tokenizer.eos_token_id])


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Linear rise over the first 5 % of the steps, linear fall to a tenth of ``peak`` at the last.

    >>> [learning_rate_at(step, 100, 1.0) for step in (0, 4, 99)]
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
    on_step: Callable[[int, StepStats], None] | None = None,
) -> WarmStartStats:
    """Train on (prompt, worked solution) pairs; a collective: every rank passes the same arguments but ``rank``.

    Each of ``steps`` updates takes ``batch_size`` pairs over all ranks, drawn without replacement until all were seen,
    in an order that ``seed`` fixes. The loss is the mean over the batch's solution tokens. Raises ``BadBatchError``
    for empty pairs, and what ``Engine.step`` raises.
    """
    if not pairs:
        raise BadBatchError("a warm start needs at least one pair of prompt and solution")
    if steps < 1 or batch_size < world:
        raise BadBatchError(f"a warm start needs steps ≥ 1 and batch_size ≥ {world} ranks")
    begin = time.perf_counter()
    order = _endless(len(pairs), seed)
    encoded: dict[int, Sequence] = {}
    last: list[float] = []
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
        trainable += stats.trainable_tokens
        tokens += stats.tokens
        if step >= steps - max(1, steps // 10):
            last.append(stats.loss)
        if on_step is not None:
            on_step(step, stats)
    engine.reset_optimizer()
    return WarmStartStats(steps, sum(last) / len(last), trainable, tokens, time.perf_counter() - begin)


def _endless(count: int, seed: int) -> Iterator[int]:
    generator = random.Random(seed)
    indices = list(range(count))
    while True:
        generator.shuffle(indices)
        yield from indices
