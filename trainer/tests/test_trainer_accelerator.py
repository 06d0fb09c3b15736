"""The step, the losses and the publish on tensors of an accelerator without one: no mixed devices, and no waits for the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("accelerator_worker.py")
A_STEP = {"engine/deepspeed_backend.py:step": 1}
"""Where every step waits, and how often."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_step_with_every_loss_stays_on_device(found: dict[str, dict[str, Any]]) -> None:
    steps = {name: one for name, one in found.items() if name.startswith("loss ")}
    steps |= {"bfloat16 head": found["bfloat16 head"]}
    assert len(steps) == 17
    for name, one in steps.items():
        assert one.get("result") == {"applied": True, "micro_batches": 3}, (name, one)
        assert one["waits"] == A_STEP, (name, one)


@pytest.mark.slow
def test_logprobs_and_publish_wait_once_each(found: dict[str, dict[str, Any]]) -> None:
    """Scoring waits for two vectors per micro-batch, a publish for the header and the checksum of each bucket."""
    assert found["logprobs"] == {"result": 26, "waits": {"engine/training_step.py:logprobs": 3}}
    buckets = found["publish"]["result"]
    assert buckets > 1
    assert found["publish"]["waits"] == {"publish/published_weights.py:fill": 2 * buckets}


@pytest.mark.slow
def test_boundaries_of_sequences_wait_for_no_copy(found: dict[str, dict[str, Any]]) -> None:
    assert found["boundaries"] == {"result": ["pretend"] * 2, "waits": {}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("cpu", "Wait", "a tensor is moved to the CPU"),
        ("to", "Wait", "a tensor is moved to the CPU"),
        ("copy", "Wait", "a tensor is moved to the CPU"),
        ("on", "Wait", "a tensor is moved to the device"),
        ("unpinned", "Wait", "a tensor is moved to the device"),
        ("cast", "Wait", "a tensor is moved to the device"),
        ("item", "Wait", "a value is read"),
        ("float", "Wait", "a value is read"),
        ("if", "Wait", "a value is read"),
        ("tolist", "Wait", "a value is read"),
        ("mask", "Wait", "a mask selects"),
        ("device", "FakeTensorDeviceMismatchError", "Expected all tensors to be on the same device"),
        ("head", "Wait", "a tensor is moved to the CPU in models/head.py:_sloped"),
        ("unique", "DynamicOutputShapeException", "aten._unique2"),
    ],
)
def test_planted_fault_in_step_is_found(
    fault: str, error: str, message: str, found: dict[str, dict[str, Any]]
) -> None:
    got = found[f"fault {fault}"]
    assert got.get("raised") == error, got
    assert message in got["message"]
