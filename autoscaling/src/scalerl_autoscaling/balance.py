"""Balance: as many generators as the trainer needs, from the utilisation of both. Pure; no forecast is used.

| observed over a cooldown | decision |
|---|---|
| the trainer waits, less than a step is queued, the generators are busy | one more |
| rollouts become too old to be trained on | one fewer |
| the generators wait for leases, and one fewer would still keep up | one fewer, unless an environment or a reward service was down |

The thresholds are from no paper. The conditions for one more and for one fewer are apart, and the cooldown doubles with each
reversal, so that a run between two numbers settles.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.spec import RunSpec
from scalerl_api.wire import Status
from scalerl_autoscaling.decision_history import after_scaling, scaling_refusal, updated
from scalerl_autoscaling.models import (
    Action,
    Decision,
    Generators,
    History,
    Load,
    Observation,
    State,
)

MIN_STEPS: Final = 3
"""Fewer steps are too few to measure the utilisation."""
TRAINER_WAITS: Final = 0.7
"""The trainer waits if it computes for less than this share of the time."""
GENERATORS_WORK: Final = 0.8
"""The generators are busy if they have a request in flight for at least this share of the time."""
STILL_KEEPS_UP: Final = 0.7
"""Highest expected utilisation of the generators with one fewer."""
MAX_STALE: Final = 0.05
"""Share of delivered rollouts dropped because they were too old."""


def balance(spec: AutoscalingSpec, observation: Observation, history: History) -> Decision:
    """One generator more or fewer, or no change, from ``observation.load``.

    No change while a run is broken or is to stop, or while an exploratory change is being measured.
    """
    history = updated(spec, observation, history)
    unchanged = Decision(
        state=history.state, reasons=[], history=replace(history, unix_seconds=observation.unix_seconds)
    )
    if spec.generators is None or observation.load is None:
        return replace(unchanged, reasons=["nothing to balance"])
    if history.state in (State.STOP, State.BROKEN):
        return replace(unchanged, reasons=[f"the run is {history.state}"])
    wanted = observation.generators.wanted
    step, why = _difference(observation.load, wanted)
    if not spec.generators.min <= wanted <= spec.generators.max:
        step = 1 if wanted < spec.generators.min else -1
        why = f"outside autoscaling.generators ({spec.generators.min} to {spec.generators.max})"
    if step == 0:
        return replace(unchanged, reasons=[why])
    if history.change is not None and history.change.exploratory and history.change.measuring:
        return replace(unchanged, reasons=[f"{why}; but the last step up is still being measured"])
    to = wanted + step
    refused = scaling_refusal(spec, observation, history, to)
    if refused:
        return replace(unchanged, reasons=[f"{why}; but {refused}"])
    return replace(
        unchanged,
        reasons=[f"{wanted} → {to} generators: {why}"],
        action=Action(kind="scale", scale_to=to),
        history=replace(after_scaling(observation, history, to), unix_seconds=observation.unix_seconds),
    )


def _difference(load: Load, generators: int) -> tuple[int, str]:
    busy = (
        f"trainer busy {load.trainer_busy:.0%}, generators {load.generator_busy:.0%}, "
        f"{load.queued_steps:.1f} steps queued, {load.stale_share:.1%} stale"
    )
    if load.steps < MIN_STEPS:
        return 0, f"{load.steps} steps in {load.seconds:.0f} s are too few to tell"
    if load.stale_share > MAX_STALE:
        return -1, f"rollouts become too old to be trained on ({busy})"
    waits = load.trainer_busy < TRAINER_WAITS
    if waits and load.queued_steps < 1.0 and load.generator_busy >= GENERATORS_WORK:
        return 1, f"the trainer waits for rollouts ({busy})"
    if not waits and generators > 1 and load.generator_busy * generators / (generators - 1) < STILL_KEEPS_UP:
        if load.outage:
            return 0, f"the generators waited for an environment or a reward service ({busy})"
        return -1, f"the generators wait for leases ({busy})"
    return 0, f"in balance ({busy})"


class LoadMeter:
    """Measures the load over a window. A change of the generators, or a clock that goes back, starts a new one."""

    def __init__(self) -> None:
        self._start: tuple[Status, Generators] | None = None
        self._outage = False

    def restart(self) -> None:
        """Starts a new window."""
        self._start = None

    def measure(self, spec: RunSpec, status: Status, generators: Generators) -> Load | None:
        """The load over the window so far; None at its start."""
        start, before = self._start or (status, None)
        steady = generators == before and generators.ready == generators.wanted
        counts = steady and status.wall_seconds >= start.wall_seconds and status.step >= start.step
        if not counts:
            # Without the curves, which may be long.
            self._start = replace(status, points=[], set_points={}), generators
            self._outage = False
        # Idle generators that wait for what is down are not too many.
        self._outage |= bool(status.environment_problem or status.reward_problem)
        return _load(spec, start, status, self._outage) if counts else None


def _load(spec: RunSpec, start: Status, end: Status, outage: bool) -> Load:
    """Utilisation of trainer and generators between two statuses, whose totals are of the whole run."""

    def alive_seconds(status: Status) -> float:
        # The coordinator counts the trainer's devices always, and a generator's while it is registered.
        of_generators = status.device_seconds - spec.trainer.ranks * status.wall_seconds
        return max(0.0, of_generators / max(1, spec.generator.devices))

    seconds, alive = end.wall_seconds - start.wall_seconds, alive_seconds(end) - alive_seconds(start)
    busy = end.trainer_busy_fraction * end.wall_seconds - start.trainer_busy_fraction * start.wall_seconds
    generating = [status.generator_busy_fraction * alive_seconds(status) for status in (start, end)]
    stale = end.counts.stale - start.counts.stale
    return Load(
        seconds=seconds,
        steps=end.step - start.step,
        trainer_busy=_fraction(busy, seconds),
        generator_busy=_fraction(generating[1] - generating[0], alive),
        queued_steps=end.counts.queued / (spec.recipe.prompts_per_step * spec.recipe.completions_per_prompt),
        stale_share=_fraction(stale, end.counts.acknowledged - start.counts.acknowledged + stale),
        outage=outage,
    )


def _fraction(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
