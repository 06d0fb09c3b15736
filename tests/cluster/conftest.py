"""Clusters for tests: `control_plane` is fast and runs no pods, `cluster` runs them; each is there once a session."""

from __future__ import annotations

import json
import os
import shutil
import signal
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
from stage import LONG_TIMEOUT_SECONDS, Stage, own_control_plane, serve_runs, stage
from testcluster import Cluster, Images, MissingError, start_cluster
from testcluster.kind import start_kind, usable
from testcluster.tools import kubectl

from scalerl_operator.kube import connection
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.kinds import kind_of
from scalerl_operator.kube.leader_election import LEASE_NAME


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/cluster" in str(item.path):
            item.add_marker(pytest.mark.cluster)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fixtures can ask how their test went: ``request.node.rep_call``."""
    report = yield
    setattr(item, f"rep_{report.when}", report)
    return report


@pytest.fixture(scope="session")
def halted_control_plane() -> Iterator[Cluster]:
    with own_control_plane() as cluster:
        cluster.send_signal(signal.SIGSTOP)
        yield cluster


@pytest.fixture(scope="module")
def control_plane(halted_control_plane: Cluster) -> Iterator[Cluster]:
    """etcd, API server and controller-manager of this session's own. They stand still while no module uses them: each worker
    has them until the end of all tests, and idle ones take 2 % of a processor."""
    halted_control_plane.send_signal(signal.SIGCONT)
    yield halted_control_plane
    halted_control_plane.send_signal(signal.SIGSTOP)


@pytest.fixture
async def there(control_plane: Cluster) -> AsyncIterator[Stage]:
    """A stage of the test's own."""
    async with stage(control_plane, f"stage-{uuid.uuid4().hex[:8]}") as made:
        yield made


@pytest.fixture(scope="module")
def served(control_plane: Cluster) -> Cluster:
    """The control plane, and it serves runs."""
    serve_runs(control_plane)
    return control_plane


@pytest.fixture
async def api(served: Cluster) -> AsyncIterator[KubeApi]:
    """The operator's client of it, without a fence."""
    configuration = await connection.load(str(served.kubeconfig))
    async with KubeApi(configuration, timeout=LONG_TIMEOUT_SECONDS) as client:
        yield client


@pytest.fixture
def namespace(served: Cluster) -> Iterator[str]:
    """A namespace of the test's own, with a Lease that an operator has given up: the next leads at once."""
    name = f"io-{uuid.uuid4().hex[:8]}"
    served.kubectl("create", "namespace", name)
    lease = {"kind": "Lease", "metadata": {"name": LEASE_NAME}, "spec": {"holderIdentity": ""}}
    served.kubectl(
        "create",
        "-n",
        name,
        "-f",
        "-",
        stdin=json.dumps({"apiVersion": kind_of("Lease").api_version, **lease}),
    )
    yield name
    served.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster that runs pods: that of KUBECONFIG, else kind where Docker runs, else one of our own."""
    named = os.environ.get("KUBECONFIG")
    if named:
        found = shutil.which("kubectl")
        yield Cluster(Path(named), Path(found) if found else kubectl())
        return
    try:
        cluster = start_kind() if usable() else start_cluster()
    except MissingError as error:
        pytest.skip(f"no cluster can be run here: {error}")
    with cluster:
        yield cluster


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> dict[str, str]:
    """The names of the project's images by role (operator, trainer, generator), built and where the nodes find them."""
    try:
        return Images(cluster).load()
    except MissingError as error:
        pytest.skip(f"no images can be made here: {error}")
