"""Merges published adapters (LoRA) into the base model's weights, which the server reads from the files that it was started from.

A publish of adapters has 1 to 2 % of the bytes of one of weights. vLLM then loads whole weights as after any other publish, so
requests, kernels and the prefix cache do not know adapters, and log-probabilities are those of weights that the trainer merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def merged_weights(
    folder: Path, adapters: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of the model in ``folder``, with ``W + scale · B A`` where there is an adapter.

    Args:
        adapters: ``<tensor in the files>/lora_A`` with the shape [rank, inputs], and ``…/lora_B`` with [outputs, rank].
        dtype: in which the trainer has the weights.

    Raises:
        RuntimeError: an adapter is of no tensor in the files.
    """
    pending = {name.rpartition("/")[0] for name in adapters}
    for file in _files(folder):
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dict
                weight = tensors.get_tensor(name)
                if name in pending:
                    pending.remove(name)
                    change = adapters[f"{name}/lora_B"].float() @ adapters[f"{name}/lora_A"].float()
                    # As the trainer merges: from the rounded weight, in float32.
                    weight = weight.to(dtype).float().add(change, alpha=scale).to(dtype)
                yield name, weight
    if pending:
        raise RuntimeError(f"{folder} has no tensor {min(pending)}, of which an adapter was published")


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _WEIGHTS]
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]
