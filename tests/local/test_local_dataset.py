"""Projects of other libraries, as they are: data and reward of verl and of TRL train by a short run file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from free_port import free_port
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
    verifier: {python: {path: reward.py, function: compute_score, signature: verl}}
    heldOut: {size: 8}
  recipe: {promptsPerStep: 4, completionsPerPrompt: 2, maxCompletionTokens: 6, zeroVarianceFilter: false}
  generator: {cpuThreads: 1, kvCache: 256Mi}
  trainer: {cpuThreads: 1}
  evaluation: {everySteps: 5, samplesPerPrompt: 1}
  budget: {maxSteps: 5}
"""


REWARD = '''
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """For custom_reward_function of verl."""
    assert data_source == "openai/gsm8k" and extra_info["question"].endswith("=")
    found = re.findall(r"-?[0-9]+", solution_str)
    if not found:
        return {"score": 0.0, "formatted": False}
    return {"score": 1.0 if found[-1] == ground_truth else 0.1, "formatted": True}
'''


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


def test_verl_project_trains(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [row(i, rng) for i in range(300)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    spec = yaml.safe_load(RUN)
    (tmp_path / "reward.py").write_text(REWARD)
    task = spec["spec"]["task"]
    task["dataset"]["files"] = [str(tmp_path / "train.parquet")]
    task["verifier"]["python"]["path"] = str(tmp_path / "reward.py")
    assert len(RUN.splitlines()) <= 25
    with start_run(tmp_path, spec) as run:
        assert run.finish(500) == 0, run.tail()
        assert len(run.metrics()) == 5
        assert run.summary()["steps"] == 5
        assert not any(record.get("grading_errors") for record in run.metrics())
    (table,) = (run.directory / "data").glob("*.rows")
    assert table.read_bytes().startswith(b'{"file":0,"row":1,')
    assert_nothing_left(run.directory)


TRL_RUN = """\
apiVersion: scalerl.dev/v1alpha1
kind: ScaleRLRun
metadata: {name: trl-script}
spec:
  model:
    scratch: {layers: 1, hiddenSize: 32, attentionHeads: 1, intermediateSize: 48, vocabularySize: 128}
    dtype: float32
    contextTokens: 48
  task:
    dataset: {files: [train.jsonl], columns: {answer: ground_truth}}
    verifier: {python: {path: train_grpo.py, function: reward_len, signature: trl}, range: [-40, 0]}
    heldOut: {size: 8}
  recipe: {promptsPerStep: 4, completionsPerPrompt: 2, maxCompletionTokens: 6, zeroVarianceFilter: false}
  generator: {cpuThreads: 1, kvCache: 256Mi}
  trainer: {cpuThreads: 1}
  evaluation: {everySteps: 5, samplesPerPrompt: 1}
  budget: {maxSteps: 5}
"""

TRL_SCRIPT = '''
def reward_len(completions, ground_truth, **kwargs):
    """As in the documentation of GRPOTrainer, with a column."""
    assert len(ground_truth) == len(completions)
    return [-abs(20 - len(completion)) for completion in completions]

if __name__ == "__main__":
    from trl import GRPOConfig, GRPOTrainer
'''


@pytest.mark.full
def test_trl_script_trains_and_a_changed_reward_begins_another_curve(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = [
        json.dumps({"prompt": f"{rng.randint(1, 99)} plus {i} is", "ground_truth": str(i)})
        for i in range(300)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "train_grpo.py").write_text(TRL_SCRIPT)
    assert len(TRL_RUN.splitlines()) <= 25
    spec = yaml.safe_load(TRL_RUN)
    task = spec["spec"]["task"]
    task["dataset"]["files"] = [str(tmp_path / "train.jsonl")]
    task["verifier"]["python"]["path"] = str(tmp_path / "train_grpo.py")
    with start_run(tmp_path, spec) as run:
        assert run.finish(500) == 0, run.tail()
        last = run.metrics()[-1]
        assert last["reward_part_reward"] == pytest.approx(40 * last["reward_mean"] - 40, abs=1e-4)
    (tmp_path / "train_grpo.py").write_text(TRL_SCRIPT.replace("20 -", "10 -"))
    spec["spec"]["budget"]["maxSteps"] = 10
    with start_run(tmp_path, spec, "--resume") as run:
        assert run.finish(500) == 0, run.tail()
        digests = [row["eval_version"] for row in run.curve()]
        assert len(digests) == 3
        assert digests[0] == digests[1] != digests[2]
    assert_nothing_left(run.directory)


SERVICE = """
import sys
from aiohttp import web

async def score(request):
    rows = (await request.json())["completions"]
    return web.json_response({"scores": [10.0 * (len(row["completion"]) % 2) for row in rows]})

app = web.Application(client_max_size=1 << 28)
app.router.add_post("/score", score)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


@pytest.mark.full
def test_run_waits_while_its_reward_service_is_down(tmp_path: Path) -> None:
    """Nothing is scored 0 meanwhile; the status says what it waits for; it ends with all its steps."""
    port = free_port()
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} plus 1 is", "answer": str(i + 1)}) + "\n" for i in range(300))
    )
    spec = yaml.safe_load(TRL_RUN)
    task = spec["spec"]["task"]
    task["dataset"] = {"files": [str(tmp_path / "train.jsonl")]}
    del task["verifier"]
    service = {"http": {"url": f"http://127.0.0.1:{port}/score"}, "range": [0, 10], "label": "parity"}
    task["verifiers"] = [{"name": "number", "weight": "0.5"}, service]
    with start_run(tmp_path, spec) as run:
        run.until(lambda: "completions wait" in run.tail(400), 300, "it waited")
        assert not run.metrics()
        process = subprocess.Popen([sys.executable, str(tmp_path / "service.py"), str(port)])
        try:
            assert run.finish(400) == 0, run.tail()
        finally:
            process.terminate()
            process.wait()
        steps = run.metrics()
        assert len(steps) == 5
        assert not any(step.get("grading_errors") for step in steps)
        assert any(step["reward_part_parity"] > 0 for step in steps)
    assert_nothing_left(run.directory)
