"""Settings of the engine, from the run's spec."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from scalerl_api.engines import ENGINES, EngineName, Offload
from scalerl_api.memory.model_size import Dtype
from scalerl_api.spec import RunSpec
from scalerl_trainer.algo.gradient_guard import GradientGuard
from scalerl_trainer.algo.mismatch import RatioGuard
from scalerl_trainer.errors import EngineError
from scalerl_trainer.models.files import weights_digest
from scalerl_trainer.models.lora import Lora


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The optimizer's defaults are ScaleRL's (arXiv 2510.13786 [P]): AdamW with a constant learning rate of 5e-7 after a
    linear warm-up of 100 steps, ε 1e-15, weight decay 0.01. The betas are PyTorch's defaults; the paper does not give its
    own [?].
    """

    engine: EngineName = "DeepSpeed"
    zero_stage: int = 1
    offload: Offload = "None"
    """What is in the host's memory and is updated there. On a CPU everything is, but the engine does the same."""
    dtype: Dtype = "bfloat16"
    learning_rate: float = 5e-7
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-15
    weight_decay: float = 0.01
    warmup_steps: int = 100
    max_gradient_norm: float = 1.0
    """Clipping threshold of the global gradient norm; 0 for no clipping."""
    micro_batch_tokens: int = 16384
    """Maximum of tokens in one forward pass, and therefore of prompt plus completion."""
    temperature: float = 1.0
    """The generator's sampling temperature: log-probabilities are those of logits / temperature."""
    activation_checkpointing: bool = False
    fp32_head: bool = True
    """Compute the LM head in float32."""
    logit_chunk_bytes: int | None = None
    """Memory of the logits that are computed at a time; None to choose by device."""
    ratio_guard: RatioGuard | None = field(default_factory=RatioGuard)
    """Skips steps whose importance ratios explode; None for no guard."""
    gradient_guard: GradientGuard | None = field(default_factory=GradientGuard)
    """Masks tokens that would take the whole gradient of a step; None for no guard."""

    lora: Lora | None = None
    """Train adapters and keep the model's own weights; None to train the weights."""
    base: str = ""
    """With adapters, :func:`.models.files.weights_digest` of the model that they are of; empty if it is not known."""
    seed: int = 0
    """Of the adapters' first values."""
    router_replay: bool = False
    """Compute with the experts that the generator recorded (:mod:`.models.router_replay`)."""

    def __post_init__(self) -> None:
        implied = ENGINES[self.engine]
        if self.zero_stage not in (0, 1, 2, 3):
            raise EngineError(f"ZeRO stage {self.zero_stage} does not exist: choose 0, 1, 2 or 3")
        if implied.partitions_all and self.zero_stage != 3:
            raise EngineError(
                f"{self.engine} partitions all state, as ZeRO stage 3: choose 3, not {self.zero_stage}"
            )
        if self.offload != "None" and self.zero_stage != 3:
            raise EngineError(f"offload needs ZeRO stage 3, not {self.zero_stage}")
        if self.offload not in ("None", *implied.offloads):
            raise EngineError(
                f"{self.engine} does not offload {self.offload}: choose {' or '.join(implied.offloads)}"
            )
        if self.zero_stage == 0 and self.dtype == "bfloat16":
            raise EngineError("bfloat16 with ZeRO stage 0 keeps no float32 master weights: choose stage 1")
        for name in ("micro_batch_tokens", "temperature", "logit_chunk_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise EngineError(f"{name} must be positive, not {value}")
        for name in ("learning_rate", "weight_decay", "warmup_steps", "max_gradient_norm"):
            if not getattr(self, name) >= 0:
                raise EngineError(f"{name} must not be negative, not {getattr(self, name)}")

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up to ``learning_rate``, constant after. Steps count from 0; the first is not zero.

        >>> [round(EngineSettings(learning_rate=4.0, warmup_steps=4).learning_rate_at(s), 2) for s in (0, 3, 9)]
        [1.0, 4.0, 4.0]
        """
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup_steps))


def engine_settings(spec: RunSpec, folder: Path | None = None) -> EngineSettings:
    """Settings of the engine.

    Args:
        folder: of the model.

    Raises:
        EngineError: combinations that cannot be trained.
        ModelError: the model's files cannot be read.
    """
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
        base="" if trainer.lora is None or folder is None else weights_digest(folder),
        seed=spec.seed,
        router_replay=trainer.router_replay,
    )
