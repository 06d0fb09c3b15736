"""Reads the files of a model folder without torch: the config, and names, shapes and dtypes of all tensors.

Of weights only the headers are read, which takes milliseconds for a model of any size. A safetensors file is eight bytes with
the length of a JSON header, the header, then the tensors' bytes without gaps.

All functions raise ``ModelError``, with the file, for a folder that transformers or vLLM would load in part or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from scalerl_trainer.errors import ModelError, first_line

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
OTHER_FORMATS: Final = (
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.npz", "*.safetensors",
)  # fmt: skip
_LFS: Final = b"version https://git-lfs"
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
_BITS: Final[Mapping[str, int]] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
FLOATS: Final = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that can be cast to the run's."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a weights file, by its header."""

    file: str
    dtype: str
    """As safetensors names it: ``BF16``, ``F32``, ``I64``."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def named(names: Iterable[str]) -> str:
    """Up to three of these names, and the number of the others.

    >>> named(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    every = [name if name.isprintable() else repr(name) for name in sorted(names)]
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        text = path.read_bytes()
        check_not_lfs(path, text[: len(_LFS)])
        content = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"no readable {path.name}: it is missing") from None
    except OSError as error:
        raise ModelError(f"no readable {path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"no readable {path.name}: it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"no readable {path.name}: it is not an object")
    return content


def check_not_lfs(path: Path, begin: bytes) -> None:
    """Raise ``ModelError`` if a file that begins so is a pointer of Git LFS."""
    if begin.startswith(_LFS):
        raise ModelError(
            f"{path.name} is a Git LFS pointer, not the file itself: run git lfs pull in the repository, or download it again"
        )


def weight_files(folder: Path) -> list[Path]:
    """The weights files that transformers loads."""
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise ModelError(
            f"it has both {WEIGHTS} and {INDEX}, and loaders differ in which of them they read: remove one of them"
        )
    if single.is_file():
        return [single]
    if absent := [file.name for file in (single, index) if file.is_symlink() and not file.exists()]:
        raise ModelError(f"{absent[0]} is a link to a file that does not exist")
    if not index.is_file():
        others = {file.name for pattern in OTHER_FORMATS for file in folder.glob(pattern) if file.is_file()}
        if any(name.endswith(".safetensors") for name in others):
            found = named(name for name in others if name.endswith(".safetensors"))
            raise ModelError(f"no weights: neither {WEIGHTS} nor {INDEX}, only {found}: add the index")
        found = f", only {named(others)}: convert them to safetensors" if others else ""
        raise ModelError(f"no weights (*.safetensors){found}")
    files = sorted(set(_weight_map(index).values()))
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise ModelError(f"{len(absent)} of {len(files)} weights files are missing: {named(absent)}")
    return [folder / name for name in files]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the model by name, from the headers of :func:`weight_files`, which have to agree with the index."""
    files = weight_files(folder)
    listed = _weight_map(folder / INDEX) if (folder / INDEX).is_file() else None
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        found = read_header(file)
        if listed is not None:
            here = {name for name, shard in listed.items() if shard == file.name}
            if absent := here - found.keys():
                raise ModelError(
                    f"{len(absent)} tensors that {INDEX} lists are not in {file.name}: {named(absent)}"
                )
            if extra := found.keys() - here:
                raise ModelError(
                    f"{len(extra)} tensors of {file.name} are not listed there by {INDEX}: {named(extra)}"
                )
        tensors |= found
    return tensors


def weights_digest(folder: Path) -> str:
    """SHA-256 of names, dtypes and shapes of the model's tensors, and of up to 4 KiB in the middle of as many as 512 of them, which takes a
    moment for a model of any size. Training changes it; a change of a few rows of one tensor may not."""
    stored = sorted(stored_tensors(folder).items())
    digest = hashlib.sha256(repr([(name, t.dtype, t.shape) for name, t in stored]).encode())
    # Not every second: those would be always the same matrices of a layer.
    for _, tensor in sorted(stored, key=lambda one: hashlib.sha256(one[0].encode()).digest())[:512]:
        size = tensor.elements * _BITS[tensor.dtype] // 8
        try:
            with (folder / tensor.file).open("rb") as file:
                file.seek(tensor.begin + max(0, size - 4096) // 2)
                digest.update(file.read(min(size, 4096)))
        except OSError as error:
            raise ModelError(f"{tensor.file} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{index.name} has no weight_map")
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{index.name}: the file of {name} is not a file name: {file!r}")
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; its size has to be what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            begin = stream.read(len(_LFS))
            check_not_lfs(path, begin)
            length = int.from_bytes(begin[:8], "little")
            if size < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
                raise ModelError(f"{path.name} is not a safetensors file: it has no header")
            if begin[8:9] not in (b"{", b""):
                raise ModelError(f"{path.name} is not a safetensors file: its header is not an object")
            if 8 + length > size:
                raise ModelError(f"{path.name} is truncated: it ends within its header")
            stream.seek(8)
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {
                name: StoredTensor(
                    path.name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
                )
                for name, entry in entries.items()
            }
            end = _check_layout(path, tensors, {n: tuple(e["data_offsets"]) for n, e in entries.items()})
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path.name} is not a safetensors file: its header is wrong: {first_line(error)}"
        ) from error
    stored = size - 8 - length
    if stored < end:
        raise ModelError(f"{path.name} is truncated: it has {stored:,} of {end:,} bytes")
    if stored > end:
        raise ModelError(f"{path.name} is damaged: {stored - end:,} bytes follow its last tensor")
    return tensors


def _check_layout(
    path: Path, tensors: Mapping[str, StoredTensor], offsets: Mapping[str, tuple[int, ...]]
) -> int:
    """Check that the tensors fill the file without gaps; returns the end of the last one."""
    end = 0
    for name, (begin, until) in sorted(offsets.items(), key=lambda item: item[1]):
        tensor = tensors[name]
        if tensor.dtype not in _BITS:
            raise ModelError(f"{path.name}: {name} has the dtype {tensor.dtype}, which is not known")
        if not all(type(n) is int and n >= 0 for n in (*tensor.shape, begin, until)):
            raise ModelError(f"{path.name} is not a safetensors file: {name} has sizes that are not numbers")
        if begin != end or (until - begin) * 8 != tensor.elements * _BITS[tensor.dtype]:
            raise ModelError(
                f"{path.name} is damaged: {name} of shape {list(tensor.shape)} and dtype {tensor.dtype} is at the bytes "
                f"{begin} to {until}, which do not fit"
            )
        end = until
    return end


def quantisation(config: Mapping[str, Any], folder: Path, tensors: Mapping[str, StoredTensor]) -> str | None:
    """What a quantised checkpoint says that it is (``gptq in config.json``), else None."""
    for settings in (config, config.get("text_config")):
        if not isinstance(settings, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            if (given := settings.get(key)) is not None:
                method = (
                    given.get("quant_method", "of an unnamed method") if isinstance(given, Mapping) else given
                )
                return f"{method}, by {key} in config.json"
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        if (folder / name).is_file():
            return f"by {name}"
    small = {name: t for name, t in tensors.items() if _BITS[t.dtype] <= 8 and t.dtype.startswith("F")}
    for name, tensor in islice(small.items(), 1):
        return f"{tensor.dtype}, the dtype of {name}"
    return None
