"""What a real API server says to an edit of every field of a run that is under way.

That those it takes have their effect is for the operator, the coordinator and the trainer: ``test_operator_edits.py``,
``test_coordinator_edits.py``, ``test_trainer_spec_edits.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from edited_fields import BASE, Edited, edits, value_at
from invalid_runs import Object, merged
from kubernetes.client.exceptions import ApiException
from test_invalid import Server, server

__all__ = ["server"]
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def started(server: Server) -> Iterator[Object]:
    """A run that has trained 7 steps."""
    created = server.create(BASE)
    where = (*server.where, created["metadata"]["name"])
    status = {"phase": "Running", "step": 7}
    yield server.runs.patch_namespaced_custom_object_status(*where, {"status": status})
    server.delete(created["metadata"]["name"])


def edit(server: Server, started: Object, edited: Edited) -> Object:
    version = started["metadata"]["resourceVersion"]
    return server.replace(merged(edited.manifest, {"metadata": {"resourceVersion": version}}), dry_run="All")


@pytest.mark.parametrize("edited", edits(refused=True), ids=str)
def test_an_edit_that_cannot_be_is_refused_with_the_reason(
    server: Server, started: Object, edited: Edited
) -> None:
    with pytest.raises(ApiException) as refused:
        edit(server, started, edited)
    said = json.loads(refused.value.body or "")["message"]
    assert edited.edit.note in said, said
    assert "cannot change" in said
    assert edited.path.partition(".")[0] in said


@pytest.mark.parametrize("edited", edits(refused=False), ids=str)
def test_every_other_edit_is_taken(server: Server, started: Object, edited: Edited) -> None:
    taken: Any = edit(server, started, edited)
    assert value_at(taken, edited.path) == value_at(edited.manifest, edited.path)


def test_evaluation_sets_keep_their_order(server: Server) -> None:
    """A list with keys is equal to one in another order."""
    problems = {"opGraph": {"operations": [2, 4]}, "verifier": {"name": "opgraph-outcome"}}
    sets = [{"name": "held-out"}, {"name": "hard", "task": problems}]
    created = server.create(
        merged(BASE, {"metadata": {"name": "ordered"}, "spec": {"evaluation": {"sets": sets}}})
    )
    try:
        created["spec"]["evaluation"]["sets"].reverse()
        with pytest.raises(ApiException) as refused:
            server.replace(created, dry_run="All")
        assert (
            "the order of the evaluation sets cannot change"
            in json.loads(refused.value.body or "")["message"]
        )
    finally:
        server.delete("ordered")
