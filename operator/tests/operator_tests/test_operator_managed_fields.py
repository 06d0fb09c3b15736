"""What creating an object has set becomes what is applied."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_operator.kube.objects import applied, other_writers
from scalerl_operator.names import FIELD_OWNER


def entry(manager: str, operation: str, fields: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields, **more}


CREATED = entry("scalerl-operator", "Update", {"f:data": {"f:a": {}, "f:b": {}}})
THEIRS = entry("kubectl", "Update", {"f:data": {"f:c": {}}})
STATUS = entry("scalerl-operator", "Update", {"f:status": {}}, subresource="status")


def test_fields_of_others_and_subresources_stay() -> None:
    assert applied([THEIRS, CREATED, STATUS]) == [THEIRS, STATUS, {**CREATED, "operation": "Apply"}]


def test_applied_fields_are_kept() -> None:
    before = entry("scalerl-operator", "Apply", {"f:data": {"f:a": {".": {}}, "f:d": {}}})
    assert applied([before, CREATED]) == [
        entry("scalerl-operator", "Apply", {"f:data": {"f:a": {".": {}}, "f:b": {}, "f:d": {}}})
    ]


def test_applied_object_keeps_its_managed_fields() -> None:
    assert applied([THEIRS, STATUS, entry("scalerl-operator", "Apply", {})]) is None
    assert applied([]) is None


def written(manager: str, second: int, **more: str) -> dict[str, Any]:
    return {"manager": manager, "operation": "Update", "time": f"2026-01-01T00:00:{second:02}Z"} | more


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([], []),
        ([written("kubectl-edit", 4)], []),
        ([written("kubectl-edit", 5), written("kubectl-edit", 6)], ["kubectl-edit"]),
        ([written("kubelet", 9, subresource="status")], []),
        ([written("kube-controller-manager", 9)], []),
        ([written("kube-controller-manager", 9, subresource="scale")], ["kube-controller-manager"]),
    ],
)
def test_other_writers_are_those_since_our_last_write(others: list[dict[str, Any]], found: list[str]) -> None:
    assert other_writers([written(FIELD_OWNER, 5), *others, written(FIELD_OWNER, 3)]) == found
