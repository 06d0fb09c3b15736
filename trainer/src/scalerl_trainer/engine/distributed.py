"""The ranks' default process group.

torch's store has no authentication: a process that reaches its port can read and write it. The rendezvous therefore counts a rank only
if it proves that it has the run's token, and ranks believe a decision only with such a proof; a rank of another run, or one
without the token, does not join. This does not protect the addresses that torch exchanges in the store afterwards, nor the
connections between ranks: only the network's policy keeps others from them (docs/operations.md).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from scalerl_trainer.errors import BadBatchError, EngineError, Stopped
from scalerl_trainer.train_batch import PackedShard

POLL_SECONDS = 0.05
STORE_GRACE_SECONDS = 1.0
"""After a stop, rank 0 keeps the store open for this time, so that ranks that are just joining can read the decision."""
READ_SECONDS = 10.0
"""It waits at most for this time until all that have joined have read it."""
NONCE_SECONDS = 5.0
"""A rank that is stopped waits for rank 0 for this time after its connection, so that it can write the decision to stop."""
COMPILED_PRODUCTS = 64
"""Matrix products of bfloat16 that oneDNN and torch's layer above it keep compiled in a rank on CPUs, .5 MiB to .7 MiB for each shape: a
layer has 9 with a number of tokens, with adapters 18. By default 1,024 fill up as numbers of tokens differ."""
_NONCE, _DECISION, _PROCEED, _STOPPED = "nonce", "decision", "proceed", "stopped"


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's rank and the rendezvous address."""

    rank: int
    world: int
    """Number of ranks."""
    local_rank: int
    """Rank within the pod, and index of the GPU."""
    address: str
    port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Rank:
        """Read torchrun's environment variables. Raises ``EngineError`` if one is missing or not a number."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not environment.get(name)]
        if missing:
            raise EngineError(f"{', '.join(missing)} not set: ranks are started with {', '.join(names)}")
        try:
            rank, world, local, port = (int(environment[name]) for name in (*names[:3], names[4]))
        except ValueError as error:
            raise EngineError(
                f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be integers: {error}"
            ) from error
        if not 0 <= rank < world:
            raise EngineError(f"RANK {rank} is not below WORLD_SIZE {world}")
        return cls(rank, world, local, environment["MASTER_ADDR"], port)


def init_process_group(
    rank: Rank,
    *,
    device: Literal["cpu", "cuda"],
    token: str = "",
    timeout_seconds: float = 600.0,
    stopped: Callable[[], bool] = lambda: False,
) -> torch.device:
    """Initialise the default process group (gloo on CPUs, NCCL on GPUs) and return this rank's device.

    Blocks until all ranks have joined, at most ``timeout_seconds``, which is also the limit of every later collective.
    DeepSpeed uses a clone of the group (:func:`limit_as_default`).

    Args:
        token: the run's, which all ranks must have.

    Raises:
        Stopped: ``stopped`` is true on this rank or on another that has joined.
        EngineError: this rank's device is missing.
        OSError: not all ranks joined in time, or one has not the token.
    """
    # DeepSpeed reads LOCAL_RANK from the environment.
    os.environ["LOCAL_RANK"] = str(rank.local_rank)
    if device == "cuda":
        if rank.local_rank >= torch.cuda.device_count():
            raise EngineError(
                f"local rank {rank.local_rank} needs a GPU of its own, but this process sees "
                f"{torch.cuda.device_count()}"
            )
        torch.cuda.set_device(rank.local_rank)
        # By default an NCCL error of any group of the process, such as a generator lost in a publish, makes the monitor of the
        # process's first group end the process eight minutes later, also where that error is handled.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    else:
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # read at the first product
            os.environ.setdefault(name, str(COMPILED_PRODUCTS))
    store = _rendezvous(rank, timeout_seconds, stopped, token)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=torch.device("cuda", rank.local_rank) if device == "cuda" else None,
    )
    return torch.device(device, rank.local_rank) if device == "cuda" else torch.device("cpu")


def _proof(token: str, *what: object) -> str:
    """Proves knowledge of ``token``."""
    text = "\0".join(("scalerl rendezvous", *map(str, what)))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def _rendezvous(rank: Rank, timeout_seconds: float, stopped: Callable[[], bool], token: str = "") -> Any:
    """Connect to a store, and return it once all ranks with the ``token`` have joined.

    Rank 0 writes a random nonce; the other values are proofs of the token and of that nonce.
    """
    deadline = time.monotonic() + timeout_seconds
    connection = _connect(rank, timeout_seconds, stopped)
    store = dist.PrefixStore(_proof(token, "store"), connection)  # type: ignore[attr-defined]
    own_nonce, connected = secrets.token_hex(16), time.monotonic()
    if rank.rank == 0:
        store.set(_NONCE, own_nonce)
    nonce, joined = "", 0
    while True:
        if not nonce and store.check([_NONCE]):
            nonce = own_nonce if rank.rank == 0 else store.get(_NONCE).decode(errors="replace")
            store.set(f"here/{rank.rank}", _proof(token, nonce, rank.rank))
        # The first decision is valid for all ranks: either all proceed or all stop.
        if stopped() and nonce:
            store.compare_set(_DECISION, "", f"{_STOPPED} {_proof(token, nonce, _STOPPED)}")
        elif nonce:
            joined = _joined(store, rank.world, joined, token, nonce)
            if joined == rank.world:
                store.compare_set(_DECISION, "", f"{_PROCEED} {_proof(token, nonce, _PROCEED)}")
        if nonce and store.check([_DECISION]):
            if _decision(store, token, nonce) == _PROCEED:
                return store
            if rank.rank == 0:
                _wait_for_readers(store, rank.world)
            else:
                store.set(f"read/{rank.rank}", "")
            raise Stopped("this rank or another was stopped during the rendezvous")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{_absent(store, rank.world, nonce)} within {timeout_seconds:g} s")
        if stopped() and not nonce and time.monotonic() > connected + NONCE_SECONDS:
            raise Stopped("stopped while waiting for rank 0")
        time.sleep(POLL_SECONDS)


def _connect(rank: Rank, timeout_seconds: float, stopped: Callable[[], bool]) -> Any:
    """Open the store on rank 0, or connect to it.

    Signal handlers do not run during torch's blocking call, so another thread makes it.
    """
    stores: list[Any] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            stores.append(
                dist.TCPStore(  # type: ignore[attr-defined]  # absent from its __all__
                    rank.address,
                    rank.port,
                    rank.world,
                    is_master=rank.rank == 0,
                    timeout=timedelta(seconds=timeout_seconds),
                    wait_for_workers=False,
                )
            )
        except Exception as error:
            failed.append(error)

    connecting = threading.Thread(target=connect, name="rendezvous", daemon=True)
    connecting.start()
    while connecting.is_alive():
        connecting.join(POLL_SECONDS)
        if stopped():
            raise Stopped("stopped while connecting to rank 0")
    if failed:
        raise ConnectionError(f"no rendezvous at {rank.address}:{rank.port}: {failed[0]}") from failed[0]
    return stores[0]


def _decision(store: Any, token: str, nonce: str) -> str:
    """The ranks' decision, which is in the store. Raises ``ConnectionError`` if it has no proof of the token."""
    decision: str
    decision, _, proof = store.get(_DECISION).decode(errors="replace").partition(" ")
    if not hmac.compare_digest(proof.encode(), _proof(token, nonce, decision).encode()):
        raise ConnectionError(
            "the rendezvous of the ranks has a decision without the run's token: who reaches this port?"
        )
    return decision


def _wait_for_readers(store: Any, world: int) -> None:
    """Keep the store of rank 0 open until the others have read the decision to stop: for ``READ_SECONDS`` at most, as where one was killed."""
    deadline = time.monotonic() + READ_SECONDS
    time.sleep(STORE_GRACE_SECONDS)
    joined = [rank for rank in range(1, world) if store.check([f"here/{rank}"])]
    while time.monotonic() < deadline and not store.check([f"read/{rank}" for rank in joined]):
        time.sleep(POLL_SECONDS)


def _absent(store: Any, world: int, nonce: str) -> str:
    """What a rendezvous lacks that did not end in time."""
    if not nonce:
        return "rank 0 did not begin the rendezvous with this run's token"
    missing = [other for other in range(world) if not store.check([f"here/{other}"])]
    return f"ranks {missing} of {world} did not join"


def _joined(store: Any, world: int, joined: int, token: str, nonce: str) -> int:
    """The number of ranks, from rank 0 on, that have joined; the first ``joined`` are known.

    Raises:
        ConnectionError: one has not the token. Not an ``EngineError``, after which the run would not be tried again.
    """
    while joined < world and store.check([f"here/{joined}"]):
        if not hmac.compare_digest(store.get(f"here/{joined}"), _proof(token, nonce, joined).encode()):
            raise ConnectionError(
                f"rank {joined} joined the rendezvous without the run's token: who reaches this port?"
            )
        joined += 1
    return joined


def destroy_process_group() -> None:
    """Close the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def limit_as_default(group: Any, device: torch.device) -> None:
    """Give ``group`` the timeout of the default group. ``device`` is this rank's in both."""
    c10d: Any = dist.distributed_c10d
    default = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    c10d._set_pg_timeout(default.options._timeout, group)


def gather_vectors(vector: torch.Tensor) -> torch.Tensor:
    """Gather every rank's ``vector`` of shape ``[K]``; returns ``[world, K]`` on the CPU of every rank. One collective."""
    world = dist.get_world_size()
    gathered = [torch.empty_like(vector) for _ in range(world)]
    dist.all_gather(gathered, vector.contiguous())
    return torch.stack(gathered).cpu()


def exchange_sizes(shard: PackedShard, device: torch.device) -> torch.Tensor:
    """Gather the sizes and errors of all ranks. A collective.

    If only one rank raised for a bad shard, the others would wait in their collectives until the timeout. Therefore all ranks
    raise together.

    Returns:
        ``counts`` of shape ``[world, 8]``. Its columns are the numbers of micro-batches, trainable tokens, tokens, padding and
        sequences, whether the shard is bad, whether its fresh tokens are known, and the number of tokens with recorded experts.

    Raises, on every rank: ``BadBatchError`` (and ``NonFiniteLogprobError``, ``SequenceTooLongError``).
    """
    packed = shard.packed
    counts = gather_vectors(
        torch.tensor(
            [
                len(packed.micro_batches),
                packed.trainable,
                packed.tokens,
                packed.padding,
                shard.sequences,
                shard.error is not None,
                shard.fresh_known,
                packed.routed,
            ],
            dtype=torch.long,
            device=device,
        )
    )
    if shard.error is not None:
        raise shard.error
    if bool(counts[:, 5].any()):
        ranks = counts[:, 5].nonzero().flatten().tolist()
        raise BadBatchError(f"the shard of rank {ranks[0]} cannot be trained on; see its log")
    return counts
