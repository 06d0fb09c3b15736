"""A data set of another project, as it is: verl's GSM8K trains by a short run file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from runs import assert_nothing_left, start_run

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

RUN = """\
apiVersion: scalerl.dev/v1alpha1
kind: ScaleRLRun
metadata: {name: verl-gsm8k}
spec:
  model:
    scratch: {layers: 1, hiddenSize: 32, attentionHeads: 1, intermediateSize: 48, vocabularySize: 128}
    dtype: float32
    contextTokens: 48
  task:
    dataset: {files: [train.parquet]}
    verifier: {name: number}
    heldOut: {size: 8}
  recipe: {promptsPerStep: 4, completionsPerPrompt: 2, maxCompletionTokens: 6, zeroVarianceFilter: false}
  generator: {cpuThreads: 1, kvCache: 256Mi}
  trainer: {cpuThreads: 1}
  evaluation: {everySteps: 5, samplesPerPrompt: 1}
  budget: {maxSteps: 5}
"""


def row(i: int, rng: random.Random) -> dict[str, Any]:
    """As verl's ``examples/data_preprocess/gsm8k.py`` writes it."""
    a, b = rng.randint(1, 49), rng.randint(1, 49)
    question = f"{a} + {b} ="
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": "train", "index": i, "answer": f"#### {a + b}", "question": question},
    }


def test_verl_data_set_trains(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [row(i, rng) for i in range(300)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    spec = yaml.safe_load(RUN)
    spec["spec"]["task"]["dataset"]["files"] = [str(tmp_path / "train.parquet")]
    assert len(RUN.splitlines()) <= 25
    with start_run(tmp_path, spec) as run:
        assert run.finish(500) == 0, run.tail()
        assert len(run.metrics()) == 5
        assert run.summary()["steps"] == 5
    (table,) = (run.directory / "data").glob("*.rows")
    assert table.read_bytes().startswith(b'{"file":0,"row":1,')
    assert_nothing_left(run.directory)
