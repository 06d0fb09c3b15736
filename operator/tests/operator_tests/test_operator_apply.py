"""What the event of a repair says, and when the name of the Secret is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from operator_tests.manifests import UID, cluster_run
from scalerl_api.status import RunStatus
from scalerl_operator.controller.object_writer import ensure_token
from scalerl_operator.controller.parts import Run
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.kube.errors import AlreadyExists
from scalerl_operator.kube.objects import _has_all, first_difference


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({"spec": {"replicas": 5}}, {"spec": {"replicas": 1}}, ("spec.replicas", 5, 1)),
        ({"spec": {}}, {"spec": {"replicas": 1}}, ("spec.replicas", None, 1)),
        ({"data": {"a": "1"}, "spec": {}}, {"spec": {}}, ("data", {"a": "1"}, None)),
        ({"args": ["a"]}, {"args": ["a", "b"]}, ("args[1]", None, "b")),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, ("a[0].b", 1, 2)),
        ({"status": {"ready": 1}}, {"status": {"ready": 2}}, None),
        ({"metadata": {"resourceVersion": "1"}}, {"metadata": {"resourceVersion": "2"}}, None),
    ],
)
def test_first_difference(before: Any, after: Any, found: Any) -> None:
    assert first_difference(before, after) == found


@pytest.mark.parametrize(
    ("wanted", "live", "all_there"),
    [
        ({"a": 1, "b": []}, {"a": 2}, True),
        ({"a": {"b": 1}}, {"a": {}}, False),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B"}, {"name": "A", "value": "2"}]}, True),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B", "value": "1"}]}, False),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A"}]}, False),
        ({"args": ["a", "b"]}, {"args": ["a"]}, False),
        ({"readOnly": False, "emptyDir": {}}, {}, True),
    ],
)
def test_has_all_finds_what_was_removed(wanted: Any, live: Any, all_there: bool) -> None:
    assert _has_all(wanted, live) is all_there


async def test_secret_deleted_meanwhile_is_no_taken_name() -> None:
    class Api:
        """The garbage collector deletes an earlier run's Secret between two calls."""

        async def create(self, obj: Any) -> Any:
            raise AlreadyExists("it exists")

        async def get(self, *_: Any) -> None:
            return None

    state = RunState()
    run = SimpleNamespace(
        deleted=False, state=state, objects={}, namespace="n", name="a", uid=UID, unix_seconds=0.0
    )
    with pytest.raises(AlreadyExists):
        await ensure_token(cast(Any, Api()), cast(Any, run), cluster_run())
    assert not state.token


async def test_secret_of_an_earlier_run_is_said_to_be_one() -> None:
    owner = {"kind": "ScaleRLRun", "name": "a", "uid": "earlier"}
    live = {"kind": "Secret", "metadata": {"name": "a-token", "ownerReferences": [owner]}}

    class Api:
        async def create(self, obj: Any) -> Any:
            raise AlreadyExists("it exists")

        async def get(self, *_: Any) -> Any:
            return live

    run = Run({"metadata": {"name": "a", "namespace": "n", "uid": UID}}, {}, 0.0, RunStatus())
    problem = await ensure_token(cast(Any, Api()), run, cluster_run())
    assert problem is not None
    assert problem.message == "Secret a-token is of an earlier run of this name, and still being removed"
