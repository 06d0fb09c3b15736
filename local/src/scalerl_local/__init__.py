"""Runs a plan as processes of one machine: the lifecycle's runtime beside the cluster.

::

    local_runtime.LocalRuntime ─ lifecycle.runtime  observe, decide, record, apply
      ├─ status_file.StatusFile                     status.json: the lifecycle's persisted state, as in a cluster's object
      ├─ CoordinatorClient                          its status, the stop request
      └─ supervisor.Supervisor                      which processes of the plan run
           ├─ commands.Commands                     their ports, devices and environment
           └─ unit.Unit                             starts, probes and restarts a group of processes, as a kubelet does
                └─ scalerl_processes.ChildProcess ─ subreaper ─ the role's process and its descendants

=========================================  ==================================================================================
local event                                field of the input
=========================================  ==================================================================================
the unit ``prepare`` runs, ends            ``prepare``: ACTIVE; COMPLETE, or FAILED once its own restarts have not helped
the ranks run, end, are being stopped      ``trainer``: ACTIVE; COMPLETE or FAILED with exit code and last line; TERMINATING
all ranks are ready                        ``trainer.ready``
a service's containers are ready           ``coordinator.ready``, ``generators.ready``; else ``starting``, ``restarts``
... cannot be started, or exit with 2      ``given_up``, ``bad_input``; their unit tries again every five minutes
the first Ctrl-C; ``--resume``             ``suspend``: from then on; at the first tick, since a user resumes what is suspended
a changed file at ``--resume``             ``edit``, ``unproven``: against the spec in ``status.json``
Ctrl-C while weights cannot be saved       ``drain_seconds``: 0, so that the trainer tries once more and ends
``status.step``                            ``steps``
never                                      ``deleting``, ``queued``, ``unadmitted``; ``stale``, ``gated``, ``disrupted`` of a Job
=========================================  ==================================================================================

=========================================  ==================================================================================
field of the decision                      local action
=========================================  ==================================================================================
``persisted``, ``phase``                   ``status.json`` is replaced, before anything else
``prepare``                                the unit is started, or stopped
``trainer``: a number, None                the ranks are started as this attempt; stopped, and how they ended forgotten
``coordinator``, ``generators``            the services are started; stopped, the coordinator after all others; 0 generators: only they
``request_stop``                           ``POST /v1/stop``
``set_suspend``                            ``suspend`` of the next input
``again_seconds``                          the longest pause before the next tick; each end and each readiness wakes it earlier
a phase that is stopped, and no process    the command ends
``update_existing``, ``release``           nothing: no object is updated in place, and no run is deleted
=========================================  ==================================================================================

The second Ctrl-C kills all processes without a decision, as a node that fails.

Lives here: the above, and the run's directory. Never lives here: a role's code, its command line, or what is decided (both:
:mod:`scalerl_lifecycle`).
"""
