"""The kinds of objects that the operator reads and writes, with their API versions and paths. The chart's RBAC has the same kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from scalerl_api.spec import API_VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    """Name and address of one kind of object.

    Attributes:
        watched: the cache holds its objects that have the label of a run.
        optional: the cluster may not serve it.
        earlier: versions in which it is read where ``api_version`` is not served.
    """

    name: str
    api_version: str
    plural: str
    namespaced: bool = True
    watched: bool = False
    optional: bool = False
    earlier: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """``batch`` of ``batch/v1``; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """``v1`` of ``batch/v1``."""
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The path on the API server of an object, or without ``name`` of the collection.

        Args:
            namespace: None for all namespaces, and for an object without one.
        """
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        parts = [root]
        if namespace is not None and self.namespaced:
            parts.append(f"namespaces/{quote(namespace, safe='')}")
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


RUN: Final = "ScaleRLRun"

KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind(RUN, API_VERSION, "scalerlruns", watched=True),
        Kind("Pod", "v1", "pods", watched=True),
        Kind("Service", "v1", "services", watched=True),
        Kind("ConfigMap", "v1", "configmaps", watched=True),
        # Not watched: a role that may list Secrets can read all of them.
        Kind("Secret", "v1", "secrets"),
        Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims", watched=True),
        Kind("Job", "batch/v1", "jobs", watched=True),
        Kind("Deployment", "apps/v1", "deployments", watched=True),
        Kind("StatefulSet", "apps/v1", "statefulsets", watched=True),
        Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies", watched=True),
        Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets", watched=True),
        Kind("Event", "v1", "events"),
        Kind("Lease", "coordination.k8s.io/v1", "leases"),
        # Read only to report that the one which a spec names does not exist.
        Kind("StorageClass", "storage.k8s.io/v1", "storageclasses", namespaced=False),
        # A run's place in its queue; served by Kueue since 0.15.
        Kind("Workload", "kueue.x-k8s.io/v1beta2", "workloads", watched=True, optional=True),
        # The nodes of a queue's quota.
        Kind("ResourceFlavor", "kueue.x-k8s.io/v1beta2", "resourceflavors", namespaced=False),
        # The value of a run's priority.
        Kind(
            "WorkloadPriorityClass",
            "kueue.x-k8s.io/v1beta2",
            "workloadpriorityclasses",
            namespaced=False,
        ),
        # The queue of a run's label. Kueue serves v1beta2 since 0.15, v1beta1 from 0.3 to 0.19.
        Kind("LocalQueue", "kueue.x-k8s.io/v1beta2", "localqueues", earlier=("kueue.x-k8s.io/v1beta1",)),
        # Nothing is stored: the API server answers who has a token, and what that user may do.
        Kind("TokenReview", "authentication.k8s.io/v1", "tokenreviews", namespaced=False),
        Kind("SubjectAccessReview", "authorization.k8s.io/v1", "subjectaccessreviews", namespaced=False),
    )
}
UNFENCED: Final = ("Lease", "TokenReview", "SubjectAccessReview")
"""Kinds that a standby writes, too."""


def kind_of(name: str) -> Kind:
    """The entry of a kind; ValueError if there is none."""
    if name not in KINDS:
        raise ValueError(f"kind {name!r} is not in the operator's table (kube/kinds.py)")
    return KINDS[name]
