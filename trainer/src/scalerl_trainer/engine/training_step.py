"""The engine: updates (pack, forward, loss, backward, optimizer), scoring, gathering of whole parameters, saved state.

The gradient does not depend on the split over ranks and micro-batches. The weights of ``algo.aggregation`` include the
normalization of the whole batch, so the batch's loss is the sum of the losses of all micro-batches on all ranks.
The :class:`.backend.Backend` averages gradients over ranks; each loss is multiplied by the number of ranks to obtain the sum.

All ranks exchange their errors before anything is applied, and raise together.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scalerl_trainer.algo.losses import Loss
from scalerl_trainer.algo.mismatch import RatioStatistics
from scalerl_trainer.engine.attention import choose_attention
from scalerl_trainer.engine.backend import Frozen, open_backend, open_frozen
from scalerl_trainer.engine.computed_step import Computed, Update, step_stats
from scalerl_trainer.engine.distributed import exchange_sizes, gather_vectors
from scalerl_trainer.engine.passes import Passes, ratios_of
from scalerl_trainer.engine.proximal import Proximal
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.engine.start_checks import StartChecks
from scalerl_trainer.engine.start_kl import StartSample
from scalerl_trainer.engine.state import EngineState, TrainedState
from scalerl_trainer.engine.stats import FlatLogprobs, StepStats
from scalerl_trainer.engine.weights import Weights
from scalerl_trainer.errors import EngineError
from scalerl_trainer.models import varlen
from scalerl_trainer.models.head import kernels_failure
from scalerl_trainer.models.lora import Adapters
from scalerl_trainer.models.policy import Policy
from scalerl_trainer.models.precision import buffer_dtypes, cast_parameters, check_buffer_dtypes
from scalerl_trainer.models.router_replay import RouterReplay
from scalerl_trainer.models.routing import Routing
from scalerl_trainer.models.weight_stream import WeightStream
from scalerl_trainer.packing import MicroBatch, Sequence
from scalerl_trainer.train_batch import PackedShard, TrainBatch, pack_shard
from scalerl_trainer.utilization import flops_per_token

log = logging.getLogger(__name__)

_PROXIMAL_BUCKET_BYTES = 256 << 20


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
        buffers = buffer_dtypes(causal_lm)
        cast_parameters(causal_lm, getattr(torch, settings.dtype))
        self._policy = policy = Policy(
            causal_lm, fp32_head=settings.fp32_head, chunk_bytes=settings.logit_chunk_bytes
        )
        self._proximal: Proximal | None = None
        replay = RouterReplay(causal_lm) if settings.router_replay else None
        routing = Routing(causal_lm)  # its hooks run before those of the backend
        self._backend = open_backend(policy, settings, device, weights)
        self.before_update: Callable[[], None] = lambda: None
        """Called before anything changes the weights; waits for what reads them on another thread."""
        self._waited = {"wait": 0.0, "copy": 0.0}
        """Seconds since the last step until the weights might change: ``wait`` for ``before_update``, ``copy`` for a copy of the state."""
        check_buffer_dtypes(causal_lm, buffers)
        self._name = {parameter: name for name, parameter in policy.named_parameters()}
        dtype = getattr(torch, settings.dtype)
        self.weights = Weights(self._backend, policy, dtype, self._adapters, stored)
        """The policy's parameters, whole."""
        self._passes = Passes(self._backend, policy, settings, device, self._adapters, routing, replay)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._checks = StartChecks(self._passes, policy, settings, device, self._rank)
        self.start: StartSample | None = None
        """Completions of the weights before the first update; on rank 0."""
        self._trained = TrainedState(self._backend, policy, settings, self._rank, device)
        choose_attention(policy, self._checks, dtype, device, self._rank)
        if device.type == "cuda" and settings.fp32_head and dtype == torch.bfloat16:
            failure = kernels_failure(device)
            if self._rank == 0:
                log.info("output head: Triton kernels%s", f" are not used: {failure}" if failure else "")

    def set_reference(self, causal_lm: Any, weights: WeightStream | None = None) -> None:
        """Set the reference policy: later steps compute its log-probability of each token. It is frozen, in the policy's dtype.

        The arguments are those of the engine.

        Its activations are freed before those of the policy exist, so it costs only the memory of its parameters.
        """
        self._passes.reference = self._frozen(causal_lm, weights)

    def set_base_as_reference(self) -> None:
        """Make the model without its adapters the reference policy, which costs no memory. Only with ``settings.lora``."""
        if self._adapters is None:
            raise EngineError("the base model is no reference without adapters: call set_reference")
        self._passes.reference_is_base = True

    def keep_proximal(self, causal_lm: Any, weights: WeightStream | None = None) -> None:
        """Reserve the memory of a proximal policy (``algo.corrections``), whose weights ``set_proximal`` or ``load`` sets; with
        ``settings.lora`` only those of the adapters.

        Args:
            causal_lm: a model of the policy's architecture. The engine owns it from now on.
            weights: those that the model is to have; None for any.
        """
        self._add_adapters(causal_lm)
        if self._passes.replay is not None:
            self._passes.replay.attach(causal_lm)
        self._proximal = Proximal(self._frozen(causal_lm, weights))

    def set_proximal(self) -> None:
        """Make the current weights the proximal policy: the loss of later steps gets its log-probability of each token.

        Until the next update it is the policy itself, and its log-probabilities are not computed.
        """
        if self._proximal is None:
            raise EngineError("no proximal policy: call keep_proximal first")
        self._wait("copy", self._trained.finish_copy)  # it may have the values that are replaced here
        adapters = self.weights.adapters
        trained = [(names, [adapters[n] for n in names]) for names in self.weights.adapter_groups()]
        buckets = self.weights.buckets(_PROXIMAL_BUCKET_BYTES, getattr(torch, self.settings.dtype))
        self._proximal.set([(self._name[p], p) for p in parameters] for _, parameters in trained or buckets)

    @property
    def has_proximal(self) -> bool:
        """Whether the proximal policy is set."""
        return self._proximal is not None and self._proximal.updates is not None

    # --- reading ------------------------------------------------------------------------------------------

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
        self._policy.eval()
        with torch.no_grad():
            for micro, real in self._passes.micro_batches(packed, int(counts[:, 0].max())):
                logprobs_m, _ = self._passes.forward(micro, temperature)
                if real:
                    logprobs_n[micro.flat_m] = logprobs_m.cpu()
        return FlatLogprobs(logprobs_n, packed.trainable_s)

    def keep_start(self, sequences: Items[Sequence]) -> None:
        """Keep rank 0's ``sequences``, which the current weights sampled, to measure later ones against (:mod:`.start_kl`)."""
        logprobs_n = self.logprobs(sequences).logprobs_n
        if self._rank == 0 and len(logprobs_n) and bool(logprobs_n.isfinite().all()):
            self.start = StartSample.of(sequences, logprobs_n, self.settings.temperature)

    def start_kl(self) -> dict[str, float]:
        """Estimates of KL(π_start ‖ π) of the current weights, on rank 0, which has ``start``; the others call ``logprobs``."""
        start = self.start
        assert start is not None
        return start.kl(self.logprobs(start.sequences, temperature=start.temperature).logprobs_n)

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
        begin, waited_before = time.perf_counter(), sum(self._waited.values())
        shard = shard or self.pack(batch)
        counts = exchange_sizes(shard, self.device)
        rate = self.settings.learning_rate_at(self.steps_done) if learning_rate is None else learning_rate
        if not counts[:, 1].any():
            sequences = int(counts[:, 4].sum())
            seconds = {"total": time.perf_counter() - begin}
            return StepStats(
                self.steps_done, False, 0.0, 0.0, rate, 0.0, 0, 0, 0, sequences, 0, None, seconds=seconds
            )
        packed_at = time.perf_counter()
        computed = self._compute(batch, loss, shard, counts)
        computed_at, computing_waited = time.perf_counter(), sum(self._waited.values()) - waited_before
        self._wait_to_update()
        waited_at = time.perf_counter()
        update = self._update(rate, computed.skipped)
        end = time.perf_counter()
        waited, self._waited = self._waited, dict.fromkeys(self._waited, 0.0)
        return step_stats(
            computed,
            update,
            step=self._count_step(update),
            learning_rate=rate,
            batch=batch,
            counts=counts,
            routing=self._passes.routing,
            replays=self._passes.replay is not None,
            seconds={
                "pack": packed_at - begin,
                "compute": computed_at - packed_at - computing_waited,
                **waited,
                "update": end - waited_at,
                "total": end - begin,
            },
        )

    def _compute(self, batch: TrainBatch, loss: Loss, shard: PackedShard, counts: torch.Tensor) -> Computed:
        """Forward and backward of the batch; again without the tokens that ``algo.gradient_guard`` masks, if there are some."""
        accumulate = partial(
            self._passes.accumulate,
            shard.packed,
            batch,
            loss,
            int(counts[:, 0].max()),
            proximal=None if self._proximal is None else self._proximal.differing,
        )
        done = accumulate()
        rows = gather_vectors(done.sums)
        every, fresh = ratios_of(rows)
        ratios = sum(every, RatioStatistics())
        computed = Computed(done, rows, every, fresh, ratios, self._skip_reason(rows, ratios))
        if computed.skipped is not None:
            return computed
        masked_n, masked = self._passes.masked(done, int(counts[:, 1].sum()))
        if not masked:
            return computed
        self._wait_to_update()
        # Gradients cannot be subtracted: the masked tokens' are so much larger that the others' are rounded away.
        self._discard_gradients()
        done = accumulate(masked_n=masked_n)
        rows = gather_vectors(done.sums)
        skipped = self._skip_reason(rows, ratios)
        return replace(computed, done=done, rows=rows, skipped=skipped, masked=masked)

    def _update(self, rate: float, skipped: str | None) -> Update:
        """Apply the gradients, or discard them if the step is ``skipped``."""
        if skipped is not None:
            self._discard_gradients()
            return Update(skipped)
        norm = self._backend.step(rate)
        if not math.isfinite(norm):
            return Update(f"the gradient norm is {norm}", norm)
        return Update(None, norm, self._backend.gradient_norms(norm))

    def _count_step(self, update: Update) -> int:
        """Count an update that was applied. Returns the number before it."""
        step = self.steps_done
        if update.skipped is None:
            self.steps_done += 1
            if self._proximal is not None and self._proximal.updates is not None:
                self._proximal.updates += 1
        return step

    def reset_optimizer(self) -> None:
        """Reset the optimizer's moments and the step count, and keep the weights; for use after mid-training."""
        self._wait_to_update()
        self._backend.reset_optimizer()
        self.steps_done = 0

    # --- state --------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the state for ``load`` into the existing, empty ``directory``. Not atomic.

        Each rank writes its own part; not a collective. Raises ``OSError``.
        """
        self._trained.views(self.steps_done, self.start, self._proximal).write(directory)

    def copy_state(self) -> EngineState:
        """Start to copy this rank's part of the state to the host, to be written while training continues; until the next copy.

        The next update waits for the copy. Not a collective.
        """
        return self._trained.copy(self.steps_done, self.start, self._proximal)

    def load(self, directory: Path) -> None:
        """Load the state written by ``save``, on any number of ranks, at any ZeRO stage, by any engine, in any dtype.

        Raises:
            EngineError: the state is missing, or is another model's.
        """
        self._wait_to_update()
        self.steps_done = self._trained.restore(directory, self._proximal)
        if self._rank == 0:
            self.start = StartSample.load(directory, self.settings.micro_batch_tokens)

    def close(self) -> None:
        """Remove the backend's hooks. The process group stays open."""
        self._backend.close()
        for frozen in (self._passes.reference, self._proximal):
            if frozen is not None:
                frozen.close()

    # --- helpers ------------------------------------------------------------------------------------------

    def _wait_to_update(self) -> None:
        """Wait until weights and optimizer state may change."""
        self._wait("wait", self.before_update)
        self._wait("copy", self._trained.finish_copy)

    def _wait(self, name: str, wait: Callable[[], None]) -> None:
        begin = time.perf_counter()
        wait()
        self._waited[name] += time.perf_counter() - begin

    def _add_adapters(self, causal_lm: Any) -> Adapters | None:
        lora = self.settings.lora
        return None if lora is None else Adapters(causal_lm, lora, self.settings.seed)

    def _frozen(self, causal_lm: Any, weights: WeightStream | None = None) -> Frozen:
        buffers = buffer_dtypes(causal_lm)
        cast_parameters(causal_lm, getattr(torch, self.settings.dtype))
        if self.config._attn_implementation == varlen.NAME:
            varlen.use(causal_lm.config)
        policy = Policy(
            causal_lm, fp32_head=self.settings.fp32_head, chunk_bytes=self.settings.logit_chunk_bytes
        )
        frozen = open_frozen(policy.eval(), self.settings, self.device, weights)
        check_buffer_dtypes(causal_lm, buffers)
        return frozen

    def _pack(self, sequences: Items[Sequence], batch: TrainBatch | None) -> PackedShard:
        return pack_shard(
            sequences,
            batch,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            shared_rows=self._checks.shares_rows(),
            shared_prompts=self._checks.shares_prompts(),
            vocabulary=int(self.config.vocab_size),
            pinned=self.device.type == "cuda",
            replay=self._passes.replay,
        )

    def _skip_reason(self, rows: torch.Tensor, ratios: RatioStatistics) -> str | None:
        """Why a step with these sums and ratios, which are equal on all ranks, is skipped; None if it is applied."""
        loss = float(rows[:, 0].sum())
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return None if self.settings.ratio_guard is None else self.settings.ratio_guard.problem(ratios)

    def _discard_gradients(self) -> None:
        zero = torch.zeros(1, dtype=torch.long)
        empty = MicroBatch(zero[None], zero[None], zero, zero, zero, zero)
        self._backend.discard(lambda: self._passes.forward(empty)[0])
