"""Supervised fine-tuning on worked solutions, with the same engine as the RL updates that follow.

A policy that never succeeds gets no reward signal. ScaleRL starts from a supervised model (arXiv 2510.13786 [P]);
Interplay (arXiv 2512.07783 [P]) finds that reinforcement learning raises pass@k only where pass@1 is low and pass@k above
zero. So the aim is a base model that succeeds sometimes, not one that succeeds often.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from itertools import islice

import msgspec
import torch

from scalerl_tasks import TaskError
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer.algo.losses import Supervised
from scalerl_trainer.engine import Engine, StepStats, TrainBatch
from scalerl_trainer.errors import BadBatchError, DivergedError
from scalerl_trainer.packing import Sequence
from scalerl_trainer.ranks import Ranks

# Number of most recent examples whose mean probability is compared with ``stop_at``. The standard error of a mean of .25
# is at most .03, its value if each probability were 0 or 1.
STOP_WINDOW_EXAMPLES = 256
# Fraction of the training over which the learning rate rises; over the rest it falls linearly to a tenth of its peak.
WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1
# This many consecutive bad examples indicate a problem of the source rather than of single examples.
MAX_BAD_EXAMPLES = 100

log = logging.getLogger(__name__)


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of supervised training besides the engine's; with both, training resumes exactly.

    Attributes:
        steps: number of updates, which also determines the next batch.
        tokens: solution tokens trained on, end tokens included.
        window: loss, sum of the examples' probabilities and number of examples of each recent step, for 256 examples in total.
        replaced: number of bad examples that were replaced by others.
        source: digest of the examples' source, which this module only passes on.
    """

    steps: int = 0
    tokens: int = 0
    window: tuple[tuple[float, float, int], ...] = ()
    replaced: int = 0
    source: str = ""

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood per solution token over the window, nats, each before its own update."""
        return sum(loss for loss, _, _ in self.window) / len(self.window)

    @property
    def solved(self) -> float:
        """Mean probability of sampling exactly the worked solution, over the window."""
        return sum(solved for _, solved, _ in self.window) / sum(count for _, _, count in self.window)


def encode_pair(tokenizer: ModelTokenizer, prompt: Items[int], solution: str) -> Sequence:
    """A sequence of the prompt's token ids and the encoded solution with its end token.

    The solution is encoded separately, because the generator also appends to the prompt's tokens. Raises
    ``BadBatchError`` if either has no tokens.
    """
    (completion,) = tokenizer.encode([solution])
    if not prompt or not completion:
        raise BadBatchError(f"prompt {prompt!r} or solution {solution!r} has no tokens")
    return Sequence(list(prompt), [*completion, tokenizer.end_token_id])


def encode_usable(
    tokenizer: ModelTokenizer, pairs: Items[tuple[Items[int], str]], index: int, most_tokens: int
) -> tuple[Sequence, str]:
    """The example at ``index`` and ``""``; if that example is bad, the next good one and the error of the bad one.

    An example is bad if ``pairs`` raises ``BadBatchError`` for it, or it has no tokens or more than ``most_tokens``. The
    choice is deterministic, so the batch does not depend on the number of ranks. Raises ``BadBatchError`` if 100
    consecutive examples, or all, are bad.
    """
    problem = ""
    for place in range(index, index + min(len(pairs), MAX_BAD_EXAMPLES)):
        try:
            sequence = encode_pair(tokenizer, *pairs[place % len(pairs)])
        except BadBatchError as error:
            problem = problem or str(error)
            continue
        if sequence.tokens <= most_tokens:
            return sequence, problem
        problem = problem or (
            f"example {place % len(pairs)} has {sequence.tokens} tokens, more than trainer.microBatchTokens "
            f"({most_tokens}): raise it, or shorten the solution"
        )
    raise BadBatchError(f"no usable example among {min(len(pairs), MAX_BAD_EXAMPLES)}; the first: {problem}")


def encode_shard(
    ranks: Ranks,
    tokenizer: ModelTokenizer,
    pairs: Items[tuple[Items[int], str]],
    batch: Items[int],
    most_tokens: int,
) -> tuple[list[Sequence], int, list[str]]:
    """This rank's examples of ``batch``, the number of solution tokens on all ranks, and the errors of replaced examples.

    A collective: each rank encodes its own shard only. Raises ``BadBatchError`` on all ranks if one rank fails.
    """
    own, problems, failure = [], [], ""
    try:
        for index in batch[ranks.rank :: ranks.world]:
            sequence, problem = encode_usable(tokenizer, pairs, index, most_tokens)
            own.append(sequence)
            problems += [problem] if problem else []
    except (BadBatchError, TaskError, OSError) as error:
        failure = str(error)
    parts = ranks.all_gather(
        (sum(len(sequence.completion) for sequence in own), problems, failure), tuple[int, list[str], str]
    )
    if failure := next((failure for _, _, failure in parts if failure), ""):
        raise BadBatchError(failure)
    return own, sum(tokens for tokens, _, _ in parts), [one for _, part, _ in parts for one in part]


def learning_rate_at(done: float, peak: float) -> float:
    """Learning rate with linear warmup over the first 5 % of the training and linear decay to a tenth of ``peak``.

    ``done``: fraction of the training completed, including the present step; above 0.

    >>> [round(learning_rate_at(done, 1.0), 6) for done in (0.01, 0.05, 1.0, 1.1)]
    [0.2, 1.0, 0.1, 0.1]
    """
    if done < WARMUP_FRACTION:
        return peak * done / WARMUP_FRACTION
    return peak * (1 - (min(done, 1.0) - WARMUP_FRACTION) / (1 - WARMUP_FRACTION) * (1 - FINAL_FRACTION))


def train_supervised(
    engine: Engine,
    tokenizer: ModelTokenizer,
    pairs: Items[tuple[Items[int], str]],
    *,
    batch_size: int,
    learning_rate: float,
    ranks: Ranks,
    steps: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    stop_at: float | None = None,
    progress: Progress | None = None,
    on_step: Callable[[Progress, StepStats, float], bool] | None = None,
) -> Progress:
    """Train on (prompt, worked solution) pairs; a collective: every rank passes the same arguments, with its ``ranks``.

    Each update takes ``batch_size`` pairs over all ranks, drawn without replacement within an epoch, in an order fixed by
    ``seed``. The loss is the mean over the batch's solution tokens. Training ends after ``steps`` updates, or with the
    update that reaches ``tokens`` solution tokens, whichever is first; then the optimizer is reset. A bad pair is
    replaced as in :func:`encode_usable`, counted and logged.

    Args:
        stop_at: ends the training early once the mean probability of the recent examples' solutions reaches this value.
            Small models learn suddenly, at a step that differs between seeds: after a fixed number of steps the base
            model succeeds never or always. In the first epoch the probability is measured on unseen examples.
        progress: progress of an earlier call whose engine state was loaded; training resumes with the next batch.
        on_step: called with the progress, the statistics and the seconds of each step; True ends the training.

    Raises:
        BadBatchError: there are no pairs, too many bad ones, or a batch that ``Engine.step`` refuses.
        DivergedError: a step cannot be applied.
    """
    if not pairs:
        raise BadBatchError("supervised training needs at least one pair of prompt and solution")
    if (steps is None and tokens is None) or batch_size < ranks.world:
        raise BadBatchError(
            f"supervised training needs steps or tokens, and batch_size ≥ {ranks.world} ranks"
        )
    done = progress or Progress()
    order = islice(_endless(len(pairs), seed), done.steps * batch_size, None)
    window = max(1, STOP_WINDOW_EXAMPLES // batch_size)
    while not _over(done, steps, tokens, stop_at, window):
        begin = time.perf_counter()
        # Encoded in each epoch and not cached: all examples of a long mid-training are gigabytes of integers.
        batch = list(islice(order, batch_size))
        own, total, problems = encode_shard(
            ranks, tokenizer, pairs, batch, engine.settings.micro_batch_tokens
        )
        replaced = done.replaced + len(problems)
        if problems and ranks.is_leader:
            log.warning(
                "%d examples of mid-training are replaced (%d so far): %s",
                len(problems),
                replaced,
                problems[0],
            )
        share = max(
            (done.steps + 1) / steps if steps else 0.0, (done.tokens + total) / tokens if tokens else 0.0
        )
        stats = engine.step(
            TrainBatch(own, torch.full((len(own),), 1.0 / total), torch.ones(len(own))),
            Supervised(),
            learning_rate=learning_rate_at(share, learning_rate),
        )
        if stats.skipped:
            raise DivergedError(f"supervised step {done.steps}: {stats.skipped}; lower its learningRate")
        # ``loss_means`` divides the sum of the probabilities by the number of trainable tokens.
        solved = stats.loss_means["solved"] * stats.trainable_tokens
        last = (*done.window, (stats.loss, solved, stats.sequences))[-window:]
        done = msgspec.structs.replace(
            done, steps=done.steps + 1, tokens=done.tokens + total, window=last, replaced=replaced
        )
        if on_step is not None and on_step(done, stats, time.perf_counter() - begin):
            break
    engine.reset_optimizer()
    return done


def _over(done: Progress, steps: int | None, tokens: int | None, stop_at: float | None, window: int) -> bool:
    if (steps is not None and done.steps >= steps) or (tokens is not None and done.tokens >= tokens):
        return True
    return stop_at is not None and len(done.window) == window and done.solved >= stop_at


def _endless(count: int, seed: int) -> Iterator[int]:
    generator = random.Random(seed)
    indices = list(range(count))
    while True:
        generator.shuffle(indices)
        yield from indices
