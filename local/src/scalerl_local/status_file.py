"""``status.json``: the status of a local run, with the fields and the meaning of a cluster's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from scalerl_api.conditions import ConditionType
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import GeneratorsStatus, RunStatus
from scalerl_api.wire import Status
from scalerl_lifecycle.edits_of_run import SpecEdit, as_accepted, edits_since
from scalerl_lifecycle.lifecycle_types import LifecycleDecision
from scalerl_lifecycle.status_fields import (
    PROGRESS_SECONDS,
    condition,
    decision_fields,
    end_of,
    persisted_state,
    progress_fields,
    rfc3339,
    trained_spec,
    waits_for_progress_only,
)
from scalerl_local.run_directory import DirectoryProblem, replace_file

_ENDS: Final = (ConditionType.SUSPENDED, ConditionType.COMPLETED, ConditionType.FAILED)


class StatusFile:
    """The status of a run, read once and written before each decision is acted on.

    status: as in the file.
    persisted: of the lifecycle, when the file was read.
    edit, unproven: see :class:`.LifecycleInput`; there is no edit once the status has the spec.

    Raises:
        DirectoryProblem: the file is not as this command writes it.
    """

    def __init__(self, path: Path, run: ScaleRLRun) -> None:
        self._path = path
        self._spec = run.to_manifest()["spec"]
        self._text, self._long_hash = as_accepted(self._spec)
        self._written = 0.0
        try:
            self.status = RunStatus.read(
                json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            )
            self.persisted = persisted_state(self.status)
        except (OSError, ValueError, RecursionError) as error:
            raise DirectoryProblem(
                f"{path}: {error}; remove it, and the run continues from its last checkpoint"
            ) from error
        self.edit, self.unproven = edits_since(self.status, run.spec, self._spec, self._text)

    def write(
        self,
        decision: LifecycleDecision,
        coordinator: Status | None,
        generators: GeneratorsStatus,
        now: float,
        *,
        at_once: bool = False,
    ) -> None:
        """Replaces the file if the status differs. Progress alone is written every :data:`.PROGRESS_SECONDS`.

        Args:
            coordinator: its status; None while it does not answer.
            now: Unix seconds.

        Raises:
            OSError: the file stays as it was.
        """
        before, persisted, time = self.status, decision.persisted, rfc3339(now)
        stop_reason = before.stop_reason or ""
        conditions = [
            condition(before, type_, *end_of(type_, decision, stop_reason), time) for type_ in _ENDS
        ]
        update = {
            "reason": next((c.reason for c in conditions if c.status == "True"), ""),
            "accepted_spec": self._text,
            "accepted_spec_hash": self._long_hash,
            "trained_spec": trained_spec(before, persisted, self._text),
            "conditions": conditions,
            "generators": generators,
            **decision_fields(before, decision, time),
        }
        if coordinator is not None:
            update |= progress_fields(coordinator, before, time)
        status = before.model_copy(update=update)
        recent = not at_once and 0 <= now - self._written < PROGRESS_SECONDS
        if status == before or (recent and waits_for_progress_only(before, status)):
            return
        replace_file(self._path, json.dumps(status.to_object(), indent=2, ensure_ascii=False) + "\n", 0o644)
        self.status, self._written, self.edit = status, now, SpecEdit()
