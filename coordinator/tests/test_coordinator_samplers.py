"""Samplers, the history that they look at, and that neither depends on timing."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from coordinator_client import make_group
from coordinator_world import TRAIN_PROMPTS, World, make_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api.recipe import ONE_OF, RecipeSpec
from scalerl_api.wire import NextAction, Split
from scalerl_coordinator.prompt_history import PromptHistory, Tried
from scalerl_coordinator.samplers import (
    DifficultyPools,
    NoPositiveResampling,
    PassRateBand,
    Sampler,
    SeededEpochs,
    View,
    make_sampler,
)

CURRICULA: dict[str, dict[str, Any]] = {
    "uniform": {},
    "noPositiveResampling": {"passRate": "0.5"},
    "passRateBand": {"low": "0.2", "high": "0.8"},
    "difficultyPools": {"edges": ["0.5"], "weights": ["1", "0.3"]},
}


def curriculum(name: str) -> Any:
    return RecipeSpec.model_validate({"curriculum": {name: CURRICULA[name]}}).curriculum


def history(*rates: float) -> PromptHistory:
    """Of prompts 0, 1, …: each tried once in step 0, with ten completions."""
    made = PromptHistory()
    made.add_step(0, [Tried(prompt, prompt, 10, 10 * rate, 50, 9) for prompt, rate in enumerate(rates)])
    return made


# --- history ---------------------------------------------------------------------------------------


def test_history_of_a_step_is_known_from_its_bound_on() -> None:
    made = history(0.5)
    assert made.as_of(0).pass_rate(0) is None
    assert made.as_of(1).pass_rate(0) == 0.5
    made.fold(1)
    assert made.as_of(0).pass_rate(0) == 0.5
    assert made.as_of(1).pass_rate(10**6) is None


steps = st.lists(
    st.lists(
        st.builds(
            Tried,
            st.integers(0, 300),
            st.integers(0, 999),
            st.integers(0, 4),
            st.just(1.0),
            st.just(8),
            st.just(5),
        ),
        max_size=4,
    ),
    max_size=8,
)


@given(steps, st.data())
@settings(max_examples=60, deadline=None)
def test_folding_changes_no_answer_and_nothing_counts_twice(
    groups: list[list[Tried]], data: st.DataObject
) -> None:
    made, until = PromptHistory(), 0
    for step, tried in enumerate(groups):
        made.add_step(step, tried)
        until = data.draw(st.integers(until, step + 1))
        made.fold(until)
        again = data.draw(st.integers(0, step))
        for repeated in range(again, step + 1):  # the trainer returned to a checkpoint
            made.add_step(repeated, groups[repeated])
        made = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=PromptHistory)
    known = made.as_of(len(groups))
    for prompt in range(301):
        own = [t for tried in groups for t in tried if t.prompt == prompt]
        completions = sum(t.completions for t in own)
        expected = sum(t.score_sum for t in own) / completions if completions else None
        assert known.pass_rate(prompt) == (pytest.approx(expected) if expected is not None else None)


def test_history_of_a_million_prompts_is_compact() -> None:
    made = PromptHistory()
    made.add_step(0, [Tried(10**6 - 1, 0, 1, 1.0, 5, 5)])
    made.fold(1)
    assert len(msgspec.msgpack.encode(made)) < 40 * 10**6


# --- samplers --------------------------------------------------------------------------------------


def drawn(sampler: Sampler, known: PromptHistory, count: int) -> list[int]:
    cursor, prompts = 0, []
    for _ in range(count):
        prompt, cursor = sampler.choose(View(cursor, known.as_of(1)))
        prompts.append(prompt)
    return prompts


def test_every_curriculum_of_the_spec_has_a_sampler() -> None:
    assert set(CURRICULA) == set(ONE_OF["curriculum"])
    for name in CURRICULA:
        make_sampler(curriculum(name), 5, 0)


def test_uniform_has_every_prompt_once_an_epoch() -> None:
    sampler = make_sampler(curriculum("uniform"), 50, 3)
    assert drawn(sampler, history(*[1.0] * 50), 100) == [SeededEpochs(50, 3).choose(i) for i in range(100)]


def test_solved_prompts_leave() -> None:
    rates = [0.0, 0.89, 0.9, 1.0, 0.5]
    found = drawn(Sampler(6, 0, NoPositiveResampling(0.9)), history(*rates), 40)
    assert set(found) == {0, 1, 4, 5}, "5 was never tried"
    assert all(sorted(found[i : i + 4]) == [0, 1, 4, 5] for i in range(0, 40, 4)), "epochs of those that stay"


def test_with_all_prompts_solved_all_are_drawn() -> None:
    found = drawn(Sampler(4, 0, NoPositiveResampling(0.9)), history(1.0, 1.0, 1.0, 1.0), 8)
    assert sorted(found[:4]) == [0, 1, 2, 3]


def test_band_of_pass_rates() -> None:
    found = drawn(Sampler(6, 0, PassRateBand(0.1, 0.9)), history(0.0, 0.1, 0.5, 0.9, 1.0), 40)
    assert set(found) == {1, 2, 3, 5}


def test_pools_are_drawn_by_their_weights() -> None:
    rates = [0.1] * 100 + [0.9] * 100
    found = drawn(Sampler(200, 0, DifficultyPools((0.5,), (1.0, 0.25), 7)), history(*rates), 4000)
    easy = sum(prompt >= 100 for prompt in found)
    assert easy / (4000 - easy) == pytest.approx(0.25, abs=0.04)


# --- the same prompts whatever the timing -------------------------------------------------------------


def score(prompt: int, sample: int) -> float:
    """Some prompts are solved, some never, some now and then."""
    return float((prompt * 7 + sample * 3) % 4 < prompt % 4)


def run(name: str, seed: int | None, steps: int = 12) -> list[int]:
    """Prompt of every slot. seed: of the order in which groups arrive, restarts, returns to a checkpoint, and lost volumes."""
    world = World(make_settings(curriculum=curriculum(name), max_staleness_steps=2, evaluation_every=1000))
    rng = random.Random(seed)
    prompts: dict[int, int] = {}
    world.member = world.register("g")
    world.hello("t")
    trainers = 0
    while world.state.version < steps:
        leases = world.lease(
            world.member,
            world.core.membership.members[world.member].version,
            rng.choice([1, 3, 8]) if seed is not None else 3,
        )
        if seed is not None:
            rng.shuffle(leases)
        for lease in leases:
            if lease.split is Split.TRAIN:
                assert prompts.setdefault(lease.slot, lease.prompt_index) == lease.prompt_index
            scores = [score(lease.prompt_index, sample) for sample in range(lease.completions)]
            version = world.core.membership.members[world.member].version
            world.push(world.member, make_group(lease, version=version, scores=scores))
        world.acknowledge()
        incarnation = f"t{trainers}" if trainers else "t"
        following = world.next(incarnation)
        if following is not None and following.action is NextAction.TRAIN:
            world.plan(incarnation, following.step)
            world.report(incarnation, following.step)
        if following is not None:
            world.publish(incarnation)
            world.beat(world.member, world.state.version)
        world.acknowledge()
        if seed is None or rng.random() > 0.3:
            continue
        trainers += 1
        if rng.random() < 0.3:
            version = world.state.version
            snapshot = world.checkpoint(incarnation, [version])
            world.lose_volume()
            world.member = world.register("g")
            world.hello(f"t{trainers}", version, snapshot)
            world.publish(f"t{trainers}")
            world.beat(world.member, version)
        else:
            world.crash(0)
            world.member = world.register("g", version=world.state.version)
            back = max(world.state.first_kept_step, world.state.version - rng.choice([0, 1, 2]))
            world.hello(f"t{trainers}", back)
        world.acknowledge()
    first = min(world.state.slots_of(steps))
    assert sorted(prompts)[:first] == list(range(first))
    assert max(prompts.values()) < TRAIN_PROMPTS
    return [prompts[slot] for slot in range(first)]


@pytest.mark.parametrize("name", CURRICULA)
def test_prompts_do_not_depend_on_timing(name: str) -> None:
    undisturbed = run(name, None)
    for seed in range(6):
        assert run(name, seed) == undisturbed, f"seed {seed}"
    if name != "uniform":
        assert undisturbed != run("uniform", None), "the sampler looks at results"
