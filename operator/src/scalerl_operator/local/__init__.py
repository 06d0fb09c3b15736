"""Runs a plan as processes of one machine, restarted with back-off as a kubelet would.

Lives here: the loop that joins plan, policies and processes (:mod:`.run`), and its parts: :mod:`.supervisor`, units of
processes, the subreaper that leaves no orphan, ports, devices, probes, and the run's directory.

Never lives here: what a role does, what a spec means (that is the plan's), or when a run should end (that is a policy's).
"""
