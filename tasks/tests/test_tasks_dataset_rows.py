"""Rows of data sets: answer patterns, filters, and each way in which a row is bad."""

import random

import pytest
from dataset_files import VERL, opened

from scalerl_tasks import JsonlError, JsonlRowsError, SourceError, repeats


def problems(tmp_path, rows, **fields):
    """The messages about the rows; the last one is the summary if there are several."""
    with pytest.raises(SourceError) as caught:
        opened(tmp_path, rows, **fields)
    return caught.value.texts if isinstance(caught.value, JsonlRowsError) else (str(caught.value),)


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


def test_dataset_bad_rows_are_counted_and_the_first_listed(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": "1" if i % 2 else ["1"]} for i in range(100)]
    *listed, summary = problems(tmp_path, rows)
    assert len(listed) == 20
    assert "50 of 100 rows cannot be used (50 type of answer); the first 20 are listed" in summary
    assert "line 1, answer: is a list of 1" in listed[0]
    (summary,) = problems(tmp_path, [{"prompt": f"p{i}", "answer": ["1"]} for i in range(100)])
    assert "100 of 100 rows cannot be used (100 type of answer); the first: " in summary


def test_keys_of_repeats_are_a_set():
    rng = random.Random(1)
    keys = [rng.randrange(1, 6000).to_bytes(8) for _ in range(20_000)]
    found, expected = repeats._KeySet(), set()
    for key in keys:
        assert found.add(key) is (key not in expected)
        expected.add(key)


def test_dataset_error_is_one_of_jsonl(tmp_path):
    with pytest.raises(JsonlError) as caught:
        opened(tmp_path, [{"prompt": "p", "answer": []}])
    assert (caught.value.line, caught.value.field, caught.value.kind) == (1, "answer", "type of answer")
