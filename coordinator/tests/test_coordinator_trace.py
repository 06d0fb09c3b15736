"""``trace.jsonl``: what a run leaves in it, and that no failure of it reaches the run."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from coordinator_client import make_group
from coordinator_world import World, make_settings, ready

from scalerl_api import trace as lines
from scalerl_api.generator_spec import GeneratorSpec
from scalerl_coordinator import journal_records as r
from scalerl_coordinator import trace
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.trace import Trace

GENERATOR = GeneratorSpec.model_validate({"speculation": {"history": {}}})


class Traced:
    """A world whose records go to a trace, as the server's do."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.world, self.path, self.lost = World(make_settings()), path, 0
        self.trace = Trace(path, self.world.core, GENERATOR, self._lose, disk)
        self.note()

    def _lose(self, lines: int) -> None:
        self.lost += lines

    def note(self) -> None:
        for record, blob in self.world.core.outbox:
            self.trace.record(record, blob, self.world.now)
        self.world.write()
        if self.trace.tick(self.world.now):
            self.trace.write()

    def run_a_step(self) -> None:
        world = ready(self.world)
        self.note()
        leases = world.lease(world.member, 0)
        self.note()
        world.pass_time(7, {world.member: 0})
        for lease in leases:
            group = make_group(lease, tokens=3 + lease.slot)
            if lease.slot:
                group = msgspec.structs.replace(group, drafted_tokens=[4, 1], accepted_tokens=[lease.slot])
            assert world.push(world.member, group) == "accepted"
        self.note()
        world.next("t")
        world.report("t", 0)
        self.note()

    def read(self) -> list[lines.AnyLine]:
        return [lines.decode(line) for line in self.path.read_bytes().splitlines()]


def test_trace_of_a_step(tmp_path: Path) -> None:
    traced = Traced(tmp_path / "trace.jsonl")
    traced.run_a_step()
    header, *rest = traced.read()
    assert isinstance(header, lines.RunLine)
    assert (header.prompts_per_step, header.max_staleness_steps) == (3, 1)
    assert (header.concurrency, header.max_draft_tokens) == (256, 16)
    assert lines.GeneratorLine(t=0.0, name="g", event="registered") in rest
    groups = [line for line in rest if isinstance(line, lines.GroupLine)]
    assert [(group.slot, group.step, group.lengths) for group in groups] == [
        (slot, slot // 3, [3 + slot] * 2) for slot in range(6)
    ]
    first = groups[0]
    assert first.leased is not None
    assert first.t - first.leased == pytest.approx(7.0)
    assert (first.generator, first.lease_version, first.seconds) == ("g", 0, 0.1)
    assert (first.finish_reasons, first.version_tokens) == (["stop", "stop"], {0: 6})
    drafts = [(group.drafted_tokens, group.accepted_tokens) for group in groups]
    assert drafts == [(None, None), *((5, slot) for slot in range(1, 6))]
    assert [line.step for line in rest if isinstance(line, lines.StepLine)] == [0]
    assert [line.version for line in rest if isinstance(line, lines.PublishLine)] == [0]
    assert traced.lost == 0


def test_lines_that_cannot_be_written_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traced = Traced(tmp_path)  # a directory
    with caplog.at_level(logging.ERROR):
        traced.run_a_step()
    assert traced.lost == 9  # generator, publish, six groups, step
    assert sum("further errors are only counted" in record.message for record in caplog.records) == 1
    assert traced.world.state.version == 1


def test_unreadable_trace_record_is_counted(tmp_path: Path) -> None:
    traced = Traced(tmp_path / "trace.jsonl")
    ready(traced.world)
    lease = traced.world.lease(traced.world.member, 0, 1)[0]
    traced.world.push(traced.world.member, make_group(lease))
    traced.trace.record(traced.world.core.outbox[-1][0], b"no group", traced.world.now)
    assert traced.lost == 1


def test_full_file_is_kept_as_one_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BYTES", 1000)
    traced = Traced(tmp_path / "trace.jsonl")
    traced.run_a_step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.jsonl", "trace.jsonl.1"]
    assert isinstance(traced.read()[0], lines.RunLine)


class SmallVolume(Disk):
    """Of a GiB; the reserve is a 20th of it."""

    def __init__(self, directory: Path, rest: int) -> None:
        self.directory, self.rest = directory, rest

    def free(self, directory: Path) -> tuple[int, int]:
        used = sum(path.stat().st_size for path in self.directory.iterdir())
        return 2**30 // 20 + self.rest - used, 2**30


def test_trace_leaves_the_reserve_of_the_volume(tmp_path: Path) -> None:
    """The earlier file goes first; without it, lines are lost until there is space."""
    disk, earlier = SmallVolume(tmp_path, 20_000), tmp_path / "trace.jsonl.1"
    earlier.write_bytes(bytes(19_900))
    traced = Traced(tmp_path / "trace.jsonl", disk)
    traced.run_a_step()
    assert not earlier.exists()
    assert traced.lost == 0
    size = traced.path.stat().st_size
    disk.rest = 0
    traced.trace.record(r.Published(7, {}), b"", traced.world.now)
    traced.trace.write()
    assert (traced.lost, traced.path.stat().st_size) == (1, size)
    disk.rest = 20_000
    traced.trace.record(r.Published(8, {}), b"", traced.world.now)
    traced.trace.write()
    assert [line.version for line in traced.read() if isinstance(line, lines.PublishLine)] == [0, 8]


def test_header_is_written_after_an_error_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.mkdir()
    traced = Traced(path)
    traced.run_a_step()
    path.rmdir()
    traced.trace.write()
    assert [type(line) for line in traced.read()] == [lines.RunLine]


def test_incomplete_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    Traced(path).trace.write()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"gr')
    Traced(path).trace.write()
    assert path.read_bytes() == whole + whole
