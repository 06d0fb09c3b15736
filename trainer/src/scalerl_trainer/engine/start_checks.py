"""Checks at the engine's start of the layouts that the model's layers bear: sequences that share a row, prompts computed once.

Each compares log-probabilities of random tokens in that layout with those without it; all ranks then use the same layouts.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch

from scalerl_trainer.engine.distributed import gather_vectors
from scalerl_trainer.engine.passes import Passes
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.errors import first_line
from scalerl_trainer.models import varlen
from scalerl_trainer.models.policy import Policy
from scalerl_trainer.packing import Sequence, after_prompt, one_row

log = logging.getLogger(__name__)

_CHECKED_TOKENS = 64
"""Tokens of the two sequences on which sharing of rows is checked."""
_ROW_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.03}
"""In standard deviations of the log-probabilities over tokens. Of the families of docs/models.md, those that keep sequences apart
reach 2e-2 in bfloat16 (rounding), those that mix them .14 and more."""
_KERNEL_TOLERANCE = 0.03
"""The same of the median token between two kernels in bfloat16, where those families reach 9e-3. Not of the worst: a router that
chooses another expert changes single tokens by .4."""
_KERNEL_TOKENS = 320
"""Of two sequences by which kernels are compared; the first is longer than a block of a kernel's."""
_KERNEL_LARGE = 0.15
"""The same of all but a tenth of the tokens, so that a kernel that is wrong at some positions is not used."""
_GRADIENT_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.25}
"""Of the norm of a gradient. Without the part that reaches a prompt's keys it is .5 and more away."""
_PROMPT_TOKENS = 32
"""Of the prompt, and of each completion, by which sharing of prompts is checked, beyond the model's window."""
_MIN_TOKENS = 4
_NO_WINDOWS = ("max_window_layers", "chunk_size_feed_forward")
"""Numbers of a config that are none, though their names say so."""


class StartChecks:
    """Which layouts of micro-batches are used.

    Args:
        passes: of ``policy``.
    """

    def __init__(
        self, passes: Passes, policy: Policy, settings: EngineSettings, device: torch.device, rank: int
    ) -> None:
        self._passes, self._policy, self._settings = passes, policy, settings
        self._device, self._rank = device, rank
        self._config: Any = policy.causal_lm.config
        self._separates: bool | None = None
        self._follows: bool | None = None
        self.why_whole = ""
        """Why each completion is computed with its prompt; empty if prompts are shared."""

    def shares_rows(self) -> bool:
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
        Of torch's variable-length kernel also with each sequence alone under ``sdpa``.
        """
        generator = torch.Generator().manual_seed(0)
        first, second = self._random_pair(_CHECKED_TOKENS, generator)
        self._policy.eval()
        with torch.no_grad():
            forth_n, _ = self._passes.forward(one_row([first, second]), 1.0)
            back_n, _ = self._passes.forward(one_row([second, first]), 1.0)
        there = len(second.completion)
        difference = float((forth_n - torch.cat([back_n[there:], back_n[:there]])).abs().max())
        # In units of how much log-probabilities differ among tokens, which is little in an untrained model.
        spread = float(forth_n.std())
        good = difference < _ROW_TOLERANCE[self._settings.dtype] * spread
        if self._config._attn_implementation == varlen.NAME:
            pair = self._random_pair(_KERNEL_TOKENS, generator)
            with torch.no_grad():
                together_n, _ = self._passes.forward(one_row(pair), 1.0)
            alike, large = _alike(together_n, self._alone_by_sdpa(pair))
            good, difference = good and alike, max(difference, large)
        separates = self._all(good)
        if not separates:
            log.warning(
                "%s does not keep the sequences of one row apart (their log-probabilities depend on their order or kernel, by "
                "%.2g on rank %d): each sequence gets a row of its own, which is slower",
                self._config.model_type,
                difference,
                self._rank,
            )
        return separates

    def shares_prompts(self) -> bool:
        """Whether rows with equal prompts can follow one computation of it."""
        if self._follows is None:
            self.why_whole = self._prompts_apart() or self._check_prompts()
            self._follows = not self.why_whole
        return self._follows

    def _prompts_apart(self) -> str:
        """By settings and config, equal on all ranks, why prompts are not shared; empty if they may be.

        Where parameters are partitioned, each layer is gathered for one pass. Where gradients are (ZeRO 2), they are reduced in the order
        in which the backward pass reaches them, which a rank with another layout does not have. Checkpointed layers keep no keys
        and values; the figures of routers are by position of one pass; rope factors by the length of a call differ between
        the prompt's and its completions'.
        """
        settings = self._settings
        if not self._policy.takes_positions:
            return "the model counts positions itself"
        if self.shares_rows():
            return "sequences share rows"
        if settings.zero_stage >= 2:
            return f"ZeRO stage {settings.zero_stage}"
        if settings.activation_checkpointing:
            return "activation checkpointing"
        if self._passes.routing.experts:
            return "mixture of experts"
        return next((f"rope of type {kind}" for kind in _rope_types(self._config) if _by_length(kind)), "")

    def _check_prompts(self) -> str:
        """Why not, by a comparison of three completions after one computation of their prompt with each alone: log-probabilities, and
        the gradient of a layer. A collective.

        The prompt is longer than the window of the model's layers, beyond which some keep nothing.
        """
        budget = self._settings.micro_batch_tokens
        # Windows that no sequence fills are none.
        window = max((size for size in _windows(self._config) if size < budget), default=0)
        tokens = min(_PROMPT_TOKENS, (budget - window) // 4)
        if tokens < _MIN_TOKENS:
            reason = f"micro-batches of {budget} tokens are too short to check it"
        else:
            try:
                reason = self._compare_prompts(window + tokens, tokens)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            # Of a family whose layers keep something else.
            except (AttributeError, TypeError, ValueError, LookupError, RuntimeError) as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
        if self._all(not reason):
            return ""
        if reason and self._rank:
            log.warning("rank %d cannot compute prompts once: %s", self._rank, reason)
        return reason or "another rank cannot, see its log"

    def _compare_prompts(self, prompt_tokens: int, tokens: int) -> str:
        generator = torch.Generator().manual_seed(1)
        prompt, *rest = (
            torch.randint(int(self._config.vocab_size), (length,), generator=generator).tolist()
            for length in (prompt_tokens, tokens, tokens, tokens)
        )
        sequences = [Sequence(prompt, completion[: tokens - i]) for i, completion in enumerate(rest)]
        together_n, together = self._with_gradient([after_prompt(sequences)])
        alone_n, alone = self._with_gradient([one_row([one]) for one in sequences])
        spread, dtype = float(alone_n.std()), self._settings.dtype
        alike, difference = _alike(together_n, alone_n)
        if dtype == "float32":
            difference = float((together_n - alone_n).abs().max())
            alike = difference < _ROW_TOLERANCE[dtype] * spread
        if not alike:
            return f"{self._config.model_type}: log-probabilities after a prompt differ by {difference:.2g}"
        away = float((together - alone).norm() / alone.norm())
        if not away < _GRADIENT_TOLERANCE[dtype]:
            return f"{self._config.model_type}: a gradient after a prompt differs by {away:.2g} of it"
        return ""

    def _with_gradient(self, micro_batches: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of all micro-batches, and the gradient of their sum by the first layer's trained parameters, float32."""
        self._policy.eval()
        trained = {name: p for name, p in self._policy.named_parameters() if p.requires_grad}
        first = [p for name, p in trained.items() if re.search(r"\.0\.", name)] or list(trained.values())
        logprobs, gradient = [], torch.zeros(sum(p.numel() for p in first), device=self._device)
        for micro in micro_batches:
            # The policy itself, and not by `backward`: the backend's hooks would count a pass, and keep gradients for the first step.
            logprobs_m, _ = self._policy(*self._passes.inputs(micro), 1.0, False, *self._passes.layout(micro))
            found = torch.autograd.grad(logprobs_m.sum(), first, allow_unused=True, materialize_grads=True)
            gradient += torch.cat([each.flatten().float() for each in found])
            logprobs.append(logprobs_m.detach())
        return torch.cat(logprobs), gradient

    def _random_pair(self, tokens: int, generator: torch.Generator) -> list[Sequence]:
        """Two sequences of 5/8 and 3/8 of ``tokens``, or of what a micro-batch holds."""
        tokens = min(tokens, self._settings.micro_batch_tokens + 2)
        rows = [
            torch.randint(int(self._config.vocab_size), (length,), generator=generator).tolist()
            for length in (tokens * 5 // 8, tokens - tokens * 5 // 8)
        ]
        return [Sequence(ids[:1], ids[1:]) for ids in rows]

    def _alone_by_sdpa(self, sequences: list[Sequence]) -> torch.Tensor:
        self._config._attn_implementation = "sdpa"
        try:
            with torch.no_grad():
                return torch.cat([self._passes.forward(one_row([one]), 1.0)[0] for one in sequences])
        finally:
            self._config._attn_implementation = varlen.NAME

    def _all(self, good: bool) -> bool:
        """Whether all ranks found it good. A collective."""
        return bool(gather_vectors(torch.tensor([int(good)], device=self._device)).all())


def _alike(together_n: torch.Tensor, alone_n: torch.Tensor) -> tuple[bool, float]:
    """Whether two computations in bfloat16 differ by no more than rounding, and by how much all but a tenth of the tokens do."""
    half, large = (float((together_n - alone_n).abs().quantile(q)) for q in (0.5, 0.9))
    spread = float(alone_n.std())
    return half < _KERNEL_TOLERANCE * spread and large < _KERNEL_LARGE * spread, large


def _windows(config: Any) -> list[int]:
    """Numbers of the config that may bound how far back a layer attends."""
    sizes = config.get_text_config().to_dict().items()
    return [
        value
        for name, value in sizes
        if type(value) is int and ("window" in name or "chunk" in name) and name not in _NO_WINDOWS
    ]


def _rope_types(config: Any) -> list[str]:
    """Of all layers, or of each type of layer."""
    given = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [str(each.get("rope_type")) for each in (given, *given.values()) if isinstance(each, dict)]


def _by_length(rope_type: str) -> bool:
    """Whether its factors depend on the length of a call, as transformers' ``dynamic_rope_update`` has it."""
    return "dynamic" in rope_type or rope_type == "longrope"
