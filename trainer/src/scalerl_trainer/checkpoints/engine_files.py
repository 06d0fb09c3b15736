"""The engine's state on disk, in a format that is independent of the engine, the number of ranks and the ZeRO stage.

A rank writes the pieces of parameters that it owns: float32 weights, both moments of AdamW and, between two updates that share
sampled weights, the proximal policy's weights (``algo.corrections``) in the model's dtype. The name of a piece has its
parameter and its start in the flattened parameter. A rank that loads reads the pieces that it needs from the files of all
ranks. Engine, ranks and stage may therefore change between save and load, no rank reads more than its part,
and each file is a plain safetensors file.

======================= =============================================================================
``engine.json``         number of updates, the optimizer's step count, names and shapes of all parameters
``rank-<r>.safetensors`` ``<parameter>@<start>/weight``, ``…/exp_avg``, ``…/exp_avg_sq``, flat float32; ``…/proximal``
``start.msgpack``         completions of the start of the run (:mod:`.engine.start_kl`), if it had some
======================= =============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from scalerl_trainer.errors import EngineError
from scalerl_trainer.models.lora import Lora
from scalerl_trainer.tensor_files import TensorInfo, write_tensors

HEADER = "engine.json"
KEYS = ("weight", "exp_avg", "exp_avg_sq")
PROXIMAL = "proximal"
"""Key of the proximal policy's weights."""
_READ_ELEMENTS = 16 << 20


@dataclass(frozen=True)
class Piece:
    """A contiguous part of a flattened parameter."""

    name: str
    start: int
    """Index of its first element in the flattened parameter."""
    values: dict[str, torch.Tensor]
    """Flat float32 views, by ``KEYS``; of a saved piece also ``PROXIMAL``."""


class EngineHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Metadata of a saved engine."""

    steps_done: int
    """Number of updates."""
    optimizer_steps: float
    """AdamW's step count, which its bias correction uses."""
    parameters: dict[str, list[int]]
    """Full shapes by name."""
    lora: Lora | None = None
    """Of adapters, which are all that the checkpoint has then."""
    base: str = ""
    """Digest of the model that the adapters are of; empty without them, or where it is not known."""


def write_pieces(
    directory: Path, rank: int, pieces: Sequence[Piece], progress: Callable[[int], None] | None = None
) -> Path:
    """Write this rank's file, and return it; ``progress`` as in :func:`.write_tensors`. Raises ``OSError``."""
    parts = [(f"{p.name}@{p.start}/{key}", values) for p in pieces for key, values in p.values.items()]
    infos = [TensorInfo(name, values.dtype, (values.numel(),)) for name, values in parts]
    path = directory / f"rank-{rank:05d}.safetensors"
    write_tensors(path, infos, (values for _, values in parts), {"format": "pt"}, progress)
    return path


def write_header(directory: Path, header: EngineHeader) -> Path:
    """Write the header, on rank 0, and return its file. Raises ``OSError``."""
    path = directory / HEADER
    path.write_bytes(msgspec.json.format(msgspec.json.encode(header), indent=1))
    return path


class SavedState:
    """A saved engine, opened for lazy reading.

    Raises:
        EngineError: the files are invalid.
        OSError
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: dict[str, list[tuple[int, int, Any]]] = {}
        self._keys: set[str] = set()
        try:
            self.header = msgspec.json.decode((directory / HEADER).read_bytes(), type=EngineHeader)
            for path in sorted(directory.glob("rank-*.safetensors")):
                file: Any = safe_open(path, framework="pt")
                for key in file.keys():  # noqa: SIM118  # not a dict
                    parameter, start = key.rsplit("/", 1)[0].rsplit("@", 1)
                    self._keys.add(key.rsplit("/", 1)[1])
                    if key.endswith("/weight"):
                        size = file.get_slice(key).get_shape()[0]
                        self._places.setdefault(parameter, []).append((int(start), size, file))
        except (msgspec.MsgspecError, SafetensorError, ValueError) as error:
            raise EngineError(f"{directory} cannot be read: {error}") from error

    def read(self, name: str, key: str, start: int, target: torch.Tensor) -> None:
        """Fill the flat ``target`` with the elements from ``start`` on of a parameter's values of ``key``.

        Raises:
            EngineError: some of these elements were not saved.
        """
        missing = target.numel()
        for begin, size, file in self._places.get(name, []):
            low, high = max(begin, start), min(begin + size, start + target.numel())
            if low >= high:
                continue
            source = file.get_slice(f"{name}@{begin}/{key}")
            for chunk in range(low, high, _READ_ELEMENTS):
                end = min(high, chunk + _READ_ELEMENTS)
                target[chunk - start : end - start].copy_(source[chunk - begin : end - begin])
            missing -= high - low
        if missing:
            raise EngineError(f"{self._directory}: {missing} elements of {name} are in no file")

    def has(self, key: str) -> bool:
        """Whether the state has values of ``key``."""
        return key in self._keys

    def whole(self, name: str) -> torch.Tensor:
        """The float32 weights of a whole parameter, in its shape, on the CPU."""
        shape = self.header.parameters[name]
        flat = torch.empty(math.prod(shape))
        self.read(name, "weight", 0, flat)
        return flat.view(shape)

    def check(self, parameters: dict[str, list[int]], lora: Lora | None = None, base: str = "") -> None:
        """Raise ``EngineError`` unless the saved model has exactly these parameters and shapes, and such adapters of the model
        with the digest ``base``."""
        if self.header.lora != lora:
            has, wants = (
                f"adapters of {one}" if one else "whole weights" for one in (self.header.lora, lora)
            )
            raise EngineError(
                f"{self._directory} has {has}, and trainer.lora asks for {wants}: restore trainer.lora, or start a new run"
            )
        self.check_base(base)
        saved = self.header.parameters
        for name in sorted(saved.keys() | parameters.keys()):
            if saved.get(name) != parameters.get(name):
                raise EngineError(
                    f"{self._directory} is of another model: {name} has the shape {saved.get(name, 'nothing')}, but "
                    f"{parameters.get(name, 'nothing')} in model.*: restore model.*, or start a new run"
                )

    def check_base(self, base: str) -> None:
        """Raise ``EngineError`` if the adapters are of another model than that with the digest ``base``."""
        if self.header.base and base and self.header.base != base:
            raise EngineError(
                f"{self._directory} has adapters of other weights than the files of the model have now, which were changed after "
                "the run was prepared (files of model.path are linked, where that is possible): restore them, or start a new run"
            )

    def load(self, pieces: Iterator[Piece]) -> None:
        """Fill every view of ``pieces``."""
        for piece in pieces:
            for key in KEYS:
                self.read(piece.name, key, piece.start, piece.values[key])
