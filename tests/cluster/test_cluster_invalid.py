"""What only a node can say to runs of ``invalid_specs.yaml`` becomes a condition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from invalid_specs import Case
from invalid_stage import ROWS, is_gone, is_reported, namespace
from stage import serve_runs, stage
from testcluster import Cluster

CRD = "scalerlruns.scalerl.dev"


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, and it serves runs. What was not there before goes: whole runs come with the chart, which brings its own."""
    there = cluster.kubectl("get", "crd", CRD, "--ignore-not-found")
    serve_runs(cluster)
    yield cluster
    if not there:
        cluster.kubectl("delete", "crd", CRD, "--timeout=500s")


@pytest.mark.parametrize("case", [case for case in ROWS if case.nodes], ids=lambda case: case.name)
async def test_node_failures_are_conditions(served: Cluster, case: Case) -> None:
    async with stage(served, namespace(case)) as at:
        try:
            await is_reported(served, at, case)
        finally:
            await is_gone(at)
