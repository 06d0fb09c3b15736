"""Model FLOP utilisation: which parameters count, and where it is not known."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from scalerl_trainer.utilization import flops_per_token, peak_tflops, utilization

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def test_an_embedding_counts_once_if_it_is_the_head() -> None:
    tied, untied = (
        Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=tied)) for tied in (True, False)
    )
    every = sum(parameter.numel() for parameter in tied.parameters())
    assert flops_per_token(tied) == flops_per_token(untied) == 6 * every


def test_mixtures_of_experts_are_not_known() -> None:
    assert flops_per_token(MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=2))) is None


def test_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    found = utilization(6e9, 1_000_000, 10.0, 2, "bfloat16", cuda)
    assert found == pytest.approx(6e15 / 10 / (2 * 989e12))
    assert utilization(6e9, 1, 1.0, 1, "bfloat16", cpu) is None
    assert utilization(6e9, 1, 1.0, 1, "float32", cuda) is None
    assert utilization(None, 1, 1.0, 1, "bfloat16", cuda) is None
    assert utilization(6e9, 1, 0.0, 1, "bfloat16", cuda) is None
    name = "A device of tomorrow"
    assert utilization(6e9, 1, 1.0, 1, "bfloat16", cuda) is None


def test_peak_by_device_name() -> None:
    assert peak_tflops("NVIDIA H200") == peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("NVIDIA H100 PCIe") == 756
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312
    assert peak_tflops("NVIDIA L40S") == 362
    assert peak_tflops("NVIDIA L4") == 121


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA RTX A4000", "NVIDIA RTX A1000 6GB Laptop GPU", "NVIDIA H20"),  # others that begin alike
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a part of the device
    ],
)
def test_peak_of_a_device_with_a_similar_name_is_not_known(name: str) -> None:
    assert peak_tflops(name) is None
