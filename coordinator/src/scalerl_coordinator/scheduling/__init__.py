"""Policies that assign the open slots of the window to generators.

    open slots, generators with a lease request ─▶ SchedulingPolicy.assign ─▶ slots of each generator

An open slot is one that may be leased now. Its step, prompt and staleness bound are fixed before a policy sees it. Policies are pure:
equal views yield equal assignments, and they do no I/O. An assignment is not recorded; leases are journaled when they are
issued (:mod:`scalerl_coordinator.generator_requests`).
"""

from scalerl_coordinator.scheduling.interface import (
    Assignment,
    Generator,
    OpenSlot,
    Pace,
    SchedulerInput,
    SchedulingPolicy,
    expected_load,
)
from scalerl_coordinator.scheduling.policies import ByLength, LeastLoaded, spread

__all__ = [
    "Assignment",
    "ByLength",
    "Generator",
    "LeastLoaded",
    "OpenSlot",
    "Pace",
    "SchedulerInput",
    "SchedulingPolicy",
    "expected_load",
    "spread",
]
