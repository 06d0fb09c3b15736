"""``spec.coordinator``."""

from __future__ import annotations

from typing import Final

from scalerl_api.fields import Model
from scalerl_api.pods import PodTemplate

LEASE_SECONDS: Final = 1800
"""A group without progress for this long is reassigned to another generator; at least three times the longest timeoutSeconds of a
verifier or environment, so that one completion that hangs it does not cost its group the lease."""


class CoordinatorSpec(Model):
    """The process that assigns work and keeps the history of the run. Ignored by the local runtime."""

    pod_template: PodTemplate | None = None
    """Overrides the run's podTemplate for the coordinator."""
