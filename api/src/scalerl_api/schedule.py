"""``spec.schedule``: the order in which open slots are leased to generators."""

from __future__ import annotations

from scalerl_api.fields import Model, at_most_one
from scalerl_api.plugins import SchedulePlugin


class ByLengthSpec(Model):
    """Leases groups by latest start time for their step, with lengths predicted from earlier completions of the prompts."""


class ScheduleSpec(Model):
    """The order of leasing; default: in slot order, each group to the generator with the fewest groups. No order changes the
    step of a group or its staleness bound."""

    by_length: ByLengthSpec | None = None
    """Leases groups with long expected completions earlier, within the staleness window, and to the generator with the fewest
    expected tokens. RhymeRL's HistoPipe (arXiv 2508.18588 [S]) also ranks prompts by the lengths of past completions, but
    gives each generator a range of lengths, alternating by step."""
    plugin: SchedulePlugin | None = None
    """A schedule of the entry points ``scalerl.schedules``."""

    rules = (at_most_one("byLength", "plugin"),)

    @property
    def name(self) -> str:
        """Name of the schedule.

        >>> ScheduleSpec().name
        'leastLoaded'
        """
        return self.plugin.name if self.plugin else "byLength" if self.by_length else "leastLoaded"
