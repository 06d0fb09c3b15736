"""What the CPU images leave out of packages is there to be left out, or the build fails."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREFIX = "/opt/scalerl"
"""Of the environment in the images."""


def removal(name: str) -> str:
    """The command that removes them, in the packages' folder."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / name).read_text()).replace("\\\n", " ")
    (command,) = re.findall(r"rm -[rf]+ (?=[^&]*nvidia/)[^&]*", text)
    return str(command)


def of_cpus() -> bool:
    """Whether the packages here are those of the CPU images: the same lock, the same platform."""
    has_openmp = any(d.name == "intel-openmp" for d in importlib.metadata.distributions())
    return platform.machine() == "x86_64" and has_openmp


@pytest.mark.skipif(not of_cpus(), reason="the packages here are not those of the CPU images")
@pytest.mark.parametrize("name", ["Dockerfile.trainer", "Dockerfile.generator"])
def test_image_build_fails_when_a_removed_part_is_not_found(name: str, tmp_path: Path) -> None:
    site, command = tmp_path / "site", removal(name).replace(PREFIX, str(tmp_path))
    patterns = [word for word in removal(name).split() if "/" in word]
    assert len(patterns) > 10
    found = {pattern: matches(pattern) for pattern in patterns}
    assert [pattern for pattern, paths in found.items() if not paths] == []

    def build(without: str = "") -> int:
        site.mkdir(exist_ok=True)
        for pattern, paths in found.items():
            for path in paths if pattern != without else ():
                copy = tmp_path / path if pattern.startswith(PREFIX) else site / path
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.touch()
        code = subprocess.run(["sh", "-e", "-c", command], cwd=site, capture_output=True).returncode
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        return code

    assert build() == 0
    assert [pattern for pattern in patterns if build(without=pattern) == 0] == []


def matches(pattern: str) -> list[Path]:
    """Of a pattern, what is installed here."""
    inside = pattern.removeprefix(f"{PREFIX}/")
    root = Path(sysconfig.get_path("data" if inside != pattern else "purelib"))
    return [path.relative_to(root) for path in root.glob(inside)]
