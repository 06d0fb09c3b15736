"""Field types of the resource: decimals as strings, quantities, camelCase models.

Kubernetes API conventions forbid floats in a spec, because they do not survive every
JSON round trip; a decimal is a string here (``"3e-4"``) and becomes a float at the one
place that computes with it.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

_DECIMAL = r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"
_QUANTITY = r"^(\d+)(Ki|Mi|Gi|Ti|k|M|G|T)?$"
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


class Model(BaseModel):
    """Base of every spec object: camelCase in YAML, snake_case in Python, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, validate_default=True
    )


def _decimal_input(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a decimal number written as a string")
    if isinstance(value, float):
        raise ValueError(f'floats are not allowed in a spec; write it as a string: "{value!r}"')
    if isinstance(value, int):
        return str(value)
    return value


def _in_range(
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> AfterValidator:
    """``above`` and ``below`` are open bounds. What a float cannot hold (``1e999``) is refused in any range."""

    def check(value: str) -> str:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{value} is more than a number can be here; write a smaller one")
        if number <= above:
            raise ValueError(f"must be greater than {above:g}, got {value}")
        if number < least:
            raise ValueError(f"must be at least {least:g}, got {value}")
        if number > most:
            raise ValueError(f"must be at most {most:g}, got {value}")
        if number >= below:
            raise ValueError(f"must be less than {below:g}, got {value}")
        return value

    return AfterValidator(check)


DecimalString = Annotated[str, BeforeValidator(_decimal_input), Field(pattern=_DECIMAL, max_length=32)]
"""A decimal number as a string (an integer is accepted); compute with ``float(value)``."""

PositiveDecimal = Annotated[DecimalString, _in_range(above=0.0)]
NonNegativeDecimal = Annotated[DecimalString, _in_range(least=0.0)]
UnitDecimal = Annotated[DecimalString, _in_range(least=0.0, most=1.0)]
OpenUnitDecimal = Annotated[DecimalString, _in_range(above=0.0, below=1.0)]
HorizonDecimal = Annotated[DecimalString, _in_range(above=1.0, most=16.0)]
"""A multiple of the compute so far: no curve can be believed further ahead than a few doublings."""
PositiveUnitDecimal = Annotated[DecimalString, _in_range(above=0.0, most=1.0)]
DecayDecimal = Annotated[DecimalString, _in_range(least=0.0, below=1.0)]
"""A factor of a running mean: at 1 it would never forget its first value."""


def _quantity_input(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[str, BeforeValidator(_quantity_input), Field(pattern=_QUANTITY, max_length=24)]
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


def _at_least(least: str) -> AfterValidator:
    def check(value: str) -> str:
        if quantity_bytes(value) < quantity_bytes(least):
            raise ValueError(f"must be at least {least}, got {value}")
        return value

    return AfterValidator(check)


PositiveQuantity = Annotated[Quantity, _at_least("1")]
GraderQuantity = Annotated[Quantity, _at_least("64Mi")]
"""Memory of a process that grades: less than this and it cannot even import what it needs."""
