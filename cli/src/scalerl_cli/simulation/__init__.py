"""A run in simulated time: what a schedule would have made of the work of a trace.

    trace.jsonl ─▶ trace_file.read_trace() ─▶ Workload, speeds.fit() ─▶ Cluster
                                                  └──────────┬──────────┘
           policies of the coordinator ─▶ simulator.simulate(), rivals.* ─▶ Outcome ─▶ figures

Lengths are as in the trace: what is simulated is when and where they are generated, not what the weights would have said.
No sockets, no clock, no randomness but the seeded one of ``rivals``. Policies that a real coordinator cannot run are here.
"""
