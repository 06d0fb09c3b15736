"""The timeline: phases and waits of a recorded run with two generators, of made ones, and the file for Perfetto."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalerl_analysis import MetricSeries, Timeline
from scalerl_analysis.timeline import BUSY

RECORDED = Path(__file__).with_name("recorded_run")
"""Thirty steps of the tiny example with two generators, from its files ``metrics.jsonl`` and ``trace.jsonl``."""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    for path in RECORDED.iterdir():
        (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    return tmp_path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def window(run: Path, last: int | None = None, count: int = 200) -> dict[str, Any]:
    return Timeline.read(run).window(last, count)


def test_busy_shares_agree_with_the_coordinator_and_the_trace(recorded: Path) -> None:
    """Within 1 %: of the trainer at each step, and of the time in which a generator has groups."""
    rows = lines(recorded / "metrics.jsonl")
    for count in (1, 7, len(rows)):
        (recorded / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        found = window(recorded)
        assert found["busy"] == pytest.approx(rows[count - 1]["trainer_busy_fraction"], rel=0.01)
    busy = sum(end - begin for name, begin, end, step in found["trainer"] if name in BUSY and step >= 0)
    traced = sum(line["busy_seconds"] for line in lines(recorded / "trace.jsonl") if line["kind"] == "step")
    assert busy == pytest.approx(traced, rel=0.01)
    at = np.linspace(found["begin"], found["end"], 100_001)
    groups = [line for line in lines(recorded / "trace.jsonl") if line["kind"] == "group"]
    for one in found["generators"]:
        own = [line for line in groups if line["generator"] == one["name"] and "leased" in line]
        idle = 1 - np.mean(np.any([(at >= line["leased"]) & (at < line["t"]) for line in own], axis=0))
        assert one["idle"] == pytest.approx(idle, abs=0.01)
    assert {one["name"] for one in found["generators"]} == {"generator-0", "generator-1"}


def test_phases_follow_each_other(recorded: Path) -> None:
    found = window(recorded)
    ends = [found["begin"]] + [end for _, _, end, _ in found["trainer"]]
    assert all(begin >= end - 1e-9 for (_, begin, _, _), end in zip(found["trainer"], ends, strict=False))
    assert sum(found["shares"].values()) == pytest.approx(found["end"] - found["begin"])
    assert found["shares"]["other"] < 0.2 * (found["end"] - found["begin"])
    some = window(recorded, last=20, count=5)
    assert (some["first"], some["last"], some["of"]) == (16, 20, 29)


STEP = {"wait_seconds": 6.0, "forward_backward_seconds": 3.0, "optimizer_seconds": 1.0, "busy_seconds": 4.0}
GROUP = {
    "kind": "group",
    "prompt": 0,
    "prompt_tokens": 1,
    "generator": "g",
    "lease_version": 1,
    "lengths": [3, 800],
}


def write(run: Path, name: str, *rows: dict[str, Any]) -> None:
    with (run / name).open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def test_wait_names_the_group_that_came_last(tmp_path: Path) -> None:
    write(
        tmp_path, "metrics.jsonl", *(STEP | {"step": at, "wall_seconds": 10.0 * at + 10} for at in range(4))
    )
    write(
        tmp_path,
        "trace.jsonl",
        GROUP | {"slot": 4, "step": 2, "leased": 12.0, "t": 21.0},
        GROUP | {"slot": 5, "step": 2, "leased": 14.0, "t": 25.5},
        GROUP | {"slot": 6, "step": 3, "leased": 15.0, "t": 28.0, "lease_version": 3},
    )
    waits = {one["step"]: one for one in window(tmp_path)["waits"]}
    assert waits[2]["seconds"] == pytest.approx(6.0)
    assert waits[2]["why"] == (
        "the last of its 2 groups (slot 5) came from g, which took 11.5 s from its lease, with weights 1 step old; "
        "its longest completion has 800 tokens"
    )
    assert waits[3]["why"].startswith("not for rollouts, which were complete 2.0 s before")
    assert "spec.trace" in waits[0]["why"]


def test_wait_names_the_evaluation_that_ended_in_it(tmp_path: Path) -> None:
    """Generators sampled it first; without that, the last group would seem to have taken all of the time."""
    write(
        tmp_path, "metrics.jsonl", *(STEP | {"step": at, "wall_seconds": 10.0 * at + 10} for at in range(5))
    )
    write(tmp_path, "trace.jsonl", GROUP | {"slot": 4, "step": 2, "leased": 24.5, "t": 25.5})
    found = Timeline.read(tmp_path).window(None, 200, {0: 0.0, 1: 19.9, 2: 23.5, 3: 36.5})
    waits = {one["step"]: one["why"] for one in found["waits"]}
    assert waits[2].startswith(
        "the evaluation of version 2, which generators sampled for its first 3.5 s; then the last of its 1 groups "
        "(slot 4, leased 4.5 s into the wait) came from g"
    )
    assert waits[1].startswith("which group came last is not known")
    assert waits[3].startswith("which group came last is not known")


def test_step_that_was_trained_again_counts_as_computing(tmp_path: Path) -> None:
    """The metrics have a step once after a return to a checkpoint, and the coordinator's share counts it twice; so it does
    supervised training."""
    first = STEP | {"step": 0, "wall_seconds": 20.0, "trainer_busy_fraction": (5 + 4) / 20}
    again = STEP | {"step": 1, "wall_seconds": 50.0, "trainer_busy_fraction": (9 + 4 + 4) / 50}
    write(tmp_path, "metrics.jsonl", first, again)
    found = window(tmp_path)
    assert found["busy"] == pytest.approx(17 / 50)
    assert ["lost step", 20.0, pytest.approx(24.0), 1] in found["trainer"]
    assert found["begin"] == pytest.approx(6.0)
    assert ["start", 6.0, 10.0, 0] in found["trainer"]
    assert "warm start" not in found["shares"]


def test_waits_are_listed_after_long_supervised_training(tmp_path: Path) -> None:
    """An hour of it is cut off at the left, and is no part of the time that waits are compared with."""
    rows = (
        STEP
        | {"step": at, "wall_seconds": 3600.0 + 10 * (at + 1)}
        | {"trainer_busy_fraction": (3600 + 4 * (at + 1)) / (3610 + 10 * at)}
        for at in range(3)
    )
    write(tmp_path, "metrics.jsonl", *rows)
    assert [one["step"] for one in window(tmp_path)["waits"]] == [0, 1, 2]


def test_trace_that_was_renamed_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", STEP | {"step": 0, "wall_seconds": 10.0})
    write(tmp_path, "trace.jsonl", GROUP | {"slot": 0, "step": 0, "leased": 1.0, "t": 2.0})
    series = MetricSeries(tmp_path / "metrics.jsonl")
    series.update()
    timeline = Timeline(tmp_path / "trace.jsonl", series)
    timeline.update()
    (tmp_path / "trace.jsonl").rename(tmp_path / "trace.jsonl.1")
    write(tmp_path, "trace.jsonl", GROUP | {"slot": 1, "step": 0, "leased": 3.0, "t": 4.0})
    with (tmp_path / "trace.jsonl").open("a") as file:
        file.write('{"kind": "group", "t"')
    timeline.update()
    assert [one["groups"] for one in timeline.window(None, 5)["generators"]] == [2]


@pytest.mark.parametrize("content", ["", '{"step": 0}\n', '{"step": 0, "wall_seconds": NaN}\n'])
def test_metrics_without_times_have_no_timeline(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    assert "problem" in window(tmp_path)


def test_perfetto_file_has_every_phase_and_group(recorded: Path) -> None:
    """Slices of a thread must not overlap: Perfetto drops those that do not nest."""
    events = json.loads(json.dumps(Timeline.read(recorded).perfetto(), allow_nan=False))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    groups = [
        line for line in lines(recorded / "trace.jsonl") if line["kind"] == "group" and "leased" in line
    ]
    assert sum(event["name"].startswith("slot ") for event in slices) == len(groups)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in slices:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in threads.values():
        times.sort()
        assert all(begin >= end - 0.002 for (_, end), (begin, _) in itertools.pairwise(times))
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert named == {pid for pid, _ in threads}
