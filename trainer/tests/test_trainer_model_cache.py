"""The cache of models that runs share: one download, no partial model, whatever happens to the downloaders."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, HubModels
from test_trainer_prepare import make

from scalerl_api.paths import RunPaths
from scalerl_api.process import MODEL_CACHE
from scalerl_api.status import ModelStatus
from scalerl_trainer import model_cache
from scalerl_trainer.model_cache import LIST, CacheError, ModelCache, NotCached
from scalerl_trainer.models.files import stored_tensors
from scalerl_trainer.prepare import prepare, report_model

NAME = "me/tiny"
WEIGHTS = random.Random(0).randbytes(400_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" * 1000,
    "model.safetensors": WEIGHTS,
    "README.md": b"not a part of the model",
    "original/model.safetensors": b"another copy",
}
PATTERNS = ("*.json", "model.safetensors")
TIMEOUTS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
"""After which the client would download again from a hub that is slow."""
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}
DOWNLOAD = (
    "import sys; from pathlib import Path; from scalerl_trainer.model_cache import ModelCache; "
    f"print(ModelCache(Path(sys.argv[1])).folder({NAME!r}, sys.argv[2], {PATTERNS!r}))"
)


@pytest.fixture
def hub() -> Iterator[HubModels]:
    server = HubModels(NAME, dict(FILES))
    yield server
    server.close()


@pytest.fixture
def cache(tmp_path: Path, hub: HubModels, monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    """A cache whose client, in this process, asks ``hub``."""
    for module in ("constants", "hf_api", "file_download", "_commit_api", "utils._http"):
        one = importlib.import_module(f"huggingface_hub.{module}")
        if hasattr(one, "ENDPOINT"):
            monkeypatch.setattr(one, "ENDPOINT", hub.url)
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in TIMEOUTS:
        monkeypatch.setattr(constants, name, 120)
    return ModelCache(tmp_path / "models", poll_seconds=0.05)


def environment(hub: HubModels) -> dict[str, str]:
    timeouts = dict.fromkeys(TIMEOUTS, "120")
    return {
        **os.environ,
        **timeouts,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }


def started(root: Path, hub: HubModels, revision: str = COMMIT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DOWNLOAD, str(root), revision],
        env=environment(hub), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def assert_is_the_model(folder: Path) -> None:
    found = content(folder)
    assert found.pop(LIST)
    assert found == {name: FILES[name] for name in WANTED}


def test_stores_a_branch_by_its_commit_and_downloads_it_once(cache: ModelCache, hub: HubModels) -> None:
    folder = cache.folder(NAME, "main", PATTERNS)
    assert folder.name == COMMIT
    assert_is_the_model(folder)
    assert {p.name for p in folder.parent.iterdir()} == {COMMIT, f".{COMMIT}.lock"}
    assert cache.folder(NAME, COMMIT, PATTERNS) == cache.folder(NAME, "main", PATTERNS) == folder
    assert hub.downloads == dict.fromkeys(WANTED, 1)


def test_needs_no_hub_for_a_commit_that_it_has(cache: ModelCache, hub: HubModels) -> None:
    cache.folder(NAME, COMMIT, PATTERNS)
    before = len(hub.requests)
    cache.folder(NAME, COMMIT, PATTERNS)
    assert len(hub.requests) == before


def test_checks_small_files_before_it_downloads_weights(cache: ModelCache, hub: HubModels) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "config.json").read_bytes() == FILES["config.json"]
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        cache.folder(NAME, COMMIT, PATTERNS, check=refuse)
    assert hub.downloads["model.safetensors"] == 0
    assert_is_the_model(cache.folder(NAME, COMMIT, PATTERNS))


@pytest.mark.parametrize("name", sorted(WANTED))
def test_downloads_wrong_bytes_again_once(cache: ModelCache, hub: HubModels, name: str) -> None:
    hub.wrong[name] = 1
    assert_is_the_model(cache.folder(NAME, COMMIT, PATTERNS))
    assert hub.downloads[name] == 2


@pytest.mark.parametrize("name", sorted(WANTED))
def test_never_completes_a_model_with_wrong_bytes(
    cache: ModelCache, hub: HubModels, tmp_path: Path, name: str
) -> None:
    hub.wrong[name] = 99
    with pytest.raises(CacheError, match=rf"1 files of me/tiny .* after two downloads: {name}"):
        cache.folder(NAME, COMMIT, PATTERNS)
    assert not (tmp_path / "models/me--tiny" / COMMIT).exists()
    hub.wrong.clear()
    assert_is_the_model(cache.folder(NAME, COMMIT, PATTERNS))


def _truncate(entry: Path) -> None:
    os.truncate(entry / "model.safetensors", 1000)


def _change(entry: Path) -> None:
    (entry / "model.safetensors").write_bytes(bytes(len(WEIGHTS)))


def _garbage(entry: Path) -> None:
    (entry / LIST).write_bytes(b"\x00[[[")


def _other_list(entry: Path) -> None:
    (entry / LIST).write_text('{"model.safetensors": 3}')


DAMAGES: dict[str, Any] = {
    "truncated": _truncate,
    "other bytes": _change,
    "deleted": lambda entry: (entry / "config.json").unlink(),
    "garbage for a list": _garbage,
    "a list of something else": _other_list,
    "no list": lambda entry: (entry / LIST).unlink(),
    "empty": lambda entry: [f.unlink() for f in entry.iterdir()],
    "evicted": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_repairs_a_damaged_model_in_place(cache: ModelCache, hub: HubModels, damage: Any) -> None:
    """A process that has an intact file open keeps it: only damaged files are replaced."""
    entry = cache.folder(NAME, COMMIT, PATTERNS)
    damage(entry)
    intact = (
        {f.name: f.stat().st_ino for f in entry.iterdir() if f.read_bytes() == FILES.get(f.name)}
        if entry.exists()
        else {}
    )
    assert_is_the_model(cache.folder(NAME, "main", PATTERNS))
    assert {name: (entry / name).stat().st_ino for name in intact} == intact
    assert all(hub.downloads[name] == 1 for name in intact)


@pytest.mark.parametrize("damage", ["zeroed", "deleted"])
def test_checks_the_good_copy_of_a_damaged_small_file(cache: ModelCache, hub: HubModels, damage: str) -> None:
    def check(folder: Path) -> None:
        for name in ("config.json", "tokenizer_config.json"):
            if name in WANTED:
                assert (folder / name).read_bytes() == FILES[name]

    config = cache.folder(NAME, COMMIT, PATTERNS) / "config.json"
    config.write_bytes(bytes(len(FILES["config.json"]))) if damage == "zeroed" else config.unlink()
    assert_is_the_model(cache.folder(NAME, COMMIT, PATTERNS, check=check))


def test_accepts_files_with_other_times(cache: ModelCache, hub: HubModels) -> None:
    """As after a copy of the cache to another volume."""
    entry = cache.folder(NAME, COMMIT, PATTERNS)
    os.utime(entry / "model.safetensors", (1, 1))
    cache.folder(NAME, COMMIT, PATTERNS)
    assert hub.downloads["model.safetensors"] == 1


def test_read_only_cache_refuses_what_it_lacks(cache: ModelCache, hub: HubModels, tmp_path: Path) -> None:
    read_only = ModelCache(tmp_path / "models", read_only=True)
    with pytest.raises(
        NotCached, match=r"mounted read-only: store it with a run whose model.cache.readOnly is false"
    ):
        read_only.folder(NAME, COMMIT, PATTERNS)
    assert not (tmp_path / "models").exists()
    entry = cache.folder(NAME, COMMIT, PATTERNS)
    assert read_only.folder(NAME, COMMIT, PATTERNS) == entry
    _truncate(entry)
    with pytest.raises(NotCached):
        read_only.folder(NAME, COMMIT, PATTERNS)


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_file_system_without_locks(
    cache: ModelCache, hub: HubModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(model_cache.errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(model_cache.fcntl, "flock", no_locks)
    folder = cache.folder(NAME, COMMIT, PATTERNS)
    assert_is_the_model(folder)
    assert {p.name for p in folder.parent.iterdir()} == {COMMIT, f".{COMMIT}.lock"}


def test_refuses_paths_outside_of_the_model(cache: ModelCache, hub: HubModels, tmp_path: Path) -> None:
    hub.files["../../model.safetensors"] = b"x"
    with pytest.raises(CacheError, match="lists the file"):
        cache.folder(NAME, COMMIT, ("*",))
    assert not (tmp_path / "models/model.safetensors").exists()


@pytest.mark.parametrize(("name", "revision"), [("me/other", "main"), (NAME, "f" * 40), (NAME, "nightly")])
def test_unknown_model_is_bad_input(hub: HubModels, tmp_path: Path, name: str, revision: str) -> None:
    paths, _ = make(
        tmp_path / "run", {"hub": {"name": name, "revision": revision}, "cache": {"claimName": "models"}}
    )
    done = prepared(paths, hub, tmp_path / "models")
    assert done.returncode == 2
    assert f"model.hub: {name} at revision {revision}: " in done.stderr.splitlines()[-1]


def test_unreachable_hub_is_tried_again(hub: HubModels, tmp_path: Path) -> None:
    """The Job retries after exit code 1; a commit that is stored already needs no hub."""
    paths, _ = make(tmp_path / "run", {"hub": {"name": NAME}, "cache": {"claimName": "models"}})
    hub.close()
    done = prepared(paths, hub, tmp_path / "models")
    assert done.returncode == 1
    assert f"model.hub: {NAME} at revision main: " in done.stderr.splitlines()[-1]


def test_concurrent_runs_download_once(hub: HubModels, tmp_path: Path) -> None:
    hub.seconds_a_chunk = 0.05
    processes = [started(tmp_path / "models", hub) for _ in range(4)]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert_is_the_model(Path(output.strip()))
    assert hub.downloads == dict.fromkeys(WANTED, 1)


def test_killed_downloader_blocks_nobody(hub: HubModels, tmp_path: Path) -> None:
    """Killed at random moments. Meanwhile no complete-looking folder is ever partial; the next process takes over."""
    moments = random.Random(1)
    root, entry = tmp_path / "models", tmp_path / "models/me--tiny" / COMMIT
    hub.seconds_a_chunk = 0.04
    for _ in range(4):
        process = started(root, hub)
        end = time.monotonic() + 120
        while not root.exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 1.2))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
        if entry.exists():
            assert_is_the_model(entry)
    hub.seconds_a_chunk = 0.0
    output, errors = started(root, hub).communicate(timeout=120)
    assert output.strip() == str(entry), errors
    assert_is_the_model(entry)
    assert {p.name for p in entry.parent.iterdir()} == {COMMIT, f".{COMMIT}.lock"}


def test_prepared_run_links_weights_to_the_cache(
    cache: ModelCache, hub: HubModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs, one download. The small files are copied, so that only readers of weights need the cache; an evicted model is
    stored again by the next preparation."""
    monkeypatch.setattr("scalerl_trainer.model_checks._structure", lambda *_: ())
    source, spec = make(tmp_path / "source")
    prepare(source, spec, one_machine=True)
    hub.files = content(source.base_model)
    hub.files.pop("prepared.json")
    root = tmp_path / "models"
    monkeypatch.setenv(MODEL_CACHE, str(root))
    for name in ("one", "two", "one"):
        paths, spec = make(tmp_path / name, {"hub": {"name": NAME}, "cache": {"claimName": "models"}})
        prepare(paths, spec, one_machine=True)
        weights = paths.base_model / "model.safetensors"
        assert os.readlink(weights) == str(root / "me--tiny" / COMMIT / "model.safetensors")
        assert [f.name for f in paths.base_model.iterdir() if f.is_symlink()] == ["model.safetensors"]
        assert {f.name for f in paths.base_model.iterdir()} == {f.name for f in source.base_model.iterdir()}
    assert hub.downloads["model.safetensors"] == 1
    shutil.rmtree(root / "me--tiny" / COMMIT)
    prepare(paths, spec, one_machine=True)
    assert hub.downloads["model.safetensors"] == 2
    monkeypatch.delenv(MODEL_CACHE)
    prepare(*make(tmp_path / "local", {"path": str(paths.base_model), "cache": None}), one_machine=True)


def test_report_of_a_prepared_model(tmp_path: Path) -> None:
    paths, spec = make(tmp_path)
    prepare(paths, spec, one_machine=True)
    report_model(paths.base_model, str(tmp_path / "report"))
    found = ModelStatus.read_report((tmp_path / "report").read_text())
    sizes = [tensor.elements for tensor in stored_tensors(paths.base_model).values()]
    assert found is not None
    assert (found.parameters, found.largest_tensor) == (sum(sizes), max(sizes))
    assert (found.dtype, found.layers, found.hidden_size, found.intermediate_size) == ("F32", 2, 32, 48)
    assert found.checkpoint_bytes == (paths.base_model / "model.safetensors").stat().st_size
    report_model(paths.base_model, str(tmp_path))  # cannot be written: a message only


def prepared(paths: RunPaths, hub: HubModels, root: Path) -> subprocess.CompletedProcess[str]:
    directory = paths.run_file.parent
    variables = {
        "SCALERL_DIR": str(directory),
        "SCALERL_NAME": "prepare-0",
        "SCALERL_COORDINATOR_URL": "http://127.0.0.1:1",
        "SCALERL_TOKEN_FILE": str(directory / "token"),
        "SCALERL_MODEL_CACHE": str(root),
    }
    return subprocess.run(
        [sys.executable, "-m", "scalerl_trainer.prepare"],
        env=environment(hub) | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
