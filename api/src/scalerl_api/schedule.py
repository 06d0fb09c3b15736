"""``spec.schedule``: which of the open slots a generator gets next."""

from __future__ import annotations

from scalerl_api.fields import Model


class ByLengthSpec(Model):
    """Longest first by the prompts' earlier completions, each to the generator with the least to do."""


class ScheduleSpec(Model):
    """The order of leasing; default: in slot order, and whoever asks first gets as many as it has room for. No order changes the
    step of a group or its staleness bound."""

    by_length: ByLengthSpec | None = None
    """Expected long groups first within the staleness window, and where least else runs, as RhymeRL's HistoPipe (arXiv 2508.18588
    [S])."""
