"""The operator and the service beside it as the chart deploys them, but as processes here: the chart's arguments,
environment, account and role."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from charts import Object
from free_port import free_port

if TYPE_CHECKING:
    from testcluster import Cluster


direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""To this machine: no proxy of the environment is asked."""


AS_A_ROLE_SAYS = {"apply": "patch", "replace": "update"}


def until(condition: Callable[[], Any], seconds: float, what: Callable[[], str]) -> Any:
    """What ``condition`` gives once it gives something."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what()}"
        time.sleep(0.25)
    return found


def as_account(cluster: Cluster, namespace: str, account: str, into: Path, *where: str) -> Path:
    """A kubeconfig with a token of a service account, as its pods have, once it may list the runs ``where``."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", account, "-n", namespace, "--duration=1h").strip()
    (user,) = config["users"]
    user["user"] = {"token": token}
    path = into / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    own = dataclasses.replace(cluster, kubeconfig=path)

    def served() -> bool:
        """The definition is served, and the roles count, a moment after they are written."""
        try:
            own.kubectl("get", "scalerlruns.scalerl.dev", *(where or ("-A",)))
            own.kubectl(
                "auth", "can-i", "update", f"leases.coordination.k8s.io/{account}-leader", "-n", namespace
            )
        except RuntimeError as error:
            refused[:] = [str(error)]
            return False
        return True

    refused: list[str] = []
    until(served, 120, lambda: refused[-1])
    return path


@dataclass
class LiveOperator:
    """One replica."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def get(self, path: str) -> str:
        with direct.open(self.url + path, timeout=120) as answer:
            return answer.read().decode()

    def refused(self) -> list[str]:
        """Calls that its role did not allow."""
        return [line for line in self.get("/metrics").splitlines() if 'code="403"' in line]

    def used(self) -> set[tuple[str, str]]:
        """(verb, kind) of all that it has asked of the API server, as a role says it."""
        found = set()
        for line in self.get("/metrics").splitlines():
            if line.startswith("scalerl_operator_api_requests_total{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                found.add((AS_A_ROLE_SAYS.get(labels["verb"], labels["verb"]), labels["kind"]))
        return found

    def tail(self) -> str:
        return self.log.read_text()[-6000:]


@contextlib.contextmanager
def operator(
    deployment: Object, kubeconfig: Path, namespace: str, log: Path, **environment: str
) -> Iterator[LiveOperator]:
    """The deployment's operator container as a process; it is ended with SIGTERM, as a kubelet does."""
    (container,) = (
        c for c in deployment["spec"]["template"]["spec"]["containers"] if c["name"] == "operator"
    )
    port = free_port()
    given = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    given |= {"POD_NAME": f"live-{port}", "POD_NAMESPACE": namespace, "KUBECONFIG": str(kubeconfig)}
    given |= {"SCALERL_LISTEN": f"127.0.0.1:{port}"} | environment
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, *container["command"][1:]],
            env=keep | given,
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
        )
    live = LiveOperator(process, f"http://127.0.0.1:{port}", log)
    try:
        until(lambda: process.poll() is not None or _answers(live), 120, live.tail)
        assert process.poll() is None, live.tail()
        yield live
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(120)


@dataclass(frozen=True)
class CurveFit:
    """The curve-fit service. url: for its caller; metrics: address for Prometheus."""

    url: str
    metrics: str

    def ask(self, path: str, body: bytes) -> int:
        """The status of its answer."""
        request = urllib.request.Request(self.url + path, data=body, method="POST")
        try:
            with direct.open(request, timeout=120) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            return refused.code


@contextlib.contextmanager
def curve_fit(deployment: Object, log: Path) -> Iterator[CurveFit]:
    """The deployment's curve-fit container as a process, on ports that are free here."""
    (container,) = (
        c for c in deployment["spec"]["template"]["spec"]["containers"] if c["name"] == "curvefit"
    )
    port, metrics = free_port(), free_port()
    here = {"--port": port, "--metrics-host": "127.0.0.1", "--metrics-port": metrics}
    options = dict(word.split("=", 1) for word in container["command"] if word.startswith("--"))
    assert set(here) <= set(options)
    words = [word for word in container["command"][1:] if not word.startswith("--")]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, *words, *(f"{name}={value}" for name, value in (options | here).items())],
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
        )
    made = CurveFit(f"http://127.0.0.1:{port}", f"127.0.0.1:{metrics}")

    def healthy() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            return bool(direct.open(f"http://{made.metrics}/healthz", timeout=2).status == 200)
        return False

    try:
        until(healthy, 120, log.read_text)
        yield made
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(120)


def _answers(live: LiveOperator) -> bool:
    with contextlib.suppress(OSError):
        live.get("/readyz")
        return True
    return False
