"""Names and layouts of a model's weights in checkpoint files, which vLLM and other loaders expect.

transformers 5 renames and fuses parameters while it loads a checkpoint: Mixtral's experts become one tensor per layer, and
Pythia's ``embed_out`` becomes ``lm_head``. Publishes and exports therefore revert that conversion, with the same table that
transformers used to load the files.

The conversion is reverted one :class:`TensorGroup` at a time, so that only a few parameters are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from scalerl_trainer.errors import ModelError, first_line

Shape = tuple[int, ...]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorGroup:
    """Parameters that are converted together, usually a single one, and the tensors of files that they become."""

    parameters: tuple[str, ...]
    """Names in the transformers model."""
    tensors: dict[str, Shape]
    """Shapes by the names in files."""


class CheckpointNames:
    """The mapping from a model's parameters to the tensors of its checkpoint files.

    Args:
        causal_lm: the transformers model, loaded by ``from_pretrained`` or returned by :func:`skeleton`.
        shapes: names and full shapes of its parameters.
        stored: names of the tensors in the model's files; None if they are not known.

    Raises:
        ModelError: the conversion cannot be reverted, or its names are not those of the files.
    """

    def __init__(
        self, causal_lm: Any, shapes: Sequence[tuple[str, Shape]], stored: Collection[str] | None = None
    ) -> None:
        self._causal_lm = causal_lm
        self._renamed: dict[str, str] = {}
        metas = {name: torch.empty(shape, device="meta") for name, shape in shapes}
        whole = self._revert(metas)
        self._renamed = _stored_names(causal_lm, whole, stored)
        of_parameter = {name: self._revert({name: meta}).keys() for name, meta in metas.items()}
        self.groups = [
            TensorGroup(names, {n: tuple(t.shape) for n, t in self._revert(_select(metas, names)).items()})
            for names in _connected(of_parameter)
        ]
        found = {name: shape for group in self.groups for name, shape in group.tensors.items()}
        if found != {self._renamed.get(n, n): tuple(t.shape) for n, t in whole.items()}:
            raise ModelError(
                f"{causal_lm.config.model_type}: its checkpoint's layout cannot be restored from its parameters one group at "
                "a time; choose another model"
            )

    def stored_alone(self, parameter: str) -> str | None:
        """The name in files of a parameter that is stored as it is; None if it is converted."""
        group = next(group for group in self.groups if parameter in group.parameters)
        if len(group.parameters) > 1 or len(group.tensors) > 1:
            return None
        ((name, shape),) = group.tensors.items()
        given = torch.empty(shape)  # not written to, so it takes no memory
        (stored,) = self._revert({parameter: given}).values()
        same = stored.data_ptr() == given.data_ptr() and stored.stride() == given.stride()
        return name if same and stored.shape == given.shape else None

    def convert(self, group: TensorGroup, parameters: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the tensors of ``group``, in its order. They may be views of ``parameters``."""
        tensors = self._revert(_select(parameters, group.parameters))
        for name, shape in group.tensors.items():
            if tuple(tensors[name].shape) != shape:
                raise ModelError(f"{name} became {tuple(tensors[name].shape)}, expected {shape}")
            yield tensors.pop(name)

    def _revert(self, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        try:
            reverted = revert_weight_conversion(self._causal_lm, parameters)
        except (ValueError, RuntimeError) as error:
            raise ModelError(
                f"{self._causal_lm.config.model_type}: the layout of its checkpoint cannot be restored from {min(parameters)}: "
                f"{first_line(error)}; choose another model"
            ) from error
        return {self._renamed.get(name, name): tensor for name, tensor in reverted.items()}


def stored_names(folder: Path) -> frozenset[str] | None:
    """Names of the tensors in the files that transformers loads from ``folder``; None if they are not safetensors files.

    Raises:
        ModelError: a file is damaged.
    """
    try:
        if (folder / _INDEX).is_file():
            return frozenset(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
        if (folder / _WEIGHTS).is_file():
            with safe_open(folder / _WEIGHTS, framework="pt") as file:
                return frozenset(file.keys())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"{folder}: the names of its tensors cannot be read: {first_line(error)}; restore its files"
        ) from error
    return None


def skeleton(folder: Path) -> Any:
    """The model of ``folder`` without weights, on the meta device, with the conversion that loading its files would use.

    Raises:
        ModelError: its config cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            causal_lm = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"cannot load the model of {folder}: {first_line(error)}") from error
    mapping = get_model_conversion_mapping(causal_lm)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    for name in stored_names(folder) or ():
        rename_source_key(name, renamings, converters)
    # As `from_pretrained` does: only entries that matched a name of the files.
    causal_lm._weight_conversions = [entry for entry in mapping if entry.was_used()]
    return causal_lm


def _stored_names(causal_lm: Any, names: Collection[str], stored: Collection[str] | None) -> dict[str, str]:
    """The names that differ in the files only by the prefix of the base model, which files of a base model lack."""
    if stored is None:
        return {}
    renamed: dict[str, str] = {}
    prefix = f"{causal_lm.base_model_prefix}."
    tied = set((getattr(causal_lm, "all_tied_weights_keys", None) or {}).values())
    for name in names:
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        if name in stored:
            continue
        if other in stored:
            renamed[name] = other
        elif name not in tied:
            raise ModelError(
                f"{causal_lm.config.model_type}: {name} has another name in the model's files, so neither generators nor "
                "other loaders would find it; choose another model, or convert its files with transformers' "
                "save_pretrained"
            )
    return renamed


def _select(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in names}


def _connected(of_parameter: Mapping[str, Collection[str]]) -> list[tuple[str, ...]]:
    """Groups of the parameters that share a tensor, in the order of their first parameters.

    >>> _connected({"a": ["x"], "b": ["y"], "c": ["x"]})
    [('a', 'c'), ('b',)]
    """
    group_of_tensor: dict[str, list[str]] = {}
    groups: list[list[str]] = []
    for parameter, tensors in of_parameter.items():
        shared = [group_of_tensor[t] for t in tensors if t in group_of_tensor]
        group = shared[0] if shared else []
        if not shared:
            groups.append(group)
        group.append(parameter)
        for tensor in tensors:
            group_of_tensor[tensor] = group
        for other in shared[1:]:
            if other is not group and other:
                group.extend(other)
                for tensor, owner in group_of_tensor.items():
                    if owner is other:
                        group_of_tensor[tensor] = group
                groups.remove(other)
    return [tuple(group) for group in groups]
