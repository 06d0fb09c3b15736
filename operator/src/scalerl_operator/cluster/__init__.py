"""The Kubernetes runtime: runs as objects of an API server.

Lives here: what a run's objects are called (:mod:`.names`) and look like (:mod:`.render`, pure), how they are told
from what is there (:mod:`.drift`, pure), the one caller of the API server (:mod:`.api`), live copies of what it holds
(:mod:`.cache`), who works on what and when (:mod:`.queue`, :mod:`.leader`), and the reconcile that joins them.

Never lives here: what a role does, what a spec means (that is the plan's), or a decision: whether to go on, restart,
grow or give up is a policy's (:mod:`scalerl_operator.policy`), the same for this runtime and the local one.
"""
