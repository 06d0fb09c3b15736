"""Follows runs on a real API server with watches, and reads its count of writes."""

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
    """State of the runs from watch events; times are of this process's monotonic clock."""

    namespace: str
    runs: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Generation, observed generation and phase by run."""
    written: dict[str, float] = field(default_factory=dict)
    """Time of the operator's first write since :meth:`watch_for`, by run."""
    last: float = 0.0
    """Time of the last event."""
    all_written: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the operator has written for all runs of :meth:`watch_for`."""
    _awaited: dict[str, int] = field(default_factory=dict)
    _rendered: dict[str, str] = field(default_factory=dict)

    def watch_for(self, runs: list[str]) -> None:
        """Record the operator's first write from now on for each of these runs."""
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
        # The write of field managers before the first apply does not change the content, so it does not count.
        if self._rendered.get(name) != rendered and name in self._awaited:
            self._wrote(name)
        self._rendered[name] = rendered

    def _wrote(self, name: str) -> None:
        self.written.setdefault(name, time.monotonic())
        if len(self.written) == len(self._awaited):
            self.all_written.set()

    def are(self, phase: Phase) -> int:
        """Number of runs in ``phase`` whose status is of their present generation."""
        return sum(now == phase and observed == wanted for wanted, observed, now in self.runs.values())

    async def follow(self, api: KubeApi, kind: str, take: Callable[[_Item], None], since: str) -> None:
        """Pass objects of ``kind`` to ``take`` until cancelled; events of one object are in order."""
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
    """Number of successful writes of all clients since the API server's start, by resource, without Leases."""
    text = cluster.kubectl("get", "--raw", "/metrics")
    counted: Counter[str] = Counter()
    for labels, value in _REQUEST.findall(text):
        of = dict(_LABEL.findall(labels))
        taken = of["verb"] in _WRITING and of["code"].startswith("2") and not of.get("dry_run")
        if taken and of["resource"] != "leases":
            counted["/".join(filter(None, (of["resource"], of["subresource"])))] += int(float(value))
    return counted
