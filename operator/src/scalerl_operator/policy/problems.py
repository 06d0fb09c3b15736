"""What is wrong with a run or a pod; and the reason in messages of Kubernetes for which no field says it. Pure.

Messages are read for the constant of :mod:`scalerl_api.conditions` only, which says what to do; people get them whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from scalerl_api.conditions import Phase, Reason

_MISSING_CLAIM: Final = re.compile(r'persistentvolumeclaim "[^"]+" not found')
_OF_VOLUMES: Final = ("volume", "free storage")
_OF_ROOM: Final = ("insufficient ", "too many pods", "max volume count")
"""In the scheduler's message for what nodes lack."""


@dataclass(frozen=True)
class Problem:
    """Why something is not as it should be, with the cluster's message. reason: the phase, where nothing is wrong but that the
    run is in it."""

    reason: Reason | Phase
    message: str


def creation_problem(message: str) -> Reason:
    """Reason of a controller's message about a pod that it cannot create."""
    text = message.lower()
    if "exceeded quota" in text or "insufficient quota" in text:
        return Reason.QUOTA_EXCEEDED
    missing = any(name in text for name in ("priorityclass", "priority class", "runtimeclass"))
    return Reason.REFERENCE_NOT_FOUND if missing else Reason.OBJECT_REFUSED


def mount_problem(message: str) -> Reason:
    """Reason of the kubelet's message about a pod that it cannot start."""
    text = message.lower()
    missing = ("configmap" in text or "secret" in text) and "not found" in text
    handler = "runtime" in text and ("handler" in text or "no runtime for" in text)
    if missing or handler or "references non-existent" in text:
        return Reason.REFERENCE_NOT_FOUND
    return Reason.CONTAINER_START_FAILED if "sandbox" in text else Reason.VOLUME_NOT_READY


def claim_problem(message: str) -> Reason:
    """Reason of the volume controller's message about a claim that it cannot bind.

    >>> claim_problem('storageclass.storage.k8s.io "fast" not found').value
    'ReferenceNotFound'
    """
    text = message.lower()
    named = "storageclass" in text and "not found" in text
    return Reason.REFERENCE_NOT_FOUND if named else Reason.VOLUME_NOT_READY


def placing_problem(message: str) -> Reason:
    """Reason of the scheduler's message about a pod that it cannot place.

    >>> placing_problem("0/3 nodes are available: 1 node(s) exceed max volume count, 2 Insufficient cpu.").value
    'Unschedulable'
    >>> placing_problem("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found").value
    'VolumeNotReady'
    >>> placing_problem('0/1 nodes are available: persistentvolumeclaim "a" not found.').value
    'ReferenceNotFound'
    """
    text = message.lower()
    if _MISSING_CLAIM.search(text):
        return Reason.REFERENCE_NOT_FOUND
    if any(word in text for word in _OF_VOLUMES) and not any(word in text for word in _OF_ROOM):
        return Reason.VOLUME_NOT_READY
    return Reason.UNSCHEDULABLE
