"""Layouts of public data sets: which one a file has, and what becomes of its columns."""

import pyarrow
import pyarrow.parquet
import pytest
from dataset_files import VERL, opened, spec, write_lines

from scalerl_api.source import TaskSpec
from scalerl_tasks import SourceError, open_dataset, open_source, render_prompt, split_held_out
from scalerl_tasks.dataset import table_source as dataset_source

SKYWORK = VERL | {
    "data_source": "train-math-x",
    "reward_model": {"ground_truth": '["\\\\frac{1}{2}"]', "style": "rule"},
}
LAYOUTS = {
    # name: row, layout, prompt, answer, difficulty, labels
    "gsm8k": ({"question": "q", "answer": "a\n<<1+1=2>>\n#### 1,002"}, "GSM8K", "q", "1,002", None, {}),
    "math": (
        {"problem": "q", "level": "Level 5", "type": "Algebra", "solution": "is $\\boxed{\\frac{1}{2}}$."},
        "MATH",
        "q",
        "\\frac{1}{2}",
        5.0,
        {"level": "Level 5", "type": "Algebra"},
    ),
    "verl": (VERL, "verl (DAPO-Math and others)", "How many?", "72", None, {"data_source": "openai/gsm8k"}),
    "countdown": (
        VERL | {"reward_model": {"style": "rule", "ground_truth": {"numbers": [1, 2], "target": 3}}},
        "verl, with a structure as the ground truth",
        "How many?",
        '{"numbers": [1, 2], "target": 3}',
        None,
        {"data_source": "openai/gsm8k"},
    ),
    "skywork": (SKYWORK, "Skywork-OR1", "How many?", "\\frac{1}{2}", None, {"data_source": "train-math-x"}),
    "polaris": (
        {"problem": "q", "answer": "3", "difficulty": "5/8"},
        "Polaris",
        "q",
        "3",
        0.375,
        {"solved": "5/8"},
    ),
    "deepscaler": (
        {"problem": "q", "answer": "3", "solution": "s"},
        "DeepScaleR or NuminaMath",
        "q",
        "3",
        None,
        {},
    ),
    "big-math": (
        {"problem": "q", "answer": "3", "source": "orca", "domain": ["a -> b"], "llama8b_solve_rate": 0.25},
        "Big-Math",
        "q",
        "3",
        0.75,
        {"source": "orca"},
    ),
    "openr1": (
        {
            "problem": "q",
            "solution": "s",
            "answer": "3",
            "problem_type": "Algebra",
            "generations": ["long"] * 3,
        },
        "OpenR1-Math",
        "q",
        "3",
        None,
        {"problem_type": "Algebra"},
    ),
    "deepcoder": (
        {
            "problem": "q",
            "tests": '[{"input": "1", "output": "2", "type": "stdin_stdout"}]',
            "starter_code": "",
        },
        "DeepCoder",
        "q",
        '[{"input": "1", "output": "2", "type": "stdin_stdout"}]',
        None,
        {},
    ),
    "apps": (
        {
            "question": "q",
            "solutions": "[]",
            "input_output": '{"inputs": ["1"], "outputs": ["2"]}',
            "difficulty": "interview",
        },
        "APPS or TACO",
        "q",
        '{"inputs": ["1"], "outputs": ["2"]}',
        None,
        {"difficulty": "interview"},
    ),
    "mbpp": (
        {"task_id": 2, "text": "q", "code": "c", "test_list": ["assert f(1) == 2"], "test_setup_code": ""},
        "MBPP",
        "q",
        '["assert f(1) == 2"]',
        None,
        {},
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f():",
            "canonical_solution": "c",
            "test": "def check(f): ...",
            "entry_point": "f",
        },
        "HumanEval",
        "def f():",
        "def check(f): ...",
        None,
        {},
    ),
    "ours": (
        {"prompt": "q", "answer": "3", "id": "i", "difficulty": 2, "solution": "s"},
        "prompt and answer",
        "q",
        "3",
        2.0,
        {},
    ),
    "trl": (
        {"prompt": [{"role": "user", "content": "q"}], "ground_truth": "3"},
        "prompt and ground_truth",
        "q",
        "3",
        None,
        {},
    ),
    "trl-math": (
        {"prompt": [{"role": "user", "content": "q"}], "solution": "$3$"},
        "prompt and solution",
        "q",
        "$3$",
        None,
        {},
    ),
    "trl-prompts": ({"prompt": "q", "completion": "c"}, "prompts without answers", "q", "", None, {}),
    "openai": (
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "3"}]},
        "messages that end with the assistant's answer",
        "q",
        "3",
        None,
        {},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_dataset_layout_is_recognized(tmp_path, name, form):
    row, layout, prompt, answer, difficulty, labels = LAYOUTS[name]
    if form == "jsonl":
        write_lines(tmp_path / "d.jsonl", [row])
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    source = open_dataset(spec(f"d.{form}"), tmp_path)
    (one,) = (source[i] for i in range(len(source)))
    assert (source.table.info.layout, one.text, one.answer, one.difficulty) == (
        layout,
        prompt,
        answer,
        difficulty,
    )
    assert one.labels == labels
    assert any(
        layout in line and "set task.dataset.columns and answerPattern to override" in line
        for line in dataset_source.description(source)
    )


def test_dataset_has_the_text_of_tests_once(tmp_path):
    """They may have megabytes; a reward that reads the column gets the same text."""
    row = LAYOUTS["apps"][0] | {"input_output": '{"inputs": ["' + "1" * 10_000 + '"], "outputs": ["2"]}'}
    source = opened(tmp_path, [row])
    assert source.table.path.stat().st_size < 12_000
    assert source[0].metadata["input_output"] == row["input_output"]
    (tmp_path / "other").mkdir()
    listed = opened(tmp_path / "other", [row | {"input_output": {"inputs": ["1"], "outputs": ["2"]}}])
    assert listed[0].metadata["input_output"] == {"inputs": ["1"], "outputs": ["2"]}
    assert listed[0].answer == '{"inputs": ["1"], "outputs": ["2"]}'


def test_dataset_keeps_further_columns(tmp_path):
    assert opened(tmp_path, [VERL])[0].metadata == {
        name: VERL[name] for name in ("data_source", "ability", "reward_model", "extra_info")
    }
    openr1 = LAYOUTS["openr1"][0]
    assert "generations" not in opened(tmp_path, [openr1], metadata=["problem_type"])[0].metadata


def test_dataset_messages_become_system_turns_and_text(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "And 2 + 2?"}]},
    ]
    source = opened(tmp_path, [{"prompt": messages, "answer": 4}])
    assert render_prompt(source[0], "{prompt} Answer:", "of the spec").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2 + 2? Answer:"},
    ]
    raw = {"dataset": {"files": ["d.jsonl"]}, "verifier": {"name": "number"}, "heldOut": {"size": 1}}
    with pytest.raises(SourceError, match=r"set prompt\.format to Chat"):
        open_source(TaskSpec.model_validate(raw), tmp_path)
    assert len(open_source(TaskSpec.model_validate(raw | {"prompt": {"format": "Chat"}}), tmp_path)) == 1


def test_dataset_same_last_turn_is_another_prompt(tmp_path):
    """Conversations that end in the same words are neither duplicates nor held out by each other's text."""

    def row(first):
        turns = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": "?"},
            {"role": "user", "content": "Go on."},
        ]
        return {"prompt": turns, "answer": "1"}

    source = opened(tmp_path, [row("a"), row("b"), row("c"), row("a")])
    assert len(source) == 3
    train, held_out = split_held_out(source, 1, 0)
    assert {train[0].turns[0][1], train[1].turns[0][1], held_out[0].turns[0][1]} == {"a", "b", "c"}


def test_dataset_columns_replace_those_of_the_layout(tmp_path):
    row = {"question": "q", "answer": "#### 1", "other": {"text": "o"}, "final": 0.5, "level": ["a", "b"]}
    one = opened(tmp_path, [row], columns={"answer": "final", "labels": {"level": "level"}})[0]
    assert (one.text, one.answer, one.labels) == ("q", "0.5", {"level": "a, b"})
    assert opened(tmp_path, [row], columns={"prompt": "other.text", "answer": "final"})[0].text == "o"


@pytest.mark.parametrize("name", ["gsm8k", "verl", "big-math"])
def test_dataset_layout_is_recognized_though_the_first_row_has_nulls(tmp_path, name):
    row, layout, prompt, *_ = LAYOUTS[name]
    where = {"filter": {"where": ["answer != null"]}}
    source = opened(tmp_path, [dict.fromkeys(row), row | {"more": 1}], **where)
    assert (source.table.info.layout, source[0].text, len(source)) == (layout, prompt, 1)
