"""Experiment trackers: one process a tracker reads ``metrics.jsonl`` and ``curve.csv`` and writes to the tracker.

    metrics.jsonl ─▶ MetricsTail ─┐                            ┌─▶ TensorBoardSink   open(), write(), close()
                                  ├─▶ follow() (its process) ──┼─▶ WandbSink
    curve.csv     ─▶ CurveTail  ──┘        │ Tracker, as JSON  └─▶ MLflowSink
                                           ▼
                     Trackers (supervisor in the coordinator) ─▶ status()

The files are the queue: they lose nothing and never block. The coordinator imports no tracker library, so no tracker can
crash it, stop it or fill its memory.

Progress is not stored. A sink that can be queried (MLflow, W&B online) returns its newest step and its evaluated versions
from ``open``; one made of local files (TensorBoard, W&B offline) is written again from the first step at every start.
"""
