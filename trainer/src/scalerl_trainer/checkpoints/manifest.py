"""The manifest of a checkpoint: sizes and hashes of its files.

The hash is SHA-256 because processors have instructions for it (1.7 GB/s per core, compared with 0.9 GB/s for BLAKE2b), and
``sha256sum`` can check it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from scalerl_trainer.errors import TrainerError

MANIFEST = "manifest.json"
FORMAT = 2


class CheckpointError(TrainerError):
    """A checkpoint could not be written, or none can be read."""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint; ``path`` is relative to the checkpoint's folder."""

    path: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a checkpoint."""

    format: int
    step: int
    shape: dict[str, str]
    """Number of ranks, ZeRO stage and dtype that wrote it."""
    files: list[FileRecord]

    def encode(self) -> bytes:
        """The manifest with its own digest, as indented JSON."""
        body = msgspec.to_builtins(self)
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return json.dumps({**body, "digest": digest}, indent=1, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode a manifest. Raises ``CheckpointError`` if it is invalid or does not match its digest."""
        try:
            body: dict[str, Any] = json.loads(data)
            digest = body.pop("digest")
            manifest = msgspec.convert(body, cls)
        except (ValueError, KeyError, AttributeError, msgspec.ValidationError) as error:
            raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error
        if digest != hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest():
            raise CheckpointError(f"{MANIFEST} does not match its own digest")
        if manifest.format != FORMAT:
            raise CheckpointError(f"{MANIFEST} has format {manifest.format}, but this trainer reads {FORMAT}")
        return manifest
