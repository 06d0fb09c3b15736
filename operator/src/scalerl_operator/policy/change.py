"""Change: which fields of a run may differ from what it started with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CHANGEABLE = ("spec.budget", "spec.autoscaling", "spec.suspend", "metadata.labels", "metadata.annotations")
"""Everything else is what the checkpoints, the journal and the curve so far were made with."""

OF_A_CLUSTER = (
    *(
        "spec.storage",
        "spec.images",
        "spec.podTemplate",
        "spec.deviceResource",
        "spec.ttlSecondsAfterFinished",
    ),
    *("spec.coordinator", "spec.generator.podTemplate", "spec.generator.maxRestarts"),
    *("spec.trainer.podTemplate", "spec.trainer.maxRestarts"),
)
"""Fields that a run on one machine does not read: another value, or a release that knew none, changes nothing."""


def forbidden_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """``field: old → new`` of each change that a started run cannot take; both as ``to_manifest`` gives them.

    >>> forbidden_changes({"spec": {"seed": 1, "budget": {"maxSteps": 9}}}, {"spec": {"seed": 2, "budget": {"maxSteps": 10}}})
    ['spec.seed: 1 → 2']
    """
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [
        f"{path}: {old.get(path, '(not set)')} → {new.get(path, '(not set)')}"
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path) and not _changeable(path)
    ]


def _changeable(path: str) -> bool:
    return any(path == prefix or path.startswith(prefix + ".") for prefix in (*CHANGEABLE, *OF_A_CLUSTER))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
