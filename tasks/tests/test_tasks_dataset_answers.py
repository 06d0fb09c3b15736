"""Answers of data sets that their verifiers reject, and prompts that overlap with held-out ones."""

import json
import random

import pytest
from dataset_files import write_lines

from scalerl_api.source import TaskSpec
from scalerl_api.spec import RunSpec
from scalerl_tasks import AnswersError, SourceError, check_answers, open_source, open_tasks, task_problems


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


def test_dataset_rows_that_cannot_be_used_are_listed_as_those_of_jsonl(tmp_path):
    """Of the task, and of a warm start that has its own."""
    write_lines(tmp_path / "d.jsonl", [{"prompt": f"p{i}", "answer": "1" if i % 2 else ""} for i in range(8)])
    good = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    write_lines(tmp_path / "good.jsonl", good)
    bad, number = {"files": ["d.jsonl"]}, {"verifier": {"name": "number"}, "heldOut": {"size": 1}}
    for field, given in (
        ("task.dataset", {"task": {"dataset": bad} | number}),
        (
            "warmStart.dataset",
            {
                "task": {"dataset": {"files": ["good.jsonl"]}} | number,
                "warmStart": {"steps": 1, "dataset": bad},
            },
        ),
    ):
        model = {"scratch": {}, "contextTokens": 64}
        run = RunSpec.model_validate(
            {"model": model, "recipe": {"maxCompletionTokens": 8}, "budget": {"maxSteps": 1}} | given
        )
        *listed, summary = task_problems(run, tmp_path, answers=False)
        assert [one.text.partition("d.jsonl, ")[2].split(",")[0] for one in listed] == [
            f"line {line}" for line in (1, 3, 5, 7)
        ]
        assert {one.field for one in (*listed, summary)} == {field}
        assert "4 of 8 rows cannot be used (4 empty answer)" in summary.text


def section(file, verifier, columns):
    return TaskSpec.model_validate(
        {"dataset": {"files": [file], "columns": columns}, "verifier": verifier, "heldOut": {"size": 1}}
    )


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
    bad, reports = {0, 7, 8, 9, 50, 199}, []
    run = with_bad_answers(tmp_path, bad)
    assert task_problems(run, tmp_path, progress=reports.append) == []
    (task,) = open_tasks(run, tmp_path).tasks
    sources = [task.train[i] for i in range(len(task.train))] + [task.held_out[i] for i in range(8)]
    assert sorted(int(prompt.answer) for prompt in sources) == [i for i in range(200) if i not in bad]
    assert all(prompt.text == f"{prompt.answer} + 1 = ?" for prompt in sources)
    summary = next(text for text in reports if "do not score 1" in text)
    assert summary.startswith(
        "task.dataset: 6 of 200 rows (3.00%) have answers that do not score 1 by number:"
    )
    assert "3 its answer … has no number" in summary
    assert "3 its answer … is not one number" in summary
    assert any("d.jsonl, line 8, answer: its answer 'ten' has no number" in text for text in reports)
    assert any("d.jsonl, line 1, answer: its answer '10:30' is not one number" in text for text in reports)
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
    run, reports = RunSpec.model_validate(given), []
    assert task_problems(run, tmp_path, progress=reports.append) == []
    assert any("3 of 200 rows (1.50%) have answers that do not score 1 by number" in text for text in reports)
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
    run, reports = RunSpec.model_validate(spec), []
    without = open_tasks(run, tmp_path).tasks[0]
    assert task_problems(run, tmp_path, progress=reports.append) == []
    opened = open_tasks(run, tmp_path).tasks[0]
    assert opened.held_out.digest == without.held_out.digest
    assert opened.train.digest != without.train.digest
    kept = {opened.held_out[i].answer for i in range(5)}
    assert kept.isdisjoint({"0", "7", "149"}), "of this seed"
    assert {opened.train[i].answer for i in range(len(opened.train))} | kept == {
        str(i) for i in range(200) if i not in (0, 7, 149)
    }
    assert len(opened.train) == 192
    said = next(text for text in reports if "consecutive" in text)
    assert said.startswith("task.dataset: 3 of 200 rows share 8 consecutive words with a held-out prompt")
    assert said.endswith(f"the first: {tmp_path}/train.jsonl, line 1")
