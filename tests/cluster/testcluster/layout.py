"""Where a cluster keeps its files, and the addresses inside a node's own network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# A node's network is its own, so these meet no address of the machine or of another cluster.
NODE_ADDRESS = "10.10.0.1"
NODE_API_PORT = 6443
PODS = "10.244.0.0/16"
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
NODE = "node"


@dataclass(frozen=True)
class Layout:
    """The files of one cluster, all below ``root``."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def control(self) -> Path:
        return self.root / "control.sock"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def volumes(self) -> Path:
        return self.root / "volumes"

    @property
    def containerd_socket(self) -> Path:
        return self.root / "containerd.sock"

    @property
    def kubeconfig(self) -> Path:
        """For people and tests, outside the node."""
        return self.root / "kubeconfig"

    @property
    def cgroup(self) -> str:
        return f"scalerl-test-{self.root.name}"

    @property
    def has_node(self) -> bool:
        return self.config("containerd.toml").exists()

    def config(self, name: str) -> Path:
        return self.root / "config" / name

    def kubeconfig_of(self, part: str) -> Path:
        return self.config(f"{part}.kubeconfig")
