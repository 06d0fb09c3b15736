"""Presets, what a spec says beside them, and where each value comes from."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scalerl_api.load import SpecError, accepted_run, parse_run, to_yaml
from scalerl_api.recipe import ONE_OF, PRESETS, RecipeSpec, resolve
from scalerl_api.recipe.presets import cel, completed
from scalerl_api.recipe.spec import Preset

RUN: dict[str, Any] = {
    "apiVersion": "scalerl.dev/v1alpha1",
    "kind": "ScaleRLRun",
    "metadata": {"name": "r"},
    "spec": {
        "model": {"path": "/models/m"},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "exact"}},
        "budget": {"maxSteps": 10},
    },
}


def with_recipe(**recipe: Any) -> dict[str, Any]:
    return {**RUN, "spec": {**RUN["spec"], "recipe": recipe}}


def values(recipe: RecipeSpec) -> dict[str, str]:
    return {choice.field: choice.value for choice in resolve(recipe).choices}


def test_every_preset_has_an_entry_and_every_entry_is_a_preset() -> None:
    assert set(get_args(Preset)) == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_gives_the_values_of_its_table(preset: str) -> None:
    found = values(RecipeSpec.model_validate({"preset": preset}))
    for path, published in PRESETS[preset].items():
        assert found[path] == str(published.value), path


def test_preset_scalerl_is_the_defaults() -> None:
    plain = {name: RecipeSpec.model_fields[name].default for name in RecipeSpec.model_fields}
    assert RecipeSpec.model_construct(**plain) == RecipeSpec()


def test_what_the_spec_gives_wins_over_the_preset() -> None:
    recipe = RecipeSpec.model_validate(
        {"preset": "dapo", "loss": {"ppoClip": {"clipHigh": "0.3"}}, "promptsPerStep": 4}
    )
    assert recipe.loss.ppo_clip is not None
    assert (recipe.loss.ppo_clip.clip_low, recipe.loss.ppo_clip.clip_high) == ("0.2", "0.3")
    assert (recipe.prompts_per_step, recipe.aggregation) == (4, "PromptAverage")


@pytest.mark.parametrize("key", ["offPolicy", "off_policy"])
def test_another_alternative_replaces_that_of_the_preset(key: str) -> None:
    recipe = RecipeSpec.model_validate({"preset": "grpo", key: {"pipeline": {}}})
    assert recipe.off_policy.ppo is None
    assert recipe.max_staleness_steps == 8
    assert RecipeSpec.model_validate({"preset": "grpo"}).max_staleness_steps == 7


@pytest.mark.parametrize("empty", [{}, {"loss": {}}, {"loss": None}])
def test_an_empty_choice_is_the_presets(empty: dict[str, Any]) -> None:
    assert RecipeSpec.model_validate(empty | {"preset": "dapo"}).loss.name == "ppoClip"


@pytest.mark.parametrize("name", ONE_OF)
def test_an_empty_choice_that_no_preset_makes_is_the_default(name: str) -> None:
    assert RecipeSpec.model_validate({name: {}}) == RecipeSpec()


def test_two_alternatives_are_refused() -> None:
    with pytest.raises(ValidationError, match="give no more than one of none, interruption"):
        RecipeSpec.model_validate({"length": {"penalty": {}, "interruption": {}}})


def test_every_one_of_lists_the_fields_of_its_model() -> None:
    for name, alternatives in ONE_OF.items():
        field = next(f for n, f in RecipeSpec.model_fields.items() if f.alias == name)
        assert [f.alias for f in field.annotation.model_fields.values()] == list(alternatives)  # type: ignore[union-attr]


def test_origins() -> None:
    recipe = RecipeSpec.model_validate({"preset": "dapo", "temperature": "0.7"})
    origins = {choice.field: choice.origin for choice in resolve(recipe).choices}
    assert origins["loss.ppoClip.clipHigh"] == "preset"
    assert origins["optimizer.learningRate"] == "default"
    assert origins["temperature"] == "spec"


@pytest.mark.parametrize("preset", PRESETS)
def test_manifest_tells_the_same_recipe_and_origins(preset: str) -> None:
    run = parse_run(to_yaml(with_recipe(preset=preset, completionsPerPrompt=4)), "run.yaml")
    again = parse_run(to_yaml(run.to_manifest()), "run.yaml")
    assert again == run
    assert resolve(again.spec.recipe) == resolve(run.spec.recipe)


@given(
    st.fixed_dictionaries(
        {"preset": st.sampled_from(sorted(PRESETS))},
        optional={
            "loss": st.sampled_from([{}, {"cispo": {}}, {"ppoClip": {"clipLow": "0.1"}}]),
            "length": st.sampled_from([{}, {"none": {}}, {"overlong": {}}]),
            "aggregation": st.sampled_from(["SampleAverage", "TokenAverage"]),
            "optimizer": st.sampled_from([{}, {"beta1": "0.5"}]),
        },
    )
)
def test_completing_twice_changes_nothing(recipe: dict[str, Any]) -> None:
    assert completed(completed(recipe)) == completed(recipe)
    assert RecipeSpec.model_validate(completed(recipe)) == RecipeSpec.model_validate(recipe)


def test_fields_of_the_release_before_name_their_successor() -> None:
    old = with_recipe(loss={"name": "GRPO"}, maxStalenessSteps=2, fp32Head=True)
    with pytest.raises(SpecError) as refused:
        parse_run(to_yaml(old), "run.yaml")
    found = {problem.where: problem.hint for problem in refused.value.problems}
    assert found["spec.recipe.loss.name"] == "it is recipe.loss.cispo or recipe.loss.ppoClip now"
    assert found["spec.recipe.maxStalenessSteps"] == "it is recipe.offPolicy.pipeline.maxStalenessSteps now"
    assert found["spec.recipe.fp32Head"] == "it is recipe.fp32Logits now"


def test_accepted_spec_of_the_release_before_is_read() -> None:
    """With the preset's values where its own names are gone."""
    recipe = accepted_run(with_recipe(loss={"name": "GRPO"}, fp32Head=True, promptsPerStep=4)).spec.recipe
    assert (recipe.loss.name, recipe.fp32_logits, recipe.prompts_per_step) == ("cispo", "Both", 4)


def test_cel_of_a_number_is_what_resolves() -> None:
    assert cel("promptsPerStep", 48) == (
        "(has(self.recipe.promptsPerStep) ? self.recipe.promptsPerStep : "
        "self.recipe.preset in ['dapo', 'minimax-m1'] ? 80 : 48)"
    )
