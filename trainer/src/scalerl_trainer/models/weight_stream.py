"""Loads a model without holding it: a model without values, and its weights, read from their files one parameter at a time.

:func:`open_model` makes the model. Its parameters have memory that is reserved and never touched, its buffers are real. The
engine iterates over the :class:`WeightStream` on all ranks: rank 0 reads, casts and converts what belongs to a few parameters
(as ``from_pretrained`` would, with the same tables), and the engine broadcasts and partitions them before the next ones are
read. Files are read rather than mapped: a file that is truncated meanwhile raises an error instead of SIGBUS.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from scalerl_api.memory.model_size import Dtype
from scalerl_trainer.errors import ModelError, ModelNotFoundError, first_line
from scalerl_trainer.models.files import StoredTensor, read_header, stored_tensors
from scalerl_trainer.models.load import check_source, check_weights_are_parameters
from scalerl_trainer.models.structure import loading_problems

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_READ_BYTES: Final = 64 << 20


def open_model(
    folder: Path, *, dtype: Dtype = "bfloat16", attention: str = "sdpa"
) -> tuple[Any, WeightStream]:
    """The causal language model of ``folder`` in ``dtype``, in training mode and without values, and the weights for it.

    Only headers of the files are read.

    Raises:
        ModelNotFoundError: the folder is not a model's.
        ModelError: as :func:`.load.load_model`, and where a weights file is missing, truncated or damaged.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    check_source(str(folder))
    try:
        stored = stored_tensors(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, **options)
        with torch.device("meta"):
            shown = options | {"attn_implementation": "eager" if "flash" in attention else attention}
            skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), **shown)
    except ImportError as error:
        raise ModelError(
            f"the model of {folder} with model.attention: {attention} needs a package that is missing: {first_line(error)}"
        ) from error
    except ModelError as error:
        raise ModelError(f"the model of {folder}: {error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFoundError(
            f"cannot load the model of {folder}: {first_line(error)}; check the folder's files"
        ) from error
    if wrong := list(loading_problems(skeleton, stored)):
        raise ModelError(
            f"the tensors in the files of {folder} are not those of the model: {'; '.join(wrong)}"
        )
    check_weights_are_parameters(model, str(folder))
    model.tie_weights()
    _untie_different(model, folder, stored)
    model.config.use_cache = False
    return model.train(), WeightStream(model, folder, stored, _plan(model, stored))


class WeightStream:
    """The weights of ``causal_lm``, which may get further parameters before they are read.

    Args:
        folder: of the files.
        stored: the tensors in them.
        plan: the conversion that makes each parameter, by its name, or of several the first one's, with the sources' names.
    """

    def __init__(
        self,
        causal_lm: Any,
        folder: Path,
        stored: Mapping[str, StoredTensor],
        plan: Mapping[str, tuple[Any, list[tuple[str, str]]]],
    ) -> None:
        self._causal_lm, self._folder, self._stored = causal_lm, folder, stored
        self._plan: list[tuple[str, Any, list[tuple[str, str]], dict[str, torch.Tensor]]] = []
        known: set[int] = set()
        for name, (conversion, sources) in plan.items():
            metas = {n: torch.empty(stored[n].shape, device="meta") for n, _ in sources}
            made = self._convert(name, conversion, sources, metas)
            # Objects, as other layers may be put around these before they are read.
            targets = {target: causal_lm.get_parameter_or_buffer(target) for target in made}
            for target, tensor in made.items():
                if tensor.shape != targets[target].shape:
                    raise ModelError(
                        f"{folder}: {target} would have the shape {list(tensor.shape)}, not {list(targets[target].shape)}"
                    )
            # Files may have a tied parameter twice.
            if not known.issuperset(map(id, targets.values())):
                known |= set(map(id, targets.values()))
                self._plan.append((name, conversion, sources, targets))

    @classmethod
    def of_file(cls, causal_lm: Any, path: Path) -> WeightStream:
        """The weights in one file under the names of the parameters.

        Raises:
            ModelError: the file is missing, damaged, or not of this model.
        """
        stored = read_header(path)
        plan = {name: (None, [(name, name)]) for name, _ in causal_lm.named_parameters()}
        if missing := sorted(plan.keys() - stored.keys()):
            raise ModelError(f"{path.name} has no {missing[0]}")
        return cls(causal_lm, path.parent, stored, plan)

    @torch.no_grad()
    def parameters(self, device: torch.device, *, reads: bool) -> Iterator[list[torch.Tensor]]:
        """Yield a few parameters (or persistent buffers) at a time, on ``device``.

        Args:
            reads: give them their values; otherwise their memory is not initialised, for a broadcast.

        Raises:
            ModelError: after the last parameters, if a file could not be read: all ranks take part in what the caller does
                with each.
        """
        problem: ModelError | None = None
        for name, conversion, sources, targets in self._plan:
            made: Mapping[str, torch.Tensor] = {}
            if reads and problem is None:
                try:
                    made = self._convert(name, conversion, sources, {n: self._read(n) for n, _ in sources})
                except ModelError as error:
                    problem = error
            for target, tensor in targets.items():
                if target in made:
                    tensor.data = made[target].to(device, tensor.dtype).contiguous()
                else:
                    tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            del made
            yield list(targets.values())
        if problem is not None:
            raise problem

    def _convert(
        self, name: str, conversion: Any, sources: list[tuple[str, str]], tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if conversion is None:
            return {name: tensors[sources[0][0]]}
        conversion = copy.deepcopy(conversion)
        for source, pattern in sources:
            conversion.add_tensor(name, source, pattern, tensors.pop(source))
        made = conversion.convert(name, model=self._causal_lm, config=self._causal_lm.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    def _read(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        return read_tensor(self._folder / stored.file, name, stored)


def read_tensor(path: Path, name: str, stored: StoredTensor) -> torch.Tensor:
    """A tensor of a safetensors file, on the CPU.

    Raises:
        ModelError: the file is gone, ends before the tensor does, or cannot be read.
    """
    tensor = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
    left = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(stored.begin)
            while left:
                count = file.readinto(left[:_READ_BYTES])
                if not count:
                    raise ModelError(f"{path} was truncated while {name} was read: restore the file")
                left = left[count:]
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({name}): {error.strerror}: restore the file") from error
    return tensor


def _plan(causal_lm: Any, stored: Mapping[str, StoredTensor]) -> dict[str, tuple[Any, list[tuple[str, str]]]]:
    """transformers' conversion for each parameter: by its name, the conversion, and the names in the files with their patterns."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(causal_lm)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, own = causal_lm.base_model_prefix, causal_lm.state_dict()
    plan: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for source in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, own)
        if name not in own and source in own:
            name, pattern = rename_source_key(source, [], [], prefix, own)
        if name in own:
            conversion = None if pattern is None else of_pattern[pattern]
            plan.setdefault(name, (conversion, []))[1].append((source, pattern or source))
    # As `from_pretrained` does: only entries that matched a name of the files.
    causal_lm._weight_conversions = [entry for entry in mapping if entry.was_used()]
    return plan


def _untie_different(causal_lm: Any, folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Untie parameters of which the files have two that differ, as ``from_pretrained`` does."""
    for target, source in list((getattr(causal_lm, "all_tied_weights_keys", None) or {}).items()):
        if target not in stored or source not in stored:
            continue
        pair = (read_tensor(folder / stored[n].file, n, stored[n]) for n in (target, source))
        if not torch.equal(*pair):
            parent, _, name = target.rpartition(".")
            shared = causal_lm.get_parameter(source)
            setattr(causal_lm.get_submodule(parent), name, torch.nn.Parameter(torch.empty_like(shared)))
            causal_lm.all_tied_weights_keys.pop(target)
