"""Objects opened from a run's task section."""

import json
import re
from pathlib import Path

import pytest
import yaml

from scalerl_api.source import OP_GRAPH_CONTEXTS
from scalerl_api.spec import TaskSpec, VerifierSpec
from scalerl_tasks import (
    SourceError,
    TemplateError,
    VerifierConfig,
    VerifierError,
    check_answers,
    check_template,
    open_grading_pool,
    open_jsonl,
    open_source,
    open_task,
    open_verifier,
    verifier_config,
)
from scalerl_tasks.opgraph import CONTEXTS, MAX_DISTRACTORS, MAX_OPERATIONS, MAX_PROBLEMS, MIN_OPERATIONS


def section(**changes):
    base = {
        "reasoningGym": {"name": "chain_sum", "parameters": {"min_digits": 2}, "seed": 3, "size": 200},
        "verifier": {"name": "reasoning-gym", "memory": "256Mi", "timeoutSeconds": 2},
        "heldOut": {"size": 20, "seed": 1},
        "prompt": {"template": "{prompt}\nAnswer:"},
    }
    return TaskSpec.model_validate({k: v for k, v in (base | changes).items() if v is not None})


async def test_open_task_of_reasoning_gym_section():
    spec = section()
    task = open_task(spec)
    assert (len(task.train), len(task.held_out)) == (180, 20)
    prompt = task.train[0]
    assert task.render(prompt).user == f"{prompt.text}\nAnswer:"
    assert open_task(spec).train.digest == task.train.digest
    async with open_grading_pool(spec) as pool:
        graded = await pool.score_group(prompt, [prompt.answer, "no"])
    assert [g.score for g in graded] == [1.0, 0.0]


def test_open_source_resolves_relative_path(tmp_path):
    lines = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(5)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    changes = {"reasoningGym": None, "verifier": {"name": "number"}, "heldOut": {"size": 2}}
    spec = section(jsonl={"path": "data.jsonl"}, **changes)
    assert len(open_source(spec, tmp_path)) == 5
    assert len(open_task(spec, tmp_path).train) == 3
    assert verifier_config(spec) == VerifierConfig("number")
    absolute = section(jsonl={"path": str(tmp_path / "data.jsonl")}, **changes)
    assert open_source(absolute, tmp_path / "elsewhere").digest == open_source(spec, tmp_path).digest
    with pytest.raises(SourceError, match="cannot be read"):
        open_task(spec, tmp_path / "elsewhere")


def test_open_task_checks_template_first():
    with pytest.raises(TemplateError, match=r"unknown placeholder \{answer\}"):
        open_task(section(prompt={"template": "{prompt} {answer}"}))


def test_open_grading_pool_refuses_small_memory():
    with pytest.raises(ValueError, match=r"verifier\.memory\n.*must be at least 64Mi, got 63Mi"):
        section(verifier={"name": "exact", "memory": "63Mi"})
    unchecked = section(verifier={"name": "exact"}).model_copy(
        update={"verifier": VerifierSpec.model_construct(name="exact", memory="63Mi")}
    )
    with pytest.raises(VerifierError, match=r"task\.verifier\.memory is 63Mi; a grader needs at least 64Mi"):
        open_grading_pool(unchecked)
    open_grading_pool(section(verifier={"name": "exact", "memory": "64Mi"}))


def test_tasks_guide_sections_are_valid(tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "tasks.md"
    blocks = re.findall(r"^```yaml\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        spec = TaskSpec.model_validate(yaml.safe_load(block)["task"])
        check_template(spec.prompt.template)
        if spec.reasoning_gym is not None:
            assert open_task(spec).train[0].text
    (sample,) = re.findall(r"^```json\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "sample.jsonl").write_text(sample)
    assert open_jsonl(tmp_path / "sample.jsonl")[1].solution


def test_check_answers_uses_verifier(tmp_path):
    lines = [{"id": f"q{i}", "prompt": f"q {i}", "answer": "four" if i == 90 else str(i)} for i in range(100)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = open_jsonl(tmp_path / "d.jsonl")
    check_answers(source, open_verifier(VerifierConfig("exact")))
    number = open_verifier(VerifierConfig("number"))
    with pytest.raises(VerifierError, match=r"q90.*'four' has no number"):
        check_answers(source, number)
    check_answers(source, number, limit=3)
    with pytest.raises(VerifierError, match="q90"):
        check_answers(source, number, limit=10)


async def test_open_task_of_op_graph_section():
    section_ = {
        "operations": [2, 4],
        "contexts": {"zoo": "0.5", "school": "0.5"},
        "modes": ["reverse"],
        "seed": 7,
    }
    spec = section(opGraph=section_ | {"size": 300}, reasoningGym=None, verifier={"name": "opgraph-strict"})
    task = open_task(spec)
    assert (len(task.train), len(task.held_out)) == (280, 20)
    prompt = task.train[5]
    assert {prompt.labels["mode"], task.held_out[0].labels["mode"]} == {"reverse"}
    assert {task.train[i].labels["context"] for i in range(40)} == {"zoo", "school"}
    check_answers(task.train, open_verifier(verifier_config(spec)))
    async with open_grading_pool(spec) as pool:
        graded = await pool.score_group(prompt, [prompt.solution, f"<answer>{prompt.answer}</answer>"])
    assert [g.score for g in graded] == [1.0, 0.0]


def test_op_graph_spec_has_the_limits_of_the_task():
    """The spec's models cannot import this package."""
    assert tuple(CONTEXTS) == OP_GRAPH_CONTEXTS
    bounds = {
        "operations": {"operations": [MIN_OPERATIONS, MAX_OPERATIONS]},
        "distractors": {"operations": [2, 4], "distractors": MAX_DISTRACTORS},
        "size": {"operations": [2, 4], "size": MAX_PROBLEMS},
    }
    beyond = {
        "operations": [{"operations": [MIN_OPERATIONS - 1, 4]}, {"operations": [4, MAX_OPERATIONS + 1]}],
        "distractors": [bounds["distractors"] | {"distractors": MAX_DISTRACTORS + 1}],
        "size": [bounds["size"] | {"size": MAX_PROBLEMS + 1}],
    }
    for name, within in bounds.items():
        open_source(section(opGraph=within, reasoningGym=None, verifier={"name": "exact"}))
        for outside in beyond[name]:
            with pytest.raises(ValueError, match=rf"opGraph\.{name}"):
                section(opGraph=outside, reasoningGym=None, verifier={"name": "exact"})
