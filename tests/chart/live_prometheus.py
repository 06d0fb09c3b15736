"""A real Prometheus on loopback."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from free_port import free_port
from live_operator import direct, until


@dataclass(frozen=True)
class Target:
    """One process to scrape, with the labels that the chart's monitors give it."""

    address: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Prometheus:
    url: str
    targets: Path
    log: Path

    def aim(self, targets: Sequence[Target]) -> None:
        """Scrape these from now on."""
        said = [{"targets": [t.address], "labels": dict(t.labels)} for t in targets]
        aside = self.targets.with_suffix(".new")
        aside.write_text(json.dumps(said))
        aside.rename(self.targets)

    def get(self, path: str, **query: str) -> Any:
        with direct.open(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=120) as answer:
            said = json.loads(answer.read())
        assert said["status"] == "success", said
        return said["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        result: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return result


@contextlib.contextmanager
def prometheus(program: str, folder: Path, rules: Path) -> Iterator[Prometheus]:
    """Scrapes every second, and evaluates the rules as often."""
    port, targets = free_port(), folder / "targets.json"
    targets.write_text("[]")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "scalerl",
                "honor_labels": True,  # as the chart's ServiceMonitor
                "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
            }
        ],
    }
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    log = folder / "prometheus.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [
                *(program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    made = Prometheus(f"http://127.0.0.1:{port}", targets, log)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            return direct.open(f"{made.url}/-/ready", timeout=2).status == 200
        return False

    try:
        until(ready, 120, log.read_text)
        yield made
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(120)
