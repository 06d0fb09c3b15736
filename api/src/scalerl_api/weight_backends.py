"""``weightSync.backend``: the ways of new weights to the generators, and what each implies for a run.

Another one is an entry of :data:`WEIGHT_BACKENDS` with its name in :data:`BackendName`, its rule, and a publisher in
``scalerl_trainer.publish.make_publisher``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from scalerl_api.fields import Rule, quantity_bytes
from scalerl_api.wire.control import GroupBackend

BackendName = Literal["Auto", "Gloo", "NCCL", "Files"]

_MIB: Final = 2**20
RECEIVED_BUCKETS: Final = 4
"""Buckets that a generator's device has memory for at a time: the one that is received, two with tensors of layers that are not complete,
and one that torch's allocator keeps."""
_SMALL_DEVICE_BYTES: Final = 16 << 30
"""Memory of a generator's device if the spec does not say it."""


@dataclass(frozen=True, slots=True)
class WeightBackend:
    """A way of weights."""

    group: GroupBackend | None = None
    """Backend of the process group of trainer and generators; None: they read files, without a group."""
    device_buckets: bool = False
    """The buckets of a publish are in the memory of the devices, not the host's."""
    keeps_published: bool = False
    """Rank 0 and each generator have the last published version in the host's memory."""
    own_bucket_bytes: int = 16 * _MIB
    """Where ``weightSync.bucket`` is left out: over gloo and from files, a larger one costs the receiver page faults on fresh memory."""

    def bucket_bytes(self, bucket: str | None, device_bytes: int | None, memory_fraction: float) -> int:
        """Bytes of a bucket for ``weightSync.bucket``. The backend's own size is at most what a generator's device has free for it.

        Args:
            device_bytes: memory of a generator's device; None: not known.
            memory_fraction: the part of it that vLLM takes.

        >>> WEIGHT_BACKENDS["Gloo"].bucket_bytes(None, None, 0.9) >> 20, WEIGHT_BACKENDS["NCCL"].bucket_bytes(None, 80 << 30, 0.9) >> 20
        (16, 512)
        >>> WEIGHT_BACKENDS["NCCL"].bucket_bytes(None, None, 0.9) >> 20, WEIGHT_BACKENDS["NCCL"].bucket_bytes("16Mi", None, 0.9) >> 20
        (409, 16)
        """
        if bucket is not None:
            return quantity_bytes(bucket)
        free = (1 - memory_fraction) * (device_bytes or _SMALL_DEVICE_BYTES)
        fits = int(free / RECEIVED_BUCKETS) // _MIB * _MIB
        return min(self.own_bucket_bytes, max(16 * _MIB, fits))


WEIGHT_BACKENDS: Final[Mapping[BackendName, WeightBackend]] = {
    "Gloo": WeightBackend("gloo"),
    # A broadcast of 16 MiB takes less on a GPU than what surrounds it: the launches, the trailer's copy to the host, the wait. An 8B model has
    # 1,000 of them; with 512 MiB it has 32 [by reading].
    "NCCL": WeightBackend("nccl", device_buckets=True, own_bucket_bytes=512 * _MIB),
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
