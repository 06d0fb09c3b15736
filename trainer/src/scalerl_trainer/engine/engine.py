"""The engine: updates (pack, forward, loss, backward, optimizer), scoring, gathering of whole parameters, saved state.

The gradient does not depend on the split over ranks and micro-batches. The weights of ``algo.aggregation`` include the
normalization of the whole batch, so the batch's loss is the sum of the losses of all micro-batches on all ranks.
DeepSpeed averages gradients over ranks; each loss is multiplied by the number of ranks to obtain the sum. Ranks with fewer
micro-batches run empty ones of weight zero, because under ZeRO-2 and ZeRO-3 every forward and backward is a collective.

All ranks exchange their errors before anything is applied, and raise together.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scalerl_api.mismatch import POSITIONS
from scalerl_trainer.algo.losses import Loss, TokenBatch
from scalerl_trainer.algo.mismatch import (
    FIELDS,
    RatioStatistics,
    add_tables,
    beyond_ratio,
    position_buckets,
    ratio_table,
)
from scalerl_trainer.engine.deepspeed_engine import DeepSpeedEngine, FrozenModule
from scalerl_trainer.engine.distributed import gather_vectors
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.engine.shard import pack_shard
from scalerl_trainer.engine.stats import FlatLogprobs, ParameterBucket, StepStats, TrainBatch
from scalerl_trainer.errors import EngineError
from scalerl_trainer.models.policy import PREFIX, Policy
from scalerl_trainer.models.precision import buffer_dtypes, cast_parameters, check_buffer_dtypes
from scalerl_trainer.packing import MicroBatch, PackedBatch, Sequence, one_row
from scalerl_trainer.saved_state import HEADER, EngineHeader, Piece, SavedState, write_header, write_pieces

log = logging.getLogger(__name__)

_CHECKED_TOKENS = 64
"""Tokens of the two sequences on which sharing of rows is checked."""
_ROW_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.03}
"""In standard deviations of the log-probabilities over tokens. Of the families of docs/models.md, those that keep sequences apart
reach 2e-2 in bfloat16 (rounding), those that mix them .14 and more."""
_TABLES = 2 * len(POSITIONS) * FIELDS
"""Elements of the two ratio tables by position: of all tokens, and of fresh ones."""


class Engine:
    """Trains a transformers causal language model. Every method is a collective, except where noted.

    Needs an initialized process group.

    Args:
        causal_lm: the model; rank 0's weights are broadcast to the other ranks. The engine owns it from now on.
        device: of this rank.
    """

    def __init__(self, causal_lm: Any, settings: EngineSettings, device: torch.device) -> None:
        if not dist.is_initialized():
            raise EngineError("no process group: call init_process_group first")
        self.settings = settings
        self.device = device
        self.steps_done = 0
        if settings.activation_checkpointing:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.config = causal_lm.config
        buffers = buffer_dtypes(causal_lm)
        cast_parameters(causal_lm, getattr(torch, settings.dtype))
        policy = Policy(causal_lm, fp32_head=settings.fp32_head, chunk_bytes=settings.logit_chunk_bytes)
        self._policy = policy
        self._reference: FrozenModule | None = None
        self._deepspeed = DeepSpeedEngine(policy, settings, device)
        check_buffer_dtypes(causal_lm, buffers)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._separates: bool | None = None
        self._shares_rows()

    def set_reference(self, causal_lm: Any) -> None:
        """Set the reference policy: later steps compute its log-probability of each token. It is frozen, in the policy's dtype.

        Its activations are freed before those of the policy exist, so it costs only the memory of its parameters.
        """
        buffers = buffer_dtypes(causal_lm)
        cast_parameters(causal_lm, getattr(torch, self.settings.dtype))
        policy = Policy(
            causal_lm, fp32_head=self.settings.fp32_head, chunk_bytes=self.settings.logit_chunk_bytes
        )
        self._reference = FrozenModule(policy.eval(), self.settings, self.device)
        check_buffer_dtypes(causal_lm, buffers)

    # --- reading ------------------------------------------------------------------------------------------

    def parameter_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes of the parameters, in the order of ``gather_parameters``. Not a collective."""
        return [
            (name.removeprefix(PREFIX), self._deepspeed.shape(parameter))
            for name, parameter in self._policy.named_parameters()
        ]

    def logprobs(self, sequences: Items[Sequence], *, temperature: float | None = None) -> FlatLogprobs:
        """Log-probabilities of the trainable tokens of this rank's sequences under the current weights.

        Args:
            sequences: this rank's; may be empty, and may differ in number between ranks.
            temperature: None for that of the settings.

        Raises ``SequenceTooLongError`` on every rank.
        """
        packed, counts = self._pack(sequences, None)
        logprobs_n = torch.empty(packed.trainable)
        entropies_n = torch.empty(packed.trainable)
        self._policy.eval()
        with torch.no_grad():
            for micro, real in self._micro_batches(packed, int(counts[:, 0].max())):
                logprobs_m, entropies_m = self._forward(micro, temperature)
                if real:
                    logprobs_n[micro.flat_m] = logprobs_m.cpu()
                    entropies_n[micro.flat_m] = entropies_m.cpu()
        return FlatLogprobs(logprobs_n, entropies_n, packed.trainable_s)

    def gather_parameters(
        self, bucket_bytes: int, dtype: torch.dtype | None = None
    ) -> Iterator[ParameterBucket]:
        """Yield whole parameters in buckets of at most ``bucket_bytes`` (a larger parameter is alone in its bucket).

        Names are those of the transformers model; tied parameters occur once. All ranks must exhaust the iterator together;
        no collective is in progress while a bucket is yielded.

        Args:
            dtype: of the yielded tensors; None for the model's.
        """
        dtype = dtype or getattr(torch, self.settings.dtype)
        for names, parameters in self._buckets(bucket_bytes, dtype):
            shapes = tuple(self._deepspeed.shape(parameter) for parameter in parameters)
            tensors: tuple[torch.Tensor, ...] = ()
            with self._deepspeed.gathered(parameters):
                if self._rank == 0:
                    # Under ZeRO-3 the gathered storage is freed after the block, so it is copied.
                    copy = self.settings.zero_stage == 3
                    tensors = tuple(p.detach().to(dtype, copy=copy) for p in parameters)
            yield ParameterBucket(names, shapes, dtype, tensors)

    # --- training -----------------------------------------------------------------------------------------

    def step(self, batch: TrainBatch, loss: Loss, *, learning_rate: float | None = None) -> StepStats:
        """Update the weights from this rank's shard of a batch.

        A batch without trainable tokens on any rank changes nothing (``applied=False``). All ranks skip a step whose loss
        or gradient is not finite or whose ratios exceed the guard; ``skipped`` has the reason.

        Args:
            learning_rate: overrides the settings' schedule.

        Raises, on all ranks and before anything is applied: ``BadBatchError`` (and ``NonFiniteLogprobError``,
        ``SequenceTooLongError``).
        """
        begin = time.perf_counter()
        packed, counts = self._pack(batch.sequences, batch)
        micro_batches, trainable, tokens, padding, sequences = (int(c) for c in counts.sum(0)[:5])
        rate = self.settings.learning_rate_at(self.steps_done) if learning_rate is None else learning_rate
        if trainable == 0:
            seconds = {"total": time.perf_counter() - begin}
            return StepStats(
                self.steps_done, False, 0.0, 0.0, rate, 0.0, 0, 0, 0, sequences, 0, None, seconds=seconds
            )
        packed_at = time.perf_counter()
        sums, names, beyond = self._accumulate(packed, batch, loss, int(counts[:, 0].max()))
        rows = gather_vectors(sums)
        computed_at = time.perf_counter()
        total = rows.sum(0)
        every, fresh = _ratios(rows)
        ratios = sum(every, RatioStatistics())
        sampled = batch.generator_logprobs_n is not None
        known = bool(counts[:, 6].any())
        gradient_norm = math.nan
        skipped = self._skip_reason(float(total[0]), ratios)
        if skipped is None:
            gradient_norm = self._deepspeed.step(rate)
            if not math.isfinite(gradient_norm):
                skipped = f"the gradient norm is {gradient_norm}"
        else:
            self._discard_gradients(rate)
        end = time.perf_counter()
        step = self.steps_done
        self.steps_done += skipped is None
        return StepStats(
            step=step,
            applied=skipped is None,
            skipped=skipped or "",
            broken=_outlier_counts(beyond) if skipped else {},
            loss=float(total[0]),
            gradient_norm=gradient_norm,
            learning_rate=rate,
            entropy=float(total[1]) / trainable,
            trainable_tokens=trainable,
            tokens=tokens,
            padding=padding,
            sequences=sequences,
            micro_batches=micro_batches,
            ratios=ratios if sampled else None,
            ratios_by_position=every if sampled else (),
            fresh_ratios_by_position=fresh if known else (),
            loss_means={
                name: float(value) / trainable
                for name, value in zip(names, total[2 + _TABLES :], strict=True)
            },
            seconds={
                "pack": packed_at - begin,
                "compute": computed_at - packed_at,
                "update": end - computed_at,
                "total": end - begin,
            },
        )

    def reset_optimizer(self) -> None:
        """Reset the optimizer's moments and the step count, and keep the weights; for use after mid-training."""
        self._deepspeed.reset_optimizer()
        self.steps_done = 0

    # --- state --------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the state for ``load`` into the existing, empty ``directory``. Not atomic.

        Each rank writes its own part; not a collective. Raises ``OSError``.
        """
        write_pieces(directory, self._rank, list(self._pieces(owned=True)))
        if self._rank == 0:
            steps = self._deepspeed.optimizer_steps
            write_header(directory, EngineHeader(self.steps_done, steps, self._trained_shapes()))

    def load(self, directory: Path) -> None:
        """Load the state written by ``save``, on any number of ranks, at any ZeRO stage, in any dtype.

        Raises:
            EngineError: the state is missing, is another model's, or was written by an earlier release with another number of
                ranks, ZeRO stage or dtype.
        """
        if not directory.is_dir():
            raise EngineError(f"{directory} is not a folder: there is no engine state to load")
        if not (directory / HEADER).is_file():
            self._load_native(directory)
            return
        saved = SavedState(directory)
        saved.check(self._trained_shapes())
        with self._deepspeed.restoring(saved.header.optimizer_steps):
            saved.load(self._pieces(owned=False))
        self.steps_done = saved.header.steps_done

    def close(self) -> None:
        """Remove DeepSpeed's hooks. The process group stays open."""
        self._deepspeed.close()
        if self._reference is not None:
            self._reference.close()

    # --- helpers ------------------------------------------------------------------------------------------

    def _pieces(self, *, owned: bool) -> Iterator[Piece]:
        for piece in self._deepspeed.pieces(owned=owned):
            yield replace(piece, name=piece.name.removeprefix(PREFIX))

    def _trained_shapes(self) -> dict[str, list[int]]:
        return {
            name.removeprefix(PREFIX): list(self._deepspeed.shape(parameter))
            for name, parameter in self._policy.named_parameters()
            if parameter.requires_grad
        }

    def _load_native(self, directory: Path) -> None:
        state = self._deepspeed.load_native(directory)
        own = {"world": self._world, "zero_stage": self.settings.zero_stage, "dtype": self.settings.dtype}
        found = {key: state.get(key) for key in own}
        if found != own:
            raise EngineError(
                f"an earlier release saved {directory} with {found}, but this run has {own}: resume with the same number of "
                "ranks, zeroStage and dtype until the next checkpoint"
            )
        self.steps_done = int(state["steps_done"])

    def _pack(self, sequences: Items[Sequence], batch: TrainBatch | None) -> tuple[PackedBatch, torch.Tensor]:
        return pack_shard(
            sequences,
            batch,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            shared_rows=self._shares_rows(),
            vocabulary=int(self.config.vocab_size),
            device=self.device,
        )

    def _shares_rows(self) -> bool:
        """Whether rows have several sequences: the kernel has to be made for it, and the whole model to keep them apart."""
        if not self._policy.variable_length:
            return False
        if self._separates is None:
            self._separates = self._check_rows()
        return self._separates

    def _check_rows(self) -> bool:
        """Compare two sequences in one row with the same two in the other order. A collective.

        Attention is causal, so the first sequence of a row is computed as if alone. Shapes are equal in both orders, so
        rounding is too, and a model that mixes the sequences (by a recurrence, a convolution, positions of its own) differs.
        """
        generator = torch.Generator().manual_seed(0)
        tokens = min(_CHECKED_TOKENS, self.settings.micro_batch_tokens + 2)
        lengths = (tokens * 5 // 8, tokens - tokens * 5 // 8)
        first, second = (
            Sequence(ids[:1], ids[1:])
            for ids in (
                torch.randint(int(self.config.vocab_size), (length,), generator=generator).tolist()
                for length in lengths
            )
        )
        self._policy.eval()
        with torch.no_grad():
            forth_n, _ = self._forward(one_row([first, second]), 1.0)
            back_n, _ = self._forward(one_row([second, first]), 1.0)
        there = len(second.completion)
        difference = float((forth_n - torch.cat([back_n[there:], back_n[:there]])).abs().max())
        # In units of how much log-probabilities differ among tokens, which is little in an untrained model.
        limit = _ROW_TOLERANCE[self.settings.dtype] * float(forth_n.std())
        separates = bool(gather_vectors(torch.tensor([int(difference < limit)], device=self.device)).all())
        if not separates:
            log.warning(
                "%s does not keep the sequences of one row apart (their log-probabilities depend on their order, by %.2g on "
                "rank %d): each sequence gets a row of its own, which is slower",
                self.config.model_type,
                difference,
                self._rank,
            )
        return separates

    def _micro_batches(self, packed: PackedBatch, count: int) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield ``count`` micro-batches, each with whether it is real: empty ones follow the real ones, so that all ranks run
        the same collectives."""
        for micro in packed.micro_batches:
            yield micro, True
        for _ in range(count - len(packed.micro_batches)):
            zero = torch.zeros(1, dtype=torch.long)
            yield MicroBatch(zero[None], zero[None], zero, zero, zero, zero), False

    def _forward(
        self, micro: MicroBatch, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = self._deepspeed(
            *self._inputs(micro), temperature or self.settings.temperature, True
        )
        return result

    def _inputs(self, micro: MicroBatch) -> tuple[torch.Tensor, ...]:
        inputs = (micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m)
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in inputs)

    def _reference_logprobs(self, micro: MicroBatch) -> torch.Tensor | None:
        """The reference policy's log-probability of each token, ``[M]``; None without a reference policy.

        A collective under ZeRO-3, so it is called for empty micro-batches as well.
        """
        if self._reference is None:
            return None
        logprobs_m: torch.Tensor
        logprobs_m, _ = self._reference(*self._inputs(micro), self.settings.temperature, False)
        return logprobs_m

    def _accumulate(
        self, packed: PackedBatch, batch: TrainBatch, loss: Loss, count: int
    ) -> tuple[torch.Tensor, list[str], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Run forward and backward of every micro-batch.

        Returns:
            Sums ``[2 + 2 * 5 * 8 + L]``, float64 on the device: loss, entropy, the ratio tables by position of all and of
            fresh tokens, and the L own sums of the loss.
            The names of these L sums.
            For each micro-batch, which tokens are ratio outliers, and each token's sequence.
        """
        self._policy.train()
        sums: torch.Tensor | None = None
        names: list[str] = []
        beyond: list[tuple[torch.Tensor, torch.Tensor]] = []
        for micro, real in self._micro_batches(packed, count):
            reference_m = self._reference_logprobs(micro)
            logprobs_m, entropies_m = self._forward(micro)
            tokens = self._token_batch(micro, real, batch, logprobs_m, reference_m)
            output = loss(tokens)
            self._deepspeed.backward(output.loss * self._world)
            names = sorted(output.sums)
            parts = [
                torch.stack([output.loss.detach().double(), entropies_m.double().sum()]),
                self._tables(micro, real, batch, logprobs_m, tokens.generator_logprobs_n).flatten(),
                *(output.sums[name].double().reshape(1) for name in names),
            ]
            part = torch.cat(parts)
            if real:
                beyond.append((beyond_ratio(logprobs_m, tokens.generator_logprobs_n), micro.sequence_m))
            else:
                part = torch.zeros_like(part)
            sums = part if sums is None else _add_sums(sums, part)
        if sums is None:
            raise EngineError("a batch with trainable tokens has no micro-batch")
        return sums, names, beyond

    def _token_batch(
        self,
        micro: MicroBatch,
        real: bool,
        batch: TrainBatch,
        logprobs_m: torch.Tensor,
        reference_m: torch.Tensor | None,
    ) -> TokenBatch:
        own_m = logprobs_m.detach()
        if not real:
            zeros_m = torch.zeros_like(own_m)
            sequence_m = micro.sequence_m.to(self.device)
            return TokenBatch(logprobs_m, own_m, zeros_m, zeros_m, sequence_m, reference_m, zeros_m)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, torch.float32, non_blocking=True)

        generator, teacher = batch.generator_logprobs_n, batch.teacher_logprobs_n
        _, sequence_m = torch.unique(micro.sequence_m, return_inverse=True)
        return TokenBatch(
            logprobs_m,
            own_m if generator is None else move(generator[micro.flat_m]),
            move(batch.advantages_s[micro.sequence_m]),
            move(batch.weights_s[micro.sequence_m]),
            sequence_m.to(self.device),
            reference_m,
            None if teacher is None else move(teacher[micro.flat_m]),
        )

    def _tables(
        self,
        micro: MicroBatch,
        real: bool,
        batch: TrainBatch,
        logprobs_m: torch.Tensor,
        generator_m: torch.Tensor,
    ) -> torch.Tensor:
        """Ratio tables ``[2, positions, 8]`` of all tokens and of the fresh ones."""
        position_m = micro.position_ids_bt.flatten()[micro.predict_at_m] + 1
        bucket_m = position_buckets(position_m).to(self.device)
        every = ratio_table(logprobs_m, generator_m, bucket_m, len(POSITIONS))
        if not real or batch.fresh_n is None:
            return torch.stack([every, torch.zeros_like(every)])
        fresh_m = batch.fresh_n[micro.flat_m].to(self.device)
        fresh = ratio_table(logprobs_m[fresh_m], generator_m[fresh_m], bucket_m[fresh_m], len(POSITIONS))
        return torch.stack([every, fresh])

    def _skip_reason(self, loss: float, ratios: RatioStatistics) -> str | None:
        """Why a step with these values, which are equal on all ranks, is skipped; None if it is applied."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return None if self.settings.ratio_guard is None else self.settings.ratio_guard.problem(ratios)

    def _discard_gradients(self, rate: float) -> None:
        """Discard the accumulated gradients, at every ZeRO stage.

        DeepSpeed discards them only if it skips a step itself, because of a gradient that is not finite. So this adds one.
        """
        zero = torch.zeros(1, dtype=torch.long)
        logprobs_m, _ = self._forward(MicroBatch(zero[None], zero[None], zero, zero, zero, zero))
        self._deepspeed.backward(logprobs_m.sum() * math.nan)
        if math.isfinite(self._deepspeed.step(rate)):
            raise EngineError("DeepSpeed applied an update whose gradient is not a number")

    def _buckets(
        self, bucket_bytes: int, dtype: torch.dtype
    ) -> Iterator[tuple[tuple[str, ...], list[torch.nn.Parameter]]]:
        names: list[str] = []
        parameters: list[torch.nn.Parameter] = []
        filled = 0
        for name, parameter in self._policy.named_parameters():
            # The head shares the output embedding's parameter; named_parameters gives each parameter once.
            size = math.prod(self._deepspeed.shape(parameter)) * dtype.itemsize
            if parameters and filled + size > bucket_bytes:
                yield tuple(names), parameters
                names, parameters, filled = [], [], 0
            names.append(name.removeprefix(PREFIX))
            parameters.append(parameter)
            filled += size
        if parameters:
            yield tuple(names), parameters


def _add_sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add two vectors of sums of ``_accumulate``."""
    total = left + right
    tables = slice(2, 2 + _TABLES)
    total[tables] = add_tables(left[tables].view(-1, FIELDS), right[tables].view(-1, FIELDS)).flatten()
    return total


def _ratios(rows: torch.Tensor) -> tuple[tuple[RatioStatistics, ...], tuple[RatioStatistics, ...]]:
    """Ratio statistics by position, of all tokens and of fresh ones, from all ranks' sums of ``_accumulate``."""
    total = rows[0]
    for row in rows[1:]:
        total = _add_sums(total, row)
    tables = total[2 : 2 + _TABLES].view(2, len(POSITIONS), FIELDS).tolist()
    every, fresh = (tuple(RatioStatistics(*row) for row in table) for table in tables)
    return every, fresh


def _outlier_counts(beyond: Items[tuple[torch.Tensor, torch.Tensor]]) -> dict[int, int]:
    """Number of ratio outliers by sequence."""
    found = Counter[int]()
    for beyond_m, sequence_m in beyond:
        found.update(sequence_m[beyond_m.cpu()].tolist())
    return dict(found)
