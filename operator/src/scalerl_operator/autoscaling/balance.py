"""Balance: as many generators as the trainer needs, by how busy both sides are. Pure, and no forecast in it.

| observed over a cooldown | then |
|---|---|
| the trainer waits, nothing is queued for it, the generators are at work | one more |
| rollouts become too old to be trained on | one less |
| the generators wait for leases, and one less would still keep up | one less |

Thresholds are ours. What argues for one more excludes what argues for one less with room between, and
each change against the one before waits twice as long, so that a run between two numbers settles.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.spec import RunSpec
from scalerl_api.wire import Status
from scalerl_operator.autoscaling.generator_history import remember, scaled, why_not
from scalerl_operator.autoscaling.models import (
    Action,
    Decision,
    Generators,
    History,
    Load,
    Observation,
    State,
)

LEAST_STEPS: Final = 3
"""Steps come in lumps: fewer say little of either side."""
TRAINER_WAITS: Final = 0.7
"""The trainer computes for less than this share of the time."""
GENERATORS_WORK: Final = 0.8
"""The generators have a request in flight for at least this share of it."""
STILL_KEEPS_UP: Final = 0.7
"""How busy one generator less may be expected to be."""
MOST_STALE: Final = 0.05
"""Share of delivered rollouts dropped because they were too old."""


def balance(spec: AutoscalingSpec, observation: Observation, history: History) -> Decision:
    """One generator more or less, or none, from ``observation.load``.

    Does nothing while a run is broken or is to stop, and never adds one while a forecast's trial
    step is still being measured.
    """
    history = remember(spec, observation, history)
    kept = Decision(
        state=history.state, reasons=[], history=replace(history, unix_seconds=observation.unix_seconds)
    )
    if spec.generators is None or observation.load is None:
        return replace(kept, reasons=["nothing to balance"])
    if history.state in (State.STOP, State.BROKEN):
        return replace(kept, reasons=[f"the run is {history.state}"])
    wanted = observation.generators.wanted
    step, why = _step(observation.load, wanted)
    if not spec.generators.min <= wanted <= spec.generators.max:
        step = 1 if wanted < spec.generators.min else -1
        why = f"outside autoscaling.generators ({spec.generators.min} to {spec.generators.max})"
    if step == 0:
        return replace(kept, reasons=[why])
    if history.change is not None and history.change.exploratory and history.change.measuring:
        return replace(kept, reasons=[f"{why}; but the last step up is still being measured"])
    to = wanted + step
    refused = why_not(spec, observation, history, to)
    if refused:
        return replace(kept, reasons=[f"{why}; but {refused}"])
    return replace(
        kept,
        reasons=[f"{wanted} → {to} generators: {why}"],
        action=Action(kind="scale", generators=to),
        history=replace(scaled(observation, history, to), unix_seconds=observation.unix_seconds),
    )


def _step(load: Load, generators: int) -> tuple[int, str]:
    busy = (
        f"trainer busy {load.trainer_busy:.0%}, generators {load.generator_busy:.0%}, "
        f"{load.queued_steps:.1f} steps queued, {load.stale_share:.1%} stale"
    )
    if load.steps < LEAST_STEPS:
        return 0, f"{load.steps} steps in {load.seconds:.0f} s are too few to tell"
    if load.stale_share > MOST_STALE:
        return -1, f"rollouts become too old to be trained on ({busy})"
    waits = load.trainer_busy < TRAINER_WAITS
    if waits and load.queued_steps < 1.0 and load.generator_busy >= GENERATORS_WORK:
        return 1, f"the trainer waits for rollouts ({busy})"
    if not waits and generators > 1 and load.generator_busy * generators / (generators - 1) < STILL_KEEPS_UP:
        return -1, f"the generators wait for leases ({busy})"
    return 0, f"in balance ({busy})"


class LoadMeter:
    """Measures the load over a window, which restarts with :meth:`restart`, and whenever the generators or the clock change."""

    def __init__(self) -> None:
        self._start: tuple[Status, Generators] | None = None

    def restart(self) -> None:
        """Starts a new window."""
        self._start = None

    def measure(self, spec: RunSpec, status: Status, generators: Generators) -> Load | None:
        """The window so far; None where it begins."""
        start, before = self._start or (status, None)
        steady = generators == before and generators.ready == generators.wanted
        if not steady or status.wall_seconds < start.wall_seconds or status.step < start.step:
            # Without its curves, which may be long.
            self._start = replace(status, points=[], set_points={}), generators
            return None
        return load(spec, start, status)


def load(spec: RunSpec, start: Status, end: Status) -> Load:
    """How busy trainer and generators were between two statuses, which have totals of the whole run."""

    def alive_seconds(status: Status) -> float:
        # The coordinator counts a generator's devices while it is there and the trainer's always.
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
    )


def _fraction(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
