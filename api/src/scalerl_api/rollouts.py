"""The record of rollouts: its section of the spec, and which prompts it has."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

from pydantic import AfterValidator

from scalerl_api.fields import AtLeast, AtMost, Model, Quantity, UnitDecimal
from scalerl_api.wire.prompts import PromptRef

RECORDED_PER_STEP: Final = 256
RECORDED_PER_EVALUATION: Final = 2048

RecordQuantity = Annotated[Quantity, AfterValidator(AtLeast("1Mi")), AfterValidator(AtMost("64Ti"))]


class RolloutsSpec(Model):
    """The rollouts that the coordinator writes to ``rollouts/`` on the run's volume, for ``scalerl rollouts``."""

    share: UnitDecimal | None = None
    """Part of the prompts whose completions are written, training and held-out; "1" writes all, "0" none; default: what gives
    about 256 rollouts a step and 2,048 an evaluation. It has the same prompts throughout the run."""
    max_size: RecordQuantity = "4Gi"
    """Disk on the run's volume; the oldest rollouts are deleted first."""


def in_sample(prompt: PromptRef, share: float) -> bool:
    """Whether a prompt is in the sample of ``share`` of all prompts, which is the same at any time and in any process.

    >>> from scalerl_api.wire.prompts import Split
    >>> [in_sample(PromptRef(0, Split.TRAIN, 7), share) for share in (0.0, 0.01, 1.0)]
    [False, False, True]
    """
    name = f"{prompt.split} {prompt.task} {prompt.index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest()) < share * 2**48
