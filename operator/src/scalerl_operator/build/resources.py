"""Resources of containers, in the form in which the API server gives quantities back. Pure."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

from scalerl_api.pods import PodResources
from scalerl_operator.kube.types import Object
from scalerl_operator.workloads import Container

_MI: Final = 2**20
# Requests by container: CPU where the spec sets no threads, and memory without any model, cache or grader.
# Coordinator and actor wait more than they compute; a whole core for each would not fit on small clusters. Neither has a
# limit. The spec does not say what a model needs on the CPU: users set that in podTemplate.
_FLOORS: Final = {
    "prepare": ("1", 1024 * _MI),
    "coordinator": ("250m", 256 * _MI),
    "server": ("1", 1024 * _MI),
    "actor": ("250m", 256 * _MI),
    "trainer": ("1", 1024 * _MI),
}
_WAITING: Final = ("coordinator", "actor")
NATIVE: Final = ("cpu", "memory", "ephemeral-storage")
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(|[numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)")
_DECIMAL: Final = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_NANO = 10**9


def resources(
    container: Container, given: PodResources, device_resource: str, *, processes: int = 1, shm: int = 0
) -> Object:
    """Requests and limits for ``processes`` processes of the container that share ``shm`` bytes of ``/dev/shm``.

    ``given``, from podTemplate, overrides all but the devices. A limit without a request is also the request, as the API
    server defaults it.
    """
    cpu, memory = _FLOORS[container.name]
    needs = container.resources
    if needs.cpu_threads is not None and container.name not in _WAITING:
        cpu = str(needs.cpu_threads)
    if processes > 1:
        cpu = str(processes * int(cpu))
    requests = {"cpu": cpu, "memory": binary(processes * (memory + (needs.memory_bytes or 0)) + shm)}
    requests |= given.limits
    requests |= given.requests
    limits = dict(given.limits)
    if needs.devices:
        requests[device_resource] = limits[device_resource] = str(processes * needs.devices)
    both = {"requests": _canonical(requests)}
    return both | ({"limits": _canonical(limits)} if limits else {})


def native(given: PodResources) -> PodResources:
    """Without extended resources such as devices, which the preparation does not use."""
    return PodResources(
        requests={name: amount for name, amount in given.requests.items() if name in NATIVE},
        limits={name: amount for name, amount in given.limits.items() if name in NATIVE},
    )


def _canonical(amounts: dict[str, str]) -> dict[str, str]:
    return {name: canonical(amount) for name, amount in sorted(amounts.items())}


# --- quantities ----------------------------------------------------------------------------------------------


def value(quantity: str) -> Fraction:
    """Number that a quantity stands for, rounded up to a billionth.

    >>> value("1500m"), value("2Ki"), value("0.1n") == value("1n")
    (Fraction(3, 2), Fraction(2048, 1), True)

    Raises:
        ValueError: it is no quantity.
    """
    number, suffix = _split(quantity)
    return Fraction(math.ceil(number * _factor(suffix) * _NANO), _NANO)


def canonical(quantity: str) -> str:
    """The quantity as the API server returns it: with the largest suffix that leaves no fraction.

    >>> canonical("1024Mi"), canonical("0.5"), canonical("1000m"), canonical("1.5Gi"), canonical("4")
    ('1Gi', '500m', '1', '1536Mi', '4')

    Raises:
        ValueError: it is no quantity.
    """
    amount, (_, suffix) = value(quantity), _split(quantity)
    if suffix in _BINARY and amount.denominator == 1 and abs(amount) >= 1024:
        return binary(int(amount))
    return _decimal(amount, exponent=len(suffix) > 1 and suffix[0] in "eE" and suffix not in _BINARY)


def binary(count: int) -> str:
    """Quantity of ``count`` bytes.

    >>> binary(1280 * 2**20), binary(1000)
    ('1280Mi', '1000')
    """
    for suffix, power in reversed(_BINARY.items()):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{suffix}"
    return str(count)


def _split(quantity: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is no quantity; write it like 500m, 2 or 16Gi")
    return Fraction(match[1]), match[2]


def _factor(suffix: str) -> Fraction:
    if suffix in _BINARY:
        return Fraction(1024 ** _BINARY[suffix])
    if len(suffix) > 1:
        return Fraction(10) ** int(suffix[1:])
    return Fraction(10) ** next(power for power, name in _DECIMAL.items() if name == suffix)


def _decimal(amount: Fraction, *, exponent: bool) -> str:
    count = int(amount * _NANO)
    if not count:
        return "0"
    power = max(p for p in _DECIMAL if count % 10 ** (p + 9) == 0)
    number = count // 10 ** (power + 9)
    if exponent:
        return f"{number}e{power}" if power else str(number)
    return f"{number}{_DECIMAL[power]}"
