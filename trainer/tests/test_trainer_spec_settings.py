"""From the recipe to the parts of the trainer."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_api.recipe import ONE_OF, RecipeSpec
from scalerl_trainer.algo.corrections import Corrected
from scalerl_trainer.algo.distillation import Distilled
from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import Cispo, Dppo, Gspo, Loss, PpoClip, Reinforce
from scalerl_trainer.algo.losses.make_loss import make_loss

MADE: dict[str, tuple[dict[str, Any], Loss]] = {
    "cispo": ({"ratioCap": "4"}, Cispo(4.0)),
    "ppoClip": ({"clipLow": "0.1", "clipHigh": "0.3"}, PpoClip(0.1, 0.3)),
    "gspo": ({}, Gspo(3e-4, 4e-4)),
    "reinforce": ({}, Reinforce()),
    "dppo": ({"threshold": "0.1"}, Dppo(0.1)),
}


def test_every_loss_of_the_spec_is_made() -> None:
    assert set(MADE) == set(ONE_OF["loss"]) - {"plugin"}
    for name, (fields, loss) in MADE.items():
        assert make_loss(RecipeSpec.model_validate({"loss": {name: fields}})) == loss


@pytest.mark.parametrize(("correction", "above"), [("truncated", "truncate"), ("masked", "mask")])
def test_correction_wraps_the_loss(correction: str, above: Any) -> None:
    recipe = RecipeSpec.model_validate({"loss": {"gspo": {}}, "correction": {correction: {"cap": 3}}})
    assert make_loss(recipe) == Corrected(Gspo(), 3.0, above)


def test_kl_penalty_wraps_the_loss_within_the_correction() -> None:
    kl = {"penalty": {"coefficient": "0.04"}}
    assert make_loss(RecipeSpec.model_validate({"kl": kl})) == WithKl(Cispo(5.0), "k3", 0.04)
    kl["penalty"]["estimator"] = "k2"
    recipe = RecipeSpec.model_validate({"kl": kl, "correction": {"masked": {}}})
    assert make_loss(recipe) == Corrected(WithKl(Cispo(5.0), "k2", 0.04), 2.0, "mask")


def test_distillation_wraps_the_correction() -> None:
    """A correction hides the log-probabilities of what was sampled, which the teacher's are compared with."""
    distillation = {"teacher": {"url": "http://teacher:8000"}}
    assert make_loss(RecipeSpec.model_validate({"distillation": distillation})) == Distilled(Cispo(5.0), 1.0)
    chosen = {
        "distillation": distillation | {"coefficient": "0.5"},
        "correction": {"masked": {}},
        "kl": {"penalty": {"coefficient": "0.04"}},
    }
    expected = Distilled(Corrected(WithKl(Cispo(5.0), "k3", 0.04), 2.0, "mask"), 0.5)
    assert make_loss(RecipeSpec.model_validate(chosen)) == expected


@pytest.mark.parametrize(
    ("preset", "loss"),
    [
        ("scalerl", Cispo(5.0)),
        ("dapo", PpoClip(0.2, 0.26)),
        ("magistral", PpoClip(0.2, 0.28)),
        ("gspo", Gspo()),
    ],
)
def test_loss_of_a_preset(preset: str, loss: Loss) -> None:
    assert make_loss(RecipeSpec.model_validate({"preset": preset})) == loss
