"""Runs a plan as processes of one machine, restarted with back-off as a kubelet does.

::

    run.LocalRun ─ status, stop ─▶ coordinator      one loop: poll the status, apply the policies, report a snapshot
      └─ supervisor.LocalRuntime                    ports, devices and environment of the plan's processes
           └─ unit.Unit                             starts, probes and restarts a group of processes
                └─ scalerl_processes.ChildProcess ─ subreaper ─ the role's process and its descendants

Lives here: the above, and the run's directory. Never lives here: a role's code, its command line (:mod:`..role_containers`), or
the policy that ends a run (:mod:`..policy`).
"""
