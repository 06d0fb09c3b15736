"""Field types of the resource: decimals as strings, quantities, camelCase models.

Kubernetes API conventions forbid floats in a spec, because they can change in a JSON round trip. A decimal is a string
here (``"3e-4"``); the code that computes with it converts it to a float.

Checks that a regular expression cannot express are small callable objects (:class:`InRange`, :class:`SizeInRange`), so that the
custom resource definition, which is generated from these types, can express them in CEL.
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

_DECIMAL = r"^[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]{1,2})?$"
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
    """A constraint on a model: a predicate in Python for pydantic, and CEL for the API server."""

    cel: str
    """The constraint in CEL, with ``self`` as the model."""
    message: str
    """Error message. ``%(path)s`` is replaced by the path of a field, in Python followed by its value. A literal per cent sign
    is ``%%``."""
    field: str = ""
    """Path of the field to fix, relative to the model of the rule."""
    holds: Callable[[Any], bool] | None = None
    """The constraint in Python; None: only the API server checks it."""
    changes: bool = False
    """The rule compares with the previous value, so only a change can violate it."""
    kept: bool = False
    """An object that violated the rule before its introduction may continue to do so; otherwise it could not be suspended."""
    expression: str = ""
    """The message in CEL, with the values that the rule compares; empty: ``message``, which an API server also shows if the
    expression fails."""
    one_of: tuple[str, ...] = ()
    """Alternative fields; the error message in Python lists those that are given."""

    def refusal(self, model: BaseModel) -> str:
        """The error message for a model that violates the rule, with the values in JSON."""
        given = [name for name in self.one_of if _at(model, name) is not None]
        return self.message % _Paths(model) + (f"; given are {', '.join(given)}" if given else "")

    def as_validation(self) -> dict[str, Any]:
        """An entry of ``x-kubernetes-validations``."""
        entry: dict[str, Any] = {"rule": self.cel, "message": self.message % _Paths()}
        if self.expression:
            entry["messageExpression"] = self.expression
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        if self.changes:
            entry["reason"] = "FieldValueForbidden"
        if self.kept:
            before = re.sub(r"\bself\b", "old", self.cel)
            entry["rule"] = f"({self.cel}) || oldSelf.optMap(old, !({before})).orValue(false)"
            entry["optionalOldSelf"] = True
        return entry


class _Paths(dict[str, str]):
    """Maps each path to itself; with a model, followed by the model's value there."""

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
    """Base of all spec objects: camelCase in YAML, snake_case in Python, unknown fields rejected."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        strict=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Checks across fields. The CEL of a rule may rely on the defaults of fields of nested models, which the API server applies
    first, but not on the defaults of the model's own fields: when the definition is installed, the API server checks ``{}``,
    the default of a model, without applying them."""

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        for rule in self.rules:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.refusal(self))
        return self


def exactly_one(*names: str) -> Rule:
    """Rule: exactly one of the fields is given."""
    return _one_of(names, 1, "exists_one(given, given)", "exactly one")


def at_most_one(*names: str) -> Rule:
    """Rule: at most one of the fields is given."""
    return _one_of(names, 0, "filter(given, given).size() <= 1", "no more than one")


def _one_of(names: tuple[str, ...], least: int, cel: str, number: str) -> Rule:
    given = ", ".join(f"has(self.{name})" for name in names)
    return Rule(
        f"[{given}].{cel}",
        f"give {number} of {', '.join(names)}",
        holds=lambda model: least <= sum(_at(model, name) is not None for name in names) <= 1,
        one_of=names,
    )


def decimal_input(value: Any) -> Any:
    """Accept an integer as a decimal string; reject a float."""
    if isinstance(value, bool):
        raise ValueError("expected a decimal number written as a string")
    if isinstance(value, float):
        raise ValueError(f'floats are not allowed in a spec; write it as a string: "{value!r}"')
    if isinstance(value, int):
        return str(value)
    return value


@dataclass(frozen=True)
class Matches:
    """A regular expression that text must match entirely."""

    pattern: str
    """The expression, in the common syntax of Python and RE2."""
    message: str

    def __call__(self, value: str) -> str:
        if re.fullmatch(self.pattern, value) is None:
            raise ValueError(self.message)
        return value


@dataclass(frozen=True)
class InRange:
    """Bounds of a decimal."""

    above: float = -math.inf
    """Exclusive lower bound."""
    least: float = -math.inf
    """Inclusive lower bound."""
    most: float = math.inf
    """Inclusive upper bound."""
    below: float = math.inf
    """Exclusive upper bound."""

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
"""Syntax of a decimal. The short exponent keeps every value within the range of a float."""
DECIMAL_FORM = 'Fractions in quotes: "0.5", "3e-4".'
"""Sentence for descriptions. A schema with ``x-kubernetes-int-or-string`` rejects a JSON number with a fraction, and the API
server's error ("must be of type integer,string") does not explain what to write instead."""
DecimalString = Annotated[
    str, Field(max_length=32), BeforeValidator(decimal_input), AfterValidator(A_DECIMAL)
]
"""A decimal number as a string (an integer is accepted); compute with ``float(value)``."""

PositiveDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0))]
LearningRateDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0, most=1.0))]
"""A learning rate. A step of AdamW changes each weight by about the learning rate, so one step above 1 destroys the model."""
TemperatureDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0, most=100.0))]
"""A sampling temperature. Above 100, all tokens are practically equally likely."""
WeightDecayDecimal = Annotated[DecimalString, AfterValidator(InRange(least=0.0, most=100.0))]
NonNegativeDecimal = Annotated[DecimalString, AfterValidator(InRange(least=0.0))]
UnitDecimal = Annotated[DecimalString, AfterValidator(InRange(least=0.0, most=1.0))]
AtLeastOneDecimal = Annotated[DecimalString, AfterValidator(InRange(least=1.0))]
DualClipDecimal = Annotated[DecimalString, AfterValidator(InRange(above=1.0))]
OpenUnitDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0, below=1.0))]
HorizonDecimal = Annotated[DecimalString, AfterValidator(InRange(above=1.0, most=16.0))]
"""A multiple of the compute so far; the bound is four doublings, because forecasts further ahead are not credible."""
PositiveUnitDecimal = Annotated[DecimalString, AfterValidator(InRange(above=0.0, most=1.0))]
DecayDecimal = Annotated[DecimalString, AfterValidator(InRange(least=0.0, below=1.0))]
"""Decay rate of a running mean; at 1 the mean would never change."""


StorePrefix = Annotated[
    str,
    Field(max_length=1024),
    AfterValidator(
        Matches(
            r"^s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/[A-Za-z0-9_][A-Za-z0-9._=+@-]*)+$",
            "must be s3://bucket/prefix, without a slash at the end",
        )
    ),
]
"""A prefix of an S3 bucket."""


def quantity_input(value: Any) -> Any:
    """Accept an integer as a quantity."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    Field(max_length=24),
    BeforeValidator(quantity_input),
    AfterValidator(Matches(_QUANTITY, "must be an amount of bytes, like 512Mi or 2Gi")),
]
"""A number of bytes in Kubernetes notation: ``"512Mi"``, ``"2Gi"``, ``"1G"``."""


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
class SizeInRange:
    """Bounds of a quantity, which are quantities too."""

    least: str
    most: str | None = None

    def __call__(self, value: str) -> str:
        if quantity_bytes(value) < quantity_bytes(self.least):
            raise ValueError(f"must be at least {self.least}, got {value}")
        if self.most is not None and quantity_bytes(value) > quantity_bytes(self.most):
            raise ValueError(f"must be at most {self.most}, got {value}")
        return value


PositiveQuantity = Annotated[Quantity, AfterValidator(SizeInRange("1"))]
ClaimQuantity = Annotated[Quantity, AfterValidator(SizeInRange("64Mi", "1024Ti"))]
"""Size of a run's volume: the minimum for a small model and a journal, up to more than any disk has."""
MemoryQuantity = Annotated[Quantity, AfterValidator(SizeInRange("1Mi", "64Ti"))]
"""Part of a machine's memory."""
GraderQuantity = Annotated[Quantity, AfterValidator(SizeInRange("64Mi"))]
"""Memory of a grading process; with less, its imports fail."""


@dataclass(frozen=True)
class Unique:
    """Requires distinct values of ``key``, which all entries of the list have."""

    key: str

    def __call__(self, values: list[Any]) -> list[Any]:
        seen: set[str] = set()
        for value in values:
            name = key_of(value, self.key)
            if name in seen:
                raise ValueError(f"{self.key} {name} is given twice")
            seen.add(name)
        return values


def key_of(item: Any, key: str) -> Any:
    """The value of ``key`` of an entry, a model or a Kubernetes object."""
    return item[key] if isinstance(item, dict) else getattr(item, key)
