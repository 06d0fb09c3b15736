"""Turns a ``ScaleRLRun`` into running workloads and keeps them as the run needs them.

Lives here: the plan (:mod:`.plan`: spec → :mod:`.workloads`, which no runtime owns), policies (:mod:`.policy`: one
decision a file, pure), what is observed of a run (:mod:`.observe`), the runtimes that take a plan
(:mod:`.runtime`), and the loop that joins them (:mod:`.control`).

Never lives here: torch, a task, a model, a loss, or anything a role does once it has started; the
operator knows a role only by its command line, its probes and its exit code.
"""
