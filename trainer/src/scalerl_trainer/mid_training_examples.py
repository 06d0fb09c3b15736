"""The examples of mid-training: prompts with their worked solutions, in an order fixed by the seed."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from scalerl_api.spec import PromptSpec, RunSpec, TrainingTask
from scalerl_tasks import (
    Mixture,
    PromptError,
    PromptSource,
    TokenizerError,
    Train,
    open_tasks,
    open_warm_start,
    render_prompt,
)
from scalerl_tasks.environments.tool_calls import tools_of
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer.errors import BadBatchError, MidTrainingError
from scalerl_trainer.packing import Sequence as PackedSequence
from scalerl_trainer.sft import Progress, encode_pair

log = logging.getLogger(__name__)

HELD_OUT_EXAMPLES = 256


def held_out_examples(spec: RunSpec, model: Path) -> list[PackedSequence]:
    """Up to about 256 held-out prompts with their worked solutions; in a mix, in proportion to the tasks' weights.

    Examples that cannot be generated, have no solution or do not fit a micro-batch are left out.
    """
    found = []
    opened = open_tasks(spec, model.parent)  # the run's directory
    for one, task in zip(opened.sections, opened.tasks, strict=True):
        tokenizer = ModelTokenizer(
            model, one.section.prompt, f"{one.field}.prompt", tools_of(one.section.environment)
        )
        count = min(math.ceil(HELD_OUT_EXAMPLES * one.weight), len(task.held_out))
        pairs = Pairs(task.held_out, one.section.prompt, tokenizer, np.arange(count))
        for index in range(count):
            # A prompt without a usable solution is left out here and is still evaluated during RL.
            with contextlib.suppress(BadBatchError):
                found.append(encode_pair(tokenizer, *pairs[index]))
    return [pair for pair in found if pair.tokens <= spec.micro_batch_tokens]


def own_examples(
    source: PromptSource, train: Train, field: str
) -> tuple[PromptSource, npt.NDArray[np.int64]]:
    """The separate problems of ``warmStart``, and the indices of those that are not held out, int64. ``field``: theirs in the spec.

    Raises ``MidTrainingError`` if all are held out.
    """
    kept = np.array([index for index in range(len(source)) if not train.excludes(source[index])], np.int64)
    if not len(kept):
        raise MidTrainingError(
            f"{field}: every prompt is held out by task.heldOut or evaluation.sets: add others, or leave it out"
        )
    if len(kept) < len(source):
        log.warning(
            "%s: %d of %d prompts are held out by task.heldOut or evaluation.sets, and not trained on",
            *(field, len(source) - len(kept), len(source)),
        )
    return source, kept


def of_source(done: Progress, spec: RunSpec, digest: str) -> Progress:
    """``done`` with the digest of the examples' source. Raises ``MidTrainingError`` if the digest has changed."""
    if done.source not in ("", digest):
        own = spec.warm_start.own if spec.warm_start is not None else ""
        where = f"{own}: the examples" if own else "task: the training prompts"
        raise MidTrainingError(
            f"{where}, digest {digest[:12]}, is not what mid-training has trained on up to step {done.steps}, digest "
            f"{done.source[:12]}: put the examples back, or start a new run"
        )
    return msgspec.structs.replace(done, source=digest)


def solved_pairs(spec: RunSpec, model: Path) -> Pairs | MixedPairs:
    """The training pairs in an order fixed by the seed, without those that ``steps`` cannot reach.

    Pairs of a mix are in its proportions. ``model``: the folder with the tokenizer. Raises ``MidTrainingError`` as
    :func:`own_examples`.
    """
    wanted = spec.warm_start
    assert wanted is not None
    most = None if wanted.steps is None else wanted.steps * wanted.batch_size
    opened = open_tasks(spec, model.parent)  # the run's directory
    given = opened.sections

    def pairs(
        source: PromptSource, kept: npt.NDArray[np.int64], one: TrainingTask, seed: int | tuple[int, int]
    ) -> Pairs:
        tokenizer = ModelTokenizer(
            model, one.section.prompt, f"{one.field}.prompt", tools_of(one.section.environment)
        )
        order = kept[np.random.default_rng(seed).permutation(len(kept))[:most]]
        return Pairs(source, one.section.prompt, tokenizer, order)

    own = open_warm_start(spec, model.parent)
    if own is not None:
        # One task's exclusions suffice: each task excludes the held-out prompts of all tasks from training.
        return pairs(*own_examples(own, opened.tasks[0].train, wanted.own), given[0], spec.seed)
    train = [task.train for task in opened.tasks]
    if len(train) == 1:
        return pairs(train[0], np.arange(len(train[0])), given[0], spec.seed)
    parts = [
        pairs(prompts, np.arange(len(prompts)), one, (spec.seed, at))
        for at, (one, prompts) in enumerate(zip(given, train, strict=True))
    ]
    return MixedPairs.of(parts, [one.weight for one in given], spec.seed, opened.digest)


@dataclass(frozen=True)
class Pairs(Sequence[tuple[Sequence[int], str]]):
    """Pairs of a prompt's token ids and its worked solution, each made on access; the same on all ranks.

    Access raises ``BadBatchError`` for a prompt that cannot be generated or rendered, or has neither solution nor answer.
    """

    source: PromptSource
    wording: PromptSpec
    tokenizer: ModelTokenizer
    order: npt.NDArray[np.int64]

    @property
    def digest(self) -> str:
        """Digest of the source."""
        return self.source.digest

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Any) -> Any:
        try:
            prompt = self.source[int(self.order[index])]
            rendered = render_prompt(prompt, self.wording.template, self.wording.system)
            (ids,) = self.tokenizer.encode_prompts([rendered])
            return ids, prompt.worked_solution
        except (PromptError, TokenizerError, ValueError) as error:
            raise BadBatchError(str(error)) from error


@dataclass(frozen=True)
class MixedPairs(Sequence[tuple[Sequence[int], str]]):
    """Pairs of the tasks of a mix, in its proportions; the task that is used up first limits their number."""

    parts: Sequence[Pairs]
    mixture: Mixture
    total: int
    digest: str
    """Digest of the mix's training prompts."""

    @classmethod
    def of(cls, parts: Sequence[Pairs], weights: Sequence[Fraction], seed: int, digest: str) -> MixedPairs:
        """Mix ``parts`` by ``weights``, in their order.

        In every prefix, each task's count deviates from its proportion by less than the number of tasks.
        """
        sizes = [int((len(part) - len(parts)) / weight) for part, weight in zip(parts, weights, strict=True)]
        return cls(parts, Mixture(weights, seed), max(1, min(sizes)), digest)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: Any) -> Any:
        at, place = self.mixture.place(int(index))
        return self.parts[at][place % len(self.parts[at])]
