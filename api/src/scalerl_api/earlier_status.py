"""Fields of the status as the release before named them.

Read for one release, where the present name is absent, and never written. The definition keeps their properties for as long: an API server
prunes what the definition lacks, before the operator could read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NAMES: Final = {"rest": "suspension", "holding": "suspendingFor", "trouble": "faults"}
_SUSPENSIONS: Final = {"Asked": "Requested", "Resting": "Suspended"}


def with_present_names(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status with the present names of its fields, and values of ``suspension``.

    >>> with_present_names({"rest": "Resting", "step": 3})
    {'step': 3, 'suspension': 'Suspended'}
    """
    named = {name: value for name, value in status.items() if name not in _NAMES}
    for earlier, name in _NAMES.items():
        if earlier in status:
            value = status[earlier]
            named.setdefault(name, _SUSPENSIONS.get(value, value) if isinstance(value, str) else value)
    return named


def earlier_properties() -> dict[str, dict[str, Any]]:
    """Schemas of the earlier names, for the definition."""
    return {
        earlier: {
            "description": f"Deprecated: read where {name} is absent, never written.",
            "x-kubernetes-preserve-unknown-fields": True,
        }
        for earlier, name in _NAMES.items()
    }
