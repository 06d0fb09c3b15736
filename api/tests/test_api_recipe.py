"""Presets, what a spec says beside them, and where each value comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scalerl_api.load import SpecError, parse_run, to_yaml
from scalerl_api.recipe import ONE_OF, PRESETS, RecipeSpec
from scalerl_api.recipe.presets import DEFAULTS, cel, completed
from scalerl_api.recipe.resolve import resolve
from scalerl_api.recipe.spec import Preset
from scalerl_api.spec_warnings import warnings_of

RECIPE_PAGE = Path(__file__).resolve().parents[2] / "docs/recipe.md"
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


def test_presets_and_their_entries_match() -> None:
    assert set(get_args(Preset)) == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_gives_the_values_of_its_table(preset: str) -> None:
    found = values(RecipeSpec.model_validate({"preset": preset}))
    for path, published in PRESETS[preset].items():
        assert found[path] == str(published.value), path


def test_preset_scalerl_is_the_defaults() -> None:
    plain = {name: RecipeSpec.model_fields[name].default for name in RecipeSpec.model_fields}
    assert RecipeSpec.model_construct(**plain) == RecipeSpec()


def test_defaults_are_those_of_the_paper() -> None:
    """ScaleRL, arXiv 2510.13786, where it gives a value [P]."""
    recipe = RecipeSpec()
    assert (recipe.prompts_per_step, recipe.completions_per_prompt) == (48, 16)
    assert (recipe.max_completion_tokens, recipe.max_staleness_steps) == (14336, 8)
    assert (recipe.aggregation, recipe.advantage.normalization) == ("PromptAverage", "Batch")
    assert (recipe.zero_variance_filter, recipe.fp32_logits) == (True, "Both")
    assert recipe.loss.cispo is not None
    assert float(recipe.loss.cispo.ratio_cap) == 5
    assert recipe.curriculum.no_positive_resampling is not None
    assert float(recipe.curriculum.no_positive_resampling.pass_rate) == 0.9
    assert recipe.length.interruption is not None
    assert recipe.length.interruption.range(14336) == (10240, 12288)
    assert recipe.kl.penalty is None
    optimizer = recipe.optimizer
    assert (float(optimizer.learning_rate), optimizer.warmup_steps) == (5e-7, 100)
    assert (float(optimizer.epsilon), float(optimizer.weight_decay)) == (1e-15, 0.01)


def test_spec_overrides_preset() -> None:
    recipe = RecipeSpec.model_validate(
        {"preset": "dapo", "loss": {"ppoClip": {"clipHigh": "0.3"}}, "promptsPerStep": 4}
    )
    assert recipe.loss.ppo_clip is not None
    assert (recipe.loss.ppo_clip.clip_low, recipe.loss.ppo_clip.clip_high) == ("0.2", "0.3")
    assert (recipe.prompts_per_step, recipe.aggregation) == (4, "PromptAverage")


def variants_of_the_page() -> dict[str, dict[str, Any]]:
    """ScaleRL's leave-one-out variants in docs/recipe.md: name, and the line of the spec."""
    table = RECIPE_PAGE.read_text(encoding="utf-8").partition("| variant | line |\n| --- | --- |\n")[2]
    rows = [row.strip("|").split("|") for row in table.partition("\n\n")[0].splitlines()]
    return {name.strip(): yaml.safe_load(line.strip().strip("`")) for name, line in rows}


LEFT_OUT = {
    "prompt-level advantage": {"advantage.normalization"},
    "length penalty": {"length"},
    "whole batch": {"zeroVarianceFilter"},
    "PPO-off-policy-8": {"offPolicy"},
    "no FP32 head": {"fp32Logits"},
    "sample average": {"aggregation"},
    "DAPO's loss": {"loss"},
    "uniform sampling": {"curriculum"},
}
"""What each changes of ScaleRL."""


def test_leave_one_out_variants_of_the_page_change_one_choice_each() -> None:
    """And no two the same one, and none back to ScaleRL's."""
    variants = variants_of_the_page()
    assert variants.keys() == LEFT_OUT.keys()
    base = dict(values(RecipeSpec()))
    for name, line in variants.items():
        found = values(RecipeSpec.model_validate({"preset": "scalerl", **line}))
        changed = {field for field in base.keys() | found.keys() if base.get(field) != found.get(field)}
        assert {f.partition(".")[0] if f.partition(".")[0] in ONE_OF else f for f in changed} == LEFT_OUT[
            name
        ]
    dapo = values(RecipeSpec(preset="dapo"))
    found = values(RecipeSpec.model_validate(variants["DAPO's loss"]))
    assert {f: v for f, v in found.items() if f.startswith("loss.")} == {
        f: v for f, v in dapo.items() if f.startswith("loss.")
    }


@pytest.mark.parametrize("key", ["offPolicy", "off_policy"])
def test_another_alternative_replaces_that_of_the_preset(key: str) -> None:
    recipe = RecipeSpec.model_validate({"preset": "grpo", key: {"pipeline": {}}})
    assert recipe.off_policy.ppo is None
    assert recipe.max_staleness_steps == 8
    assert RecipeSpec.model_validate({"preset": "grpo"}).max_staleness_steps == 7


@pytest.mark.parametrize("empty", [{}, {"loss": {}}, {"loss": None}])
def test_empty_choice_is_the_presets(empty: dict[str, Any]) -> None:
    assert RecipeSpec.model_validate(empty | {"preset": "dapo"}).loss.name == "ppoClip"


@pytest.mark.parametrize("name", ONE_OF)
def test_empty_choice_without_preset_is_the_default(name: str) -> None:
    assert RecipeSpec.model_validate({name: {}}) == RecipeSpec()


def test_two_alternatives_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"give no more than one of none, .*overlong; given are interruption, penalty"
    ):
        RecipeSpec.model_validate({"length": {"penalty": {}, "interruption": {}}})


def test_every_one_of_lists_the_fields_of_its_model() -> None:
    for name, alternatives in ONE_OF.items():
        field = next(f for n, f in RecipeSpec.model_fields.items() if f.alias == name)
        assert [f.alias for f in field.annotation.model_fields.values()] == list(alternatives)  # type: ignore[union-attr]


def test_defaults_of_a_member_have_a_source() -> None:
    """A change of a field's default, or of its entry, shows here."""
    curriculum = {"sec": {"edges": [3]}}
    choices = {c.field: c for c in resolve(RecipeSpec.model_validate({"curriculum": curriculum})).choices}
    assert DEFAULTS
    for path in DEFAULTS:
        assert (choices[path].value, choices[path].origin) == (DEFAULTS[path].value, "default")
        assert choices[path].source == DEFAULTS[path].source
    given = {"sec": {"edges": [3], "temperature": "0.5"}}
    given_choices = resolve(RecipeSpec.model_validate({"curriculum": given})).choices
    assert "curriculum.sec.temperature: 0.5 (spec)" in [f"{c.field}: {c}" for c in given_choices]


def test_origins() -> None:
    recipe = RecipeSpec.model_validate({"preset": "dapo", "temperature": "0.7"})
    origins = {choice.field: choice.origin for choice in resolve(recipe).choices}
    assert origins["loss.ppoClip.clipHigh"] == "preset"
    assert origins["optimizer.learningRate"] == "default"
    assert origins["temperature"] == "spec"


@pytest.mark.parametrize("preset", PRESETS)
def test_manifest_round_trip_keeps_recipe_and_origins(preset: str) -> None:
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


def test_cel_of_a_number_is_what_resolves() -> None:
    assert cel("promptsPerStep", 48) == (
        "(has(self.recipe.promptsPerStep) ? self.recipe.promptsPerStep : "
        "self.recipe.preset in ['dapo', 'minimax-m1'] ? 80 : 48)"
    )


# --- distillation -----------------------------------------------------------------------------

TEACHER = {"teacher": {"url": "http://teacher:8000"}}


@pytest.mark.parametrize("preset", PRESETS)
def test_distillation_that_ignores_rewards_filters_no_group(preset: str) -> None:
    """Whatever the preset has, and however often the manifest is completed."""
    alone = RecipeSpec.model_validate({"preset": preset, "distillation": TEACHER})
    assert not alone.zero_variance_filter
    assert RecipeSpec.model_validate(alone.model_dump(by_alias=True, exclude_none=True)) == alone
    assert RecipeSpec(preset=preset, distillation=alone.distillation) == alone  # type: ignore[arg-type]
    added = RecipeSpec.model_validate({"preset": preset, "distillation": TEACHER | {"rewards": "Added"}})
    assert added.zero_variance_filter == RecipeSpec.model_validate({"preset": preset}).zero_variance_filter


@pytest.mark.parametrize(
    ("field", "recipe"),
    [
        ("zeroVarianceFilter", {"zeroVarianceFilter": True}),
        ("refill", {"refill": {}}),
        ("length.penalty", {"length": {"penalty": {}}}),
        ("length.overlong", {"length": {"overlong": {}}}),
    ],
)
def test_distillation_refuses_what_reads_the_rewards_it_ignores(field: str, recipe: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=rf"recipe\.{field} cannot go with recipe\.distillation"):
        parse_run(to_yaml(with_recipe(**recipe, distillation=TEACHER)), "run.yaml")
    added = TEACHER | {"rewards": "Added"}
    parse_run(to_yaml(with_recipe(**recipe, distillation=added)), "run.yaml")


@pytest.mark.parametrize(
    "url", ["teacher:8000", "http://user:password@teacher", "ftp://teacher", "http://teacher:8000/?key=1"]
)
def test_teacher_url_is_an_address_without_secrets(url: str) -> None:
    with pytest.raises(ValidationError, match="must be http://host:port"):
        RecipeSpec.model_validate({"distillation": {"teacher": {"url": url}}})


def test_distillation_warns_of_another_temperature_than_the_teachers() -> None:
    for temperature, warned in (("1.0", []), ("0.7", ["spec.recipe.temperature"])):
        run = parse_run(to_yaml(with_recipe(distillation=TEACHER, temperature=temperature)), "run.yaml")
        assert [w.where for w in warnings_of(run.spec) if "teacher" in str(w)] == warned


# --- corrections and bounds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "unused"),
    [
        ({"preset": "grpo"}, False),  # eight updates on the same sampled weights
        ({"preset": "grpo", "offPolicy": {"ppo": {"stepsPerBatch": 1}}}, ["clipLow", "clipHigh"]),
        ({"preset": "grpo", "offPolicy": {"pipeline": {}}}, ["clipLow", "clipHigh"]),
        ({"preset": "magistral"}, ["clipLow", "clipHigh"]),
        ({"loss": {"ppoClip": {"dualClip": "3"}}}, ["clipLow", "clipHigh", "dualClip"]),
        ({"loss": {"gspo": {}}}, ["clipLow", "clipHigh"]),
        ({"loss": {"dppo": {}}}, ["threshold", "ratioCap"]),
        ({}, ["ratioCap"]),
        ({"loss": {"cispo": {"ratioCap": "0.5"}}}, False),  # below the ratio of 1
        ({"loss": {"reinforce": {}}}, False),
    ],
)
@pytest.mark.parametrize("correction", ["truncated", "masked"])
def test_correction_warns_of_bounds_without_effect(recipe: Any, unused: Any, correction: str) -> None:
    def found(**sections: Any) -> list[str]:
        spec = parse_run(to_yaml(with_recipe(**recipe, **sections)), "run.yaml").spec
        return [str(w) for w in warnings_of(spec) if w.where == "spec.recipe.correction"]

    assert found() == []
    warned = found(correction={correction: {}})
    assert len(warned) == bool(unused)
    if unused:
        assert f"{' and '.join(unused)} of recipe.loss." in warned[0]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"loss": {"ppoClip": {"dualClip": "1.1"}}}, "must be at least 1 + clipHigh"),
        ({"loss": {"ppoClip": {"dualClip": "1"}}}, "above 1|greater than 1|more than 1"),
        ({"loss": {"ppoClip": {"clipHigh": "3", "dualClip": "3"}}}, "must be at least 1 + clipHigh"),
        ({"loss": {"dppo": {"ratioCap": "0.5"}}}, "at least 1|less than 1"),
        ({"correction": {"masked": {"floor": "2"}}}, "must be less than cap"),
        ({"correction": {"truncated": {"floor": "0.5"}}}, "floor"),
        ({"correction": {"truncated": {"level": "Token "}}}, "level"),
        ({"offPolicyMask": {"maxKl": "0"}}, "maxKl"),
    ],
)
def test_bounds_out_of_range_are_refused(recipe: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RecipeSpec.model_validate(recipe)
    text = str(caught.value)
    assert any(part in text for part in message.split("|"))


def test_icepop_and_the_off_policy_mask_are_written_so() -> None:
    recipe = RecipeSpec.model_validate(
        {"preset": "grpo", "correction": {"masked": {"cap": 5, "floor": "0.5"}}, "offPolicyMask": {}}
    )
    assert recipe.correction.masked is not None
    assert (recipe.correction.masked.floor, recipe.correction.masked.level) == ("0.5", "Token")
    assert recipe.off_policy_mask is not None
    assert recipe.off_policy_mask.max_kl == "0.5"
    assert recipe.proximal_updates == 8


@pytest.mark.parametrize(
    ("recipe", "updates"),
    [
        ({"offPolicy": {"ppo": {"stepsPerBatch": 4}}}, 0),
        ({"offPolicy": {"ppo": {"stepsPerBatch": 4}}, "correction": {"masked": {}}}, 4),
        ({"offPolicy": {"ppo": {"stepsPerBatch": 1}}, "correction": {"masked": {}}}, 0),
        ({"correction": {"truncated": {}}}, 0),
        (
            {"offPolicy": {"ppo": {}}, "correction": {"truncated": {}}, "loss": {"reinforce": {}}},
            0,
        ),
    ],
)
def test_proximal_policy_is_kept_where_updates_share_sampled_weights(recipe: Any, updates: int) -> None:
    assert RecipeSpec.model_validate(recipe).proximal_updates == updates


@pytest.mark.parametrize(("generators", "warned"), [(1, []), (2, ["spec.evaluation.generators"])])
def test_warning_if_all_generators_evaluate(generators: int, warned: list[str]) -> None:
    """An autoscaler or an HPA may lower the replicas to that at any time, so it is no error."""
    sections = {"evaluation": {"generators": generators}, "generator": {"replicas": 2}}
    run = parse_run(yaml.safe_dump({**RUN, "spec": {**RUN["spec"], **sections}}), "run.yaml")
    assert [one.where for one in warnings_of(run.spec) if "during an evaluation" in str(one)] == warned


def test_warnings_about_the_size_of_evaluations() -> None:
    """A set of all of a file is not counted; held-out prompts that no set evaluates are named."""

    def found(**sets: Any) -> list[str]:
        run = {**RUN, "spec": {**RUN["spec"], "evaluation": {"everySteps": 1, "sets": [sets]}}}
        return [
            str(one)
            for one in warnings_of(parse_run(yaml.safe_dump(run), "run.yaml").spec)
            if "evaluat" in str(one)
        ]

    task = {"jsonl": {"path": "/data/test.jsonl"}, "verifier": {"name": "exact"}}
    (unused,) = found(name="own", task=task)
    assert unused.startswith("spec.task.heldOut: no set of evaluation.sets evaluates its ")
    (unused, large) = found(name="own", task={**task, "size": 100_000})
    assert "samples" in large
    assert not [one for one in found(name="same") if "heldOut" in one]
