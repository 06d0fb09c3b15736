"""The model of a run: where it comes from, or how a new one is made, and its cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from scalerl_api.fields import Matches, Model, PositiveUnitDecimal, Rule, exactly_one
from scalerl_api.pods import ObjectName


class HubModel(Model):
    """A model on the Hugging Face Hub, by name and revision; supports an offline cache (``HF_HUB_OFFLINE=1``)."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=200),
        AfterValidator(
            Matches(r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?$", "must be owner/model, as the hub lists it")
        ),
    ]
    """``owner/model``, as on the hub."""
    revision: Annotated[str, Field(min_length=1, max_length=200)] = "main"
    """Branch, tag or commit; use a commit for reproducibility."""


class ScratchExperts(Model):
    """Experts in place of each feed-forward layer."""

    count: Annotated[int, Field(ge=2, le=64)] = 4
    """Experts of a layer."""
    per_token: Annotated[int, Field(ge=1, le=64)] = 2
    """Experts that the router chooses for a token."""

    rules = (
        Rule(
            "self.perToken <= self.count",
            "perToken must be at most count",
            "perToken",
            lambda experts: experts.per_token <= experts.count,
        ),
    )


class ScratchModel(Model):
    """A randomly initialized Llama, or with experts Mixtral, with a tokenizer trained on the text of the task, for tests and teaching."""

    layers: Annotated[int, Field(ge=1, le=64)] = 4
    """Transformer blocks."""
    hidden_size: Annotated[int, Field(ge=16, le=8192)] = 128
    """Width of the residual stream: an even multiple of ``attentionHeads``."""
    attention_heads: Annotated[int, Field(ge=1, le=128)] = 4
    """Attention heads per block, without grouped queries."""
    intermediate_size: Annotated[int, Field(ge=16, le=65536)] = 384
    """Width of the feed-forward layer, or of each expert."""
    experts: ScratchExperts | None = None
    """Makes the model a mixture of experts."""
    vocabulary_size: Annotated[int, Field(ge=64, le=65536)] = 512
    """Maximum size; the tokenizer is smaller if the text has no more merges."""
    tied_embeddings: bool = True
    """Share the weights of input embeddings and output layer."""
    initializer_range: PositiveUnitDecimal = "0.02"
    """Standard deviation of the initial weights. The default suits widths of thousands; at a width of 128,
    attention is initially uniform."""

    rules = (
        Rule(
            "self.hiddenSize % (2 * self.attentionHeads) == 0",
            "hiddenSize must be an even multiple of attentionHeads",
            "hiddenSize",
            lambda model: model.hidden_size % (2 * model.attention_heads) == 0,
        ),
    )


class ModelCacheSpec(Model):
    """A claim that holds models of the hub for many runs, each commit once, stored and verified by the first preparation."""

    claim_name: ObjectName
    """An existing claim in the run's namespace that pods on several nodes can mount. Only preparations write to it."""
    read_only: bool = False
    """The claim is filled already (``ReadOnlyMany``): nothing is downloaded, and ``hub.revision`` has to be a commit."""


class ModelSpec(Model):
    """Source and data type of the initial weights and the tokenizer."""

    hub: HubModel | None = None
    """A model on a hub, downloaded before the run starts."""
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A directory with ``config.json``, weights and tokenizer: local, or on a mounted volume."""
    scratch: ScratchModel | None = None
    """A small randomly initialized model."""
    cache: ModelCacheSpec | None = None
    """Where runs share the files of ``hub``; default: each run downloads them to its own volume. Ignored by the local runtime,
    where the hub's client has a cache for all runs."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the weights; for bfloat16, the optimizer keeps float32 copies."""
    context_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 16384
    """Maximum length of prompt and completion, in tokens."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """Attention kernel of the trainer; generators use vLLM's."""

    rules = (
        exactly_one("hub", "path", "scratch"),
        Rule(
            "!has(self.cache) || has(self.hub)",
            "model.cache is for models of a hub: leave it out, or set model.hub",
            "cache",
            lambda model: model.cache is None or model.hub is not None,
        ),
    )
