"""A client of the Kubernetes API server: calls, watches, a cache, leader election.

Never lives here: what a run's objects are for, or a decision. The package only uses the kind of runs and the labels of their objects.
"""
