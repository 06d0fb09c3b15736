"""What processes a run has, and what of it exists at each moment: the same on a cluster and on one machine.

::

    spec ─▶ plan()                 the containers of each role            role_containers, workloads
    runtime.step():
      observe() ◀ the runtime      what exists now → LifecycleInput       lifecycle_types
      decide()                     what is to exist → LifecycleDecision   lifecycle: ending, failures, restarts, budget
      record() ▶ the runtime       its state as a status, before it acts  status_fields
      apply()  ▶ the runtime       start, end, CoordinatorClient.stop()   coordinator_client

:mod:`scalerl_local` is the runtime of one machine, and a package may bring another one (:mod:`.runtime`). On a cluster, the reconcile of
:mod:`scalerl_operator` has these steps and more, with the same ``plan()`` and ``decide()``.

Lives here: the above; except for that client, pure functions from an observation to a decision, with the time as an argument.
Never lives here: Kubernetes, child processes, clocks, or what a role does once it has started.
"""
