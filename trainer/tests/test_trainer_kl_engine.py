"""The KL penalty in the real engine, on 1 and 2 ranks at every ZeRO stage, against one process of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_worker import SETTINGS, whole_batch
from safetensors.torch import load_file
from test_trainer_engine import plain_logprobs

from scalerl_trainer.models import load_model

pytestmark = pytest.mark.slow

COEFFICIENT = 2.0
GRADIENTS = [
    {"do": "gradient", "name": f"{estimator}-zero-{stage}-{tokens}-{packed}"}
    | {"stage": stage, "dtype": "float32", "estimator": estimator, "tokens": tokens, "packed": packed}
    for estimator, stage, tokens, packed in [
        *(("k3", stage, 24, False) for stage in range(4)),
        *(("k3", stage, 24, True) for stage in (0, 3)),
        ("k3", 3, 1000, True),
        ("k1", 0, 24, False),
        ("k2", 0, 24, False),
    ]
]
RESUMES = [
    {"do": "resume", "name": f"resume-{dtype}-zero-{stage}", "stage": stage, "dtype": dtype}
    for stage, dtype in [(0, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16")]
]


def start_logprobs(network: Any, sequence: Any) -> torch.Tensor:
    """Of all tokens of a completion, in the network's dtype."""
    ids = torch.tensor([[*sequence.prompt, *sequence.completion]])
    logits = network(ids).logits[0, len(sequence.prompt) - 1 : -1] / SETTINGS["temperature"]
    return logits.log_softmax(-1).gather(1, torch.tensor(sequence.completion)[:, None])[:, 0]


@pytest.fixture(scope="module")
def models(make_model: Any) -> dict[str, Path]:
    """The policy's start, and other weights of the same shapes."""
    start, other = (make_model(hidden_size=32, attention_heads=2, intermediate_size=48) for _ in range(2))
    network = load_model(str(other), dtype="float32")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    network.save_pretrained(other)
    return {"start": start, "other": other}


@pytest.fixture(scope="module")
def results(
    module_processes: Any, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """Rank 0's, by the number of ranks."""
    out = tmp_path_factory.mktemp("kl")
    found = {}
    for world in (1, 2):
        jobs = [*(job | {"coefficient": COEFFICIENT} for job in GRADIENTS), *RESUMES]
        given: dict[str, Any] = {name: str(path) for name, path in models.items()}
        given |= {"out": out, "name": f"world-{world}", "jobs": jobs}
        module_processes.run_ranks("kl_worker.py", world, **given)
        found[world] = torch.load(out / f"world-{world}-0.pt", weights_only=False)
    return found


@pytest.fixture(scope="module")
def by_hand(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Loss, mean KL and gradient by estimator: sequence by sequence, with the library's own logits and autograd."""
    batch, temperature = whole_batch(0), SETTINGS["temperature"]
    policy, other = (load_model(str(models[name]), dtype="float32") for name in ("start", "other"))
    found = {}
    for estimator in ("k1", "k2", "k3"):
        loss, kl = torch.zeros(()), 0.0
        for i, sequence in enumerate(batch["sequences"]):
            own = plain_logprobs(policy, sequence, temperature)
            with torch.no_grad():
                d = own - plain_logprobs(other, sequence, temperature)
            ratio = (own.detach() - batch["generator"][i]).exp().clamp(max=5.0)
            # Each estimator's value, and the derivative by log π that algo.kl states for it.
            value, slope = {
                "k1": (d, d),
                "k2": (d.square() / 2, d),
                "k3": ((-d).exp() - 1 + d, 1 - (-d).exp()),
            }[estimator]
            weight, advantage = batch["weights"][i], batch["advantages"][i]
            kl += float(value.sum())
            penalty = value + slope * (own - own.detach())
            loss = loss + (weight * (COEFFICIENT * penalty - advantage * ratio * own)).sum()
        policy.zero_grad()
        loss.backward()
        gradient = {name: p.grad.clone() for name, p in policy.named_parameters()}
        found[estimator] = {"loss": loss.item(), "kl": kl / sum(batch["lengths"]), "gradient": gradient}
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("job", GRADIENTS, ids=lambda job: job["name"])
def test_gradient_matches_plain_torch(
    world: int, job: dict[str, Any], results: dict[int, dict[str, Any]], by_hand: dict[str, dict[str, Any]]
) -> None:
    """On 2 ranks one has fewer micro-batches, and runs empty ones."""
    got, expected = results[world][job["name"]], by_hand[job["estimator"]]
    assert got["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert got["kl"] == pytest.approx(expected["kl"], abs=1e-6)
    assert abs(expected["kl"]) > 0.01, "the models must differ"
    assert got["gradient"].keys() == expected["gradient"].keys()
    for name, gradient in expected["gradient"].items():
        torch.testing.assert_close(got["gradient"][name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("job", RESUMES, ids=lambda job: job["name"])
class TestReference:
    def test_kl_begins_at_zero(
        self, world: int, job: dict[str, Any], results: dict[int, dict[str, Any]]
    ) -> None:
        """The first step's weights are the reference's; then they leave it, and it stays."""
        kl = results[world][job["name"]]["kl"]
        assert kl[0] == pytest.approx(0, abs=1e-10)
        assert 1e-6 < kl[1] < kl[2]

    def test_restart_has_the_same_reference(
        self, world: int, job: dict[str, Any], results: dict[int, dict[str, Any]]
    ) -> None:
        got = results[world][job["name"]]
        assert got["kl_again"] == pytest.approx(got["kl"][2], rel=1e-6)
        for name, expected in got["final"].items():
            assert torch.equal(got["final_again"][name], expected), name

    def test_kl_from_the_start_equals_the_definition(
        self, world: int, job: dict[str, Any], models: dict[str, Path], results: dict[int, dict[str, Any]]
    ) -> None:
        """Against both models in float64, sequence by sequence; a restart has the same sample."""
        got = results[world][job["name"]]
        assert got["since_start"][0] == {"start_kl": 0.0, "start_kl_k1": 0.0}
        assert 1e-6 < got["since_start"][1]["start_kl"] < got["since_start"][2]["start_kl"]
        assert got["start_again"] == got["since_start"][2]
        if job["dtype"] == "float32":
            start, now = (load_model(str(models["start"]), dtype="float32").double() for _ in range(2))
            now.load_state_dict({n: t.double() for n, t in got["written"].items()}, strict=False)
            with torch.no_grad():
                d_n = torch.cat(
                    [
                        start_logprobs(start, one) - start_logprobs(now, one)
                        for one in whole_batch(0)["sequences"]
                    ]
                )
            expected = {"start_kl": float(((-d_n).exp() - 1 + d_n).mean()), "start_kl_k1": float(d_n.mean())}
            assert got["since_start"][2] == pytest.approx(expected, rel=1e-4)

    def test_written_weights_are_the_policys(
        self, world: int, job: dict[str, Any], results: dict[int, dict[str, Any]]
    ) -> None:
        got = results[world][job["name"]]
        written = load_file(got["file"])
        assert written.keys() == got["written"].keys()
        for name, expected in got["written"].items():
            assert written[name].dtype == getattr(torch, job["dtype"])
            assert torch.equal(written[name].float(), expected), name
