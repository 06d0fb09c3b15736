"""Steps of a loss that says that it is token-local: the same as of one that does not, from a product less a chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from free_port import free_port
from token_local_worker import SETTINGS, Lying, Unsaid

from scalerl_api.recipe import RecipeSpec
from scalerl_trainer.algo.losses import Cispo, Gspo, make_loss
from scalerl_trainer.errors import EngineError


@pytest.fixture(scope="module")
def results(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("token_local")
    process = module_processes.run("token_local_worker.py", WORKER={"out": out, "port": free_port()})
    process.join(300)
    assert process.exitcode == 0
    found: dict[str, Any] = torch.load(out / "results.pt", weights_only=False)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_step_is_the_same_from_three_products(name: str, results: dict[str, Any]) -> None:
    local, other = results[name]
    stats, expected = local["stats"], other["stats"]
    assert stats.applied
    assert stats.guard_masked_tokens == (1 if name == "guard" else 0)
    # Each chunk's logits and gradient, and logits of the reference, of each token; those of the guard's first pass too.
    passes = 1 + stats.guard_masked_tokens
    counts = [round(one["products"] / stats.trainable_tokens / passes) for one in (local, other)]
    assert counts == [3, 4]
    for field in ("loss", "gradient_norm", "entropy", "loss_means", "ratios"):
        assert getattr(stats, field) == getattr(expected, field)
    assert local["moments"].keys() == other["moments"].keys()
    assert any(value.any() for value in local["moments"].values())
    for piece, value in local["moments"].items():
        assert torch.equal(value, other["moments"][piece])


def test_step_of_a_loss_that_says_so_wrongly_ends(results: dict[str, Any]) -> None:
    """Before it changes weights, also where the start found nothing."""
    assert "another derivative than in the forward pass" in results["wrong"]


def test_loss_that_says_so_wrongly_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RecipeSpec.model_validate({"loss": {"plugin": {"name": "own"}}})
    for loss, refused in ((Unsaid(Gspo()), False), (Lying(Cispo()), False), (Lying(Gspo()), True)):
        monkeypatch.setattr(make_loss, "make", lambda *_, loss=loss: loss)
        if refused:
            with pytest.raises(EngineError, match="Lying has token_local = True, but other tokens'"):
                make_loss.make_loss(recipe)
        else:
            assert make_loss.make_loss(recipe) is loss
