"""Every query of the shipped dashboards and alerts, as Prometheus gets it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "scalerl"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
ALERTS = CHART / "files" / "alerts.yaml"


@dataclass(frozen=True)
class Asked:
    """A query, and where it stands."""

    where: str
    expr: str


def dashboards() -> list[Asked]:
    """Of all panels, and of the choices at the top."""
    asked = []
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            where = f"{path.stem}: {panel['title']}"
            asked.extend(Asked(where, target["expr"]) for target in panel.get("targets", []))
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                metric = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"])
                assert metric is not None, variable["query"]
                asked.append(Asked(f"{path.stem}: ${variable['name']}", metric[1]))
    return asked


def rules() -> list[dict[str, Any]]:
    """All alerting rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[Asked]:
    """Of all alerting rules."""
    return [Asked(f"alert {rule['alert']}", rule["expr"]) for rule in rules()]


def concrete(expr: str, *, namespace: str, run: str, interval: str = "1m") -> str:
    """The query with a dashboard's variables put in."""
    for variable, value in (("$__rate_interval", interval), ("$namespace", namespace), ("$run", run)):
        expr = expr.replace(variable, value)
    return expr
