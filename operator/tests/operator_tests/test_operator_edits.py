"""For an edit of every field: which roles the operator restarts, and that a run on one machine is resumed with it."""

from __future__ import annotations

import pytest
from edited_fields import Edited, edits, entry_edits

from scalerl_api.spec import ScaleRLRun
from scalerl_operator.manifests import spec_hash
from scalerl_operator.policy.resume_changes import forbidden_changes
from scalerl_operator.workloads import Role

ROLES = (Role.PREPARE, Role.COORDINATOR, Role.GENERATOR, Role.TRAINER, Role.ENVIRONMENT)


TAKEN = [*edits(refused=False), *entry_edits(refused=False)]
REFUSED = [*edits(refused=True), *entry_edits(refused=True)]


def forbidden(edited: Edited) -> list[str]:
    return forbidden_changes(before(edited).to_manifest(), edited.run.to_manifest())


def before(edited: Edited) -> ScaleRLRun:
    return ScaleRLRun.model_validate(edited.before)


def restarted(edited: Edited) -> set[Role]:
    return {role for role in ROLES if spec_hash(before(edited), role) != spec_hash(edited.run, role)}


@pytest.mark.parametrize("edited", TAKEN, ids=str)
def test_edit_restarts_the_roles_of_its_entry(edited: Edited) -> None:
    assert restarted(edited) == edited.edit.effect.roles


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
