"""Weights & Biases, with its own library and reader: each step of metrics.jsonl and each evaluation of curve.csv once,
whatever ends its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_processes import wait_until
from tracker_runs import LATE, figures, finish, record_evaluation, rows, specify, start, wait_for, write_curve
from wandb_stand_in import KEY, wandb_stand_in

from scalerl_api.load import parse_run
from scalerl_api.paths import RunPaths
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.tracking.sink import tracker_id
from scalerl_coordinator.tracking.tail import SAMPLE_COLUMNS, SAMPLE_ROWS
from scalerl_coordinator.tracking.tracker_process import follow
from scalerl_coordinator.tracking.wandb_sink import WandbSink
from scalerl_processes.process_table import marked


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


def kill(process: subprocess.Popen[bytes], paths: RunPaths) -> None:
    """W&B's own process, in a session of its own, notices within seconds and ends."""
    process.kill()
    process.communicate()
    wait_until(lambda: not marked("SCALERL_DIR", str(paths.root)))


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


def test_wandb_offline_kill_writes_each_step_once(paths: RunPaths) -> None:
    specify(paths, wandb={"offline": True, "project": "p", "entity": "team"})
    files = RunFiles(paths)
    files.write_rows(rows(3000), 3000, whole=True)
    write_curve(paths, range(0, 3000, 100))
    process = start(paths, "wandb")
    wait_for(lambda: list(paths.wandb.glob("offline-run-*/*.wandb")), process)
    time.sleep(0.2)
    kill(process, paths)
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
        kill(process, paths)
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
    try:
        for seconds in (2.0, 60.0):  # a slow machine takes longer to start W&B's own process
            sink = WandbSink(run, paths, run.spec.trackers.wandb, init_seconds=seconds)
            with pytest.raises(Exception, match=r".") as failed:
                follow(paths, sink, lambda step: None, lambda seconds: True)
            if "connection refused" in str(failed.value):
                break
        assert "connection refused" in str(failed.value)
    finally:
        import wandb

        wandb.teardown()
