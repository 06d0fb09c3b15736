"""Experiment trackers: each gets what ``metrics.jsonl`` and ``curve.csv`` hold from a process of its own.

:mod:`.supervisor` is the coordinator's side: it starts a process a tracker, keeps it alive, and knows how it stands.
:mod:`.process` is that process: it follows both files (:mod:`.tail`) and writes to its sink (:mod:`.tensorboard_sink`,
:mod:`.wandb_sink`, :mod:`.mlflow_sink`). The files are the queue between the two: they lose nothing and never block. So no
tracker's library is imported by the coordinator, and none can end it, stop it or fill its memory.

Nothing is remembered of what was written. A sink that can be asked (MLflow, W&B online) is asked for its newest step and
for the versions whose evaluation it has; one that is made of local files (TensorBoard, W&B offline) is written again from
the first step on at every start.
"""
