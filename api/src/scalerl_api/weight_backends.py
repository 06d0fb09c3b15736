"""``weightSync.backend``: the ways of new weights to the generators, and what each implies for a run.

Another one is an entry of :data:`WEIGHT_BACKENDS` with its name in :data:`BackendName`, its rule, and a publisher in
``scalerl_trainer.publish.from_spec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from scalerl_api.fields import Rule
from scalerl_api.wire.control import GroupBackend

BackendName = Literal["Auto", "Gloo", "NCCL", "Files"]


@dataclass(frozen=True, slots=True)
class WeightBackend:
    """A way of weights."""

    group: GroupBackend | None = None
    """Backend of the process group of trainer and generators; None: they read files, without a group."""
    keeps_published: bool = False
    """Rank 0 and each generator have the last published version in the host's memory."""


WEIGHT_BACKENDS: Final[Mapping[BackendName, WeightBackend]] = {
    "Gloo": WeightBackend("gloo"),
    "NCCL": WeightBackend("nccl"),
    "Files": WeightBackend(keeps_published=True),
}
WEIGHT_BACKEND_RULES: Final = (
    Rule(
        "self.weightSync.backend != 'NCCL' || (self.generator.devices > 0 && self.trainer.devices > 0)",
        "weightSync.backend NCCL needs generator.devices and trainer.devices above 0",
        "weightSync.backend",
        lambda spec: spec.weight_sync.backend != "NCCL" or spec.generator.devices * spec.trainer.devices > 0,
    ),
    Rule(
        "self.weightSync.backend != 'Files' || has(self.weightSync.to) || self.storage.mountedBy != 'Coordinator'",
        "weightSync.backend Files needs weightSync.to, or a volume that trainer and generators mount: leave out storage.mountedBy "
        "Coordinator",
        "weightSync.backend",
        lambda spec: (
            spec.weight_sync.backend != "Files"
            or spec.weight_sync.to is not None
            or spec.storage.mounted_by != "Coordinator"
        ),
    ),
)
"""Rules of a run's spec."""


def weight_backend(name: BackendName, *, on_devices: bool) -> WeightBackend:
    """The backend of ``weightSync.backend``. ``on_devices``: both sides have accelerators."""
    if name == "Auto":
        name = "NCCL" if on_devices else "Gloo"
    return WEIGHT_BACKENDS[name]
