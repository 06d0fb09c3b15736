"""Runtimes: what takes a plan and makes it run.

Lives here: :class:`~.local.LocalRuntime` (child processes of this machine, restarted with back-off
as a kubelet would) and its parts: the leash that leaves no orphan, ports, devices, probes, memory,
and the run's directory.

Never lives here: what a role does, what a spec means (that is the plan's), or when a run should end
(that is a policy's).
"""
