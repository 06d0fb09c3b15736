"""Which generator gets which of the open places of the window.

    open places, generators that ask ─▶ Policy.assign ─▶ places of each generator

A place is a slot that may be leased: its step, its prompt and its staleness bound are fixed before a policy sees it. Policies
are pure: equal views have equal assignments, and they do no I/O. An assignment is recorded nowhere;
leases are journaled when they are issued (:mod:`scalerl_coordinator.generator_requests`).
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
