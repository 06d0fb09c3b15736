"""Reconciles runs on a cluster: observes a run's objects and its coordinator, applies the plan, writes the status.

Never lives here: containers of roles (:mod:`scalerl_lifecycle.role_containers`), manifests (:mod:`scalerl_operator.manifests`), or
decisions to resume, restart, scale or fail (:mod:`scalerl_lifecycle`), which are the same on one machine.
"""
