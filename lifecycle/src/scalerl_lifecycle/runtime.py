"""The interface and the loop of a runtime: of one machine (:mod:`scalerl_local`), or of an installed package.

The operator has a reconcile of its own, with further steps; it shares :func:`.role_containers.plan` and :func:`.lifecycle.decide`.

:func:`step` is the whole of a runtime's loop. It is level-triggered: nothing is kept but :class:`.PersistedState`, and that is
recorded before it is acted on, so that the process may end at any line.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from scalerl_api.conditions import Phase
from scalerl_api.spec import RunSpec
from scalerl_lifecycle.lifecycle import decide
from scalerl_lifecycle.lifecycle_types import LifecycleDecision, LifecycleInput, PersistedState


class Runtime(Protocol):
    """One run on one kind of machine. That of an installed package (entry points ``scalerl.runtimes``) is called with the run, its
    plan and its directory."""

    persisted: PersistedState
    """As the last :meth:`record`, maybe of an earlier process, stored it."""

    async def observe(self) -> LifecycleInput:
        """What exists of the run now. The coordinator's status is read after the Jobs: of a trainer that has ended, it then tells
        whether the run is complete."""
        ...

    async def record(self, decision: LifecycleDecision) -> None:
        """Stores the persisted state and phase of a decision, for a later process."""
        ...

    async def apply(self, decision: LifecycleDecision) -> None:
        """Makes exist what the decision says, and nothing else: starts, or begins to end, what differs, and waits for none of it.
        Passes on the stop request."""
        ...


async def step(runtime: Runtime, spec: RunSpec | None, persisted: PersistedState) -> LifecycleDecision:
    """One reconcile of a run."""
    decision = decide(spec, await runtime.observe(), persisted)
    await runtime.record(decision)
    await runtime.apply(decision)
    return decision


STOPPED_PHASES: Final = (Phase.SUSPENDED, Phase.COMPLETED, Phase.FAILED)
_POLL_SECONDS: Final = 2.0


async def drive(runtime: Runtime, spec: RunSpec, *, poll_seconds: float = _POLL_SECONDS) -> LifecycleDecision:
    """Reconcile a run until its phase is one of :data:`STOPPED_PHASES`; returns the last decision. A process that ends before is continued by another one."""
    persisted = runtime.persisted
    while True:
        decision = await step(runtime, spec, persisted)
        persisted = decision.persisted
        if decision.phase in STOPPED_PHASES and not decision.set_suspend:
            return decision
        again = decision.again_seconds
        await asyncio.sleep(poll_seconds if again is None else min(poll_seconds, again))
