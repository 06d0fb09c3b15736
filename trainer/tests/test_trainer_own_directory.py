"""Pods with directories of their own: the prepared model and the trainer's files go through an object store, a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from s3_server import BUCKET, S3Server
from test_trainer_prepare import make

from scalerl_api.object_store import ObjectStore, StoreError
from scalerl_api.paths import RunPaths
from scalerl_tasks import SourceError, open_tasks
from scalerl_trainer import fetch_model, prepare
from scalerl_trainer.object_store_folders import fetch, upload

pytestmark = pytest.mark.slow


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def folder_of(root: Path, name: str = "folder") -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(bytes(range(256)) * 8)
    return folder


# --- folders -------------------------------------------------------------------------------------------------


def test_folder_is_fetched_as_uploaded(tmp_path: Path, s3: S3Server) -> None:
    store, folder = ObjectStore(f"s3://{BUCKET}/whole"), folder_of(tmp_path)
    (folder / "b.safetensors").symlink_to("/models/snapshot/b.safetensors")
    assert not fetch(store, "model", tmp_path / "early")
    upload(store, "model", folder.iterdir())
    assert fetch(store, "model", tmp_path / "there")
    assert os.readlink(tmp_path / "there/b.safetensors") == "/models/snapshot/b.safetensors"
    for each in (folder, tmp_path / "there"):
        (each / "b.safetensors").unlink()
    assert files_of(tmp_path / "there") == files_of(folder)
    assert fetch(store, "model", tmp_path / "tokenizer", leave_out=".safetensors")
    assert "a.safetensors" not in files_of(tmp_path / "tokenizer")
    assert not list(tmp_path.glob(".*"))


def test_folder_is_sent_once_and_fetched_again_if_changed(tmp_path: Path, s3: S3Server) -> None:
    store, folder, there = ObjectStore(f"s3://{BUCKET}/once"), folder_of(tmp_path), tmp_path / "there"
    for _ in range(2):
        upload(store, "model", folder.iterdir())
    assert s3.sent("once/model/a.safetensors") == 1
    assert fetch(store, "model", there)
    (there / "a.safetensors").write_bytes(bytes(2048))  # of the same size
    (there / "left-over").touch()
    assert fetch(store, "model", there)
    assert files_of(there) == files_of(folder)


@pytest.mark.parametrize("fault", ["changed", "shorter", "gone", "index", "elsewhere"])
def test_fetch_refuses_a_damaged_folder(tmp_path: Path, s3: S3Server, fault: str) -> None:
    store = ObjectStore(f"s3://{BUCKET}/{fault}")
    upload(store, "model", folder_of(tmp_path).iterdir())
    if fault == "changed":
        store.put("model/a.safetensors", bytes(2048))
    elif fault == "shorter":
        store.put("model/a.safetensors", bytes(1024))
    elif fault == "gone":
        store.delete(["model/a.safetensors"])
    elif fault == "index":
        store.put("model/files.json", b'{"files": [')
    else:
        record = b'{"path": "../a", "bytes": 1, "sha256": ""}'
        store.put("model/files.json", b'{"files": [' + record + b'], "links": {}}')
    with pytest.raises(StoreError, match=rf"^s3://{BUCKET}/{fault}"):
        fetch(store, "model", tmp_path / "there")
    assert not (tmp_path / "there").exists()
    assert not list(tmp_path.glob("*.there*"))


def test_upload_that_fails_leaves_no_index(tmp_path: Path, s3: S3Server) -> None:
    """The index of the earlier content must not name files that are half replaced."""
    store, folder = ObjectStore(f"s3://{BUCKET}/half"), folder_of(tmp_path)
    upload(store, "model", folder.iterdir())
    (folder / "config.json").write_text('{"a": 1}')
    s3.refuse(3)
    try:
        with pytest.raises(StoreError, match="403 Forbidden"):
            upload(store, "model", folder.iterdir())
    finally:
        s3.refuse(float("inf"))
    assert not fetch(store, "model", tmp_path / "there")
    upload(store, "model", folder.iterdir())
    assert fetch(store, "model", tmp_path / "there")


def test_unreadable_index_is_replaced(tmp_path: Path, s3: S3Server) -> None:
    store, folder = ObjectStore(f"s3://{BUCKET}/unreadable"), folder_of(tmp_path)
    store.put("model/files.json", b'{"files": [')
    upload(store, "model", folder.iterdir())
    assert fetch(store, "model", tmp_path / "there")


def test_folder_without_space_is_not_begun(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder = ObjectStore(f"s3://{BUCKET}/space"), folder_of(tmp_path)
    upload(store, "model", folder.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=2049, f_frsize=1))
        with pytest.raises(OSError, match=r"space/model needs 2,050 bytes and 2,049 are free: .* enlarge"):
            fetch(store, "model", tmp_path / "new/there")
    assert s3.read("space/model/a.safetensors") == 0
    assert fetch(store, "model", tmp_path / "new/there")


# --- preparation and init container --------------------------------------------------------------------------


def environment_of(paths: RunPaths, directory: Path) -> dict[str, str]:
    return {
        "SCALERL_DIR": str(directory),
        "SCALERL_RUN_FILE": str(paths.root / "run.yaml"),
        "SCALERL_NAME": "x",
        "SCALERL_COORDINATOR_URL": "http://127.0.0.1:9",
        "SCALERL_TOKEN_FILE": str(paths.root / "token"),
        "SCALERL_OWN_DIRECTORY": "true",
    }


def test_model_reaches_a_pod_with_its_own_directory(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real preparation, a repeated one on another node, the init container as a process, and one without weights."""
    caplog.set_level("INFO")
    monkeypatch.setattr("scalerl_trainer.model_checks._structure", lambda *_: ())
    to = f"s3://{BUCKET}/run"
    paths, _ = make(tmp_path / "spec", checkpoint={"to": to}, storage={"mountedBy": "Coordinator"})
    for name in ("first", "second"):
        for variable, value in environment_of(paths, tmp_path / name).items():
            monkeypatch.setenv(variable, value)
        (tmp_path / name).mkdir()
        assert prepare.main() == 0, caplog.text
    model = files_of(tmp_path / "first/model")
    assert files_of(tmp_path / "second/model") == model
    weights = [name for name in model if name.endswith(".safetensors")]
    assert [s3.sent(f"run/model/{name}") for name in weights] == [1]
    assert f"{to}/model is that of an earlier preparation" in caplog.text

    container = subprocess.run(
        [sys.executable, "-m", "scalerl_trainer.fetch_model"],
        env=os.environ | environment_of(paths, tmp_path / "generator"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert container.returncode == 0, container.stderr
    assert files_of(tmp_path / "generator/model") == model
    monkeypatch.setenv("SCALERL_DIR", str(tmp_path / "coordinator"))
    assert fetch_model.main(["--without-weights"]) == 0
    assert files_of(tmp_path / "coordinator/model").keys() == model.keys() - {*weights}


def test_data_set_is_read_once_for_all_pods(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The table of the first preparation counts: not the files that a repeated one, or a pod without them, would read."""
    caplog.set_level("INFO")
    monkeypatch.setattr("scalerl_trainer.model_checks._structure", lambda *_: ())
    file, to = tmp_path / "d.csv", f"s3://{BUCKET}/tables"
    file.write_text("prompt,answer\n" + "".join(f"{i} + 1 =,{i + 1}\n" for i in range(40)))
    changes = {"checkpoint": {"to": to}, "storage": {"mountedBy": "Coordinator"}}
    task = {"dataset": {"files": [str(file)]}, "verifier": {"name": "number"}, "heldOut": {"size": 2}}
    paths, spec = make(tmp_path / "spec", task=task, **changes)
    for name in ("first", "second"):
        for variable, value in environment_of(paths, tmp_path / name).items():
            monkeypatch.setenv(variable, value)
        (tmp_path / name).mkdir()
        assert prepare.main() == 0, caplog.text
        file.write_text("prompt,answer\nanother,1\n" * 40)
    file.unlink()
    assert f"{to}/data is that of an earlier preparation" in caplog.text
    monkeypatch.setenv("SCALERL_DIR", str(tmp_path / "coordinator"))
    assert fetch_model.main(["--without-weights"]) == 0
    digests = {
        name: open_tasks(spec, tmp_path / name).tasks[0].train.digest
        for name in ("first", "second", "coordinator")
    }
    assert len(set(digests.values())) == 1
    with pytest.raises(SourceError, match="no such file"):
        open_tasks(spec, tmp_path / "without")


def test_fetch_model_says_what_is_missing(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths, _ = make(tmp_path / "spec", checkpoint={"to": f"s3://{BUCKET}/never"})
    for variable, value in environment_of(paths, tmp_path / "pod").items():
        monkeypatch.setenv(variable, value)
    assert fetch_model.main([], pauses=(0.0,)) == 1
    assert caplog.messages[-1] == f"s3://{BUCKET}/never/model: the preparation has not uploaded it"
    make(tmp_path / "spec", checkpoint={"to": "s3://absent-bucket/run"})
    assert fetch_model.main([]) == 2, "it is not tried again"
    assert caplog.messages[-1].startswith(
        "checkpoint.to: s3://absent-bucket/run: there is no such bucket: create"
    )
    make(tmp_path / "spec")
    assert fetch_model.main([]) == 2
    assert caplog.messages[-1].startswith("checkpoint.to: it is not set")
