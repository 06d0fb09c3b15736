"""Turns a ``ScaleRLRun`` into running workloads and keeps them as the run needs them.

Lives here: the plan (:mod:`.plan`: spec → :mod:`.workloads`, the same on a cluster and on a laptop), the policies
(:mod:`.policy` and :mod:`.autoscaling`, pure), the Kubernetes objects of a plan (:mod:`.build`, pure), the reconcile of a
run on a cluster (:mod:`.controller`, on :mod:`.kube`), and the same run as processes of one machine (:mod:`.local`).

Never lives here: torch, a task, a model, a loss, or anything a role does once it has started; the
operator knows a role only by its command line, its probes and its exit code.
"""
