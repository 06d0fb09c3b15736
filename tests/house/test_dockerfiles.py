"""What the CPU images leave out of packages is there to be left out, or the build fails; what tests' images are named by."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from testcluster import cache, images

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


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the Dockerfiles, two files in each member, and locks."""
    root = tmp_path / "project"
    for name in (*(f"Dockerfile.{role}" for role in images.ROLES), ".dockerignore"):
        root.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    for lock in (ROOT / "requirements").glob("*.txt"):
        (root / "requirements").mkdir(exist_ok=True)
        (root / "requirements" / lock.name).write_text("1")
    for project in ROOT.glob("*/pyproject.toml"):
        (root / project.parent.name / "src").mkdir(parents=True)
        (root / project.parent.name / "src" / "code.py").write_text("1")
        (root / project.parent.name / "pyproject.toml").write_text("1")
    monkeypatch.setattr(images, "PROJECT", root)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return root


@pytest.mark.parametrize("role", images.ROLES)
def test_edit_of_anything_that_an_image_copies_changes_its_tag(role: str, tree: Path) -> None:
    text = (ROOT / f"Dockerfile.{role}").read_text()
    members = set(re.findall(r"(?m)^COPY (\w+)/src", text))
    assert len(members) >= 5
    locks = {"operator": {"control"}, "trainer": {"cpu", "s3"}, "generator": {"cpu", "s3"}}[role] | {"uv"}
    files = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    before, changing = images.tag(role, "base"), set()
    for file in files:
        old = (tree / file).read_text()
        (tree / file).write_text(f"{old}# 2")
        if images.tag(role, "base") != before:
            changing.add(file)
        (tree / file).write_text(old)
    assert {file.parts[0] for file in changing if file.name == "code.py"} == members
    assert {file.stem for file in changing if file.parts[0] == "requirements"} == locks
    assert {Path(f"Dockerfile.{role}"), Path(".dockerignore"), Path("extras/pyproject.toml")} <= changing
    assert images.tag(role, "another base") != before


def test_packages_are_kept_until_a_lock_their_instructions_or_the_base_change(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Builder(images.Buildah):
        def build(self, role: str, built: object = ()) -> str:
            (self.root / "store").mkdir(parents=True, exist_ok=True)
            return role

    certificates = tree / "certificates"
    certificates.write_text("1")
    monkeypatch.setattr(images, "_CERTIFICATES", certificates)
    monkeypatch.setattr(images.Buildah, "here", lambda: Builder(cache.folder() / "buildah"))
    assert not images.has_packages()
    images.build_all()
    assert images.has_packages()

    def kept_after(file: Path, text: str) -> bool:
        old = file.read_text()
        file.write_text(text)
        kept = images.has_packages()
        file.write_text(old)
        return kept

    assert kept_after(tree / "coordinator/src/code.py", "2")
    dockerfile = tree / "Dockerfile.generator"
    assert kept_after(dockerfile, dockerfile.read_text() + "LABEL last=1\n")
    assert not kept_after(dockerfile, dockerfile.read_text().replace("pip sync", "pip sync -v"))
    assert not kept_after(certificates, "2")
    for lock in ("uv", "control", "cpu"):
        assert not kept_after(tree / f"requirements/{lock}.txt", "2"), lock
    assert images.has_packages()
    shutil.rmtree(cache.folder() / "buildah")
    assert not images.has_packages()
