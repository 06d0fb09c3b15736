"""For an edit of every field: which roles the operator restarts, and that a run on one machine is resumed with it."""

from __future__ import annotations

import pytest
from edited_fields import Edited, base, edits

from operator_tests.manifests import EVERYTHING, UID, rendered
from scalerl_api.edits import Effect
from scalerl_api.spec import ScaleRLRun
from scalerl_operator.cluster.render import spec_hash
from scalerl_operator.policy.change import forbidden_changes
from scalerl_operator.workloads import Role

ROLES = (Role.PREPARE, Role.COORDINATOR, Role.GENERATOR, Role.TRAINER)


def on_a_cluster(run: ScaleRLRun) -> ScaleRLRun:
    return run.model_copy(update={"metadata": run.metadata.model_copy(update={"namespace": "ml"})})


def restarted(edited: Edited) -> set[Role]:
    return {role for role in ROLES if spec_hash(base(), role) != spec_hash(edited.run, role)}


@pytest.mark.parametrize("edited", edits(refused=False), ids=str)
def test_an_edit_restarts_the_roles_of_its_entry(edited: Edited) -> None:
    if edited.edit.effect is not Effect.OWN_PODS:
        assert restarted(edited) == edited.edit.effect.roles
        return
    # In the user's own words for pods: it must at least reach some.
    before, after = (rendered(on_a_cluster(run), EVERYTHING, UID) for run in (base(), edited.run))
    assert before != after


@pytest.mark.parametrize("edited", edits(refused=False), ids=str)
def test_a_run_on_one_machine_is_resumed_with_an_edit(edited: Edited) -> None:
    assert forbidden_changes(base().to_manifest(), edited.run.to_manifest()) == []


@pytest.mark.parametrize("edited", edits(refused=True), ids=str)
def test_and_not_with_one_that_is_refused(edited: Edited) -> None:
    found = forbidden_changes(base().to_manifest(), edited.run.to_manifest())
    if edited.path.startswith("storage."):
        assert found == [], "a run on one machine has no claim"
    else:
        assert any(edited.edit.note in line for line in found)
