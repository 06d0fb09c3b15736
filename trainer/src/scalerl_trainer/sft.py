"""Supervised steps on worked solutions, with the same engine as the updates that follow.

A policy that never succeeds gets no reward signal. ScaleRL starts from a supervised model (arXiv 2510.13786 [P]);
Interplay (arXiv 2512.07783 [P]) finds that reinforcement learning raises pass@k only where pass@1 is low and pass@k above
zero. So the aim is a base that succeeds sometimes, not a good one.
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
from scalerl_tasks.text import ModelTokenizer
from scalerl_trainer.algo.losses import Supervised
from scalerl_trainer.engine import Engine, StepStats, TrainBatch
from scalerl_trainer.errors import BadBatchError, DivergedError
from scalerl_trainer.packing import Sequence
from scalerl_trainer.ranks import Ranks

# Number of the last examples whose mean probability is compared with ``stop_at``: ±.03 at .25 if each were 0 or 1.
STOP_WINDOW_EXAMPLES = 256
# Share of the training with a rising learning rate; it falls linearly to a tenth over the rest.
WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1
# So many bad examples in a row are not the fault of single ones.
MAX_BAD_EXAMPLES = 100

log = logging.getLogger(__name__)


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of supervised training beside the engine's; with both, training continues as if it had not been interrupted.

    steps: updates, which fix the next batch too.
    tokens: solution tokens of these updates, with the end tokens.
    window: of the last steps, that hold 256 examples: loss, sum of the examples' probabilities, examples.
    replaced: bad examples, in whose places others were trained on.
    source: digest of the examples' source; kept as it is.
    """

    steps: int = 0
    tokens: int = 0
    window: tuple[tuple[float, float, int], ...] = ()
    replaced: int = 0
    source: str = ""

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood per solution token, nats; over the window, each example before it was trained on."""
        return sum(loss for loss, _, _ in self.window) / len(self.window)

    @property
    def solved(self) -> float:
        """Mean probability of sampling exactly the worked solution, over the window."""
        return sum(solved for _, solved, _ in self.window) / sum(count for _, _, count in self.window)


def encode_pair(tokenizer: ModelTokenizer, prompt: Items[int], solution: str) -> Sequence:
    """A prompt's token ids and its encoded solution, with the end token.

    They are encoded separately, because the generator appends to the prompt's tokens. Raises ``BadBatchError`` if either
    has no tokens.
    """
    (completion,) = tokenizer.encode([solution])
    if not prompt or not completion:
        raise BadBatchError(f"prompt {prompt!r} or solution {solution!r} has no tokens")
    return Sequence(list(prompt), [*completion, tokenizer.end_token_id])


def encode_usable(
    tokenizer: ModelTokenizer, pairs: Items[tuple[Items[int], str]], index: int, most_tokens: int
) -> tuple[Sequence, str]:
    """The example at ``index``, and ``""``; if it is bad, the next good one, and what is wrong with the first.

    Bad: ``pairs`` raises ``BadBatchError`` for it, it has no tokens, or more than ``most_tokens``. Deterministic, so that
    the batch does not depend on the number of ranks. Raises ``BadBatchError`` if 100 in a row are bad, or all.
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
    """This rank's examples of ``batch``, the solution tokens of all ranks' examples, and what is wrong with those replaced.

    A collective: each rank encodes its own share only. Raises ``BadBatchError`` on all ranks if it does on one.
    """
    own, problems, failure = [], [], ""
    try:
        for index in batch[ranks.rank :: ranks.world]:
            sequence, problem = encode_usable(tokenizer, pairs, index, most_tokens)
            own.append(sequence)
            problems += [problem] if problem else []
    except (BadBatchError, TaskError, OSError) as error:
        failure = str(error)
    parts = ranks.all_gather((sum(len(sequence.completion) for sequence in own), problems, failure))
    if failure := next((failure for _, _, failure in parts if failure), ""):
        raise BadBatchError(failure)
    return own, sum(tokens for tokens, _, _ in parts), [one for _, part, _ in parts for one in part]


def learning_rate_at(done: float, peak: float) -> float:
    """Linear rise over the first 5 % of the training, linear fall to a tenth of ``peak`` at its end.

    ``done``: share of the training with the present step, above 0.

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

    Each update takes ``batch_size`` pairs over all ranks, drawn without replacement until all were seen, in an order that
    ``seed`` fixes. The loss is the mean over the batch's solution tokens. Ends after ``steps`` updates, or with the one that
    reaches ``tokens`` solution tokens, whichever is first; then the optimizer is reset.

    ``stop_at``: ends early once the mean probability of solving the last examples reaches this. Small models learn
    suddenly, at a step that differs between seeds: with a fixed number of steps the base never succeeds or always does.
    While there are unused pairs, this is measured on unseen examples.

    A bad pair is replaced as in :func:`encode_usable`, counted and logged.

    ``progress``: of an earlier call whose engine state was loaded; training continues with its next batch.

    ``on_step``: is passed the progress, the statistics and the seconds of each step; True ends the training.

    Raises ``BadBatchError`` for empty pairs and too many bad ones, ``DivergedError`` for a step that cannot be applied, and what
    ``Engine.step`` raises.
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
        # Encoded again in each epoch: all examples of a long mid-training are gigabytes of integers.
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
        # The loss reports the sum of the probabilities per trainable token.
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
