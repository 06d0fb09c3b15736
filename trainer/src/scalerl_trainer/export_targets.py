"""Targets for copies of exported models: a mounted path, a hub repository, an S3 bucket.

========================== =================================================================================
``/path``                  ``<path>/step-<version>/``, atomically
``hf://owner/name``        the best model in revision ``main``, the last in ``last``: one commit each
``s3://bucket/prefix``     ``<prefix>/step-<version>/``; ``<prefix>/exports.json``, written last, names the complete ones
========================== =================================================================================

On a path and in a bucket, versions that are no longer best or last are removed. The client libraries read the
credentials: ``HF_TOKEN`` (and ``HF_ENDPOINT``); those of a bucket as :mod:`.object_store` says.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from scalerl_api.exports import EXPORTS_FILE, ExportedModel
from scalerl_api.object_store import ObjectStore, StoreError
from scalerl_trainer.errors import TrainerError, first_line
from scalerl_trainer.export import STAGED, commit_model

Models = Mapping[str, tuple[ExportedModel, Path]]
"""The model and its folder by role, ``best`` and ``last``."""

_NAME = re.compile(r"^step-\d{8,}$")


class TargetError(TrainerError):
    """A target is unreachable or refuses a copy."""


class Target(Protocol):
    """Destination of copies."""

    def put(self, models: Models) -> dict[int, str]:
        """Copy the models and remove others; returns the URI of each version.

        Raises:
            TargetError: the copy failed; earlier copies are kept.
        """


def open_target(to: str) -> Target:
    """The target of ``trainer.export.to``.

    Raises:
        TargetError: a library is missing; the message names it.
    """
    if to.startswith("hf://"):
        return Hub(to)
    if to.startswith("s3://"):
        return S3Prefix(to)
    return Folder(Path(to))


class Folder:
    """A path on a mounted volume."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, models: Models) -> dict[int, str]:
        uris = {}
        try:
            for model, source in _distinct(models):
                target = self._root / source.name
                uris[model.version] = str(target)
                if model.uri and (not source.is_dir() or _sizes(source) == _sizes(target)):
                    continue  # copied already; of a model whose folder is gone, the copy cannot be made again
                staged = self._root / f"{STAGED}{source.name}"
                shutil.rmtree(staged, ignore_errors=True)
                try:
                    shutil.copytree(source, staged, copy_function=shutil.copyfile)
                    commit_model(staged, target)
                finally:
                    shutil.rmtree(staged, ignore_errors=True)
            names = {source.name for _, source in models.values()}
            for folder in self._root.iterdir():
                if _NAME.match(folder.name) and folder.name not in names:
                    shutil.rmtree(folder)
        except (OSError, shutil.Error) as error:
            raise TargetError(f"{self._root}: {error}") from error
        return uris


class Hub:
    """A repository on a Hugging Face hub."""

    def __init__(self, to: str) -> None:
        import huggingface_hub

        self._to = to
        self._name = to.removeprefix("hf://")
        self._api = huggingface_hub.HfApi()

    def put(self, models: Models) -> dict[int, str]:
        uris = {}
        try:
            self._api.create_repo(self._name, exist_ok=True, private=True)
            # ``last`` is first, so that a model in both roles gets the URI of revision main.
            for role, revision in (("last", "last"), ("best", "main")):
                if role not in models:
                    continue
                model, folder = models[role]
                if model.uri and not folder.is_dir():
                    uris[model.version] = model.uri
                    continue
                if revision != "main":
                    self._api.create_branch(self._name, branch=revision, exist_ok=True)
                self._api.upload_folder(
                    repo_id=self._name,
                    folder_path=folder,
                    revision=revision,
                    commit_message=f"{role}: version {model.version}, reward {model.reward:.4f}",
                    delete_patterns="*.safetensors*",
                )
                uris[model.version] = self._to if revision == "main" else f"{self._to}@{revision}"
        except Exception as error:  # the client raises from several trees: its own, httpx's and OSError
            raise TargetError(f"{self._to}: {type(error).__name__}: {first_line(error)}") from error
        return uris


class S3Prefix:
    """A prefix of an S3 bucket."""

    def __init__(self, to: str) -> None:
        try:
            self._store = ObjectStore(to)
        except StoreError as error:
            raise TargetError(str(error)) from error

    def put(self, models: Models) -> dict[int, str]:
        uris = {}
        try:
            for model, folder in _distinct(models):
                uris[model.version] = f"{self._store.to}/{folder.name}"
                if not model.uri:
                    for file in sorted(folder.iterdir()):
                        self._store.put(f"{folder.name}/{file.name}", file)
            status = {
                role: {"version": m.version, "reward": m.reward, "uri": uris[m.version]}
                for role, (m, _) in models.items()
            }
            self._store.put(EXPORTS_FILE, json.dumps(status, indent=1).encode())
            wanted = {folder.name for _, folder in models.values()}
            self._store.delete(path for path in self._store.sizes() if _is_unwanted(path, wanted))
        except (StoreError, OSError) as error:
            raise TargetError(str(error)) from error
        return uris


def _distinct(models: Models) -> Iterable[tuple[ExportedModel, Path]]:
    """The models without duplicates, since the last is often also the best."""
    return {model.version: (model, folder) for model, folder in models.values()}.values()


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()} if folder.is_dir() else {}


def _is_unwanted(path: str, wanted: set[str]) -> bool:
    folder = path.split("/")[0]
    return _NAME.match(folder) is not None and folder not in wanted
