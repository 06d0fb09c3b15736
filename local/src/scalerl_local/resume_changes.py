"""Which changes of its spec a local run refuses when it is resumed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scalerl_api.edits import Effect, edit_of, flat

OF_A_CLUSTER = (
    *("spec.storage", "spec.images", "spec.podTemplate", "spec.deviceResource", "spec.coordinator"),
    *("spec.generator.podTemplate", "spec.trainer.podTemplate"),
    "spec.ttlSecondsAfterFinished",
)
"""Fields that a local run does not read: a change of them has no effect."""


def forbidden_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """``field: old → new (why)`` of each change that is refused for a started run.

    Args:
        before, after: manifests as ``to_manifest`` returns them.

    >>> forbidden_changes({"spec": {"warmStart": {"steps": 1}}}, {"spec": {"budget": {"maxSteps": 10}}})
    ['spec.warmStart.steps: 1 → (not set) (warmStart cannot change: it runs before the first step. Create another run)']
    """
    return [f"{text} ({why})" for path, text in _changes(before, after) if (why := _refusal(path))]


def accepted_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """``field: old → new`` of each change that has an effect on the run, which goes on; arguments as of :func:`forbidden_changes`.

    >>> accepted_changes({"spec": {"budget": {"maxSteps": 5}}}, {"spec": {"budget": {"maxSteps": 10}}})
    ['spec.budget.maxSteps: 5 → 10']
    """
    return [text for path, text in _changes(before, after) if not _of_a_cluster(path) and not _refusal(path)]


def _changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The path and the text of each change."""
    old, new = dict(flat(before)), dict(flat(after))
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            yield path, f"{path}: {old.get(path, '(not set)')} → {new.get(path, '(not set)')}"


def _of_a_cluster(path: str) -> bool:
    return any(path == prefix or path.startswith(prefix + ".") for prefix in OF_A_CLUSTER)


def _refusal(path: str) -> str:
    """Why the field cannot change; empty where it can."""
    if _of_a_cluster(path):
        return ""
    section, _, field = path.partition(".")
    if section != "spec":
        return "" if field.startswith(("labels", "annotations")) else "it names the run"
    try:
        edit = edit_of(field)
    except KeyError:
        return "this release does not know the field"
    return edit.note if edit.effect is Effect.REFUSED else ""
