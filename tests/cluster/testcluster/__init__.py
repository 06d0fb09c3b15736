"""A real Kubernetes on one machine, for tests and for use by hand: no Docker, no image registry, no network.

Lives here: building what a cluster is made of, starting it, ending it, making images and getting them into it.
Two sizes. The control plane alone (etcd, API server, controller-manager) is what an operator's tests need: no
root, seconds, several at once. The whole cluster adds a scheduler, a node that runs pods, services, names and
volumes; it lives in namespaces of its own, so that the machine's network, mounts and processes stay as they are.

Never here: anything about what the tests test. Standard library only: this runs before any environment exists.
"""

from testcluster.errors import ClusterError, MissingError
from testcluster.handle import Cluster, KubectlError
from testcluster.images import ROLES, Images
from testcluster.start import start_cluster, start_control_plane

__all__ = [
    "ROLES",
    "Cluster",
    "ClusterError",
    "Images",
    "KubectlError",
    "MissingError",
    "start_cluster",
    "start_control_plane",
]
