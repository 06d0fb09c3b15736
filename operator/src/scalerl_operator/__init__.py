"""Turns a ``ScaleRLRun`` into running workloads and keeps them as the run needs them.

A reconcile, on a cluster::

    a run ▶ Cache.observe() ─────────────────────┐                                                       kube/run_stream
    its objects ▶ Cache.observe_raw() ───────────┤                                                       kube/informer
    coordinator ▶ CoordinatorPollers.refresh() ──┤                                                       controller/coordinator_poller
    a timer ─────────────────────────────────────┴▶ WorkQueue.wake() ▶ ClaimedRuns.reconcile()           controller/claimed_runs
                                        Reconciler.reconcile(): a step returns its part, frozen          controller/parts
                                        │
                                        ├ read                 the run and its objects, cached → Run     controller/reconcile
                                        ├ accept()             the accepted spec → Accepted              controller/reconcile
       coordinator's status ──────────▶ ├ observe              Jobs, pods, queue, forecast → Observed    controller/pod_views, coordinator_poller
                                        ├ decide()             which objects exist, phase                scalerl_lifecycle
                                        ├ Checker.check()      why it cannot be applied → Checks         controller/check, volume
                                        ├ Applier.apply()      plan() ▶ render(); create, apply, remove  controller/apply, manifests
                                        ├ report()             conditions() → RunStatus; events          controller/report, run_object
                                        └ follow_up            the queue, spec, the next reconcile       controller/reconcile

What a run's processes are (the plan) and which of them exist is decided by :mod:`scalerl_lifecycle`, whether it is stopped or scaled by
:mod:`scalerl_autoscaling`, as for a run on one machine (:mod:`scalerl_local`).

Lives here: the Kubernetes objects of a plan (:mod:`.manifests`, pure), and the reconcile of a run on a cluster (:mod:`.controller`,
on :mod:`.kube`).

Never lives here: torch, a task, a model, a loss, or anything a role does once it has started; the
operator knows a role only by its command line, its probes and its exit code.
"""
