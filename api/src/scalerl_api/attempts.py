"""Numbers of the attempts of the trainer, and of the coordinator, on a cluster, by which the volume and the coordinator tell a later attempt
from an earlier one."""

from __future__ import annotations

import re
from typing import NamedTuple

_TEXT = re.compile(r"^(\d{1,12})\.(\d{1,9})(?:-|$)", re.ASCII)


class AttemptSuperseded(Exception):
    """A later attempt, of the trainer or of the coordinator, has begun; this one must end."""


class Attempt(NamedTuple):
    """The number of an attempt; a later attempt is greater, also one of a later run of the same name on the same volume."""

    run_created: int
    """When the run was created, in unix seconds of the API server."""
    number: int
    """From 1 in each run."""

    def __str__(self) -> str:
        return f"{self.run_created}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> Attempt | None:
        """The attempt at the start of ``text``; None without one.

        >>> Attempt.parse("1795752000.3-5f0c") == Attempt.parse(str(Attempt(1795752000, 3))) < Attempt(1795752001, 1)
        True
        >>> Attempt.parse("5f0c") is None
        True
        """
        found = _TEXT.match(text)
        return None if found is None else cls(int(found[1]), int(found[2]))
