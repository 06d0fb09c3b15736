"""What a real API server says of runs, and of what is written to it."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from scalerl_api.conditions import Phase
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.names import RENDERED_HASH

if TYPE_CHECKING:
    from testcluster import Cluster


class _Metadata(msgspec.Struct):
    name: str
    resourceVersion: str
    generation: int = 0
    annotations: dict[str, str] = {}


class _Status(msgspec.Struct):
    observedGeneration: int = 0
    phase: str = ""


class _Item(msgspec.Struct):
    metadata: _Metadata
    status: _Status | None = None


_ITEM = msgspec.json.Decoder(_Item)


@dataclass
class Seen:
    """What the watches have brought, with this process's monotonic clock."""

    namespace: str
    runs: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Generation, observed generation and phase by name."""
    written: dict[str, float] = field(default_factory=dict)
    """By run: the first write of the operator since :meth:`watch_for`."""
    last: float = 0.0
    """When anything came last."""
    all_written: asyncio.Event = field(default_factory=asyncio.Event)
    """Of all that are watched for."""
    _awaited: dict[str, int] = field(default_factory=dict)
    _rendered: dict[str, str] = field(default_factory=dict)

    def watch_for(self, runs: list[str]) -> None:
        """From now on, note the operator's first write for each of these."""
        self.written.clear()
        self.all_written.clear()
        self._awaited = {name: self.runs[name][0] for name in runs}

    def run(self, item: _Item) -> None:
        status = item.status or _Status()
        name, generation = item.metadata.name, item.metadata.generation
        self.runs[name] = (generation, status.observedGeneration, status.phase)
        if status.observedGeneration > self._awaited.get(name, generation):
            self._wrote(name)

    def config_map(self, item: _Item) -> None:
        name = item.metadata.name.removesuffix("-spec")
        rendered = item.metadata.annotations.get(RENDERED_HASH, "")
        # Before it is first applied, who holds its fields is written: that changes nothing of what it says.
        if self._rendered.get(name) != rendered and name in self._awaited:
            self._wrote(name)
        self._rendered[name] = rendered

    def _wrote(self, name: str) -> None:
        self.written.setdefault(name, time.monotonic())
        if len(self.written) == len(self._awaited):
            self.all_written.set()

    def are(self, phase: Phase) -> int:
        """How many runs are in a phase that is of their present spec."""
        return sum(now == phase and observed == wanted for wanted, observed, now in self.runs.values())

    async def follow(self, api: KubeApi, kind: str, take: Callable[[_Item], None], since: str) -> None:
        """Until cancelled. A run's objects only ever come in order."""
        while True:
            async for event in api.watch(kind, self.namespace, since=since, seconds=300):
                item = _ITEM.decode(event.object) if event.type != "BOOKMARK" else None
                if item is None:
                    since = msgspec.json.decode(event.object)["metadata"]["resourceVersion"]
                    continue
                since = item.metadata.resourceVersion
                self.last = time.monotonic()
                take(item)


_REQUEST = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_WRITING = {"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}


def written_to(cluster: Cluster) -> Counter[str]:
    """Writes that the API server took from anybody since its start, by resource; without Leases."""
    text = cluster.kubectl("get", "--raw", "/metrics")
    counted: Counter[str] = Counter()
    for labels, value in _REQUEST.findall(text):
        of = dict(_LABEL.findall(labels))
        taken = of["verb"] in _WRITING and of["code"].startswith("2") and not of.get("dry_run")
        if taken and of["resource"] != "leases":
            counted["/".join(filter(None, (of["resource"], of["subresource"])))] += int(float(value))
    return counted
