"""Experiment trackers: each gets the lines of ``metrics.jsonl`` from a process of its own.

:mod:`.supervisor` is the coordinator's side: it starts a process a tracker, keeps it alive, and knows how it stands.
:mod:`.process` is that process: it follows the file (:mod:`.tail`) and writes to its sink (:mod:`.tensorboard_sink`,
:mod:`.wandb_sink`, :mod:`.mlflow_sink`). The file is the queue between the two: it loses nothing and never blocks. So no
tracker's library is imported by the coordinator, and none can end it, stop it or fill its memory.

Nothing is remembered of what was written. A sink that can be asked (MLflow, W&B online) is asked for its newest step; one
that is made of local files (TensorBoard, W&B offline) is written again from the first step on at every start.
"""
