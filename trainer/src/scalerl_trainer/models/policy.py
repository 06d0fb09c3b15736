"""The module that the engine trains: a causal language model that returns log-probabilities."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from scalerl_trainer.errors import ModelError, first_line
from scalerl_trainer.models import varlen
from scalerl_trainer.models.head import Derivative, LogprobHead
from scalerl_trainer.models.logits import LogitTransform, logit_transform

PREFIX = "causal_lm."


class Policy(nn.Module):
    """A transformers causal language model with ``LogprobHead`` in place of its own logits.

    Raises ``ModelError`` for a model whose own logits differ from those of ``LogprobHead``, because its log-probabilities
    would silently differ from the generator's.
    """

    causal_lm: Any
    head: LogprobHead

    def __init__(self, causal_lm: Any, *, fp32_head: bool, chunk_bytes: int | None = None) -> None:
        super().__init__()
        config = causal_lm.config
        output = causal_lm.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise ModelError(
                f"{config.model_type}: the output embedding must be a linear layer, not {output!r}: choose another model"
            )
        transform = logit_transform(lambda name: getattr(config, name, None))
        check_logits(causal_lm, transform)
        _zero_dropout(causal_lm)
        self.causal_lm = causal_lm
        self.head = LogprobHead(output, fp32=fp32_head, chunk_bytes=chunk_bytes, transform=transform)
        self.takes_positions = "position_ids" in inspect.signature(causal_lm.base_model.forward).parameters

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
        """Whether the attention kernel skips pairs of tokens of different sequences packed into one row.

        That the whole model keeps them apart is for the engine to check.
        """
        return self.takes_positions and self._attention in ("flash_attention_2", varlen.NAME)

    @property
    def _attention(self) -> str:
        return str(self.causal_lm.config._attn_implementation)

    def forward(
        self,
        input_ids_bt: torch.Tensor,
        position_ids_bt: torch.Tensor,
        predict_at_m: torch.Tensor,
        target_m: torch.Tensor,
        temperature: float = 1.0,
        entropy: bool = False,
        prompts_gp: torch.Tensor | None = None,
        prompt_b: torch.Tensor | None = None,
        boundaries: dict[str, Any] | None = None,
        derivative: Derivative | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of ``target_m`` (with gradient) and entropies, nats, float32 ``[M]``.

        The arguments are those of ``packing.MicroBatch``. There is no attention mask: position ids separate the sequences
        of a row. A model that computes positions by itself (ALiBi, recurrences) gets none, and rows of one sequence.
        ``derivative`` is that of :meth:`.LogprobHead.forward`.
        ``boundaries`` are those of :mod:`.varlen`; without them its kernel has to wait for the device.
        """
        positions: dict[str, Any] = {"position_ids": position_ids_bt} if self.takes_positions else {}
        if self._attention == varlen.NAME:
            positions |= boundaries or varlen.boundaries(position_ids_bt, position_ids_bt.device)
        if prompts_gp is not None and prompt_b is not None:
            positions |= {"past_key_values": self._keys_of(prompts_gp, prompt_b)}
        hidden_btd = self.causal_lm.base_model(
            input_ids=input_ids_bt, use_cache=prompts_gp is not None, **positions
        ).last_hidden_state
        hidden_md = hidden_btd.flatten(0, 1).index_select(0, predict_at_m)
        result: tuple[torch.Tensor, torch.Tensor] = self.head(
            hidden_md, target_m, temperature, entropy, derivative
        )
        return result

    def _keys_of(self, prompts_gp: torch.Tensor, prompt_b: torch.Tensor) -> Any:
        """Keys and values of the prompts, once for each row that follows one, with their gradient."""
        positions_gp = torch.arange(prompts_gp.shape[1], device=prompts_gp.device).expand_as(prompts_gp)
        kept = self.causal_lm.base_model(
            input_ids=prompts_gp, position_ids=positions_gp, use_cache=True
        ).past_key_values
        for layer in kept.layers:
            # Not `batch_select_indices`: the gradient of its indexing is summed one element at a time.
            layer.keys, layer.values = (
                layer.keys.index_select(0, prompt_b),
                layer.values.index_select(0, prompt_b),
            )
        return kept


def _zero_dropout(model: nn.Module) -> None:
    """Set every dropout probability in the modules of ``model`` to 0; the config is unchanged."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


_CHECKED_VOCABULARY = 64
_CHECKED_POSITIONS = 4
_LARGE = 40.0
"""Standard deviation of the logits that are compared: beyond the caps in use, which are 30 or 50."""


class _Hidden:
    """Output of a stand-in for the base model: the hidden states, and None for everything else."""

    def __init__(self, hidden_btd: torch.Tensor) -> None:
        self.last_hidden_state = hidden_btd

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def check_logits(causal_lm: Any, transform: LogitTransform) -> None:
    """Compare the model's own logits of random hidden states with those of ``LogprobHead``.

    The model's forward pass runs on the CPU with random hidden states in place of its layers and with a small vocabulary, so
    this takes milliseconds for a model of any size, on the meta device too.

    Raises:
        ModelError: they differ, or the forward pass does more than layers and output embedding.
    """
    output, base = causal_lm.get_output_embeddings(), causal_lm.base_model
    layers = [base, *(m for name, m in base.named_children() if name == "decoder")]  # OPT calls its decoder
    if base is causal_lm:
        raise ModelError(
            f"{causal_lm.config.model_type}: transformers does not say which part of the model has the layers "
            "(base_model_prefix), so the trainer cannot take its hidden states: choose another model"
        )
    generator = torch.Generator().manual_seed(0)
    width = output.weight.shape[1]
    small = nn.Linear(width, _CHECKED_VOCABULARY, bias=output.bias is not None, device="cpu")
    hidden_btd = torch.randn((1, _CHECKED_POSITIONS, width), generator=generator)
    with torch.no_grad():
        small.weight.normal_(0.0, _LARGE / width**0.5 / abs(transform.scale), generator=generator)
        if small.bias is not None:
            small.bias.normal_(0.0, _LARGE / abs(transform.scale), generator=generator)
        name = causal_lm.config.model_type
        causal_lm.set_output_embeddings(small)
        for module in layers:
            module.forward = lambda *_, **__: _Hidden(hidden_btd)
        try:
            ids_bt = torch.zeros(1, _CHECKED_POSITIONS, dtype=torch.long)
            own_v = causal_lm(input_ids=ids_bt, use_cache=False).logits[0].float().log_softmax(-1)
        except Exception as error:
            raise ModelError(
                f"{name}: the logits cannot be compared with the model's own ({type(error).__name__}: "
                f"{first_line(error)}): choose another model"
            ) from error
        finally:
            for module in layers:
                del module.forward
            causal_lm.set_output_embeddings(output)
        head = LogprobHead(small, fp32=True, transform=transform)
        targets = [
            torch.full((_CHECKED_POSITIONS,), token, dtype=torch.long) for token in range(_CHECKED_VOCABULARY)
        ]
        ours_v = torch.stack([head(hidden_btd[0], target, 1.0, False)[0] for target in targets], dim=-1)
    difference = float((own_v - ours_v).abs().max())
    if not difference < 1e-2:
        raise ModelError(
            f"{name}: the model computes its logits in a way that is not supported, from hidden states to logits its "
            f"log-probabilities differ by {difference:.2g}: choose another model"
        )
