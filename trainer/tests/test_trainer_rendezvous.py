"""A stop during the rendezvous: all ranks proceed, or none."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from free_port import free_port

from scalerl_trainer.engine import distributed
from scalerl_trainer.engine.distributed import Rank
from scalerl_trainer.errors import Stopped


class Gathering:
    """Three ranks as threads; rank 0 sleeps after its first poll until ``look`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._port = free_port()
        self.told = [threading.Event() for _ in range(3)]
        self.asleep, self.look = threading.Event(), threading.Event()
        self.outcome: dict[int, str] = {}
        self.threads: dict[int, threading.Thread] = {}
        monkeypatch.setattr(distributed, "time", SimpleNamespace(monotonic=time.monotonic, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        if threading.current_thread() is self.threads[0]:
            self.asleep.set()
            assert self.look.wait(120)
        time.sleep(seconds)

    def come(self, rank: int) -> threading.Thread:
        self.threads[rank] = threading.Thread(target=self._gather, args=(rank,))
        self.threads[rank].start()
        return self.threads[rank]

    def _gather(self, rank: int) -> None:
        try:
            distributed._rendezvous(
                Rank(rank, 3, 0, "127.0.0.1", self._port), 120.0, lambda: self.told[rank].is_set()
            )
            self.outcome[rank] = "continues"
        except Stopped:
            self.outcome[rank] = "stopped"

    def end(self) -> None:
        self.look.set()
        for thread in self.threads.values():
            thread.join(120)


def test_rendezvous_late_rank_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Gathering(monkeypatch)
    ranks.come(0)
    assert ranks.asleep.wait(120)
    waits = ranks.come(1)
    time.sleep(0.3)
    ranks.told[1].set()
    waits.join(120)
    ranks.come(2).join(120)
    ranks.end()
    assert ranks.outcome == dict.fromkeys(range(3), "stopped")


def test_rendezvous_stop_after_decision_proceeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Gathering(monkeypatch)
    ranks.come(0)
    assert ranks.asleep.wait(120)
    for late in (ranks.come(1), ranks.come(2)):
        late.join(120)
    ranks.told[0].set()
    ranks.end()
    assert ranks.outcome == dict.fromkeys(range(3), "continues")
