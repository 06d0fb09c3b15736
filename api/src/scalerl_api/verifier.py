"""Verifiers: what scores a completion."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from scalerl_api.built_in import BUILT_IN_VERIFIERS
from scalerl_api.fields import (
    DecimalString,
    GraderQuantity,
    Matches,
    Model,
    PositiveDecimal,
    Rule,
    exactly_one,
)
from scalerl_api.plugins import Parameters, PluginName, VerifierPlugin


def parameter_value(value: Any) -> Any:
    """Check the type of a parameter, with one error message in place of one for each type of the union."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, float) for item in items):
        raise ValueError('floats are not allowed in a spec; write them as strings, like "0.5"')
    if not all(isinstance(item, int | str) for item in items):
        raise ValueError("must be an integer, a boolean, a string, or a list of these")
    return value


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
        if self.label is not None:
            return self.label
        name = self.python.function if self.python else self.name or ("code" if self.code else "http")
        name = re.sub(r"[^a-z0-9_]", "_", name.lower()).lstrip("_0123456789")
        return name[:20] or "verifier"


VerifierList = Annotated[list[WeightedVerifier], Field(min_length=1, max_length=8)]
