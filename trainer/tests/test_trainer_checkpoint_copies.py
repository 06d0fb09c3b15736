"""Copies of checkpoints in a bucket of a real S3 server on loopback: what is sent, when, and by whom."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_copies import RUN, Relay, Trainer, complete, empty
from s3_server import BUCKET, S3Server
from test_trainer_checkpointer import OnlyRank, Weights
from trainer_run import until

from scalerl_api import wire
from scalerl_api.object_store import ObjectStore
from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.object_store import RUN_FILE, CheckpointCopies, PrefixTaken
from scalerl_trainer.checkpoints.upload import Uploader, UploadState
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.checkpoints.write import Checkpointer
from scalerl_trainer.errors import AttemptSuperseded
from scalerl_trainer.metrics import Metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uploads_end")]


def test_empty_volume_continues_from_store(tmp_path: Path, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to)
    assert one.version is None
    weights = RunPaths(tmp_path).warm_started_weights
    weights.write_bytes(b"warm")
    for step in (2, 4, 6, 8):
        one.save(step, best=3)
        one.upload()
        assert one.uploader.uploaded == step
    assert complete(s3, to) == [2, 6, 8], "the newest two, and the best"
    prefix = to.removeprefix(f"s3://{BUCKET}/")
    folders = {p.split("/")[1] for p in s3.paths() if p.startswith(f"{prefix}/step-")}
    assert folders == {"step-00000002", "step-00000006", "step-00000008"}
    before = {
        p.relative_to(tmp_path): p.read_bytes()
        for p in RunPaths(tmp_path).checkpoint(8).rglob("*")
        if p.is_file()
    }

    empty(tmp_path)
    again = Trainer(tmp_path, to, writer="b")
    assert again.version == 8
    assert again.engine.loaded == b"weights 8"
    assert again.volume.snapshot(8) == b"snapshot 8"
    after = {
        p.relative_to(tmp_path): p.read_bytes()
        for p in RunPaths(tmp_path).checkpoint(8).rglob("*")
        if p.is_file()
    }
    assert after == before
    assert weights.read_bytes() == b"warm"
    assert not again.uploader.busy, "what is there is not sent again"

    one.save(10)
    one.until(lambda: one.uploader.problem)
    assert "another trainer writes" in one.uploader.problem, "the earlier trainer stops"
    assert complete(s3, to) == [2, 6, 8]
    again.save(10)
    again.upload()
    assert complete(s3, to)[-1] == 10


def niceness() -> dict[str, int]:
    """Of the upload's thread and of those of the client library, by name."""
    ids = {t.name: str(t.native_id) for t in threading.enumerate() if t.name == "upload"}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            ids[(task / "comm").read_text().strip()] = task.name
    ids.pop("python", None)
    found: dict[str, int] = {}
    for name, thread in ids.items():
        with contextlib.suppress(OSError):
            found[name] = os.getpriority(os.PRIO_PROCESS, int(thread))
    return found


def test_upload_goes_after_the_compute(tmp_path: Path, s3: S3Server, slow: Relay, to: str) -> None:
    """In a process of its own, whose first request to the store starts the client library's threads."""
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from checkpoint_copies import Trainer
from test_trainer_checkpoint_copies import niceness
trainer = Trainer(Path({str(tmp_path)!r}), {to!r})
trainer.save(1, 1 << 20)
found = {{}}
while trainer.uploader.busy and (found.get("upload"), found.get("tokio-rt-worker")) != (19, 19):
    found |= niceness()
    trainer.sync()
print(found, flush=True)
trainer.upload()
print(trainer.uploader.uploaded)
"""
    slow.bytes_per_second = 2e4  # until its threads were seen
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = eval(process.stdout.readline())
        slow.bytes_per_second = 1e9
        assert (found["upload"], found["tokio-rt-worker"]) == (19, 19)
        assert process.communicate(timeout=300)[0] == "1\n"


def test_earlier_attempt_that_thaws_does_not_keep_the_prefix(tmp_path: Path, s3: S3Server, to: str) -> None:
    """Of two attempts the later one writes, whichever claimed last."""
    earlier = CheckpointCopies(ObjectStore(to), RUN, "1795000000.1-a")
    earlier.claim()
    later = Trainer(tmp_path, to, writer="1795000000.2-b")
    for refused in (earlier.claim, earlier.check_writer):
        with pytest.raises(AttemptSuperseded, match=rf"remove {to}/writer\.json"):
            refused()
    with pytest.raises(AttemptSuperseded, match=r"attempt 1795000000\.2 writes"):
        Trainer(tmp_path / "other", to, writer="1795000000.1-a")
    ObjectStore(to).put(
        "writer.json", b'{"incarnation": "1795000000.1-a"}'
    )  # between its check and its write
    later.save(2)
    later.upload()
    assert complete(s3, to) == [2]
    assert later.uploader.problem == ""
    with pytest.raises(AttemptSuperseded):
        earlier.check_writer()


def test_newer_volume_is_uploaded(tmp_path: Path, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to)
    one.save(2)
    one.upload()
    plain: Any = Checkpointer(CheckpointStore(RunPaths(tmp_path), 2), OnlyRank(60.0), Weights())
    assert plain.start(4, b"s") is None
    assert plain.finish().error is None
    again = Trainer(tmp_path, to, writer="b")
    assert (again.version, again.uploader.uploaded) == (4, 2)
    again.upload()
    assert complete(s3, to) == [2, 4]


def test_earlier_attempt_replaces_no_file_of_the_later_one(tmp_path: Path, s3: S3Server, to: str) -> None:
    """Both have a checkpoint of the same step."""
    earlier = Trainer(tmp_path / "a", to, writer="1795000000.1-a")
    for step in (2, 4):
        earlier.save(step)
        earlier.upload()
    prefix = to.removeprefix(f"s3://{BUCKET}/")
    later = Trainer(tmp_path / "b", to, writer="1795000000.2-b")
    assert later.version == 4
    RunPaths(tmp_path / "a").warm_started_weights.write_bytes(b"warm")
    earlier.uploader.copies._warm_started_sent = False
    earlier.save(6)
    earlier.until(lambda: earlier.uploader.problem)
    assert "attempt 1795000000.2 writes" in earlier.uploader.problem
    assert not earlier.uploader.busy
    copies, volume = earlier.uploader.copies, CheckpointStore(RunPaths(tmp_path / "a"), 2)
    for record in volume.manifest(6).files:
        with pytest.raises(AttemptSuperseded):
            copies.send(volume.directory(6), 6, record)
    assert not [p for p in s3.paths() if p.startswith((f"{prefix}/step-00000006", f"{prefix}/warm"))]
    later.save(6)
    later.upload()
    assert complete(s3, to) == [4, 6]


def test_prefix_of_another_run_is_refused(tmp_path: Path, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path / "a", to)
    one.save(2)
    one.upload()
    with pytest.raises(
        PrefixTaken, match=rf"{to} belongs to the run -/run; this run differs in name, seed\. Give"
    ):
        Trainer(tmp_path / "b", to, run={**RUN, "name": "other", "seed": 1}, writer="b")
    assert complete(s3, to) == [2]
    store = ObjectStore(to)
    assert not store.create(RUN_FILE, b"{}"), "the server refuses a second creation"
    assert json.loads(store.read(RUN_FILE) or b"") == RUN


def test_failing_store_does_not_stop_checkpoints(tmp_path: Path, s3: S3Server, to: str) -> None:
    """Credentials that expire within an upload, and are renewed two checkpoints later."""
    one = Trainer(tmp_path, to)
    one.save(2)
    one.upload()
    s3.refuse(3)
    try:
        one.save(4, size=20 << 20)  # in parts
        one.until(lambda: one.uploader.problem)
        assert "403" in one.uploader.problem
        one.save(6)
        one.save(8)
        assert one.checkpointer.committed_step == 8
        one.until(lambda: one.uploader.uploading == 8)  # the failed one is given up
        assert one.uploader.uploaded == 2
        assert one.metrics.uploads.labels("failed")._value.get() >= 1
    finally:
        s3.refuse(float("inf"))
    one.upload()
    assert (one.uploader.uploaded, one.uploader.problem) == (8, "")
    assert complete(s3, to) == [2, 8]
    prefix = to.removeprefix(f"s3://{BUCKET}/")
    assert not [p for p in s3.paths() if p.startswith(f"{prefix}/step-00000004")], "remains are removed"


def test_one_failure_does_not_give_up_an_upload(tmp_path: Path, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to)
    one.uploader._pauses = (60.0,)
    s3.refuse(0)
    try:
        one.save(2)
        one.until(lambda: one.uploader.problem)
        one.save(4)
        one.sync()
        assert one.uploader.uploading == 2
        two, four = UploadState(error="e", failures=2), UploadState(error="e", failures=3)
        one.uploader.advance([two])
        assert one.uploader.uploading == 2
        one.uploader.advance([four])
        assert one.uploader.uploading == 4
    finally:
        s3.refuse(float("inf"))


def test_slow_store_skips_to_newest(tmp_path: Path, slow: Relay, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to, keep=1)
    slow.bytes_per_second = 2e4  # an upload takes minutes
    for step in (2, 4, 6):
        one.save(step, 3 << 20)
        one.sync()
    assert one.uploader.uploading == 2, "no save has waited for it"
    assert CheckpointStore(RunPaths(tmp_path), 1).steps() == [6, 2], "what is being sent stays on the volume"
    slow.bytes_per_second = 1e9
    one.upload()
    assert one.uploader.uploaded == 6
    assert s3.sent(f"{to.removeprefix(f's3://{BUCKET}/')}/step-00000004/weights") == 0
    assert complete(s3, to) == [6]
    one.save(8)
    assert CheckpointStore(RunPaths(tmp_path), 1).steps() == [8]
    one.upload()


KILLED = """
import sys, threading
from pathlib import Path
from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.checkpoints.object_store import CheckpointCopies
from scalerl_trainer.metrics import Metrics
from scalerl_api.object_store import ObjectStore
from scalerl_trainer.checkpoints.upload import Uploader

root, to, run = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
copies, volume = CheckpointCopies(ObjectStore(to), run, "killed"), CheckpointStore(RunPaths(root), 2)
Uploader(copies, volume, rank=0, world=1, keep=2, metrics=Metrics()).resumed(4, [2], opened=False)
threading.Event().wait()
"""


def test_killed_upload_is_no_checkpoint(tmp_path: Path, slow: Relay, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to)
    one.save(2)
    one.upload()
    plain: Any = Checkpointer(CheckpointStore(RunPaths(tmp_path), 2), OnlyRank(60.0), Weights())
    plain._engine.save = lambda directory: (directory / "weights").write_bytes(bytes(40 << 20))
    assert plain.start(4, b"s") is None
    assert plain.finish().error is None
    argv = [sys.executable, "-c", KILLED, str(tmp_path), to, repr(RUN)]
    with subprocess.Popen(argv) as process:
        try:
            until(s3.uploading, what="a multipart upload")
        finally:
            process.kill()
    slow.bytes_per_second = 1e9
    assert complete(s3, to) == [2]
    empty(tmp_path)
    again = Trainer(tmp_path, to, writer="again")
    assert again.version == 2
    again.save(4, 1 << 10)
    again.upload()
    assert complete(s3, to) == [2, 4]
    empty(tmp_path)
    assert Trainer(tmp_path, to, writer="last").version == 4


class Rank:
    """A rank of two, whose thread is driven by hand."""

    def __init__(self, root: Path, to: str, rank: int) -> None:
        copies = CheckpointCopies(ObjectStore(to), RUN, "a")
        volume = CheckpointStore(RunPaths(root), 2)
        self.uploader = Uploader(
            copies, volume, rank=rank, world=2, keep=2, metrics=Metrics(), pauses=(0.05,)
        )


def test_ranks_send_their_parts(tmp_path: Path, s3: S3Server, to: str) -> None:
    plain: Any = Checkpointer(CheckpointStore(RunPaths(tmp_path), 2), OnlyRank(60.0), Weights())
    assert plain.start(2, b"s") is None
    assert plain.finish().error is None
    ranks = [Rank(tmp_path, to, rank).uploader for rank in (0, 1)]
    for uploader in ranks:
        uploader.resumed(2, [], opened=False)  # a start without the store

    def exchange() -> list[UploadState]:
        states = [uploader.state for uploader in ranks]
        for uploader in ranks:
            uploader.advance(states)
        return states

    time.sleep(0.3)
    assert not ranks[1].state.sent, "no rank writes before rank 0 has claimed the prefix"
    deadline = time.monotonic() + 120
    while ranks[0].busy:
        states = exchange()
        assert not states[0].committed or states[1].sent
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not ranks[1].busy
    assert [u.uploaded for u in ranks] == [2, 2]
    assert complete(s3, to) == [2]
    parts = [u._metrics.uploaded_bytes._value.get() for u in ranks]
    assert min(parts) > 0
    assert sum(parts) == sum(r.bytes for r in CheckpointStore(RunPaths(tmp_path), 2).manifest(2).files)


@pytest.mark.full  # on one machine; on a cluster's way test_trainer_main_own_directory.py has it in CI
def test_killed_run_continues_on_empty_volume(new_run: Any, slow: Relay, s3: S3Server, to: str) -> None:
    """All processes are killed in the middle of an upload, and the volume is lost: two real ranks, a real coordinator."""
    slow.bytes_per_second = 1e9
    run = new_run(budget__maxSteps=10, checkpoint__to=to)
    run.environ = {**s3.environ, "AWS_ENDPOINT_URL": slow.url}
    run.start(seconds_per_group=0.1)
    until(lambda: complete(s3, to), what="the first copy")
    slow.bytes_per_second = 50e3
    copied = complete(s3, to)[-1]
    until(
        lambda: run.checkpoints()[-1] >= copied + 2 and run.step() > copied + 2, what="two more checkpoints"
    )
    for process in [*run.ranks, run.coordinator]:
        process.kill()
    for process in [*run.ranks, run.coordinator]:
        process.join()
    slow.bytes_per_second = 1e9
    copied = complete(s3, to)[-1]
    assert copied < run.checkpoints()[-1], "a newer one was being copied"
    for path in (run.paths.checkpoints, run.paths.journal):
        shutil.rmtree(path)
    run.paths.metrics.unlink()
    run.paths.curve.unlink()
    run.start_coordinator()
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert f"registered: version {copied}," in run.log("trainer-0")
    status = run.status()
    assert status is not None
    assert status.step == 10
    assert status.uploads == wire.Uploads(version=10)
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert [row["step"] for row in run.rows()] == list(range(copied, 10)), "earlier rows are lost"
    assert complete(s3, to)[-1] == 10
