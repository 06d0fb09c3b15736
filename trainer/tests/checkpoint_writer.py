"""Saves checkpoints in a loop until it is killed. ``WRITER``: ``{"root": run directory, "keep": n}``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.volume import CheckpointStore, files_in

given: dict[str, Any] = WRITER  # type: ignore[name-defined]  # noqa: F821
store = CheckpointStore(RunPaths(Path(given["root"])), given["keep"])
step = max(store.steps(), default=0)
while True:
    step += 1
    staged = store.stage(step)
    (staged.directory / "state").mkdir()
    for part in range(3):
        data = np.random.default_rng([step, part]).bytes(200_000)
        (staged.directory / "state" / f"part{part}").write_bytes(data)
    store.commit(
        staged,
        b"snapshot %d" % step,
        store.flush_and_hash(staged, files_in(staged.directory)),
        {"ranks": "1"},
    )
