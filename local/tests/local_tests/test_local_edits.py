"""For an edit of every field: whether a run on one machine is resumed with it."""

from __future__ import annotations

import pytest
from spec_edits import Edited, edits, entry_edits

from scalerl_api.spec import ScaleRLRun
from scalerl_local.resume_changes import forbidden_changes

TAKEN = [*edits(refused=False), *entry_edits(refused=False)]
REFUSED = [*edits(refused=True), *entry_edits(refused=True)]


def forbidden(edited: Edited) -> list[str]:
    before = ScaleRLRun.model_validate(edited.before)
    return forbidden_changes(before.to_manifest(), edited.run.to_manifest())


@pytest.mark.parametrize("edited", TAKEN, ids=str)
def test_local_run_resumes_with_an_edit(edited: Edited) -> None:
    assert forbidden(edited) == []


@pytest.mark.parametrize("edited", REFUSED, ids=str)
def test_refused_edit_does_not_resume(edited: Edited) -> None:
    found = forbidden(edited)
    if edited.path.startswith("storage."):
        assert found == [], "a run on one machine has no claim"
    else:
        assert any(edited.edit.note in line for line in found)
