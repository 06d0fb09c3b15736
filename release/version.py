"""The version of a release, wherever it stands; ``version.py X.Y.Z`` writes another one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = (
    "processes",
    "api",
    "tasks",
    "curvefit",
    "coordinator",
    "trainer",
    "generator",
    "lifecycle",
    "autoscaling",
    "local",
    "operator",
    "analysis",
    "cli",
    "extras",
)
_PYPROJECT = re.compile(r'(^version = "|"scalerl-[a-z]+(?:\[[a-z]+\])?==)([^"]+)', re.MULTILINE)
_CHART = re.compile(r"(^(?:appVersion|version): )(\S+)", re.MULTILINE)
PLACES = {
    **{f"{folder}/pyproject.toml": _PYPROJECT for folder in (*MEMBERS, "release")},
    "charts/scalerl/Chart.yaml": _CHART,
}
"""Files with the version, by what finds it there. The default tag of the images is the chart's appVersion."""


def released(root: Path = ROOT) -> list[str]:
    """The versions of the changelog, newest first; the first is the one that is worked on."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.findall(r"^## (\d\S*)", text, re.MULTILINE)


def found(root: Path = ROOT) -> dict[str, set[str]]:
    """The versions in each of these files."""
    return {
        name: {match[2] for match in pattern.finditer((root / name).read_text(encoding="utf-8"))}
        for name, pattern in PLACES.items()
    }


def write(version: str, root: Path = ROOT) -> None:
    """Set it in all of them."""
    for name, pattern in PLACES.items():
        text = (root / name).read_text(encoding="utf-8")
        (root / name).write_text(pattern.sub(rf"\g<1>{version}", text), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", sys.argv[1]):
        sys.exit("usage: version.py X.Y.Z or X.Y.ZrcN")
    write(sys.argv[1])
