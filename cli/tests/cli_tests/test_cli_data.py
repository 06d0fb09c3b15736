"""``scalerl data``: what a run would read, and the answers that cannot be graded; and data sets in the other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from scalerl_api.load import SpecError, run_from_object
from scalerl_cli import inputs
from scalerl_cli.inputs import load
from scalerl_cli.main import main
from scalerl_cli.validate import problems
from scalerl_cli.variants import _data
from scalerl_trainer.models.scratch import write_scratch

GSM8K = [{"question": f"What is {i} + 1?", "answer": f"It is <<{i}+1>>.\n#### {i + 1}"} for i in range(20)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def run_file(tmp_path: Path, **task: Any) -> Path:
    spec = {
        "model": {"scratch": {"layers": 1, "hiddenSize": 32, "attentionHeads": 1}, "contextTokens": 64},
        "task": {
            "dataset": {"files": ["data/*.parquet"]},
            "verifier": {"name": "number"},
            "heldOut": {"size": 2},
        }
        | task,
        "recipe": {"maxCompletionTokens": 8},
        "budget": {"maxSteps": 1},
    }
    file = tmp_path / "run.yaml"
    manifest = {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": "t"},
        "spec": spec,
    }
    file.write_text(yaml.safe_dump(manifest))
    return file


def test_data_shows_what_a_run_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(write(tmp_path / "gsm8k.parquet", [*GSM8K, GSM8K[0]]))]) == 0
    out = capsys.readouterr().out
    for text in (
        "columns: question, answer",
        "20 of 21 rows of 1 file",
        "recognized as GSM8K: prompt = question, answer = answer, solution = answer, answerPattern Hashes",
        "1 row dropped as duplicates of an earlier prompt",
        "gsm8k.parquet, row 1",
        "What is 0 + 1?",
        "--- answer: 1",
        "length in characters (tokens with --model): median 15",
        "answers: 20 checked by number: each scores 1 as a reply",
    ):
        assert text in out, text


def test_data_of_fewer_rows_than_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(write(tmp_path / "two.parquet", GSM8K[:2]))]) == 0
    out = capsys.readouterr().out
    assert out.count("What is 0 + 1?") == out.count("What is 1 + 1?") == 1


def test_data_of_a_run_shows_prompts_as_the_model_sees_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from scalerl_api.spec import ScratchModel

    (tmp_path / "data").mkdir()
    write(tmp_path / "data/a.parquet", GSM8K)
    model = tmp_path / "model"
    model.mkdir()
    texts = [row["question"] + "<>|:!" for row in GSM8K]
    scratch = ScratchModel.model_validate({"layers": 1, "hiddenSize": 32, "attentionHeads": 1})
    write_scratch(model, scratch, texts, seed=0, dtype="float32", context_tokens=64)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    prompt = {"format": "Chat", "template": "{prompt} Go!", "chatTemplate": template}
    assert main(["data", str(run_file(tmp_path, prompt=prompt)), "--model", str(model)]) == 0
    out = capsys.readouterr().out
    assert "<user>What is 6 + 1? Go!<assistant>" in out
    assert "length in tokens: median" in out


def test_data_lists_answers_that_no_reply_can_match(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*GSM8K, {"question": "Who?", "answer": "#### Ada"}, {"question": "When?", "answer": "#### soon"}]
    words = ["data", str(write(tmp_path / "d.parquet", rows)), "--verifier", "number"]
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert "d.parquet, row 21, answer: its answer 'Ada' has no number" in errors
    assert "d.parquet, row 22, answer: its answer 'soon' has no number" in errors
    assert (
        "2 of 22 rows (9.09%) have answers that do not score 1 by number: 2 its answer … has no number"
        in errors
    )
    assert main([*words, "--where", "answer != 'soon'"]) == 0
    said = capsys.readouterr()
    assert "row 21, answer: its answer 'Ada' has no number" in said.err
    assert "1 of 21 rows (4.76%)" in said.err
    assert "answers: 21 checked by number: each of the other 20 scores 1 as a reply" in said.out
    assert main([*words, "--where", "number(answer) >= 0"]) == 0
    assert "2 rows dropped by filter.where, without a value: number(answer) >= 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--column", "answer"], "write FIELD=EXPRESSION"),
        (["--column", "anser=b"], "columns.anser: Extra inputs are not permitted (got 'b')\n"),
        (["--column", "answer=c.d"], "row 1, c.d: there is no column 'c'"),
        (["--verifier", "numbr"], "plugin 'numbr': no installed package has it"),
        (["--answer-pattern", "("], "answerPattern: '(' is not Hashes"),
        (["--where", "b +"], "filter.where[0]: 'b +' is neither a column"),
        (["--model", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_data_bad_input_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    file = write(tmp_path / "d.parquet", [{"prompt": "a", "answer": "1", "b": 2}])
    assert main(["data", str(file), *words]) == 2
    captured = capsys.readouterr()
    assert says in captured.err + captured.out


def test_data_without_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "d.parquet", [{"prompt": "a", "completion": "1"}]))
    assert main(["data", file]) == 0
    assert "answers: none, so only a verifier of your own code" in capsys.readouterr().out
    assert main(["data", file, "--verifier", "number"]) == 2
    assert main(["data", file, "--verifier", "number", "--column", "answer=completion"]) == 0
    service = {"http": {"url": "http://127.0.0.1:9/score"}}
    assert main(["data", str(run_file(tmp_path, dataset={"files": [file]}, verifier=service))]) == 0
    assert "answers: not checked, since a reward service" in capsys.readouterr().out


def test_data_maps_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "d.parquet", [{"prompt": "a", "answer": "1", "b": "x"}]))
    assert main(["data", file, "--column", "labels.topic=b", "--column", "answer=number(answer)"]) == 0
    assert "  labels: topic = b\n" in capsys.readouterr().out


def test_data_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(tmp_path / "d.parquet")]) == 2
    assert "d.parquet: no such file" in capsys.readouterr().err


def test_validate_checks_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    file = run_file(tmp_path)
    (missing,) = problems(file, any_machine=True)
    assert missing.where == "spec.task.dataset"
    assert f"{tmp_path}/data/*.parquet: no such file" in str(missing)
    write(tmp_path / "data/a.parquet", GSM8K)
    assert problems(file, any_machine=True) == []
    said = capsys.readouterr().err
    assert "task.dataset: recognized as GSM8K: prompt = question" in said
    assert "set task.dataset.columns and answerPattern to override" in said
    write(
        tmp_path / "data/b.parquet",
        [{"question": "Who?", "answer": "#### Ada"}, {"question": "", "answer": "#### 1"}],
    )
    (empty,) = problems(file, any_machine=True)
    assert "b.parquet, row 2, question: is empty; drop such rows with filter.where: len(prompt) > 0" in str(
        empty
    )
    write(
        tmp_path / "data/b.parquet",
        [{"question": who, "answer": "#### Ada"} for who in ("Who?", "Who else?")],
    )
    answer, summary = problems(file, any_machine=True)[1:]
    assert answer.where == "spec.task.verifier.name"
    assert "b.parquet, row 2, answer: its answer 'Ada' has no number" in str(answer)
    assert "2 of 22 rows (9.09%) have answers that do not score 1 by number" in str(summary)


def test_data_set_of_an_evaluation_set_is_not_trained_on(tmp_path: Path) -> None:
    """A training file with prompts of a set is no error: they are not trained on."""
    from scalerl_tasks import open_tasks

    (tmp_path / "data").mkdir()
    write(tmp_path / "data/a.parquet", GSM8K)
    write(tmp_path / "held.parquet", GSM8K[:10])
    run = yaml.safe_load(run_file(tmp_path).read_text())
    task = {"dataset": {"files": ["held.parquet"]}, "verifier": {"name": "number"}}
    run["spec"]["evaluation"] = {"sets": [{"name": "held", "task": task}]}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    assert problems(file, any_machine=True) == []
    tasks = open_tasks(load(file).spec)
    train = tasks.tasks[0].train
    assert len(tasks.sets[0].prompts) == 10
    held = {row["question"] for row in GSM8K[:10]}
    assert not held & {train[index].text for index in range(len(train))}


def test_data_set_paths_are_absolute_on_a_cluster(tmp_path: Path) -> None:
    run = yaml.safe_load(run_file(tmp_path).read_text())
    with pytest.raises(SpecError) as caught:
        run_from_object(run)
    assert "spec.task.dataset.files[0]: must be absolute on a cluster" in str(caught.value)
    run["spec"]["task"]["dataset"]["files"] = ["/data/*.parquet"]
    assert inputs.problems(run_from_object(run), thorough=True, machine=False, files=False) == []


OPGRAPH = Path(__file__).parents[3] / "examples/opgraph/run.yaml"


def test_tasks_are_checked_at_submission_without_the_file_of_a_warm_start() -> None:
    """Its file is one of pods; a generated task needs none."""
    run = yaml.safe_load(OPGRAPH.read_text())
    run["spec"]["warmStart"] |= {"jsonl": {"path": "/data/solutions.jsonl"}}

    def found() -> list[str]:
        problems = inputs.problems(run_from_object(run), thorough=True, machine=False, files=False)
        return [str(problem) for problem in problems]

    assert found() == []
    run["spec"]["task"]["plugin"]["parameters"]["contexts"] = {"nowhere": "1"}
    assert any("nowhere" in one for one in found())


def test_compare_knows_a_data_set_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file = run_file(tmp_path)
    write(tmp_path / "data/a.parquet", GSM8K)
    before = _data(load(file))
    write(tmp_path / "data/a.parquet", GSM8K[1:])
    assert _data(load(file)) != before
    assert json.dumps(before)
