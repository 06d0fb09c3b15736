"""The record of rollouts: its section of the spec, and which prompts it has."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

from pydantic import Field

from scalerl_api.fields import Model, Quantity
from scalerl_api.wire.prompts import PromptRef

EVALUATION_FACTOR: Final = 8
"""An evaluation has so many times the rollouts of a step in the record."""

TOKEN_COLUMNS: Final = ("token_ends", "token_versions", "token_logprob_differences")
"""Columns of the record with a list that has an item for each token, which few readers need."""


class RolloutsSpec(Model):
    """The rollouts that the coordinator writes to ``rollouts/`` on the run's volume, for ``scalerl rollouts``."""

    per_step: Annotated[int, Field(ge=0, le=100_000_000)] = 256
    """Rollouts of a step that are written, about; of an evaluation 8 times as many. 0: none."""
    max_size: Quantity = "4Gi"
    """Disk for them; the oldest are deleted first."""


def in_sample(prompt: PromptRef, share: float) -> bool:
    """Whether a prompt is in the sample of ``share`` of all prompts, which is the same at any time and in any process.

    >>> from scalerl_api.wire.prompts import Split
    >>> [in_sample(PromptRef(0, Split.TRAIN, 7), share) for share in (0.0, 0.01, 1.0)]
    [False, False, True]
    """
    name = f"{prompt.split} {prompt.task} {prompt.index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest()) < share * 2**48
