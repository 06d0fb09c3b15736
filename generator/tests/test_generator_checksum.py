"""The torch checksum is the published one."""

from typing import Any

import pytest
import torch
from checksum_vectors import CHECKSUM_VECTORS, vector_payload
from torch.utils._python_dispatch import TorchDispatchMode

from scalerl_api.weight_layout import checksum
from scalerl_generator.weights.checksum import checksum_u8


@pytest.mark.parametrize("name", CHECKSUM_VECTORS)
def test_golden_vectors(name: str) -> None:
    payload = torch.frombuffer(bytearray(vector_payload(name)) or bytearray(16), dtype=torch.uint8)
    assert checksum_u8(payload if name != "empty" else payload[:0]) == CHECKSUM_VECTORS[name]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_checksum_of_a_large_bucket_takes_no_more_operations() -> None:
    counts = []
    for words in (1 << 14, (9 << 18) + 6):
        payload = torch.randint(0, 256, (8 * words,), dtype=torch.uint8)
        with Operations() as operations:
            found = checksum_u8(payload)
        counts.append(operations.count)
        assert found == checksum(payload.numpy().tobytes())
    assert counts[0] == counts[1]
