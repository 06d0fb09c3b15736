"""Exported models of a run: ``checkpoints/hf/exports.json``, written by the trainer, read by the coordinator."""

from __future__ import annotations

from pathlib import Path

import msgspec

EXPORTS_FILE = "exports.json"


class ExportedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder that transformers and vLLM can load."""

    version: int
    """Weight version: updates applied."""
    reward: float
    """Reward of its evaluation."""
    path: str
    """Path on the run's volume, relative to the run's directory."""
    uri: str = ""
    """Location of the copy under ``trainer.export.to``; empty if there is none (yet)."""
    time: str
    """Time of writing, RFC 3339, UTC."""


class Exports(msgspec.Struct, frozen=True, kw_only=True):
    """The models of the best and of the last evaluation; often the same model."""

    best: ExportedModel | None = None
    last: ExportedModel | None = None
    failures: int = 0
    """Failed exports and copies since this start of the trainer."""
    problem: str = ""
    """Why the last attempt failed; empty after a success."""


def read_exports(directory: Path) -> Exports | None:
    """Read the exports file of ``directory`` (``RunPaths.exports``); None if there is no readable file."""
    try:
        return msgspec.json.decode((directory / EXPORTS_FILE).read_bytes(), type=Exports)
    except (OSError, msgspec.MsgspecError):
        return None
