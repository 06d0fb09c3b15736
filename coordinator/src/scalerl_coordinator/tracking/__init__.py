"""Experiment trackers: one process per tracker reads ``metrics.jsonl`` and ``curve.csv`` and writes to the tracker.

    metrics.jsonl ─▶ MetricsTail ─┐                            ┌─▶ TensorBoardSink   open(), write(), close()
                                  ├─▶ follow() (its process) ──┼─▶ WandbSink
    curve.csv     ─▶ CurveTail  ──┘        │ Tracker, as JSON  └─▶ MLflowSink
                                           ▼
                     Trackers (supervisor in the coordinator) ─▶ status()

The files serve as a durable queue that never blocks the coordinator. The coordinator imports no tracker library, so no
tracker can crash it, block it or exhaust its memory.

Progress is not stored. A sink that can be queried (MLflow, W&B online) returns its newest step and evaluated versions from
``open``; a sink of local files (TensorBoard, W&B offline) is written again from the first step at every start.
"""
