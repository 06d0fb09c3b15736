"""A release has one version, and its wheels have every file."""

from __future__ import annotations

import fnmatch
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "release"))
import version  # noqa: E402
from chart import write_oci_archive  # noqa: E402


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def test_one_version_everywhere() -> None:
    assert version.found() == {name: {version.released()[0]} for name in version.PLACES}
    values = yaml.safe_load((ROOT / "charts/scalerl/values.yaml").read_text())
    images = [values["images"][role] for role in ("operator", "trainer", "generator")]
    assert [image["tag"] for image in images] == [""] * 3, "not the chart's appVersion"


def test_members_of_a_release_are_those_that_are_set_up() -> None:
    (members,) = re.findall(r"^MEMBERS := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tuple(members.split()) == version.MEMBERS


def test_members_require_members_at_their_version() -> None:
    for folder in (*version.MEMBERS, "release"):
        made = project(folder)["project"]
        extras = made.get("optional-dependencies", {})
        required = [*made["dependencies"], *(one for extra in extras.values() for one in extra)]
        loose = [one for one in required if one.startswith("scalerl") and "==" not in one]
        assert loose == [], folder
    meta = project("release")["project"]
    named = str([meta["dependencies"], meta["optional-dependencies"]["cpu"]])
    assert set(re.findall(r"scalerl-(\w+)", named)) == set(version.MEMBERS)


def test_members_require_what_they_import_first() -> None:
    """At the top of a module; what a function imports may be of another installation."""
    for member in version.MEMBERS:
        required = str(project(member)["project"]["dependencies"])
        for path in (ROOT / member / "src").rglob("*.py"):
            others = set(re.findall(r"^(?:from|import) scalerl_(\w+)", path.read_text(), re.MULTILINE))
            if "simulation" in path.parts:
                others -= {"generator"}  # `scalerl simulate` needs what runs are made with
            assert others <= {member, *re.findall(r"scalerl-(\w+)", required)}, path


def test_another_version_is_written_everywhere(tmp_path: Path) -> None:
    for name in version.PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version.write("10.2.0rc1", tmp_path)
    assert version.found(tmp_path) == {name: {"10.2.0rc1"} for name in version.PLACES}
    now = version.released()[0]
    for name in version.PLACES:
        assert (tmp_path / name).read_text().replace("10.2.0rc1", now) == (ROOT / name).read_text()


@pytest.mark.parametrize("member", version.MEMBERS)
def test_package_data_names_every_tracked_file(member: str) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", f"{member}/src"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split()
    modules = {Path(name).parent for name in tracked if name.endswith("/__init__.py")}
    data = project(member)["tool"]["setuptools"]["package-data"]
    package = f"scalerl_{member}"
    for name in tracked:
        inside = Path(name).relative_to(f"{member}/src/{package}")
        if name.endswith(".py"):
            assert Path(name).parent in modules, f"{name}: no __init__.py beside it"
        else:
            assert any(fnmatch.fnmatch(str(inside), one) for one in data[package]), f"{name}: in no wheel"


def test_chart_as_an_oci_archive(tmp_path: Path) -> None:
    packaged = tmp_path / "a.tgz"
    packaged.write_bytes(b"chart")
    digest = write_oci_archive(packaged, {"name": "a", "version": "1.2.3"}, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        held = {one.name: (tar.extractfile(one) or io.BytesIO()).read() for one in tar}
    (tag,) = json.loads(held["index.json"])["manifests"]
    assert (tag["digest"], tag["annotations"]) == (digest, {"org.opencontainers.image.ref.name": "1.2.3"})
    manifest = json.loads(held["blobs/" + digest.replace(":", "/")])
    assert held["blobs/" + manifest["layers"][0]["digest"].replace(":", "/")] == b"chart"
    assert json.loads(held["blobs/" + manifest["config"]["digest"].replace(":", "/")])["version"] == "1.2.3"


def test_validate_without_the_packages_of_trainer_and_generator() -> None:
    absent = ["scalerl_trainer", "scalerl_generator", "torch", "vllm", "transformers"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}));"
        "sys.argv[1:] = ['validate', '--any-machine', 'examples/tiny/run.yaml'];"
        "from scalerl_cli.main import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "the model is not checked" in done.stdout + done.stderr
