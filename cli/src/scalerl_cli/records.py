"""A record of decisions, from wherever a person has it: a run's directory, its file, or a cluster's ConfigMaps."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from scalerl_api.paths import RunPaths

KEY: Final = RunPaths(Path()).decisions.name
RUN_LABEL: Final = "scalerl.dev/run"
_CHUNK: Final = re.compile(r"-decisions(?:-([0-9]+))?$")
_HOW: Final = f"kubectl get configmap -l {RUN_LABEL}=NAME -o yaml"
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A long record takes the other one a minute."""


class RecordProblem(Exception):
    """There is no record to be had from there; the message says why and what to do."""


def recorded(source: Path) -> tuple[str, bytes]:
    """What to call it, and its content.

    source: a run's directory; a ``decisions.jsonl``; what kubectl prints of ConfigMaps (a List, one object or several
    documents, as YAML or JSON); ``-`` is standard input.

    Raises:
        RecordProblem
    """
    try:
        if source.is_dir():
            source = source / KEY
        content = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
    except OSError as error:
        raise RecordProblem(
            f"{source}: {error.strerror}; a run writes its decisions with autoscaling.mode Advisory or Auto"
        ) from error
    if source.name == KEY or content.startswith(b'{"format":'):
        return str(source), content
    try:
        chunks = _chunks(list(_config_maps(_documents(content))))
    except (ValueError, yaml.YAMLError) as error:
        raise RecordProblem(f"{source}: {error}") from error
    return str(source), "".join(chunks).encode()


def _documents(content: bytes) -> Iterator[Any]:
    try:
        yield json.loads(content)
    except ValueError:
        yield from yaml.load_all(content, Loader=_Loader)


def _config_maps(documents: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Those with decisions in them."""
    for document in documents:
        if not isinstance(document, dict):
            continue
        if isinstance(document.get("items"), list):
            yield from _config_maps(iter(document["items"]))
        elif document.get("kind") == "ConfigMap" and KEY in (document.get("data") or {}):
            yield document


def _chunks(config_maps: list[dict[str, Any]]) -> list[str]:
    """Their contents in order; ValueError unless they are all of one run's."""
    if not config_maps:
        raise ValueError(f"no ConfigMap with {KEY} in it; `{_HOW}` prints those of a run")
    found: dict[int, str] = {}
    runs = set()
    for config_map in config_maps:
        metadata = config_map.get("metadata") or {}
        name = str(metadata.get("name", ""))
        number = _CHUNK.search(name)
        if number is None:
            raise ValueError(f"ConfigMap {name!r} is not called like one that the operator writes")
        runs.add(f"{metadata.get('namespace', 'default')}/{name[: number.start()]}")
        found[int(number[1] or 1)] = str(config_map["data"][KEY])
    if len(runs) > 1:
        raise ValueError(f"the records of {len(runs)} runs ({', '.join(sorted(runs))}): give one (`{_HOW}`)")
    missing = set(range(1, max(found) + 1)) - found.keys()
    if missing:
        name = f"{runs.pop()}-decisions" + (f"-{min(missing)}" if min(missing) > 1 else "")
        raise ValueError(f"ConfigMap {name} is missing: the record is in all of them together (`{_HOW}`)")
    return [found[number] for number in sorted(found)]
