"""A node: containerd, kubelet, kube-proxy, names and volumes, in namespaces of its own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from testcluster.controlplane import write_json
from testcluster.layout import NODE, NODE_ADDRESS, NODE_API_PORT, PODS, Layout
from testcluster.steps import Run, Start, Step, Wait, argv

PAUSE_IMAGE = "localhost/pause:1"
PROVISIONER = "scalerl.dev/directories"
CLUSTER_DOMAIN = "cluster.local"

# The runtime's shims, CNI and kubelet write below these, whatever their flags say.
OWN_FOLDERS = ("/run", "/var/lib", "/var/log")
# Of the whole machine, not of a namespace: a kubelet sets them at its start.
OWN_SETTINGS = (
    "/proc/sys/kernel/keys/root_maxbytes",
    "/proc/sys/kernel/keys/root_maxkeys",
    "/proc/sys/kernel/panic",
    "/proc/sys/kernel/panic_on_oops",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/vm/panic_on_oom",
)


def network() -> list[Step]:
    """Loopback, and an address for the node on an interface that leads nowhere: pods reach nothing outside."""
    return [
        Run(("ip", "link", "set", "lo", "up")),
        Run(("ip", "link", "add", "node", "type", "bridge")),
        Run(("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", "node")),
        Run(("ip", "link", "set", "node", "up")),
        Run(("ip", "route", "add", "default", "dev", "node")),
        Run(("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")),
    ]


def runtime(kube: Path, layout: Layout, images: Path) -> list[Step]:
    """containerd; images are kept in ``images`` from cluster to cluster, pods of an earlier one are removed."""
    socket = layout.containerd_socket
    _write_containerd_config(layout, images)
    _write_network_config(layout)
    return [
        Start("containerd", argv("containerd", config=layout.config("containerd.toml"))),
        Wait("containerd", path=str(socket)),
        Wait("containerd", argv=argv(kube, "sandboxes", socket)),
    ]


def agents(kube: Path, coredns: Path, layout: Layout) -> list[Step]:
    """What makes a node of a machine that runs containerd."""
    _write_kubelet_config(layout)
    _write_proxy_config(layout)
    _write_names_config(layout)
    _write_manifests(layout)
    admin = layout.kubeconfig_of("admin")
    return [
        Start(
            "kubelet",
            argv(
                kube,
                "kubelet",
                config=layout.config("kubelet.json"),
                kubeconfig=layout.kubeconfig_of("kubelet"),
                hostname_override=NODE,
                node_ip=NODE_ADDRESS,
                root_dir=layout.root / "kubelet",
                cert_dir=layout.root / "kubelet-pki",
            ),
        ),
        Start("kube-proxy", argv(kube, "kube-proxy", config=layout.config("kube-proxy.json"))),
        Start(
            "volumes",
            argv(kube, "volumes", kubeconfig=layout.kubeconfig_of("volumes"), root=layout.volumes),
        ),
        Wait(
            "kube-apiserver",
            argv=argv(
                kube,
                "kubectl",
                "apply",
                "--server-side",
                filename=layout.config("manifests.json"),
                kubeconfig=admin,
            ),
        ),
        # CoreDNS takes one dash.
        Start("coredns", (str(coredns), "-conf", str(layout.config("Corefile")))),
        Wait(
            "kubelet",
            argv=argv(
                kube, "kubectl", "wait", "node", NODE, "--for=condition=Ready", timeout="5s", kubeconfig=admin
            ),
        ),
        Wait("coredns", url="http://127.0.0.1:8181/ready"),
    ]


def last(kube: Path, layout: Layout) -> tuple[Run, ...]:
    """Pods end before their runtime does, so that no process and no writable layer is left."""
    return (Run(argv(kube, "sandboxes", layout.containerd_socket), seconds=60),)


def _write_containerd_config(layout: Layout, images: Path) -> None:
    root = layout.root
    layout.config("containerd.toml").write_text(
        textwrap.dedent(
            f"""\
            version = 2
            root = "{images}"
            state = "{root}/containerd"

            [grpc]
            address = "{layout.containerd_socket}"

            [debug]
            level = "warn"

            [plugins."io.containerd.internal.v1.opt"]
            path = "{root}/opt"

            [plugins."io.containerd.grpc.v1.cri"]
            sandbox_image = "{PAUSE_IMAGE}"
            stream_server_address = "127.0.0.1"
            # A negative score may not be set everywhere; without this no pod starts there.
            restrict_oom_score_adj = true

            [plugins."io.containerd.grpc.v1.cri".cni]
            bin_dir = "/usr/lib/cni"
            conf_dir = "{root}/cni"

            [plugins."io.containerd.grpc.v1.cri".containerd]
            snapshotter = "overlayfs"

            [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
            runtime_type = "io.containerd.runc.v2"

            [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
            SystemdCgroup = false
            """
        )
    )


def _write_network_config(layout: Layout) -> None:
    # Point to point, not a bridge: packets between two pods of a node are routed, so that kube-proxy's address
    # translation sees answers too. It enforces no NetworkPolicy.
    write_json(
        layout.root / "cni" / "10-pods.conflist",
        {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "ptp",
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": PODS}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                        "dataDir": str(layout.root / "addresses"),
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        },
    )


def _write_kubelet_config(layout: Layout) -> None:
    resolver = layout.config("resolv.conf")
    resolver.write_text(f"nameserver {NODE_ADDRESS}\n")
    write_json(
        layout.config("kubelet.json"),
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{layout.cgroup}",
            "clusterDNS": [NODE_ADDRESS],
            "clusterDomain": CLUSTER_DOMAIN,
            "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
            "evictionHard": {
                "memory.available": "50Mi",
                "nodefs.available": "1%",
                "nodefs.inodesFree": "1%",
                "imagefs.available": "1%",
            },
            "failCgroupV1": False,
            "failSwapOn": False,
            # Nothing could pull an image again.
            "imageGCHighThresholdPercent": 100,
            "kubeAPIQPS": 100,
            "kubeAPIBurst": 200,
            "maxPods": 250,
            "podLogsDir": str(layout.root / "pod-logs"),
            "resolvConf": str(resolver),
            "volumePluginDir": str(layout.root / "volume-plugins"),
        },
    )


def _write_proxy_config(layout: Layout) -> None:
    write_json(
        layout.config("kube-proxy.json"),
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clusterCIDR": PODS,
            "hostnameOverride": NODE,
            "clientConnection": {"kubeconfig": str(layout.kubeconfig_of("kube-proxy"))},
            # These belong to the machine.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "iptables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
        },
    )


def _write_names_config(layout: Layout) -> None:
    layout.config("Corefile").write_text(
        textwrap.dedent(
            f"""\
            {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
                bind {NODE_ADDRESS}
                errors
                ready 127.0.0.1:8181
                kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
                    kubeconfig {layout.kubeconfig_of("coredns")}
                    pods verified
                    ttl 1
                }}
            }}
            . {{
                bind {NODE_ADDRESS}
                template ANY ANY {{
                    rcode NXDOMAIN
                }}
            }}
            """
        )
    )


def _write_manifests(layout: Layout) -> None:
    names: dict[str, Any] = {"name": "scalerl-test-coredns"}
    reads = {"verbs": ["list", "watch"]}
    write_json(
        layout.config("manifests.json"),
        {
            "apiVersion": "v1",
            "kind": "List",
            "items": [
                {
                    "apiVersion": "storage.k8s.io/v1",
                    "kind": "StorageClass",
                    "metadata": {
                        "name": "directories",
                        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
                    },
                    "provisioner": PROVISIONER,
                    "reclaimPolicy": "Delete",
                    "volumeBindingMode": "Immediate",
                },
                {
                    "apiVersion": "rbac.authorization.k8s.io/v1",
                    "kind": "ClusterRole",
                    "metadata": names,
                    "rules": [
                        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], **reads},
                        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], **reads},
                    ],
                },
                {
                    "apiVersion": "rbac.authorization.k8s.io/v1",
                    "kind": "ClusterRoleBinding",
                    "metadata": names,
                    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", **names},
                    "subjects": [{"kind": "User", "name": "coredns"}],
                },
            ],
        },
    )


def api_server() -> str:
    """How the node's own programs call the API server."""
    return f"https://127.0.0.1:{NODE_API_PORT}"
