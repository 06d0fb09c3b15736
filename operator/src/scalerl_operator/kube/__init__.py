"""A client of the Kubernetes API server: calls, watches, a cache, leader election.

Of runs it knows their kind, the label by which their objects are found, and in :mod:`.types` two records that the builders take.

Never lives here: what a run's objects are for, or a decision.
"""
