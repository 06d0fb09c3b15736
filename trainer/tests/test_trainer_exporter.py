"""Exports while a run trains: selection, and failures, which do not end the run."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoint_copies import Relay
from s3_server import BUCKET, S3Server
from safetensors.torch import load_file

from scalerl_api.attempts import Attempt
from scalerl_api.exports import Exports, read_exports
from scalerl_api.load import load_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec, ScratchModel
from scalerl_api.wire import EvaluationPoint
from scalerl_trainer.checkpoints.disk import Disk
from scalerl_trainer.export_targets import Folder, Models, TargetError, open_target
from scalerl_trainer.exporter import STOPPED_SECONDS, Exporter, SelectedPoints
from scalerl_trainer.fence import Fence
from scalerl_trainer.metrics import Metrics
from scalerl_trainer.models import load_model, write_scratch
from scalerl_trainer.tensor_files import TensorInfo

EXAMPLE = Path(__file__).parents[2] / "examples/tiny/run.yaml"


def point(
    version: int, reward: float, set_digest: str = "", *, mixed_versions: bool = False
) -> EvaluationPoint:
    return EvaluationPoint(
        version=version,
        work_tokens=version,
        reward=reward,
        standard_error=0.0,
        samples=1,
        prompts=1,
        set_digest=set_digest,
        mixed_versions=mixed_versions,
        truncated_fraction=0.0,
        mean_tokens=1.0,
        wall_seconds=0.0,
        device_seconds=0.0,
    )


class Run:
    """A run's directory, a model whose weights are the version, and the exporter."""

    def __init__(
        self,
        root: Path,
        to: str | None = None,
        *,
        enabled: bool = True,
        stopped_seconds: float = STOPPED_SECONDS,
    ) -> None:
        self.stopped_seconds = stopped_seconds
        self.paths = RunPaths(root)
        whole = load_run(EXAMPLE).spec.model_dump(by_alias=True, exclude_none=True)
        whole["trainer"]["export"] = {"enabled": enabled} | ({"to": to} if to else {})
        self.spec = RunSpec.model_validate(whole)
        if not self.paths.base_model.exists():
            self.paths.base_model.mkdir(parents=True)
            sizes = ScratchModel(layers=1, hidden_size=32, attention_heads=2, intermediate_size=48)
            texts = [f"{i} + {i} = {2 * i}" for i in range(50)]
            write_scratch(self.paths.base_model, sizes, texts, seed=3, dtype="float32", context_tokens=64)
        self.network = load_model(str(self.paths.base_model), dtype="float32")
        self.streams = self.exhausted = 0
        self.start()

    def start(self, copy_pauses: tuple[float, ...] = (0.05,) * 40, fence: Fence | None = None) -> None:
        self.metrics = Metrics()
        self.exporter = Exporter(
            self.paths,
            self.spec,
            self.metrics,
            fence=fence,
            write_pauses=(0.01,),
            copy_pauses=copy_pauses,
            stopped_seconds=self.stopped_seconds,
        )

    def write(self, version: int) -> None:
        named = list(self.network.named_parameters())
        infos = [TensorInfo(name, torch.float32, tuple(p.shape)) for name, p in named]

        def weights() -> Iterator[torch.Tensor]:
            self.streams += 1
            for _, parameter in named:
                yield torch.full_like(parameter, version)
            self.exhausted += 1

        self.exporter.write(version, infos, weights)

    @property
    def folders(self) -> list[str]:
        return sorted(p.name for p in self.paths.exports.iterdir() if p.is_dir())

    def said(self) -> Exports:
        return read_exports(self.paths.exports) or Exports()

    def count(self, operation: str, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "scalerl_trainer_exports_total", {"operation": operation, "outcome": outcome}
        )
        return value or 0.0


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def name(version: int) -> str:
    return f"step-{version:08d}"


def test_exporter_keeps_best_and_last(tmp_path: Path) -> None:
    run = Run(tmp_path)
    points = []
    for version, reward in ((0, 0.2), (10, 0.5), (20, 0.5), (30, 0.4), (40, 0.3)):
        run.write(version)
        assert run.exporter.waiting
        points.append(point(version, reward))
        run.exporter.evaluated(points)
        assert not run.exporter.waiting
    run.exporter.close()
    assert run.folders == [name(20), name(40)], "of two as good, the newer"
    said = run.said()
    assert said.best is not None
    assert said.last is not None
    assert (said.best.version, said.best.reward, said.best.path) == (20, 0.5, f"checkpoints/hf/{name(20)}")
    assert (said.last.version, said.last.uri, said.failures, said.problem) == (40, "", 0, "")
    weights = load_file(tmp_path / said.best.path / "model.safetensors")
    assert all(bool((w == 20).all()) for w in weights.values())
    assert run.count("write", "ok") == 5


def test_exporter_keeps_unmeasured_versions(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for version in (10, 20, 30):
        run.write(version)
    run.exporter.evaluated([point(10, 0.1)])
    run.exporter.close()
    assert run.folders == [name(10), name(20), name(30)]


def test_exporter_late_evaluation_has_its_model(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for version in (10, 20, 30):
        run.write(version)
    run.exporter.evaluated([point(10, 0.1), point(30, 0.2)])
    until(lambda: run.folders == [name(20), name(30)])
    assert run.exporter.waiting
    run.exporter.evaluated([point(10, 0.1), point(30, 0.2), point(20, 0.3)])
    assert not run.exporter.waiting
    run.exporter.close()
    said = run.said()
    assert said.best is not None
    assert said.last is not None
    assert (said.best.version, said.last.version) == (20, 30)
    assert run.folders == [name(20), name(30)]


def test_exporter_evaluation_during_selection_loses_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.write(0)
    run.exporter.evaluated([point(0, 0.5)])
    until(lambda: run.said().last is not None)
    write_status = run.exporter._write_status

    def write_status_late() -> None:
        write_status()
        run.exporter.evaluated([point(0, 0.5), point(6, 0.4)])

    monkeypatch.setattr(run.exporter, "_write_status", write_status_late)
    run.write(6)
    run.exporter.close()
    assert run.folders == [name(0), name(6)]
    last = run.said().last
    assert last is not None
    assert last.version == 6


def test_selected_points_compare_within_one_set() -> None:
    of_before = [point(10, 0.9, "a"), point(20, 0.3, "b")]
    wanted = SelectedPoints.of([*of_before, point(30, 0.2, "b"), point(40, 0.8, "b", mixed_versions=True)])
    assert wanted is not None
    assert (wanted.best.version, wanted.last.version) == (20, 40)
    nothing = point(50, float("nan"), "b")
    assert SelectedPoints.of([nothing]) is None
    wanted = SelectedPoints.of([*of_before, nothing])
    assert wanted is not None
    assert (wanted.best.version, wanted.last.version) == (20, 20)
    wanted = SelectedPoints.of([point(10, 0.9, mixed_versions=True), point(20, 0.3, mixed_versions=True)])
    assert wanted is not None
    assert (wanted.best.version, wanted.last.version) == (10, 20), "better than none"


def test_exporter_failed_write_replaces_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(70)
    points = [point(70, 0.4)]
    run.exporter.evaluated(points)
    run.exporter.evaluated([*points, point(73, 0.5)])
    run.exporter.close()
    assert run.folders == [name(70)]
    said = run.said()
    assert said.best is not None
    assert (said.best, said.best.version) == (said.last, 70)


def test_exporter_disabled_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, enabled=False)
    assert not run.exporter.wants(0)
    run.exporter.evaluated([point(10, 0.1)])
    run.exporter.close()
    assert not run.paths.exports.exists()


def test_exporter_retries_full_disk(tmp_path: Path) -> None:
    """A real short write: no file of this process may grow beyond 4,000 bytes meanwhile."""
    run = Run(tmp_path)
    run.write(10)
    run.exporter.evaluated([point(10, 0.1)])
    until(lambda: run.said().last is not None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        run.write(20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.count("write", "failed") == 2
    assert run.streams == run.exhausted == 3, "the other ranks are never left in a gather"
    assert run.folders == [name(10)]
    run.exporter.evaluated([point(10, 0.1), point(20, 0.9)])
    until(lambda: run.said().problem != "")
    said = run.said()
    assert said.failures == 2
    assert said.problem.startswith("version 20: [Errno 27]")
    assert said.best is not None
    assert said.best.version == 10, "it stays until there is a better one"
    assert run.folders == [name(10)]
    run.write(30)
    run.exporter.evaluated([point(10, 0.1), point(20, 0.9), point(30, 1.0)])
    run.exporter.close()
    assert run.folders == [name(30)]
    assert (run.said().problem, run.said().failures) == ("", 2)


def test_exporter_retries_unreachable_target(tmp_path: Path) -> None:
    blocked = tmp_path / "mount"
    blocked.write_text("not a folder yet")
    run = Run(tmp_path / "run", to=str(blocked / "models"))
    run.write(10)
    run.exporter.evaluated([point(10, 0.1)])
    until(lambda: run.count("copy", "failed") >= 2)
    said = run.said()
    assert said.last is not None
    assert (said.last.uri, "Not a directory" in said.problem) == ("", True)
    blocked.unlink()
    blocked.mkdir()
    until(lambda: run.count("copy", "ok") == 1 and run.said().problem == "")
    assert run.said().last == run.said().best
    assert f'"uri": "{blocked}/models/{name(10)}"' in (run.paths.exports / "exports.json").read_text()
    assert run.said().problem == ""
    run.write(20)
    run.exporter.evaluated([point(10, 0.1), point(20, 0.2)])
    run.exporter.close()
    copied = blocked / "models"
    assert [p.name for p in copied.iterdir()] == [name(20)]
    for file in (run.paths.exports / name(20)).iterdir():
        assert (copied / name(20) / file.name).read_bytes() == file.read_bytes()


def test_exporter_retries_unexpected_copy_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client library raises an undocumented exception."""
    run = Run(tmp_path / "run", to=str(tmp_path / "out"))
    failures = iter([KeyError("etag"), RuntimeError("no loop")])
    put = Folder.put

    def failing(self: Folder, models: Models) -> dict[int, str]:
        for failure in failures:
            raise failure
        return put(self, models)

    monkeypatch.setattr(Folder, "put", failing)
    run.write(10)
    run.exporter.evaluated([point(10, 0.1)])
    until(lambda: run.count("copy", "ok") == 1 and run.said().problem == "")
    assert (run.count("copy", "failed"), run.count("write", "failed")) == (2, 0)
    assert run.said().failures == 2
    run.write(20)
    run.exporter.evaluated([point(10, 0.1), point(20, 0.2)])
    run.exporter.close()
    assert run.folders == [name(20)], "what the copies that failed were of is kept no longer"
    assert [p.name for p in (tmp_path / "out").iterdir()] == [name(20)]


def test_exporter_reports_last_copy_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run", to=str(tmp_path / "out"))
    run.start(copy_pauses=())

    def failing(self: Folder, models: Models) -> dict[int, str]:
        raise KeyError("etag")

    monkeypatch.setattr(Folder, "put", failing)
    run.write(10)
    run.exporter.evaluated([point(10, 0.1)])
    until(lambda: run.said().problem != "")
    assert run.said().problem == "KeyError: 'etag'"
    run.write(20)
    run.exporter.evaluated([point(10, 0.1), point(20, 0.2)])
    run.exporter.close()
    assert run.folders == [name(20)]
    assert run.said().problem == "KeyError: 'etag'", "a write that succeeds is no copy"


def test_exporter_copy_does_not_block_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies pause for minutes; after a pause the newest models are copied."""
    blocked = tmp_path / "mount"
    blocked.write_text("not a folder")
    run = Run(tmp_path / "run", to=str(blocked))
    run.start(copy_pauses=(300.0,))
    pause_ends, points = threading.Event(), []
    monkeypatch.setattr(run.exporter._closing, "wait", lambda seconds: not pause_ends.wait(seconds))
    for version in (10, 20, 30, 40):
        run.write(version)
        points.append(point(version, version / 100))
        run.exporter.evaluated(points)
        until(lambda version=version: run.folders == [name(version)])
    assert run.count("copy", "failed") == 1
    blocked.unlink()
    pause_ends.set()
    until(lambda: run.count("copy", "ok") == 1)
    assert [p.name for p in blocked.iterdir()] == [name(40)]
    run.exporter.close()
    assert run.folders == [name(40)]


@pytest.mark.slow
def test_exporter_retries_interrupted_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [v for v in os.environ if v.startswith("AWS_") or v.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    server = S3Server(tmp_path / "server.log")
    relay = Relay(int(server.url.rpartition(":")[2]), 5e6)  # or the upload may end before it is seen
    try:
        for variable, value in (server.environ | {"AWS_ENDPOINT_URL": relay.url}).items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr("scalerl_api.object_store._RETRIES", {"max_retries": 3})
        run = Run(tmp_path / "run", to=f"s3://{BUCKET}/a")
        run.write(10)
        until(lambda: run.folders == [name(10)])
        (run.paths.exports / name(10) / "a-large").write_bytes(bytes(40 << 20))
        run.exporter.evaluated([point(10, 0.1)])
        until(server.uploading)
        server.kill()
        relay.bytes_per_second = 1e9
        until(lambda: run.count("copy", "failed") >= 1)
        run.write(20)
        until(lambda: run.folders == [name(10), name(20)])
        until(lambda: f"s3://{BUCKET}/a: GenericError" in run.said().problem)
        assert run.said().best is not None
        assert run.said().best.uri == "", "no copy that is whole"
        server.start()
        until(lambda: run.count("copy", "ok") == 1 and run.said().problem == "")
        assert run.said().best.uri == f"s3://{BUCKET}/a/{name(10)}"
        folder = run.paths.exports / name(10)
        objects = {f"a/{name(10)}/{file.name}": file.read_bytes() for file in folder.iterdir()}
        assert server.objects().items() >= objects.items()
        run.exporter.close()
    finally:
        relay.close()
        server.close()


def test_exporter_close_does_not_wait_for_copy_after_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount on which every copy of a file hangs."""
    run = Run(tmp_path / "run", to=str(tmp_path / "out"), stopped_seconds=0.2)
    run.write(10)
    until(lambda: run.folders == [name(10)])
    ended = threading.Event()
    monkeypatch.setattr(shutil, "copyfile", lambda *_: ended.wait(120))
    run.exporter.evaluated([point(10, 0.1)])
    stop, begun = threading.Event(), time.monotonic()
    threading.Timer(1.0, stop.set).start()
    run.exporter.close(stop.is_set)
    assert 1.0 <= time.monotonic() - begun < 60.0
    ended.set()  # the interpreter waits for the thread at its exit


def test_exporter_restart_reads_status(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", to=str(tmp_path / "out"))
    run.write(10)
    run.exporter.evaluated([point(10, 0.1)])
    run.exporter.close()
    before = run.said()
    (run.paths.exports / ".tmp-step-00000020-1").mkdir()
    run.start()
    assert run.folders == [name(10)]
    assert not run.exporter.wants(10)
    assert run.exporter.wants(20)
    run.exporter.evaluated([point(10, 0.1)])
    run.exporter.close()
    assert run.said() == before
    assert run.count("copy", "ok") == 0, "nothing is copied twice"


def test_exporter_of_a_superseded_attempt_changes_nothing(tmp_path: Path) -> None:
    """Neither what it has begun to write, nor what it selects to be removed."""
    run, disk = Run(tmp_path), Disk()
    run.start(fence=Fence.begin(run.paths.checkpoints, Attempt(1, 1), disk))
    for version in (10, 20):
        run.write(version)
    run.exporter.evaluated([point(10, 0.1), point(20, 0.2)])
    until(lambda: run.folders == [name(20)] and run.said().last is not None)
    earlier = run.exporter
    run.start(fence=Fence.begin(run.paths.checkpoints, Attempt(1, 2), disk))
    following, run.exporter = run.exporter, earlier
    before = run.said()
    run.write(30)
    run.exporter.evaluated([point(20, 0.2), point(30, 0.3), point(40, 0.4)])
    run.exporter.close()
    assert (run.folders, run.said()) == ([name(20)], before)
    run.exporter = following
    for version in (30, 40):
        run.write(version)
    run.exporter.evaluated([point(20, 0.2), point(30, 0.3), point(40, 0.25)])
    run.exporter.close()
    assert run.folders == [name(30), name(40)]


def test_exporter_in_an_empty_directory_keeps_copied_models(tmp_path: Path) -> None:
    """A trainer that starts on another node knows the copies, and not the files; the best of them is replaced by a better one
    only."""
    copies = tmp_path / "copies"
    run = Run(tmp_path / "run", str(copies))
    points = []
    for version, reward in ((10, 0.5), (20, 0.4)):
        run.write(version)
        points.append(point(version, reward))
        run.exporter.evaluated(points)
    until(lambda: run.exporter.status.last is not None and run.exporter.status.last.uri != "")
    run.exporter.close()
    known = run.exporter.status
    uncopied = msgspec.structs.replace(known.last, version=25, uri="")
    shutil.rmtree(run.paths.exports)
    run.start()
    run.exporter.restore(Exports(best=known.best, last=uncopied, failures=3, problem="lost"))
    assert run.exporter.status == Exports(best=known.best)
    run.write(30)
    points.append(point(30, 0.3))
    run.exporter.evaluated(points)
    until(lambda: run.exporter.status.last is not None and run.exporter.status.last.uri != "")
    assert run.exporter.status.best == known.best
    assert sorted(p.name for p in copies.iterdir()) == [name(10), name(30)]
    run.write(40)
    points.append(point(40, 0.9))
    run.exporter.evaluated(points)
    until(lambda: sorted(p.name for p in copies.iterdir()) == [name(40)])
    run.exporter.close()
    assert run.exporter.status.best == run.exporter.status.last
    assert run.exporter.status.best.version == 40
    assert run.count("copy", "failed") == 0


def test_bucket_without_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TargetError, match=r"s3://b/p: obstore is missing; install requirements/s3.txt"):
        open_target("s3://b/p")


def test_read_exports_invalid_file_is_none(tmp_path: Path) -> None:
    assert read_exports(tmp_path) is None
    (tmp_path / "exports.json").write_text(json.dumps({"best": 3}))
    assert read_exports(tmp_path) is None
