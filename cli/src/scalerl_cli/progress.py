"""Progress of a run as lines: one for each step or every few seconds, and one for each event."""

from __future__ import annotations

from datetime import datetime

from scalerl_api.mismatch import SAMPLED
from scalerl_api.spec import ScaleRLRun
from scalerl_api.wire import Status
from scalerl_cli import labels
from scalerl_cli.output import echo
from scalerl_lifecycle.workloads import Role
from scalerl_local.run_view import Event, Snapshot, UnitState

_QUIET_SECONDS = 5.0
_WAITING_SECONDS = 15.0


class Progress:
    """Prints events and snapshots. It sends no requests, and losing its reader does not end the run."""

    def __init__(self, run: ScaleRLRun) -> None:
        self._max_steps = run.spec.budget.max_steps
        self._states: dict[str, UnitState] = {}
        self._points = 0
        self._step = -1
        self._printed = ""
        self._printed_seconds = 0.0

    def event(self, event: Event) -> None:
        self._line(f"{'!' if event.is_problem else '·'} {event.unit}: {event.text}")

    def snapshot(self, snapshot: Snapshot) -> None:
        for unit in snapshot.units:
            if self._states.get(unit.name) is not unit.state:
                self._states[unit.name] = unit.state
                if unit.state is (UnitState.DONE if unit.role is Role.PREPARE else UnitState.READY):
                    elapsed = labels.seconds(snapshot.elapsed_seconds)
                    self._line(f"· {unit.name}: {unit.state} after {elapsed}")
        status = snapshot.status
        if status is not None:
            for point in status.points[self._points :]:
                self._line(f"* evaluation: reward {labels.reward(point)}")
            self._points = len(status.points)
        waited = snapshot.elapsed_seconds - self._printed_seconds
        if status is not None and status.step > max(self._step, 0):
            self._step = status.step
            self._print(self._progress(status, snapshot), snapshot)
        elif status is None or status.waiting_for or snapshot.stopping:
            text = labels.waiting(snapshot)
            if (text != self._printed and waited >= _QUIET_SECONDS) or waited >= _WAITING_SECONDS:
                self._print(text, snapshot)
        elif waited >= _QUIET_SECONDS:
            self._print(self._progress(status, snapshot), snapshot)

    def _progress(self, status: Status, snapshot: Snapshot) -> str:
        rates = snapshot.rates
        parts = [
            f"step {status.step}" if self._max_steps is None else f"step {status.step}/{self._max_steps}",
            f"generated {labels.number(rates.generated_tokens_per_second, ',.0f')} tok/s",
            f"trained {labels.number(rates.trained_tokens_per_second, ',.0f')} tok/s",
            f"staleness {status.mean_staleness_steps:.1f} (max {status.max_staleness_steps})",
            f"mismatch {labels.number(status.mismatch_kl(SAMPLED), '.2g')}",
            f"left {labels.seconds(snapshot.eta_seconds)}",
        ]
        if status.points:
            parts.insert(1, f"reward {status.points[-1].reward:.3f} (first {status.points[0].reward:.3f})")
        return "  ".join(parts)

    def _print(self, text: str, snapshot: Snapshot) -> None:
        self._printed, self._printed_seconds = text, snapshot.elapsed_seconds
        self._line(text)

    def _line(self, text: str) -> None:
        echo(f"{datetime.now().astimezone():%H:%M:%S} {text}")
