"""The byte layout of a publish: what both sides must compute alike."""

import pytest
from checksum_vectors import CHECKSUM_VECTORS, vector_payload
from hypothesis import example, given
from hypothesis import strategies as st

from scalerl_api.weight_layout import (
    ALIGNMENT,
    DTYPE_BYTES,
    BucketMismatch,
    check_trailer,
    checksum,
    lay_out,
    tensor_bytes,
    trailer,
)
from scalerl_api.wire import TensorSpec

tensors = st.lists(
    st.builds(
        TensorSpec,
        st.text("abc.", min_size=1, max_size=6),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 9), max_size=3),
    ),
    min_size=1,
    max_size=30,
    unique_by=lambda t: t.name,
)


@given(tensors, st.integers(1, 4096))
def test_every_tensor_lies_once_in_order_and_aligned(manifest: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = lay_out(manifest, bucket_bytes)
    assert [slot.tensor for bucket in buckets for slot in bucket.slots] == manifest
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT == 0
            assert end <= slot.offset < end + ALIGNMENT
            end = slot.offset + tensor_bytes(slot.tensor)
        assert end <= bucket.payload_bytes < end + ALIGNMENT
        assert bucket.payload_bytes <= bucket_bytes or len(bucket.slots) == 1


@pytest.mark.parametrize(
    ("manifest", "bucket_bytes", "message"),
    [
        ([], 64, "empty"),
        (
            [TensorSpec("w", "float32", [1]), TensorSpec("w", "float32", [1])],
            64,
            "'w' is in the manifest twice",
        ),
        ([TensorSpec("w", "complex64", [1])], 64, "'w': dtype 'complex64'"),
        ([TensorSpec("w", "float32", [2, -1])], 64, "negative size"),
        ([TensorSpec("w", "float32", [1])], 0, "bucket_bytes"),
    ],
)
def test_lay_out_errors_name_reason(manifest: list[TensorSpec], bucket_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out(manifest, bucket_bytes)


@pytest.mark.parametrize("name", CHECKSUM_VECTORS)
def test_checksum_is_the_published_one(name: str) -> None:
    assert checksum(vector_payload(name)) == CHECKSUM_VECTORS[name]


@given(st.binary(min_size=64, max_size=64), st.integers(0, 63), st.integers(1, 255))
def test_changed_byte_changes_the_checksum(payload: bytes, at: int, flip: int) -> None:
    damaged = bytearray(payload)
    damaged[at] ^= flip
    assert checksum(damaged) != checksum(payload)


words = st.integers(0, 2**64 - 1) | st.integers(0, 63).map(lambda bit: 1 << bit)


@given(st.lists(words, min_size=8, max_size=8), st.integers(0, 7), st.integers(0, 7))
@example([0, 1 << 63, 0, 0, 0, 0, 0, 0], 0, 1)
@example([0, 1 << 62, 0, 0, 0, 0, 0, 0], 0, 1)
@example([0, 0, 0, 0, 1 << 61, 0, 0, 0], 0, 4)
def test_checksum_detects_exchanged_words_without_wrap_around(before: list[int], i: int, j: int) -> None:
    def pack(order: list[int]) -> bytes:
        return b"".join(w.to_bytes(8, "little") for w in order)

    after = list(before)
    after[i], after[j] = before[j], before[i]
    hidden = 2 * (i - j) * (before[i] - before[j]) % 2**64 == 0
    assert (checksum(pack(after)) == checksum(pack(before))) == hidden


def test_trailer_error_names_differing_integer() -> None:
    check_trailer(trailer(7, 2, -5), 7, 2, -5)
    for words, message in [
        ((0, 0, 0, 0), "does not end in a bucket's trailer"),
        (trailer(6, 2, -5), "sender sent bucket 2 of version 6"),
        (trailer(7, 1, -5), "sender sent bucket 1 of version 7"),
        (trailer(7, 2, -6), "checksum mismatch: -6 was sent"),
    ]:
        with pytest.raises(BucketMismatch, match=message):
            check_trailer(words, 7, 2, -5)
