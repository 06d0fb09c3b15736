"""helm against a cluster, and an older chart to upgrade from."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from charts import HelmError
from queries import CHART

CRD = "scalerl.dev_scalerlruns.yaml"


@dataclass(frozen=True)
class Helm:
    """helm with a cluster's environment, in one namespace."""

    program: str
    env: Mapping[str, str]
    namespace: str

    def __call__(self, *words: str, seconds: float = 900.0) -> str:
        """What helm printed; HelmError with what it said instead."""
        done = subprocess.run(
            [self.program, "--namespace", self.namespace, *words],
            capture_output=True, text=True, timeout=seconds, env={**self.env},
        )  # fmt: skip
        if done.returncode != 0:
            raise HelmError(done.stderr)
        return done.stdout


def older_chart(into: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The chart as of an earlier release: its CRD's schema of a spec before ``change``."""
    chart = _older(into)
    path = chart / "files" / "crds" / CRD
    crd = yaml.safe_load(path.read_text())
    change(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    crd["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    # As JSON: YAML of this library writes 1e-4 without quotes, and Go would read a number.
    path.write_text(json.dumps(crd))
    return chart


def chart_before(into: Path, value: str, was: str) -> Path:
    """The chart as of an earlier release: ``value`` was none yet, and what it says now, the templates said (``was``)."""
    chart = _older(into)
    path = chart / "values.yaml"
    values = yaml.safe_load(path.read_text())
    schema = json.loads((chart / "values.schema.json").read_text())
    *above, name = value.split(".")
    held, described = values, schema
    for key in above:
        held, described = held[key], described["properties"][key]
    del held[name], described["properties"][name]
    described["required"].remove(name)
    path.write_text(yaml.safe_dump(values))
    (chart / "values.schema.json").write_text(json.dumps(schema))
    used = 0
    for template in (chart / "templates").rglob("*"):
        if template.is_file():
            text = template.read_text()
            used += text.count(f".Values.{value}")
            template.write_text(text.replace(f".Values.{value}", was))
    assert used
    return chart


def _older(into: Path) -> Path:
    chart = into / "older"
    shutil.copytree(CHART, chart)
    manifest = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(manifest | {"version": "0.0.1", "appVersion": "0.0.1"}))
    return chart
