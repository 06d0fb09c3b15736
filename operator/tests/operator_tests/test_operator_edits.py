"""For an edit of every field: which roles the operator restarts."""

from __future__ import annotations

import pytest
from spec_edits import Edited, edits, entry_edits

from scalerl_api.spec import ScaleRLRun
from scalerl_lifecycle.workloads import Role
from scalerl_operator.manifests import spec_hash

ROLES = (Role.PREPARE, Role.COORDINATOR, Role.GENERATOR, Role.TRAINER, Role.ENVIRONMENT)


TAKEN = [*edits(refused=False), *entry_edits(refused=False)]


def before(edited: Edited) -> ScaleRLRun:
    return ScaleRLRun.model_validate(edited.before)


def restarted(edited: Edited) -> set[Role]:
    return {role for role in ROLES if spec_hash(before(edited), role) != spec_hash(edited.run, role)}


@pytest.mark.parametrize("edited", TAKEN, ids=str)
def test_edit_restarts_the_roles_of_its_entry(edited: Edited) -> None:
    assert restarted(edited) == edited.edit.effect.roles
