"""The chart as helm renders it, and the snapshots of that."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml
from queries import CHART

HERE = Path(__file__).parent
VALUES = {path.stem: path for path in sorted((HERE / "values").glob("*.yaml"))}
RELEASE, NAMESPACE = "scalerl", "scalerl-system"
KUBE_VERSION = "1.34.0"

Object = dict[str, Any]


class HelmError(Exception):
    """What helm said."""


def render(helm: str, *options: str, chart: Path = CHART, release: str = RELEASE) -> list[Object]:
    """`helm template`, parsed, in a settled order."""
    done = subprocess.run(
        [
            *(helm, "template", release, str(chart), "--namespace", NAMESPACE),
            *("--kube-version", KUBE_VERSION, *options),
        ],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    if done.returncode != 0:
        raise HelmError(done.stderr)
    objects = [obj for obj in yaml.load_all(done.stdout, yaml.CSafeLoader) if obj is not None]
    return sorted(
        objects, key=lambda obj: (obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
    )


def abridged(objects: list[Object]) -> list[Object]:
    """Without what other tests hold, and what would hide everything else: the schema and the dashboards."""
    short = []
    for obj in objects:
        if obj["kind"] == "CustomResourceDefinition":
            obj = obj | {"spec": "as in crds/"}
        if obj["kind"] == "ConfigMap":
            obj = obj | {"data": dict.fromkeys(obj["data"], "as in dashboards/")}
        short.append(obj)
    return short


def snapshot(name: str) -> Path:
    return HERE / "snapshots" / f"{name}.yaml"


def snapshots() -> dict[str, list[Object]]:
    """What helm renders for each file of values; that it still does is a test with helm."""
    return {name: list(yaml.load_all(snapshot(name).read_text(), yaml.CSafeLoader)) for name in VALUES}


def dump(objects: list[Object]) -> str:
    return yaml.safe_dump_all(objects, sort_keys=True, width=120, allow_unicode=True)
