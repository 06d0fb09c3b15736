"""A client of the Kubernetes API server: calls, watches, a cache, leader election.

Never lives here: anything that knows what a run is.
"""
