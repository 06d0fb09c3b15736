"""Steps of losses that say that they are token-local, and of the same losses that do not; one rank. Writes ``<out>/results.pt``."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_trainer.algo.gradient_guard import GradientGuard
from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import Cispo, Gspo, Loss, LossOutput, TokenBatch
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.models import head, head_gradients
from scalerl_trainer.models.lora import Lora
from scalerl_trainer.packing import Sequence

CHUNK = 5
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}": {"zero_stage": stage} for stage in range(4)},
    "FSDP2": {"engine": "FSDP2", "zero_stage": 3},
    "bfloat16": {"zero_stage": 1, "dtype": "bfloat16"},
    "adapters": {"zero_stage": 1, "lora": Lora(4, 8)},
    "checkpointing": {"zero_stage": 1, "activation_checkpointing": True},
    "guard": {"zero_stage": 1, "gradient_guard": GradientGuard(min_tokens=1)},
}


class Unsaid:
    """A loss that does not say what it is, as those of packages."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        return self.loss(tokens)


class Lying(Unsaid):
    token_local = True


PRODUCTS: list[int] = []
_product = head_gradients.product


def counted(left: torch.Tensor, right: torch.Tensor, fp32: bool) -> torch.Tensor:
    PRODUCTS.append(len(left))
    return _product(left, right, fp32)


def stepped(loss: Loss, settings: dict[str, Any]) -> dict[str, Any]:
    """A step with micro-batches of several chunks and, if it is guarded, an outlier that is masked; its gradients' moments, and the
    tokens of each product of logits or of a gradient by hidden states."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=2,
        vocab_size=40,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    defaults: dict[str, Any] = {"dtype": "float32", "warmup_steps": 0, "micro_batch_tokens": 48}
    chosen = EngineSettings(**(defaults | settings), ratio_guard=None, logit_chunk_bytes=4 * 40 * CHUNK)
    engine = Engine(LlamaForCausalLM(config), chosen, torch.device("cpu"))
    engine.set_reference(LlamaForCausalLM(config))
    sequences = [Sequence([1, 2, 3], [(6 + 5 * n + k) % 40 for k in range(4 + n)]) for n in range(8)]
    generator_n = engine.logprobs(sequences).logprobs_n
    generator_n[::3] += 0.7
    generator_n[20] -= 9.0
    weights_s = torch.full((8,), 1 / len(generator_n))
    batch = TrainBatch(sequences, weights_s, torch.linspace(-1, 1, 8), generator_n)
    PRODUCTS.clear()
    stats = engine.step(batch, loss)
    moments = {
        f"{piece.name}@{piece.start}": piece.values["exp_avg"].clone() for piece in engine._trained.pieces()
    }
    engine.close()
    return {"stats": stats, "moments": moments, "products": sum(PRODUCTS)}


if __name__ == "__main__":
    given: dict[str, Any] = WORKER  # type: ignore[name-defined]  # noqa: F821
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed reads it
    modules: list[ModuleType] = [head, head_gradients]
    for module in modules:
        module.product = counted  # type: ignore[attr-defined]
    rank = Rank(0, 1, 0, "127.0.0.1", given["port"])
    init_process_group(rank, device="cpu", timeout_seconds=240)
    loss = WithKl(Cispo(1e4), "k3", 0.1)
    results: dict[str, Any] = {
        name: [stepped(own, settings) for own in (loss, Unsaid(loss))] for name, settings in SETTINGS.items()
    }
    try:
        stepped(Lying(Gspo()), {"zero_stage": 1})
    except RuntimeError as error:
        results["wrong"] = str(error)
    destroy_process_group()
    torch.save(results, given["out"] / "results.pt")
