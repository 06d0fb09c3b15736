"""Derives the settings of the trainer's components from the run's spec."""

from __future__ import annotations

import torch

from scalerl_api.fields import quantity_bytes
from scalerl_api.recipe import LossSpec, RecipeSpec
from scalerl_api.registry import Kind, make
from scalerl_api.spec import RunSpec
from scalerl_trainer.algo.corrections import Corrected, OffPolicyMasked
from scalerl_trainer.algo.distillation import Distilled
from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import Cispo, Dppo, Gspo, Loss, PpoClip, Reinforce
from scalerl_trainer.engine import EngineSettings
from scalerl_trainer.models.lora import Lora
from scalerl_trainer.publish.group_publisher import PublishSettings
from scalerl_trainer.publish.publisher import MAX_TIMEOUTS, WRITE_TIMEOUTS

MIN_COLLECTIVE_SECONDS = 600.0


def engine_settings(spec: RunSpec) -> EngineSettings:
    """Settings of the engine. Raises ``EngineError`` for combinations that cannot be trained."""
    recipe, optimizer, trainer = spec.recipe, spec.recipe.optimizer, spec.trainer
    return EngineSettings(
        engine=trainer.engine,
        zero_stage=trainer.zero_stage,
        offload=trainer.offload,
        dtype=spec.model.dtype,
        learning_rate=float(optimizer.learning_rate),
        betas=(float(optimizer.beta1), float(optimizer.beta2)),
        epsilon=float(optimizer.epsilon),
        weight_decay=float(optimizer.weight_decay),
        warmup_steps=optimizer.warmup_steps,
        max_gradient_norm=float(optimizer.max_gradient_norm),
        micro_batch_tokens=spec.micro_batch_tokens,
        temperature=float(recipe.temperature),
        activation_checkpointing=trainer.activation_checkpointing,
        fp32_head=recipe.fp32_logits in ("Both", "Trainer"),
        lora=Lora.of(spec),
        seed=spec.seed,
    )


def collective_timeout_seconds(spec: RunSpec) -> float:
    """Timeout of every collective of the default process group, after which NCCL's watchdog ends the process.

    An update waits on each rank until a publish has read the weights, at most :func:`publish_limit_seconds`, and the ranks need
    not begin to wait at the same time.
    """
    return max(MIN_COLLECTIVE_SECONDS, publish_limit_seconds(spec) + 60.0)


def publish_limit_seconds(spec: RunSpec) -> float:
    """Bound on the time until a publish no longer reads the weights: a member that is lost late in its last attempt adds one
    timeout."""
    timeouts = WRITE_TIMEOUTS if spec.weight_backend == "files" else MAX_TIMEOUTS
    return (timeouts + 1) * spec.weight_sync.timeout_seconds


def make_loss(recipe: RecipeSpec) -> Loss:
    """The loss of ``recipe.loss`` with ``recipe.kl``, both weighted by ``recipe.correction``.

    ``recipe.offPolicyMask`` comes before the correction, because it compares with the policy that sampled; and the advantages of
    ``recipe.distillation`` before both, because they do too, and the mask depends on their sign.
    """
    loss = _corrected(recipe)
    if recipe.off_policy_mask is not None:
        loss = OffPolicyMasked(loss, float(recipe.off_policy_mask.max_kl))
    distillation = recipe.distillation
    return loss if distillation is None else Distilled(loss, float(distillation.coefficient))


def _corrected(recipe: RecipeSpec) -> Loss:
    loss, correction = _loss(recipe.loss), recipe.correction
    penalty = recipe.kl.penalty
    if penalty is not None:
        loss = WithKl(loss, penalty.estimator, float(penalty.coefficient))
    if (truncated := correction.truncated) is not None:
        return Corrected(loss, float(truncated.cap), "truncate", truncated.level)
    if (masked := correction.masked) is not None:
        return Corrected(loss, float(masked.cap), "mask", masked.level, float(masked.floor))
    return loss


def _loss(spec: LossSpec) -> Loss:
    if spec.cispo is not None:
        return Cispo(float(spec.cispo.ratio_cap))
    if spec.ppo_clip is not None:
        return PpoClip(
            float(spec.ppo_clip.clip_low), float(spec.ppo_clip.clip_high), _number(spec.ppo_clip.dual_clip)
        )
    if spec.gspo is not None:
        return Gspo(float(spec.gspo.clip_low), float(spec.gspo.clip_high))
    if spec.reinforce is not None:
        return Reinforce()
    if spec.dppo is not None:
        return Dppo(float(spec.dppo.threshold), float(spec.dppo.ratio_cap))
    if spec.plugin is not None:
        made: Loss = make(Kind.LOSS, spec.plugin.name, spec.plugin.parameters)
        return made
    raise AssertionError("a parsed recipe has a loss")


def _number(value: str | None) -> float | None:
    return None if value is None else float(value)


def publish_settings(spec: RunSpec, host: str, device: torch.device) -> PublishSettings:
    """Settings of a publisher with a process group. ``host``: address of this process for the actors."""
    backend = spec.weight_backend
    assert backend != "files"
    return PublishSettings(
        host=host,
        backend=backend,
        bucket_bytes=quantity_bytes(spec.weight_sync.bucket),
        timeout_seconds=float(spec.weight_sync.timeout_seconds),
        workers_per_member=spec.generator.workers,
        device=device if backend == "nccl" else torch.device("cpu"),
    )
