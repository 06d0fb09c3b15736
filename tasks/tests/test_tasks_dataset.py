"""Data sets: public layouts, file formats, paths and filters, tables, and each kind of bad input."""

import bz2
import csv
import decimal
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
import textwrap

import pyarrow
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.dataset_source import DatasetSource as DatasetSpec
from scalerl_api.dataset_source import HubDataset
from scalerl_api.source import TaskSpec
from scalerl_api.spec import RunSpec
from scalerl_tasks import (
    AnswersError,
    JsonlError,
    JsonlRowsError,
    SourceError,
    check_answers,
    open_dataset,
    open_source,
    open_tasks,
    render_prompt,
    split_held_out,
    task_problems,
)
from scalerl_tasks.dataset import table_source as dataset_source
from scalerl_tasks.dataset.expressions import Expression, NoValue
from scalerl_tasks.dataset.hub import choose_files
from scalerl_tasks.dataset.table import Table
from scalerl_tasks.split import text_key


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def spec(*files, **fields):
    return DatasetSpec.model_validate({"files": list(files)} | fields)


def write_lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def opened(tmp_path, rows, **fields):
    """A data set of these rows, as a JSON Lines file, in a run's directory."""
    write_lines(tmp_path / "d.jsonl", rows)
    return open_dataset(spec("d.jsonl", **fields), tmp_path)


def problems(tmp_path, rows, **fields):
    """The messages about the rows; the last one is the summary if there are several."""
    with pytest.raises(SourceError) as caught:
        opened(tmp_path, rows, **fields)
    return caught.value.texts if isinstance(caught.value, JsonlRowsError) else (str(caught.value),)


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "so #### 72", "question": "How many?"},
}
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


FORMATS = [
    "jsonl",
    "json",
    "csv",
    "tsv",
    "parquet",
    "arrow",
    "stream.arrow",
    "jsonl.gz",
    "csv.xz",
    "json.bz2",
    "jsonl.zst",
]


@pytest.mark.parametrize("form", FORMATS)
def test_dataset_is_the_same_in_every_format(tmp_path, form):
    rows = [{"question": f'ä\u2028 {i},\n"{i}"?', "answer": f"#### {i}"} for i in range(1500)]
    path, table = tmp_path / f"d.{form}", pyarrow.Table.from_pylist(rows)
    kind = form.split(".")[0]
    if form == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=400)
    elif form.endswith("arrow"):
        make = pyarrow.ipc.new_stream if "stream" in form else pyarrow.ipc.new_file
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=700)
    else:
        plain = tmp_path / "plain"
        if kind == "jsonl":
            write_lines(plain, rows)
        elif kind == "json":
            plain.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8-sig")
        else:
            with plain.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
        pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}.get(
            form.rpartition(".")[2], lambda b: b
        )
        if form.endswith(".zst"):
            with pyarrow.output_stream(str(path), compression="zstd") as out:
                out.write(plain.read_bytes())
        else:
            path.write_bytes(pack(plain.read_bytes()))
    source = open_dataset(spec("d.*"), tmp_path)
    assert len(source) == 1500
    assert [(source[i].text, source[i].answer) for i in (0, 700, 1499)] == [
        (rows[i]["question"], str(i)) for i in (0, 700, 1499)
    ]
    # A row of CSV has two lines, after the header.
    row = {"jsonl": "line 1,500", "csv": "line 3,000", "tsv": "line 3,000"}.get(kind, "row 1,500")
    assert source.place(1499) == f"{path}, {row}"


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


ROW = {
    "a": {"b": [{"c": 3}, {"c": "x"}]},
    "s": '{"t": ["5/8"]}',
    "n": 2,
    "no": None,
    "odd name-1": 7,
    "text": "abc",
    "nan": float("nan"),
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b[0].c", 3),
        ("a.b[-1].c", "x"),
        ('a["b"][1].c', "x"),
        ("s.t[0]", "5/8"),
        ("number(s.t[0])", 0.625),
        ("number('Level 5')", 5),
        ("number('1,234.5')", 1234.5),
        ("1 - n / 4", 0.5),
        ("odd name-1", 7),
        ("n > 1 and len(text) <= 3", True),
        ("1 < n < 2", False),
        ("not n == 2", False),
        ("text in ['abc', 'd'] or missing > 1", True),
        ("'b' in text", True),
        ("no == null", True),
        ("missing is null", True),
        ("missing != 3", True),
        ("lower('ABC') == text", True),
        ("json(a.b)", '[{"c": 3}, {"c": "x"}]'),
        ("-n", -2),
    ],
)
def test_expression_value(text, value):
    assert Expression(text, ROW, "f")(ROW) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a.b[2].c", "a.b has 2 items"),
        ("a.x", "a has no 'x' (it has b)"),
        ("a[0]", "a is an object, not a list"),
        ("n.x", "n is a number, not an object"),
        ("text.x", "text is the text 'abc', which is not JSON"),
        ("textt", "there is no column 'textt'; did you mean 'text'?"),
        ("no", "is null"),
        ("nan", "is NaN"),
        ("no > 1", "None and 1 cannot be ordered"),
        ("nan < 1", "None and 1 cannot be ordered"),
        ("text > 1", "number(…) reads the number in a text"),
        ("1 - text", "'abc' is text, not a number"),
        ("number(text)", "there is no number in 'abc'"),
        ("number('3/0')", "divides by zero"),
        ("n / (n - 2)", "zero"),
    ],
)
def test_expression_without_a_value_says_why(text, says):
    with pytest.raises(NoValue) as caught:
        Expression(text, ROW, "f")(ROW)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')",
        "n ** 9",
        "[x for x in a]",
        "lambda: 1",
        "a.b[n]",
        "text.upper()",
        "f'{n}'",
        "n if n else 1",
        "(n := 3)",
        "a b",
        "'",
        "(" * 500,
    ],
)
def test_expression_of_more_than_the_syntax_is_refused(text):
    with pytest.raises(SourceError, match=r"^f: "):
        Expression(text, ROW, "f")(ROW)


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        ("Hashes", "1 #### 2 #### 3\n", "3"),
        ("Boxed", r"\boxed{1} then \boxed{x^{2}}", "x^{2}"),
        (r"Answer:\s*(\S+)", "Answer: 1 no, Answer: 2", "2"),
        (r"Answer:\s*(.+)", "Answer: 1\nno\nAnswer: 2 m\nChecked.", "2 m"),
    ],
)
def test_dataset_answer_pattern(tmp_path, pattern, text, answer):
    assert opened(tmp_path, [{"prompt": "p", "answer": text}], answerPattern=pattern)[0].answer == answer


def test_dataset_columns_replace_those_of_the_layout(tmp_path):
    row = {"question": "q", "answer": "#### 1", "other": {"text": "o"}, "final": 0.5, "level": ["a", "b"]}
    one = opened(tmp_path, [row], columns={"answer": "final", "labels": {"level": "level"}})[0]
    assert (one.text, one.answer, one.labels) == ("q", "0.5", {"level": "a, b"})
    assert opened(tmp_path, [row], columns={"prompt": "other.text", "answer": "final"})[0].text == "o"


def test_dataset_filter_counts_what_it_drops(tmp_path):
    rows = [
        {
            "problem": f"p{i // 2}",
            "answer": str(i // 2),
            "rate": None if i == 8 else i / 10,
            "domain": "ab"[i % 2],
        }
        for i in range(10)
    ]
    rows.append({"problem": "p0", "answer": "another", "rate": 0.5, "domain": "b"})
    rows.append({"problem": "", "answer": "1", "rate": 0.5, "domain": "b"})
    where = ["rate < 0.9", "domain in ['a', 'b']", "len(prompt) > 0"]
    source = opened(tmp_path, rows, filter={"where": where}, columns={"difficulty": "1 - rate"})
    assert [source[i].text for i in range(len(source))] == ["p0", "p1", "p2", "p3"]
    assert source.table.info.dropped == {
        "dropped by filter.where: rate < 0.9": 1,
        "dropped by filter.where, without a value: rate < 0.9": 1,
        "dropped by filter.where: domain in ['a', 'b']": 0,
        "dropped by filter.where: len(prompt) > 0": 0,
        "dropped by filter.where, without a value: len(prompt) > 0": 1,
        "dropped as duplicates of an earlier prompt": 5,
        "of these with another answer": 1,
    }


@pytest.mark.parametrize(
    ("rows", "fields", "says"),
    [
        (
            [VERL, VERL | {"reward_model": {}}],
            {},
            "d.jsonl, line 2, reward_model.ground_truth: reward_model has no 'ground_truth'",
        ),
        (
            [{"prompt": "p", "answer": "1"}, {"prompt": "p"}],
            {},
            "d.jsonl, line 2, answer: there is no column 'answer'",
        ),
        (['{"prompt": "p", "answer": "1"}', '{"prompt": "p", "answer": NaN}'], {}, "line 2, answer: is NaN"),
        ([{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": None}], {}, "line 2, answer: is null"),
        (
            [{"prompt": "p", "answer": "1"}, {"prompt": 5, "answer": "1"}],
            {},
            "line 2, prompt: is a number; a prompt is text or a list",
        ),
        (
            [{"prompt": "p", "answer": "1"}, {"prompt": "p2", "answer": ["1"]}],
            {},
            "line 2, answer: is a list of 1: ['1'], not text or a number; use answer[0]",
        ),
        (
            [{"prompt": "p", "answer": "1"}, {"prompt": " ", "answer": "1"}],
            {},
            "line 2, prompt: is empty; drop such rows with filter.where: len(prompt) > 0",
        ),
        (
            [{"prompt": "p", "answer": "#### 1"}, {"prompt": "q", "answer": "2"}],
            {"answerPattern": "Hashes"},
            "line 2, answer: answerPattern Hashes is not in '2'; correct it, or drop such rows with filter.where: len(answer) > 0",
        ),
        (
            [{"prompt": "p", "answer": "1", "difficulty": "hard"}],
            {},
            "difficulty: is the text 'hard', not a number; use number(…)",
        ),
        (
            [{"prompt": [{"role": "tool", "content": "x"}], "answer": "1"}],
            {},
            "prompt[0]: is {'role': 'tool'",
        ),
        (
            [{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}],
            {},
            "has no message of the user at its end",
        ),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}],
            {},
            "a content of text",
        ),
        (
            [{"prompt": "p", "answer": "1", "id": "a"}, {"prompt": "q", "answer": "1", "id": "a"}],
            {},
            "line 2, id: 'a' is also the id of an earlier row",
        ),
        (['{"prompt": "p", "answer": "1"}', "oops"], {}, "line 2, column 1: bad JSON"),
        (['{"prompt": "p", "answer": "1"}', "[1]"], {}, "line 2: is a list of 1, not an object"),
        (
            [{"a": "p", "b": "1"}],
            {},
            "the columns are no known layout: a, b; say where prompt and answer are",
        ),
        ([{"a": "p", "b": "1"}], {"columns": {"answer": "b"}}, "say where prompt is"),
        (
            [{"prompt": "p", "answer": "1"}],
            {"columns": {"solution": "solutoin"}},
            "columns.solution: 'solutoin' has no value in any row: there is no column",
        ),
        (
            [{"prompt": "p", "answer": "1"}],
            {"columns": {"labels": {"x": "levle"}}},
            "columns.labels.x: 'levle' has no value in any row",
        ),
        (
            [{"prompt": "p", "answer": "1"}],
            {"filter": {"where": ["rate > 0.5"]}},
            "filter.where[0]: 'rate > 0.5': no row has 'rate' (names: answer, prompt)",
        ),
        (
            [{"prompt": "p", "answer": "1"}],
            {"filter": {"where": ["anser != '2'"]}},
            "no row has 'anser'; did you mean 'answer'?",
        ),
        (
            [{"prompt": "p", "answer": "1", "rate": None}],
            {"filter": {"where": ["rate > 0.5"]}},
            "'rate > 0.5' has no value in any row",
        ),
        (
            [{"prompt": "p", "answer": "1"}],
            {"filter": {"where": ["answer != '1'"]}},
            "no row is left of 1: 1 dropped by filter.where: answer != '1'",
        ),
        ([{"prompt": "p", "answer": "1"}], {"metadata": ["lvl"]}, "metadata: there is no column 'lvl'"),
        (
            [{"prompt": "p", "answer": "1"}],
            {"answerPattern": "(a"},
            "answerPattern: '(a' is not Hashes, Boxed or a regular expression",
        ),
        (
            [{"prompt": "p", "answer": "1"}],
            {"answerPattern": "a"},
            "has 0 groups; put exactly one pair of parentheses",
        ),
        (
            [{"prompt": {"0": "p"}, "answer": {"0": "1"}}],
            {},
            "is one JSON object of 'prompt', 'answer'; write a list",
        ),
        ([""], {}, "no rows"),
        (
            [{"prompt": "p", "answer": None}, {"prompt": "q", "answer": "1"}],
            {},
            "line 1, answer: is null; correct columns.answer, or drop such rows with filter.where: answer != null",
        ),
        (
            [{"prompt": "p", "m": {"a": 1}}, {"prompt": "q", "m": {}}],
            {"columns": {"prompt": "prompt", "answer": "m.a"}},
            "line 2, m.a: m has no 'a' (it is empty); correct columns.answer",
        ),
        (
            [{"prompt": "p", "answer": "1"}, '{"prompt": "p2", "answer": "1", "x": "\\ud800"}'],
            {},
            "line 2: cannot be written as JSON",
        ),
    ],
)
def test_dataset_bad_row_is_named(tmp_path, rows, fields, says):
    (found,) = problems(tmp_path, rows, **fields)
    assert says in found
    assert not list(tmp_path.glob("data/.*"))
    assert not list(tmp_path.glob("data/*"))


def test_dataset_without_answers_is_for_own_code_alone(tmp_path):
    write_lines(tmp_path / "d.jsonl", [{"ask": f"p{i}", "task": "math"} for i in range(3)])
    (tmp_path / "reward.py").write_text("def f(completions, task, **kwargs): return [len(task[0]) / 10]\n")
    own = {"python": {"path": "reward.py", "function": "f", "signature": "trl"}}
    for verifier in ({"name": "number"}, {"code": {}}):
        with pytest.raises(
            SourceError, match=r"no answers, which (number|code) needs: say where answer is.*ask, task"
        ):
            open_source(section("d.jsonl", verifier, {"prompt": "ask"}), tmp_path)
    given = section("d.jsonl", own, {"prompt": "ask"})
    source = open_source(given, tmp_path)
    assert [source[i].answer for i in range(3)] == [""] * 3
    check_answers(source, given, directory=tmp_path)


def test_dataset_rewards_out_of_range_are_one_reason(tmp_path):
    """The message has no id of a prompt beside the row, and says what to set."""
    write_lines(tmp_path / "d.jsonl", [{"prompt": f"p{i}", "answer": "1" * i} for i in range(1, 31)])
    (tmp_path / "reward.py").write_text("def f(completion, answer): return 1 - len(answer)\n")
    own = {"python": {"path": "reward.py", "function": "f"}}
    given = section("d.jsonl", own, {})
    with pytest.raises(AnswersError) as caught:
        check_answers(open_source(given, tmp_path), given, directory=tmp_path)
    first, *_, summary = caught.value.texts
    assert len(caught.value.texts) == 4
    assert first.endswith(
        "d.jsonl, line 2, answer: reward.py:f gave -1, which is not in [0, 1]; set verifier.range to what it gives"
    )
    assert "29 of 30 rows (96.67%)" in summary
    assert "by reward.py:f: 29 gave …, which is not in [0, 1];" in summary


def section(file, verifier, columns):
    return TaskSpec.model_validate(
        {"dataset": {"files": [file], "columns": columns}, "verifier": verifier, "heldOut": {"size": 1}}
    )


def test_dataset_bad_rows_are_counted_and_the_first_listed(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": "1" if i % 2 else ["1"]} for i in range(100)]
    *listed, summary = problems(tmp_path, rows)
    assert len(listed) == 20
    assert "50 of 100 rows cannot be used (50 type of answer); the first 20 are listed" in summary
    assert "line 1, answer: is a list of 1" in listed[0]
    (summary,) = problems(tmp_path, [{"prompt": f"p{i}", "answer": ["1"]} for i in range(100)])
    assert "100 of 100 rows cannot be used (100 type of answer); the first: " in summary


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("d.jsonl", b"", "is empty"),
        ("d.jsonl", '{"prompt": "p", "answer": "1"}'.encode("utf-16"), "is UTF-16; convert it"),
        ("d.jsonl", b'{"prompt": "p\xe4", "answer": "1"}', "byte 0xe4 is not UTF-8"),
        ("d.parquet", b"PAR1 and then nothing", "cannot be read as Parquet"),
        ("d.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("d.arrow", b"ARROW1 nothing more", "cannot be read as Arrow"),
        (
            "d.jsonl.gz",
            gzip.compress(b'{"prompt": "p", "answer": "1"}\n' * 999, mtime=0)[:60],
            "cannot be read",
        ),
        ("d.json", b'[{"prompt": "p", "answer": "1"}, {"pro', "row 2: bad JSON"),
        ("d.json", b"3", "is neither a JSON array of objects nor one object a line"),
        ("d.csv", b"prompt,answer\np,1\nq,2,3\n", "line 3: has 3 fields, the header 2"),
        ("d.csv", b"prompt,prompt\np,1\n", "two columns of one name"),
        ("d.csv", b"prompt,answer\np,1\n\xe4,1\n", "this line, or one soon after it, is not UTF-8"),
        (
            "d.jsonl",
            b'[{"prompt": "p", "answer": "1"}]',
            "not an object; name a file that is one array .json",
        ),
        ("d.txt", b"x", "unknown ending; files are .jsonl"),
        ("d.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("d.csv", b"prompt;answer\np;1\n", "its fields are separated by ';'; write it with commas"),
        (
            "d.json",
            b'{"prompt": ["p", "q"], "answer": ["1", "2"]}',
            "is one JSON object of 'prompt', 'answer'",
        ),
        (
            "d.json",
            b'{"data": [{"prompt": "p", "answer": "1"}]}',
            "is one JSON object of 'data'; write a list",
        ),
    ],
)
def test_dataset_bad_file_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError) as caught:
        open_dataset(spec(name), tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_dataset_of_every_type_of_a_column(tmp_path):
    """Of Parquet: what JSON and Python have no type for becomes text, or is named."""
    columns = {
        "prompt": pa.array(["p"]).dictionary_encode(),
        "answer": pa.array([decimal.Decimal("1.10")]),
        "time": pa.array([1], pa.timestamp("ns")),
        "bytes": pa.array([b"\xff"]),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    }
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "d.parquet")
    one = open_dataset(spec("d.parquet"), tmp_path)[0]
    assert (one.text, one.answer) == ("p", "1.10")
    assert one.metadata == {
        "answer": "1.10",
        "time": "1970-01-01 00:00:00.000000001",
        "bytes": "/w==",
        "map": [["k", 1]],
    }
    nested = pa.array([{"t": 1}], pa.struct([("t", pa.timestamp("ns"))]))
    pyarrow.parquet.write_table(pa.table(columns | {"nested": nested}), tmp_path / "e.parquet")
    with pytest.raises(SourceError, match=r"e\.parquet, row 1: cannot be read: Nanosecond"):
        open_dataset(spec("e.parquet"), tmp_path)


@pytest.mark.parametrize("name", ["gsm8k", "verl", "big-math"])
def test_dataset_layout_is_recognized_though_the_first_row_has_nulls(tmp_path, name):
    row, layout, prompt, *_ = LAYOUTS[name]
    where = {"filter": {"where": ["answer != null"]}}
    source = opened(tmp_path, [dict.fromkeys(row), row | {"more": 1}], **where)
    assert (source.table.info.layout, source[0].text, len(source)) == (layout, prompt, 1)


def test_dataset_without_a_file_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"\*\.parquet: no such file"):
        open_dataset(spec("*.parquet"), tmp_path)
    (tmp_path / "sub").mkdir()
    with pytest.raises(SourceError, match="is a directory; name its files"):
        open_dataset(spec("sub"), tmp_path)


def test_dataset_of_a_run_stays_as_it_was(tmp_path):
    """A run reads its own table, whatever becomes of the files; another section makes another table."""
    first = opened(tmp_path, [{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": "2"}])
    again = opened(tmp_path, [{"prompt": "changed", "answer": "3"}])
    assert (again.digest, again[0].text) == (first.digest, "p")
    (tmp_path / "d.jsonl").unlink()
    assert open_dataset(spec("d.jsonl"), tmp_path)[1].text == "q"
    with pytest.raises(SourceError, match="no such file"):
        open_dataset(spec("d.jsonl", filter={"maxRejected": "0.1"}), tmp_path)


def test_dataset_in_the_cache_follows_the_file(tmp_path, monkeypatch):
    """The cache has a table for each state of a file, and a run takes it from there without reading the file."""
    write_lines(tmp_path / "d.jsonl", [{"prompt": "p", "answer": "1"}])
    path = spec(str(tmp_path / "d.jsonl"))
    assert open_dataset(path)[0].text == "p"
    write_lines(tmp_path / "d.jsonl", [{"prompt": "other", "answer": "1"}])
    cached = open_dataset(path)
    assert cached[0].text == "other"
    monkeypatch.setattr(dataset_source, "read_rows", lambda path: pytest.fail("the file was read again"))
    assert open_dataset(path, tmp_path / "run").digest == cached.digest


def test_dataset_table_that_is_cut_off_is_refused(tmp_path):
    opened(tmp_path, [{"prompt": "p", "answer": "1"}])
    (table,) = (tmp_path / "data").glob("*.rows")
    whole = table.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        table.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=str(table)):
            Table(table)


def test_dataset_full_disk_leaves_nothing(tmp_path):
    """The limit of a file's size stands for a full disk: a write fails in the middle."""
    write_lines(
        tmp_path / "d.jsonl", [{"prompt": f"p {i} " + "x" * 2000, "answer": "1"} for i in range(2000)]
    )
    code = f"""
        import resource
        from pathlib import Path
        from scalerl_api.source import DatasetSource
        from scalerl_tasks import SourceError, open_dataset
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
        try:
            open_dataset(DatasetSource(files=["d.jsonl"]), Path({str(tmp_path)!r}))
        except SourceError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert "cannot be written after" in done.stdout
    assert "make room" in done.stdout
    assert list((tmp_path / "data").iterdir()) == []


def test_dataset_table_is_read_without_pyarrow(tmp_path):
    """The coordinator's image has none."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "d.parquet")
    code = f"""
        import sys
        from pathlib import Path
        for name in ("pyarrow", "huggingface_hub"):
            sys.modules[name] = None
        from scalerl_api.source import DatasetSource
        from scalerl_tasks import SourceError, open_dataset
        spec, root = DatasetSource(files=["d.parquet"]), Path({str(tmp_path)!r})
        try:
            print(open_dataset(spec, root)[0].answer)
        except SourceError as error:
            print(error)
    """

    def run():
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
        ).stdout

    assert "needs pyarrow, which is not installed here" in run()
    open_dataset(spec("d.parquet"), tmp_path)
    assert run() == "72\n"


@given(st.lists(st.tuples(st.text(min_size=1), st.text(min_size=1), st.text()), min_size=1, max_size=8))
def test_dataset_returns_any_text(tmp_path_factory, rows):
    rows = [row for row in rows if row[0].strip() and row[1].strip() and not row[0].lstrip().startswith("[{")]
    first = {}
    for row in rows:
        first.setdefault(text_key(row[0]), row)
    rows = list(first.values())
    if not rows:
        return
    directory = tmp_path_factory.mktemp("any")
    table = pyarrow.Table.from_pylist([{"prompt": p, "answer": a, "more": m} for p, a, m in rows])
    pyarrow.parquet.write_table(table, directory / "d.parquet")
    source = open_dataset(spec("d.parquet"), directory)
    assert [
        (source[i].text, source[i].answer, source[i].metadata["more"]) for i in range(len(source))
    ] == rows


def test_seen_is_a_set():
    import random

    rng = random.Random(1)
    keys = [rng.randrange(1, 6000).to_bytes(8) for _ in range(20_000)]
    seen, expected = dataset_source._Seen(), set()
    for key in keys:
        assert seen.add(key) is (key not in expected)
        expected.add(key)


@pytest.mark.parametrize(
    ("verifier", "bad", "rows"),
    [
        ("number", "line 2, answer: ", [("a", "1"), ("b", "ten"), ("c", "1,000")]),
        ("exact", "line 3, answer: ", [("a", "1"), ("b", "x"), ("c", "so 4 #### 4")]),
        ("math-verify", "line 2, answer: ", [("a", "\\frac{1}{2}"), ("b", "\\frac{1}{"), ("c", "x^2")]),
    ],
)
def test_dataset_answers_that_no_reply_can_match_are_listed(tmp_path, verifier, bad, rows):
    write_lines(tmp_path / "d.jsonl", [{"prompt": p, "answer": a} for p, a in rows])
    task = {"dataset": {"files": ["d.jsonl"]}, "verifier": {"name": verifier}, "heldOut": {"size": 1}}
    section = TaskSpec.model_validate(task)
    with pytest.raises(AnswersError) as caught:
        check_answers(open_source(section, tmp_path), section)
    listed, summary = caught.value.texts
    assert bad in listed
    assert "1 of 3 rows (33.33%) have answers that do not score 1" in summary
    assert "that is more than filter.maxRejected (0.05)" in summary


def with_bad_answers(tmp_path, bad, total=200, **given):
    """A run whose data set has some answers that its verifier rejects."""
    rows = [
        {"prompt": f"{i} + 1 = ?", "answer": ("ten" if i % 2 else "10:30") if i in bad else str(i)}
        for i in range(total)
    ]
    write_lines(tmp_path / "d.jsonl", rows)
    task = {"dataset": {"files": ["d.jsonl"]} | given, "verifier": {"name": "number"}, "heldOut": {"size": 8}}
    return RunSpec.model_validate({"model": {"path": "/m"}, "task": task, "budget": {"maxSteps": 1}})


def test_dataset_rows_with_rejected_answers_are_left_out_of_a_run(tmp_path):
    bad, told = {0, 7, 8, 9, 50, 199}, []
    run = with_bad_answers(tmp_path, bad)
    assert task_problems(run, tmp_path, progress=told.append) == []
    (task,) = open_tasks(run, tmp_path).tasks
    sources = [task.train[i] for i in range(len(task.train))] + [task.held_out[i] for i in range(8)]
    assert sorted(int(prompt.answer) for prompt in sources) == [i for i in range(200) if i not in bad]
    assert all(prompt.text == f"{prompt.answer} + 1 = ?" for prompt in sources)
    summary = next(text for text in told if "do not score 1" in text)
    assert summary.startswith(
        "task.dataset: 6 of 200 rows (3.00%) have answers that do not score 1 by number:"
    )
    assert "3 its answer … has no number" in summary
    assert "3 its answer … is not one number" in summary
    assert any("d.jsonl, line 8, answer: its answer 'ten' has no number" in text for text in told)
    assert any("d.jsonl, line 1, answer: its answer '10:30' is not one number" in text for text in told)
    # The record beside the table counts for all later processes, also after an edit of the verifier's limits.
    (record,) = tmp_path.glob("data/*.left-out.json")
    assert json.loads(record.read_text())["rejected"] == {
        "its answer … has no number": 3,
        "its answer … is not one number": 3,
    }
    changed = run.model_dump(by_alias=True, exclude_unset=True)
    changed["task"]["verifier"]["timeoutSeconds"] = 20
    slower = RunSpec.model_validate(changed)
    assert open_tasks(slower, tmp_path).digest == open_tasks(run, tmp_path).digest
    again = []
    assert task_problems(run, tmp_path, progress=again.append) == []
    assert any(
        "3 rows left out, rejected by the verifier: its answer … has no number" in text for text in again
    )
    assert not any("do not score 1" in text for text in again), "they are not checked again"


def test_dataset_with_too_many_rejected_answers_is_refused(tmp_path):
    bad = set(range(11))
    problems = task_problems(with_bad_answers(tmp_path, bad), tmp_path)
    assert {problem.field for problem in problems} == {"task.verifier.name"}
    *listed, summary = [problem.text for problem in problems]
    assert len(listed) == 6, "three of each reason"
    assert "11 of 200 rows (5.50%)" in summary
    assert "raise filter.maxRejected" in summary
    assert not list(tmp_path.glob("data/*.json"))
    assert task_problems(with_bad_answers(tmp_path, bad, filter={"maxRejected": "0.06"}), tmp_path) == []
    (tmp_path / "strict").mkdir()
    strict = with_bad_answers(tmp_path / "strict", {3}, filter={"maxRejected": "0"})
    (one, _) = task_problems(strict, tmp_path / "strict")
    assert "line 4" in one.text


def test_dataset_rejected_by_either_verifier_is_left_out_of_both(tmp_path):
    """Two tasks of one table: its rows, and so their order, are the same in both."""
    run = with_bad_answers(tmp_path, {5})
    section = run.task.model_dump(by_alias=True, exclude_none=True, exclude={"mix"})
    exact = section | {"verifier": {"name": "exact"}}
    mix = [{"name": "a", "weight": "0.5"} | section, {"name": "b", "weight": "0.5"} | exact]
    run = RunSpec.model_validate({"model": {"path": "/m"}, "task": {"mix": mix}, "budget": {"maxSteps": 1}})
    assert task_problems(run, tmp_path) == []
    a, b = open_tasks(run, tmp_path).tasks
    assert len(a.train) == len(b.train) == 199 - 8
    assert a.held_out.digest == b.held_out.digest


def test_dataset_of_own_code_beside_a_verifier_with_a_name(tmp_path):
    """The one with a name leaves rows out, all of which are checked; the code is asked about some, at each start."""
    run = with_bad_answers(tmp_path, bad := {3, 77, 190})
    (tmp_path / "reward.py").write_text(
        "import pathlib\n"
        "def short(completion, metadata):\n"
        "    with (pathlib.Path(__file__).parent / 'calls').open('a') as file: file.write('x')\n"
        "    return len(completion) > 99 or (None if completion.startswith('1') else 1)\n"
    )
    given = run.model_dump(by_alias=True, exclude_unset=True)
    named = given["task"].pop("verifier")
    own = {"python": {"path": "reward.py", "function": "short"}}
    given["task"]["verifiers"] = [named | {"weight": "4"}, own]
    run, told = RunSpec.model_validate(given), []
    assert task_problems(run, tmp_path, progress=told.append) == []
    assert any("3 of 200 rows (1.50%) have answers that do not score 1 by number" in text for text in told)
    train = open_tasks(run, tmp_path).tasks[0].train
    assert len(train) == 200 - 8 - len(bad)
    calls = (tmp_path / "calls").stat().st_size
    assert calls == 200
    assert task_problems(run, tmp_path) == []
    assert (tmp_path / "calls").stat().st_size == calls + 197
    assert open_tasks(run, tmp_path).digest == open_tasks(run, tmp_path).digest
    (tmp_path / "reward.py").write_text("def short(completion): return 1 / (completion != '150')\n")
    *_, last = task_problems(run, tmp_path)
    assert last.field == "task.verifiers"
    assert "1 of 197 rows (0.51%) have answers that get no reward by reward.py:short" in last.text
    assert "raised ZeroDivisionError" in last.text


def test_dataset_sample_is_only_refused_beyond_doubt(tmp_path):
    """A sample of a data set with less than the share may have slightly more."""
    run = with_bad_answers(tmp_path, set(range(0, 200, 19)))
    section = run.task.tasks[0].section
    source = open_source(section, tmp_path)
    check_answers(source, section, limit=100)  # has 6
    with pytest.raises(AnswersError, match=r"11 of 200 rows"):
        check_answers(source, section, limit=200)


def test_dataset_overlap_with_held_out_prompts_is_not_trained_on(tmp_path):
    """Same problem, other words around it; the instruction that all have is not counted."""
    instruction = "Solve the following problem step by step and give the final answer at the end:"
    rng = random.Random(3)
    texts = [" ".join(rng.choices([f"w{i}" for i in range(300)], k=20)) for _ in range(250)]
    held, train = texts[:50], texts[50:]
    for i in (0, 7, 149):  # other punctuation and case, and only eight words
        train[i] = f"x {', '.join(held[i % 50].split()[5:13]).upper()} y"
    for name, problems in (("held", held), ("train", train)):
        rows = [{"prompt": f"{instruction} {text}", "answer": str(i)} for i, text in enumerate(problems)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    verifier = {"verifier": {"name": "number"}}
    task = {
        "dataset": {"files": ["train.jsonl"], "filter": {"overlap": 8}},
        "heldOut": {"size": 5},
    } | verifier
    sets = [{"name": "s", "task": {"dataset": {"files": ["held.jsonl"]}} | verifier}]
    spec = {"model": {"path": "/m"}, "task": task, "evaluation": {"sets": sets}, "budget": {"maxSteps": 1}}
    run, told = RunSpec.model_validate(spec), []
    without = open_tasks(run, tmp_path).tasks[0]
    assert task_problems(run, tmp_path, progress=told.append) == []
    opened = open_tasks(run, tmp_path).tasks[0]
    assert opened.held_out.digest == without.held_out.digest
    assert opened.train.digest != without.train.digest
    kept = {opened.held_out[i].answer for i in range(5)}
    assert kept.isdisjoint({"0", "7", "149"}), "of this seed"
    assert {opened.train[i].answer for i in range(len(opened.train))} | kept == {
        str(i) for i in range(200) if i not in (0, 7, 149)
    }
    assert len(opened.train) == 192
    said = next(text for text in told if "consecutive" in text)
    assert said.startswith("task.dataset: 3 of 200 rows share 8 consecutive words with a held-out prompt")
    assert said.endswith(f"the first: {tmp_path}/train.jsonl, line 1")


HUB = HubDataset.model_validate({"name": "a/b"})
PARTS = [
    "main/train-00000-of-00001.parquet",
    "main/test-00000-of-00001.parquet",
    "socratic/train-00000-of-00001.parquet",
]
CONFIGS = [
    {
        "config_name": "main",
        "data_files": [{"split": "train", "path": "main/train-*"}, {"split": "test", "path": "main/test-*"}],
    },
    {"config_name": "socratic", "data_files": [{"split": "train", "path": "socratic/train-*"}]},
]


@pytest.mark.parametrize(
    ("names", "card", "hub", "found"),
    [
        (PARTS, {"configs": CONFIGS}, {"config": "main"}, [PARTS[0]]),
        (PARTS, {"configs": CONFIGS}, {"config": "main", "split": "test"}, [PARTS[1]]),
        (PARTS, {"configs": CONFIGS[:1]}, {}, [PARTS[0]]),
        (PARTS, {"configs": [CONFIGS[0], CONFIGS[1] | {"default": True}]}, {}, [PARTS[2]]),
        (PARTS, {}, {"config": "socratic"}, [PARTS[2]]),
        (PARTS, {"configs": CONFIGS}, {}, "has several configurations; set config to one of main, socratic"),
        (
            PARTS,
            {"configs": CONFIGS},
            {"config": "min"},
            "has no configuration 'min'; set config to one of main, socratic",
        ),
        (
            PARTS,
            {"configs": CONFIGS},
            {"config": "main", "split": "dev"},
            "no split 'dev'; set split to one of test, train",
        ),
        (PARTS, {}, {}, "has several configurations; set config to one of main, socratic"),
        (["README.md", "deepscaler.json"], {}, {}, ["deepscaler.json"]),
        (["x.jsonl.gz", "test.jsonl", "dataset_infos.json"], {}, {}, ["x.jsonl.gz"]),
        (["loader.py"], {}, {}, "no data files of split 'train'; its data files: none"),
        (["a.jsonl"], {"configs": [{"data_files": "a.jsonl"}]}, {}, ["a.jsonl"]),
    ],
)
def test_hub_files_of_a_split(names, card, hub, found):
    asked = HUB.model_copy(update=hub)
    if isinstance(found, str):
        with pytest.raises(SourceError) as caught:
            choose_files(names, card, asked, "task.dataset.hub: a/b")
        assert found in str(caught.value)
    else:
        assert choose_files(names, card, asked, "") == found


def test_hub_dataset_is_read_offline_at_its_commit(tmp_path):
    """From the hub's cache, by the hub's client; the commit is kept in the table."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub/datasets--openai--gsm8k"
    snapshot = repository / "snapshots" / commit
    (snapshot / "main").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n---\n# A card\n"
    (snapshot / "README.md").write_text(card)
    rows = [{"question": "q", "answer": "#### 3"}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), snapshot / "main/train-00000-of-00001.parquet"
    )
    code = """
        import sys
        from pathlib import Path
        from scalerl_api.source import DatasetSource
        from scalerl_tasks import SourceError, open_dataset
        for name in ("openai/gsm8k", "openai/other"):
            try:
                source = open_dataset(DatasetSource(hub={"name": name}), Path(sys.argv[1]))
                print(source[0].answer, source.table.info.revision)
            except SourceError as error:
                print(error)
    """
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    read, missing = done.stdout.splitlines()
    assert read == f"3 {commit}"
    assert "openai/other at revision main" in missing
    assert "HF_HUB_OFFLINE is set and it is not in the cache" in missing


def test_dataset_error_is_one_of_jsonl(tmp_path):
    with pytest.raises(JsonlError) as caught:
        opened(tmp_path, [{"prompt": "p", "answer": []}])
    assert (caught.value.line, caught.value.field, caught.value.kind) == (1, "answer", "type of answer")
