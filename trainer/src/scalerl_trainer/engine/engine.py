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
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scalerl_api.mismatch import POSITIONS
from scalerl_trainer.algo.gradient_guard import smallest_masked, squared_gradients
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
from scalerl_trainer.engine.shard import PackedShard, exchange_sizes, pack_shard
from scalerl_trainer.engine.start import StartSample
from scalerl_trainer.engine.state import EngineState
from scalerl_trainer.engine.stats import FlatLogprobs, ParameterBucket, StepStats, TrainBatch
from scalerl_trainer.errors import EngineError, ModelError
from scalerl_trainer.models.checkpoint_names import CheckpointNames
from scalerl_trainer.models.lora import PEFT, AdapterNames, Adapters, is_adapter, peft_name
from scalerl_trainer.models.policy import PREFIX, Policy
from scalerl_trainer.models.precision import buffer_dtypes, cast_parameters, check_buffer_dtypes
from scalerl_trainer.models.routing import Routing
from scalerl_trainer.models.weight_stream import WeightStream
from scalerl_trainer.packing import MicroBatch, PackedBatch, Sequence, one_row
from scalerl_trainer.ranks import RankLost
from scalerl_trainer.saved_state import (
    HEADER,
    PROXIMAL,
    EngineHeader,
    HostBuffers,
    Piece,
    SavedState,
)
from scalerl_trainer.utilization import flops_per_token

log = logging.getLogger(__name__)

_PROXIMAL_BUCKET_BYTES = 256 << 20
_CHECKED_TOKENS = 64
"""Tokens of the two sequences on which sharing of rows is checked."""
_ROW_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.03}
"""In standard deviations of the log-probabilities over tokens. Of the families of docs/models.md, those that keep sequences apart
reach 2e-2 in bfloat16 (rounding), those that mix them .14 and more."""
_TABLES = 2 * len(POSITIONS) * FIELDS
"""Elements of the two ratio tables by position: of all tokens, and of fresh ones."""


@dataclass
class _Accumulated:
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


class Engine:
    """Trains a transformers causal language model. Every method is a collective, except where noted.

    Needs an initialized process group.

    Args:
        causal_lm: the model; rank 0's weights are broadcast to the other ranks. The engine owns it from now on.
        device: of this rank.
        stored: names of the tensors in the model's files (:func:`.checkpoint_names.stored_names`).
        weights: of a model that :func:`.weight_stream.open_model` made.

    Raises:
        ModelError: on all ranks, for weights that cannot be read; on each, for a model that cannot be trained.
    """

    def __init__(
        self,
        causal_lm: Any,
        settings: EngineSettings,
        device: torch.device,
        stored: Collection[str] | None = None,
        weights: WeightStream | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise EngineError("no process group: call init_process_group first")
        self.settings = settings
        self.device = device
        self.steps_done = 0
        if settings.activation_checkpointing:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.config = causal_lm.config
        self.flops_per_token = flops_per_token(causal_lm, frozen=settings.lora is not None)
        self._adapters = self._add_adapters(causal_lm)
        self._reference_is_base = False
        buffers = buffer_dtypes(causal_lm)
        cast_parameters(causal_lm, getattr(torch, settings.dtype))
        policy = Policy(causal_lm, fp32_head=settings.fp32_head, chunk_bytes=settings.logit_chunk_bytes)
        self._policy = policy
        self._routing = Routing(causal_lm)
        self._reference: FrozenModule | None = None
        self._proximal: FrozenModule | None = None
        self._proximal_updates: int | None = None
        """Updates since the proximal policy was set; None if it was never set."""
        self._deepspeed = DeepSpeedEngine(policy, settings, device, weights)
        self.before_update: Callable[[], None] = lambda: None
        """Called before anything changes the weights; waits for what reads them on another thread."""
        self._name = {parameter: name for name, parameter in policy.named_parameters()}
        check_buffer_dtypes(causal_lm, buffers)
        every = {n.removeprefix(PREFIX): p for n, p in policy.named_parameters()}
        self._parameters = {n: p for n, p in every.items() if not is_adapter(n)}
        self._adapter_parameters = {n: p for n, p in every.items() if is_adapter(n)}
        shapes = [(name, self._deepspeed.shape(p)) for name, p in self._parameters.items()]
        self._checkpoint = CheckpointNames(causal_lm, shapes, stored)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.start: StartSample | None = None
        """Completions of the weights before the first update; on rank 0."""
        self._host = HostBuffers()
        self._separates: bool | None = None
        self._shares_rows()

    def set_reference(self, causal_lm: Any, weights: WeightStream | None = None) -> None:
        """Set the reference policy: later steps compute its log-probability of each token. It is frozen, in the policy's dtype.

        The arguments are those of the engine.

        Its activations are freed before those of the policy exist, so it costs only the memory of its parameters.
        """
        self._reference = self._frozen(causal_lm, weights)

    def set_base_as_reference(self) -> None:
        """Make the model without its adapters the reference policy, which costs no memory. Only with ``settings.lora``."""
        if self._adapters is None:
            raise EngineError("the base model is no reference without adapters: call set_reference")
        self._reference_is_base = True

    def keep_proximal(self, causal_lm: Any, weights: WeightStream | None = None) -> None:
        """Reserve the memory of a proximal policy (``algo.corrections``), whose weights ``set_proximal`` or ``load`` sets; with
        ``settings.lora`` only those of the adapters.

        Args:
            causal_lm: a model of the policy's architecture. The engine owns it from now on.
            weights: those that the model is to have; None for any.
        """
        self._add_adapters(causal_lm)
        self._proximal = self._frozen(causal_lm, weights)

    def set_proximal(self) -> None:
        """Make the current weights the proximal policy: the loss of later steps gets its log-probability of each token.

        Until the next update it is the policy itself, and its log-probabilities are not computed.
        """
        if self._proximal is None:
            raise EngineError("no proximal policy: call keep_proximal first")
        trained = [(names, [self._adapter_parameters[n] for n in names]) for names in self._adapter_groups()]
        buckets = self._buckets(_PROXIMAL_BUCKET_BYTES, getattr(torch, self.settings.dtype))
        for _, parameters in trained or buckets:
            self._proximal.copy_from([(self._name[parameter], parameter) for parameter in parameters])
        self._proximal_updates = 0

    @property
    def has_proximal(self) -> bool:
        """Whether the proximal policy is set."""
        return self._proximal_updates is not None

    # --- reading ------------------------------------------------------------------------------------------

    def parameter_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes of the parameters, in the order of ``gather_parameters``. Not a collective."""
        return [
            (name, self._deepspeed.shape(self._parameters[name]))
            for group in self._checkpoint.groups
            for name in group.parameters
        ]

    def checkpoint_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes in the model's checkpoint files, in the order of ``gather_checkpoint``. Not a collective."""
        return [item for group in self._checkpoint.groups for item in group.tensors.items()]

    def logprobs(self, sequences: Items[Sequence], *, temperature: float | None = None) -> FlatLogprobs:
        """Log-probabilities of the trainable tokens of this rank's sequences under the current weights.

        Args:
            sequences: this rank's; may be empty, and may differ in number between ranks.
            temperature: None for that of the settings.

        Raises ``SequenceTooLongError`` on every rank.
        """
        shard = self._pack(sequences, None)
        packed, counts = shard.packed, exchange_sizes(shard, self.device)
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

    def keep_start(self, sequences: Items[Sequence]) -> None:
        """Keep rank 0's ``sequences``, which the current weights sampled, to measure later ones against (:mod:`.start`)."""
        logprobs_n = self.logprobs(sequences).logprobs_n
        if self._rank == 0 and len(logprobs_n) and bool(logprobs_n.isfinite().all()):
            self.start = StartSample.of(sequences, logprobs_n, self.settings.temperature)

    def start_kl(self) -> dict[str, float]:
        """Estimates of KL(π_start ‖ π) of the current weights, on rank 0, which has ``start``; the others call ``logprobs``."""
        start = self.start
        assert start is not None
        return start.kl(self.logprobs(start.sequences, temperature=start.temperature).logprobs_n)

    def gather_parameters(
        self, bucket_bytes: int, dtype: torch.dtype | None = None
    ) -> Iterator[ParameterBucket]:
        """Yield whole parameters in buckets of at most ``bucket_bytes`` (a larger parameter is alone in its bucket).

        Names are those of the transformers model; tied parameters occur once. All ranks must exhaust the iterator together;
        no collective is in progress while a bucket is yielded. Where it is no collective (below ZeRO-3), it may be consumed on a
        thread beside a forward or backward pass, but not beside an update (``before_update``).

        Args:
            dtype: of the yielded tensors; None for the model's.
        """
        dtype = dtype or getattr(torch, self.settings.dtype)
        for names, parameters in self._buckets(bucket_bytes, dtype):
            shapes = tuple(self._deepspeed.shape(parameter) for parameter in parameters)
            tensors: tuple[torch.Tensor, ...] = ()
            adapters = [None if self._adapters is None else self._adapters.of(name) for name in names]
            needed = [p for one in adapters if one is not None for p in (one.lora_A, one.lora_B)]
            with self._deepspeed.gathered([*parameters, *needed]):
                if self._rank == 0:
                    # Under ZeRO-3 the gathered storage is freed after the block, so it is copied.
                    copy = self.settings.zero_stage == 3
                    tensors = tuple(
                        p.detach().to(dtype, copy=copy) if adapter is None else adapter.merged(dtype)
                        for p, adapter in zip(parameters, adapters, strict=True)
                    )
            yield ParameterBucket(names, shapes, dtype, tensors)

    def gather_checkpoint(self, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights one by one under the names and in the layouts of the model's checkpoint files, on rank 0.

        Other ranks yield nothing. Otherwise as :meth:`gather_parameters`: a tensor may be a view of the live parameter.
        """
        groups = iter(self._checkpoint.groups)
        for bucket in self.gather_parameters(bucket_bytes):
            parameters = dict(zip(bucket.names, bucket.tensors, strict=False))
            while parameters:
                group = next(groups)
                yield from zip(group.tensors, self._checkpoint.convert(group, parameters), strict=True)
                for name in group.parameters:
                    del parameters[name]

    def adapter_shapes(self, names: AdapterNames) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes of the adapters, in the order of ``gather_adapters``. Not a collective.

        Raises:
            ModelError: the files have the weight of a layer in another layout, so its adapter cannot be published.
        """
        parameters = self._adapter_parameters.items()
        return [(self._adapter_name(n, names), self._deepspeed.shape(p)) for n, p in parameters]

    def gather_adapters(self, names: AdapterNames) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapters one by one, on rank 0; other ranks yield nothing. A collective under ZeRO-3."""
        for group in self._adapter_groups():
            parameters = [self._adapter_parameters[name] for name in group]
            with self._deepspeed.gathered(parameters):
                whole = [p.detach().clone() for p in parameters] if self._rank == 0 else []
            yield from zip((self._adapter_name(name, names) for name in group), whole, strict=False)

    # --- training -----------------------------------------------------------------------------------------

    def pack(self, batch: TrainBatch) -> PackedShard:
        """Pack a batch for :meth:`step`. Not a collective; on any thread."""
        return self._pack(batch.sequences, batch)

    def step(
        self,
        batch: TrainBatch,
        loss: Loss,
        *,
        learning_rate: float | None = None,
        shard: PackedShard | None = None,
    ) -> StepStats:
        """Update the weights from this rank's shard of a batch.

        A batch without trainable tokens on any rank changes nothing (``applied=False``). All ranks skip a step whose loss
        or gradient is not finite or whose ratios exceed the guard; ``skipped`` has the reason. A step with tokens that would take
        its whole gradient (``algo.gradient_guard``) is computed again without them.

        Args:
            learning_rate: overrides the settings' schedule.
            shard: the batch as ``pack`` returned it; None to pack it now.

        Raises, on all ranks and before anything is applied: ``BadBatchError`` (and ``NonFiniteLogprobError``,
        ``SequenceTooLongError``).
        """
        begin = time.perf_counter()
        shard = shard or self.pack(batch)
        packed, counts = shard.packed, exchange_sizes(shard, self.device)
        micro_batches, trainable, tokens, padding, sequences = (int(c) for c in counts.sum(0)[:5])
        rate = self.settings.learning_rate_at(self.steps_done) if learning_rate is None else learning_rate
        if trainable == 0:
            seconds = {"total": time.perf_counter() - begin}
            return StepStats(
                self.steps_done, False, 0.0, 0.0, rate, 0.0, 0, 0, 0, sequences, 0, None, seconds=seconds
            )
        packed_at = time.perf_counter()
        rounds = int(counts[:, 0].max())
        done = self._accumulate(packed, batch, loss, rounds)
        rows = gather_vectors(done.sums)
        every, fresh = _ratios(rows)
        ratios = sum(every, RatioStatistics())
        skipped = self._skip_reason(float(rows[:, 0].sum()), ratios)
        masked = 0
        if skipped is None:
            masked_n, masked = self._masked(done, trainable)
        waited = 0.0
        if masked:
            waited = self._wait_to_update()
            # Gradients cannot be subtracted: the masked tokens' are so much larger that the others' are rounded away.
            self._discard_gradients(rate)
            done = self._accumulate(packed, batch, loss, rounds, masked_n)
            rows = gather_vectors(done.sums)
            skipped = self._skip_reason(float(rows[:, 0].sum()), ratios)
        computed_at = time.perf_counter()
        update_waited = self._wait_to_update()
        total, routing = rows.sum(0), 2 + _TABLES + len(done.names)
        sampled = batch.generator_logprobs_n is not None
        known = bool(counts[:, 6].any())
        gradient_norm, gradient_norms = math.nan, dict[str, float]()
        if skipped is None:
            gradient_norm = self._deepspeed.step(rate)
            if math.isfinite(gradient_norm):
                gradient_norms = self._deepspeed.gradient_norms(gradient_norm)
            else:
                skipped = f"the gradient norm is {gradient_norm}"
        else:
            self._discard_gradients(rate)
        end = time.perf_counter()
        step = self.steps_done
        self.steps_done += skipped is None
        if self._proximal_updates is not None:
            self._proximal_updates += skipped is None
        return StepStats(
            step=step,
            applied=skipped is None,
            skipped=skipped or "",
            broken=_outlier_counts(done.beyond) if skipped else {},
            guard_masked_tokens=masked,
            loss=float(total[0]),
            gradient_norm=gradient_norm,
            gradient_norms=gradient_norms,
            learning_rate=rate,
            entropy=float(total[1]) / trainable,
            trainable_tokens=trainable,
            tokens=tokens,
            padding=padding,
            sequences=sequences,
            micro_batches=micro_batches,
            ratios=ratios if sampled else None,
            differences_n=done.differences_n if sampled else None,
            ratios_by_position=every if sampled else (),
            fresh_ratios_by_position=fresh if known else (),
            loss_means={
                name: float(value) / trainable
                for name, value in zip(done.names, total[2 + _TABLES : routing], strict=True)
            },
            routing=self._routing.figures(total[routing:], trainable),
            seconds={
                "pack": packed_at - begin,
                "compute": computed_at - packed_at - waited,
                "wait": waited + update_waited,
                "update": end - computed_at - update_waited,
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
        self._state(list(self._owned_with_proximal())).write(directory)

    def copy_state(self) -> EngineState:
        """Copy this rank's part of the state to the host, to be written while training continues; until the next copy.

        Not a collective. Raises ``RuntimeError`` if the host has not enough memory.
        """
        return self._state(self._host.copy(self._owned_with_proximal()))

    def _state(self, pieces: list[Piece]) -> EngineState:
        header = None
        if self._rank == 0:
            steps = self._deepspeed.optimizer_steps
            header = EngineHeader(self.steps_done, steps, self._trained_shapes(), self.settings.lora)
        return EngineState(self._rank, pieces, header, self.start)

    def load(self, directory: Path) -> None:
        """Load the state written by ``save``, on any number of ranks, at any ZeRO stage, in any dtype.

        Raises:
            EngineError: the state is missing, or is another model's.
        """
        if not (directory / HEADER).is_file():
            raise EngineError(f"{directory / HEADER} is not a file: there is no engine state to load")
        saved = SavedState(directory)
        saved.check(self._trained_shapes(), self.settings.lora)
        self.before_update()
        with self._deepspeed.restoring(saved.header.optimizer_steps):
            saved.load(self._pieces(owned=False))
        if self._proximal is not None and saved.has(PROXIMAL):
            for name, start, flat in self._proximal.parts():
                if (parameter := name.removeprefix(PREFIX)) in saved.header.parameters:  # others are frozen
                    saved.read(parameter, PROXIMAL, start, flat)
            self._proximal_updates = 1
        self.steps_done = saved.header.steps_done
        if self._rank == 0:
            self.start = StartSample.load(directory, self.settings.micro_batch_tokens)

    def close(self) -> None:
        """Remove DeepSpeed's hooks. The process group stays open."""
        self._deepspeed.close()
        for frozen in (self._reference, self._proximal):
            if frozen is not None:
                frozen.close()

    # --- helpers ------------------------------------------------------------------------------------------

    def _wait_to_update(self) -> float:
        """Seconds until the weights may change."""
        begin = time.perf_counter()
        self.before_update()
        return time.perf_counter() - begin

    def _add_adapters(self, causal_lm: Any) -> Adapters | None:
        lora = self.settings.lora
        return None if lora is None else Adapters(causal_lm, lora, self.settings.seed)

    def _adapter_name(self, parameter: str, names: AdapterNames) -> str:
        if names == PEFT:
            return peft_name(parameter)
        layer, _, which = parameter.rpartition(".")
        stored = self._checkpoint.stored_alone(f"{layer}.weight")
        if stored is None:
            raise ModelError(
                f"trainer.lora.publish: Adapter: {self.config.model_type} has {layer}.weight in another layout in its files: "
                "publish Merged, or leave it out of targetModules"
            )
        return f"{stored}/{which}"

    def _adapter_groups(self) -> list[tuple[str, ...]]:
        """Names of A and B of each layer."""
        names = list(self._adapter_parameters)
        return list(zip(names[::2], names[1::2], strict=True))

    def _frozen(self, causal_lm: Any, weights: WeightStream | None = None) -> FrozenModule:
        buffers = buffer_dtypes(causal_lm)
        cast_parameters(causal_lm, getattr(torch, self.settings.dtype))
        policy = Policy(
            causal_lm, fp32_head=self.settings.fp32_head, chunk_bytes=self.settings.logit_chunk_bytes
        )
        frozen = FrozenModule(policy.eval(), self.settings, self.device, weights)
        check_buffer_dtypes(causal_lm, buffers)
        return frozen

    def _pieces(self, *, owned: bool) -> Iterator[Piece]:
        for piece in self._deepspeed.pieces(owned=owned):
            yield replace(piece, name=piece.name.removeprefix(PREFIX))

    def _owned_with_proximal(self) -> Iterator[Piece]:
        """The pieces that this rank owns; with the proximal policy's values while they differ from the weights."""
        for piece in self._deepspeed.pieces(owned=True):
            name = piece.name.removeprefix(PREFIX)
            values = piece.values
            if self._proximal is not None and self._proximal_updates:
                count = values["weight"].numel()
                values = values | {PROXIMAL: self._proximal.part(piece.name, piece.start, count)}
            yield replace(piece, name=name, values=values)

    def _trained_shapes(self) -> dict[str, list[int]]:
        return {
            name.removeprefix(PREFIX): list(self._deepspeed.shape(parameter))
            for name, parameter in self._policy.named_parameters()
            if parameter.requires_grad
        }

    def _pack(self, sequences: Items[Sequence], batch: TrainBatch | None) -> PackedShard:
        return pack_shard(
            sequences,
            batch,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            shared_rows=self._shares_rows(),
            vocabulary=int(self.config.vocab_size),
            pinned=self.device.type == "cuda",
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

    def _frozen_logprobs(self, frozen: FrozenModule | None, micro: MicroBatch) -> torch.Tensor | None:
        """A frozen policy's log-probability of each token, ``[M]``; None without one.

        A collective under ZeRO-3, so it is called for empty micro-batches as well.
        """
        if frozen is None:
            return None
        logprobs_m: torch.Tensor
        logprobs_m, _ = frozen(*self._inputs(micro), self.settings.temperature, False)
        return logprobs_m

    def _reference_logprobs(self, micro: MicroBatch) -> torch.Tensor | None:
        """As :meth:`_frozen_logprobs`, of the reference."""
        if self._adapters is None or not self._reference_is_base:
            return self._frozen_logprobs(self._reference, micro)
        with self._adapters.off(), torch.no_grad():
            return self._forward(micro)[0]

    def _accumulate(
        self,
        packed: PackedBatch,
        batch: TrainBatch,
        loss: Loss,
        count: int,
        masked_n: torch.Tensor | None = None,
    ) -> _Accumulated:
        """Run forward and backward of every micro-batch.

        Args:
            masked_n: bool, tokens whose weight is 0; None for none.
        """
        self._policy.train()
        done: _Accumulated | None = None
        proximal = self._proximal if self._proximal_updates else None
        ordinary = torch.zeros((), dtype=torch.float64, device=self.device)
        outliers_n = torch.zeros(packed.trainable, dtype=torch.float64, device=self.device)
        differences_n = torch.zeros(packed.trainable, device=self.device)
        for micro, real in self._micro_batches(packed, count):
            reference_m = self._reference_logprobs(micro)
            proximal_m = self._frozen_logprobs(proximal, micro)
            with self._routing.counted(micro.predict_at_m if real else None):
                logprobs_m, entropies_m = self._forward(micro)
            tokens = self._token_batch(micro, real, batch, logprobs_m, reference_m, proximal_m)
            if masked_n is not None and real:
                masked_m = masked_n[micro.flat_m].to(self.device)
                tokens = replace(tokens, weights_n=tokens.weights_n.masked_fill(masked_m, 0.0))
            output = loss(tokens)
            # The derivative by log-probabilities, computed apart from that through the model.
            (gradient_m,) = torch.autograd.grad(output.loss, tokens.logprobs_n)
            if real and self.settings.gradient_guard is not None:
                found = squared_gradients(tokens, gradient_m)
                ordinary += found.ordinary
                outliers_n[micro.flat_m.to(self.device)] = found.outliers_n
            self._deepspeed.backward((logprobs_m * gradient_m).sum() * self._world)
            names = sorted(output.sums)
            parts = [
                torch.stack([output.loss.detach().double(), entropies_m.double().sum()]),
                self._tables(micro, real, batch, logprobs_m, tokens.generator_logprobs_n).flatten(),
                *(output.sums[name].double().reshape(1) for name in names),
            ]
            part = torch.cat(parts) if real else torch.zeros_like(torch.cat(parts))
            if done is None:
                done = _Accumulated(part, differences_n, names)
            else:
                done.sums = _add_sums(done.sums, part)
            if real:
                difference_m = (logprobs_m.detach() - tokens.generator_logprobs_n).float()
                differences_n[micro.flat_m.to(self.device)] = difference_m
                done.beyond.append((beyond_ratio(logprobs_m, tokens.generator_logprobs_n), micro.sequence_m))
        if done is None:
            raise EngineError("a batch with trainable tokens has no micro-batch")
        done.sums = torch.cat([done.sums, self._routing.take(self.device)])
        if self.settings.gradient_guard is not None:
            done.ordinary, done.outliers_n = ordinary, outliers_n
        return done

    def _masked(self, done: _Accumulated, trainable: int) -> tuple[torch.Tensor | None, int]:
        """Which of this rank's tokens ``algo.gradient_guard`` masks, bool ``[N]``, None if none of any rank; and their number,
        over all ranks. A collective."""
        guard = self.settings.gradient_guard
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
        head = torch.tensor([len(own), float(own_n[~large_n].sum())], dtype=torch.float64, device=self.device)
        heads = gather_vectors(head).tolist()
        longest = max(int(count) for count, _ in heads)
        if not 0 < longest <= trainable:
            raise RankLost(f"a rank announces {longest} outliers of {trainable} tokens")
        padded = torch.zeros(longest, dtype=torch.float64, device=self.device)
        padded[: len(own)] = own.to(self.device)
        squares = gather_vectors(padded).tolist()
        rest = ordinary + sum(small for _, small in heads)
        every = [
            square for row, (count, _) in zip(squares, heads, strict=True) for square in row[: int(count)]
        ]
        smallest = smallest_masked(every, rest)
        if smallest is None:
            return None, 0
        return own_n >= smallest, sum(square >= smallest for square in every)

    def _token_batch(
        self,
        micro: MicroBatch,
        real: bool,
        batch: TrainBatch,
        logprobs_m: torch.Tensor,
        reference_m: torch.Tensor | None,
        proximal_m: torch.Tensor | None,
    ) -> TokenBatch:
        """The tokens, with log-probabilities that are a leaf of the loss's graph."""
        own_m = logprobs_m.detach()
        leaf_m = own_m.clone().requires_grad_()
        if not real:
            zeros_m = torch.zeros_like(own_m)
            sequence_m = micro.sequence_m.to(self.device)
            return TokenBatch(leaf_m, own_m, zeros_m, zeros_m, sequence_m, reference_m, zeros_m, proximal_m)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, torch.float32, non_blocking=True)

        generator, teacher = batch.generator_logprobs_n, batch.teacher_logprobs_n
        by_token = batch.advantages_n
        _, sequence_m = torch.unique(micro.sequence_m, return_inverse=True)
        return TokenBatch(
            leaf_m,
            own_m if generator is None else move(generator[micro.flat_m]),
            move(batch.advantages_s[micro.sequence_m] if by_token is None else by_token[micro.flat_m]),
            move(batch.weights_s[micro.sequence_m]),
            sequence_m.to(self.device),
            reference_m,
            None if teacher is None else move(teacher[micro.flat_m]),
            proximal_m,
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
        """Parameters in buckets that divide no group of ``CheckpointNames``."""
        names: list[str] = []
        filled = 0
        for group in self._checkpoint.groups:
            # The head shares the output embedding's parameter, which occurs once.
            elements = sum(math.prod(self._deepspeed.shape(self._parameters[n])) for n in group.parameters)
            size = elements * dtype.itemsize
            if names and filled + size > bucket_bytes:
                yield tuple(names), [self._parameters[n] for n in names]
                names, filled = [], 0
            names += group.parameters
            filled += size
        if names:
            yield tuple(names), [self._parameters[n] for n in names]


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
