"""Steps of a loss that says that it is token-local: the same as of one that does not, from a product less a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_api.recipe import RecipeSpec
from scalerl_trainer.algo.gradient_guard import GradientGuard
from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import Cispo, Gspo, Loss, LossOutput, TokenBatch, make_loss
from scalerl_trainer.engine import Engine, EngineSettings, TrainBatch, destroy_process_group
from scalerl_trainer.engine.stats import StepStats
from scalerl_trainer.errors import EngineError
from scalerl_trainer.models import head, head_gradients
from scalerl_trainer.models.lora import Lora
from scalerl_trainer.packing import Sequence

CHUNK = 5


class Unsaid:
    """A loss that does not say what it is, as those of packages."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        return self.loss(tokens)


class Lying(Unsaid):
    token_local = True


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # DeepSpeed reads it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        destroy_process_group()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each product of logits or of a gradient by hidden states."""
    found: list[int] = []
    own = head_gradients.product

    def counted(left: torch.Tensor, right: torch.Tensor, fp32: bool) -> torch.Tensor:
        found.append(len(left))
        return own(left, right, fp32)

    modules: list[ModuleType] = [head, head_gradients]
    for module in modules:
        monkeypatch.setattr(module, "product", counted)
    return found


def stepped(
    loss: Loss, products: list[int], settings: dict[str, Any]
) -> tuple[StepStats, dict[str, torch.Tensor]]:
    """A step with micro-batches of several chunks and, if it is guarded, an outlier that is masked; and its gradients' moments."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=2,
        vocab_size=40,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    defaults: dict[str, Any] = {"dtype": "float32", "warmup_steps": 0, "micro_batch_tokens": 48}
    chosen = EngineSettings(**(defaults | settings), ratio_guard=None, logit_chunk_bytes=4 * 40 * CHUNK)
    engine = Engine(LlamaForCausalLM(config), chosen, torch.device("cpu"))
    engine.set_reference(LlamaForCausalLM(config))
    sequences = [Sequence([1, 2, 3], [(6 + 5 * n + k) % 40 for k in range(4 + n)]) for n in range(8)]
    generator_n = engine.logprobs(sequences).logprobs_n
    generator_n[::3] += 0.7
    generator_n[20] -= 9.0
    weights_s = torch.full((8,), 1 / len(generator_n))
    batch = TrainBatch(sequences, weights_s, torch.linspace(-1, 1, 8), generator_n)
    products.clear()
    stats = engine.step(batch, loss)
    pieces = {
        f"{piece.name}@{piece.start}": piece.values["exp_avg"].clone() for piece in engine._trained.pieces()
    }
    engine.close()
    return stats, pieces


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of DeepSpeed's stage 3
@pytest.mark.parametrize(
    "settings",
    [
        *({"zero_stage": stage} for stage in range(4)),
        {"engine": "FSDP2", "zero_stage": 3},
        {"zero_stage": 1, "dtype": "bfloat16"},
        {"zero_stage": 1, "lora": Lora(4, 8)},
        {"zero_stage": 1, "activation_checkpointing": True},
        {"zero_stage": 1, "gradient_guard": GradientGuard(min_tokens=1)},
    ],
    ids=str,
)
def test_step_is_the_same_from_three_products(
    group: None, products: list[int], settings: dict[str, Any]
) -> None:
    loss = WithKl(Cispo(1e4), "k3", 0.1)
    found = []
    for own in (loss, Unsaid(loss)):
        stats, moments = stepped(own, products, settings)
        assert stats.applied
        assert stats.guard_masked_tokens == (1 if "gradient_guard" in settings else 0)
        # Each chunk's logits and gradient, and logits of the reference, of each token; those of the guard's first pass too.
        passes = 1 + stats.guard_masked_tokens
        found.append((round(sum(products) / stats.trainable_tokens / passes), stats, moments))
    (few, stats, moments), (many, expected, others) = found
    assert (few, many) == (3, 4)
    for name in ("loss", "gradient_norm", "entropy", "loss_means", "ratios"):
        assert getattr(stats, name) == getattr(expected, name)
    assert moments.keys() == others.keys()
    assert any(value.any() for value in moments.values())
    for name, value in moments.items():
        assert torch.equal(value, others[name])


def test_loss_that_says_so_wrongly_is_refused(
    group: None, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start; and a step of it ends before it changes weights, also where the start found nothing."""
    recipe = RecipeSpec.model_validate({"loss": {"plugin": {"name": "own"}}})
    for loss, refused in ((Unsaid(Gspo()), False), (Lying(Cispo()), False), (Lying(Gspo()), True)):
        monkeypatch.setattr(make_loss, "make", lambda *_, loss=loss: loss)
        if refused:
            with pytest.raises(EngineError, match="Lying has token_local = True, but other tokens'"):
                make_loss.make_loss(recipe)
        else:
            assert make_loss.make_loss(recipe) is loss
    with pytest.raises(RuntimeError, match="another derivative than in the forward pass"):
        stepped(Lying(Gspo()), products, {"zero_stage": 1})
