"""Named things of installed packages, by their entry points: one mechanism for all kinds.

    a section of the spec ─▶ plugins.plugins() ─▶ entry_point() ─▶ plugins.problems(): installed, and takes its parameters
                                                       └─────────▶ make(): the object, where the run uses it

The name in a spec is that of the entry point, in the group of its :class:`Kind`; what it names is called with the parameters. So
the definition of the API server has no list of names, and a package adds one without a change here. docs/plugins.md has the
interface of each kind. Standard library only: grading processes import it.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from scalerl_api.built_in import BUILT_IN_ENVIRONMENTS, BUILT_IN_VERIFIERS


class Kind(StrEnum):
    """What can be named; the value is the group of entry points."""

    SOURCE = "scalerl.sources"
    VERIFIER = "scalerl.verifiers"
    ENVIRONMENT = "scalerl.environments"
    LOSS = "scalerl.losses"
    DRAFTER = "scalerl.drafters"
    SCHEDULE = "scalerl.schedules"
    TRACKER = "scalerl.trackers"
    RUNTIME = "scalerl.runtimes"
    COMMAND = "scalerl.commands"


_BUILT_IN: Final = {Kind.VERIFIER: BUILT_IN_VERIFIERS, Kind.ENVIRONMENT: BUILT_IN_ENVIRONMENTS}


_METHODS: Final = {
    Kind.LOSS: ("__call__",),
    Kind.DRAFTER: ("remember", "begin", "propose", "end", "take_tally"),
    Kind.SCHEDULE: ("assign",),
    Kind.TRACKER: ("open", "write", "close"),
    Kind.RUNTIME: ("observe", "record", "apply"),
}
"""Of the object that a name makes; sources, verifiers and environments are checked by tasks."""


class PluginError(ValueError):
    """A name that is not installed, or parameters that it does not take; the message has the remedy."""


def installed(kind: Kind) -> list[str]:
    """The names of a kind, sorted."""
    return sorted({one.name for one in entry_points(group=kind)})


def entry_point(kind: Kind, name: str) -> EntryPoint:
    """The entry point of a name. Imports nothing of its package.

    Raises:
        PluginError: no package has it, or several have.
    """
    found = [one for one in entry_points(group=kind) if one.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        values = ", ".join(sorted(one.value for one in found))
        raise PluginError(
            f"plugin {name!r}: several packages have it in {kind}: {values}; uninstall all but one"
        )
    known, built_in = installed(kind), _BUILT_IN.get(kind, ())
    near = difflib.get_close_matches(name, [*built_in, *known], n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    ours = f"built in: {', '.join(built_in)}; " if built_in else ""
    raise PluginError(
        f"plugin {name!r}: no installed package has it in the entry points {kind}{meant} ({ours}installed: "
        f"{', '.join(known) or 'none'}); install it in this environment, on a cluster in the images"
    )


def make(kind: Kind, name: str, parameters: Mapping[str, Any], *arguments: Any) -> Any:
    """The object of a name: what the entry point names, called with ``arguments`` and the parameters.

    Raises:
        PluginError: see :func:`entry_point`; it cannot be imported, refuses the parameters, or makes an object of another kind.
    """
    entry = entry_point(kind, name)
    try:
        made = bound(entry, parameters, *arguments)(*arguments, **parameters)
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugin {name!r} ({entry.value}): {_said(error)}") from error
    if lacking := [one for one in _METHODS.get(kind, ()) if not callable(getattr(made, one, None))]:
        raise PluginError(
            f"plugin {name!r} ({entry.value}): {type(made).__name__} has no method {lacking[0]}; docs/plugins.md has the interface"
        )
    return made


def bound(entry: EntryPoint, parameters: Mapping[str, Any], *arguments: Any) -> Any:
    """What an entry point names, which takes the parameters.

    Raises:
        PluginError: it cannot be imported, or does not take them.
    """
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {entry.name!r} ({entry.value}): {type(error).__name__}: {error}"
        ) from error
    try:
        signature = inspect.signature(loaded)
    except (TypeError, ValueError) as error:  # not callable, or of C, such as dict
        raise PluginError(
            f"plugin {entry.name!r} ({entry.value}): its parameters are unknown: {error}; name a function or class of Python"
        ) from error
    try:
        signature.bind(*arguments, **parameters)
    except TypeError as error:
        taken = list(signature.parameters)[len(arguments) :]
        raise PluginError(
            f"plugin {entry.name!r} ({entry.value}): parameters: {error}; it takes {', '.join(taken) or 'none'}"
        ) from error
    return loaded


def _said(error: BaseException) -> str:
    """An error of a plugin; one of pydantic, which this module does not import, by parameter."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(error, pydantic.ValidationError):
        return f"{type(error).__name__}: {error}"
    return "; ".join(
        f"{'.'.join(('parameters', *map(str, one['loc'])))}: {one['msg']}" for one in error.errors()
    )
