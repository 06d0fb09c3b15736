"""Display of a run in progress: lines, or a live table on a terminal.

A view contains text and layout alone. It receives events and snapshots, and sends no requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from scalerl_api.spec import ScaleRLRun
from scalerl_cli.output import mute
from scalerl_operator.run_view import Event, Snapshot


class View(Protocol):
    """Displays events and snapshots."""

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
    """Opens the view at the first event or snapshot, so that its imports do not delay child processes.

    After a write error (lost terminal, closed pipe) it discards all output: losing the reader must not end the run.
    """

    def __init__(self, run: ScaleRLRun, opener: Callable[[ScaleRLRun], View] = open_view) -> None:
        self._run = run
        self._opener = opener
        self._view: View | None = None
        self._is_quiet = False

    def event(self, event: Event) -> None:
        self._show(lambda view: view.event(event))

    def snapshot(self, snapshot: Snapshot) -> None:
        self._show(lambda view: view.snapshot(snapshot))

    def close(self) -> None:
        if self._view is not None:
            self._show(lambda view: view.close())

    def _show(self, what: Callable[[View], None]) -> None:
        if self._is_quiet:
            return
        try:
            if self._view is None:
                self._view = self._opener(self._run)
            what(self._view)
        except OSError:
            self._is_quiet = True
            mute(sys.stdout)
