"""Identification of prompts, the same in requests, journal and snapshots."""

from __future__ import annotations

import enum
from typing import Final

from scalerl_api.wire.base import Struct

MAIN_TASK: Final = "main"
"""Name of the task of a run with a single task."""


HELD_OUT_SET: Final = "held-out"
"""Name of the evaluation set of the task's held-out prompts."""

MEAN_SET: Final = "weighted-mean"
"""Name used in place of an evaluation set: the mean over the held-out sets of the tasks of a mix, weighted by task."""


class Split(enum.StrEnum):
    """A sequence of prompts of a task; an evaluation set is a task with only held-out prompts."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class PromptRef(Struct, frozen=True, array_like=True):
    """Reference to one prompt of a run. Its text and answer are in the task's data, which each process reads itself."""

    task: int
    """Index of the task or evaluation set. Training prompts: index in ``task.mix``, 0 in a run with one task. Held-out
    prompts: index of the evaluation set; with n tasks, the first n indices are the tasks' ``heldOut`` prompts, and later ones
    are the sets with their own task."""
    split: Split
    index: int
    """Position in the split: for training prompts in the task's source, for held-out prompts in the evaluation set."""
