"""A stop during the rendezvous: all ranks proceed, or none."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from free_port import free_port

from scalerl_trainer.engine import distributed
from scalerl_trainer.engine.distributed import Rank
from scalerl_trainer.errors import Stopped


class Gathering:
    """Three ranks as threads; each sleeps after a poll until its ``look`` is set, which that of rank 0 is not. ``waits``: whether it has polled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._port = free_port()
        self.stops = [threading.Event() for _ in range(3)]
        self.waits = [threading.Event() for _ in range(3)]
        self.look = [threading.Event() for _ in range(3)]
        self.look[1].set()
        self.look[2].set()
        self.outcome: dict[int, str] = {}
        self.threads: dict[int, threading.Thread] = {}
        monkeypatch.setattr(distributed, "time", SimpleNamespace(monotonic=time.monotonic, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        rank = int(threading.current_thread().name)
        self.waits[rank].set()
        assert self.look[rank].wait(120)
        time.sleep(seconds)

    def come(self, rank: int) -> threading.Thread:
        self.threads[rank] = threading.Thread(target=self._gather, args=(rank,), name=str(rank))
        self.threads[rank].start()
        return self.threads[rank]

    def _gather(self, rank: int) -> None:
        try:
            distributed._rendezvous(
                Rank(rank, 3, 0, "127.0.0.1", self._port), 120.0, lambda: self.stops[rank].is_set()
            )
            self.outcome[rank] = "continues"
        except Stopped:
            self.outcome[rank] = "stopped"

    def end(self) -> None:
        for look in self.look:
            look.set()
        for thread in self.threads.values():
            thread.join(120)


def test_rendezvous_late_rank_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Gathering(monkeypatch)
    ranks.come(0)
    assert ranks.waits[0].wait(120)
    stopped = ranks.come(1)
    assert ranks.waits[1].wait(120)
    ranks.stops[1].set()
    stopped.join(120)
    ranks.come(2).join(120)
    ranks.end()
    assert ranks.outcome == dict.fromkeys(range(3), "stopped")


def test_rendezvous_stop_after_decision_proceeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Gathering(monkeypatch)
    ranks.come(0)
    assert ranks.waits[0].wait(120)
    for late in (ranks.come(1), ranks.come(2)):
        late.join(120)
    ranks.stops[0].set()
    ranks.end()
    assert ranks.outcome == dict.fromkeys(range(3), "continues")


def test_rendezvous_slow_rank_reads_the_decision_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 keeps the store open for it."""
    monkeypatch.setattr(distributed, "STORE_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(distributed, "READ_SECONDS", 120.0)
    ranks = Gathering(monkeypatch)
    ranks.look[1].clear()
    ranks.come(0)
    assert ranks.waits[0].wait(120)
    ranks.come(1)
    assert ranks.waits[1].wait(120)
    ranks.stops[0].set()
    ranks.look[0].set()
    ranks.threads[0].join(0.5)
    waits = ranks.threads[0].is_alive()
    ranks.end()
    assert waits
    assert ranks.outcome == dict.fromkeys(range(2), "stopped")


# --- a peer without the run's token ------------------------------------------------------------


def with_peer(peer: Callable[[Any], None]) -> Future[Any]:
    """The rendezvous of rank 0 of two, with the token "secret", beside ``peer(store)``, which has the store's address."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        own = pool.submit(
            distributed._rendezvous,
            Rank(0, 2, 0, "127.0.0.1", port),
            120.0,
            lambda: False,
            "secret",
        )
        limit = timedelta(seconds=120)
        peer(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit, wait_for_workers=False))
        own.exception(120)
    return own


def named(store: Any, end: str) -> str:
    """The key that ends with ``end``, which anybody can list."""
    for _ in range(12_000):
        if found := [key for key in store.list_keys() if key.endswith(end)]:
            return found[0]
        time.sleep(0.01)
    raise AssertionError(store.list_keys())


@pytest.mark.parametrize("value", ["", "here", "0" * 64, None])
def test_rendezvous_peer_without_token_does_not_join(value: str | None) -> None:
    def peer(store: Any) -> None:
        own = named(store, "here/0")
        store.set(own[:-1] + "1", store.get(own) if value is None else value)

    with pytest.raises(ConnectionError, match="rank 1 joined the rendezvous without the run's token"):
        with_peer(peer).result()


def test_rendezvous_does_not_accept_an_earlier_proof() -> None:
    """Of the same run: each rendezvous has another nonce."""
    proofs: list[bytes] = []

    def rank(store: Any) -> None:
        prefixed = dist.PrefixStore(distributed._proof("secret", "store"), store)
        nonce = prefixed.get(distributed._NONCE).decode()
        prefixed.set("here/1", distributed._proof("secret", nonce, 1))
        proofs.append(prefixed.get("here/1"))

    def again(store: Any) -> None:
        store.set(named(store, "here/0")[:-1] + "1", proofs[0])

    with_peer(rank).result()
    with pytest.raises(ConnectionError, match="without the run's token"):
        with_peer(again).result()


def test_rendezvous_decision_without_token_is_not_believed() -> None:
    def peer(store: Any) -> None:
        store.set(named(store, "here/0").replace("here/0", "decision"), "stopped")

    with pytest.raises(ConnectionError, match="decision without the run's token"):
        with_peer(peer).result()


def test_rendezvous_of_other_tokens_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their time is over after three seconds; torch's connections have all of it.
    fast = SimpleNamespace(monotonic=lambda: 40 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(distributed, "time", fast)
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        own, other = (
            pool.submit(
                distributed._rendezvous, Rank(rank, 2, 0, "127.0.0.1", port), 120.0, lambda: False, token
            )
            for rank, token in enumerate(("secret", "another"))
        )
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not join"):
            own.result(120)
        with pytest.raises(TimeoutError, match="rank 0 did not begin"):
            other.result(120)


def test_error_in_another_group_over_nccl_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would by torch's default, which is read when the default group is constructed."""
    found: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "_rendezvous", lambda *_: None)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *_, **__: found.append(os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT")),
    )
    monkeypatch.setattr(os, "environ", os.environ.copy())
    distributed.init_process_group(Rank(0, 1, 0, "127.0.0.1", 1), device="cuda")
    assert found == ["0"]
