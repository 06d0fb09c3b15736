"""The example of op-graph problems: its model's tokenizer fits its problems and solutions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scalerl_api.load import load_run
from scalerl_api.paths import RunPaths
from scalerl_tasks import open_task
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer.prepare import prepare

EXAMPLE = Path(__file__).parents[2] / "examples" / "opgraph" / "run.yaml"
WORD = re.compile(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")


@pytest.mark.slow
def test_prepare_opgraph_example_vocabulary(tmp_path: Path) -> None:
    """Every text can be written, a word of the common context is about one token, and there is room for all solutions."""
    spec = load_run(EXAMPLE).spec
    paths = RunPaths(tmp_path)
    prepare(paths, spec, one_machine=True)
    tokenizer, task = ModelTokenizer(paths.base_model, spec.task.prompt), open_task(spec.task)
    prompts = [task.held_out[i] for i in range(200)]
    solutions = [prompt.worked_solution for prompt in prompts]
    encoded = tokenizer.encode(solutions)
    assert tokenizer.decode(encoded) == solutions
    assert max(map(len, encoded)) < spec.recipe.max_completion_tokens
    room = spec.model.context_tokens - spec.recipe.max_completion_tokens
    assert max(map(len, tokenizer.encode([prompt.text for prompt in prompts]))) <= room
    common = [i for i, prompt in enumerate(prompts) if prompt.labels["context"] == "zoo"]
    words = sum(len(WORD.findall(solutions[i])) for i in common)
    assert sum(len(encoded[i]) for i in common) < 1.35 * words
