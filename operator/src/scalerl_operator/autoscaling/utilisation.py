"""How busy trainer and generators were since the last look that counted, from totals of the whole run."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_api.spec import RunSpec
from scalerl_api.wire import Status
from scalerl_operator.autoscaling.models import Generators, Load


@dataclass(frozen=True)
class _Totals:
    seconds: float
    alive_seconds: float
    trainer_busy_seconds: float
    generator_busy_seconds: float
    steps: int
    stale: int
    delivered: int


class LoadMeter:
    """A window that begins anew with :meth:`restart`, and whenever the generators or the clock change."""

    def __init__(self, spec: RunSpec) -> None:
        self._generator_devices = max(1, spec.generator.devices)
        self._trainer_devices = spec.trainer.ranks
        self._step_rollouts = spec.recipe.prompts_per_step * spec.recipe.completions_per_prompt
        self._start: _Totals | None = None
        self._generators: Generators | None = None

    def restart(self) -> None:
        """Forget what was measured."""
        self._start = None

    def look(self, status: Status, generators: Generators) -> Load | None:
        """The window so far; None where it begins."""
        now = self._totals(status)
        start = self._start
        steady = generators == self._generators and generators.ready == generators.wanted
        if start is None or not steady or now.seconds < start.seconds or now.steps < start.steps:
            self._start, self._generators = now, generators
            return None
        seconds, alive = now.seconds - start.seconds, now.alive_seconds - start.alive_seconds
        delivered = now.delivered - start.delivered
        stale = now.stale - start.stale
        return Load(
            seconds=seconds,
            steps=now.steps - start.steps,
            trainer_busy=_share(now.trainer_busy_seconds - start.trainer_busy_seconds, seconds),
            generator_busy=_share(now.generator_busy_seconds - start.generator_busy_seconds, alive),
            queued_steps=status.counts.queued / self._step_rollouts,
            stale_share=_share(stale, delivered + stale),
        )

    def _totals(self, status: Status) -> _Totals:
        # The coordinator counts a generator's devices while it is there and the trainer's always.
        alive = status.device_seconds - self._trainer_devices * status.wall_seconds
        alive = max(0.0, alive / self._generator_devices)
        return _Totals(
            seconds=status.wall_seconds,
            alive_seconds=alive,
            trainer_busy_seconds=status.trainer_busy_fraction * status.wall_seconds,
            generator_busy_seconds=status.generator_busy_fraction * alive,
            steps=status.step,
            stale=status.counts.stale,
            delivered=status.counts.acknowledged,
        )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
