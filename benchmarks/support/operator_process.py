"""Starts the operator as a separate process, and reads its metrics, CPU time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from scalerl_api import operator_metric_names as metric_names

if TYPE_CHECKING:
    from testcluster import Cluster

NAMESPACE = "scalerl-system"
LONGEST = "longest-callback"
"""File in the work folder with the CPU time of the longest callback, written when the operator ends."""


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Values in Prometheus' text format, by metric name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def cpu_seconds(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Operator:
    """The measured operator process."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    session: aiohttp.ClientSession

    async def ready(self) -> None:
        """Wait until the operator is the leader."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.get(f"{self.url}/readyz") as answer:
                    if answer.status == 200 and (await answer.text()).strip() == "leads":
                        return
            await asyncio.sleep(0.1)
        raise SystemExit(f"the operator does not lead:\n{self.log.read_text()[-4000:]}")

    async def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        async with self.session.get(f"{self.url}/metrics") as answer:
            return samples(await answer.text())

    async def scrape(self) -> dict[str, float]:
        """Time and size of the metrics."""
        seconds, text = [], ""
        for _ in range(11):
            began = time.perf_counter()
            async with self.session.get(f"{self.url}/metrics") as answer:
                text = await answer.text()
            seconds.append(time.perf_counter() - began)
        series = [line for line in text.splitlines() if not line.startswith("#")]
        return {
            "scrape_milliseconds": round(1000 * statistics.median(seconds), 1),
            "scrape_kilobytes": round(len(text) / 1000, 1),
            "series": len(series),
            "series_of_runs": sum(',run="' in line or '{run="' in line for line in series),
        }

    async def writes(self) -> Counter[str]:
        """Number of the operator's writes, by kind."""
        found = await self.metrics()
        return Counter({dict(of)["kind"]: int(v) for (n, of), v in found.items() if n == metric_names.WRITES})

    async def calls(self) -> Counter[str]:
        """Number of the operator's requests to the API server without those of Leases, by verb."""
        calls: Counter[str] = Counter()
        for (name, of), value in (await self.metrics()).items():
            if name == metric_names.API_REQUESTS and dict(of)["kind"] != "Lease":
                calls[dict(of)["verb"]] += int(value)
        return calls

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def memory_mb(self, what: str) -> float:
        """Resident memory, present (``VmRSS``) or maximum (``VmHWM``), in MB of a million bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        kib = re.search(rf"^{what}:\s+(\d+) kB", status, re.MULTILINE)
        assert kib is not None
        return int(kib[1]) * 1024 / 1e6


@contextlib.contextmanager
def running(cluster: Cluster, work: Path, session: aiohttp.ClientSession) -> Iterator[Operator]:
    """Start the operator's process, and end it with SIGTERM at the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    images = {
        f"SCALERL_{role}_IMAGE": f"{role.lower()}:1" for role in ("TRAINER", "GENERATOR", "COORDINATOR")
    }
    environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
    environ |= images | {
        "POD_NAME": "scalerl-operator-0",
        "POD_NAMESPACE": NAMESPACE,
        "KUBECONFIG": str(_as_service_account(cluster, work)),
        "SCALERL_LISTEN": f"127.0.0.1:{port}",
    }
    log = work / "operator.log"
    with log.open("wb") as sink:
        command = [sys.executable, str(Path(__file__).with_name("timed_operator.py")), str(work / LONGEST)]
        process = subprocess.Popen(command, env=environ, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL)
    try:
        yield Operator(process, f"http://127.0.0.1:{port}", log, session)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _as_service_account(cluster: Cluster, work: Path) -> Path:
    """A kubeconfig with a service account, which is subject to API Priority and Fairness, unlike an administrator."""
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("create", "serviceaccount", "operator", "-n", NAMESPACE)
    account = f"--serviceaccount={NAMESPACE}:operator"
    cluster.kubectl("create", "clusterrolebinding", "operator", "--clusterrole=cluster-admin", account)
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    (user,) = config["users"]
    user["user"] = {
        "token": cluster.kubectl("create", "token", "operator", "-n", NAMESPACE, "--duration=2h").strip()
    }
    path = work / "kubeconfig"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config))
    return path
