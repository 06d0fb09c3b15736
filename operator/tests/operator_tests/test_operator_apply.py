"""What the event of a repair says."""

from __future__ import annotations

from typing import Any

import pytest

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
