"""What a person sees while a run is under way: lines, or a live table on a terminal.

Lives here: words, layout, and nothing else. A view is told events and snapshots; it never asks.
"""

from __future__ import annotations

import sys
from typing import Protocol

from scalerl_api.spec import ScaleRLRun
from scalerl_operator.observe.snapshot import Snapshot
from scalerl_operator.runtime.unit import Event


class View(Protocol):
    """Takes what happens and shows it."""

    def event(self, event: Event) -> None: ...

    def snapshot(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


def open_view(run: ScaleRLRun) -> View:
    """A live table on a terminal, lines elsewhere."""
    if sys.stdout.isatty():
        from scalerl_cli.view.live import LiveView

        return LiveView(run)
    from scalerl_cli.view.plain import PlainView

    return PlainView(run)


class LateView:
    """Opens the view when there is first something to show, so that no child waits for its imports."""

    def __init__(self, run: ScaleRLRun) -> None:
        self._run = run
        self._view: View | None = None

    @property
    def view(self) -> View:
        if self._view is None:
            self._view = open_view(self._run)
        return self._view

    def event(self, event: Event) -> None:
        self.view.event(event)

    def snapshot(self, snapshot: Snapshot) -> None:
        self.view.snapshot(snapshot)

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
