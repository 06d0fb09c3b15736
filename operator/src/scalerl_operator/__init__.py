"""Turns a ``ScaleRLRun`` into running workloads and keeps them as the run needs them.

A reconcile, on a cluster::

    watch event ▶ Cache.observe() ─┐                   ┌─ poll ── CoordinatorPollers.refresh() ◀ coordinator
    timer, poll ▶ WorkQueue.wake() ┴▶ Reconciler.reconcile()      each step fills in a RunContext
                                        │
                                        ├ accept()            the accepted spec                       controller/accept
                                        ├ observe()           Jobs, pods → RunObservation             controller/observe
       coordinator's status ──────────▶ ├ ask_coordinator()                                           controller/coordinator_poller
       forecast, by the autoscaler ───▶ ├ lifecycle.decide()  which objects exist, phase              policy/lifecycle
                                        ├ check_volume(), Applier.preflight()   why it cannot be executed
                                        ├ RunObject.write()   the decision, before its execution      controller/status
                                        ├ Applier.apply()     plan() ▶ render(); create, apply, remove  controller/apply, build
                                        └ report()            conditions(), events                    controller/status

On one machine :mod:`.local` does the same with processes: ``plan()`` ▶ supervisor, the same policies.

Lives here: the plan (:mod:`.role_containers`: spec → :mod:`.workloads`, the same on a cluster and on a laptop), the policies
(:mod:`.policy` and :mod:`.autoscaling`, pure), the Kubernetes objects of a plan (:mod:`.build`, pure), the reconcile of a
run on a cluster (:mod:`.controller`, on :mod:`.kube`), and the same run as processes of one machine (:mod:`.local`).

Never lives here: torch, a task, a model, a loss, or anything a role does once it has started; the
operator knows a role only by its command line, its probes and its exit code.
"""
