"""The module that the engine trains: a causal language model that returns log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scalerl_trainer.errors import ModelError
from scalerl_trainer.models.head import DEFAULT_CHUNK_BYTES, LogprobHead
from scalerl_trainer.models.logits import transformed_logits

PREFIX = "causal_lm."


class Policy(nn.Module):
    """A transformers causal language model with ``LogprobHead`` in place of its own logits.

    Raises ``ModelError`` for architectures whose logits are scaled, capped or biased, because their log-probabilities
    would silently differ from the generator's.
    """

    causal_lm: Any
    head: LogprobHead

    def __init__(self, causal_lm: Any, *, fp32_head: bool, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        super().__init__()
        config = causal_lm.config
        problem = transformed_logits(lambda name: getattr(config, name, None))
        if problem is not None:
            raise ModelError(f"{config.model_type}: {problem}")
        output = causal_lm.get_output_embeddings()
        if not isinstance(output, nn.Linear) or output.bias is not None:
            raise ModelError(
                f"{config.model_type}: the output embedding must be a linear layer without a bias, not {output!r}"
            )
        _zero_dropout(causal_lm)
        self.causal_lm = causal_lm
        self.head = LogprobHead(output, fp32=fp32_head, chunk_bytes=chunk_bytes)

    def train(self, mode: bool = True) -> Policy:
        """Set evaluation mode for both values of ``mode``, except in layers with activation checkpointing.

        The generator samples without dropout, jitter and skipped layers, so their noise in the trainer would look like a
        change of the policy. Layers with activation checkpointing get ``mode``, since transformers checkpoints only in
        training mode.
        """
        super().train(False)
        for module in self.causal_lm.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = mode
        return self

    @property
    def variable_length(self) -> bool:
        """Whether the attention kernel skips pairs of tokens of different sequences packed into one row."""
        return bool(self.causal_lm.config._attn_implementation == "flash_attention_2")

    def forward(
        self,
        input_ids_bt: torch.Tensor,
        position_ids_bt: torch.Tensor,
        predict_at_m: torch.Tensor,
        target_m: torch.Tensor,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of ``target_m`` (with gradient) and entropies, nats, float32 ``[M]``.

        The arguments are those of ``packing.MicroBatch``. There is no attention mask: position ids separate the sequences
        of a row.
        """
        hidden_btd = self.causal_lm.base_model(
            input_ids=input_ids_bt, position_ids=position_ids_bt, use_cache=False
        ).last_hidden_state
        hidden_md = hidden_btd.flatten(0, 1).index_select(0, predict_at_m)
        result: tuple[torch.Tensor, torch.Tensor] = self.head(hidden_md, target_m, temperature, entropy)
        return result


def _zero_dropout(model: nn.Module) -> None:
    """Set every dropout probability in the modules of ``model`` to 0; the config is unchanged."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
