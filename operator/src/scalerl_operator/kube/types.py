"""What the pure parts of the Kubernetes runtime hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as JSON has it."""

Key = tuple[str, str]
"""A run: (namespace, name)."""


@dataclass(frozen=True)
class Images:
    """Container images where a run's ``spec.images`` names none."""

    trainer: str
    generator: str
    coordinator: str
    pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Desired:
    """What is to exist now.

    generators: replicas; at 0 there is no Deployment at all.
    trainer_attempt: which start of the gang, from 1; None: no trainer.
    trained: the run has steps, without which its volume is not the run's.
    """

    prepare: bool = False
    coordinator: bool = False
    generators: int = 0
    trainer_attempt: int | None = None
    trained: bool = False
