"""A rank of a group of two, for ``test_trainer_ranks.py``. Rank 0 uses :class:`Ranks`; rank 1 joined the group to attack it.

python ranks_worker.py RANK PORT FILE

Rank 0 prints the results as JSON. The pickle of rank 1 would create FILE.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed

from scalerl_trainer.engine.distributed import Rank, destroy_process_group, init_process_group
from scalerl_trainer.ranks import MAX_BYTES, RankLost, Ranks

dist: Any = torch.distributed


class Code:
    """An object whose unpickling executes code."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (self.file,)


def messages(file: str) -> dict[str, tuple[int, bytes]]:
    """The announced size and the content of each message."""
    contents = {
        "valid": msgspec.msgpack.encode((1, "one")),
        "pickle": pickle.dumps(Code(file)),
        "other type": msgspec.msgpack.encode(["one", 1]),
        "deep": b"\x91" * 100_000,
        "cut off": msgspec.msgpack.encode((1, "one"))[:-1],
        "extension": b"\xc7\x01\x01\x00",
    }
    sizes = {"nothing": 0, "negative": -1, "too large": MAX_BYTES + 1, "huge": 2**60}
    return {name: (len(content), content) for name, content in contents.items()} | {
        name: (size, b"") for name, size in sizes.items()
    }


def attacked(ranks: Ranks, names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = repr(ranks.all_gather((0, "zero"), tuple[int, str]))
        except RankLost as error:
            found[name] = f"RankLost: {error}"
    # One that cannot be encoded ends the call on both sides.
    try:
        ranks.all_gather((0, "\udc80"), tuple[int, str])
    except UnicodeEncodeError:
        found["own"] = "UnicodeEncodeError"
    found["broadcast"] = repr(ranks.broadcast((0, "zero"), tuple[int, str]))
    return found


def attack(group: Any, messages: dict[str, tuple[int, bytes]]) -> None:
    for size, content in [*messages.values(), (3, b"abc")]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([size]), group=group)
        if not 0 < size <= MAX_BYTES or not int(sizes[0]):
            continue
        length = max(size, int(sizes[0]))
        own = torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(own) for _ in range(2)], own, group=group)


def main(rank: int, port: int, file: str) -> None:
    init_process_group(Rank(rank, 2, rank, "127.0.0.1", port), device="cpu", timeout_seconds=120)
    ranks = Ranks(rank, 2, 120.0)
    found = messages(file)
    if rank == 0:
        print(json.dumps(attacked(ranks, list(found))))
    else:
        attack(ranks._group, found)
        assert ranks.broadcast(None, tuple[int, str]) == (0, "zero")
    destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), str(Path(sys.argv[3])))
