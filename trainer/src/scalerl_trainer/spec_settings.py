"""Settings of the engine, and the timeout of collectives, from the run's spec."""

from __future__ import annotations

from scalerl_api.spec import RunSpec
from scalerl_trainer.engine import EngineSettings
from scalerl_trainer.models.lora import Lora
from scalerl_trainer.publish.publisher_of_backend import publish_limit_seconds

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
        router_replay=trainer.router_replay,
    )


def collective_timeout_seconds(spec: RunSpec) -> float:
    """Timeout of every collective of the default process group, after which NCCL's watchdog ends the process.

    An update waits on each rank until a publish has read the weights, at most :func:`publish_limit_seconds`, and the ranks need
    not begin to wait at the same time.
    """
    return max(MIN_COLLECTIVE_SECONDS, publish_limit_seconds(spec) + 60.0)
