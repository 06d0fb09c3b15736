"""The settings of one role's pods, which its file in this package gives to :mod:`.pods`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scalerl_lifecycle.workloads import Role
from scalerl_operator.kube.types import Object


@dataclass(frozen=True)
class PodSettings:
    """The settings of one role's pods.

    Attributes:
        grace_seconds: from SIGTERM to SIGKILL.
        name: SCALERL_NAME, which may refer to ``variables``; None: the pod's name.
        variables: environment entries before the name.
        extra: environment by the name of a container.
        metrics_port: port with Prometheus metrics; None: no metrics.
        pod: fields of the pod's spec.
        extra_pod: beyond the gang of the run.
    """

    role: Role
    grace_seconds: int
    name: str | None = None
    variables: Sequence[Object] = ()
    extra: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics_port: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    pod: dict[str, Any] = field(default_factory=dict)
    extra_pod: bool = False
