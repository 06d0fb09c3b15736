"""What creating an object has set becomes what is applied."""

from __future__ import annotations

from typing import Any

from scalerl_operator.controller.ownership import applied


def entry(manager: str, operation: str, fields: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields, **more}


CREATED = entry("scalerl-operator", "Update", {"f:data": {"f:a": {}, "f:b": {}}})
THEIRS = entry("kubectl", "Update", {"f:data": {"f:c": {}}})
STATUS = entry("scalerl-operator", "Update", {"f:status": {}}, subresource="status")


def test_of_others_and_of_subresources_nothing_changes() -> None:
    assert applied([THEIRS, CREATED, STATUS]) == [THEIRS, STATUS, {**CREATED, "operation": "Apply"}]


def test_what_is_applied_already_is_kept_beside_it() -> None:
    before = entry("scalerl-operator", "Apply", {"f:data": {"f:a": {".": {}}, "f:d": {}}})
    assert applied([before, CREATED]) == [
        entry("scalerl-operator", "Apply", {"f:data": {"f:a": {".": {}}, "f:b": {}, "f:d": {}}})
    ]


def test_an_object_that_is_only_applied_is_left_alone() -> None:
    assert applied([THEIRS, STATUS, entry("scalerl-operator", "Apply", {})]) is None
    assert applied([]) is None
