"""Render: from a run and what is to exist now to Kubernetes objects. Pure: same input, same objects."""

from __future__ import annotations

from scalerl_api.spec import ScaleRLRun
from scalerl_operator.cluster.types import Desired, Images, Object


def render(
    run: ScaleRLRun, uid: str, desired: Desired, images: Images, *, operator_namespace: str
) -> list[Object]:
    """All objects of a run that are to exist now, but its token (:func:`secret`).

    operator_namespace: where the operator runs; its pods may reach the coordinator.
    """
    raise NotImplementedError


def secret(run: ScaleRLRun, uid: str, token: str) -> Object:
    """The run's bearer token: made once, never applied over one that is there."""
    raise NotImplementedError
