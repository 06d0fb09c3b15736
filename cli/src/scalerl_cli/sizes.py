"""How much memory a run will need here, and how much there is. Estimates, meant to refuse the hopeless."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from scalerl_api.fields import quantity_bytes
from scalerl_api.load import SpecProblem
from scalerl_api.spec import RunSpec, ScratchModel

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_ADAM_BYTES = 8
"""Two float32 moments a parameter."""
_GIB = 2**30


def parameters(spec: RunSpec) -> int | None:
    """Number of the model's parameters; None where only a download would tell."""
    if spec.model.scratch is not None:
        return scratch_parameters(spec.model.scratch)
    if spec.model.path is None:
        return None
    folder = Path(spec.model.path)
    files = list(folder.glob("*.safetensors")) or list(folder.glob("pytorch_model*.bin"))
    try:
        config = json.loads((folder / "config.json").read_text())
        saved_as = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        return sum(file.stat().st_size for file in files) // _DTYPE_BYTES.get(saved_as, 2)
    except (OSError, ValueError, AttributeError):
        return None  # said elsewhere: the folder has no readable model


def scratch_parameters(model: ScratchModel) -> int:
    """Parameters of a Llama without grouped queries.

    >>> scratch_parameters(ScratchModel(layers=4, hidden_size=128, intermediate_size=384, vocabulary_size=128))
    869504
    """
    h = model.hidden_size
    layer = 4 * h * h + 3 * h * model.intermediate_size + 2 * h
    embeddings = model.vocabulary_size * h * (1 if model.tied_embeddings else 2)
    return model.layers * layer + embeddings + h


def needed_bytes(spec: RunSpec, count: int) -> dict[str, int]:
    """Host memory by role for weights, gradients, optimizer and KV cache; roles on accelerators need none.

    Activations and the libraries' own memory come on top.
    """
    size = _DTYPE_BYTES[spec.model.dtype]
    needed = {}
    if spec.generator.devices == 0:
        cache = quantity_bytes(spec.generator.kv_cache) if spec.generator.kv_cache else 0
        needed["generator"] = spec.generator.replicas * (count * size + cache)
    if spec.trainer.devices == 0:
        ranks, stage = spec.trainer.replicas, spec.trainer.zero_stage
        master = 0 if size == 4 else 4
        optimizer = (master + _ADAM_BYTES) * (1 if stage >= 1 else ranks)
        gradients = size * (1 if stage >= 2 else ranks)
        weights = size * (1 if stage >= 3 else ranks)
        needed["trainer"] = count * (optimizer + gradients + weights)
    return needed


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can still be had: of the machine, or of the cgroup where that is less."""
    found = list(_limits(root))
    return min(found) if found else None


def _limits(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        yield next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass  # not Linux as we know it: nothing is refused for memory
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (group / "memory.stat").read_text().splitlines()
        # Cached file pages count as used, and are given up when memory is wanted.
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        yield limit - used + cached
    except (OSError, ValueError, StopIteration):
        pass  # no such group, or no limit ("max")


def memory_problem(spec: RunSpec, available: int | None = None) -> SpecProblem | None:
    """What to say when the run cannot fit; None when it can, or when that cannot be known."""
    count = parameters(spec)
    available = available_bytes() if available is None else available
    if count is None or available is None:
        return None
    needed = needed_bytes(spec, count)
    if sum(needed.values()) <= available:
        return None
    parts = ", ".join(f"{role} {amount / _GIB:.1f}" for role, amount in needed.items())
    return SpecProblem(
        "spec.model",
        f"{count / 1e6:,.0f} M parameters need about {sum(needed.values()) / _GIB:.1f} GiB here ({parts}), "
        f"{available / _GIB:.1f} GiB are available",
        "take a smaller model, dtype: bfloat16, a higher trainer.zeroStage, fewer replicas, or a smaller "
        "generator.kvCache",
    )
