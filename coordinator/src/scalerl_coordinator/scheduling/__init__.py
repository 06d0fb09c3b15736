"""Which of the open places of the window a generator gets next, and whether it gets one at all.

    open places, generators that ask ─▶ Policy.choose ─▶ places to lease now

A place is a slot that may be leased: its step, its prompt and its staleness bound are fixed before a policy sees it. Policies
are pure: equal views have equal choices, and they do no I/O. What a policy plans for other generators is recorded nowhere;
leases are journaled when they are issued (:mod:`scalerl_coordinator.generator_requests`).
"""

from scalerl_coordinator.scheduling.policies import ByLength, LeastLoaded, RoundRobin, SlotOrder
from scalerl_coordinator.scheduling.view import Generator, Pace, Place, Policy, View, expected_load

__all__ = [
    "ByLength",
    "Generator",
    "LeastLoaded",
    "Pace",
    "Place",
    "Policy",
    "RoundRobin",
    "SlotOrder",
    "View",
    "expected_load",
]
