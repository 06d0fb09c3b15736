"""``spec.schedule``: which of the open slots a generator gets next."""

from __future__ import annotations

from scalerl_api.fields import Model


class ByLengthSpec(Model):
    """By when each group has to start for its step, with lengths expected from the prompts' earlier completions."""


class ScheduleSpec(Model):
    """The order of leasing; default: in slot order, each group to the generator with the fewest groups. No order changes the
    step of a group or its staleness bound."""

    by_length: ByLengthSpec | None = None
    """Groups that are expected to take long are leased earlier, within the staleness window, and to the generator with the fewest
    expected tokens, after RhymeRL's HistoPipe (arXiv 2508.18588 [S])."""
