"""Whether a run fits into the memory that there is, and what to change if not. The callers determine what there is."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_api.engines import ENGINES
from scalerl_api.memory.model_size import BYTES, ModelSize
from scalerl_api.memory.roles import host_memory, offloaded_bytes, server_memory, trainer_rank_bytes
from scalerl_api.memory.trainer_rank import trainer_rank_memory, with_trainer
from scalerl_api.spec import RunSpec
from scalerl_api.weight_backends import RECEIVED_BUCKETS

_GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class TooLittle:
    """A run needs more memory than there is."""

    field: str
    """Of the spec, below ``spec``."""
    problem: str
    advice: str


def device_memory_problem(
    size: ModelSize, spec: RunSpec, trainer: int | None, generator: int | None
) -> TooLittle | None:
    """A role whose need exceeds its accelerators' memory, in bytes; None if both fit or the memory is unknown."""
    if spec.trainer.devices and trainer is not None:
        rank = trainer_rank_memory(size, spec)
        if rank.total > trainer:
            return TooLittle(
                "trainer",
                f"one trainer rank needs about {rank}, there are {trainer / _GIB:.1f} on its GPU",
                trainer_advice(size, spec, trainer),
            )
    if spec.generator.devices and generator is not None:
        fraction, server = float(spec.generator.memory_fraction), server_memory(size, spec)
        if server > fraction * generator:
            return TooLittle(
                "generator",
                f"a generator's share of the weights is {server / _GIB:.1f} GiB a GPU, generator.memoryFraction "
                f"({spec.generator.memory_fraction}) of {generator / _GIB:.1f} GiB is less",
                "choose a smaller model or more generator.devices",
            )
        free, buckets = (1 - fraction) * generator, RECEIVED_BUCKETS * _device_bucket(size, spec)
        if buckets > free:
            return TooLittle(
                "weightSync.bucket",
                f"a generator has up to {RECEIVED_BUCKETS} buckets of a publish on its GPU, {buckets / _GIB:.1f} GiB, and "
                f"generator.memoryFraction ({spec.generator.memory_fraction}) of {generator / _GIB:.1f} GiB leaves {free / _GIB:.1f}",
                "leave weightSync.bucket out, or reduce it or generator.memoryFraction",
            )
    return None


def _device_bucket(size: ModelSize, spec: RunSpec) -> int:
    """Bytes of a bucket on a generator's device, if its size is given: the backend's own fits by its choice."""
    if not spec.weight_backend.device_buckets or spec.weight_sync.bucket is None:
        return 0
    return min(spec.publish_bucket_bytes, size.parameters * BYTES[spec.model.dtype])


def host_memory_problem(size: ModelSize, spec: RunSpec, there: int) -> TooLittle | None:
    """A run whose roles need together more than ``there``, bytes of the machine that they share; None if they fit."""
    needs = host_memory(size, spec)
    if sum(needs.values()) <= there:
        return None
    of = {
        "generator": f"{spec.generator.replicas} generators",
        "trainer": f"{spec.trainer.ranks} trainer ranks",
    }
    parts = ", ".join(f"{of[role]} {need / _GIB:.1f}" for role, need in needs.items())
    return TooLittle(
        "model",
        f"about {sum(needs.values()) / _GIB:.1f} GiB are needed on this machine ({parts}), {there / _GIB:.1f} GiB are available",
        "take a smaller model, dtype: bfloat16, a higher trainer.zeroStage, fewer replicas, a smaller trainer.microBatchTokens or "
        "generator.kvCache, or accelerators",
    )


def trainer_advice(size: ModelSize, spec: RunSpec, there: int) -> str:
    """The first of a few changes with which a rank would fit, or what to choose otherwise."""

    def fits(**changes: object) -> bool:
        return trainer_rank_bytes(size, with_trainer(spec, **changes)) <= there

    least: dict[str, object] = {"zero_stage": 3, "activation_checkpointing": True}
    ways: list[dict[str, object]] = [{"activation_checkpointing": True}]
    ways += [{"zero_stage": stage} for stage in range(spec.trainer.zero_stage + 1, 4)]
    ways += [least]
    if spec.trainer.devices:
        ways += [least | {"offload": kind} for kind in ENGINES[spec.trainer.engine].offloads]
    ways += [least | {"replicas": n * spec.trainer.replicas} for n in (2, 4, 8)]
    names = {
        "zero_stage": "zeroStage",
        "activation_checkpointing": "activationCheckpointing",
        "offload": "offload",
        "replicas": "replicas",
    }
    for way in ways:
        if fits(**way):
            set_to = ", ".join(
                f"trainer.{names[k]}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in way.items()
            )
            moved = offloaded_bytes(size, with_trainer(spec, **way)) - offloaded_bytes(size, spec)
            host = f" with {moved / _GIB:,.0f} GiB more of host memory a rank" if moved > 0 else ""
            return f"{set_to} would fit{host}; or choose a smaller model, more ranks or a smaller trainer.microBatchTokens"
    return "choose a smaller model, more ranks, a smaller trainer.microBatchTokens or larger accelerators"
