"""The sizes of a model that estimates of memory depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from scalerl_api.model_source import ScratchModel

Dtype = Literal["bfloat16", "float32"]
BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float32": 4}
"""Bytes of one value."""
_NORMS: Final[Mapping[str, tuple[bool, int, int]]] = {
    "qwen3": (True, 0, 3),
    "qwen3_moe": (True, 0, 3),
    "olmoe": (True, 0, 3),
    "olmo2": (True, 0, 4),
    "olmo3": (True, 0, 4),
    "gemma2": (False, 2, 4),
    "gemma3_text": (True, 2, 4),
}
"""By family: whether queries and keys are normalised, norms of the hidden size beyond two a layer, and what one keeps in bfloat16, in values
of its input: this and its result in float32, as a Llama's, or both factors of the result in float32. In float32 each keeps two."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters, which are trained alone."""

    rank: int
    targets: tuple[str, ...] = ()
    """Names of the linear layers that have one, as in ``trainer.lora.targetModules``; empty for all."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model, named as in ``config.json``."""

    parameters: int
    """Number of parameters; tied ones count once."""
    hidden_size: int
    layers: int
    intermediate_size: int
    vocabulary_size: int
    largest_tensor: int = 0
    """Elements of the largest tensor; 0 where it is not known."""
    query_size: int = 0
    """Outputs of the queries' layer, heads by the size of a head; 0 where it is not known."""
    key_size: int = 0
    """The same of the keys, and of the values."""
    mlp_values: int = 0
    """Values a token that a layer's experts keep for the backward pass; 0 without experts."""
    norm_values: tuple[int, int] = (0, 0)
    """The same of its norms beyond those of a Llama, in bfloat16 and in float32."""
    tied: bool = False
    """Whether it is known that the embedding is the head's weight too."""

    @classmethod
    def of_scratch(cls, model: ScratchModel) -> Self:
        """Size of a Llama without grouped-query attention, or of a Mixtral, whose tokenizer reaches the maximum vocabulary.

        >>> ModelSize.of_scratch(ScratchModel(layers=4, hidden_size=128, vocabulary_size=128)).parameters
        869504
        """
        h = model.hidden_size
        experts = 1 if model.experts is None else model.experts.count
        router = 0 if model.experts is None else experts * h
        layer = 4 * h * h + experts * 3 * h * model.intermediate_size + router + 2 * h
        embeddings = model.vocabulary_size * h * (1 if model.tied_embeddings else 2)
        return cls(
            parameters=model.layers * layer + embeddings + h,
            hidden_size=h,
            layers=model.layers,
            intermediate_size=model.intermediate_size,
            vocabulary_size=model.vocabulary_size,
            largest_tensor=max(model.vocabulary_size, model.intermediate_size, h) * h,
            mlp_values=model.experts.per_token * (4 * model.intermediate_size + 2 * h)
            if model.experts
            else 0,
            tied=model.tied_embeddings,
        )

    @classmethod
    def of_config(cls, config: Mapping[str, Any], parameters: int, largest_tensor: int = 0) -> Self | None:
        """Size from a ``config.json`` and the weights files; None if the config lacks sizes."""
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            return None
        hidden, layers, vocabulary = (
            text.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        )
        if not (isinstance(hidden, int) and isinstance(layers, int) and isinstance(vocabulary, int)):
            return None
        wide = text.get("intermediate_size")
        wide = wide if isinstance(wide, int) else 4 * hidden
        mlp, tied = _expert_values(text, hidden, wide), text.get("tie_word_embeddings") is True
        heads, groups, each = (
            text.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        if not isinstance(heads, int) or heads < 1:
            return cls(
                parameters, hidden, layers, wide, vocabulary, largest_tensor, mlp_values=mlp, tied=tied
            )
        each = each if isinstance(each, int) else hidden // heads
        keys = each * (groups if isinstance(groups, int) else heads)
        norms = _norm_values(text, hidden, each * heads + keys)
        return cls(
            parameters, hidden, layers, wide, vocabulary, largest_tensor, each * heads, keys, mlp, norms, tied
        )

    def activation_values(self, dtype: Dtype, adapters: Adapters | None = None) -> int:
        """Values that a layer of a Llama keeps for the backward pass of a token, counted in transformers' layers.

        Eight of the hidden size (in bfloat16 ten, since norms compute in float32) less the two of the queries, those of the
        queries and keys before and after attention, and four of the MLP's width. Of each expert that a token has, also its
        input and output. With ``adapters`` norms keep no input of their weights' products, and a linear layer keeps its input only for an
        adapter, which keeps its own values in between.
        """
        hidden, queries = self.hidden_size, self.query_size or self.hidden_size
        norms = (8 if dtype == "bfloat16" else 6) * hidden
        keys = self.key_size or hidden
        whole = norms + self.norm_values[dtype == "float32"] + 2 * queries + 2 * keys + self._mlp_kept
        if adapters is None:
            return whole
        names = self._adapted(adapters.targets).keys()
        unused = hidden * (not names & {"q_proj", "k_proj", "v_proj"})
        if not self.mlp_values:
            unused += hidden * (not names & {"gate_proj", "up_proj"})
            unused += self.intermediate_size * ("down_proj" not in names)
        return whole - 2 * hidden - unused + adapters.rank * len(names)

    @property
    def backward_values(self) -> int:
        """Values a token that the backward pass of a layer has at a time beside those that the layer keeps: of its MLP, whose product
        with the gate has the gradients of both factors beside its own, of the residual stream, and of a norm in float32."""
        return self._mlp_kept // 2 + 3 * self.hidden_size

    @property
    def _mlp_kept(self) -> int:
        return self.mlp_values or 4 * self.intermediate_size

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and head."""
        return (1 if self.tied else 2) * self.vocabulary_size * self.hidden_size

    @property
    def _dense_layer(self) -> int:
        """Parameters of a layer of a Llama, without the norms."""
        attention = max(4 * self.hidden_size, 2 * (self.query_size + self.key_size))
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def layer(self) -> int:
        """Parameters of a layer. With experts the mean, since the other sizes are of one of them, or of another layer.

        Layers a quarter larger than a dense one have experts: norms and biases take less, a second expert more.
        """
        mean = (self.parameters - self.embeddings) // max(1, self.layers)
        return mean if 4 * mean > 5 * self._dense_layer else self._dense_layer

    @property
    def used_at_once(self) -> int:
        """Parameters of two layers, of which one is fetched ahead, and of embeddings and head."""
        return 2 * self.layer + self.embeddings

    @property
    def largest_in_layer(self) -> int:
        """Elements of a layer's largest parameter: of experts, two thirds of all, else of the MLP."""
        if self.layer > self._dense_layer:
            return 2 * self.layer // 3
        return self.hidden_size * max(self.hidden_size, self.intermediate_size)

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter: of experts, all of a layer in one, whose first two matrices are two thirds of them.

        >>> mixtral = ModelSize(46_702_792_704, 4096, 32, 14336, 32000, largest_tensor=4096 * 32000, query_size=4096, key_size=1024)
        >>> experts = 8 * 2 * 14336 * 4096
        >>> experts <= mixtral.largest_parameter < 1.04 * experts
        True
        >>> ModelSize(13_015_864_320, 5120, 40, 13824, 32000, largest_tensor=5120 * 32000, query_size=5120, key_size=5120).largest_parameter
        163840000
        """
        return max(self.largest_tensor, self.largest_in_layer if self.layer > self._dense_layer else 0)

    def adapter_parameters(self, adapters: Adapters) -> int:
        """Parameters of adapters of a Llama's linear layers; an estimate for other architectures, and where sizes of heads are not known,
        which may be larger than the hidden size."""
        return self.layers * adapters.rank * sum(i + o for i, o in self._adapted(adapters.targets).values())

    def _adapted(self, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of a layer that have adapters: all if one that is not a Llama's is among ``targets``."""
        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.query_size or hidden, self.key_size or hidden
        sizes = {"q_proj": (hidden, queries), "o_proj": (queries, hidden), "down_proj": (wide, hidden)}
        sizes |= dict.fromkeys(("k_proj", "v_proj"), (hidden, keys))
        sizes |= dict.fromkeys(("gate_proj", "up_proj"), (hidden, wide))
        names = {target.rpartition(".")[2] for target in targets}
        return {name: sizes[name] for name in names} if names and names <= sizes.keys() else sizes


def _expert_values(config: Mapping[str, Any], hidden: int, wide: int) -> int:
    """:attr:`ModelSize.mlp_values` by a ``config.json``."""
    each, chosen, shared = (
        config.get(name)
        for name in ("moe_intermediate_size", "num_experts_per_tok", "shared_expert_intermediate_size")
    )
    if not isinstance(chosen, int):
        return 0
    own = each if isinstance(each, int) else wide
    return chosen * (4 * own + 2 * hidden) + (4 * shared if isinstance(shared, int) else 0)


def _norm_values(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """:attr:`ModelSize.norm_values` by a ``config.json``, with ``heads`` outputs of queries and keys."""
    normed, more, kept = _NORMS.get(str(config.get("model_type")), (False, 0, 3))
    values = heads * normed + more * hidden
    return kept * values + (kept - 3) * 2 * hidden, 2 * values
