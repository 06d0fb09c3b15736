"""What names a prompt, the same in requests, journal and snapshots."""

from __future__ import annotations

import enum
from typing import Final

from scalerl_api.wire.base import Struct

MAIN_TASK: Final = "main"
"""Name of the task of a run that has one."""


HELD_OUT_SET: Final = "held-out"
"""Name of the evaluation set of the task's held-out prompts."""

MEAN_SET: Final = "weighted-mean"
"""In place of an evaluation set: the mean of those of the tasks of a mix, each with the task's weight."""


class Split(enum.StrEnum):
    """A sequence of prompts of a task; an evaluation set is a task with held-out prompts alone."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class PromptRef(Struct, frozen=True, array_like=True):
    """One prompt of a run. Its text and answer are in the task's data, which every process reads for itself."""

    task: int
    """Of training prompts, the task: its index in ``task.mix``, 0 of a run with one. Of held-out ones, the evaluation set: as
    many as there are tasks are of their ``heldOut``, those after them are the sets with tasks of their own."""
    split: Split
    index: int
    """Position in the split: of training prompts in the task's source, of the others in the evaluation set."""
