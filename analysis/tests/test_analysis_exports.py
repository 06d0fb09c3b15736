"""Files as other tools write them: W&B, TensorBoard, MLflow, TRL and verl."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalerl_analysis import (
    AnalysisProblem,
    Columns,
    CurveFile,
    compare,
    fit_curve,
    fit_report,
    plan,
    plan_json,
    read_curve,
)
from scalerl_analysis.curve_formats import MAX_BYTES

STEPS = list(range(10, 410, 10))
REWARDS = [round(0.2 + 0.4 / (1 + (80 / step) ** 1.9), 6) for step in STEPS]
GRPO = [
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "completions/mean_length",
    "rewards/accuracy_reward/mean",
    "rewards/accuracy_reward/std",
    "reward",
    "reward_std",
    "kl",
]
"""What TRL's GRPOTrainer logs, each with ``eval_`` before it for an evaluation."""


def read(path: Path, x: str | None = None, y: str | None = None, samples: str | None = None) -> CurveFile:
    return read_curve(path, columns=Columns(x, y, samples))


def is_curve(got: CurveFile) -> None:
    assert got.curve.compute.tolist() == STEPS
    np.testing.assert_allclose(got.curve.reward, REWARDS)


def complaint(path: Path, **columns: Any) -> str:
    """Why a file is not read or fitted."""
    with pytest.raises(AnalysisProblem) as raised:
        fit_curve(read_curve(path, Columns(**columns)))
    assert str(raised.value).count("\n") == 0
    return str(raised.value)


def text(path: Path, **columns: Any) -> str:
    return "\n".join(fit_report(fit_curve(read_curve(path, Columns(**columns)))))


# --- W&B -----------------------------------------------------------------------------------------


def chart(path: Path, runs: dict[str, list[str]], axis: str = "Step", offset: int = 0) -> Path:
    """A chart's CSV: the axis, then for each run and metric the value and its band, all in quotes.

    The second run is logged at other steps, so that each row is empty for one of the two.
    """
    header = [axis]
    for run, metrics in runs.items():
        for metric in metrics:
            header += [f"{run} - {metric}{end}" for end in ("", "__MIN", "__MAX")]
    rows = []
    for step, reward in zip(STEPS, REWARDS, strict=True):
        for i in range(len(runs)):
            row: list[object] = [step + offset * i]
            for j, metrics in enumerate(runs.values()):
                row += [reward + 0.01 * k if j == i else "" for k in range(len(metrics)) for _ in range(3)]
            rows.append(row)
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([header, *rows])
    return path


def test_wandb_chart_of_one_run_needs_no_names(tmp_path: Path) -> None:
    path = chart(tmp_path / "wandb_export.csv", {"grpo, lr 1e-6": ["val/acc"]})
    is_curve(read(path))
    shown = text(path)
    assert "up to 400 steps" in shown
    assert "compute is column Step, reward is column grpo, lr 1e-6 - val/acc" in shown


def test_wandb_chart_of_several_runs_needs_a_name(tmp_path: Path) -> None:
    path = chart(tmp_path / "wandb_export.csv", {"a": ["val/acc"], "b": ["val/acc"]}, offset=3)
    said = complaint(path)
    assert "name the columns by `x` and `y`; there are Step, a - val/acc" in said
    assert "2 runs have it; name one: a - val/acc, b - val/acc" in complaint(path, y="val/acc")
    is_curve(read(path, y="a - val/acc"))
    assert read(path, y="b - val/acc").curve.compute[0] == 13
    shown = text(path, y="a - val/acc")
    assert "40 rows skipped, empty in Step or a - val/acc" in shown
    made = fit_curve(read(path, y="a - val/acc"))
    assert made.as_json()["skipped"] == plan_json(plan(made))["skipped"] == 40


def test_metric_selects_its_column_in_two_charts(tmp_path: Path) -> None:
    one = chart(tmp_path / "one.csv", {"a": ["val/acc", "val/len"]})
    two = chart(tmp_path / "two.csv", {"b": ["val/acc"]})
    compared = compare({"one.csv": [one], "two.csv": [two]}, Columns(y="val/acc"))
    assert "no difference" in "\n".join(compared.findings())
    shown = "\n".join(compared.notes())
    assert "one.csv: compute is column Step, reward is column a - val/acc" in shown
    assert "two.csv: compute is column Step, reward is column b - val/acc" in shown
    is_curve(read(one, y="val/acc"))


def test_another_axis_of_a_wandb_chart(tmp_path: Path) -> None:
    path = chart(tmp_path / "w.csv", {"a": ["val/acc"]}, axis="train/global_step")
    is_curve(read(path))
    time = chart(tmp_path / "t.csv", {"a": ["_step", "val/acc"]}, axis="Relative Time (Process)")
    got = read(time)
    assert (got.chosen.x, got.chosen.y, got.unit) == (
        "Relative Time (Process)",
        "a - val/acc",
        "Relative Time (Process)",
    )


def test_history_of_a_wandb_run(tmp_path: Path) -> None:
    """``api.run(…).history().to_csv()``: an index without a name, and empty cells."""
    path = tmp_path / "history.csv"
    rows = ["," + ",".join(["_step", "_runtime", "_timestamp", "train/loss", "val/acc", "tokens_seen"])]
    for i, (step, reward) in enumerate(zip(STEPS, REWARDS, strict=True)):
        rows.append(f"{2 * i},{step - 5},{i}.5,17e8,0.3,,{step * 990}")
        rows.append(f"{2 * i + 1},{step},{i}.7,17e8,,{reward},{step * 1000}")
    path.write_text("\n".join(rows) + "\n")
    said = complaint(path)
    assert "no column compute and no column reward" in said
    assert "name the columns by `x` and `y`" in said
    got = read(path, "_step", "val/acc")
    is_curve(got)
    assert (got.chosen.skipped, got.unit) == (40, "steps")
    assert read(path, "tokens_seen", "val/acc").unit == "tokens_seen"


# --- TensorBoard ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")
def test_tensorboard_download_needs_no_names(tmp_path: Path) -> None:
    """Written by TensorBoard itself, from an event file."""
    from tensorboard import context
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.scalar.scalars_plugin import OutputFormat, ScalarsPlugin
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step, reward in zip(STEPS, REWARDS, strict=True):
            writer.add_scalar("val/acc", reward, step)
    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    events.Reload()
    provider = MultiplexerDataProvider(events, str(tmp_path))
    plugin = ScalarsPlugin(base_plugin.TBContext(data_provider=provider))
    body, kind = plugin.scalars_impl(
        context.RequestContext(), tag="val/acc", run="run", experiment="", output_format=OutputFormat.CSV
    )
    assert kind == "text/csv"
    path = tmp_path / "run-run-tag-val_acc.csv"
    path.write_text(body, newline="")
    got = read(path)
    is_curve(got)
    assert (got.chosen.x, got.chosen.y, got.unit) == ("Step", "Value", "steps")


# --- MLflow --------------------------------------------------------------------------------------


def mlflow(path: Path, runs: list[str], metrics: list[str]) -> Path:
    """As the page of a metric downloads it: one row a value, one run after the other."""
    rows = ["run_id,key,value,step,timestamp"]
    rows += [
        f"{run},{metric},{reward},{step},{1700000000000 + step}"
        for run in runs
        for metric in metrics
        for step, reward in zip(STEPS, REWARDS, strict=True)
    ]
    path.write_text("\n".join(rows))
    return path


def test_mlflow_download(tmp_path: Path) -> None:
    is_curve(read(mlflow(tmp_path / "one.csv", ["0a1b"], ["val/acc"])))
    metrics = mlflow(tmp_path / "metrics.csv", ["0a1b"], ["train/loss", "val/acc", "val/len"])
    said = complaint(metrics)
    assert "3 metrics in one column" in said
    assert "; there are val/acc" in said or ", val/acc" in said
    assert "there are train/loss, val/acc, val/len" in said
    is_curve(read(metrics, y="val/acc"))
    is_curve(read(metrics, x="STEP", y="val/acc"))
    assert "no such column" in complaint(metrics, y="acc")
    runs = mlflow(tmp_path / "runs.csv", ["0a1b", "2c3d"], ["val/acc"])
    assert "2 runs have it; name one: 0a1b - val/acc, 2c3d - val/acc" in complaint(runs, y="val/acc")
    is_curve(read(runs, y="2c3d - val/acc"))
    reread = read(runs, y="2c3d - val/acc", x="timestamp")
    assert reread.curve.compute[0] == 1700000000010


# --- TRL -----------------------------------------------------------------------------------------


def log_history() -> list[dict[str, Any]]:
    """Of ``trainer_state.json``: an entry of training, and one of an evaluation, at the same step."""
    entries: list[dict[str, Any]] = []
    for step, reward in zip(STEPS, REWARDS, strict=True):
        values = {"num_tokens": step * 1000.0, "reward": reward, "rewards/accuracy_reward/mean": reward}
        train = {name: values.get(name, 0.1) for name in GRPO} | {"reward": 0.9}
        evaluation = {f"eval_{name}": values.get(name, 0.1) for name in GRPO if name != "grad_norm"}
        entries.append({"epoch": step / 400, **train, "step": step})
        entries.append({"epoch": step / 400, **evaluation, "eval_runtime": 3.2, "step": step})
    entries.append({"epoch": 1.0, "train_loss": 0.1, "train_runtime": 99.0, "step": STEPS[-1]})
    return entries


@pytest.mark.parametrize("form", ["trainer_state.json", "log_history.json", "log.jsonl", "log.csv"])
def test_trl_log(tmp_path: Path, form: str) -> None:
    path, entries = tmp_path / form, log_history()
    if form == "trainer_state.json":
        state = {"best_metric": None, "global_step": 400, "log_history": entries, "max_steps": 400}
        path.write_text(json.dumps(state, indent=2))
    elif form == "log_history.json":
        path.write_text(json.dumps(entries))
    elif form == "log.jsonl":
        path.write_text("\n".join(map(json.dumps, entries)))
    else:
        names = sorted({name for entry in entries for name in entry})
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(entries)
    said = complaint(path)
    assert "no column compute" in said
    assert "eval_num_tokens" in said
    assert "eval_reward" in said
    got = read(path, "step", "eval_reward")
    is_curve(got)
    assert got.chosen.skipped == 41
    assert read(path, "eval_num_tokens", "eval_rewards/accuracy_reward/mean").curve.now == 400_000


# --- verl ----------------------------------------------------------------------------------------

CORE, AUX = "val-core/openai/gsm8k/reward/mean@1", "val-aux/openai/gsm8k/score/mean@1"


def console(spell: str) -> str:
    """What verl prints: an evaluation every second step, behind Ray's name of the worker."""
    lines = ["(TaskRunner pid=31) Training from scratch", "(TaskRunner pid=31) Initial validation - start: 1"]
    for step, reward in zip(STEPS, REWARDS, strict=True):
        for at, evaluated in ((step - 5, False), (step, True)):
            parts = [
                f"step:{at}",
                "global_seqlen/min:159906",
                "critic/score/mean:0.5",
                "actor/pg_loss:-0.004",
            ]
            if evaluated:
                parts += [f"{AUX}:{spell % (reward / 2)}", f"{CORE}:{spell % reward}"]
            parts += [f"training/global_step:{at}", "perf/total_num_tokens:159906", "perf/throughput:2.1e3"]
            lines.append("\x1b[36m(TaskRunner pid=31)\x1b[0m " + " - ".join(parts))
            lines.append("Training Progress:   1%|          | 1/140 [00:49<1:53:43, 49.09s/it]\rTraining")
    return "\n".join(lines) + " [repeated 2x across cluster]\n"


@pytest.mark.parametrize("spell", ["%s", "np.float64(%s)"])
def test_verls_console(tmp_path: Path, spell: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(console(spell))
    is_curve(read(path, "step", CORE))
    said = complaint(path)
    assert "training/global_step" in said
    assert CORE in said
    assert "training/global_step" in said
    assert "line 3" in complaint(path, x="step", y="critic/score/mean", scale=(0, 0.1))


def test_verls_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "verl.jsonl"
    rows = [{"step": 0, "data": {"critic/score/mean": 0.1, "config": {"lr": 1}, "note": None}}]
    rows += [{"step": s, "data": {CORE: r, "done": True}} for s, r in zip(STEPS, REWARDS, strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    got = read(path, "step", CORE)
    is_curve(got)
    assert got.chosen.skipped == 1


def test_resumed_log_keeps_the_last_pass(tmp_path: Path) -> None:
    """A first attempt got to STEPS[5]; the next one began again and passed it with another reward."""
    path = tmp_path / "train.log"
    lines = console("%s").split("\n")
    again = [line.replace("0.", "0.0") for line in lines if f"step:{STEPS[5]} " in line]
    path.write_text("\n".join([*again, *lines]))
    assert "`resumed`=KeepLast" in complaint(path, x="step", y=CORE)
    is_curve(read_curve(path, columns=Columns("step", CORE, resumed="KeepLast")))
    assert "1 row left out, which a resumed run passed again" in text(
        path, x="step", y=CORE, resumed="KeepLast"
    )
    assert fit_curve(read_curve(path, Columns("step", CORE, resumed="KeepLast"))).as_json()["replaced"] == 1


@pytest.mark.parametrize("form", ["lists", "objects", "nested"])
def test_json_of_columns_and_nested_entries(tmp_path: Path, form: str) -> None:
    path = tmp_path / "log.json"
    steps, rewards = [float(s) for s in STEPS], list(REWARDS)
    by_row = [dict(enumerate(column)) for column in (steps, rewards)]
    whole = {
        "lists": json.dumps({"step": steps, "acc": rewards}),
        "objects": json.dumps(dict(zip(("step", "acc"), by_row, strict=True))),
        "nested": "\n".join(
            json.dumps({"step": s, "eval": {"acc": r}}) for s, r in zip(steps, rewards, strict=True)
        ),
    }
    path.write_text(whole[form])
    is_curve(read(path, "step", "eval.acc" if form == "nested" else "acc"))


# --- names ---------------------------------------------------------------------------------------


def test_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    rows = "".join(f'{{"step": {i}, "acc": {0.2 + 0.01 * i}}}\n' for i in range(1, 13))
    file.write_text(rows + '{"step": 13, "ac')
    assert len(read_curve(file, columns=Columns("step", "acc")).curve) == 12
    assert "1 row skipped" in text(file, x="step", y="acc")
    file.write_text(rows + '{"step": 13, "ac\n')
    assert "line 13: not JSON" in complaint(file, x="step", y="acc")


def test_named_columns_and_samples(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    rows = [f"{s};{r};{s // 2 + 7};1,5" for s, r in zip(STEPS, REWARDS, strict=True)]
    path.write_text("\ufeffGPU hours;Pass@1;n;x,y\r\n" + "\r\n".join(rows))
    got = read(path, "gpu hours", "Pass@1", "n")
    is_curve(got)
    assert got.curve.samples is not None
    assert got.curve.samples[0] == 12
    one = read(path, "GPU hours", "Pass@1", "500").curve.samples
    assert one is not None
    assert set(one) == {500}
    path.write_text(path.read_text().replace(";", "\t"))
    is_curve(read(path, "GPU hours", "Pass@1", "n"))
    assert "no column 'm'" in complaint(path, x="GPU hours", y="Pass@1", samples="m")
    said = complaint(path, x="hours", y="Pass@1")
    assert "`x` hours: no such column; name the columns by `x` and `y`; there are GPU hours" in said
    assert "both name the column" in complaint(path, x="Pass@1", y="pass@1")


def test_unused_column_may_appear_twice(tmp_path: Path) -> None:
    """W&B names the columns of two runs of one name alike."""
    path = tmp_path / "c.csv"
    rows = [f"{s},{r},1,2" for s, r in zip(STEPS, REWARDS, strict=True)]
    path.write_text("step,acc,loss,loss\n" + "\n".join(rows))
    is_curve(read(path, "step", "acc"))
    assert "column loss occurs 2 times" in complaint(path, x="step", y="loss")


def test_many_columns_are_listed_in_part(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{i}" for i in range(500)) + "\n" + ",".join(["1"] * 500) + "\n")
    said = complaint(path)
    assert "c29 and 470 more" in said
    assert "c31" not in said.split("there are")[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": [1, 2', "no column compute"),
        ("[1, 2]", "not a list of log entries"),
        ('{"step": 1}\n{"step": \n', "line 2: not JSON"),
        ('{"step": 1}\n[2]\n', "line 2: not a JSON object"),
        ('{"log_history": []}', "no log entry"),
        ('{"step": 1, "acc": "much"}', "no column compute"),
    ],
)
def test_logs_that_cannot_be_read(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(content)
    assert words in complaint(path)


def test_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert "larger than 256 MiB" in complaint(path)


PIECES = [
    *',,;\t"\n\n\r{}[]:',
    *(
        " - ",
        "step:1 - a:2",
        '{"step": 1}',
        '{"log_history": [',
        '"a\nb"',
        "compute,reward\n",
        "Step,a - b\n",
    ),
    *(
        "run_id,key,value,step\n",
        "1,2\n",
        "2,.5\n",
        "0",
        "-1",
        "nan",
        "1e999",
        "x",
        "__MIN",
        "\x00",
        "\u2028",
    ),
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), y=st.sampled_from([None, "reward", "b", "x"]))
def test_any_file_is_read_or_refused(tmp_path: Path, pieces: list[str], y: str | None) -> None:
    path, refusal = tmp_path / "any", ""
    path.write_text("".join(pieces))
    try:
        assert np.isfinite(read(path, y=y).curve.reward).all()
    except AnalysisProblem as problem:
        refusal = str(problem)
    assert refusal.startswith(str(path)) or not refusal
    assert "\n" not in refusal
