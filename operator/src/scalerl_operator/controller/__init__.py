"""Reconciles runs on a cluster: observes a run's objects and its coordinator, applies the plan, writes the status.

Never lives here: what a role does, what a spec means (:mod:`scalerl_operator.role_containers`), what an object looks like
(:mod:`scalerl_operator.build`), or a decision: whether to resume, restart, grow or give up is a policy's
(:mod:`scalerl_operator.policy`), the same here and on one machine.
"""
