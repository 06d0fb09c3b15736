"""Experiment trackers, with their own libraries and readers: each step of metrics.jsonl and each evaluation of curve.csv
once, whatever ends their process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from coordinator_client import make_group, run_text
from free_port import free_port
from wandb_stand_in import KEY, wandb_stand_in

from scalerl_api import endpoints, wire
from scalerl_api.curve import curve_figures
from scalerl_api.load import SpecError, load_run, parse_run
from scalerl_api.paths import RunPaths
from scalerl_api.trackers import TrackersSpec
from scalerl_coordinator import main
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.recorded_rows import table_of
from scalerl_coordinator.tracking import supervisor
from scalerl_coordinator.tracking.sink import flat, hyperparameters, tracker_id
from scalerl_coordinator.tracking.supervisor import Trackers, missing_package
from scalerl_coordinator.tracking.tail import (
    SAMPLE_COLUMNS,
    SAMPLE_ROWS,
    CurveTail,
    MetricsTail,
    sample_of_evaluation,
)
from scalerl_coordinator.tracking.tracker_process import follow, open_sink
from scalerl_coordinator.tracking.wandb_sink import WandbSink

Rows = dict[int, dict[str, float]]


def row(step: int, loss: float | None = None) -> dict[str, float]:
    return {"step": step, "loss": 1 / (step + 3) if loss is None else loss, "work_tokens": 1000 * step + 7}


def rows(steps: int) -> Rows:
    return {step: row(step) for step in range(steps)}


LATE = 50
"""Its evaluation ends after those of later versions."""


def device_seconds(version: int) -> float:
    """When the evaluation of a version ended."""
    return 12.0 * version + (9000.0 if version == LATE else 0.0)


def point(version: int, reward: float | None = None) -> wire.EvaluationPoint:
    return wire.EvaluationPoint(
        version=version,
        work_tokens=1000 * version,
        reward=1 - 1 / (version + 2) if reward is None else reward,
        standard_error=0.01,
        samples=400,
        prompts=100,
        set_digest="12",  # looks like a figure, and is none
        mixed_versions=version % 20 == 10,
        truncated_fraction=0.125,
        mean_tokens=17.5,
        wall_seconds=3.0 * version,
        device_seconds=device_seconds(version),
        given_up_prompts=2,
    )


def figures(version: int, reward: float | None = None) -> dict[str, float]:
    """What trackers are to show of :func:`point`."""
    return {
        "held_out/compute": 1000 * version,
        "held_out/reward": 1 - 1 / (version + 2) if reward is None else reward,
        "held_out/samples": 400,
        "held_out/standard_error": 0.01,
        "held_out/version": version,
        "held_out/wall_seconds": 3 * version,
        "held_out/device_seconds": device_seconds(version),
        "held_out/mean_tokens": 17.5,
        "held_out/truncated_fraction": 0.125,
        "held_out/mixed_versions": int(version % 20 == 10),
        "held_out/prompts": 100,
        "held_out/given_up_prompts": 2,
    }


def write_curve(paths: RunPaths, versions: Iterable[int], **reward: float) -> None:
    RunFiles(paths).write_curves([point(version, **reward) for version in sorted(versions)], 0)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    found.token.write_text("token")
    return found


def specify(paths: RunPaths, **trackers: object) -> None:
    paths.run_file.write_text(run_text(trackers=trackers))


def start(paths: RunPaths, name: str, **variables: str) -> subprocess.Popen[bytes]:
    """The process of a tracker, as the supervisor starts it."""
    environ = {
        **os.environ,
        "SCALERL_DIR": str(paths.root),
        "SCALERL_NAME": "coordinator-0",
        "SCALERL_COORDINATOR_URL": "http://127.0.0.1:1",
        "SCALERL_TOKEN_FILE": str(paths.token),
        **variables,
    }
    command = [sys.executable, "-m", "scalerl_coordinator.tracking.tracker_process", name]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )


def finish(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Ask it to end; what it reported last."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    last: dict[str, Any] = json.loads(out.splitlines()[-1])
    return last


def in_process(paths: RunPaths, name: str, wait: Callable[[float], bool]) -> list[int]:
    """Follow the file in this process; the steps that were reported."""
    told: list[int] = []
    sink = open_sink(name, parse_run(paths.run_file.read_text(), "test"), paths)
    follow(paths, sink, told.append, wait)
    return told


OVER_COMPUTE = "held_out/reward_over_device_seconds"


def tensorboard_scalars(directory: Path) -> Rows:
    """What training has, by step."""
    found = tensorboard_events(directory)
    trained = {s: {n: v for n, v in row.items() if "/" not in n} for s, row in found.items()}
    return {step: row for step, row in trained.items() if row}


def tensorboard_curve(directory: Path) -> tuple[Rows, list[tuple[int, float]]]:
    """Evaluations by version; the reward over compute."""
    found = tensorboard_events(directory)
    curve = {v: {n: x for n, x in r.items() if "/" in n and n != OVER_COMPUTE} for v, r in found.items()}
    over = sorted((compute, row[OVER_COMPUTE]) for compute, row in found.items() if OVER_COMPUTE in row)
    return {version: row for version, row in curve.items() if row}, over


def tensorboard_events(directory: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    found: Rows = {}
    for tag in read.Tags()["scalars"]:
        steps = [event.step for event in read.Scalars(tag)]
        assert steps == sorted(steps), "TensorBoard drops what has a higher step than the next"
        assert tag == OVER_COMPUTE or len(steps) == len(set(steps)), "twice"
        for event in read.Scalars(tag):
            found.setdefault(event.step, {})[tag] = event.value
    return found


def wandb_records(directory: Path) -> list[dict[str, Any]]:
    """What W&B's own reader finds in the one offline run there."""
    (run,) = directory.glob("offline-run-*")
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(run)]
    environ = {**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_MODE": "offline"}
    read = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=120)
    return [json.loads(line) for line in read.stdout.splitlines()]


def wandb_history(directory: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Rows of training and of evaluations, as they lie there."""
    items = [r["history"]["item"] for r in wandb_records(directory) if r["type"] == "history"]
    numbers = [item["_step"] for item in items]
    assert numbers == sorted(set(numbers)), (
        "the server drops a row whose number is not higher than all before"
    )
    found = [{name: value for name, value in item.items() if name[0] != "_"} for item in items]
    return [r for r in found if "step" in r], [r for r in found if "held_out/version" in r]


def mlflow_run(uri: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The one run of the experiment, and the history of each of its metrics."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("scalerl").experiment_id])
    names = run.data.metrics
    return run, {n: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, n)] for n in names}


def metrics_in(database: Path) -> int:
    """How many figures MLflow's database has."""
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as found:
            return int(found.execute("select count(*) from metrics").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


# --- the file ------------------------------------------------------------------------------------------------


def test_metrics_tail_reads_each_step_once(paths: RunPaths) -> None:
    files, tail = RunFiles(paths), MetricsTail(paths.metrics)
    assert tail.read() == []
    files.write_rows(rows(5), 5, whole=True)
    assert tail.read(3) == [(s, row(s)) for s in range(3)]
    assert tail.read() == [(s, row(s)) for s in (3, 4)]
    with paths.metrics.open("a") as file:
        file.write('{"step": 5, "lo')
    assert tail.read() == []
    files.write_rows(rows(6), 6, whole=True)
    assert tail.read() == [(5, row(5))], "a file that was put right: only what is new"
    files.write_rows(rows(4), 4, whole=True)
    files.write_rows(rows(4) | {4: row(4, 9.0), 5: row(5), 6: row(6)}, 7)
    assert tail.read() is None
    tail.rewind()
    assert [step for step, _ in tail.read() or ()] == list(range(7))


def test_metrics_tail_detects_return_after_growth(paths: RunPaths) -> None:
    files, tail = RunFiles(paths), MetricsTail(paths.metrics)
    files.write_rows(rows(5), 5, whole=True)
    tail.read()
    files.write_rows(rows(3), 3, whole=True)
    files.write_rows(rows(3) | {s: row(s, 0.5) for s in range(3, 9)}, 9)
    assert tail.read() is None


@pytest.mark.parametrize("again", [5, 9], ids=["as long", "longer"])
def test_metrics_tail_detects_reused_inode(paths: RunPaths, again: int) -> None:
    tail = MetricsTail(paths.metrics)

    def write(lines: Rows) -> None:
        """In place: to have a file system use an inode number again takes luck."""
        paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))

    write(rows(5))
    inode = paths.metrics.stat().st_ino
    assert tail.read() == [(s, row(s)) for s in range(5)]
    write(rows(3) | {s: row(s, 0.0) for s in range(3, again)})
    assert paths.metrics.stat().st_ino == inode
    assert tail.read() is None
    tail.rewind()
    assert [line["loss"] for _, line in tail.read() or ()][3:] == [0.0] * (again - 3)
    write(rows(3) | {s: row(s, 0.0) for s in range(3, again + 1)})
    assert tail.read() == [(again, row(again, 0.0))], "what was read is still there"


def test_curve_tail_reads_each_evaluation_once(paths: RunPaths) -> None:
    tail = CurveTail(paths.curve)
    assert tail.read() == []
    write_curve(paths, [0, 20])
    assert tail.read() == [(v, figures(v)) for v in (0, 20)]
    write_curve(paths, [0, 20, 40])
    assert tail.read() == [(40, figures(40))]
    assert tail.read() == []
    for versions, reward in (([0, 20, 30, 40], None), ([0, 20], None), ([0, 20, 40, 60], 0.5)):
        write_curve(paths, versions) if reward is None else write_curve(paths, versions, reward=reward)
        assert tail.read() is None
        assert tail.read() is None, "until it begins again"
        tail.rewind()
        assert tail.read() == [(v, figures(v, reward)) for v in versions]
        tail.rewind()
        write_curve(paths, [0, 20, 40])
        tail.read()


@pytest.mark.parametrize("clears_on_open", [False, True])
def test_follow_writes_new_rows_once(paths: RunPaths, clears_on_open: bool) -> None:
    """As long as the process lives, whichever kind of sink it has."""
    files, sink = RunFiles(paths), Lists(clears_on_open)
    files.write_rows(rows(300), 300, whole=True)
    write_curve(paths, [0, 100, 200])
    again = rows(290) | {s: row(s, 7.0) for s in range(290, 302)}
    stages = iter(
        [
            lambda: write_curve(paths, [0, LATE, 100, 200]),
            lambda: (files.write_rows(rows(290), 290, whole=True), files.write_rows(again, 302)),
            lambda: write_curve(paths, [0, LATE, 100, 200, 300]),
        ]
    )

    def wait(seconds: float) -> bool:
        stage = next(stages, None)
        if stage is not None:
            stage()
        return stage is None

    follow(paths, sink, lambda step: None, wait)
    assert [step for step, _ in sink.steps] == list(range(302))
    assert [row["loss"] for _, row in sink.steps][288:] == [
        *(
            (row(s)["loss"] for s in (288, 289))
            if clears_on_open
            else (row(s)["loss"] for s in range(288, 300))
        ),
        *[7.0] * (12 if clears_on_open else 2),
    ]
    order = [0, LATE, 100, 200, 300] if clears_on_open else [0, 100, 200, LATE, 300]
    assert sink.points == [(version, figures(version)) for version in order]
    assert (sink.opened, sink.closed) == ((3, 3) if clears_on_open else (1, 1))


class Lists:
    """A sink that keeps what it is given."""

    def __init__(self, clears_on_open: bool) -> None:
        self.clears_on_open, self.opened, self.closed = clears_on_open, 0, 0

    def open(self) -> tuple[int, set[int]]:
        self.steps, self.points, self.samples = list[Any](), list[Any](), dict[int, Any]()
        self.opened += 1
        return 0, set()

    def write(self, steps: Any, points: Any, samples: Any) -> None:
        self.steps += steps
        self.points += points
        self.samples |= samples

    def close(self) -> None:
        self.closed += 1


def record_evaluation(paths: RunPaths, version: int, prompts: int = 40) -> None:
    """Two completions for each prompt, with text that is hostile or long."""
    completions = [
        {
            **dict.fromkeys(SAMPLE_COLUMNS),
            "step": version,
            "split": "held_out",
            "task": "main",
            "prompt_index": prompts - 1 - index,
            "sample": sample,
            "prompt": "x" * 5000,
            "completion": f"<b>{index}\0\u202e",
            "reward": sample / 2,
            "tokens": 3,
        }
        for index in range(prompts)
        for sample in (0, 1)
    ]
    paths.rollouts.mkdir(exist_ok=True)
    pq.write_table(
        table_of(completions), paths.rollouts / f"held_out-{version:08d}-{version:08d}-00000001.parquet"
    )


def test_sample_of_an_evaluation_is_bounded_and_spread(paths: RunPaths) -> None:
    assert sample_of_evaluation(paths.rollouts, 0) == []
    record_evaluation(paths, 0, prompts=1000)
    (paths.rollouts / "held_out-00000001-00000001-00000002.parquet").write_bytes(b"PAR1")
    (paths.rollouts / "held_out-worst.parquet").write_bytes(b"a reader's own")
    assert sample_of_evaluation(paths.rollouts, 1) == sample_of_evaluation(paths.rollouts, 2) == []
    rows = sample_of_evaluation(paths.rollouts, 0)
    assert len(rows) == SAMPLE_ROWS
    assert set(rows[0]) == set(SAMPLE_COLUMNS)
    # The prompts in their order, the first one first.
    assert [row["completion"][3:6] for row in (rows[0], rows[1], rows[-1])] == ["999", "984", "15\0"]
    assert len(rows[0]["prompt"]) == 4000


def test_sample_while_files_are_merged_has_each_row_once(paths: RunPaths) -> None:
    record_evaluation(paths, 0, prompts=4)
    once = sample_of_evaluation(paths.rollouts, 0)
    (source,) = paths.rollouts.iterdir()
    merged = source.with_name("held_out-00000000-00000020-00000009.parquet")
    pq.write_table(pq.read_table(source).replace_schema_metadata({"replaces": source.name}), merged)
    assert sample_of_evaluation(paths.rollouts, 0) == once
    source.unlink()
    assert sample_of_evaluation(paths.rollouts, 0) == once


def test_follow_waits_for_the_rollouts_of_the_newest_evaluation_alone(paths: RunPaths) -> None:
    sink, waits = Lists(False), [0]
    paths.rollouts.mkdir()
    write_curve(paths, [0, 20, 40])
    seen = []

    def wait(seconds: float) -> bool:
        seen.append([version for version, _ in sink.points])
        waits[0] += 1
        if waits[0] == 2:
            record_evaluation(paths, 40)
        if waits[0] == 4:
            write_curve(paths, [0, 20, 40, 60, 80])  # whose rollouts are lost
        return waits[0] == 20

    follow(paths, sink, lambda step: None, wait)
    assert seen[:4] == [[0, 20], [0, 20], [0, 20, 40], [0, 20, 40]]
    assert seen[4:9] == [[0, 20, 40, 60]] * 5
    assert seen[-1] == [0, 20, 40, 60, 80]
    assert {version: len(rows) for version, rows in sink.samples.items()} == {
        0: 0,
        20: 0,
        40: 64,
        60: 0,
        80: 0,
    }


def test_wandb_offline_has_a_table_of_rollouts(paths: RunPaths) -> None:
    specify(paths, wandb={"project": "p", "offline": True})
    write_curve(paths, [0, 20])
    record_evaluation(paths, 20)
    finish(start(paths, "wandb"))
    _, points = wandb_history(paths.wandb)
    assert [any(name.startswith("held_out/rollouts") for name in row) for row in points] == [False, True]
    (file,) = paths.wandb.glob("offline-run-*/files/media/table/held_out/rollouts*.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(SAMPLE_COLUMNS)
    assert len(table["data"]) == SAMPLE_ROWS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_has_a_table_of_rollouts(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(paths.root)  # where MLflow keeps artifacts of a database file
    uri = f"sqlite:///{paths.root}/mlflow.db"
    specify(paths, mlflow={"uri": uri})
    write_curve(paths, [0, 20])
    record_evaluation(paths, 20)
    for _ in range(2):
        finish(start(paths, "mlflow"))
    run, _ = mlflow_run(uri)
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": "rollouts/version-00000020.json", "type": "table"}
    ]
    table = json.loads(Path(run.info.artifact_uri, "rollouts/version-00000020.json").read_text())
    assert table["columns"] == list(SAMPLE_COLUMNS)
    assert len(table["data"]) == SAMPLE_ROWS


@pytest.mark.parametrize(
    "text",
    [
        "version,reward\n1\n",
        "version,reward\n1,0.5,2\n",
        'version,reward\n1,"0.5\n',
        "version,reward\n1,high\n",
    ],
)
def test_curve_tail_refuses_other_files(text: str) -> None:
    with pytest.raises(ValueError, match=r"curve|high"):
        curve_figures(text)


def test_curve_tail_reads_curve_of_few_columns(paths: RunPaths) -> None:
    paths.curve.write_text("compute,reward,version,eval_version\n1000,0.5,10,e1\n")
    expected = {"held_out/compute": 1000, "held_out/reward": 0.5, "held_out/version": 10}
    assert CurveTail(paths.curve).read() == [(10, expected)]


# --- TensorBoard ---------------------------------------------------------------------------------------------


def as_float32(found: Rows) -> Rows:
    import numpy as np

    return {s: {name: float(np.float32(value)) for name, value in r.items()} for s, r in found.items()}


def test_tensorboard_equals_metrics_after_return(paths: RunPaths) -> None:
    shared = paths.root / "shared"
    specify(paths, tensorBoard={"directory": str(shared)})
    mine = shared / "test"
    mine.mkdir(parents=True)
    (mine / "events.out.tfevents.1.other").write_text("")
    files = RunFiles(paths)
    files.write_rows(rows(600), 600, whole=True)
    write_curve(paths, range(0, 600, 100))
    lines = rows(590) | {s: row(s, 0.25) for s in range(590, 602)}
    stages = iter(
        [
            lambda: files.write_rows(rows(590), 590, whole=True),
            lambda: files.write_rows(lines, 602),
            lambda: write_curve(paths, range(0, 601, 100)),
            lambda: write_curve(paths, [LATE, *range(0, 601, 100)]),
        ]
    )

    def wait(seconds: float) -> bool:
        stage = next(stages, None)
        if stage is not None:
            stage()
        return stage is None

    assert in_process(paths, "tensorBoard", wait) == [599, 589, 601]
    assert tensorboard_scalars(mine) == as_float32(lines)
    measured = {v: figures(v) for v in sorted([LATE, *range(0, 601, 100)])}
    curve, over_compute = tensorboard_curve(mine)
    assert curve == as_float32(measured)
    ended = sorted(measured, key=device_seconds)
    assert over_compute == [(device_seconds(v), as_float32(measured)[v]["held_out/reward"]) for v in ended]
    assert len(list(mine.iterdir())) == 2, "its own file of before is gone, others' are left alone"


def test_tensorboard_random_kills_write_each_step_once(paths: RunPaths) -> None:
    specify(paths, tensorBoard={})
    files, drawn = RunFiles(paths), random.Random(7)
    files.write_rows(rows(2000), 2000, whole=True)
    for kill in range(4):
        process = writing(paths)
        time.sleep(drawn.uniform(0, 0.3))
        process.kill()
        process.communicate()
        files.write_rows(rows(2001 + kill), 2001 + kill, whole=True)
        write_curve(paths, [*range(0, 2001, 100), *range(1950 - kill, 1950)])
    process = writing(paths)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert peak is not None
    assert int(peak[1]) < 300_000, "torch is installed here, and not loaded"
    assert finish(process)["step"] == 2003
    assert tensorboard_scalars(paths.tensorboard) == as_float32(rows(2004))
    measured = [*range(0, 2001, 100), *range(1947, 1950)]
    assert tensorboard_curve(paths.tensorboard)[0] == as_float32({v: figures(v) for v in measured})


def test_tracker_accepts_spec_of_earlier_release(paths: RunPaths) -> None:
    """On a cluster, where its operator keeps the spec."""
    RunFiles(paths).write_rows(rows(3), 3, whole=True)
    given = paths.root / "given.yaml"
    given.write_text(run_text(trackers={"tensorBoard": {}}, budget={"maxSteps": -1}))
    with pytest.raises(SpecError):
        load_run(given)
    assert finish(start(paths, "tensorBoard", SCALERL_RUN_FILE=str(given)))["step"] == 2
    assert tensorboard_scalars(paths.tensorboard) == as_float32(rows(3))


def writing(paths: RunPaths) -> subprocess.Popen[bytes]:
    """TensorBoard's process, once it has a file of its own."""
    before = set(paths.tensorboard.glob("*"))
    process = start(paths, "tensorBoard")
    wait_for(lambda: set(paths.tensorboard.glob("*")) - before, process)
    return process


def wait_for(found: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 120
    while not (value := found()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


# --- Weights & Biases ----------------------------------------------------------------------------------------


def test_wandb_offline_kill_writes_each_step_once(paths: RunPaths) -> None:
    specify(paths, wandb={"offline": True, "project": "p", "entity": "team"})
    files = RunFiles(paths)
    files.write_rows(rows(3000), 3000, whole=True)
    write_curve(paths, range(0, 3000, 100))
    process = start(paths, "wandb")
    wait_for(lambda: list(paths.wandb.glob("offline-run-*/*.wandb")), process)
    time.sleep(0.2)
    process.kill()
    process.communicate()
    files.write_rows(rows(3002), 3002, whole=True)
    write_curve(paths, range(0, 3001, 100))
    process = start(paths, "wandb")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["step"] == 3001
    write_curve(paths, [*range(0, 3001, 100), 1850])
    process.communicate(timeout=120)
    assert process.returncode == 0
    trained, measured = wandb_history(paths.wandb)
    assert trained == list(rows(3002).values())
    assert measured == [figures(v) for v in sorted([*range(0, 3001, 100), 1850])]
    records = wandb_records(paths.wandb)
    axes = {r["metric"]["name"]: r["metric"].get("step_metric") for r in records if r["type"] == "metric"}
    assert axes.pop("loss") == axes.pop("work_tokens") == "step"
    assert axes.keys() == figures(0).keys() - {"held_out/version"}
    assert set(axes.values()) == {"held_out/version"}
    (began,) = (r["run"] for r in records if r["type"] == "run")
    assert (began["project"], began["entity"], began["run_id"]) == ("p", "team", tracker_id(paths))
    config = next(
        r["config"]["update"]
        for r in records
        if r["type"] == "config" and "recipe" in r["config"].get("update", {})
    )
    assert config["recipe"]["loss"]["cispo"] == {"ratioCap": "5"}


def test_wandb_online_kill_sends_each_row_once(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own client, killed; what answers it only keeps what it is sent."""
    specify(paths, wandb={"project": "p"})
    files = RunFiles(paths)
    files.write_rows(rows(600), 600, whole=True)
    write_curve(paths, range(0, 600, 100))
    with wandb_stand_in() as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "1")  # in place of 15 seconds
        process = start(paths, "wandb")
        wait_for(lambda: server.history, process)
        process.kill()  # W&B's own process, in a session of its own, notices within seconds and ends
        process.communicate()
        files.write_rows(rows(603), 603, whole=True)
        late = range(270, 290)
        write_curve(paths, [*range(0, 601, 100), *late])
        assert finish(start(paths, "wandb"))["step"] == 602
        write_curve(paths, [*range(0, 601, 100), *late, LATE])
        assert finish(start(paths, "wandb"))["step"] == 602
        files.write_rows(rows(604), 604, whole=True)
        assert finish(start(paths, "wandb"))["step"] == 603
        history, refused = server.history, server.refused
    assert refused == []
    numbers = [item["_step"] for item in history]
    assert numbers == sorted(set(numbers))
    sent = [{name: value for name, value in item.items() if name[0] != "_"} for item in history]
    assert [r for r in sent if "step" in r] == list(rows(604).values())
    measured = sorted((r for r in sent if "step" not in r), key=lambda r: r["held_out/version"])
    assert measured == [figures(v) for v in sorted([*range(0, 601, 100), *late, LATE])]


def test_wandb_without_server_reports_reason(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    specify(paths, wandb={})
    run = parse_run(paths.run_file.read_text(), "test")
    sink = WandbSink(run, paths, run.spec.trackers.wandb, init_seconds=2.0)
    try:
        with pytest.raises(Exception, match="connection refused"):
            follow(paths, sink, lambda step: None, lambda seconds: True)
    finally:
        import wandb

        wandb.teardown()


# --- MLflow --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_kill_writes_each_step_once(paths: RunPaths) -> None:
    uri = f"sqlite:///{paths.root}/mlflow.db"
    specify(paths, mlflow={"uri": uri})
    files = RunFiles(paths)
    files.write_rows(rows(900), 900, whole=True)
    write_curve(paths, range(0, 900, 100))
    process = start(paths, "mlflow")
    wait_for(lambda: metrics_in(paths.root / "mlflow.db"), process)
    process.kill()
    process.communicate()
    # A step back: what the tracker has of the steps that are trained again keeps its first figures.
    files.write_rows(rows(890), 890, whole=True)
    files.write_rows(rows(890) | {s: row(s, 7.0) for s in range(890, 903)}, 903)
    measured = [*range(0, 901, 100), 850]
    write_curve(paths, measured)
    paths.run_file.write_text(
        run_text(trackers={"mlflow": {"uri": uri}}, evaluation={"everySteps": 3, "samplesPerPrompt": 2})
    )
    assert finish(start(paths, "mlflow"))["step"] == 902
    run, histories = mlflow_run(uri)
    for name in figures(0):
        history = histories.pop(name)
        assert sorted(history) == [(v, figures(v)[name]) for v in sorted(measured)], name
    assert set(histories) == {"step", "loss", "work_tokens"}
    assert all([step for step, _ in history] == list(range(903)) for history in histories.values())
    losses = [loss for _, loss in histories["loss"]]
    assert losses[:890] == [row(s)["loss"] for s in range(890)]
    assert all(losses[s] in (row(s)["loss"], 7.0) for s in range(890, 900))
    assert losses[900:] == [7.0, 7.0, 7.0]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "test"
    assert run.data.params["recipe.loss.cispo.ratioCap"] == "5"
    assert run.data.params["evaluation.everySteps"] == "2"
    assert run.data.tags["spec.evaluation.everySteps"] == "3"
    assert run.data.tags["scalerl.run"] == tracker_id(paths)


# --- in the coordinator --------------------------------------------------------------------------------------


def test_hyperparameters_exclude_secrets() -> None:
    template = {"env": [{"name": "WANDB_API_KEY", "value": "secret"}]}
    run = parse_run(run_text(podTemplate=template, coordinator={"podTemplate": template}), "test")
    found = dict(flat(hyperparameters(run)))
    assert found["recipe.loss.cispo.ratioCap"] == "5"
    assert "secret" not in json.dumps(found)


def test_missing_tracker_package_refuses_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TrackersSpec.model_validate({"wandb": {}})
    main._check_trackers(spec)
    monkeypatch.setitem(supervisor._PACKAGES, "wandb", "scalerl_no_such_package")
    with pytest.raises(
        main.TrackerMissing, match=r"spec\.trackers\.wandb: the Python package .* is missing: pip"
    ):
        main._check_trackers(spec)


def test_missing_package_ignores_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scalerl_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(supervisor._PACKAGES, "wandb", "scalerl_folder")
    assert "is missing" in str(missing_package("wandb"))


async def test_tracker_failure_is_logged_once_and_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(supervisor._PACKAGES, "wandb", "scalerl_no_such_package")
    trackers = Trackers(TrackersSpec.model_validate({"wandb": {}}), backoff_seconds=(0.01,))
    trackers.start()
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(120):
            while trackers.status()[0].failures < 5:  # noqa: ASYNC110 - a count, not an event
                await asyncio.sleep(0.01)
        await trackers.close()
    assert "scalerl_no_such_package is missing" in trackers.status()[0].problem
    assert len(caplog.records) == 1


async def test_unreachable_tracker_does_not_stop_training(coordinator, client) -> None:
    """MLflow's server is away, and the coordinator is killed; TensorBoard gets every step and evaluation, also the last ones
    before the end."""
    uri = f"http://127.0.0.1:{free_port()}"
    trackers = {"tensorBoard": {}, "mlflow": {"uri": uri}}
    coordinator.paths.run_file.write_text(run_text(trackers=trackers, budget={"maxSteps": 100}))
    coordinator.start()
    stands: dict[str, wire.Tracker] = {}
    async with asyncio.timeout(120):
        while not (stands and stands["mlflow"].failures):
            await asyncio.sleep(0.1)
            stands = {tracker.name: tracker for tracker in (await client.status()).trackers}

    async def generate(version: int) -> None:
        """All that there is to generate with these weights: every second version is evaluated."""
        member = await client.register("g", coordinator.digest)
        await client.publish("t", version)
        await client.heartbeat(member, version)
        leases = (await client.lease(member, version, 64)).leases
        await client.push(member, [make_group(lease) for lease in leases])

    await client.hello("t")
    await generate(0)
    assert (await client.next("t", 0)).action is wire.NextAction.TRAIN
    await client.report("t", 0, {"loss": 0.5})
    assert stands["tensorBoard"].problem == ""
    assert uri.removeprefix("http://127.0.0.1:") in stands["mlflow"].problem
    async with client.session.get(coordinator.url + endpoints.METRICS) as response:
        text = await response.text()
    assert 'scalerl_coordinator_tracker_failures_total{tracker="tensorBoard"} 0.0' in text
    assert 'scalerl_coordinator_tracker_failures_total{tracker="mlflow"} 0.0' not in text
    coordinator.kill()
    coordinator.paths.run_file.write_text(run_text(trackers={"tensorBoard": {}}, budget={"maxSteps": 100}))
    coordinator.start()
    async with asyncio.timeout(120):
        while (await client.status()).trackers[0].step < 0:  # noqa: ASYNC110 - until it has what was there
            await asyncio.sleep(0.1)
    await client.report("t", 1, {"loss": 0.25})
    await generate(2)
    assert await asyncio.to_thread(coordinator.terminate) == 0
    lines = [json.loads(line) for line in coordinator.paths.metrics.read_text().splitlines()]
    assert [line["loss"] for line in lines] == [0.5, 0.25]
    assert tensorboard_scalars(coordinator.paths.tensorboard) == as_float32(
        {line["step"]: line for line in lines}
    )
    evaluations = {int(row["version"]): row for row in curve_figures(coordinator.paths.curve.read_text())}
    assert list(evaluations) == [0, 2]
    assert tensorboard_curve(coordinator.paths.tensorboard)[0] == as_float32(
        {version: {f"held_out/{n}": v for n, v in row.items()} for version, row in evaluations.items()}
    )
    assert coordinator.log().count("tracker mlflow failed") == 1, coordinator.log()


def test_trackers_guide_examples_are_valid() -> None:
    guide = Path(__file__).parents[2] / "docs" / "trackers.md"
    examples = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.S)]
    assert len(examples) == 2
    for example in examples:
        assert parse_run(run_text(**example), "guide").spec.trackers.asked_for
