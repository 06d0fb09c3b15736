"""What a real API server says to an edit of every field of a run that is under way.

That those it takes have their effect is for the operator, the coordinator and the trainer: ``test_operator_edits.py``,
``test_coordinator_edits.py``, ``test_trainer_spec_edits.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from edited_fields import BASE, Edited, edits, mix_base, mix_edits, value_at
from invalid_runs import Object, merged
from kubernetes.client.exceptions import ApiException
from test_invalid import Server, server

from scalerl_api.edits import edit_of

__all__ = ["server"]
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def started(server: Server) -> Iterator[dict[str, Object]]:
    """Runs that have trained 7 steps, by name: one with a task, one with a mix."""
    runs = {}
    for manifest in (BASE, OF_MIX):
        name = manifest["metadata"]["name"]
        server.create(manifest)
        status = {"phase": "Running", "step": 7}
        runs[name] = server.runs.patch_namespaced_custom_object_status(
            *server.where, name, {"status": status}
        )
    yield runs
    for name in runs:
        server.delete(name)


OF_MIX = merged(mix_base(), {"metadata": {"name": "edited-mix"}})
REFUSED = [*edits(refused=True), *mix_edits(refused=True)]
TAKEN = [*edits(refused=False), *mix_edits(refused=False)]


def edit(server: Server, started: dict[str, Object], edited: Edited) -> Object:
    run = started[(BASE if edited.before == BASE else OF_MIX)["metadata"]["name"]]["metadata"]
    metadata = {name: run[name] for name in ("name", "resourceVersion")}
    return server.replace(merged(edited.manifest, {"metadata": metadata}), dry_run="All")


@pytest.mark.parametrize("edited", REFUSED, ids=str)
def test_an_edit_that_cannot_be_is_refused_with_the_reason(
    server: Server, started: dict[str, Object], edited: Edited
) -> None:
    with pytest.raises(ApiException) as refused:
        edit(server, started, edited)
    said = json.loads(refused.value.body or "")["message"]
    assert edited.edit.note in said, said
    assert "cannot change" in said
    assert edited.path.partition(".")[0] in said


@pytest.mark.parametrize("edited", TAKEN, ids=str)
def test_every_other_edit_is_taken(server: Server, started: dict[str, Object], edited: Edited) -> None:
    taken: Any = edit(server, started, edited)
    assert value_at(taken, edited.path) == value_at(edited.manifest, edited.path)


def test_tasks_of_a_mix_keep_their_order(server: Server, started: dict[str, Object]) -> None:
    reordered = mix_base()
    reordered["spec"]["task"]["mix"].reverse()
    with pytest.raises(ApiException) as refused:
        edit(server, started, Edited("task.mix", edit_of("task.mix"), reordered, mix_base()))
    assert "the mix cannot change" in json.loads(refused.value.body or "")["message"]


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
