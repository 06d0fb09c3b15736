"""JSONL files: what is accepted, and how a bad line is reported."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.dataset_source import DatasetSource as DatasetSpec
from scalerl_tasks import JsonlError, JsonlSource, SourceError, open_dataset
from scalerl_tasks.dataset.table_source import description
from scalerl_tasks.jsonl import MAX_LINE_BYTES

GOOD = b'{"prompt": "2 + 2 =", "answer": "4"}\n'


def write(path, content):
    path.write_bytes(content)
    return path


def test_jsonl_reads_full_and_minimal_lines(tmp_path):
    full = {
        "id": "a-1",
        "prompt": "p",
        "answer": "x",
        "difficulty": 2,
        "solution": "s",
        "metadata": {"k": [1, None]},
    }
    source = JsonlSource(
        write(tmp_path / "d.jsonl", json.dumps(full).encode() + b"\r\n\n  \n" + GOOD.rstrip())
    )
    assert len(source) == 2
    first, second = source[0], source[1]
    assert (first.id, first.text, first.answer, first.solution) == ("a-1", "p", "x", "s")
    assert (first.difficulty, first.metadata) == (2.0, {"k": [1, None]})
    assert (second.text, second.solution, second.difficulty, dict(second.metadata)) == (
        "2 + 2 =",
        None,
        None,
        {},
    )
    assert len(second.id) == 16


def test_jsonl_digest_is_of_file(tmp_path):
    one = JsonlSource(write(tmp_path / "a.jsonl", GOOD))
    same = JsonlSource(write(tmp_path / "b.jsonl", GOOD))
    other = JsonlSource(write(tmp_path / "c.jsonl", GOOD + b"\n"))
    assert one.digest == same.digest != other.digest
    assert one[0].id == other[0].id


BAD = [
    # content, line, column, field, what the message says
    (b"", None, None, None, "has no prompts"),
    (b"\n \n", None, None, None, "has no prompts"),
    (GOOD + b"{", 2, 2, None, "bad JSON"),
    (GOOD + b'{"prompt": "a" "answer": "b"}', 2, 16, None, "bad JSON"),
    ('{"prompt": "äöü", answer: 1}'.encode(), 1, 19, None, "bad JSON"),
    (b'{"prompt": "a", "answer": "b"} trailing', 1, 32, None, "bad JSON"),
    (b'{"prompt": "a\\ud800", "answer": "b"}', 1, None, None, "bad JSON"),
    (b'{"prompt": 1, "answer": }', 1, 25, None, "bad JSON"),
    (b'{"prompt": "a", "answer": NaN}', 1, 27, None, "bad JSON"),
    (b"[" * 100_000, 1, None, None, "bad JSON"),
    (b"[1, 2]", 1, None, None, "is a JSON array, not an object"),
    (b'"text"', 1, None, None, "is a JSON string"),
    (b"null", 1, None, None, "is a JSON null"),
    (GOOD + b'\xff{"prompt": "b", "answer": "c"}', 2, 1, None, "0xff is not UTF-8"),
    ('{"prompt": "ä", "answer": "c"}'.encode("latin-1"), 1, 13, None, "0xe4 is not UTF-8"),
    ('{"prompt": "a", "answer": "c"}'.encode("utf-16"), 1, None, None, "not UTF-8"),
    (b"\xef\xbb\xbf" + GOOD, 1, 1, None, "byte order mark"),
    (b'{"prompt": "a"}', 1, None, "answer", "is missing"),
    (b'{"promt": "a", "answer": "b"}', 1, None, "prompt", "is missing; did you mean 'promt'"),
    (b'{"prompt": "a", "answer": "b", "solutoin": "c"}', 1, None, "solutoin", "did you mean 'solution'"),
    (b'{"prompt": "a", "answer": "b", "source": "c"}', 1, None, "source", 'inside "metadata"'),
    (b'{"prompt": "a", "answer": 42}', 1, None, "answer", "must be a string, is number; put it in quotes"),
    (b'{"prompt": "a", "answer": true}', 1, None, "answer", "must be a string, is boolean"),
    (b'{"prompt": ["a"], "answer": "b"}', 1, None, "prompt", "must be a string, is array"),
    (b'{"prompt": null, "answer": "b"}', 1, None, "prompt", "must be a string, is null"),
    (
        b'{"prompt": "a", "answer": "b", "difficulty": "hard"}',
        1,
        None,
        "difficulty",
        "must be a number, is string",
    ),
    (b'{"prompt": "a", "answer": "b", "metadata": "m"}', 1, None, "metadata", "must be an object, is string"),
    (b'{"prompt": "a", "answer": "b", "id": 7}', 1, None, "id", "put it in quotes"),
    (b'{"prompt": " ", "answer": "b"}', 1, None, "prompt", "is empty"),
    (b'{"prompt": "a", "answer": ""}', 1, None, "answer", "is empty"),
    (b'{"prompt": "a", "answer": "b", "id": ""}', 1, None, "id", "is empty"),
    (
        GOOD + b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'", "answer": "b"}',
        2,
        None,
        None,
        "longer than 1,048,576",
    ),
    (
        b'{"prompt": "a", "answer": "b", "id": "q"}\n\n{"prompt": "c", "answer": "d", "id": "q"}',
        3,
        None,
        "id",
        "'q' is also the id of an earlier line",
    ),
]


@pytest.mark.parametrize(("content", "line", "column", "field", "says"), BAD)
def test_jsonl_reports_position_of_error(tmp_path, content, line, column, field, says):
    path = write(tmp_path / "bad.jsonl", content)
    with pytest.raises(JsonlError) as caught:
        JsonlSource(path)
    error = caught.value
    assert says in str(error)
    assert (error.line, error.field) == (line, field)
    places = {"line": line, "column": column, "field": repr(field) if field else None}
    for part in [str(path), *(f"{word} {place}" for word, place in places.items() if place)]:
        assert part in str(error)


def test_jsonl_reports_first_repeated_id(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": "a", "id": f"i{i % 700}"} for i in range(1000)]
    path = write(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)).encode())
    with pytest.raises(JsonlError, match=r"line 701, field 'id': 'i0' is also the id of an earlier line"):
        JsonlSource(path)


def test_jsonl_drops_repeated_prompts(tmp_path):
    """As a data set does: the later row goes, whatever its answer and id. A warm start keeps each solution of a prompt."""
    rows = [
        {"prompt": "p", "answer": "1", "solution": "s", "id": "a"},
        {"prompt": "q", "answer": "1"},
        {"prompt": "p", "answer": "2", "id": "b"},
        {"prompt": "p", "answer": "1", "solution": "t", "id": "c"},
        {"prompt": "q", "answer": "1", "id": "a"},
        {"prompt": "p", "answer": "2"},
    ]
    path = write(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)).encode())
    task, dataset = JsonlSource(path), open_dataset(DatasetSpec(files=["d.jsonl"]), tmp_path)
    for source in (task, dataset):
        assert [(source[i].text, source[i].answer) for i in range(len(source))] == [("p", "1"), ("q", "1")]
        assert description(source)[-2:] == [
            "4 rows dropped as duplicates of an earlier prompt",
            "2 rows of these with another answer",
        ]
    warm, dataset = (
        JsonlSource(path, solutions=True),
        open_dataset(DatasetSpec(files=["d.jsonl"]), tmp_path, solutions=True),
    )
    for source in (warm, dataset):
        assert [source[i].solution for i in range(len(source))] == ["s", None, None, "t"]
        assert description(source)[-1] == "2 rows dropped as duplicates of an earlier prompt"


def test_each_solution_of_a_prompt_has_an_id_of_its_own(tmp_path):
    rows = [{"prompt": "p", "answer": "1", "solution": each} for each in ("s", "t")]
    path = write(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)).encode())
    dataset = DatasetSpec(files=["d.jsonl"])
    for warm, task in (
        (JsonlSource(path, solutions=True), JsonlSource(path)),
        (open_dataset(dataset, tmp_path, solutions=True), open_dataset(dataset, tmp_path)),
    ):
        first, second = warm[0].id, warm[1].id
        assert first != second
        assert task[0].id not in (first, second), "which is of prompt and answer"


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_jsonl_refuses_missing_file(tmp_path, name):
    with pytest.raises(SourceError, match=r"cannot be read: No such file|is not a regular file"):
        JsonlSource(tmp_path / name)


def test_jsonl_refuses_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="not a regular file"):
        JsonlSource(tmp_path / "pipe")


def test_jsonl_detects_changed_file(tmp_path):
    path = write(tmp_path / "d.jsonl", GOOD)
    source = JsonlSource(path)
    assert source[0].answer == "4"
    write(path, GOOD.replace(b"4", b"5") + GOOD)
    with pytest.raises(SourceError, match="changed since it was opened"):
        _ = source[0]


def test_jsonl_refuses_read_after_close(tmp_path):
    source = JsonlSource(write(tmp_path / "d.jsonl", GOOD))
    source.close()
    source.close()
    with pytest.raises(SourceError, match="closed"):
        _ = source[0]


def test_jsonl_closes_descriptor(tmp_path):
    good, bad = write(tmp_path / "g.jsonl", GOOD), write(tmp_path / "b.jsonl", b"{")
    before = os.listdir("/proc/self/fd")
    for _ in range(20):
        JsonlSource(good)
        with pytest.raises(JsonlError):
            JsonlSource(bad)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@given(
    st.lists(
        st.tuples(st.text(min_size=1), st.text(min_size=1)),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row[0],
    )
)
def test_jsonl_round_trip(tmp_path_factory, rows):
    rows = [(p, a) for p, a in rows if p.strip() and a.strip()] or [("p", "a")]
    content = "\n".join(json.dumps({"prompt": p, "answer": a}) for p, a in rows).encode()
    source = JsonlSource(write(tmp_path_factory.mktemp("h") / "d.jsonl", content))
    assert [(source[i].text, source[i].answer) for i in range(len(source))] == rows
    assert len({source[i].id for i in range(len(source))}) == len(rows)


def test_jsonl_memory_is_bounded(tmp_path):
    """64 MiB of lines, within 48 MiB of address space more than an idle interpreter has."""
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        for i in range(64):
            file.write(
                b"".join(
                    b'{"prompt": "%d %s", "answer": "4"}\n' % (i * 16 + j, b"x" * 65_000) for j in range(16)
                )
            )
    code = (
        "import pathlib, resource, sys; import scalerl_tasks as t\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2)\n"
        "s = t.JsonlSource(pathlib.Path(sys.argv[1])); print(len(s), s[1023].text[:4])"
    )
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=200)
    assert result.stdout.split() == ["1024", "1023"], result.stderr
