"""The control plane: etcd, API server, controller-manager, and nodes that are not there with their scheduler."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.layout import API_SERVICE, NODE_ADDRESS, SERVICES, Layout
from testcluster.steps import Start, Step, Wait, argv

# More than the defaults of 20 and 30: tests make a thousand runs at once.
REQUESTS_PER_SECOND = 200
BURST = 400


@dataclass(frozen=True)
class Ports:
    """On loopback of the network that the control plane is in."""

    api: int
    etcd: int
    peers: int


def certificate_names() -> tuple[str, ...]:
    """By what names and addresses the API server is called."""
    service = (
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    )
    return ("localhost", "127.0.0.1", NODE_ADDRESS, API_SERVICE, *service)


def write_kubeconfig(path: Path, layout: Layout, part: str, server: str) -> None:
    """How ``part`` reaches the API server; certificates are inside, so that the file may be copied."""

    def inside(name: str) -> str:
        return base64.b64encode((layout.pki / name).read_bytes()).decode()

    write_json(
        path,
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "scalerl-test",
                    "cluster": {"server": server, "certificate-authority-data": inside("ca.crt")},
                }
            ],
            "users": [
                {
                    "name": part,
                    "user": {
                        "client-certificate-data": inside(f"{part}.crt"),
                        "client-key-data": inside(f"{part}.key"),
                    },
                }
            ],
            "contexts": [{"name": "scalerl-test", "context": {"cluster": "scalerl-test", "user": part}}],
            "current-context": "scalerl-test",
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """JSON is YAML too, so this is every component's configuration file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(json.dumps(value, indent=1) + "\n")


def store_and_api(kube: Path, layout: Layout, ports: Ports, *, node: bool) -> list[Step]:
    """etcd and the API server; with ``node`` they serve pods too, else loopback only."""
    pki = layout.pki
    store = f"http://127.0.0.1:{ports.etcd}"
    peers = f"http://127.0.0.1:{ports.peers}"
    reach: dict[str, Any] = (
        {
            "bind_address": "0.0.0.0",
            "advertise_address": NODE_ADDRESS,
            # Without it logs and exec look the node's name up, and there is no such name.
            "kubelet_preferred_address_types": "InternalIP",
            "kubelet_client_certificate": pki / "apiserver-kubelet.crt",
            "kubelet_client_key": pki / "apiserver-kubelet.key",
        }
        if node
        # The endpoints of a Service cannot be on loopback, so no controller writes those of `kubernetes`.
        else {"bind_address": "127.0.0.1", "endpoint_reconciler_type": "none", "permit_port_sharing": True}
    )
    return [
        Start(
            "etcd",
            argv(
                kube,
                "etcd",
                data_dir=layout.root / "etcd",
                listen_client_urls=store,
                advertise_client_urls=store,
                listen_peer_urls=peers,
                initial_advertise_peer_urls=peers,
                initial_cluster=f"default={peers}",
                unsafe_no_fsync=True,
                socket_reuse_port=True,
                log_level="warn",
            ),
        ),
        Start(
            "kube-apiserver",
            argv(
                kube,
                "kube-apiserver",
                etcd_servers=store,
                secure_port=ports.api,
                tls_cert_file=pki / "apiserver.crt",
                tls_private_key_file=pki / "apiserver.key",
                client_ca_file=pki / "ca.crt",
                authorization_mode=["Node", "RBAC"],
                enable_admission_plugins="NodeRestriction",
                service_account_key_file=pki / "service-accounts.pub",
                service_account_signing_key_file=pki / "service-accounts.key",
                service_account_issuer="https://kubernetes.default.svc.cluster.local",
                service_cluster_ip_range=SERVICES,
                allow_privileged=True,
                profiling=False,
                **reach,
            ),
        ),
        Wait("kube-apiserver", url=f"https://127.0.0.1:{ports.api}/readyz"),
    ]


def controllers(kube: Path, layout: Layout) -> list[Step]:
    """What turns a Job into pods and takes away what its owner left behind."""
    return [
        Start(
            "kube-controller-manager",
            argv(
                kube,
                "kube-controller-manager",
                kubeconfig=layout.kubeconfig_of("kube-controller-manager"),
                leader_elect=False,
                secure_port=0,
                use_service_account_credentials=True,
                service_account_private_key_file=layout.pki / "service-accounts.key",
                root_ca_file=layout.pki / "ca.crt",
                kube_api_qps=REQUESTS_PER_SECOND,
                kube_api_burst=BURST,
            ),
        ),
        # Every namespace gets a service account from it: the first sign that it works.
        Wait(
            "kube-controller-manager",
            argv=argv(
                kube, "kubectl", "get", "serviceaccount", "default", kubeconfig=layout.kubeconfig_of("admin")
            ),
        ),
    ]


def scheduler(kube: Path, layout: Layout) -> list[Step]:
    config = layout.config("kube-scheduler.json")
    write_json(
        config,
        {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {
                "kubeconfig": str(layout.kubeconfig_of("kube-scheduler")),
                "qps": REQUESTS_PER_SECOND,
                "burst": BURST,
            },
        },
    )
    # Its queue may take a pod up again before its cache has the volume that was just bound (kubernetes issue 73216). No later
    # event wakes such a pod: five minutes by default.
    arguments = {"secure_port": 0, "pod_max_in_unschedulable_pods_duration": "10s"}
    return [Start("kube-scheduler", argv(kube, "kube-scheduler", config=config, **arguments))]


def unreal_nodes(kube: Path, layout: Layout, count: int) -> list[Step]:
    """``count`` roomy nodes without machines: their pods are Running at once, and run nothing."""
    admin = layout.kubeconfig_of("admin")
    ready = argv(
        kube, "kubectl", "wait", "node", "--all", "--for=condition=Ready", timeout="5s", kubeconfig=admin
    )
    return [Start("unreal", argv(kube, "unreal", kubeconfig=admin, nodes=count)), Wait("unreal", argv=ready)]
