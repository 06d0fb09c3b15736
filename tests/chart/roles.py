"""What the operator may do, kind by kind. The chart's role is held against it, and it against an operator at work."""

from __future__ import annotations

from charts import Object

from scalerl_operator.kube.kinds import RUN

READ = {"get", "list", "watch"}
APPLY = {"create", "patch"}  # server-side apply is a PATCH, which creates only for those who may create
NEEDED: dict[str, set[str]] = {
    RUN: READ | {"patch", "delete"},
    "Pod": {"list", "watch", "delete"},
    "Service": READ | APPLY | {"delete"},
    # No list and no watch: those show every secret of a namespace.
    "Secret": {"get", "create"},
    # No delete: what has been trained, and why, goes by its owner reference, or not at all.
    "ConfigMap": READ | APPLY,
    "PersistentVolumeClaim": READ | APPLY,
    "Job": READ | APPLY | {"delete"},
    "Deployment": READ | APPLY | {"delete"},
    "StatefulSet": READ | APPLY | {"delete"},
    "NetworkPolicy": READ | APPLY,
    "PodDisruptionBudget": READ | APPLY | {"delete"},
    "Event": {"list", "create", "patch"},
    "Lease": {"get", "create", "update"},
    "Workload": READ | APPLY | {"delete"},
    "ResourceFlavor": {"get"},
    "WorkloadPriorityClass": {"get"},
    "StorageClass": {"get"},
    "LocalQueue": {"get"},
    "TokenReview": {"create"},
    "SubjectAccessReview": {"create"},
}
"""Verbs by kind; anything more would be somebody else's to do."""
REVIEWS = ("TokenReview", "SubjectAccessReview")
"""Only with ``metrics.authentication``."""
ELSEWHERE = {
    ("watch", RUN),  # kopf's own, which no metric of ours counts
    ("get", RUN),  # one of which a watch has kept silent
    ("delete", RUN),  # after its ttlSecondsAfterFinished
    ("delete", "Pod"),  # what a failed gang has left
    ("create", "Lease"),  # where there has been no operator before
    ("get", "StorageClass"),  # but an operator of a few namespaces
    ("get", "LocalQueue"),  # of a run with a queue label
    *((verb, "Workload") for verb in ("get", "watch", "create", "patch", "delete")),  # the same
    ("get", "ResourceFlavor"),  # the same
    ("get", "WorkloadPriorityClass"),  # the same, with a label for its priority
    *(("create", kind) for kind in REVIEWS),
}
"""Of these, (verb, kind) that one run from its first object to its last may not need."""


def granted(roles: list[Object]) -> dict[tuple[str, str], set[str]]:
    """Verbs by API group and resource."""
    found: dict[tuple[str, str], set[str]] = {}
    for role in roles:
        for rule in role["rules"]:
            for group in rule.get("apiGroups", ()):
                for resource in rule["resources"]:
                    found.setdefault((group, resource), set()).update(rule["verbs"])
    return found
