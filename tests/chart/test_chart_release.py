"""The chart as it is released: helm takes it from a registry that holds the OCI archive, and installs it."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from queries import CHART, ROOT
from releases import Helm

sys.path.insert(0, str(ROOT / "release"))
from chart import MANIFEST, write_oci_archive

if TYPE_CHECKING:
    from testcluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.full]
METADATA = yaml.safe_load((CHART / "Chart.yaml").read_text())
NAME = f"{METADATA['name']}-{METADATA['version']}"


@pytest.fixture
def packaged(helm: str, control_plane: Cluster, tmp_path: Path) -> Path:
    """What `make release` made of the chart, or would make."""
    if given := os.environ.get("SCALERL_RELEASE"):
        return Path(given) / f"{NAME}.tgz"
    Helm(helm, control_plane.env, "default")("package", "-d", str(tmp_path), str(CHART))
    write_oci_archive(tmp_path / f"{NAME}.tgz", METADATA, tmp_path / f"{NAME}.oci.tar")
    return tmp_path / f"{NAME}.tgz"


@pytest.fixture
def registry(packaged: Path) -> Iterator[str]:
    """A registry with nothing but the archive; read only."""
    with tarfile.open(packaged.with_suffix(".oci.tar")) as tar:
        held = {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    (tagged,) = json.loads(held["index.json"])["manifests"]
    tag = tagged["annotations"]["org.opencontainers.image.ref.name"]

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            what = self.path.removeprefix("/v2/team/scalerl/").removeprefix("/v2/")
            digest = what.replace(f"manifests/{tag}", tagged["digest"]).rpartition("/")[2]
            data = held.get(f"blobs/{digest.replace(':', '/')}")
            self.send_response(200 if data is not None or not what else 404)
            self.send_header("Content-Length", str(len(data or b"")))
            if data is not None:
                kind = MANIFEST if digest == tagged["digest"] else "application/octet-stream"
                self.send_header("Content-Type", kind)
                self.send_header("Docker-Content-Digest", digest)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"oci://127.0.0.1:{server.server_port}/team/scalerl"
        server.shutdown()


def test_helm_installs_it_from_a_registry(helm, control_plane, packaged, registry, tmp_path) -> None:
    control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "chart-released"}})
    client = Helm(helm, control_plane.env, "chart-released")
    of = (registry, "--version", METADATA["version"], "--plain-http")
    (tmp_path / "pulled").mkdir()
    client("pull", *of, "-d", str(tmp_path / "pulled"))
    assert (tmp_path / "pulled" / packaged.name).read_bytes() == packaged.read_bytes()
    client("install", "scalerl", *of, "--wait", "--timeout", "600s")
    try:
        (release,) = json.loads(client("list", "--output", "json"))
        assert (release["chart"], release["app_version"]) == (NAME, METADATA["appVersion"])
        (deployment,) = control_plane.get("deployments", "-n", "chart-released")["items"]
        images = {one["image"] for one in deployment["spec"]["template"]["spec"]["containers"]}
        assert images == {f"scalerl-operator:{METADATA['appVersion']}"}
        assert control_plane.get("crd", "scalerlruns.scalerl.dev")["spec"]["group"] == "scalerl.dev"
    finally:
        client("uninstall", "scalerl")
        control_plane.kubectl("delete", "crd", "scalerlruns.scalerl.dev", "--ignore-not-found")
