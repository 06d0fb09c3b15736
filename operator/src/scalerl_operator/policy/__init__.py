"""Decisions about a run's lifecycle: one policy, one file, one table-driven test.

Lives here: pure functions from what was observed to what should be done, with every threshold a parameter.

Never lives here: I/O, clocks, processes, Kubernetes. A policy is given the time.
"""
