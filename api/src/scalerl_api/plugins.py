"""Sections of a spec that name something of an installed package, and the checks of these names (:mod:`.registry`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, BeforeValidator, Field

from scalerl_api.fields import Model
from scalerl_api.registry import Kind, PluginError, bound, entry_point, make
from scalerl_api.source_kind import SourceKind

MAX_DEPTH: Final = 32
"""Maximum depth of lists and objects in a parameter."""


def free_value(value: Any) -> Any:
    """Check that a value is plain JSON of at most :data:`MAX_DEPTH` levels without floats, which other writers of JSON would change.

    >>> free_value({"sizes": [1, 2], "share": "0.5"})
    {'sizes': [1, 2], 'share': '0.5'}
    """
    return _free_value(value, MAX_DEPTH)


def _free_value(value: Any, levels: int) -> Any:
    if isinstance(value, float):
        raise ValueError('floats are not allowed in a spec; write them as strings, like "0.5"')
    if isinstance(value, Mapping | list) and not levels:
        raise ValueError(f"lists and objects are nested deeper than {MAX_DEPTH} levels; make it flatter")
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ValueError("the names of an object must be strings")
        return {name: _free_value(one, levels - 1) for name, one in value.items()}
    if isinstance(value, list):
        return [_free_value(one, levels - 1) for one in value]
    if value is not None and not isinstance(value, int | str):
        raise ValueError("must be made of integers, booleans, strings, lists and objects")
    return value


PluginName = Annotated[str, Field(min_length=1, max_length=128)]
Parameters = Annotated[dict[str, Annotated[Any, BeforeValidator(free_value)]], Field(max_length=64)]
"""A free object: what is named checks it. Fractions are strings (``"0.5"``)."""


class PluginSpec(Model):
    """A class or function of an installed package, found by its entry point."""

    kind: ClassVar[Kind]

    name: PluginName
    """Name of the entry point."""
    parameters: Parameters = {}
    """Arguments of what it names; write fractions as strings (``"0.5"``)."""


class SourcePlugin(PluginSpec, SourceKind):
    """A source of an installed package."""

    kind = Kind.SOURCE


class VerifierPlugin(PluginSpec):
    """A verifier of an installed package."""

    kind = Kind.VERIFIER


class EnvironmentPlugin(PluginSpec):
    """An environment of an installed package."""

    kind = Kind.ENVIRONMENT


class LossPlugin(PluginSpec):
    """A loss of an installed package."""

    kind = Kind.LOSS


class DrafterPlugin(PluginSpec):
    """A drafter of an installed package."""

    kind = Kind.DRAFTER


class SchedulePlugin(PluginSpec):
    """A schedule of an installed package."""

    kind = Kind.SCHEDULE


class TrackerPlugin(PluginSpec):
    """A tracker of an installed package."""

    kind = Kind.TRACKER


def plugins(section: BaseModel, path: str = "spec") -> Iterator[tuple[str, PluginSpec]]:
    """Fields of a spec that name a plugin, with what they name."""
    named = getattr(section, "installed", None)
    if isinstance(named, PluginSpec):
        yield f"{path}.name", named
    for name, field in type(section).model_fields.items():
        value, at = getattr(section, name), f"{path}.{field.alias}"
        entries = (
            {f"{at}[{i}]": one for i, one in enumerate(value)} if isinstance(value, list) else {at: value}
        )
        for where, one in entries.items():
            if isinstance(one, PluginSpec):
                yield where, one
            elif isinstance(one, BaseModel):
                yield from plugins(one, where)


_ARGUMENTS: Final = {Kind.LOSS: 0, Kind.SCHEDULE: 0, Kind.TRACKER: 2, Kind.DRAFTER: 3}
"""Arguments before the parameters; sources, verifiers and environments are opened by the checks of tasks."""


def problems(
    spec: BaseModel, kinds: Collection[Kind] = tuple(Kind), *, load: bool = False
) -> list[tuple[str, str]]:
    """Field and problem of each name of ``kinds`` in a spec that is not installed here.

    Args:
        load: also import what they name, and check the parameters.
    """
    found = []
    for path, plugin in plugins(spec):
        kind = plugin.kind
        try:
            if kind not in kinds:
                continue
            if not load or kind not in _ARGUMENTS:
                entry_point(kind, plugin.name)
            elif _ARGUMENTS[kind]:
                bound(entry_point(kind, plugin.name), plugin.parameters, *[None] * _ARGUMENTS[kind])
            else:
                make(kind, plugin.name, plugin.parameters)
        except PluginError as error:
            found.append((path, str(error)))
    return found
