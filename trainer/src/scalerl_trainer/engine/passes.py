"""Forward and backward passes over a rank's micro-batches, and what they leave besides the gradients.

Ranks with fewer micro-batches run empty ones of weight zero, because where parameters or gradients are partitioned every forward
and backward is a collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from scalerl_api.mismatch import POSITIONS
from scalerl_trainer.algo.gradient_guard import smallest_masked, squared_gradients
from scalerl_trainer.algo.losses import Loss, LossOutput, TokenBatch, is_token_local
from scalerl_trainer.algo.mismatch import (
    FIELDS,
    RatioStatistics,
    add_tables,
    beyond_ratio,
    position_buckets,
    ratio_table,
)
from scalerl_trainer.engine.backend import Backend, Frozen
from scalerl_trainer.engine.distributed import gather_vectors
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.errors import EngineError
from scalerl_trainer.models import varlen
from scalerl_trainer.models.head import Derivative
from scalerl_trainer.models.lora import Adapters
from scalerl_trainer.models.policy import Policy
from scalerl_trainer.models.router_replay import RouterReplay
from scalerl_trainer.models.routing import Routing
from scalerl_trainer.packing import MicroBatch, PackedBatch, to_device
from scalerl_trainer.ranks import RankLost
from scalerl_trainer.train_batch import TrainBatch

TABLES = 2 * len(POSITIONS) * FIELDS
"""Elements of the two ratio tables by position: of all tokens, and of fresh ones."""


@dataclass
class Accumulated:
    """What forward and backward of this rank's micro-batches leave besides the gradients."""

    sums: torch.Tensor
    """``[2 + 2 * 5 * 8 + L]``, float64 on the device: loss, entropy, the ratio tables by position of all and of fresh tokens,
    and the L own sums of the loss; after them those of :class:`.routing.Routing`."""
    differences_n: torch.Tensor
    """log π_train − log π_gen, float32 ``[N]`` on the device, in flat order."""
    names: list[str] = field(default_factory=list)
    """Names of the loss's own sums."""
    beyond: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """For each micro-batch, which tokens are ratio outliers, and each token's sequence."""
    ordinary: torch.Tensor | None = None
    """Squared gradient of the tokens that are no outliers (``algo.gradient_guard``), scalar; None without a guard."""
    outliers_n: torch.Tensor | None = None
    """Squared gradient of each outlier, 0 of another token, in flat order; None without a guard."""


@dataclass(frozen=True, slots=True)
class _Objective:
    """The loss of a micro-batch as a function of its log-probabilities."""

    loss: Loss
    tokens: TokenBatch
    """All but the log-probabilities."""
    on_policy: bool
    """Whether the trained weights sampled the tokens, so that the generator's log-probabilities are theirs."""
    world: int

    def at(self, logprobs_m: torch.Tensor) -> tuple[TokenBatch, LossOutput, torch.Tensor]:
        """The tokens with log-probabilities that are a leaf, their loss, and its derivative by them, apart from that through the model."""
        own_m = logprobs_m.detach()
        generator_m = own_m if self.on_policy else self.tokens.generator_logprobs_n
        tokens = replace(
            self.tokens, logprobs_n=own_m.clone().requires_grad_(), generator_logprobs_n=generator_m
        )
        with torch.enable_grad():
            output = self.loss(tokens)
        (gradient_m,) = torch.autograd.grad(output.loss, tokens.logprobs_n)
        return tokens, output, gradient_m

    def derivative(self, logprobs_m: torch.Tensor) -> torch.Tensor:
        """That derivative times the number of ranks, over which the backend averages."""
        return self.at(logprobs_m)[2] * self.world


class Passes:
    """Runs the policy, and the frozen policies beside it, on micro-batches.

    Args:
        backend: of ``policy``.
        adapters: those of the policy, if it has some.
        replay: replays recorded experts in the policy and its proximal policy; None if the trainer routes all tokens.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Policy,
        settings: EngineSettings,
        device: torch.device,
        adapters: Adapters | None,
        routing: Routing,
        replay: RouterReplay | None = None,
    ) -> None:
        self._backend, self._policy, self._settings, self._device = backend, policy, settings, device
        self._adapters, self.routing, self.replay = adapters, routing, replay
        self._world = dist.get_world_size()
        self.reference: Frozen | None = None
        self.reference_is_base = False
        """Whether the reference is the model without its adapters."""

    def micro_batches(self, packed: PackedBatch, count: int) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield ``count`` micro-batches, each with whether it is real: empty ones follow the real ones, so that all ranks run
        the same collectives."""
        for micro in packed.micro_batches:
            yield micro, True
        for _ in range(count - len(packed.micro_batches)):
            zero = torch.zeros(1, dtype=torch.long)
            yield MicroBatch(zero[None], zero[None], zero, zero, zero, zero), False

    def forward(
        self,
        micro: MicroBatch,
        temperature: float | None = None,
        *,
        entropy: bool = False,
        derivative: Derivative | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies ``[M]``, see :meth:`.LogprobHead.forward`."""
        result: tuple[torch.Tensor, torch.Tensor] = self._backend(
            *self.inputs(micro),
            temperature or self._settings.temperature,
            entropy,
            *self.layout(micro),
            derivative,
        )
        return result

    def inputs(self, micro: MicroBatch) -> tuple[torch.Tensor, ...]:
        """The policy's first arguments, on the device."""
        inputs = (micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m)
        return tuple(self._move(tensor) for tensor in inputs)

    def layout(self, micro: MicroBatch) -> tuple[Any, ...]:
        """Its last ones but the derivative: prompts where rows have none, or boundaries of the sequences that share a row."""
        if micro.prompts_gp is not None and micro.prompt_b is not None:
            return self._move(micro.prompts_gp), self._move(micro.prompt_b), None
        if self._policy.variable_length:
            return None, None, varlen.boundaries(micro.position_ids_bt, self._device)
        return None, None, None

    def _move(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return to_device(tensor, self._device, dtype)

    def _frozen_logprobs(self, frozen: Frozen | None, micro: MicroBatch) -> torch.Tensor | None:
        """A frozen policy's log-probability of each token, ``[M]``; None without one.

        A collective under ZeRO-3, so it is called for empty micro-batches as well.
        """
        if frozen is None:
            return None
        logprobs_m: torch.Tensor
        logprobs_m, _ = frozen(*self.inputs(micro), self._settings.temperature, False, *self.layout(micro))
        return logprobs_m

    def _reference_logprobs(self, micro: MicroBatch) -> torch.Tensor | None:
        """As :meth:`_frozen_logprobs`, of the reference."""
        if self._adapters is None or not self.reference_is_base:
            return self._frozen_logprobs(self.reference, micro)
        with self._adapters.off(), torch.no_grad():
            return self.forward(micro)[0]

    def _replayed(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """A context in which the policy and its proximal policy compute with the experts recorded of ``micro``."""
        return nullcontext() if self.replay is None else self.replay.of(micro, self._device)

    def accumulate(
        self,
        packed: PackedBatch,
        batch: TrainBatch,
        loss: Loss,
        count: int,
        *,
        proximal: Frozen | None = None,
        masked_n: torch.Tensor | None = None,
    ) -> Accumulated:
        """Run forward and backward of every micro-batch.

        Args:
            proximal: the proximal policy, where it is not the policy itself.
            masked_n: bool, tokens whose weight is 0; None for none.
        """
        self._policy.train()
        done: Accumulated | None = None
        ordinary = torch.zeros((), dtype=torch.float64, device=self._device)
        outliers_n = torch.zeros(packed.trainable, dtype=torch.float64, device=self._device)
        differences_n = torch.zeros(packed.trainable, device=self._device)
        local = is_token_local(loss)
        for micro, real in self.micro_batches(packed, count):
            reference_m = self._reference_logprobs(micro)
            with self._replayed(micro):
                proximal_m = self._frozen_logprobs(proximal, micro)
                objective = self._objective(micro, real, batch, loss, reference_m, proximal_m, masked_n)
                with self.routing.counted(self._move(micro.predict_at_m) if real else None):
                    logprobs_m, entropies_m = self.forward(
                        micro, entropy=True, derivative=objective.derivative if local else None
                    )
                tokens, output, gradient_m = objective.at(logprobs_m)
                if real and self._settings.gradient_guard is not None:
                    found = squared_gradients(tokens, gradient_m)
                    ordinary += found.ordinary
                    outliers_n[self._move(micro.flat_m)] = found.outliers_n
                self._backend.backward((logprobs_m * (gradient_m * self._world)).sum())
            names = sorted(output.sums)
            parts = [
                torch.stack([output.loss.detach().double(), entropies_m.double().sum()]),
                self._tables(micro, real, batch, logprobs_m, tokens.generator_logprobs_n).flatten(),
                *(output.sums[name].double().reshape(1) for name in names),
            ]
            part = torch.cat(parts) if real else torch.zeros_like(torch.cat(parts))
            if done is None:
                done = Accumulated(part, differences_n, names)
            else:
                done.sums = _add_sums(done.sums, part)
            if real:
                difference_m = (logprobs_m.detach() - tokens.generator_logprobs_n).float()
                differences_n[self._move(micro.flat_m)] = difference_m
                done.beyond.append((beyond_ratio(logprobs_m, tokens.generator_logprobs_n), micro.sequence_m))
        if done is None:
            raise EngineError("a batch with trainable tokens has no micro-batch")
        done.sums = torch.cat([done.sums, self.routing.take(self._device)])
        if self._settings.gradient_guard is not None:
            done.ordinary, done.outliers_n = ordinary, outliers_n
        return done

    def masked(self, done: Accumulated, trainable: int) -> tuple[torch.Tensor | None, int]:
        """Which of this rank's tokens ``algo.gradient_guard`` masks, bool ``[N]``, None if none of any rank; and their number,
        over all ranks. A collective."""
        guard = self._settings.gradient_guard
        if guard is None or done.ordinary is None or done.outliers_n is None or trainable < guard.min_tokens:
            return None, 0
        largest = done.outliers_n.max() if done.outliers_n.numel() else torch.zeros_like(done.ordinary)
        table = gather_vectors(torch.stack([done.ordinary, largest]))
        ordinary = float(table[:, 0].sum())
        if not float(table[:, 1].max()) > ordinary:
            return None, 0
        # An outlier that does not exceed the ordinary tokens is not masked, so only the others are exchanged one by one.
        own_n = done.outliers_n.cpu()
        large_n = own_n > ordinary
        own = own_n[large_n].double()
        head = torch.tensor(
            [len(own), float(own_n[~large_n].sum())], dtype=torch.float64, device=self._device
        )
        heads = gather_vectors(head).tolist()
        longest = max(int(count) for count, _ in heads)
        if not 0 < longest <= trainable:
            raise RankLost(f"a rank announces {longest} outliers of {trainable} tokens")
        padded = torch.zeros(longest, dtype=torch.float64, device=self._device)
        padded[: len(own)] = own.to(self._device)
        squares = gather_vectors(padded).tolist()
        rest = ordinary + sum(small for _, small in heads)
        every = [
            square for row, (count, _) in zip(squares, heads, strict=True) for square in row[: int(count)]
        ]
        smallest = smallest_masked(every, rest)
        if smallest is None:
            return None, 0
        return own_n >= smallest, sum(square >= smallest for square in every)

    def _objective(
        self,
        micro: MicroBatch,
        real: bool,
        batch: TrainBatch,
        loss: Loss,
        reference_m: torch.Tensor | None,
        proximal_m: torch.Tensor | None,
        masked_n: torch.Tensor | None,
    ) -> _Objective:
        zeros_m = torch.zeros(len(micro.target_m), device=self._device)
        if not real:
            sequence_m = self._move(micro.sequence_m)
            tokens = TokenBatch(
                zeros_m, zeros_m, zeros_m, zeros_m, sequence_m, reference_m, zeros_m, proximal_m
            )
            return _Objective(loss, tokens, True, self._world)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return self._move(tensor, torch.float32)

        generator, teacher = batch.generator_logprobs_n, batch.teacher_logprobs_n
        by_token = batch.advantages_n
        _, sequence_m = torch.unique(micro.sequence_m, return_inverse=True)
        weights_m = move(batch.weights_s[micro.sequence_m])
        if masked_n is not None:
            weights_m = weights_m.masked_fill(self._move(masked_n[micro.flat_m]), 0.0)
        tokens = TokenBatch(
            zeros_m,
            zeros_m if generator is None else move(generator[micro.flat_m]),
            move(batch.advantages_s[micro.sequence_m] if by_token is None else by_token[micro.flat_m]),
            weights_m,
            self._move(sequence_m),
            reference_m,
            None if teacher is None else move(teacher[micro.flat_m]),
            proximal_m,
        )
        return _Objective(loss, tokens, generator is None, self._world)

    def _tables(
        self,
        micro: MicroBatch,
        real: bool,
        batch: TrainBatch,
        logprobs_m: torch.Tensor,
        generator_m: torch.Tensor,
    ) -> torch.Tensor:
        """Ratio tables ``[2, positions, 7]`` of all tokens and of the fresh ones."""
        position_m = micro.position_ids_bt.flatten()[micro.predict_at_m] + 1
        bucket_m = self._move(position_buckets(position_m))
        every = ratio_table(logprobs_m, generator_m, bucket_m, len(POSITIONS))
        if not real or batch.fresh_n is None:
            return torch.stack([every, torch.zeros_like(every)])
        # Indices, because the device would have to say how many a mask has.
        at_f = self._move(batch.fresh_n[micro.flat_m].nonzero().flatten())
        fresh = ratio_table(logprobs_m[at_f], generator_m[at_f], bucket_m[at_f], len(POSITIONS))
        return torch.stack([every, fresh])


def _add_sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add two vectors of sums of :meth:`Passes.accumulate`."""
    total = left + right
    tables = slice(2, 2 + TABLES)
    total[tables] = add_tables(left[tables].view(-1, FIELDS), right[tables].view(-1, FIELDS)).flatten()
    return total


def ratios_of(rows: torch.Tensor) -> tuple[tuple[RatioStatistics, ...], tuple[RatioStatistics, ...]]:
    """Ratio statistics by position, of all tokens and of fresh ones, from all ranks' sums of :meth:`Passes.accumulate`."""
    total = rows[0]
    for row in rows[1:]:
        total = _add_sums(total, row)
    tables = total[2 : 2 + TABLES].view(2, len(POSITIONS), FIELDS).tolist()
    every, fresh = (tuple(RatioStatistics(*row) for row in table) for table in tables)
    return every, fresh


def outlier_counts(beyond: Items[tuple[torch.Tensor, torch.Tensor]]) -> dict[int, int]:
    """Number of ratio outliers by sequence."""
    found = Counter[int]()
    for beyond_m, sequence_m in beyond:
        found.update(sequence_m[beyond_m.cpu()].tolist())
    return dict(found)
