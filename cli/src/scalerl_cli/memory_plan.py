"""``scalerl validate --memory``: what each role and rank allocates, by ZeRO stage, and the lowest stage that would fit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from scalerl_api.fields import quantity_bytes
from scalerl_api.memory.limits import trainer_advice
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.memory.roles import checkpoint_copy, offloaded_bytes, server_memory
from scalerl_api.memory.trainer_rank import RankMemory, stage_plan
from scalerl_api.spec import RunSpec
from scalerl_cli.machine import available_bytes, model_size

_UNITS: Final = ((2.0**30, "GiB"), (2.0**20, "MiB"))
_GIB = _UNITS[0][0]
_COLUMNS: Final = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "gathered": "gathered",
    "head": "head",
    "buckets": "buckets",
    "reference": "frozen",
    "allowance": "libraries",
}
"""Fields of ``RankMemory``, and what they are called here."""


def memory_lines(spec: RunSpec) -> list[str]:
    """The plan of allocations of ``spec``, or why there is none."""
    size = model_size(spec)
    if spec.model.hub is not None:
        from scalerl_trainer.errors import ModelError
        from scalerl_trainer.models.hub import hub_model_size

        try:
            size = hub_model_size(spec.model.hub)
        except ModelError as error:
            return [f"  memory: the model's size is not known: {error}"]
    if size is None:
        return ["  memory: the model's size is not known: its config.json and headers do not give it"]
    ranks, there = spec.trainer.ranks, _rank_bytes(spec)
    plan, copy = stage_plan(size, spec), checkpoint_copy(size, spec)
    left = there if there is None or spec.trainer.devices else there - copy
    each, unit = _UNITS[max(rank.total for rank in plan.values()) < 10 * _GIB]
    fields = [name for name in _COLUMNS if any(getattr(rank, name) for rank in plan.values())]
    known = "" if there is None else f", {there / each:,.1f} there"
    count = f"{size.parameters / 1e9:.2f} G" if size.parameters >= 1e9 else f"{size.parameters / 1e6:.1f} M"
    lines = [
        f"  memory of a trainer rank, {unit}{known}: {count} parameters, {ranks} "
        f"rank{'s' if ranks > 1 else ''}, {spec.model.dtype}, {spec.micro_batch_tokens:,} tokens a micro-batch"
        f"{', activation checkpointing' if spec.trainer.activation_checkpointing else ''}",
        "    stage" + "".join(f"{_COLUMNS[name]:>12}" for name in fields) + f"{'total':>10}",
        *(_row(stage, rank, fields, left, spec, each) for stage, rank in plan.items()),
        *_verdict(size, spec, plan, left, there),
    ]
    host = "and on its host" if spec.trainer.devices else "and, counted in what fits,"
    lines.append(f"    {host} {copy / each:.1f} for the copy of its state that a checkpoint is written from")
    if (moved := offloaded_bytes(size, spec)) > 0:
        lines.append(f"    and on its host {moved / each:.1f} for what trainer.offload moves there")
    weights = server_memory(size, spec) / each
    if spec.generator.devices:
        given = spec.generator.device_memory
        share = float(spec.generator.memory_fraction) * quantity_bytes(given) / each if given else None
        rest = "" if share is None else f", {max(0.0, share - weights):.1f} of {share:.1f} for the KV cache"
        lines.append(f"  memory of a generator, {unit} a GPU: weights {weights:.1f}{rest}")
    else:
        lines.append(f"  memory of a generator, {unit}: weights, KV cache and past responses {weights:.1f}")
    return lines


def _row(
    stage: int, rank: RankMemory, fields: list[str], left: int | None, spec: RunSpec, each: float
) -> str:
    values = asdict(rank)
    fits = "" if left is None else "  fits" if rank.total <= left else "  does not fit"
    chosen = "  (trainer.zeroStage)" if stage == spec.trainer.zero_stage else ""
    cells = "".join(f"{values[name] / each:12,.1f}" for name in fields)
    return f"    {stage:5}{cells}{rank.total / each:10,.1f}{fits}{chosen}"


def _verdict(
    size: ModelSize, spec: RunSpec, plan: dict[int, RankMemory], left: int | None, there: int | None
) -> list[str]:
    if left is None or there is None:
        return ["    trainer.deviceMemory is not set: what fits is not known"]
    lowest = next((stage for stage, rank in plan.items() if rank.total <= left), None)
    if lowest is None:
        return [f"    no stage fits: {trainer_advice(size, spec, there)}"]
    return [f"    the lowest stage that fits: {lowest}"]


def _rank_bytes(spec: RunSpec) -> int | None:
    """Memory of a rank: its GPU's as declared, or its part of what this machine has."""
    if not spec.trainer.devices:
        host = available_bytes()
        return None if host is None else host // spec.trainer.ranks
    return quantity_bytes(spec.trainer.device_memory) if spec.trainer.device_memory else None
