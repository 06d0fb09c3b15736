"""The chart on a cluster with the project's own images, and runs on it, as their users see them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from testcluster import Cluster, KubectlError
from testcluster.tools import tool

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = "scalerl-system"
LEASE = "scalerl-leader"

Object = dict[str, Any]


def say(what: str, seconds: float, bound: float) -> None:
    """A figure for the log. The bound is a quiet machine's; a busy one may take four times as long."""
    print(f"measured: {what}: {seconds:.1f} s (bound {bound:.0f} s)", flush=True)
    assert seconds < 4 * bound, what


def until(true: Callable[[], Any], seconds: float, what: str, every: float = 1.5) -> float:
    """Seconds until it is true; an assertion if it never is."""
    begin = time.monotonic()
    while True:
        try:
            if true():
                return time.monotonic() - begin
        except KubectlError:
            pass  # the API server may be away
        assert time.monotonic() - begin < seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(every)


@contextmanager
def chart(cluster: Cluster, images: dict[str, str]) -> Iterator[None]:
    """The chart, installed as its page says; removed at the end."""
    values: dict[str, Any] = {"images": {"pullPolicy": "IfNotPresent"}, "networkPolicy": {"enforced": False}}
    for role, name in images.items():
        repository, _, tag = name.rpartition(":")
        values["images"][role] = {"repository": repository, "tag": tag}
    command = ["upgrade", "--install", "scalerl", str(ROOT / "charts/scalerl"), "-n", OPERATORS]
    helm(
        cluster,
        *command,
        "--create-namespace",
        "--wait",
        "--timeout=10m",
        "-f",
        "-",
        stdin=json.dumps(values),
    )
    try:
        yield
    finally:
        helm(cluster, "uninstall", "scalerl", "-n", OPERATORS, "--wait", "--timeout=5m")


def helm(cluster: Cluster, *words: str, stdin: str | None = None) -> str:
    """What helm printed."""
    argv = [str(tool("helm")), *words]
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=900, env=cluster.env)
    assert done.returncode == 0, f"helm {' '.join(words)}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Run:
    """One run on a cluster."""

    cluster: Cluster
    name: str
    namespace: str

    def object(self) -> Object:
        return self.cluster.get("scalerlrun", self.name, "-n", self.namespace)

    def status(self) -> Object:
        return self.object().get("status", {})

    def step(self) -> int:
        return int(self.status().get("step", 0))

    def saved(self) -> int:
        """Steps that are in a checkpoint, as the coordinator last said; -1 for none."""
        return int(self.status()["faults"]["checkpointVersion"])

    def resumed_at(self) -> int:
        """The step that the trainer continued at, in its own words."""
        for pod in self.pods("trainer"):
            log = self.cluster.kubectl("logs", pod["metadata"]["name"], "-n", self.namespace)
            if (said := re.search(r"registered: version (\d+)", log)) is not None:
                return int(said[1])
        raise AssertionError("no trainer says with what it began")

    def phase(self) -> str:
        return str(self.status().get("phase", ""))

    def condition(self, type_: str) -> tuple[str, str, str]:
        """Status, reason and message; empty without it."""
        for c in self.status().get("conditions", ()):
            if c["type"] == type_:
                return c["status"], c["reason"], c["message"]
        return "", "", ""

    def pods(self, role: str, *, ready: bool = False) -> list[Object]:
        """Those of a role that are to stay."""
        selector = f"scalerl.dev/run={self.name},app.kubernetes.io/component={role}"
        found = self.cluster.get("pods", "-n", self.namespace, "-l", selector)["items"]
        found = [p for p in found if "deletionTimestamp" not in p["metadata"]]
        return [p for p in found if not ready or is_ready(p)]

    def patch(self, spec: Object) -> None:
        self.cluster.kubectl(
            *("patch", "scalerlrun", self.name, "-n", self.namespace, "--type=merge"),
            *("-p", json.dumps({"spec": spec})),
        )

    def continues(self, seconds: float, steps: int = 1) -> float:
        """Seconds until it has trained more steps than now."""
        now = self.step()
        return until(lambda: self.step() >= now + steps, seconds, f"step {now + steps}")

    def events(self) -> list[str]:
        found = self.cluster.get("events", "-n", self.namespace)["items"]
        return [f"{e['reason']}: {e['message']}" for e in found if e["involvedObject"]["name"] == self.name]

    def tell(self) -> str:
        """What a person would read when something is wrong."""
        ns = ("-n", self.namespace)
        parts = [self.cluster.kubectl("get", "scalerlruns,all,pvc,events", *ns)]
        for role in ("prepare", "coordinator", "generator", "trainer"):
            for pod in self.pods(role):
                name = pod["metadata"]["name"]
                try:
                    said = self.cluster.kubectl("logs", name, *ns, "--all-containers", "--tail=30")
                except KubectlError as error:
                    said = str(error)
                parts.append(f"--- {name}\n{said}")
        selector = "app.kubernetes.io/name=scalerl"
        logs = ("logs", "-n", OPERATORS, "-l", selector, "-c", "operator", "--tail=60", "--prefix")
        return "\n".join([*parts, "--- operator", self.cluster.kubectl(*logs)])


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def leader(cluster: Cluster) -> str:
    """The pod that leads."""
    return str(cluster.get("lease", LEASE, "-n", OPERATORS)["spec"].get("holderIdentity") or "")


def seconds_between(earlier: str, later: str) -> float:
    """Between two times as Kubernetes writes them."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def take_off(cluster: Cluster, namespace: str, folder: Path, begins: str, ends: str, **words: str) -> None:
    """What docs/operations.md says to run between two of its sentences, word for word, in ``folder``.

    ``words``: what stands for what there.
    """
    section = (ROOT / "docs/operations.md").read_text().partition(begins)[2].partition(ends)[0]
    script = "\n".join(re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    for word, meant in words.items():
        assert word in script
        script = script.replace(word, meant)
    program = folder / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {cluster.kubectl_program} -n {namespace} "$@"\n')
    program.chmod(0o755)
    env = cluster.env | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    argv = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
