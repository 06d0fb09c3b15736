"""What the process of a tracker reads of metrics.jsonl, curve.csv and the rollouts: each step and each evaluation once."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet as pq
import pytest
from tracker_runs import LATE, Rows, figures, record_evaluation, row, rows, write_curve

from scalerl_api.curve import curve_figures
from scalerl_api.paths import RunPaths
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.tracking.tail import (
    SAMPLE_COLUMNS,
    SAMPLE_ROWS,
    CurveTail,
    MetricsTail,
    sample_of_evaluation,
)
from scalerl_coordinator.tracking.tracker_process import follow


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
