"""Finds and downloads the files of a data set of the hub, at a commit; works offline from the hub's cache."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from scalerl_tasks.dataset.readers import COMPRESSIONS, SUFFIXES
from scalerl_tasks.errors import SourceError

if TYPE_CHECKING:
    from scalerl_api.dataset_source import HubDataset

_CARD = "README.md"
_SPLITS = ("train", "test", "validation", "dev", "valid", "val", "eval")


def download(hub: HubDataset) -> tuple[list[Path], str]:
    """The files of a split, and the commit that they are of.

    Raises:
        SourceError: no such data set, configuration or split; no access; or no connection and not in the cache.
    """
    where = f"task.dataset.hub: {hub.name} at revision {hub.revision}"
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise SourceError(
            f"{where}: needs huggingface_hub, which is not installed here: pip install huggingface_hub"
        ) from error
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    try:
        card_only: str = huggingface_hub.snapshot_download(
            hub.name, repo_type="dataset", revision=hub.revision, allow_patterns=[_CARD]
        )
        commit = Path(card_only).name
        if offline:
            names = [
                path.relative_to(card_only).as_posix()
                for path in Path(card_only).rglob("*")
                if path.is_file()
            ]
        else:
            names = huggingface_hub.list_repo_files(hub.name, repo_type="dataset", revision=commit)
        wanted = choose_files(names, _card(Path(card_only) / _CARD), hub, where)
        folder = huggingface_hub.snapshot_download(
            hub.name, repo_type="dataset", revision=commit, allow_patterns=wanted
        )
    except SourceError:
        raise
    except GatedRepoError as error:
        raise SourceError(
            f"{where}: access is restricted: accept its terms on its page, and set HF_TOKEN to a token of that account"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise SourceError(
            f"{where}: not found, or private: check name and revision, or set HF_TOKEN"
        ) from error
    except Exception as error:
        # The client raises from several trees: its own, its HTTP library's and OSError.
        if getattr(getattr(error, "response", None), "status_code", None) == 401:
            raise SourceError(
                f"{where}: HF_TOKEN is not a valid token: set another one, or none for a public data set"
            ) from error
        advice = (
            "HF_HUB_OFFLINE is set and it is not in the cache: download it first, or unset the variable"
            if offline
            else "check name, revision, network and access token"
        )
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"{where}: {reason}; {advice}") from error
    files = [Path(folder) / name for name in _with_all_parts(wanted)]
    if missing := [file.relative_to(folder) for file in files if not file.is_file()]:
        raise SourceError(
            f"{where}: {missing[0]} is not in the cache: download it first, or unset HF_HUB_OFFLINE"
        )
    return files, commit


def choose_files(names: Sequence[str], card: dict[str, Any], hub: HubDataset, where: str) -> list[str]:
    """The files of a split, sorted: as the card's ``configs`` say, else by the words in their paths.

    Raises:
        SourceError: no file is of the split, or the configuration is missing or unknown.
    """
    data = sorted(name for name in names if _is_data(name))
    configs = {
        str(entry.get("config_name", "default")): entry
        for entry in card.get("configs") or ()
        if isinstance(entry, dict) and entry.get("data_files")
    }
    if configs:
        default = [name for name, entry in configs.items() if entry.get("default")] or ["default"]
        config = hub.config or (next(iter(configs)) if len(configs) == 1 else default[0])
        if config not in configs:
            problem = (
                "has several configurations" if hub.config is None else f"has no configuration {config!r}"
            )
            raise SourceError(f"{where}: {problem}; set config to one of {', '.join(sorted(configs))}")
        splits = _splits(configs[config], data)
        if hub.split not in splits:
            raise SourceError(
                f"{where}: {config} has no split {hub.split!r}; set split to one of {', '.join(sorted(splits))}"
            )
        return splits[hub.split]
    if hub.config is not None:
        data = [name for name in data if hub.config in name.split("/")[:-1] or _has_word(name, hub.config)]
    of_split = [name for name in data if _has_word(name, hub.split)]
    if not of_split and hub.split == "train":
        # Files without the name of a split are of the split train, as for the library datasets.
        of_split = [name for name in data if not any(_has_word(name, split) for split in _SPLITS)]
    folders = sorted({name.rpartition("/")[0] for name in of_split})
    if not of_split:
        raise SourceError(
            f"{where}: no data files of split {hub.split!r}; its data files: {', '.join(data[:10]) or 'none'}"
        )
    if hub.config is None and len(folders) > 1:
        raise SourceError(f"{where}: has several configurations; set config to one of {', '.join(folders)}")
    return of_split


def _splits(config: dict[str, Any], data: Sequence[str]) -> dict[str, list[str]]:
    given = config["data_files"]
    if isinstance(given, str) or (isinstance(given, list) and all(isinstance(one, str) for one in given)):
        given = [{"split": "train", "path": given}]
    found: dict[str, list[str]] = {}
    for entry in given if isinstance(given, list) else ():
        patterns = entry.get("path") or ()
        patterns = [patterns] if isinstance(patterns, str) else patterns
        folder = str(config.get("data_dir") or "").strip("/")
        patterns = [f"{folder}/{pattern}" if folder else pattern for pattern in patterns]
        files = [name for name in data if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        found[str(entry.get("split", "train"))] = files
    return {split: files for split, files in found.items() if files}


def _with_all_parts(names: Sequence[str]) -> list[str]:
    """With the other parts of files such as ``train-00000-of-00002.parquet``: a cache may have some of them only.

    >>> _with_all_parts(["a-00001-of-00002.parquet"])
    ['a-00000-of-00002.parquet', 'a-00001-of-00002.parquet']
    """
    found = dict.fromkeys(names)
    for name in names:
        if part := re.search(r"-(\d+)-of-(\d+)(?=\.)", name):
            head, tail = name[: part.start()], name[part.end() :]
            digits, total = len(part[1]), int(part[2])
            found |= dict.fromkeys(
                f"{head}-{at:0{digits}}-of-{part[2]}{tail}" for at in range(min(total, 100_000))
            )
    return sorted(found)


def _is_data(name: str) -> bool:
    while name.endswith(COMPRESSIONS):
        name = name.rpartition(".")[0]
    base = name.rpartition("/")[2]
    return name.endswith(SUFFIXES) and base not in (
        "dataset_infos.json",
        "dataset_info.json",
        "state.json",
        "config.json",
    )


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"(?:^|[^A-Za-z0-9]){re.escape(word)}(?:[^A-Za-z0-9]|$)", name) is not None


def _card(file: Path) -> dict[str, Any]:
    """The metadata at the head of a card; empty if there is none."""
    if not file.is_file():
        return {}
    head = re.match(r"---\r?\n(.*?)\r?\n---", file.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        found = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
