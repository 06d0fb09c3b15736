"""What a run has exported: ``checkpoints/hf/exports.json``, written by the trainer, read by the coordinator."""

from __future__ import annotations

from pathlib import Path

import msgspec

EXPORTS_FILE = "exports.json"


class ExportedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder that transformers and vLLM load."""

    version: int
    """Weight version: updates applied."""
    reward: float
    """Of its evaluation."""
    path: str
    """On the run's volume, relative to the run's directory."""
    uri: str = ""
    """Where ``trainer.export.to`` has a copy; empty: nowhere (yet)."""
    time: str
    """When it was written, RFC 3339, UTC."""


class Exports(msgspec.Struct, frozen=True, kw_only=True):
    """The models of the best and of the last evaluation; often the same."""

    best: ExportedModel | None = None
    last: ExportedModel | None = None
    failures: int = 0
    """Exports and copies that failed, over this start of the trainer."""
    problem: str = ""
    """Why the last attempt failed; empty once one has succeeded."""


def read_exports(directory: Path) -> Exports | None:
    """Those of ``RunPaths.exports``; None when there is no file that can be read."""
    try:
        return msgspec.json.decode((directory / EXPORTS_FILE).read_bytes(), type=Exports)
    except (OSError, msgspec.MsgspecError):
        return None
