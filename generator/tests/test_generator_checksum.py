"""The torch checksum is the published one."""

import pytest
import torch

from scalerl_api.weight_layout import CHECKSUM_VECTORS, vector_payload
from scalerl_generator.weights.checksum import checksum_u8


@pytest.mark.parametrize("name", CHECKSUM_VECTORS)
def test_golden_vectors(name: str) -> None:
    payload = torch.frombuffer(bytearray(vector_payload(name)) or bytearray(16), dtype=torch.uint8)
    assert checksum_u8(payload if name != "empty" else payload[:0]) == CHECKSUM_VECTORS[name]
