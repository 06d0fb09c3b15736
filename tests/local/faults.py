"""Kills of a whole run's processes, and what is observed meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from journal_audit import JournalCopy
from runs import LocalRun

from scalerl_api import endpoints
from scalerl_api.paths import RunPaths
from scalerl_api.wire import WIRE_HEADER, WIRE_VERSION, Status

ROLES = {
    "server": "scalerl_generator.vllm_server",
    "actor": "scalerl_generator.actor",
    "trainer rank": "scalerl_trainer.main",
    "coordinator": "scalerl_coordinator.main",
}


def kill_one(run: LocalRun, part: str, dice: random.Random) -> None:
    def killed() -> bool:
        found = run.find(part)
        if not found:
            return False
        try:
            os.kill(dice.choice(found).pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended meanwhile
            return False
        return True

    run.until(killed, 120, f"a process of {part}")


@dataclass
class Watch:
    """Polls a run while the test waits for it: keeps its journal, measures what it takes to continue after a kill."""

    run: LocalRun
    journal: JournalCopy
    waiting: list[tuple[str, float, int]] = field(default_factory=list)
    """Who was killed, when, and how many steps there were."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """From a kill to the next new step, by who was killed; other kills may come in between."""
    acknowledged: int = 0
    """Rollouts, at the last status."""

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        self.run.until(lambda: self.look() or condition(), seconds, what)

    def look(self) -> None:
        self.journal.update()
        now, step = time.monotonic(), self.run.step()
        for killed in [k for k in self.waiting if step > k[2]]:
            self.waiting.remove(killed)
            self.seconds[killed[0]].append(now - killed[1])

    def assert_rollouts_add_up(self) -> None:
        """As the coordinator's metrics and status have it at this moment, if it answers; nothing acknowledged is lost."""
        if text := self._get("/metrics", {}).decode():
            by_outcome = dict(
                re.findall(r'^scalerl_coordinator_rollouts\{outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
            )
            acknowledged = re.search(r"^scalerl_coordinator_acknowledged_rollouts (\S+)$", text, re.MULTILINE)
            assert acknowledged is not None
            used = ("trained", "filtered", "skipped", "queued")
            parts = [float(by_outcome[outcome]) for outcome in used]
            assert sum(parts) == float(acknowledged[1]), by_outcome
        token = RunPaths(self.run.directory).token.read_text().strip()
        headers = {WIRE_HEADER: str(WIRE_VERSION), "authorization": f"Bearer {token}"}
        if answer := self._get(endpoints.STATUS, headers):
            counts = msgspec.msgpack.decode(answer, type=Status).counts
            used = counts.trained + counts.filtered + counts.skipped
            assert counts.acknowledged == used + counts.queued, counts
            assert counts.refilled <= counts.filtered
            assert counts.acknowledged >= self.acknowledged
            self.acknowledged = counts.acknowledged

    def _get(self, path: str, headers: dict[str, str]) -> bytes:
        """The coordinator's answer; empty if it does not answer."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for coordinator in self.run.find(ROLES["coordinator"]):
            address = re.search(r"--listen (\S+)", coordinator.command)
            assert address is not None, coordinator.command
            request = urllib.request.Request(f"http://{address[1]}{path}", headers=headers)
            with contextlib.suppress(OSError), direct.open(request, timeout=60) as answer:
                found: bytes = answer.read()
                return found
        return b""

    def report(self) -> str:
        every = [s for seconds in self.seconds.values() for s in seconds]
        parts = [f"{who} {statistics.mean(s):.1f} s" for who, s in sorted(self.seconds.items())]
        return (
            f"{len(every)} kills; from a kill to the next new step: mean {statistics.mean(every):.1f} s, "
            f"longest {max(every):.1f} s; mean by who was killed: {', '.join(parts)}"
        )
