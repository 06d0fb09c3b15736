"""A fork: a run that continues from the checkpoint of another run, ``spec.from``. Pure, but for the file of its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from scalerl_api.edits import Effect, edit_of, flat
from scalerl_api.spec import RunSpec


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``fork.json``: what the run continues."""

    run: str
    step: int

    @classmethod
    def read(cls, path: Path) -> Fork | None:
        """The origin of a run; None if it is no fork.

        Raises:
            OSError: the file cannot be read.
            ValueError: it has another content.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: not the origin of a fork: {error}") from error

    def encode(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def refused_changes(source: RunSpec, fork: RunSpec, step: int) -> list[str]:
    """``field: old → new (why)`` of each value of ``fork`` with which it cannot continue ``source`` from ``step``.

    A fork may differ in what an edit of a run may change, and in what only the accepted rollouts of a run depend on, which a
    checkpoint does not have. The seed and the task stay: the checkpoint is in the middle of their sequence of prompts.
    """
    old, new = (_values(spec) for spec in (source, fork))
    found = []
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) == new.get(path):
            continue
        edit = edit_of(path)
        if edit.effect is Effect.REFUSED and not edit.fork:
            why = (
                "a fork continues the source's model, sequence of prompts and curve; start a run without from"
            )
            found.append(f"spec.{path}: {old.get(path, '(not set)')} → {new.get(path, '(not set)')} ({why})")
    found += [
        f"spec.{path}: {new[path]} (the source's copies are there: give the fork a target of its own)"
        for path in ("checkpoint.to", "trainer.export.to", "weightSync.to")
        if path in new and new[path] == old.get(path)
    ]
    limit = fork.budget.max_steps
    if limit is not None and limit <= step:
        found.append(
            f"spec.budget.maxSteps: {limit} (the checkpoint has {step} steps, and the limit counts from the source's first step: "
            "raise it)"
        )
    return found


def _values(spec: RunSpec) -> dict[str, Any]:
    return dict(flat(spec.model_dump(by_alias=True, exclude_none=True, mode="json")))
