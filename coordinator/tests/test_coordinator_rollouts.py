"""The record of rollouts: what its files have, also after a crash, a return to a checkpoint, and on a full disk."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from coordinator_client import Client, make_group

from scalerl_api import wire
from scalerl_api.wire import PromptRef, Split
from scalerl_coordinator import rollout_record
from scalerl_coordinator.accepted_group import Accepted
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.journal_records import StoredGroup, decode_stored
from scalerl_coordinator.recorded_rows import RecordedGroup, schema
from scalerl_coordinator.rollout_record import RolloutRecord

ROOT = Path(__file__).parents[2]


class NoSpace(Disk):
    def free(self, directory: Path) -> tuple[int, int]:
        return 0, 2**40


def texts(lease: wire.Lease) -> wire.GroupText:
    return wire.GroupText(
        prompt=f"question {lease.prompt.index}",
        reference="4",
        labels={"hard": "yes"},
        completions=[f"answer {at} \x1b[2J" for at in range(lease.completions)],
    )


def with_text(lease: wire.Lease) -> wire.Group:
    group = make_group(lease, parts={"format": [1.0] * lease.completions})
    return msgspec.structs.replace(group, text=texts(lease)) if lease.record else group


def stored(rollouts: int = 2, errors: dict[int, str] | None = None) -> StoredGroup:
    lease = wire.Lease(
        lease_id="a",
        prompt=PromptRef(0, Split.TRAIN, 5),
        slot=0,
        prompt_id="p5",
        completions=rollouts,
        max_tokens=8,
        temperature=1.0,
        remaining_seconds=1.0,
        policy_version=0,
        record=True,
    )
    group = msgspec.structs.replace(
        with_text(lease), verdicts=wire.Verdicts(scores=[0.0] * rollouts, errors=errors or {})
    )
    return decode_stored(msgspec.msgpack.encode(group))


def accepted(**changes: Any) -> Accepted:
    values: dict[str, Any] = {
        "lease_id": "a",
        "prompt_tokens": 3,
        "lengths": [4, 4],
        "scores": [0.0, 1.0],
        "truncated": 0,
    }
    return Accepted(
        **values | {"oldest_version": 0, "version_tokens": 0, "parts": {"format": [1.0, 0.5]}} | changes
    )


def group_of(step: int, **changes: Any) -> RecordedGroup:
    return RecordedGroup.of_training(
        step, step, PromptRef(0, Split.TRAIN, step), accepted(**changes), stored(), False
    )


def record_in(
    directory: Path, lost: list[int] | None = None, size: int = 2**30, **options: Any
) -> RolloutRecord:
    record = RolloutRecord(
        directory, size, lambda prompt: "main", (lost if lost is not None else []).append, **options
    )
    record.start()
    return record


def rows_in(directory: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(directory).to_pylist()
    return rows


def written(directory: Path, steps: Iterable[int], settled: int = 0) -> None:
    record = record_in(directory)
    for step in steps:
        record.add_step(step, [group_of(step)], [], settled)
    record.close()


async def publish_and_lease(client: Client, digest: str) -> tuple[str, list[wire.Lease]]:
    member = await client.register("g", digest)
    await client.publish("t", 0)
    return member, (await client.lease(member, 0, 40)).leases


async def test_steps_and_evaluations_are_recorded_once(tmp_path: Path, make_process):
    """Across a kill of the coordinator, and a return of the trainer to a checkpoint."""
    coordinator = make_process(rollouts={"perStep": 100_000_000})
    directory = tmp_path / "rollouts"
    coordinator.start()
    async with aiohttp.ClientSession() as session:
        client = Client(session, coordinator.url)
        await client.hello("t")
        member, leases = await publish_and_lease(client, coordinator.digest)
        assert all(lease.record for lease in leases)
        for lease in leases:
            await client.push(member, [with_text(lease)])
        shard = await client.shard("t", 0)
        assert all(meta.recorded for meta in shard.groups)
        figures = [
            wire.TrainedSequence(shard.groups[one.group].slot, one.sample, 0.5, 0.25, 2.0)
            for one in shard.sequences
        ]
        report = wire.StepReport(
            incarnation="t", step=0, stats={}, busy_seconds=0.0, trained_tokens=1, sequences=figures
        )
        await client.post("/v1/trainer/step", report, wire.StepReported)
        await client.report("t", 1)
    coordinator.kill()
    coordinator.start()
    async with aiohttp.ClientSession() as session:
        client = Client(session, coordinator.url)
        await client.hello("u", 1)  # step 1 again
        await client.shard("u", 1)
        await client.report("u", 1)
    assert coordinator.terminate() == 0
    rows = rows_in(directory)
    counts = Counter((row["split"], row["step"], row["slot"], row["sample"]) for row in rows)
    assert set(counts.values()) == {1}
    training = [row for row in rows if row["split"] == "train"]
    assert sorted(row["step"] for row in training) == [0] * 8 + [1] * 8
    held_out = [row for row in rows if row["split"] == "held_out"]
    assert len(held_out) in (0, 6)  # the kill may have come before they were written
    one = min(training, key=lambda row: (row["step"], row["slot"], -row["sample"]))
    assert one["prompt"] == f"question {one['prompt_index']}"
    assert (one["completion"], one["reward"], one["tokens"]) == ("answer 1 \x1b[2J", 1.0, 4)
    assert (one["labels"], one["parts"]) == ([("hard", "yes")], [("format", 1.0)])
    assert (one["oldest_version"], one["age"], one["finish_reason"], one["excluded"]) == (0, 0, "stop", None)
    assert one["advantage"] in (0.5, None)  # None: it was recorded from the journal
    assert one["training_reward"] is not None


async def test_rollouts_are_not_recorded_with_share_0(tmp_path: Path, make_process):
    coordinator = make_process(rollouts={"perStep": 0})
    coordinator.start()
    async with aiohttp.ClientSession() as session:
        client = Client(session, coordinator.url)
        await client.hello("t")
        _, leases = await publish_and_lease(client, coordinator.digest)
        assert leases
        assert not any(lease.record for lease in leases)
    assert coordinator.terminate() == 0
    assert not (tmp_path / "rollouts").exists()


def test_row_says_why_it_is_not_trained_on(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    prompt = PromptRef(0, Split.TRAIN, 5)

    def group(slot: int, *, skipped: bool = False, **changes: Any) -> RecordedGroup:
        of = stored(errors={1: "boom"})
        return RecordedGroup.of_training(0, slot, prompt, accepted(**changes), of, skipped)

    record.add_step(
        0,
        [
            group(0, ungraded=[1]),
            group(1, filtered=True),
            group(2, masked_tokens=[4, 0]),
            group(3, skipped=True),
            RecordedGroup.of_training(
                *(0, 4, prompt),
                *(accepted(given_up="failed", filtered=True, lengths=[], scores=[], parts={}), None, False),
            ),
        ],
        [wire.TrainedSequence(0, 0, 1.5, 0.1, float("nan"))],
        0,
    )
    record.close()
    rows = {(row["slot"], row["sample"]): row for row in rows_in(tmp_path)}
    assert {place: row["excluded"] for place, row in rows.items()} == {
        (0, 0): None,
        (0, 1): "ungraded",
        (1, 0): "zero-variance",
        (1, 1): "zero-variance",
        (2, 0): "masked",
        (2, 1): None,
        (3, 0): "step-skipped",
        (3, 1): "step-skipped",
        (4, 0): "given-up",
    }
    assert (rows[0, 1]["reward"], rows[0, 1]["error"], rows[0, 0]["advantage"]) == (None, "boom", 1.5)
    assert rows[4, 0]["completion"] is None


def test_columns_of_tokens(tmp_path: Path) -> None:
    """Their places in the text, the versions that sampled them, and the differences of those that were trained."""
    of = stored()
    assert of.text is not None
    spans = [wire.VersionSpan(3, 0), wire.VersionSpan(wire.MASKED, 1), wire.VersionSpan(4, 3)]
    completions = [msgspec.structs.replace(of.completions[0], versions=spans), of.completions[1]]
    characters = [np.array([6, 0, 2, 5], "<u2").tobytes(), b""]
    text = msgspec.structs.replace(of.text, token_characters=characters)
    group = msgspec.structs.replace(of, completions=completions, text=text)
    differences = np.array([0.5, -0.25], "<f2").tobytes()
    figures = [
        wire.TrainedSequence(0, 0, 1.0, 0.375, 0.5, differences),
        wire.TrainedSequence(0, 1, 1.0, 0.375, 0.5, differences),  # not as many as its tokens
    ]
    record = record_in(tmp_path)
    prompt = PromptRef(0, Split.TRAIN, 5)
    record.add_step(
        0,
        [RecordedGroup.of_training(0, 0, prompt, accepted(masked_tokens=[2, 0]), group, False)],
        figures,
        0,
    )
    record.close()
    first, second = sorted(rows_in(tmp_path), key=lambda row: row["sample"])
    assert first["token_ends"] == [6, 6, 8, 13]
    assert first["token_versions"] == [3, wire.MASKED, wire.MASKED, 4]
    assert first["token_logprob_differences"][::3] == [0.5, -0.25]
    assert np.isnan(first["token_logprob_differences"][1:3]).all()
    assert (second["token_ends"], second["token_logprob_differences"]) == (None, None)
    assert second["token_versions"] == [0] * 4


def test_refilled_groups_are_recorded_with_their_step(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.keep(group_of(3))
    record.add_step(3, [group_of(3)], [], 0)
    record.close()
    assert len(rows_in(tmp_path)) == 4


def test_evaluation_is_written_when_it_is_over(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    prompt = PromptRef(1, Split.HELD_OUT, 0)
    record.keep(RecordedGroup(8, 0, prompt, stored(), [4, 4], [0.0, 1.0], {}, []))
    record.end_evaluations({(8, 1)})
    record.drain()
    assert list(tmp_path.iterdir()) == []
    record.end_evaluations({(9, 1)})
    record.drain()
    (first, second) = rows_in(tmp_path)
    assert (first["step"], first["split"], first["training_reward"], first["age"]) == (
        8,
        "held_out",
        None,
        None,
    )
    assert second["excluded"] is None
    record.close()


def test_rows_are_in_the_order_of_prompts(tmp_path: Path) -> None:
    """Whichever came first: readers keep their order among equal rewards."""
    record = record_in(tmp_path)
    for at in (5, 0, 3):
        record.keep(
            RecordedGroup(8, at, PromptRef(1, Split.HELD_OUT, at), stored(), [4, 4], [0.0, 0.0], {}, [])
        )
        record.keep(replace(group_of(1), slot=at, excluded="refilled"))
    record.end_evaluations(())
    record.add_step(1, [replace(group_of(1), slot=at) for at in (3, 4)], [], 0)
    record.close()
    found = rows_in(tmp_path)
    for split, slots in (("held_out", [0, 3, 5]), ("train", [0, 3, 3, 4, 5])):
        assert [(row["slot"], row["sample"]) for row in found if row["split"] == split] == [
            (slot, sample) for slot in slots for sample in (0, 1)
        ]


def test_group_without_texts_is_left_out(tmp_path: Path) -> None:
    """It was leased before an edit of the spec, or is in the journal of a release without texts."""
    record = record_in(tmp_path)
    bare = msgspec.structs.replace(stored(), text=None)
    record.add_step(
        0, [RecordedGroup.of_training(0, 0, PromptRef(0, Split.TRAIN, 0), accepted(), bare, False)], [], 0
    )
    record.close()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_ends_the_record_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost: list[int] = []
    record = record_in(tmp_path, lost, disk=NoSpace())
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            record.add_step(step, [group_of(step)], [], 0)
        record.close()
    assert lost == [2, 2, 2]
    assert sum("the run continues" in entry.message for entry in caplog.records) == 1
    assert list(tmp_path.iterdir()) == []


def test_slow_disk_loses_rollouts_instead_of_memory(tmp_path: Path) -> None:
    lost: list[int] = []
    record = record_in(tmp_path, lost, queue_bytes=group_of(0).nbytes)
    gate = threading.Event()
    record._thread.submit(gate.wait, 30)
    record.add_step(0, [group_of(0)], [], 0)
    record.add_step(1, [group_of(1)], [], 0)
    gate.set()
    record.drain()
    record.add_step(2, [group_of(2)], [], 0)
    record.close()
    assert lost == [2]
    assert {row["step"] for row in rows_in(tmp_path)} == {0, 2}


def test_files_are_merged_and_cut_at_a_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_record, "_MERGED_FILES", 4)
    written(tmp_path, range(10), settled=100)
    assert len(list(tmp_path.iterdir())) <= 4
    assert sorted(row["step"] for row in rows_in(tmp_path)) == sorted([*range(10)] * 2)
    record = record_in(tmp_path)
    assert record.has_step(9)
    record.truncate(2)
    assert not record.has_step(2)
    record.add_step(2, [group_of(2)], [], 0)
    record.close()
    assert sorted({row["step"] for row in rows_in(tmp_path)}) == [0, 1, 2]
    assert len(rows_in(tmp_path)) == 6


def test_steps_that_may_be_trained_again_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_record, "_MERGED_FILES", 2)
    written(tmp_path, range(6), settled=2)
    assert len(list(tmp_path.iterdir())) == 5


def test_start_after_a_crash_in_a_merge_leaves_no_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_record, "_MERGED_FILES", 4)
    written(tmp_path, range(3))
    (first, *_) = sorted(tmp_path.iterdir())
    kept = tmp_path.parent / "kept"
    shutil.copy(first, kept)
    written(tmp_path, [3], settled=100)
    shutil.copy(kept, first)
    (tmp_path / ".train-00000007-00000007-00000009.parquet").write_bytes(b"incomplete")
    (tmp_path / "train-00000009-00000009-00000010.parquet").write_bytes(b"PAR1 torn by a power cut")
    record_in(tmp_path).close()
    assert sorted(row["step"] for row in rows_in(tmp_path)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not list(tmp_path.glob(".*"))


def test_torn_file_is_named_and_its_step_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torn at the end, which the start sees, or within, which a merge sees."""
    monkeypatch.setattr(rollout_record, "_MERGED_FILES", 4)
    written(tmp_path, range(3))
    _, second, third = sorted(tmp_path.iterdir())
    second.write_bytes(second.read_bytes()[:-100])
    whole = bytearray(third.read_bytes())
    whole[4:40] = bytes(36)  # the head of the first page
    third.write_bytes(whole)
    lost: list[int] = []
    record = record_in(tmp_path, lost)
    assert [record.has_step(step) for step in range(3)] == [True, False, True]
    for step in (1, 3, 4):
        record.add_step(step, [group_of(step)], [], settled=100)
    record.close()
    assert lost == []
    assert [entry.message.split(": ", 2)[:2] for entry in caplog.records] == [
        [str(path), "deleted, not a complete Parquet file"] for path in (second, third)
    ]
    assert sorted(row["step"] for row in rows_in(tmp_path)) == [0, 0, 1, 1, 3, 3, 4, 4]


def test_files_may_be_deleted_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_record, "_MERGED_FILES", 3)
    lost: list[int] = []
    directory = tmp_path / "rollouts"
    record = record_in(directory, lost)
    for step in range(5):
        record.add_step(step, [group_of(step)], [], settled=100)
        record.drain()
        if step == 1:
            shutil.rmtree(directory)
    record.close()
    assert lost == []
    assert sorted({row["step"] for row in rows_in(directory)}) == [2, 3, 4]


def test_full_disk_in_a_merge_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_record, "_MERGED_FILES", 2)
    lost: list[int] = []
    record = record_in(tmp_path, lost)
    monkeypatch.setattr(
        record, "_merge", lambda split, settled: (_ for _ in ()).throw(OSError(28, "no space"))
    )
    for step in range(3):
        record.add_step(step, [group_of(step)], [], settled=100)
    record.close()
    assert sum(lost) == 0
    assert sorted({row["step"] for row in rows_in(tmp_path)}) == [0, 1, 2]


def test_prompt_that_is_evaluated_again_is_recorded_once(tmp_path: Path) -> None:
    """An evaluation continues after a return of the trainer to a checkpoint, unless an earlier version is published."""

    def evaluate(*prompts: int) -> None:
        record = record_in(tmp_path)
        for index in prompts:
            prompt = PromptRef(1, Split.HELD_OUT, index)
            record.keep(RecordedGroup(8, index, prompt, stored(), [4, 4], [0.0, 1.0], {}, []))
        record.truncate(5)
        record.close()

    evaluate(0, 1)
    evaluate(2)
    assert sorted(row["slot"] for row in rows_in(tmp_path)) == [0, 0, 1, 1, 2, 2]
    evaluate(0, 1, 2, 3)
    assert sorted(row["slot"] for row in rows_in(tmp_path)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_oldest_rollouts_are_deleted_first(tmp_path: Path) -> None:
    written(tmp_path, [0])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    record = record_in(tmp_path, size=3 * size + size // 2)
    for step in range(1, 6):
        record.add_step(step, [group_of(step)], [], 0)
    record.close()
    assert sorted({row["step"] for row in rows_in(tmp_path)}) == [3, 4, 5]


def test_documentation_has_every_column() -> None:
    page = (ROOT / "docs/reference/rollouts.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| (?:string|int|double|list|map)", page, re.MULTILINE) == schema().names
