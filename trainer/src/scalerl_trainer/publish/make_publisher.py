"""Chooses a run's publisher by ``weightSync.backend``: its settings, and how long its publishes may take."""

from __future__ import annotations

from functools import partial

import torch

from scalerl_api.object_store import ObjectStore
from scalerl_api.process import ProcessEnvironment
from scalerl_api.spec import RunSpec, ScaleRLRun
from scalerl_trainer.checkpoints.object_store import claim_prefix, identity
from scalerl_trainer.fence import FOLDER, Fence
from scalerl_trainer.publish.actor_control import ActorControl
from scalerl_trainer.publish.file_publisher import FilePublisher
from scalerl_trainer.publish.group_publisher import GroupPublisher, PublishSettings
from scalerl_trainer.publish.publisher import MAX_TIMEOUTS, WRITE_TIMEOUTS, Publisher
from scalerl_trainer.publish.weight_folders import StoredFolder, VolumeFolder, WeightFolder, begin_attempt
from scalerl_trainer.publish.weight_writer import WeightWriter

MIN_COLLECTIVE_SECONDS = 600.0


def make_publisher(
    run: ScaleRLRun,
    environment: ProcessEnvironment,
    fence: Fence | None,
    device: torch.device,
    control: ActorControl,
) -> Publisher:
    """The publisher of ``weightSync.backend``."""
    spec, to = run.spec, run.spec.weight_sync.to
    assert fence is not None  # it is rank 0's
    name = fence.folder.name.removeprefix(FOLDER)
    weights = environment.paths.weights
    folder: WeightFolder = VolumeFolder(weights / name)
    begin = begin_attempt(folder, fence)
    if (spec.weight_backend.group is not None or to is not None) and weights.exists():
        begin()  # deletes those of attempts that published through the volume
    if spec.weight_backend.group is not None:
        return GroupPublisher(publish_settings(spec, environment.trainer_host, device), control)
    if to is not None:
        store = ObjectStore(to)
        claim = partial(claim_prefix, store, identity(run), "weightSync.to", "no other run uses it")
        folder = StoredFolder(store, name)
        begin = begin_attempt(folder, fence, claim, environment.attempt)
    bucket_bytes = spec.publish_bucket_bytes
    return FilePublisher(
        WeightWriter(folder, bucket_bytes, begin),
        control,
        bucket_bytes=bucket_bytes,
        timeout_seconds=float(spec.weight_sync.timeout_seconds),
    )


def publish_limit_seconds(spec: RunSpec) -> float:
    """Bound on the time until a publish no longer reads the weights: a member that is lost late in its last attempt adds one
    timeout."""
    timeouts = MAX_TIMEOUTS if spec.weight_backend.group is not None else WRITE_TIMEOUTS
    return (timeouts + 1) * spec.weight_sync.timeout_seconds


def collective_timeout_seconds(spec: RunSpec) -> float:
    """Timeout of every collective of the default process group, after which NCCL's watchdog ends the process.

    An update waits on each rank until a publish has read the weights, at most :func:`publish_limit_seconds`, and the ranks need
    not begin to wait at the same time.
    """
    return max(MIN_COLLECTIVE_SECONDS, publish_limit_seconds(spec) + 60.0)


def publish_settings(spec: RunSpec, host: str, device: torch.device) -> PublishSettings:
    """Settings of a publisher with a process group. ``host``: address of this process for the actors."""
    backend = spec.weight_backend.group
    assert backend is not None
    return PublishSettings(
        host=host,
        backend=backend,
        bucket_bytes=spec.publish_bucket_bytes,
        timeout_seconds=float(spec.weight_sync.timeout_seconds),
        workers_per_member=spec.generator.workers,
        device=device if spec.weight_backend.device_buckets else torch.device("cpu"),
    )
