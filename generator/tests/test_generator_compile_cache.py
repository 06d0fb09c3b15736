"""Compiled code on a volume: whole archives only, and never one that is damaged."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scalerl_generator.server import compile_cache
from scalerl_generator.server.compile_cache import discard, environment, key, restore, store

FILES = {"vllm/torch_compile_cache/a/rank_0_0/x.py": b"x = 1", "triton/k/kernel.cubin": bytes(5000)}


def compiled(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    found = {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    found.pop("restored", None)
    return found


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    return tmp_path / "volume" / "vllm-1-a.tar"


def test_next_pod_has_the_files(archive: Path, tmp_path: Path) -> None:
    assert not restore(archive, tmp_path / "a")
    assert store(archive, compiled(tmp_path / "a"))
    assert restore(archive, tmp_path / "b")
    assert content(tmp_path / "b") == FILES
    assert os.listdir(archive.parent) == [archive.name]


def test_stores_only_what_is_new(archive: Path, tmp_path: Path) -> None:
    assert not store(archive, compiled(tmp_path / "none", {}))
    store(archive, compiled(tmp_path / "a"))
    restore(archive, tmp_path / "b")
    assert not store(archive, tmp_path / "b")
    compiled(tmp_path / "b", {"inductor/new": b"1"})
    assert store(archive, tmp_path / "b")
    restore(archive, tmp_path / "c")
    assert content(tmp_path / "c") == FILES | {"inductor/new": b"1"}


def test_restarted_container_keeps_its_files(archive: Path, tmp_path: Path) -> None:
    store(archive, compiled(tmp_path / "a"))
    compiled(tmp_path / "b", {"inductor/own": b"1"})
    assert not restore(archive, tmp_path / "b")
    assert content(tmp_path / "b") == {"inductor/own": b"1"}


def _cut(archive: Path, share: float) -> None:
    os.truncate(archive, int(share * archive.stat().st_size))


def _flip(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)


def _folder(archive: Path) -> None:
    archive.unlink()
    archive.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda archive: _cut(archive, 0),
    "half": lambda archive: _cut(archive, 0.5),
    "without its end": lambda archive: _cut(archive, 0.99),
    "one bit": _flip,
    "garbage": lambda archive: archive.write_bytes(b"\xff" * 10_000),
    "a folder": _folder,
    "not readable": lambda archive: (archive.unlink(), archive.symlink_to(archive)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_archive_is_ignored_and_replaced(
    archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], object]
) -> None:
    store(archive, compiled(tmp_path / "a"))
    damage(archive)
    assert not restore(archive, tmp_path / "b")
    assert "is not usable, vLLM compiles: " in capfd.readouterr().err
    assert content(tmp_path / "b") == {}
    if not archive.is_dir():
        assert store(archive, compiled(tmp_path / "b"))
        assert restore(archive, tmp_path / "c")


def test_failed_start_compiles_the_next_time(archive: Path, tmp_path: Path) -> None:
    """And the archive, which may be the cause, is then replaced."""
    store(archive, compiled(tmp_path / "a"))
    restore(archive, tmp_path / "b")
    discard(tmp_path / "b")
    assert not restore(archive, tmp_path / "b")
    assert content(tmp_path / "b") == {}
    compiled(tmp_path / "b", {"vllm/good": b"1"})
    assert store(archive, tmp_path / "b")
    restore(archive, tmp_path / "c")
    assert content(tmp_path / "c") == {"vllm/good": b"1"}


def test_volume_that_cannot_be_written(
    archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    archive.parent.rmdir()
    assert not store(archive, compiled(tmp_path / "a"))
    assert "is not written: " in capfd.readouterr().err


def test_file_that_vanishes_is_not_stored(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path / "a", {**FILES, "triton/gone": b"1"})
    stat = Path.stat

    def vanishing(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == "gone" and not follow_symlinks:
            path.unlink(missing_ok=True)
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", vanishing)
    assert store(archive, tmp_path / "a")
    monkeypatch.undo()
    restore(archive, tmp_path / "b")
    assert content(tmp_path / "b") == FILES


def test_folder_that_cannot_be_read_is_a_message(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: Path) -> dict[str, int]:
        raise OSError("stale file handle")

    monkeypatch.setattr(compile_cache, "_files", fails)
    assert not store(archive, compiled(tmp_path / "a"))
    assert "is not written: stale file handle" in capfd.readouterr().err


def test_process_ends_while_an_archive_is_written(archive: Path, tmp_path: Path) -> None:
    compiled(tmp_path / "a")
    program = (
        "import os, sys, time; from pathlib import Path; from scalerl_generator.server import compile_cache as c; "
        "os.fsync = lambda _: time.sleep(300); "
        "s = c.begin_store(Path(sys.argv[1]), Path(sys.argv[2])); s.join(0.2); assert s.is_alive()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, archive, tmp_path / "a"], timeout=300, capture_output=True, check=True
    )
    assert done.stderr == b""
    assert not archive.exists()
    compile_cache.begin_store(archive, tmp_path / "a").join()
    assert restore(archive, tmp_path / "b")


def test_too_much_is_not_stored(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 5000)
    assert not store(archive, compiled(tmp_path / "a"))
    assert os.listdir(archive.parent) == []


def test_removes_archives_of_killed_writers(archive: Path, tmp_path: Path) -> None:
    old, new = archive.parent / ".vllm-1-a.tar.pod-7.new", archive.parent / ".vllm-1-a.tar.pod-8.new"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    store(archive, compiled(tmp_path / "a"))
    assert sorted(os.listdir(archive.parent)) == [new.name, archive.name]


def test_readers_see_whole_archives_while_others_write(archive: Path, tmp_path: Path) -> None:
    """Each archive has one number in all of its files."""
    enough = threading.Event()

    def write(number: int) -> None:
        turn = 0
        while not enough.is_set():
            turn += 1
            folder = tmp_path / f"w{number}-{turn}"
            value = b"%d.%d" % (number, turn)
            store(archive, compiled(folder, {f"f{i}": value * 2000 for i in range(20)}))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    limit = time.monotonic() + 120
    seen: set[bytes] = set()
    try:
        for turn in itertools.count():
            folder = tmp_path / f"r{turn}"
            if restore(archive, folder):
                assert len(content(folder)) == 20
                (value,) = set(content(folder).values())
                seen.add(value)
            if len(seen) >= 20:
                break
            assert time.monotonic() < limit, f"{len(seen)} archives were read"
    finally:
        enough.set()
        for writer in writers:
            writer.join()


def test_key_depends_on_what_is_compiled(tmp_path: Path) -> None:
    gpu = tmp_path / "proc/driver/nvidia/gpus/0/information"
    gpu.parent.mkdir(parents=True)
    gpu.write_text("Model: \t\t NVIDIA H100\nIRQ:   7\n")
    one = key(["a"], b"{}", tmp_path)
    assert key(["a"], b"{}", tmp_path) == one
    gpu.write_text("Model: \t\t NVIDIA H100\nIRQ:   8\n")
    assert key(["a"], b"{}", tmp_path) == one
    others = {key(["b"], b"{}", tmp_path), key(["a"], b"{ }", tmp_path), key(["a"], b"{}", tmp_path / "none")}
    gpu.write_text("Model: \t\t NVIDIA B200\n")
    assert len(others | {one, key(["a"], b"{}", tmp_path)}) == 5


def test_variables_of_the_user_stay(tmp_path: Path) -> None:
    found = environment(tmp_path, {"TRITON_CACHE_DIR": "/mine"})
    assert found["VLLM_CACHE_ROOT"] == f"{tmp_path}/vllm"
    assert "TRITON_CACHE_DIR" not in found
