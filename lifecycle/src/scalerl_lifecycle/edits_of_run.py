"""What an edit of the spec means for a run that is suspended, failed or completed, and for the cause of a failure. Pure."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from scalerl_api.edits import Effect, edit_of, flat
from scalerl_api.load import accepted_run
from scalerl_api.spec import API_VERSION, KIND, BudgetSpec, RunSpec
from scalerl_api.status import MAX_ACCEPTED_SPEC, RunStatus
from scalerl_lifecycle.budget import used_fractions

_OF_A_STOPPED_RUN: Final = frozenset(
    {"suspend", "ttlSecondsAfterFinished", "storage.onDelete", "generator.replicas", "autoscaling"}
)
"""Fields, and sections, whose edit starts no run: they cannot have been the cause of its failure."""
_NONE_IF_EMPTY: Final = frozenset(
    {"images", "podTemplate", "resources", "requests", "limits", "labels", "annotations", "nodeSelector"}
)
"""Last names of sections that have no effect when they are empty."""
UNKNOWN_FIELDS: Final = "?"
"""The field of an edit of a spec of which only the hash is known."""
_LIMITS: Final = ("max_steps", "max_device_hours", "max_seconds", "max_compute_tokens")


@dataclass(frozen=True)
class SpecEdit:
    """The changes from one accepted spec to the next.

    Attributes:
        fields: paths below ``spec``.
        raises_limit: a limit of the run was raised or removed, and it has reached none of the others.
    """

    fields: tuple[str, ...] = ()
    raises_limit: bool = False

    @property
    def restarts(self) -> bool:
        """Whether a role restarts, and may fail to."""
        return any(restarts_a_role(field) for field in self.fields)

    @property
    def may_fix(self) -> bool:
        """Whether the edit may have removed the cause of a failure."""
        return any(_may_fix(field) for field in self.fields)


def _may_fix(field: str) -> bool:
    return field not in _OF_A_STOPPED_RUN and field.partition(".")[0] not in _OF_A_STOPPED_RUN


def hash_of(spec: Mapping[str, Any]) -> str:
    """Hash of a spec as it was written, without fields whose edit starts no run. For a spec that is too long to be stored."""
    fields = sorted((path, value) for path, value in flat(spec) if _may_fix(path))
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def as_accepted(spec: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The spec, as it was written, as the text that a status has of it; of one that is too long, None and its hash."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return (text, None) if len(text) <= MAX_ACCEPTED_SPEC else (None, hash_of(spec))


def restarts_a_role(field: str) -> bool:
    try:
        return edit_of(field).effect is not Effect.AT_ONCE
    except KeyError:  # of a spec that another release accepted
        return True


def changed_fields(before: RunSpec, after: RunSpec) -> tuple[str, ...]:
    """The paths, below ``spec``, of values that differ. A new default is no change."""
    dumped = (spec.model_dump(mode="json", by_alias=True, exclude_none=True) for spec in (before, after))
    return differing_paths(*dumped)


def differing_paths(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths of values that differ. A section that is empty without an effect, as a merge patch with null leaves it, is none.

    >>> differing_paths({"podTemplate": {"labels": {}}, "images": {}}, {"images": {"trainer": "a"}})
    ('images.trainer',)
    >>> differing_paths({"seed": 1}, {"seed": 1, "generator": {"byLength": {}}})
    ('generator.byLength',)
    """
    old, new = (
        {
            path: value
            for path, value in flat(spec)
            if value != {} or path.rpartition(".")[2] not in _NONE_IF_EMPTY
        }
        for spec in (before, after)
    )
    return tuple(path for path in sorted(old.keys() | new.keys()) if old.get(path) != new.get(path))


def edits_since(
    before: RunStatus, accepted: RunSpec, spec: Mapping[str, Any], text: str | None
) -> tuple[SpecEdit, tuple[str, ...]]:
    """What has been edited since the status was written, and the fields that were edited since the last trained steps.

    Args:
        spec: as it was written, but for defaults of the API server.
        text: of the accepted spec, for the status; None if it is too long.
    """
    edit, last = SpecEdit(), before.accepted_spec
    if last is not None and last != text:
        edit = edit_between(_read(last), accepted, before)
    elif last is None and before.accepted_spec_hash not in (None, hash_of(spec)):
        edit = SpecEdit((UNKNOWN_FIELDS,))
    proven = before.trained_spec or last
    return edit, _differences(proven, text) if proven and text not in (None, proven) else ()


def _read(text: str) -> RunSpec:
    """A spec as a status has it."""
    nameless = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "run"}}
    return accepted_run(nameless | {"spec": json.loads(text)}).spec


@functools.lru_cache(maxsize=8)
def _differences(before: str, after: str) -> tuple[str, ...]:
    """The fields that differ between two accepted specs; cached, since they stay the same for many reconciles. Few are: a spec
    may have 256 KiB."""
    changed, specs = changed_fields(_read(before), _read(after)), (json.loads(before), json.loads(after))
    # As they were written: a preset or an alternative has many values that the user did not write. Most sections are the same empty or
    # not written, as a revert leaves them.
    empty = {path for spec in specs for path, value in flat(spec) if value == {}}
    effective = {path for path in empty for field in changed if f"{field}.".startswith(f"{path}.")}
    written = (path for path in differing_paths(*specs) if path not in empty or path in effective)
    return changed and (tuple(written) or changed)


def edit_between(before: RunSpec, after: RunSpec, status: RunStatus) -> SpecEdit:
    """The edit from ``before`` to ``after`` of a run with that status."""
    raised = _raised(before.budget, after.budget) or _released(before, after)
    reached = any(share >= 1.0 for share in used_fractions(after.budget, status).values())
    return SpecEdit(changed_fields(before, after), raised and not reached)


def _raised(before: BudgetSpec, after: BudgetSpec) -> bool:
    """Whether a limit of the budget is raised or removed."""
    pairs = ((getattr(before, name), getattr(after, name)) for name in _LIMITS)
    return any(old is not None and (new is None or float(new) > float(old)) for old, new in pairs)


def _released(before: RunSpec, after: RunSpec) -> bool:
    """Whether the autoscaler may no longer stop the run, or has a later deadline."""
    old, new = before.autoscaling, after.autoscaling
    if old.mode == "Auto" and new.mode != "Auto":
        return True
    return old.deadline is not None and (
        new.deadline is None or datetime.fromisoformat(new.deadline) > datetime.fromisoformat(old.deadline)
    )
