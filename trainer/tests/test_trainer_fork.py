"""Forks: what is copied, from a source that trains meanwhile, with damage, a full disk and kill -9; and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from scalerl_api.fork import Fork
from scalerl_api.load import parse_run, to_yaml
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec
from scalerl_trainer import fork as module
from scalerl_trainer.checkpoints.volume import CheckpointStore, files_in
from scalerl_trainer.fork import STAGED, ForkError, fork_directory, take_over

MIB = 1 << 20


def spec(**sections: Any) -> RunSpec:
    given: dict[str, Any] = {
        "model": {"path": "/models/a", "contextTokens": 64},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "exact"}},
        "recipe": {"maxCompletionTokens": 16},
        "budget": {"maxSteps": 100},
    }
    return parse_run(to_yaml(manifest(given | sections)), "run.yaml").spec


def manifest(given: dict[str, Any], name: str = "source") -> dict[str, Any]:
    return {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": name},
        "spec": given,
    }


FORK = spec(**{"from": {"run": "source"}})


def save(paths: RunPaths, step: int, *, keep: int = 3, size: int = 1000) -> None:
    store = CheckpointStore(paths, keep)
    staged = store.stage(step)
    (staged.directory / "engine").mkdir()
    for part in range(3):
        (staged.directory / "engine" / f"part{part}").write_bytes(b"%d" % step * size)
    records = store.flush_and_hash(staged, files_in(staged.directory))
    store.commit(staged, b"snapshot %d" % step, records, {"ranks": "1"})


def source(root: Path, *steps: int, size: int = 1000) -> RunPaths:
    """A run with these checkpoints, as its processes leave it."""
    paths = RunPaths(root)
    paths.base_model.mkdir(parents=True)
    (paths.base_model / "config.json").write_text("{}")
    (paths.base_model / "model.safetensors").symlink_to("/run/scalerl/models/a.safetensors")
    paths.run_file.write_text(
        to_yaml(manifest(spec().model_dump(by_alias=True, exclude_none=True, mode="json")))
    )
    paths.warm_started_weights.write_bytes(b"warm")
    paths.metrics.write_text(
        "".join(json.dumps({"step": n}) + "\n" for n in range(max(steps, default=0) + 2)) + '{"st'
    )
    paths.journal.mkdir()
    (paths.journal / "segment-00000001").write_bytes(b"groups")
    paths.token.write_text("secret")
    paths.tracker_id.write_text("id")
    for step in steps:
        save(paths, step, size=size)
    return paths


def tree(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def text(origin: Fork) -> str:
    return f"from {origin.run} at {origin.step}\n"


def checked(root: Path, step: int) -> None:
    store = CheckpointStore(RunPaths(root), 1)
    assert store.steps() == [step]
    store.verify(store.manifest(step))
    assert store.snapshot(step) == b"snapshot %d" % step


def test_fork_has_checkpoint_model_reference_and_rows_only(tmp_path: Path) -> None:
    given, target = source(tmp_path / "a", 10, 20), RunPaths(tmp_path / "b")
    (given.root / "data").mkdir()
    (given.root / "data/k.rows").write_bytes(b"table")
    before = tree(given.root)
    origin = fork_directory(given.root, target.root, FORK, 10, text)
    assert (origin.run, origin.step, Fork.read(target.fork)) == ("source", 10, origin)
    checked(target.root, 10)
    assert sorted(path.name for path in target.root.iterdir()) == [
        *(
            "checkpoints",
            "data",
            "fork.json",
            "metrics.jsonl",
            "model",
            "run.yaml",
            "warm-started.safetensors",
        ),
    ]
    assert target.run_file.read_text() == "from source at 10\n"
    assert (target.root / "data/k.rows").samefile(given.root / "data/k.rows")
    assert os.readlink(target.base_model / "model.safetensors") == "/run/scalerl/models/a.safetensors"
    assert [json.loads(line)["step"] for line in target.metrics.read_text().splitlines()] == [*range(10)]
    assert tree(given.root) == before
    part = "engine/part0"
    assert (given.checkpoint(10) / part).samefile(target.checkpoint(10) / part)
    assert not given.metrics.samefile(target.metrics)
    # What the source removes stays in the fork.
    save(given, 30)
    save(given, 40)
    assert CheckpointStore(given, 1).steps() == [40, 30, 20]
    checked(target.root, 10)


def test_newest_checkpoint_is_the_default(tmp_path: Path) -> None:
    assert fork_directory(source(tmp_path / "a", 10, 20).root, tmp_path / "b", FORK, None, text).step == 20


def refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(ForkError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("damage", ["changed", "shorter", "missing", "manifest"])
def test_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    given = source(tmp_path / "a", 10, 20)
    file = given.checkpoint(20) / ("manifest.json" if damage == "manifest" else "engine/part1")
    match damage:
        case "changed" | "manifest":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "shorter":
            file.write_bytes(file.read_bytes()[:-1])
        case _:
            file.unlink()
    refused(lambda: fork_directory(given.root, tmp_path / "b", FORK, 20, text), "checkpoint 20 is damaged")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert CheckpointStore(given, 1).steps() == [20, 10]  # the source's own trainer quarantines it


def test_missing_steps_runs_and_targets_are_refused(tmp_path: Path) -> None:
    given = source(tmp_path / "a", 10, 20)
    target = tmp_path / "b"
    refused(
        lambda: fork_directory(given.root, target, FORK, 15, text), "no checkpoint of step 15, only of 10, 20"
    )
    refused(
        lambda: fork_directory(tmp_path / "none", target, FORK, None, text), "no run (run.yaml is missing)"
    )
    empty = source(tmp_path / "c")
    refused(lambda: fork_directory(empty.root, target, FORK, None, text), "no checkpoint; the first")
    assert not target.exists()
    target.mkdir()
    assert fork_directory(given.root, target, FORK, 10, text).step == 10  # an empty directory will do
    before = tree(target)
    refused(lambda: fork_directory(given.root, target, FORK, 10, text), "not empty")
    assert tree(target) == before


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"seed": 1}, "spec.seed: 0 → 1"),
        ({"model": {"path": "/models/b", "contextTokens": 64}}, "spec.model.path"),
        ({"model": {"path": "/models/a", "contextTokens": 128}}, "spec.model.contextTokens"),
        (
            {"task": {"reasoningGym": {"name": "leg_counting"}, "verifier": {"name": "exact"}}},
            "spec.task.reasoningGym.name",
        ),
        (
            {"task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "number"}}},
            "spec.task.verifier.name",
        ),
        ({"warmStart": {"steps": 1}}, "spec.warmStart.steps"),
        ({"budget": {"maxSteps": 10}}, "spec.budget.maxSteps: 10 (the checkpoint has 10 steps"),
    ],
)
def test_what_the_checkpoint_fixes_is_refused(tmp_path: Path, sections: dict[str, Any], field: str) -> None:
    given = source(tmp_path / "a", 10)
    refused(lambda: fork_directory(given.root, tmp_path / "b", spec(**sections), None, text), field)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "sections",
    [
        {"recipe": {"maxCompletionTokens": 8, "temperature": "0.7", "optimizer": {"learningRate": "1e-6"}}},
        {"recipe": {"maxCompletionTokens": 16, "distillation": {"teacher": {"url": "http://teacher"}}}},
        {"storage": {"claimName": "other"}, "trainer": {"replicas": 2}, "budget": {"maxSteps": 11}},
        {"storage": {"storageClassName": "fast", "accessMode": "ReadWriteOnce"}},
    ],
)
def test_what_may_change_is_accepted(tmp_path: Path, sections: dict[str, Any]) -> None:
    given = source(tmp_path / "a", 10)
    assert fork_directory(given.root, tmp_path / "b", spec(**sections), None, text).step == 10


def test_source_that_trains_and_removes_checkpoints(tmp_path: Path) -> None:
    """Each fork of the newest checkpoint is whole, or says that it was removed meanwhile."""
    given, ended = source(tmp_path / "a", 1), threading.Event()

    def train() -> None:
        step = 1
        while not ended.is_set():
            step += 1
            save(given, step, keep=1)

    trainer = threading.Thread(target=train)
    trainer.start()
    forks, removed = 0, list[str]()
    end = time.monotonic() + 300
    try:
        while forks < 15 and time.monotonic() < end:
            target = tmp_path / f"fork-{forks}"
            try:
                if forks % 2:
                    step = fork_directory(
                        given.root, target, spec(budget={"maxSteps": 10**6}), None, text
                    ).step
                else:
                    source_spec = spec(budget={"maxSteps": 10**6}, **{"from": {"run": "source"}})
                    take_over(RunPaths(target), source_spec, given.root)
                    step = CheckpointStore(RunPaths(target), 1).steps()[0]
            except ForkError as error:
                removed.append(str(error))
                assert not RunPaths(target).checkpoints.exists()
                continue
            checked(target, step)
            forks += 1
    finally:
        ended.set()
        trainer.join()
    assert forks == 15, removed
    assert all("has removed the checkpoint of step" in text for text in removed)


def test_checkpoint_removed_between_opening_and_copying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are opened before the first is copied, so a removal meanwhile is harmless."""
    given = source(tmp_path / "a", 10, 20)
    copy = shutil.copyfileobj

    def slow(*arguments: Any) -> None:
        if given.checkpoint(10).exists():
            shutil.rmtree(given.checkpoint(10))
        copy(*arguments)

    monkeypatch.setattr(shutil, "copyfileobj", slow)
    monkeypatch.setattr(module, "_linked", lambda *_: False)
    assert fork_directory(given.root, tmp_path / "b", FORK, 10, text).step == 10
    checked(tmp_path / "b", 10)


# --- crashes -----------------------------------------------------------------------------------------------


def _forked_slowly(given: Path, target: Path, prepared: bool, limit: int | None) -> None:
    module._linked = lambda *_: False
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if prepared:
        take_over(RunPaths(target), FORK, given)
    else:
        fork_directory(given, target, FORK, None, text)


def _child(*arguments: Any) -> BaseProcess:
    child = multiprocessing.get_context("fork").Process(target=_forked_slowly, args=arguments)
    child.start()
    return child


@pytest.mark.parametrize("prepared", [False, True])
def test_kill_during_the_copy_leaves_nothing_half(tmp_path: Path, prepared: bool) -> None:
    given, target = source(tmp_path / "a", 10, size=4 * MIB), tmp_path / "b"
    begin = time.monotonic()
    whole = _child(given.root, tmp_path / "whole", prepared, None)
    whole.join()
    assert whole.exitcode == 0
    seconds = time.monotonic() - begin
    killed = attempt = 0
    while killed < 7:
        child = _child(given.root, target, prepared, None)
        child.join(seconds * (attempt % 8) / 8)
        attempt += 1
        if child.exitcode is None:
            child.kill()
            child.join()
        if child.exitcode == 0:  # faster than the first one
            seconds, target = 0.7 * seconds, tmp_path / f"b{attempt}"
            continue
        assert child.exitcode == -signal.SIGKILL
        killed += 1
        if prepared:
            assert not RunPaths(target).checkpoints.exists() or CheckpointStore(
                RunPaths(target), 1
            ).steps() == [10]
        elif target.exists():  # killed after its rename
            checked(target, 10)
            target = tmp_path / f"b{attempt}"
    if not prepared:
        target = tmp_path / "c"
    _forked_in_place(given, target, prepared)
    checked(target, 10)
    if prepared:  # killed after its last rename
        (target / STAGED).mkdir()
        _forked_in_place(given, target, prepared)
    assert not [path for path in target.iterdir() if path.name.startswith(STAGED)]


def _forked_in_place(given: RunPaths, target: Path, prepared: bool) -> None:
    child = _child(given.root, target, prepared, None)
    child.join()
    assert child.exitcode == 0


def test_staging_of_a_killed_fork_is_removed_by_the_next(tmp_path: Path) -> None:
    given = source(tmp_path / "a", 10)
    dead = multiprocessing.get_context("fork").Process(target=lambda: None)
    dead.start()
    dead.join()
    left, other = tmp_path / f"{STAGED}-b-{dead.pid}", tmp_path / f"{STAGED}-b-{os.getppid()}"
    left.mkdir()
    other.mkdir()
    fork_directory(given.root, tmp_path / "b", FORK, None, text)
    assert (left.exists(), other.exists()) == (False, True)


class Crash(BaseException):
    """The process dies."""


def test_crash_between_two_renames_is_repaired_by_the_next_preparation(tmp_path: Path) -> None:
    given, crashes = source(tmp_path / "a", 10), 0
    expected = None
    for at in range(20):
        paths, left = RunPaths(tmp_path / f"b{at}"), at
        with pytest.MonkeyPatch.context() as patched:

            def rename(path: Path, target: Path) -> None:
                nonlocal left
                if left == 0:
                    raise Crash
                left -= 1
                os.rename(path, target)

            patched.setattr(Path, "rename", rename)
            try:
                take_over(paths, FORK, given.root)
            except Crash:
                crashes += 1
        if left:
            break
        take_over(paths, FORK, given.root)
        expected = expected or tree(paths.root)
        assert tree(paths.root) == expected
        assert paths.base_model.is_dir()
    assert crashes == 5


@pytest.mark.parametrize("prepared", [False, True])
def test_full_disk_leaves_nothing(tmp_path: Path, prepared: bool) -> None:
    given, target = source(tmp_path / "a", 10, size=MIB), tmp_path / "b"
    child = _child(given.root, target, prepared, MIB)
    child.join()
    assert child.exitcode == 1
    assert not target.exists() or [*target.iterdir()] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"][: 1 + prepared]


# --- the preparation ----------------------------------------------------------------------------------------


def test_preparation_takes_over_once(tmp_path: Path) -> None:
    given, paths = source(tmp_path / "a", 10, 20), RunPaths(tmp_path / "b")
    take_over(paths, FORK, given.root)
    checked(paths.root, 20)
    assert not (given.checkpoint(20) / "engine/part0").samefile(paths.checkpoint(20) / "engine/part0")
    save(paths, 30)
    save(given, 40)
    before = tree(paths.root)
    take_over(paths, FORK, given.root)  # an edit repeats the preparation
    take_over(paths, FORK, None)  # then without the source, which may be gone
    assert tree(paths.root) == before


def test_preparation_without_checkpoint_is_refused(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "b")
    refused(lambda: take_over(paths, FORK, None), "scalerl fork RUNDIR")
    asked = spec(**{"from": {"run": "source", "step": 15}})
    given = source(tmp_path / "a", 10, 20)
    refused(
        lambda: take_over(paths, asked, given.root),
        "from source: ",
        "no checkpoint of step 15, only of 10, 20",
    )
    assert not paths.checkpoints.exists()


def test_fork_that_lost_its_volume_is_left_to_its_copies(tmp_path: Path) -> None:
    copied = spec(**{"from": {"run": "source"}, "checkpoint": {"to": "s3://bucket/fork"}})
    paths = RunPaths(tmp_path / "b")
    take_over(paths, copied, None)
    assert not paths.checkpoints.exists()
    take_over(paths, copied, source(tmp_path / "a", 10).root)
    checked(paths.root, 10)


def test_preparation_replaces_an_unfinished_one(tmp_path: Path) -> None:
    given, paths = source(tmp_path / "a", 10), RunPaths(tmp_path / "b")
    paths.base_model.mkdir(parents=True)
    (paths.base_model / "other.json").write_text("{}")
    take_over(paths, FORK, given.root)
    assert sorted(path.name for path in paths.base_model.iterdir()) == ["config.json", "model.safetensors"]
