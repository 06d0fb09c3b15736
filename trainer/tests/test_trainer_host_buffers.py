"""The copy of a rank's state on the host: its size, and its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from scalerl_trainer.checkpoints import host_copy
from scalerl_trainer.checkpoints.engine_files import (
    KEYS,
    PROXIMAL,
    EngineHeader,
    Piece,
    SavedState,
    write_header,
    write_pieces,
)
from scalerl_trainer.checkpoints.host_copy import CHUNK_BYTES, HostBuffers, place_on_host

MIB = 1 << 20
LLAMA_8B = [(128256 * 4096, 12)] * 2 + 32 * [
    *[(4096 * 4096, 12)] * 2,
    *[(1024 * 4096, 12)] * 2,
    *[(14336 * 4096, 12)] * 3,
    *[(4096, 12)] * 2,
]


@given(pieces=st.lists(st.tuples(st.integers(0, 3 * MIB), st.sampled_from([8, 12, 14, 16])), max_size=60))
@example(pieces=LLAMA_8B)
@example(pieces=[(CHUNK_BYTES // 12 + 1, 12)])
@example(pieces=[(1, 16)] * 100_000)
def test_parts_cover_all_elements_without_overlap_in_chunks_of_powers_of_two(
    pieces: list[tuple[int, int]],
) -> None:
    chunks, parts = place_on_host(pieces)
    assert all(size & (size - 1) == 0 and size <= CHUNK_BYTES for size in chunks), "torch rounds up to these"
    reached = [0] * len(pieces)
    ends = [0] * len(chunks)
    for part in parts:
        assert part.start == reached[part.piece]
        assert part.offset >= ends[part.chunk]
        assert part.offset % 32 == 0
        reached[part.piece] += part.count
        ends[part.chunk] = part.offset + -(-part.count // 16) * 16 * pieces[part.piece][1]
    assert reached == [count for count, _ in pieces]
    assert all(end <= size for end, size in zip(ends, chunks, strict=True))


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_host_memory_is_the_state_and_at_most_a_twentieth_more(ranks: int) -> None:
    """One pinned buffer for each parameter and key would be rounded up to 1.4 times the state of this model, and up to 2 of others."""
    pieces = [(-(-count // ranks), width) for count, width in LLAMA_8B]
    chunks, _ = place_on_host(pieces)
    state = sum(count * width for count, width in pieces)
    assert state <= sum(chunks) < 1.001 * state + 2 * MIB
    assert sum(chunks) < 1.05 * state


def test_split_copies_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "CHUNK_BYTES", MIB)
    torch.manual_seed(0)
    sizes = {"a": 200_001, "b": 7, "c": 90_000}

    def state() -> list[Piece]:
        return [
            Piece(
                name,
                0,
                {key: torch.randn(count) for key in KEYS} | {PROXIMAL: torch.randn(count).bfloat16()},
            )
            for name, count in sizes.items()
        ]

    host = HostBuffers(torch.device("cpu"))
    addresses: set[Any] = set()
    for number in range(2):
        pieces = state()
        copies = host.copy(pieces)()
        assert len(copies) > len(pieces), "some are split"
        addresses.add(tuple(one.values["weight"].data_ptr() for one in copies))
        folder = tmp_path / str(number)
        folder.mkdir()
        kept = [{key: values.clone() for key, values in piece.values.items()} for piece in pieces]
        for piece in pieces:  # training continues
            for values in piece.values.values():
                values.zero_()
        write_pieces(folder, 0, copies)
        write_header(folder, EngineHeader(1, 1.0, {name: [count] for name, count in sizes.items()}))
        saved = SavedState(folder)
        for piece, before in zip(pieces, kept, strict=True):
            for key, expected in before.items():
                found = torch.empty_like(expected)
                saved.read(piece.name, key, 0, found)
                assert torch.equal(found, expected), (piece.name, key)
    assert len(addresses) == 1, "the memory is reused"


def test_copy_that_fails_is_an_error_of_what_reads_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step beside it goes on."""
    host = HostBuffers(torch.device("cpu"))
    monkeypatch.setattr(host, "_copy", lambda *_: torch.empty(1 << 60))
    copies = host.copy([Piece("a", 0, {key: torch.zeros(3) for key in KEYS})])
    host.wait()
    with pytest.raises(RuntimeError, match="memory"):
        copies()
