"""A real run with a real teacher: the student's KL to it falls, on groups that all score alike too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from plain_server import plain_server
from runs import EXAMPLE, START_SECONDS, assert_counts_add_up, assert_nothing_left, small_spec, start_run

from scalerl_api.spec import ScratchModel
from scalerl_trainer.models import load_model, write_scratch

CONTEXT = 32
STEPS = 20
BUDGET_SECONDS = 60
"""Beyond that the waits between attempts to reach the teacher, which double up to 30 s, are longer than what is left."""
KEY = "of-the-teacher"

pytestmark = pytest.mark.timeout(1200)


def write_models(student: Path, teacher: Path) -> None:
    """The student has random weights; the teacher is the same after supervised steps on the sums."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sums = [json.loads(line) for line in EXAMPLE.with_name("data.jsonl").read_text().splitlines()]
    scratch = ScratchModel(
        layers=2, hidden_size=64, attention_heads=2, intermediate_size=128, vocabulary_size=64
    )
    student.mkdir()
    texts = [one["prompt"] + one["answer"] for one in sums]
    write_scratch(student, scratch, texts, seed=3, dtype="float32", context_tokens=CONTEXT + 1)
    shutil.copytree(student, teacher)
    network = load_model(str(teacher), dtype="float32")
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    tokenizer = _tokenizer(teacher)
    end = network.config.eos_token_id
    # All sums have the same number of characters, so of tokens.
    rows = torch.tensor([[*tokenizer.encode(one["prompt"] + one["answer"]).ids, end] for one in sums])
    prompt = len(tokenizer.encode(sums[0]["prompt"]).ids)
    for _ in range(80):
        batch = rows[torch.randint(len(rows), (64,))]
        logits = network(batch).logits[:, prompt - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, prompt:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    network.save_pretrained(teacher)


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def first_token_kl(student: Path, teacher: Path) -> float:
    """Mean over the prompts of the exact KL, in nats, from the student's distribution of the first sampled token to the teacher's."""
    tokenizer = _tokenizer(teacher)
    prompts = [
        json.loads(line)["prompt"] for line in EXAMPLE.with_name("data.jsonl").read_text().splitlines()
    ]
    rows = torch.tensor([tokenizer.encode(prompt).ids for prompt in prompts[:500]])
    with torch.no_grad():
        own, taught = (
            load_model(str(model), dtype="float32")(rows).logits[:, -1].log_softmax(-1)
            for model in (student, teacher)
        )
    return float((own.exp() * (own - taught)).sum(-1).mean())


@dataclass(frozen=True)
class Teaching:
    """Both models, and the server of one."""

    student: Path
    teacher: Path
    url: str
    stop: Callable[[], None]


@pytest.fixture(scope="module")
def teaching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teaching]:
    """Of all tests, of which the last one stops the server."""
    tmp = tmp_path_factory.mktemp("teaching")
    student, teacher = tmp / "student", tmp / "teacher"
    write_models(student, teacher)
    with ExitStack() as lives:
        log = tmp / "teacher.log"
        url = lives.enter_context(plain_server(teacher, context_tokens=CONTEXT + 1, key=KEY, log=log))
        yield Teaching(student, teacher, url, lives.close)


def test_distillation_lowers_the_students_kl_to_its_teacher(teaching: Teaching, tmp_path: Path) -> None:
    student, teacher = teaching.student, teaching.teacher
    run = small_spec(
        model={"path": str(student), "dtype": "float32", "contextTokens": CONTEXT},
        recipe__distillation={"teacher": {"url": teaching.url}},
        recipe__optimizer={"learningRate": "3e-3", "warmupSteps": 0},
        recipe__completionsPerPrompt=8,
        trainer__replicas=1,
        evaluation__everySteps=100,
        budget__maxSteps=STEPS,
    )
    del run["spec"]["warmStart"]
    with start_run(tmp_path, run, environment={"TEACHER_API_KEY": KEY}) as started:
        assert started.finish(START_SECONDS + 300) == 0, started.tail()
        rows = started.metrics()
        summary = started.summary()
        final = started.directory / f"checkpoints/hf/step-{STEPS:08d}"
        before, after = first_token_kl(student, teacher), first_token_kl(final, teacher)
    kl = [row["teacher_kl"] for row in rows]
    assert len(kl) == STEPS
    # An untrained student's completions all score 0, and none is filtered for that.
    assert {row["filtered_fraction"] for row in rows} == {0.0}
    assert_counts_add_up(summary, run)
    assert fmean(kl[:3]) > 0.5, kl
    # Sampled, it has .3 of noise a step.
    assert after < 0.8 * before, (before, after, kl)


# In `make test`: test_generator_teacher.py has evaluations and the end of an actor while groups wait for the teacher.
@pytest.mark.full
def test_run_ends_at_its_budget_while_the_teacher_is_away(teaching: Teaching, tmp_path: Path) -> None:
    run = small_spec(
        model={"path": str(teaching.student), "dtype": "float32", "contextTokens": CONTEXT},
        recipe__distillation={"teacher": {"url": teaching.url}},
        trainer__replicas=1,
        evaluation__everySteps=1000,
        budget={"maxSeconds": BUDGET_SECONDS},
    )
    del run["spec"]["warmStart"]
    with start_run(tmp_path, run, environment={"TEACHER_API_KEY": KEY}) as started:
        started.until(lambda: started.step() >= 1, START_SECONDS, "a step")
        teaching.stop()
        assert started.finish(BUDGET_SECONDS + 200) == 0, started.tail()
        rows, summary = started.metrics(), started.summary()
    assert "maxSeconds" in summary["stop_reason"], summary
    assert all("teacher_kl" in row for row in rows)
    versions = [int(point["version"]) for point in started.curve()]
    assert versions[-1] == len(rows), "the last version is evaluated without the teacher"
    assert_counts_add_up(summary, run, complete=False)
    assert_nothing_left(started.directory)
