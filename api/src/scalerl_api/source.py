"""``spec.model``, and the sources, verifiers and prompts of ``spec.task``. A mix of tasks is in :mod:`.mix`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from scalerl_api.fields import (
    DecimalString,
    GraderQuantity,
    Matches,
    Model,
    OpenUnitDecimal,
    PositiveDecimal,
    PositiveUnitDecimal,
    Rule,
    exactly_one,
)
from scalerl_api.plugins import EnvironmentPlugin, Parameters, PluginName, SourcePlugin, VerifierPlugin
from scalerl_api.pods import ObjectName
from scalerl_api.registry import BUILT_IN_ENVIRONMENTS, BUILT_IN_VERIFIERS, SERVER

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Any 64-bit integer."""


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


def parameter_value(value: Any) -> Any:
    """Check the type of a parameter, with one error message in place of one for each type of the union."""
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
    """Parameters of the task; write fractions as strings (``"0.5"``)."""
    seed: Seed = 0
    """Seed of the generated problems."""
    size: Annotated[int, Field(ge=2, le=100_000_000)] = 50_000
    """Number of problems, including the held-out ones."""


class JsonlSource(Model):
    """A file with one JSON object per line: ``prompt``, ``answer``, optional ``id``, ``difficulty``, ``solution``."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Path of the file: on one machine, relative to the run file; on a cluster, absolute, on a mounted volume."""


class HubDataset(Model):
    """A data set on the Hugging Face Hub; its files are read as they are, no code of the repository runs."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=200),
        AfterValidator(
            Matches(r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?$", "must be owner/data set, as the hub lists it")
        ),
    ]
    """``owner/data-set``, as on the hub."""
    config: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Configuration (subset) of the data set; needed if it has several and none is the default."""
    split: Annotated[str, Field(min_length=1, max_length=200)] = "train"
    """Split of the data set."""
    revision: Annotated[str, Field(min_length=1, max_length=200)] = "main"
    """Branch, tag or commit. The preparation resolves it to a commit, which the run keeps."""


Expression = Annotated[str, Field(min_length=1, max_length=1000)]
"""A column, a path into one (``reward_model.ground_truth``, ``messages[0].content``), or an expression."""


class ColumnsSpec(Model):
    """Where the fields of a problem are in a row: a column, a path into it, or an expression."""

    prompt: Expression | None = None
    """The user's text, or a list of messages with ``role`` and ``content``."""
    answer: Expression | None = None
    """The reference answer: text or a number."""
    id: Expression | None = None
    """Text or an integer that is unique; default: a hash of prompt and answer."""
    difficulty: Expression | None = None
    """A number, higher is harder, such as ``1 - solve_rate`` or ``1 - number(difficulty)``."""
    solution: Expression | None = None
    """A worked solution for the supervised warm start."""
    system: Expression | None = None
    """The system message; needs ``prompt.format: Chat``."""
    labels: Annotated[dict[Annotated[str, Field(max_length=63)], Expression], Field(max_length=16)] = {}
    """Values by which results are broken down, by the label's name."""


ShareDecimal = Annotated[
    DecimalString,
    AfterValidator(
        Matches(
            r"^(0(\.[0-9]{1,9})?|1(\.0{1,9})?)$",
            'must be a share from 0 to 1 like "0.25", with nine digits after the point at most',
        )
    ),
]
"""A share from 0 to 1. Shares are compared and summed exactly, so the number of digits is limited."""


class DatasetFilterSpec(Model):
    """Rows that are left out, beside those with the prompt of an earlier row; the preparation counts them by reason."""

    where: Annotated[list[Expression], Field(max_length=32)] = []
    """Expressions that must all be true for a row, such as ``difficulty > 0.2`` or ``len(prompt) < 4000``. A row without a
    value to compare is left out."""
    max_rejected: ShareDecimal = "0.05"
    """Maximum share of rows whose reference answer, as a reply, does not score 1 by the verifier. They are left out; a run with more
    of them is refused."""
    overlap: Annotated[int, Field(ge=4, le=100)] | None = None
    """Training rows that share as many consecutive words with a held-out prompt, or with one of an evaluation set, are left out, such
    as 13; default: only those with the same text."""


class DatasetSource(Model):
    """Problems in files of any layout, read once by the preparation into a file of the run's directory."""

    files: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)
        ]
        | None
    ) = None
    """Paths or globs of ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet`` and ``.arrow`` files, also compressed (``.gz``,
    ``.xz``, ``.bz2``, ``.zst``); on one machine relative to the run file, on a cluster absolute, on a mounted volume. A glob's
    files are sorted by name."""
    hub: HubDataset | None = None
    """A data set on a hub, downloaded before the run starts; give this or files."""
    columns: ColumnsSpec = ColumnsSpec()
    """Where the fields of a problem are; default: by the layout that the columns are recognized as."""
    answer_pattern: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Where the answer is in the answer's text: ``Hashes`` (after the last ``####``), ``Boxed`` (in the last ``\\boxed{}``), or a
    regular expression with one group, of which the last match counts."""
    metadata: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)] | None
    ) = None
    """Columns that are kept beside the fields; default: all that are not mapped."""
    filter: DatasetFilterSpec = DatasetFilterSpec()
    """Rows that are left out."""

    rules = (exactly_one("files", "hub"),)


class PythonVerifier(Model):
    """A function in a Python file or an installed package, which is trusted code."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Python file: on one machine, relative to the run file; on a cluster, absolute, on a mounted volume or in the images."""
    module: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Installed module, in place of path."""
    function: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the function there."""
    signature: Literal["score", "group", "verl", "trl"] = "score"
    """Arguments: see docs/tasks.md."""
    parameters: Annotated[
        dict[str, Annotated[int | bool | str | list[int] | list[str], BeforeValidator(parameter_value)]],
        Field(max_length=64),
    ] = {}
    """Further arguments; write fractions as strings (``"0.5"``)."""

    rules = (exactly_one("path", "module"),)


class CodeVerifier(Model):
    """Python programs in completions, which run in a sandbox; the prompts' answers are their tests."""

    partial: Literal["All", "Share"] = "All"
    """``All``: 1 if all tests are passed. ``Share``: the share of tests that are passed."""
    cpu_seconds: Annotated[int, Field(ge=1, le=120)] = 4
    """CPU time of a test."""
    memory: GraderQuantity = "512Mi"
    """Memory limit of a program, beside that of the scoring process."""


class HttpVerifier(Model):
    """A reward service; docs/reward-service.yaml has its interface. A token is the variable ``REWARD_TOKEN``, from a Secret."""

    url: Annotated[
        str,
        Field(max_length=2048),
        AfterValidator(
            Matches(
                r"^https?://[^/@ ]+(/[^ ]*)?$",
                "must be http://host:port/… or https://host/…, without a password: that is the variable REWARD_TOKEN",
            )
        ),
    ]
    """Address that requests are sent to."""
    batch: Annotated[int, Field(ge=1, le=4096)] = 64
    """Maximum completions of a request."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    """Maximum concurrent requests of a generator."""


_BUILT_IN: Final = f"has(self.name) && self.name in {list(BUILT_IN_VERIFIERS)}"


class VerifierSpec(Model):
    """How completions are scored, and the limits of scoring. Completions are untrusted input."""

    name: PluginName | None = None
    """``reasoning-gym``: the data set's own scorer. ``exact``: the same text. ``number``: the same number.
    ``math-verify``: the same mathematics. Another name: a verifier of the entry points ``scalerl.verifiers``."""
    parameters: Parameters | None = None
    """Arguments of a verifier of an installed package; write fractions as strings (``"0.5"``)."""
    python: PythonVerifier | None = None
    """A function of your own; give this, name, code or http."""
    code: CodeVerifier | None = None
    """Programs that have to pass tests."""
    http: HttpVerifier | None = None
    """A reward service. While it is down, groups wait, and nothing is trained without their scores."""
    range: Annotated[list[DecimalString], Field(min_length=2, max_length=2)] = ["0", "1"]
    """Lowest and highest reward of your own code. They become the scores 0 and 1."""
    timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    """Time limit for scoring one completion, a group at once, or one request."""
    memory: GraderQuantity = "1Gi"
    """Memory limit of a scoring process."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Scoring processes per generator."""

    rules = (
        exactly_one("name", "python", "code", "http"),
        Rule(
            "double(string(self.range[0])) < double(string(self.range[1]))",
            "%(range)s must have the lowest reward first, and the highest above it",
            "range",
            lambda verifier: float(verifier.range[0]) < float(verifier.range[1]),
        ),
        Rule(
            f"!({_BUILT_IN}) && !has(self.code) || (double(string(self.range[0])) == 0.0 && double(string(self.range[1])) == 1.0)",
            "range is for rewards of your own: built-in verifiers, and code, score from 0 to 1",
            "range",
            lambda verifier: verifier.is_own_code or [float(bound) for bound in verifier.range] == [0, 1],
        ),
        Rule(
            f"!has(self.parameters) || has(self.name) && !({_BUILT_IN})",
            "parameters are for verifiers of installed packages: built-in ones have none",
            "parameters",
            lambda verifier: verifier.parameters is None or verifier.installed is not None,
        ),
    )

    @property
    def installed(self) -> VerifierPlugin | None:
        """The verifier of a package that is named; None: a built-in one, or another way of scoring."""
        if self.name is None or self.name in BUILT_IN_VERIFIERS:
            return None
        return VerifierPlugin(name=self.name, parameters=self.parameters or {})

    @property
    def is_own_code(self) -> bool:
        """Whether the user's own code scores."""
        return self.code is None and self.name not in BUILT_IN_VERIFIERS

    @property
    def title(self) -> str:
        """What scores, for messages."""
        if self.python is not None:
            return f"{Path(self.python.path).name if self.python.path else self.python.module}:{self.python.function}"
        if self.code is not None:
            return "code"
        return self.http.url if self.http else self.name or ""


class WeightedVerifier(VerifierSpec):
    """One of several verifiers, whose scores are combined; its fields are those of ``verifier``, and these."""

    label: Annotated[str, Field(min_length=1, max_length=20)] | None = None
    """Name of its part of the verdict: lower-case letters, digits and ``_``; default: that of the verifier or function."""
    weight: PositiveDecimal = "1"
    """Weight in the sum."""

    @property
    def part(self) -> str:
        """Name of its part of the verdict."""
        if self.label is not None:
            return self.label
        name = self.python.function if self.python else self.name or ("code" if self.code else "http")
        name = re.sub(r"[^a-z0-9_]", "_", name.lower()).lstrip("_0123456789")
        return name[:20] or "verifier"


class PythonEnvironment(Model):
    """A class of your own as an environment, from a file or an installed package, which is trusted code."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Python file: on one machine, relative to the run file; on a cluster, absolute, on a mounted volume or in the images."""
    module: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Installed module, in place of path."""
    class_name: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the class there; see docs/environments.md."""

    rules = (exactly_one("path", "module"),)


USE_VERIFIER: Final = ("retry", "tools")
"""Environments in which the task's verifier scores."""


class EnvironmentSpec(Model):
    """Episodes of several turns: the environment answers each reply of the model, and ends the episode with a reward."""

    name: PluginName | None = None
    """``retry``: the verdict of the task's verifier in words, then another try. ``tools``: calls of tools, then an answer. ``nim``: a
    game. ``server``: the servers of ``spec.environment``. Another name: an environment of the entry points ``scalerl.environments``."""
    python: PythonEnvironment | None = None
    """A class of your own; give this, name or url."""
    url: (
        Annotated[
            str,
            Field(max_length=2048),
            AfterValidator(
                Matches(
                    r"^https?://[^/@ ]+(/[^ ]*)?$",
                    "must be http://host:port or https://host/…, without a password: that is the variable ENVIRONMENT_TOKEN",
                )
            ),
        ]
        | None
    ) = None
    """A server that speaks OpenEnv's protocol. While it is down, episodes wait."""
    parameters: Parameters | None = None
    """Arguments of the environment; write fractions as strings (``"0.5"``)."""
    max_turns: Annotated[int, Field(ge=1, le=1024)] = 8
    """Maximum replies of an episode; after the last, it ends with the reward of that step."""
    max_tokens_per_turn: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Maximum length of a reply. A longer one is cut, and ends the episode. Default: what is left of maxCompletionTokens, which
    counts replies and messages together."""
    turn_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    """Time limit of a step of the environment; of ``retry``, the verifier's limits hold."""
    memory: GraderQuantity = "1Gi"
    """Memory limit of an environment's process; not of ``retry`` and servers."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Environment processes per generator; not of ``retry`` and servers."""

    rules = (exactly_one("name", "python", "url"),)

    @property
    def uses_verifier(self) -> bool:
        """Whether the task's verifier scores the replies."""
        return self.name in USE_VERIFIER

    @property
    def is_server(self) -> bool:
        """Whether a server makes the steps: that of ``url``, or those of ``spec.environment``."""
        return self.url is not None or self.name == SERVER

    @property
    def installed(self) -> EnvironmentPlugin | None:
        """The environment of a package that is named."""
        if self.name is None or self.name in BUILT_IN_ENVIRONMENTS:
            return None
        return EnvironmentPlugin(name=self.name, parameters=self.parameters or {})

    @property
    def is_own_code(self) -> bool:
        """Whether it is the user's own code."""
        return self.is_server or self.name not in BUILT_IN_ENVIRONMENTS

    @property
    def tool_files(self) -> dict[str, str]:
        """Files that tools read, by path of their field."""
        tools = (self.parameters or {}).get("tools") if self.name == "tools" else None
        found = {}
        for at, tool in enumerate(tools if isinstance(tools, list) else ()):
            path = (
                tool["search"].get("path")
                if isinstance(tool, dict) and isinstance(tool.get("search"), dict)
                else None
            )
            if isinstance(path, str):
                found[f"parameters.tools[{at}].search.path"] = path
        return found

    @property
    def title(self) -> str:
        """The environment, for messages."""
        if self.python is None:
            return self.url or self.name or ""
        return f"{Path(self.python.path).name if self.python.path else self.python.module}:{self.python.class_name}"


VerifierList = Annotated[list[WeightedVerifier], Field(min_length=1, max_length=8)]


class PromptSpec(Model):
    """How the text of a problem becomes the prompt of the model."""

    format: Literal["Raw", "Chat"] = "Raw"
    """``Chat`` applies the tokenizer's chat template."""
    template: Annotated[str, Field(max_length=16_384)] = "{prompt}"
    """Template of the user message; ``{prompt}`` is replaced by the text of the problem."""
    system: Annotated[str, Field(max_length=16_384)] | None = None
    """System message; requires ``format: Chat``."""
    chat_template: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None
    """Chat template (Jinja) in place of the tokenizer's; requires ``format: Chat``. Exported models keep the tokenizer's."""

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
        Rule(
            "!has(self.chatTemplate) || self.format == 'Chat'",
            "chatTemplate needs format: Chat",
            "chatTemplate",
            lambda prompt: prompt.chat_template is None or prompt.format == "Chat",
        ),
    )


class HeldOutSpec(Model):
    """Prompts excluded from training; their mean score is the curve. Fixed for the whole run."""

    size: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Number of held-out prompts. ScaleRL: 1,000 [P]."""
    graphs: OpenUnitDecimal | None = None
    """With a plugin whose problems have graphs of operations (opgraph): share of the graphs that are held out. Held-out prompts have
    only these graphs, and training prompts none of them, under any names. Default: held-out prompts differ from training prompts
    in text only."""


class SourcesSpec(Model):
    """Alternative sources of problems."""

    reasoning_gym: ReasoningGymSource | None = None
    """Procedurally generated problems; give this, jsonl, dataset or plugin."""
    jsonl: JsonlSource | None = None
    """Problems from a file; give this, reasoningGym, dataset or plugin."""
    dataset: DatasetSource | None = None
    """Problems from files of any layout, or of a hub; give this, reasoningGym, jsonl or plugin."""
    plugin: SourcePlugin | None = None
    """Problems of a source of the entry points ``scalerl.sources``, such as opgraph; give this, reasoningGym, jsonl or dataset."""


class ScoringSpec(SourcesSpec):
    """Sources with the verifiers of their completions."""

    verifier: VerifierSpec | None = None
    """How completions are scored, and the limits of scoring."""
    verifiers: VerifierList | None = None
    """Several verifiers, in place of one; each is a part of the verdict."""
    combine: Literal["Sum", "Product"] = "Sum"
    """How the scores of verifiers are combined. Sum: by their weights, as a mean. Product: multiplied, as by a gate."""
    environment: EnvironmentSpec | None = None
    """Episodes of several turns; in place of a verifier, except for ``retry`` and ``tools``, which use it."""

    @property
    def own_environment(self) -> EnvironmentSpec | None:
        """The environment, if it scores its episodes itself."""
        return None if self.environment is None or self.environment.uses_verifier else self.environment

    @property
    def stepping_environment(self) -> EnvironmentSpec | None:
        """The environment, if it makes its steps itself, and not by the task's verifier alone."""
        return None if self.environment is None or self.environment.name == "retry" else self.environment

    @property
    def scoring(self) -> Sequence[VerifierSpec]:
        """The verifiers: one, several, or with an environment of its own rewards none."""
        return [self.verifier] if self.verifier is not None else self.verifiers or ()


def _names(task: ScoringSpec, several: bool) -> list[str]:
    given = task.verifiers or () if several else [task.verifier] if task.verifier is not None else ()
    return [one.name for one in given if one.name is not None]


def _verifier_rules(field: str, given: str, verifier: str, end: str, several: bool) -> tuple[Rule, ...]:
    """given: CEL up to the condition for ``verifier``; end: closes it."""
    return (
        Rule(
            f"{given} || !has({verifier}.name) || {verifier}.name != 'reasoning-gym' || has(self.reasoningGym){end}",
            "verifier reasoning-gym scores reasoningGym data only; use exact, number or math-verify",
            field,
            lambda task: task.reasoning_gym is not None or "reasoning-gym" not in _names(task, several),
        ),
    )


SCORED_BY: Final = (
    "has(self.verifier), has(self.verifiers), "
    f"has(self.environment) && (!has(self.environment.name) || !(self.environment.name in {list(USE_VERIFIER)}))"
)
"""What scores a task, in CEL."""


def scored_by(task: ScoringSpec) -> int:
    """Number of fields that score a task; see :data:`SCORED_BY`."""
    return sum(one is not None for one in (task.verifier, task.verifiers, task.own_environment))


VERIFIER_RULES: Final = (
    *_verifier_rules("verifier.name", "!has(self.verifier)", "self.verifier", "", False),
    *_verifier_rules("verifiers", "!has(self.verifiers) || self.verifiers.all(v, false", "v", ")", True),
)
"""Rules for the combination of a source and a verifier, if they are given."""
HELD_OUT_RULES: Final = (
    Rule(
        "!has(self.reasoningGym) || self.heldOut.size < self.reasoningGym.size",
        "%(heldOut.size)s must be less than %(reasoningGym.size)s: problems to train on have to be left",
        "heldOut.size",
        lambda task: task.reasoning_gym is None or task.held_out.size < task.reasoning_gym.size,
    ),
    Rule(
        "!has(self.heldOut.graphs) || has(self.plugin)",
        "heldOut.graphs needs a plugin, such as opgraph: other sources have no graphs",
        "heldOut.graphs",
        lambda task: task.held_out.graphs is None or task.plugin is not None,
    ),
)
"""Rules for the held-out prompts of a training source."""


class ProblemSpec(ScoringSpec):
    """A source of problems with its verifier and prompt format; common to training and evaluation."""

    prompt: PromptSpec | None
    """How the text of a problem becomes a prompt."""

    rules: ClassVar[tuple[Rule, ...]] = (
        exactly_one("reasoningGym", "jsonl", "dataset", "plugin"),
        Rule(
            f"[{SCORED_BY}].exists_one(given, given)",
            "give exactly one of verifier, verifiers and environment; environments retry and tools need a verifier, which they use",
            "verifier",
            lambda task: scored_by(task) == 1,
        ),
        *VERIFIER_RULES,
    )

    @property
    def source_field(self) -> str:
        """Name of the given source field."""
        given = (("jsonl", self.jsonl), ("dataset", self.dataset), ("reasoningGym", self.reasoning_gym))
        return next((name for name, section in given if section), "plugin")


class TaskSpec(ProblemSpec):
    """A training task."""

    prompt: PromptSpec = PromptSpec()
    """How the text of a problem becomes a prompt."""
    held_out: HeldOutSpec = HeldOutSpec()
    """Prompts excluded from training; their mean score is the curve."""

    rules: ClassVar[tuple[Rule, ...]] = (*ProblemSpec.rules[:2], *HELD_OUT_RULES, *VERIFIER_RULES)


class EvaluationTaskSpec(ProblemSpec):
    """The problems of an evaluation set. Problems with the same text are excluded from training."""

    prompt: PromptSpec | None = None
    """How the text of a problem becomes a prompt; default: ``task.prompt``; with a mix, the text alone."""
    size: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Number of problems; default: 1000, or all problems of a smaller source."""

    rules = (
        *ProblemSpec.rules,
        Rule(
            "!has(self.size) || !has(self.reasoningGym) || self.size <= self.reasoningGym.size",
            "%(size)s must be at most %(reasoningGym.size)s, the problems that there are",
            "size",
            lambda task: (
                task.size is None or task.reasoning_gym is None or task.size <= task.reasoning_gym.size
            ),
        ),
    )
