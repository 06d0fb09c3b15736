"""``spec.model`` and ``spec.task``: what is trained, and on what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from scalerl_api.fields import GraderQuantity, Matches, Model, PositiveUnitDecimal, Rule, exactly_one

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Any 64-bit integer."""


class HubModel(Model):
    """A model on a hub, by name and revision; an offline cache is honoured (``HF_HUB_OFFLINE=1``)."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=200),
        AfterValidator(
            Matches(r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?$", "must be owner/model, as the hub lists it")
        ),
    ]
    """``owner/model``, as the hub lists it."""
    revision: Annotated[str, Field(min_length=1, max_length=200)] = "main"
    """Branch, tag or commit; a commit means the same weights a year from now."""


class ScratchModel(Model):
    """A randomly initialised Llama with a tokenizer trained on the task's own text: for tests and teaching."""

    layers: Annotated[int, Field(ge=1, le=64)] = 4
    """Transformer blocks."""
    hidden_size: Annotated[int, Field(ge=16, le=8192)] = 128
    """Width of the residual stream: an even multiple of ``attentionHeads``."""
    attention_heads: Annotated[int, Field(ge=1, le=128)] = 4
    """Attention heads of a block, without grouped queries."""
    intermediate_size: Annotated[int, Field(ge=16, le=65536)] = 384
    """Width of the feed-forward layer."""
    vocabulary_size: Annotated[int, Field(ge=64, le=65536)] = 512
    """Upper bound; the tokenizer may stop earlier when the text gives no more merges."""
    tied_embeddings: bool = True
    """The output layer shares the input's embeddings."""
    initializer_range: PositiveUnitDecimal = "0.02"
    """Standard deviation of the first weights. The default suits widths of thousands; at a width of 128 attention is the
    same everywhere until it is trained."""

    rules = (
        Rule(
            "self.hiddenSize % (2 * self.attentionHeads) == 0",
            "hiddenSize must be an even multiple of attentionHeads",
            "hiddenSize",
            lambda model: model.hidden_size % (2 * model.attention_heads) == 0,
        ),
    )


class ModelSpec(Model):
    """Where the initial weights and the tokenizer come from, and how they are held."""

    hub: HubModel | None = None
    """A model on a hub; it is downloaded before the run starts."""
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A directory with ``config.json``, weights and tokenizer: local, or on a mounted volume."""
    scratch: ScratchModel | None = None
    """A small model made here, with random weights."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """In which the weights are held and generated with; the optimizer keeps float32 copies of bfloat16 ones."""
    context_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 16384
    """Longest prompt + completion, in tokens."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """The trainer's attention kernel; the generator uses vLLM's own."""

    rules = (exactly_one("hub", "path", "scratch"),)


def parameter_value(value: Any) -> Any:
    """One line for what a union of types would say in five."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, float) for item in items):
        raise ValueError('floats are not allowed in a spec; write them as strings, like "0.5"')
    if not all(isinstance(item, int | str) for item in items):
        raise ValueError("must be an integer, a boolean, a string, or a list of these")
    return value


class ReasoningGymSource(Model):
    """A procedurally generated reasoning-gym data set."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the data set, like ``chain_sum``."""
    parameters: Annotated[
        dict[str, Annotated[int | bool | str | list[int] | list[str], BeforeValidator(parameter_value)]],
        Field(max_length=64),
    ] = {}
    """As the task names them; a fraction is a string (``"0.5"``) and becomes a number where one is wanted."""
    seed: Seed = 0
    """Of the generated problems; another seed gives others."""
    size: Annotated[int, Field(ge=2, le=100_000_000)] = 50_000
    """Problems, those held out included."""


class JsonlSource(Model):
    """A file of one JSON object a line: ``prompt``, ``answer``, optional ``id``, ``difficulty``, ``solution``."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """In a file on one machine, relative to that file; on a cluster, the absolute path of a mounted file."""


class VerifierSpec(Model):
    """How a completion is scored, and what one scoring may use. Model output is hostile input."""

    name: Literal["reasoning-gym", "exact", "number", "math-verify"]
    """``reasoning-gym``: the data set's own scorer. ``exact``: the same text. ``number``: the same number.
    ``math-verify``: the same mathematics."""
    timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    """Most time for one scoring."""
    memory: GraderQuantity = "1Gi"
    """Most memory of one scoring process."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Scoring processes beside each generator."""


class PromptSpec(Model):
    """How a task's text becomes the tokens the model reads."""

    format: Literal["Raw", "Chat"] = "Raw"
    """``Chat`` applies the tokenizer's chat template."""
    template: Annotated[str, Field(max_length=16_384)] = "{prompt}"
    """The task's text stands where this says ``{prompt}``."""
    system: Annotated[str, Field(max_length=16_384)] | None = None
    """System message; needs ``format: Chat``."""

    rules = (
        Rule(
            "!has(self.template) || self.template.contains('{prompt}')",
            "template must contain {prompt}",
            "template",
            lambda prompt: "{prompt}" in prompt.template,
        ),
        Rule(
            "!has(self.system) || self.format == 'Chat'",
            "system needs format: Chat",
            "system",
            lambda prompt: prompt.system is None or prompt.format == "Chat",
        ),
    )


class HeldOutSpec(Model):
    """Prompts that are never trained on; their mean score is the curve. Fixed for the whole run."""

    size: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """How many are held out. ScaleRL: 1,000 prompts [P]."""
    seed: Seed = 0
    """Which ones are; another seed holds out others."""


class TaskSpec(Model):
    """What is trained on."""

    reasoning_gym: ReasoningGymSource | None = None
    """Problems made by a program; give this or jsonl."""
    jsonl: JsonlSource | None = None
    """Problems from a file; give this or reasoningGym."""
    verifier: VerifierSpec
    """How a completion is scored, and what one scoring may use."""
    prompt: PromptSpec = PromptSpec()
    """How a problem's text becomes a prompt."""
    held_out: HeldOutSpec = HeldOutSpec()
    """Prompts that are never trained on; their mean score is the curve."""

    rules = (
        exactly_one("reasoningGym", "jsonl"),
        Rule(
            "!has(self.reasoningGym) || self.heldOut.size < self.reasoningGym.size",
            "%(heldOut.size)s must be less than %(reasoningGym.size)s: problems to train on have to be left",
            "heldOut.size",
            lambda task: task.reasoning_gym is None or task.held_out.size < task.reasoning_gym.size,
        ),
        Rule(
            "self.verifier.name != 'reasoning-gym' || has(self.reasoningGym)",
            "verifier reasoning-gym scores reasoningGym data only; use exact, number or math-verify",
            "verifier.name",
            lambda task: task.verifier.name != "reasoning-gym" or task.reasoning_gym is not None,
        ),
    )
