"""Policies that assign the open places of the window to generators.

    open places, generators with a lease request ─▶ Policy.assign ─▶ places of each generator

A place is a slot that may be leased. Its step, prompt and staleness bound are fixed before a policy sees it. Policies are pure:
equal views yield equal assignments, and they do no I/O. An assignment is not recorded; leases are journaled when they are
issued (:mod:`scalerl_coordinator.generator_requests`).
"""

from scalerl_coordinator.scheduling.policies import ByLength, LeastLoaded, spread
from scalerl_coordinator.scheduling.view import (
    Assignment,
    Generator,
    Pace,
    Place,
    Policy,
    View,
    expected_load,
)

__all__ = [
    "Assignment",
    "ByLength",
    "Generator",
    "LeastLoaded",
    "Pace",
    "Place",
    "Policy",
    "View",
    "expected_load",
    "spread",
]
