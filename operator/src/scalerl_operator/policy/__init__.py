"""Decisions about a run's lifecycle: one policy, one file, one table-driven test.

Lives here: pure functions from an observation to a decision. Never lives here: I/O, clocks, processes, Kubernetes; the time is
an argument.
"""
