"""Reasons from Kubernetes messages for which no field has the reason. Pure.

A message only selects the reason, which has the remedy (:mod:`scalerl_api.reasons`). Users get the complete message.
"""

from __future__ import annotations

import re
from typing import Final

from scalerl_api.reasons import Reason

_MISSING_CLAIM: Final = re.compile(r'persistentvolumeclaim "[^"]+" not found')
_VOLUME_TERMS: Final = ("volume", "free storage")
_CAPACITY_TERMS: Final = ("insufficient ", "too many pods", "max volume count")
"""Terms of the scheduler's messages about a node without capacity."""


def creation_problem(message: str) -> Reason:
    """The reason in a controller's message about a pod that it cannot create."""
    text = message.lower()
    if "exceeded quota" in text or "insufficient quota" in text:
        return Reason.QUOTA_EXCEEDED
    missing = any(name in text for name in ("priorityclass", "priority class", "runtimeclass"))
    return Reason.REFERENCE_NOT_FOUND if missing else Reason.OBJECT_REFUSED


def mount_problem(message: str) -> Reason:
    """The reason in the kubelet's message about a pod that it cannot start."""
    text = message.lower()
    missing = ("configmap" in text or "secret" in text) and "not found" in text
    handler = "runtime" in text and ("handler" in text or "no runtime for" in text)
    if missing or handler or "references non-existent" in text:
        return Reason.REFERENCE_NOT_FOUND
    return Reason.CONTAINER_START_FAILED if "sandbox" in text else Reason.VOLUME_NOT_READY


def claim_problem(message: str) -> Reason:
    """The reason in the volume controller's message about a claim that it cannot bind.

    >>> claim_problem('storageclass.storage.k8s.io "fast" not found').value
    'ReferenceNotFound'
    """
    text = message.lower()
    named = "storageclass" in text and "not found" in text
    return Reason.REFERENCE_NOT_FOUND if named else Reason.VOLUME_NOT_READY


def placing_problem(message: str) -> Reason:
    """The reason in the scheduler's message about a pod that it cannot place.

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
    if any(word in text for word in _VOLUME_TERMS) and not any(word in text for word in _CAPACITY_TERMS):
        return Reason.VOLUME_NOT_READY
    return Reason.UNSCHEDULABLE
