"""Field types of the resource: decimals as strings, quantities, camelCase models.

Kubernetes API conventions forbid floats in a spec, because they do not survive every
JSON round trip; a decimal is a string here (``"3e-4"``) and becomes a float at the one
place that computes with it.

Checks that a regular expression cannot make are small callable values (:class:`InRange`, :class:`AtLeast`), so
that the custom resource definition, which is written from these types, can say the same in its own language.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel, to_snake
from pydantic_core import to_jsonable_python

_DECIMAL = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,2})?$"
_QUANTITY = r"^([0-9]+)(Ki|Mi|Gi|Ti|k|M|G|T)?$"
_QUANTITY_FACTORS = {
    None: 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


@dataclass(frozen=True)
class Rule:
    """What has to hold of a model: in Python for pydantic, in CEL for an API server."""

    cel: str
    message: str
    """``%(path)s`` names a field; a model's refusal adds its value. A literal per cent sign is ``%%``."""
    field: str = ""
    """The field to mend, from where the rule stands."""
    holds: Callable[[Any], bool] | None = None
    """None: only an API server checks it."""
    changes: bool = False
    """The rule compares with the value before, so only a change can break it."""
    kept: bool = False
    """An object that broke the rule before it was introduced may keep doing so: else it could not be suspended."""
    one_of: tuple[str, ...] = ()
    """The fields of which one is to be given; a model's refusal says which are."""

    def refusal(self, model: BaseModel) -> str:
        """What is said of a model that breaks the rule, with its values as YAML has them."""
        given = [name for name in self.one_of if _at(model, name) is not None]
        return self.message % _Paths(model) + (f"; given are {', '.join(given)}" if given else "")

    def as_validation(self) -> dict[str, Any]:
        """An entry of ``x-kubernetes-validations``."""
        entry: dict[str, Any] = {"rule": self.cel, "message": self.message % _Paths()}
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        if self.changes:
            entry["reason"] = "FieldValueForbidden"
        if self.kept:
            before = re.sub(r"\bself\b", "oldSelf.value()", self.cel)
            entry["rule"] = f"({self.cel}) || (oldSelf.hasValue() && !({before}))"
            entry["optionalOldSelf"] = True
        return entry


class _Paths(dict[str, str]):
    """Each path as itself; with a model, followed by its value there."""

    def __init__(self, model: BaseModel | None = None) -> None:
        self.model = model

    def __missing__(self, path: str) -> str:
        if self.model is None:
            return path
        value = to_jsonable_python(_at(self.model, path), by_alias=True, exclude_none=True)
        return f"{path} ({value if isinstance(value, str) else json.dumps(value)})"


def _at(model: BaseModel, path: str) -> Any:
    return reduce(getattr, to_snake(path).split("."), model)


class Model(BaseModel):
    """Base of every spec object: camelCase in YAML, snake_case in Python, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        strict=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Checks across fields. A rule may rely on the defaults of fields of nested models, which an API server applies
    first, but not on those of the model's own: ``{}``, a model's default, is checked as it stands when the definition
    is installed."""

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        for rule in self.rules:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.refusal(self))
        return self


def exactly_one(*names: str) -> Rule:
    """Of those fields, one and no more is given."""
    given = ", ".join(f"has(self.{name})" for name in names)
    return Rule(
        f"[{given}].exists_one(given, given)",
        f"give exactly one of {', '.join(names)}",
        holds=lambda model: sum(_at(model, name) is not None for name in names) == 1,
        one_of=names,
    )


def at_most_one(*names: str) -> Rule:
    """Of those fields, no more than one is given."""
    given = ", ".join(f"has(self.{name})" for name in names)
    return Rule(
        f"[{given}].filter(given, given).size() <= 1",
        f"give no more than one of {', '.join(names)}",
        holds=lambda model: sum(_at(model, name) is not None for name in names) <= 1,
        one_of=names,
    )


def decimal_input(value: Any) -> Any:
    """An integer passes for a decimal string; a float never does."""
    if isinstance(value, bool):
        raise ValueError("expected a decimal number written as a string")
    if isinstance(value, float):
        raise ValueError(f'floats are not allowed in a spec; write it as a string: "{value!r}"')
    if isinstance(value, int):
        return str(value)
    return value


@dataclass(frozen=True)
class Matches:
    """A pattern, in what Python and RE2 have in common, and the message about a value that does not match."""

    pattern: str
    message: str

    def __call__(self, value: str) -> str:
        if re.fullmatch(self.pattern, value) is None:
            raise ValueError(self.message)
        return value


@dataclass(frozen=True)
class InRange:
    """Bounds of a decimal; ``above`` and ``below`` are open."""

    above: float = -math.inf
    least: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __call__(self, value: str) -> str:
        number = float(value)
        if number <= self.above:
            raise ValueError(f"must be greater than {self.above:g}, got {value}")
        if number < self.least:
            raise ValueError(f"must be at least {self.least:g}, got {value}")
        if number > self.most:
            raise ValueError(f"must be at most {self.most:g}, got {value}")
        if number >= self.below:
            raise ValueError(f"must be less than {self.below:g}, got {value}")
        return value


A_DECIMAL = Matches(
    _DECIMAL, 'must be a decimal number in quotes, like "0.1" or "3e-4", its exponent of two digits at most'
)
"""So short that a float holds every one."""
DECIMAL_FORM = 'A fraction or an exponent is written in quotes: "0.5", "3e-4".'
"""For descriptions. A schema with ``x-kubernetes-int-or-string`` cannot take a JSON number with a fraction, and the API
server's refusal ("must be of type integer,string") does not say what to write instead."""
DecimalString = Annotated[
    str, Field(max_length=32), BeforeValidator(decimal_input), AfterValidator(A_DECIMAL)
]
"""A decimal number as a string (an integer is accepted); compute with ``float(value)``."""

PositiveDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0))]
LearningRateDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0, most=1.0))]
"""A step of AdamW moves each weight by about as much: beyond 1, whatever the model knew is gone after it."""
TemperatureDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0, most=100.0))]
"""Beyond 100 every token is as likely as any other."""
SmallDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0, most=1.0))]
WeightDecayDecimal = Annotated[DecimalString, AfterValidator(InRange(least=0.0, most=100.0))]
NonNegativeDecimal = Annotated[DecimalString, AfterValidator(InRange(least=0.0))]
UnitDecimal = Annotated[DecimalString, AfterValidator(InRange(least=0.0, most=1.0))]
OpenUnitDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0, below=1.0))]
HorizonDecimal = Annotated[DecimalString, AfterValidator(InRange(above=1.0, most=16.0))]
"""A multiple of the compute so far: no forecast is credible beyond a few doublings."""
PositiveUnitDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0, most=1.0))]
DecayDecimal = Annotated[DecimalString, AfterValidator(InRange(least=0.0, below=1.0))]
"""A factor of a running mean: at 1 it would never forget its first value."""


def quantity_input(value: Any) -> Any:
    """An integer passes for a quantity."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    Field(max_length=24),
    BeforeValidator(quantity_input),
    AfterValidator(Matches(_QUANTITY, "must be an amount of bytes, like 512Mi or 2Gi")),
]
"""An amount of bytes as Kubernetes writes it: ``"512Mi"``, ``"2Gi"``, ``"1G"``."""


def quantity_bytes(quantity: str) -> int:
    """Bytes in a Kubernetes quantity.

    >>> quantity_bytes("2Gi"), quantity_bytes("1M"), quantity_bytes("7")
    (2147483648, 1000000, 7)
    """
    match = re.fullmatch(_QUANTITY, quantity)
    if match is None:
        raise ValueError(f"not a quantity: {quantity!r}; write bytes like 512Mi or 2Gi")
    return int(match[1]) * _QUANTITY_FACTORS[match[2]]


@dataclass(frozen=True)
class AtLeast:
    """The least that a quantity may be, itself a quantity."""

    least: str

    def __call__(self, value: str) -> str:
        if quantity_bytes(value) < quantity_bytes(self.least):
            raise ValueError(f"must be at least {self.least}, got {value}")
        return value


@dataclass(frozen=True)
class AtMost:
    """The most that a quantity may be, itself a quantity."""

    most: str

    def __call__(self, value: str) -> str:
        if quantity_bytes(value) > quantity_bytes(self.most):
            raise ValueError(f"must be at most {self.most}, got {value}")
        return value


PositiveQuantity = Annotated[Quantity, AfterValidator(AtLeast("1"))]
ClaimQuantity = Annotated[Quantity, AfterValidator(AtLeast("64Mi")), AfterValidator(AtMost("1024Ti"))]
"""Of a run's volume: less holds no model and no journal, and more is no disk's."""
MemoryQuantity = Annotated[Quantity, AfterValidator(AtLeast("1Mi")), AfterValidator(AtMost("64Ti"))]
"""Of a part of a machine's memory that a run uses."""
GraderQuantity = Annotated[Quantity, AfterValidator(AtLeast("64Mi"))]
"""Memory of a process that grades: less than this and it cannot even import what it needs."""
