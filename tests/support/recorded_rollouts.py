"""Records of rollouts, as the coordinator writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from scalerl_coordinator.recorded_rows import table_of

ROW = {
    "split": "train",
    "task": "main",
    "prompt_index": 0,
    "prompt_id": "p0",
    "slot": 0,
    "sample": 0,
    "prompt": "2 + 2 =",
    "completion": "it is 4",
    "reference": "4",
    "labels": [("hard", "no")],
    "reward": 1.0,
    "training_reward": 1.0,
    "parts": [("format", 1.0)],
    "advantage": 0.5,
    "tokens": 3,
    "finish_reason": "stop",
    "oldest_version": 0,
    "newest_version": 1,
    "age": 1,
    "logprob_difference_mean": 0.01,
    "logprob_difference_max": 0.2,
    "token_ends": [3, 6, 7],
    "token_versions": [0, 1, 1],
    "token_logprob_differences": [0.0, -0.2, 0.01],
}


def record(run: Path, rows: list[dict[str, Any]], *, replaces: str = "") -> Path:
    (run / "rollouts").mkdir(parents=True, exist_ok=True)
    steps = [row["step"] for row in rows]
    serial = len(list((run / "rollouts").iterdir()))
    split = rows[0].get("split", "train")
    path = run / "rollouts" / f"{split}-{min(steps):08d}-{max(steps):08d}-{serial:08d}.parquet"
    table = table_of([ROW | row for row in rows])
    pq.write_table(table.replace_schema_metadata({"replaces": replaces}), path, row_group_size=2)
    return path
