"""Runs that cannot learn: they say why within their first steps, or end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import EXAMPLE, assert_nothing_left, small_spec, start_run
from safetensors.torch import load_file, save_file

from scalerl_api.load import load_run
from scalerl_api.paths import RunPaths
from scalerl_trainer.prepare import prepare

# In `make test`: test_coordinator_learning.py has when and what is said, test_cli_run.py that it is printed.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def without_warm_start(**changes: Any) -> dict[str, Any]:
    """An untrained model, four prompts a step."""
    run = small_spec(
        recipe__promptsPerStep=4,
        trainer__replicas=1,
        task__heldOut__size=4,
        evaluation__everySteps=100,
        **changes,
    )
    del run["spec"]["warmStart"]
    return run


def test_run_whose_references_cannot_be_met_says_so_with_a_reply(tmp_path: Path) -> None:
    """The verifier accepts the references, and no reply can equal them."""
    rows = [json.loads(line) for line in EXAMPLE.with_name("data.jsonl").read_text().splitlines()[:200]]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row | {"answer": "certainly \x1b[31mnot"}) + "\n" for row in rows))
    spec = without_warm_start(task__jsonl__path=str(data), budget__maxSteps=4)
    with start_run(tmp_path, spec) as run:
        assert run.finish(600) == 0, run.tail()
        text = run.output.read_text()
        (line,) = [line for line in text.splitlines() if "! run: no completion of" in line]
        assert "the last 3 steps or more scored above 0" in line
        assert r"reference answer 'certainly \x1b[31mnot', score 0" in line
        assert "reply '" in line
        assert "extracted answer '" in line
        assert line.isprintable()
    assert_nothing_left(tmp_path / "run")


def test_run_of_a_model_with_a_weight_that_is_no_number_ends(tmp_path: Path) -> None:
    """Its sibling with a fake generator: test_generators_without_finite_logprobs_diverge_at_once. Here, vLLM samples."""
    spec = without_warm_start(budget__maxSteps=6)
    prepared = RunPaths(tmp_path / "prepared")
    prepared.root.mkdir()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    prepare(prepared, load_run(tmp_path / "run.yaml").spec, one_machine=True)
    file = prepared.base_model / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] *= float("nan")
    file.unlink()
    save_file(tensors, file, {"format": "pt"})
    spec["spec"]["model"] = {"path": str(prepared.base_model), "dtype": "float32", "contextTokens": 32}
    with start_run(tmp_path, spec) as run:
        assert run.finish(600) == 1, run.tail()
        text = run.output.read_text()
        assert "BROKEN: the generators' log-probabilities of" in text
        assert "exited with code 3" in text
        assert "BROKEN: training diverged again after the restart" in text
    assert_nothing_left(tmp_path / "run")
    assert "vLLM gave no finite log-probability for" in "".join(
        log.read_text() for log in (tmp_path / "run/logs").glob("*actor*.log")
    )
