"""What a real API server says to an edit of every field of a run that is under way.

That those it takes have their effect is for the operator, the coordinator and the trainer: ``test_operator_edits.py``,
``test_coordinator_edits.py``, ``test_trainer_spec_edits.py``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from invalid_specs import Object, merged
from kubernetes.client.exceptions import ApiException
from spec_edits import (
    BASE,
    WITH_ENVIRONMENT,
    WITH_SERVERS,
    Edited,
    edits,
    entry_edits,
    mix_base,
    sets_base,
    value_at,
)
from test_invalid import Server, server

from scalerl_api.edits import edit_of

__all__ = ["server"]
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def started(server: Server) -> Iterator[dict[str, Object]]:
    """Runs that have trained 7 steps, by name: one with a task, one with an environment, one with servers, one with a mix, one with evaluation sets."""
    runs = {}
    for manifest in (BASE, WITH_ENVIRONMENT, WITH_SERVERS, mix_base(), sets_base()):
        name = manifest["metadata"]["name"]
        server.create(manifest)
        status = {"phase": "Running", "step": 7}
        runs[name] = server.runs.patch_namespaced_custom_object_status(
            *server.where, name, {"status": status}
        )
    yield runs
    for name in runs:
        server.delete(name)


REFUSED = [*edits(refused=True), *entry_edits(refused=True)]
TAKEN = [*edits(refused=False), *entry_edits(refused=False)]


def edit(server: Server, started: dict[str, Object], edited: Edited) -> Object:
    run = started[edited.before["metadata"]["name"]]["metadata"]
    metadata = {name: run[name] for name in ("name", "resourceVersion")}
    return server.replace(merged(edited.manifest, {"metadata": metadata}), dry_run="All")


@pytest.mark.parametrize("edited", REFUSED, ids=str)
def test_invalid_edit_is_refused_with_the_reason(
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


@pytest.mark.parametrize(
    ("before", "path"), [(mix_base(), "task.mix"), (sets_base(), "evaluation.sets")], ids=["mix", "sets"]
)
def test_entries_keep_their_order(
    server: Server, started: dict[str, Object], before: Object, path: str
) -> None:
    """A list with keys is equal to one in another order."""
    reordered = copy.deepcopy(before)
    value_at(reordered, path).reverse()
    with pytest.raises(ApiException) as refused:
        edit(server, started, Edited(path, edit_of(path), reordered, before))
    assert edit_of(path).note in json.loads(refused.value.body or "")["message"]


@pytest.mark.parametrize("names", [["held-out"], ["held-out", "hard", "new"]], ids=["removed", "added"])
def test_evaluation_sets_stay_the_same(server: Server, started: dict[str, Object], names: list[str]) -> None:
    changed = sets_base()
    first, second = changed["spec"]["evaluation"]["sets"]
    changed["spec"]["evaluation"]["sets"] = [first, *(second | {"name": name} for name in names[1:])]
    path = "evaluation.sets"
    with pytest.raises(ApiException) as refused:
        edit(server, started, Edited(path, edit_of(path), changed, sets_base()))
    assert edit_of(path).note in json.loads(refused.value.body or "")["message"]
