"""Discrete-event simulation of a run: the work of a trace under another schedule or on another cluster.

    trace.jsonl ─▶ trace_file.read_trace() ─▶ Workload, speeds.fit_decode() ─▶ Cluster
                                                  └──────────┬──────────┘
           policies of the coordinator ─▶ simulator.simulate(), baselines.* ─▶ Outcome ─▶ figures

Completions have their lengths in the trace; the simulation decides when and where they are generated, and samples no tokens.
No sockets, no wall clock, and no randomness except the seeded one of ``baselines``, which has the policies that the coordinator
cannot run.
"""
