"""The publisher of a run, and how long its publishes may take."""

from __future__ import annotations

import torch

from scalerl_api.fields import quantity_bytes
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec
from scalerl_trainer.fence import FOLDER, Fence
from scalerl_trainer.publish.actor_control import ActorControl
from scalerl_trainer.publish.file_publisher import FilePublisher
from scalerl_trainer.publish.group_publisher import GroupPublisher, PublishSettings
from scalerl_trainer.publish.publisher import MAX_TIMEOUTS, WRITE_TIMEOUTS, Publisher
from scalerl_trainer.publish.weight_writer import WeightWriter, begin_attempt


def make_publisher(
    spec: RunSpec,
    paths: RunPaths,
    fence: Fence | None,
    host: str,
    device: torch.device,
    control: ActorControl,
) -> Publisher:
    """The publisher of ``weightSync.backend``."""
    if spec.weight_backend != "files":
        if fence is not None and paths.weights.exists():
            begin_attempt(
                paths.weights / fence.folder.name.removeprefix(FOLDER), fence
            )()  # of another backend
        return GroupPublisher(publish_settings(spec, host, device), control)
    assert fence is not None
    folder = paths.weights / fence.folder.name.removeprefix(FOLDER)
    bucket_bytes = quantity_bytes(spec.weight_sync.bucket)
    return FilePublisher(
        WeightWriter(folder, bucket_bytes, begin_attempt(folder, fence)),
        control,
        bucket_bytes=bucket_bytes,
        timeout_seconds=float(spec.weight_sync.timeout_seconds),
    )


def publish_limit_seconds(spec: RunSpec) -> float:
    """Bound on the time until a publish no longer reads the weights: a member that is lost late in its last attempt adds one
    timeout."""
    timeouts = WRITE_TIMEOUTS if spec.weight_backend == "files" else MAX_TIMEOUTS
    return (timeouts + 1) * spec.weight_sync.timeout_seconds


def publish_settings(spec: RunSpec, host: str, device: torch.device) -> PublishSettings:
    """Settings of a publisher with a process group. ``host``: address of this process for the actors."""
    backend = spec.weight_backend
    assert backend != "files"
    return PublishSettings(
        host=host,
        backend=backend,
        bucket_bytes=quantity_bytes(spec.weight_sync.bucket),
        timeout_seconds=float(spec.weight_sync.timeout_seconds),
        workers_per_member=spec.generator.workers,
        device=device if backend == "nccl" else torch.device("cpu"),
    )
