"""Makes the helper modules beside it importable, and finds the programs that some tests need.

Tests that need none (`make test-unit`) look at snapshots; those marked `cluster` see to it that helm renders them still.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from testcluster import Cluster

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cluster")]


def _program(name: str) -> str:
    """From ``SCALERL_TEST_<NAME>``, from the path, or as the test cluster builds it. A test without it fails."""
    given = os.environ.get(f"SCALERL_TEST_{name.upper()}") or shutil.which(name)
    if given:
        return given
    from testcluster.tools import tool

    return str(tool(name))


@pytest.fixture(scope="session")
def helm() -> str:
    return _program("helm")


@pytest.fixture(scope="session")
def kubeconform() -> str:
    return _program("kubeconform")


def _debian(name: str) -> str:
    given = os.environ.get(f"SCALERL_TEST_{name.upper()}") or shutil.which(name)
    if given:
        return given
    from testcluster.debian import PROMETHEUS, installed

    installed(PROMETHEUS)
    found = shutil.which(name)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return _debian("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return _debian("prometheus")


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Cluster]:
    """A real API server with its controllers; its nodes are not real, so that pods become ready and run nothing.

    Each of the few modules that use it has one of its own, which costs a start; one that a worker kept until the end of all tests
    would take 2 % of a processor.
    """
    from stage import own_control_plane

    with own_control_plane(unreal_nodes=2) as cluster:
        yield cluster


PROMETHEUS_OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
PROMETHEUS_OPERATOR_SUM = "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s="


@pytest.fixture(scope="session")
def prometheus_operator_crds() -> list[Path]:
    """The definitions of the kinds by which the chart speaks to the Prometheus operator, from its Go module."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", PROMETHEUS_OPERATOR],
        capture_output=True, text=True, timeout=300, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    module = json.loads(done.stdout)
    assert module["Sum"] == PROMETHEUS_OPERATOR_SUM
    folder = Path(module["Dir"]) / "example" / "prometheus-operator-crd"
    kinds = ("servicemonitors", "podmonitors", "prometheusrules")
    return [folder / f"monitoring.coreos.com_{kind}.yaml" for kind in kinds]
