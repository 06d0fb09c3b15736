"""A release where there is no checkout: its wheels in empty environments, with what its locks name, and a short run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
OF_A_CHECKOUT = ("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


def environment(made: Path, lock: str, into: Path) -> Path:
    """A new environment with what a lock of the release names, its wheels among it."""
    uv, python = str(BIN / "uv"), str(into / "bin/python")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(into)], check=True)
    wheels, locked = ("--find-links", str(made / "wheels")), str(made / f"requirements/{lock}.txt")
    sync = [uv, "pip", "sync", "-q", "--python", python, "--require-hashes", *wheels, locked]
    subprocess.run(sync, check=True, timeout=1200)
    return into


def run(venv: Path, folder: Path, *words: str) -> str:
    """What a program of the environment printed, in a folder that is no checkout."""
    env = {name: value for name, value in os.environ.items() if name not in OF_A_CHECKOUT}
    argv = [str(venv / "bin" / words[0]), *words[1:]]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def tiny(made: Path, tmp_path: Path) -> Path:
    """The example of the release, for two steps."""
    with tarfile.open(made / "examples.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    file = tmp_path / "examples/tiny/run.yaml"
    resource = yaml.safe_load(file.read_text())
    spec = resource["spec"]
    spec["warmStart"] |= {"steps": 3, "batchSize": 8, "stopAtPassRate": "1"}
    # So early nothing is solved: steps are of groups without a difference.
    spec["recipe"] |= {"promptsPerStep": 4, "completionsPerPrompt": 4, "zeroVarianceFilter": False}
    spec["task"]["heldOut"]["size"] = 8
    spec["trainer"]["replicas"] = 1
    spec["budget"]["maxSteps"] = 2
    file.write_text(yaml.safe_dump(resource))
    return file


def test_sums_are_of_all_files(made: Path) -> None:
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=made, check=True)
    named = {line.split("  ", 1)[1] for line in (made / "SHA256SUMS").read_text().splitlines()}
    there = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert there == named | {"SHA256SUMS"}


@pytest.mark.parametrize("lock", ["control", "cpu", "gpu"])
def test_bill_of_materials_names_what_the_lock_names(made: Path, lock: str) -> None:
    text = (made / f"requirements/{lock}.txt").read_text()
    locked = set(re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", text, re.MULTILINE))
    bill = json.loads((made / f"sbom/{lock}.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert {(part["name"], part["version"]) for part in bill["components"]} == locked
    assert {"scalerl", "scalerl-cli", "aiohttp"} <= {name for name, _ in locked}


def test_a_run_on_this_machine(made: Path, tiny: Path, tmp_path: Path) -> None:
    venv = environment(made, "cpu", tmp_path / "venv")
    (venv / "bin/uv").symlink_to(BIN / "uv")
    subprocess.run([str(ROOT / "requirements/libnuma.sh"), str(venv)], check=True)
    run(venv, tmp_path, "scalerl", "validate", str(tiny))
    run(venv, tmp_path, "scalerl", "run", str(tiny), "--dir", "out")
    assert json.loads((tmp_path / "out/summary.json").read_text())["steps"] == 2
    where = run(venv, tmp_path, "python", "-Pc", "import scalerl_trainer; print(scalerl_trainer.__file__)")
    assert Path(where.strip()).is_relative_to(venv)


def test_commands_for_clusters_without_torch(made: Path, tiny: Path, tmp_path: Path) -> None:
    venv = environment(made, "control", tmp_path / "venv")
    assert not list(venv.glob("lib/*/site-packages/torch"))
    run(venv, tmp_path, "scalerl", "validate", "--any-machine", str(tiny))
    page = "from importlib.resources import files; print(files('scalerl_cli').joinpath('page/index.html').read_text())"
    assert "<html" in run(venv, tmp_path, "python", "-Pc", page)
