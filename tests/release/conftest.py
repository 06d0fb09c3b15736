"""A release to try: of ``SCALERL_RELEASE``, or made here from the last commit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    if given := os.environ.get("SCALERL_RELEASE"):
        assert (Path(given) / "SHA256SUMS").is_file(), f"{given} is no release; `make release` makes one"
        return Path(given)
    clone = tmp_path_factory.mktemp("clone")  # what is not committed is not asked for
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    folder = tmp_path_factory.mktemp("release") / "made"
    command = [sys.executable, str(clone / "release/build.py"), "--into", str(folder)]
    subprocess.run(command, check=True, timeout=1200)
    shutil.rmtree(clone)
    return folder
