"""``spec.schedule``: the order in which open slots are leased to generators."""

from __future__ import annotations

from scalerl_api.fields import Model


class ByLengthSpec(Model):
    """Leases groups by latest start time for their step, with lengths predicted from earlier completions of the prompts."""


class ScheduleSpec(Model):
    """The order of leasing; default: in slot order, each group to the generator with the fewest groups. No order changes the
    step of a group or its staleness bound."""

    by_length: ByLengthSpec | None = None
    """Leases groups with long expected completions earlier, within the staleness window, and to the generator with the fewest
    expected tokens. Lengths are predicted from history as in RhymeRL's HistoPipe (arXiv 2508.18588 [S]); the rule is another."""
