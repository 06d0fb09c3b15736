"""Pods and Jobs of one run, as an API server returns them."""

from __future__ import annotations

from typing import Any

from operator_tests.manifests import UID
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.pod_views import JOB_NAME
from scalerl_operator.names import COMPONENT, RUN_UID

Object = dict[str, Any]
CREATED = "2026-01-01T00:00:00Z"


def pod(
    name: str = "p",
    role: Role = Role.TRAINER,
    *containers: Object,
    job: str | None = None,
    created: str = CREATED,
    deleted: str | None = None,
    **status: Any,
) -> Object:
    """A running pod with those container statuses. job: name of its Job, by default its role. status: further fields."""
    labels = {RUN_UID: UID, COMPONENT: role, JOB_NAME: job or role}
    metadata = {"name": name, "uid": name, "creationTimestamp": created, "labels": labels}
    if deleted is not None:
        metadata["deletionTimestamp"] = deleted
    return {
        "metadata": metadata,
        "status": {"phase": "Running", "containerStatuses": list(containers)} | status,
    }


def container(state: Object, *, ready: bool = False, restarts: int = 0, **status: Any) -> Object:
    """The status of a container. status: further fields."""
    return {"name": "c", "ready": ready, "restartCount": restarts, "state": state} | status


def job(
    role: Role = Role.TRAINER, *conditions: Object, name: str | None = None, parallelism: int = 1
) -> Object:
    """A Job, by default named as its role."""
    return {
        "metadata": {
            "name": name or str(role),
            "uid": name or str(role),
            "labels": {RUN_UID: UID, COMPONENT: role},
        },
        "spec": {"parallelism": parallelism},
        "status": {"conditions": list(conditions)} if conditions else {},
    }
