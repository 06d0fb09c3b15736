"""The imports of every benchmark resolve: most of them are run only before a release."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_imports_of_a_benchmark_resolve(script: Path) -> None:
    code = f"import runpy, sys; sys.path[0] = {str(script.parent)!r}; runpy.run_path({str(script)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
