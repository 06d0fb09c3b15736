"""The runs of a comparison: variants of a spec, the seeds of each, and the directory of each run."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from scalerl_api.edits import flat
from scalerl_api.recipe.alternatives import ONE_OF
from scalerl_api.spec import ScaleRLRun
from scalerl_cli.exits import Refused
from scalerl_local.resume_changes import OF_A_CLUSTER
from scalerl_local.run_directory import DirectoryProblem, stored_manifest
from scalerl_tasks.dataset.readers import find_files

NOT_OF_THE_RESULT: Final = (
    *OF_A_CLUSTER,
    *("spec.suspend", "spec.trackers", "spec.checkpoint", "spec.trainer.export"),
    *("spec.recipe.preset", "spec.task.jsonl.path", "spec.task.dataset.files"),
)
"""Fields that do not change the result of a run. A preset is compared by its values, data by its content."""
_HASH: Final = 8
"""Characters of the digest in the name of a directory."""


@dataclass(frozen=True)
class Variant:
    """A spec with some fields replaced."""

    label: str
    changes: Mapping[str, Any]
    """New values by path in ``spec``, as :func:`scalerl_cli.inputs.load` takes them."""


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    recipe: str
    run: ScaleRLRun
    prefix: str
    """Start of the name of its directory."""
    digest: str
    """Digest of the fields that decide the result. Defaults are left out, so that a field that a later release adds does not
    change it."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{self.prefix}-{self.digest}"


class _Loader(yaml.SafeLoader):
    """YAML in which a decimal number is text, as in specs, so that ``--vary`` needs no quotes within its quotes."""


_Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_variant(text: str) -> Variant:
    """Parse ``[LABEL:]FIELD=VALUE[;FIELD=VALUE…]``. A value is YAML; ``null`` removes the field.

    Raises:
        Refused: the text has another form.

    >>> parse_variant("recipe.loss={ppoClip: {clipHigh: 0.26}}").changes
    {'recipe.loss': {'ppoClip': {'clipHigh': '0.26'}}}
    >>> parse_variant("dapo loss: spec.recipe.loss={ppoClip: {}}; seed=3")
    Variant(label='dapo loss', changes={'recipe.loss': {'ppoClip': {}}, 'seed': 3})
    """
    label, colon, rest = text.partition(":")
    if not colon or "=" in label:
        label, rest = "", text
    changes: dict[str, Any] = {}
    for assignment in rest.split(";"):
        field, equals, value = assignment.partition("=")
        path = field.strip().removeprefix("spec.")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", path):
            raise Refused(
                f"--vary {text!r}: {assignment.strip()!r} is not FIELD=VALUE; write for example "
                "'dapo loss: recipe.loss={ppoClip: {clipHigh: 0.26}}'"
            )
        try:
            changes[path] = yaml.load(value, Loader=_Loader)  # noqa: S506  # a SafeLoader
        except yaml.YAMLError as error:
            raise Refused(f"--vary {text!r}: {value!r} is not YAML; quote what has a colon") from error
    return Variant(label.strip() or rest.strip(), changes)


def planned(run: ScaleRLRun, recipe: str, variant: Variant | None) -> Planned:
    """A run with the name and the digest of its directory.

    Raises:
        OSError: the data or the model of the run cannot be read.
    """
    parts = [run.metadata.name, *([variant.label] if variant else []), f"seed {run.spec.seed}"]
    prefix = re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")[:100]
    given = run.model_dump(by_alias=True, exclude_defaults=True, mode="json")
    deciding = json.dumps({**_deciding(given), **_data(run)}, sort_keys=True)
    return Planned(recipe, run, prefix, hashlib.sha256(deciding.encode()).hexdigest()[:_HASH])


def earlier_spec(plan: Planned, parent: Path, others: frozenset[str]) -> str:
    """Difference between the spec and that of an older run of the same name in ``parent``; empty if there is no older run.

    Args:
        others: names of the directories of this comparison, which are not older runs.
    """
    for old in sorted(parent.glob(f"{plan.prefix}-{'[0-9a-f]' * _HASH}")):
        if old.name in others:
            continue
        try:
            before = _deciding(stored_manifest(old))
        except DirectoryProblem:
            continue
        now = _deciding(plan.run.to_manifest())
        shown = "; ".join(_changes(before, now, before.keys() | now.keys()))
        return f"its spec is not that of {old} ({shown or 'its data changed'})"
    return ""


def changed_defaults(plan: Planned, directory: Path) -> str:
    """Defaults that differ between this release and the one that made ``directory``; empty if none does.

    Raises:
        DirectoryProblem: the run file cannot be read.
    """
    stored, current = stored_manifest(directory), plan.run.to_manifest()
    before, now = _deciding(stored), _deciding(current)
    changes = _changes(before, now, before.keys() & now.keys())
    # A manifest contains only the chosen alternative of a one-of, so the two manifests have no path of it in common.
    for name in ONE_OF:
        one, other = (manifest["spec"].get("recipe", {}).get(name) for manifest in (stored, current))
        if one and other and one.keys() != other.keys():
            changes.append(f"spec.recipe.{name}: {', '.join(one)} → {', '.join(other)}")
    return "; ".join(changes)


def _changes(before: Mapping[str, str], now: Mapping[str, str], paths: Collection[str]) -> list[str]:
    return [
        f"{path}: {before.get(path, 'not set')} → {now.get(path, 'not set')}"
        for path in sorted(paths)
        if before.get(path) != now.get(path)
    ]


def _deciding(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Values of the spec that decide the result, by path."""
    return {
        path: json.dumps(value)
        for path, value in flat(manifest["spec"], "spec")
        if not any(path == left or path.startswith(f"{left}.") for left in NOT_OF_THE_RESULT)
    }


def _data(run: ScaleRLRun) -> dict[str, Any]:
    """Fingerprint of the files that the spec refers to: data by its content, a model by the names, sizes, and first and
    last MiB of its files."""
    data: dict[str, Any] = {}
    for at, task in enumerate(run.spec.tasks):
        if task.jsonl is not None:
            path = Path(task.jsonl.path)
            data["data" if at == 0 else f"data-{at}"] = _digest_of(path, path.stat().st_mtime_ns)
        elif task.dataset is not None and task.dataset.files is not None:
            files = find_files(task.dataset.files, Path())
            data[f"dataset-{at}"] = [_digest_of(path, path.stat().st_mtime_ns) for path in files]
    if run.spec.model.path is not None:
        files = [file for file in Path(run.spec.model.path).iterdir() if file.is_file()]
        data["model"] = sorted((file.name, file.stat().st_size, _ends_of(file)) for file in files)
    return data


@functools.cache
def _digest_of(path: Path, changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ends_of(path: Path) -> str:
    """Digest of the first and the last MiB, which differ between weights of the same shapes."""
    with path.open("rb") as file:
        first = file.read(1 << 20)
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        return hashlib.sha256(first + file.read()).hexdigest()
