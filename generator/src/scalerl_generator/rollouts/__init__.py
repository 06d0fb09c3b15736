"""From a lease to a pushed group: what the actor does for each rollout. The docstring of :mod:`scalerl_generator` has the steps."""
