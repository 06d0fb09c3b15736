"""Live table on a terminal; events scroll above it."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from scalerl_api.mismatch import SAMPLED
from scalerl_api.spec import ScaleRLRun
from scalerl_cli.view import labels
from scalerl_operator.run_view import Event, Snapshot, UnitState

_STYLES = {
    UnitState.READY: "green",
    UnitState.DONE: "green",
    UnitState.FAILED: "red",
    UnitState.BACK_OFF: "yellow",
}


class LiveView:
    """Draws once per snapshot, without automatic refresh, which would take CPU time from the run."""

    def __init__(self, run: ScaleRLRun, console: Console | None = None) -> None:
        self._run = run
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def event(self, event: Event) -> None:
        style = "yellow" if event.is_problem else "dim"
        self._console.print(Text(f"{event.unit}: {event.text}", style=style))

    def snapshot(self, snapshot: Snapshot) -> None:
        self._live.update(render(self._run, snapshot), refresh=True)

    def close(self) -> None:
        self._live.stop()


def render(run: ScaleRLRun, snapshot: Snapshot) -> RenderableType:
    """The table for one snapshot."""
    status, rates = snapshot.status, snapshot.rates
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("step", labels.progress(snapshot, run.spec.budget.max_steps))
    if status is not None:
        if status.points:
            first = f"(first {status.points[0].reward:.3f})"
            facts.add_row("reward", f"{labels.reward(status.points[-1])}  {first}")
        facts.add_row(
            "tokens/s",
            f"{labels.rate(rates.generated_tokens_per_second)} generated, "
            f"{labels.rate(rates.trained_tokens_per_second)} trained",
        )
        busy = f"generators {status.generator_busy_fraction:.0%}, trainer {status.trainer_busy_fraction:.0%}"
        facts.add_row("busy", busy)
        facts.add_row(
            "staleness",
            f"{status.mean_staleness_steps:.2f} steps (max {status.max_staleness_steps}, "
            f"allowed {run.spec.recipe.max_staleness_steps})",
        )
        mismatch = labels.divergence(status.mismatch_kl(SAMPLED))
        facts.add_row("mismatch", f"{mismatch} (KL, trainer against generators)")
    if snapshot.decision is not None:
        facts.add_row("forecast", labels.decision(snapshot.decision))
    facts.add_row("phase", labels.waiting(snapshot))
    facts.add_row(
        "time", f"{labels.seconds(snapshot.elapsed_seconds)}, left {labels.seconds(snapshot.eta_seconds)}"
    )
    roles = Table.grid(padding=(0, 2))
    for unit in snapshot.units:
        roles.add_row(unit.name, Text(labels.state(unit), style=_STYLES.get(unit.state, "")))
    title = Text(f"{run.metadata.name}", style="bold")
    return Group(title, facts, Text("roles", style="bold"), roles)
