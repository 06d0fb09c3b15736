"""From the recipe to the parts of the trainer."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_api.recipe import ONE_OF, RecipeSpec
from scalerl_trainer.algo.corrections import Corrected
from scalerl_trainer.algo.losses import Cispo, Dppo, Gspo, Loss, PpoClip, Reinforce
from scalerl_trainer.spec_settings import make_loss

MADE: dict[str, tuple[dict[str, Any], Loss]] = {
    "cispo": ({"ratioCap": "4"}, Cispo(4.0)),
    "ppoClip": ({"clipLow": "0.1", "clipHigh": "0.3"}, PpoClip(0.1, 0.3)),
    "gspo": ({}, Gspo(3e-4, 4e-4)),
    "reinforce": ({}, Reinforce()),
    "dppo": ({"threshold": "0.1"}, Dppo(0.1)),
}


def test_every_loss_of_the_spec_is_made() -> None:
    assert set(MADE) == set(ONE_OF["loss"])
    for name, (fields, loss) in MADE.items():
        assert make_loss(RecipeSpec.model_validate({"loss": {name: fields}})) == loss


@pytest.mark.parametrize(("correction", "above"), [("truncated", "truncate"), ("masked", "mask")])
def test_correction_wraps_the_loss(correction: str, above: Any) -> None:
    recipe = RecipeSpec.model_validate({"loss": {"gspo": {}}, "correction": {correction: {"cap": 3}}})
    assert make_loss(recipe) == Corrected(Gspo(), 3.0, above)


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
