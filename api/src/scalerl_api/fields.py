"""Field types of the resource: decimals as strings, quantities, camelCase models.

Kubernetes API conventions forbid floats in a spec, because they do not survive every
JSON round trip; a decimal is a string here (``"3e-4"``) and becomes a float at the one
place that computes with it.
"""

from __future__ import annotations

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


def _in_range(low: float | None, high: float | None, low_open: bool) -> AfterValidator:
    def check(value: str) -> str:
        number = float(value)
        if low is not None and (number <= low if low_open else number < low):
            raise ValueError(f"must be {'greater than' if low_open else 'at least'} {low:g}, got {value}")
        if high is not None and number > high:
            raise ValueError(f"must be at most {high:g}, got {value}")
        return value

    return AfterValidator(check)


DecimalString = Annotated[str, BeforeValidator(_decimal_input), Field(pattern=_DECIMAL, max_length=32)]
"""A decimal number as a string (an integer is accepted); compute with ``float(value)``."""

PositiveDecimal = Annotated[DecimalString, _in_range(0.0, None, True)]
NonNegativeDecimal = Annotated[DecimalString, _in_range(0.0, None, False)]
UnitDecimal = Annotated[DecimalString, _in_range(0.0, 1.0, False)]


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
