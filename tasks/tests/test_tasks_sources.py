"""Objects opened from a run's task section."""

import json
import re
from pathlib import Path

import pytest
import yaml

from scalerl_api.spec import EvaluationSpec, RunSpec, RunTaskSpec, TaskSpec, VerifierSpec
from scalerl_tasks import (
    EvaluationSetError,
    JsonlSource,
    SourceError,
    TemplateError,
    VerifierConfig,
    VerifierError,
    check_template,
    open_grading_pool,
    open_source,
    open_task,
    open_tasks,
    verifier_config,
)


def section(**changes):
    base = {
        "reasoningGym": {"name": "chain_sum", "parameters": {"min_digits": 2}, "seed": 3, "size": 200},
        "verifier": {"name": "reasoning-gym", "memory": "256Mi", "timeoutSeconds": 2},
        "heldOut": {"size": 20},
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
    for block in map(yaml.safe_load, blocks):
        section = block.get("spec", block)
        if "evaluation" in section:
            EvaluationSpec.model_validate(section["evaluation"])
            continue
        for spec in (one.section for one in RunTaskSpec.model_validate(section["task"]).tasks):
            check_template(spec.prompt.template)
            if spec.reasoning_gym is not None:
                assert open_task(spec).train[0].text
    (sample,) = re.findall(r"^```json\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "sample.jsonl").write_text(sample)
    assert JsonlSource(tmp_path / "sample.jsonl")[1].solution


def two_sets(directory: Path, hard: list[str], train: list[str], **task: object) -> RunSpec:
    for name, texts in (("hard", hard), ("train", train)):
        lines = (json.dumps({"prompt": text, "answer": "2"}) + "\n" for text in texts)
        (directory / f"{name}.jsonl").write_text("".join(lines))
    source = {"jsonl": {"path": str(directory / "train.jsonl")}, "verifier": {"name": "exact"}}
    hard_source = {"jsonl": {"path": str(directory / "hard.jsonl")}, "verifier": {"name": "number"}}
    return RunSpec.model_validate(
        {
            "model": {"scratch": {}},
            "task": source | {"heldOut": {"size": 2}, "prompt": {"template": "Q: {prompt}"}},
            "evaluation": {"sets": [{"name": "all"}, {"name": "hard", "task": hard_source | task}]},
            "budget": {"maxSteps": 1},
        }
    )


def test_open_tasks_opens_each_set_with_its_own_prompts(tmp_path):
    spec = two_sets(tmp_path, ["3+3=", "4+4="], [f"{n}+1=" for n in range(9)])
    (hard,) = open_tasks(spec).sets
    assert (hard.name, hard.field) == ("hard", "evaluation.sets.1")
    assert {hard.prompts[at].text for at in range(len(hard.prompts))} == {"3+3=", "4+4="}
    assert hard.prompt.template == "Q: {prompt}", "that of the run's task"
    assert verifier_config(hard.spec).name == "number"
    (one,) = open_tasks(two_sets(tmp_path, ["3+3=", "4+4="], ["1", "2", "3"], size=1)).sets
    assert len(one.prompts) == 1


def test_digest_of_a_set_is_of_what_scores_it(tmp_path):
    """Points with one digest are comparable."""

    def digest(**task):
        (one,) = open_tasks(two_sets(tmp_path, ["3+3=", "4+4="], ["1", "2", "3"], **task)).sets
        return one.digest

    assert digest() == digest()
    other_verifier, other_prompt = {"verifier": {"name": "exact"}}, {"prompt": {"template": "A: {prompt}"}}
    assert len({digest(), digest(**other_verifier), digest(**other_prompt)}) == 3


def test_no_text_of_a_set_is_trained_on(tmp_path):
    texts = [f"{n}+1=" for n in range(9)]
    spec = two_sets(tmp_path, ["3+1=", "9+9="], texts)
    opened = open_tasks(spec)
    train = opened.tasks[0].train
    alone = open_task(spec.task).train
    held_out = {opened.tasks[0].held_out[at].text for at in range(2)}
    assert "3+1=" not in {train[at].text for at in range(len(train))}
    assert train.digest != alone.digest
    if "3+1=" not in held_out:
        assert "3+1=" in {alone[at].text for at in range(len(alone))}
        assert "1 training prompts of task.jsonl.path" in opened.overlap(opened.sets[0])
    clean = two_sets(tmp_path, ["9+9="], texts)
    assert not open_tasks(clean).overlap(open_tasks(clean).sets[0])


@pytest.mark.parametrize(
    ("hard", "task", "message"),
    [
        ([], {}, "hard.jsonl"),
        (["1", "2"], {"size": 3}, "3 prompts asked for, but the source has 2"),
        (["1"], {"prompt": {"template": "{prompt} {x}"}}, "unknown placeholder"),
    ],
)
def test_set_that_cannot_be_opened_is_named(tmp_path, hard, task, message):
    spec = two_sets(tmp_path, hard, ["a", "b", "c"], **task)
    with pytest.raises(EvaluationSetError, match=rf"evaluation.sets.1 \(hard\): .*{message}"):
        open_tasks(spec)
