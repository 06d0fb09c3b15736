"""What a kind of source implies for a run, wherever a task's problems are from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from scalerl_api.fields import Model


class SourceKind(Model):
    """A kind of source. The defaults are those of problems that are generated."""

    is_table: ClassVar[bool] = False
    """The preparation makes a table of it, which the other processes read."""
    prompts_checked: ClassVar[int | None] = 2000
    """Evenly spaced prompts whose length is checked before a run; None: all."""
    answers_checked: ClassVar[int | None] = 1000
    """The same of reference answers; of a table in a run's directory, all."""

    @property
    def paths(self) -> Mapping[str, str]:
        """Its files, or globs of them, by the field below its own that names them."""
        return {}

    @property
    def uses_hub(self) -> bool:
        """Whether the preparation downloads it."""
        return False
