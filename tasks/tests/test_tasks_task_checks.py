"""Checks before a run: every row of every file, each bad one with its line, the same for all callers."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.spec import EvaluationSetSpec, RunSpec, TaskSpec
from scalerl_tasks import (
    AnswersError,
    JsonlError,
    JsonlRowsError,
    JsonlSource,
    SourceError,
    check_answers,
    task_problems,
)
from scalerl_tasks.answer_checks import Timings

MODEL = {"scratch": {"layers": 1, "hiddenSize": 32, "attentionHeads": 2, "vocabularySize": 300}}


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows(count: int, answers: dict[int, str] | None = None, **fields: str) -> list[object]:
    """``count`` rows with numbers as answers, but for those of ``answers``, by line."""
    given = answers or {}
    return [
        {"prompt": f"p {i}", "answer": given.get(i, str(i)), "id": f"i{i}"} | fields
        for i in range(1, count + 1)
    ]


def run(**sections: object) -> RunSpec:
    return RunSpec.model_validate({"model": MODEL, "budget": {"maxSteps": 1}} | sections)


def task(path: Path, verifier: str = "number", **fields: object) -> dict[str, object]:
    return {"jsonl": {"path": str(path)}, "verifier": {"name": verifier}} | fields


def section(path: Path, verifier: str = "number", **limits: object) -> TaskSpec:
    return TaskSpec.model_validate(
        {"jsonl": {"path": str(path)}, "verifier": {"name": verifier} | limits, "heldOut": {"size": 1}}
    )


BAD = {
    "good": ({"prompt": "p", "answer": "1"}, ""),
    "blank": ("", ""),
    "text": ("oops", "bad JSON"),
    "array": ([1], "no object"),
    "no answer": ({"prompt": "p"}, "without answer"),
    "empty": ({"prompt": "p", "answer": " "}, "empty answer"),
    "number": ({"prompt": "p", "answer": 1}, "type of answer"),
    "unknown": ({"prompt": "p", "answer": "1", "level": 3}, "unknown field level"),
    "long": ("x" * (1 << 20) + "yz", "too long"),
    "repeated": ({"prompt": "p", "answer": "1", "id": "same"}, ""),
}


@given(st.lists(st.sampled_from(sorted(BAD)), min_size=1, max_size=40))
def test_scan_finds_every_invalid_line(tmp_path_factory, names):
    """Whatever lines a file has: the valid ones can be read, the others are counted by kind, and the first 20 are listed."""
    lines: list[object] = []
    for name in names:
        row, _ = BAD[name]
        lines.append({**row, "prompt": f"p {len(lines)}"} if isinstance(row, dict) else row)
    path = write(tmp_path_factory.mktemp("h") / "d.jsonl", lines)
    kinds = [(i, BAD[name][1]) for i, name in enumerate(names, 1) if BAD[name][1]]
    repeated = [i for i, name in enumerate(names, 1) if name == "repeated"][1:]
    bad = sorted([*(i for i, _ in kinds), *repeated])
    if not bad and not set(names) - {"blank"}:
        with pytest.raises(JsonlError, match="has no prompts"):
            JsonlSource(path, keep_valid=True)
        return
    source = JsonlSource(path, keep_valid=True)
    assert source.problems.total == len(bad)
    valid = [i for i, name in enumerate(names, 1) if name != "blank" and i not in bad]
    assert [source.line(at) for at in range(len(source))] == valid
    assert [source[at].text for at in range(len(source))] == [f"p {i - 1}" for i in valid]
    texts = source.problems.texts
    found = [
        int(text.partition(", line ")[2].split(",")[0].split(":")[0]) for text in texts[: min(len(bad), 20)]
    ]
    assert found == bad[:20]
    if len(bad) < 2:
        assert len(texts) == len(bad)
    else:
        assert len(texts) == min(len(bad), 20) + 1
        for kind in {kind for _, kind in kinds}:
            assert f"{sum(k == kind for _, k in kinds)} {kind}" in texts[-1]
        assert f"{len(bad)} of {len([n for n in names if n != 'blank'])} rows cannot be used" in texts[-1]
    if len(bad) > 1:
        with pytest.raises(JsonlRowsError) as caught:
            JsonlSource(path)
        assert (caught.value.line, caught.value.texts) == (bad[0], texts)
    source.close()


def test_kinds_of_foreign_schema_are_bounded(tmp_path):
    path = write(tmp_path / "d.jsonl", [{f"k{i}": 1, "prompt": "p", "answer": "a"} for i in range(3000)])
    *listed, summary = JsonlSource(path, keep_valid=True).problems.texts
    assert len(listed) == 20
    assert "3,000 of 3,000 rows" in summary
    assert "2,992 others" in summary
    assert "the first 20 are listed" in summary


def test_check_answers_reads_every_row(tmp_path):
    """Not only the first ones, nor only until the first problem."""
    path = write(tmp_path / "d.jsonl", rows(3000, {7: "seven", 1501: "none", 2999: "none", 3000: "ten"}))
    with pytest.raises(AnswersError) as caught:
        check_answers(JsonlSource(path), section(path))
    *listed, summary = caught.value.texts
    assert [text.split(":")[0] for text in listed] == [
        f"{path}, line {line}, field 'answer'" for line in (7, 1501, 2999, 3000)
    ]
    # Answers are checked once each, so no row has the id of another with the same answer.
    assert all("i1501" not in text for text in listed)
    assert "4 of 3,000 rows cannot be used (4 answers that number cannot use)" in summary
    check_answers(JsonlSource(path), section(path, "exact"))
    check_answers(JsonlSource(path), section(path), limit=3)


def test_task_problems_of_every_file(tmp_path):
    """Tasks of a mix, evaluation sets and the warm start: all bad rows of each, in one pass."""
    first = write(tmp_path / "a.jsonl", [*rows(300, {299: "none", 300: "none"}), "oops"])
    second = write(tmp_path / "b.jsonl", rows(40, prompt="same"))
    third = write(tmp_path / "c.jsonl", rows(260, {5: "none", 250: "no"}))
    solutions = write(tmp_path / "s.jsonl", [*rows(30, solution="s"), *rows(4), "{}"])
    spec = run(
        task={
            "mix": [
                {"name": "one", "weight": "0.5", **task(first, heldOut={"size": 2})},
                {"name": "two", "weight": "0.5", **task(second, heldOut={"size": 2})},
            ]
        },
        evaluation={
            "sets": [
                {"name": "all", "heldOutOf": "one"},
                EvaluationSetSpec.model_validate({"name": "c", "task": task(third, size=3)}).model_dump(
                    by_alias=True, exclude_unset=True
                ),
            ]
        },
        warmStart={"steps": 1, "jsonl": {"path": str(solutions)}},
    )
    found = task_problems(spec)
    lines = {
        (p.field, int(p.text.partition(", line ")[2].split(",")[0].split(":")[0].split(" ")[0]))
        for p in found
        if ", line " in p.text.split(":")[0]
    }
    assert lines >= {
        ("task.mix.0.jsonl.path", 301),
        ("task.mix.0.verifier.name", 299),
        ("task.mix.0.verifier.name", 300),
        ("evaluation.sets.1.task.verifier.name", 5),
        ("evaluation.sets.1.task.verifier.name", 250),
        ("warmStart.jsonl.path", 31),
        ("warmStart.jsonl.path", 34),
        ("warmStart.jsonl.path", 35),
    }
    assert not [p for p in found if p.field.startswith("task.mix.1")]
    quick = task_problems(spec, answers=False)
    assert {p.field for p in quick} == {"task.mix.0.jsonl.path", "warmStart.jsonl.path"}


def test_bad_template_is_one_problem_also_with_a_function_of_trl(tmp_path):
    (tmp_path / "r.py").write_text("def one(completions, **kwargs): return [1.0 for _ in completions]\n")
    verifier = {"python": {"path": "r.py", "function": "one", "signature": "trl"}}
    path = write(tmp_path / "a.jsonl", rows(30))
    bad = task(path) | {"verifier": verifier, "prompt": {"template": "{prompt} {x}"}, "heldOut": {"size": 1}}
    (problem,) = task_problems(run(task=bad), tmp_path)
    assert problem.field == "task.prompt.template"
    assert "unknown placeholder {x}" in str(problem)


def test_task_problems_is_empty_for_a_good_run(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(30))
    assert task_problems(run(task=task(path, heldOut={"size": 2}))) == []
    missing = run(task=task(tmp_path / "none.jsonl", heldOut={"size": 2}))
    (problem,) = task_problems(missing)
    assert (problem.field, "No such file" in problem.text) == ("task.jsonl.path", True)


SLOW = """
import time
import scalerl_tasks.verifiers as v
from scalerl_tasks.errors import VerifierError

class Slow:
    name = "exact"
    def score(self, prompt, completion):
        return 1.0
    def check(self, prompt):
        if "slow" in prompt.answer:
            while True: pass
        if prompt.answer == "large":
            bytearray(1 << 40)
        if prompt.answer == "bad":
            raise VerifierError(f"prompt {prompt.id}: no")
        if prompt.answer == "crash":
            raise ZeroDivisionError("x")
    def samples(self):
        return []

v._OPENERS["exact"] = Slow
"""


@pytest.fixture
def slow(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_check_that_never_ends_is_a_bad_row(tmp_path, slow):
    """A reference on which the verifier hangs, needs all memory or crashes is reported, and the rows after it are checked."""
    answers = {3: "slow", 100: "large", 180: "crash", 200: "bad"}
    path = write(tmp_path / "d.jsonl", rows(200, answers))
    with pytest.raises(AnswersError) as caught:
        check_answers(JsonlSource(path), section(path, "exact", timeoutSeconds=3))
    texts = caught.value.texts
    assert [t.split(":")[0].split(", ")[1] for t in texts[:4]] == [f"line {line}" for line in answers]
    for text, says in zip(
        texts, ["longer than 3 s", "bytes of memory", "ZeroDivisionError", "no"], strict=False
    ):
        assert says in text


def test_checks_stop_after_many_that_never_end(tmp_path, slow):
    path = write(tmp_path / "d.jsonl", rows(400, {i: f"slow {i}" for i in range(1, 400)}))
    reports: list[str] = []
    with pytest.raises(AnswersError, match=r"stopped after \d+ of 400 answers: the checks of 4 took longer"):
        check_answers(
            JsonlSource(path),
            section(path, "exact", timeoutSeconds=1),
            progress=reports.append,
            timings=Timings(max_timeouts=4, progress_seconds=0.5),
        )
    assert reports
    assert "of 400 answers" in reports[0]


def test_source_that_vanishes_is_one_problem(tmp_path):
    with pytest.raises(SourceError, match="cannot be read"):
        JsonlSource(tmp_path / "none.jsonl", keep_valid=True)
