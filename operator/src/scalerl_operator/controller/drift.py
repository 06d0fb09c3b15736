"""Drift: whether an object is as rendered. Pure.

What the API server and others add is left alone: fields that the rendered object does not have, and items of lists
that the API merges by a key. Two things do not count as different: a quantity written otherwise, and an empty value
that the API server does not keep. That a field was rendered once and is no longer is told by the object's own hash
(``scalerl.dev/rendered``), which is a field like all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import zip_longest
from typing import Any, Final

from scalerl_operator.build.quantities import value
from scalerl_operator.kube.types import Object

_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "ownerReferences": ("uid",),
}
"""Lists that the API merges, by what it tells their items apart."""
_PORT_KEYS: Final = (("containerPort", "protocol"), ("port", "protocol"))
_SETS: Final = ("finalizers", "tolerations")
"""Of these, each of ours has to be there; admission and queues add their own."""
_QUANTITIES: Final = ("sizeLimit", "divisor")
_AMOUNTS: Final = ("requests", "limits")
"""Every value in these is a quantity too."""
_MAPS: Final = ("labels", "annotations", "nodeSelector", "matchLabels", "requests", "limits")
"""An empty map of these names is not kept; any other empty object says something (``emptyDir: {}``)."""
_FALSE_IS_DEFAULT: Final = ("readOnly",)
_IDENTITY: Final = ("apiVersion", "kind")
"""Not in the items of a list, and not what could differ."""
_SHOWN: Final = 60
_MISSING: Final = object()
Difference = tuple[str, Any, Any]
"""Path, what is there, what is wanted."""


def differs(desired: Object, live: Object) -> str | None:
    """The first field of ``desired`` that ``live`` does not have so, as a path with both values; None: all is as desired.

    >>> differs({"spec": {"replicas": 2}}, {"spec": {"replicas": 1, "paused": True}})
    'spec.replicas is 1, not 2'
    """
    found = next(_differences(desired, live, "", ""), None)
    return None if found is None else told(desired, found)


def differences(desired: Object, live: Object) -> list[Difference]:
    """Every field of ``desired`` that ``live`` does not have so."""
    return list(_differences(desired, live, "", ""))


def told(desired: Object, difference: Difference) -> str:
    """A difference for people; of a Secret without the values."""
    path, is_now, wanted = difference
    if desired.get("kind") == "Secret":
        return f"{path} is different"
    said = "and is not wanted" if wanted is _MISSING else f"not {_shown(wanted)}"
    return f"{path} is {_shown(is_now)}, {said}"


def _differences(desired: Any, live: Any, name: str, path: str) -> Iterator[Difference]:
    """``name``: of the field that has these values; ``path``: to it."""
    if _is_empty(desired, name) and (live is _MISSING or _is_empty(live, name)):
        return
    if isinstance(desired, dict) and isinstance(live, dict):
        for key, wanted in desired.items():
            if path or key not in _IDENTITY:
                below = f"{path}.{key}" if path else key
                child = _QUANTITIES[0] if name in _AMOUNTS else key
                yield from _differences(wanted, live.get(key, _MISSING), child, below)
    elif isinstance(desired, list) and isinstance(live, list):
        yield from _in_lists(desired, live, name, path)
    elif not _same(desired, live, name):
        yield path, live, desired


def _in_lists(desired: list[Any], live: list[Any], name: str, path: str) -> Iterator[Difference]:
    keys = _keys(name, desired)
    if keys is not None:
        there = {_key(item, keys): item for item in live}
        for wanted in desired:
            key = _key(wanted, keys)
            below = f"{path}[{'/'.join(map(str, key))}]"
            yield from _differences(wanted, there.get(key, _MISSING), "", below)
    elif name in _SETS:
        for wanted in desired:
            if not any(next(_differences(wanted, item, "", ""), None) is None for item in live):
                yield path, live, wanted
    else:
        for index, (wanted, is_now) in enumerate(zip_longest(desired, live, fillvalue=_MISSING)):
            below = f"{path}[{index}]"
            if wanted is _MISSING:
                yield below, is_now, _MISSING
            else:
                yield from _differences(wanted, is_now, "", below)


def _keys(name: str, items: list[Any]) -> tuple[str, ...] | None:
    """What tells the items of a list apart; None: their place does."""
    if name != "ports":
        return _KEYS.get(name)
    if not all(isinstance(item, dict) for item in items):
        return None
    containers, services = _PORT_KEYS
    if all("containerPort" in item for item in items):
        return containers
    return services if all("targetPort" in item for item in items) else None  # a NetworkPolicy's have no key


def _key(item: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    given = item if isinstance(item, dict) else {}
    return tuple(given.get(key, "TCP" if key == "protocol" else None) for key in keys)


def _is_empty(given: Any, name: str) -> bool:
    if given == {} and isinstance(given, dict):
        return name in _MAPS
    return given is None or given in ("", []) or (given is False and name in _FALSE_IS_DEFAULT)


def _same(desired: Any, live: Any, name: str) -> bool:
    if type(desired) is type(live) and desired == live:  # by type too: True is no 1
        return True
    wanted = _amount(desired) if name in _QUANTITIES else None
    return wanted is not None and wanted == _amount(live)


def _amount(given: Any) -> Fraction | None:
    if isinstance(given, bool) or not isinstance(given, str | int):
        return None
    try:
        return value(str(given))
    except ValueError:
        return None


def _shown(given: Any) -> str:
    if given is _MISSING:
        return "not there"
    text = repr(given)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
