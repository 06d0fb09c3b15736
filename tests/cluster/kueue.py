"""Kueue beside a control plane: its release's own objects, its manager as a process of this machine.

What a release installs as a Deployment is a process here; what its Service would bring to a pod goes to a port of
loopback. All else (CRDs, webhooks with their certificates, roles) is as it is released.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from free_port import free_port
from testcluster import Cluster, KubectlError
from testcluster.processes import die_with_parent
from testcluster.tools import kueue_objects, tool

Object = dict[str, Any]

INTEGRATIONS = ("batch/job", "pod", "deployment", "statefulset")
"""Of Kueue's configuration: all that a run is made of. A release has only the first of them on."""
_NAMESPACE, _SERVICE = "kueue-system", "kueue-webhook-service"
_CERTIFICATE = "kueue-webhook-server-cert"
_LEFT_OUT = ("Deployment", "APIService", "Service")
_UP_SECONDS = 300.0


@contextlib.contextmanager
def kueue(cluster: Cluster, folder: Path, integrations: tuple[str, ...] = INTEGRATIONS) -> Iterator[Path]:
    """Kueue, as long as this lasts; the log of its manager."""
    program = tool("kueue")
    webhook, health = free_port(), free_port()
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(_objects(webhook)))
    certificates = folder / "certificates"
    certificates.mkdir()
    configuration = folder / "configuration.yaml"
    configuration.write_text(
        json.dumps(
            {
                "apiVersion": "config.kueue.x-k8s.io/v1beta2",
                "kind": "Configuration",
                "namespace": _NAMESPACE,
                "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
                "metrics": {"bindAddress": "0"},
                "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(certificates)},
                "leaderElection": {"leaderElect": False},
                "clientConnection": {"qps": 50, "burst": 100},
                "integrations": {"frameworks": list(integrations)},
                # Its server of pending workloads would take a port that cannot be chosen.
                "featureGates": {"VisibilityOnDemand": False},
            }
        )
    )
    log = folder / "kueue.log"
    with log.open("wb") as output:
        manager = subprocess.Popen(
            [program, f"--config={configuration}", "--zap-log-level=2"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
            preexec_fn=die_with_parent,
        )
    try:
        _wait_ready(cluster, manager, log, certificates, health)
        yield log
    finally:
        manager.terminate()
        try:
            manager.wait(120)
        except subprocess.TimeoutExpired:
            manager.kill()
            manager.wait(120)


def queue(name: str, namespace: str, **quota: str) -> list[Object]:
    """A queue of its own in a namespace, with a quota of each resource: who has a higher priority takes from others."""
    flavor: Object = {
        "name": "default",
        "resources": [{"name": n, "nominalQuota": q} for n, q in quota.items()],
    }
    return [
        _kueues("ResourceFlavor", "default"),
        _kueues(
            "ClusterQueue",
            name,
            {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [{"coveredResources": list(quota), "flavors": [flavor]}],
            },
        ),
        _kueues("LocalQueue", "queue", {"clusterQueue": name}, namespace=namespace),
        _kueues("WorkloadPriorityClass", "urgent", namespace=None) | {"value": 1000},
    ]


def _kueues(kind: str, name: str, spec: Object | None = None, namespace: str | None = None) -> Object:
    metadata = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
    made: Object = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata}
    return made if spec is None else made | {"spec": spec}


def _objects(port: int) -> list[Object]:
    """What a release installs, but the manager itself."""
    loaded = yaml.load_all(kueue_objects().read_text(), yaml.CSafeLoader)
    objects = [o for o in loaded if o["kind"] not in _LEFT_OUT]
    for obj in objects:
        hooks = [w["clientConfig"] for w in obj.get("webhooks", ())]
        conversion = obj.get("spec", {}).get("conversion", {}).get("webhook")
        for client in [*hooks, *([conversion["clientConfig"]] if conversion else [])]:
            client["service"]["port"] = port
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _SERVICE, "namespace": _NAMESPACE},
        # By its name the API server knows the certificate, by this where to go.
        "spec": {"type": "ExternalName", "externalName": "localhost"},
    }
    return [*objects, service]


def _wait_ready(
    cluster: Cluster, manager: subprocess.Popen[bytes], log: Path, certificates: Path, health: int
) -> None:
    """Until it serves. A pod would find in its folder the certificate that Kueue makes; here it is put there."""
    deadline = time.monotonic() + _UP_SECONDS
    while True:
        assert manager.poll() is None, f"Kueue has ended: {log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"Kueue is not ready: {log.read_text()[-3000:]}"
        with contextlib.suppress(KubectlError):
            held = cluster.get("secret", _CERTIFICATE, "-n", _NAMESPACE).get("data") or {}
            if "tls.crt" in held and not (certificates / "tls.crt").exists():
                for name in ("ca.crt", "tls.key", "tls.crt"):
                    (certificates / name).write_bytes(base64.b64decode(held[name]))
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{health}/readyz", timeout=2) as answer:
                if answer.status == 200 and (certificates / "tls.crt").exists():
                    return
        except OSError:
            pass
        time.sleep(0.3)
