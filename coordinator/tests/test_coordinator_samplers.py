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
from scalerl_coordinator.accepted_group import Accepted
from scalerl_coordinator.edge_of_competence import EdgeOfCompetence
from scalerl_coordinator.prompt_history import RECENT_STEPS, KnownHistory, PromptHistory, Tried, tried
from scalerl_coordinator.sampler_interface import Sampler, SamplerInput, SeededEpochs
from scalerl_coordinator.samplers import (
    DifficultyPools,
    NoPositiveResampling,
    PassRateBand,
    RuleSampler,
    make_sampler,
)
from scalerl_coordinator.self_evolving_curriculum import SelfEvolvingCurriculum
from scalerl_tasks import PromptError

CURRICULA: dict[str, dict[str, Any]] = {
    "uniform": {},
    "noPositiveResampling": {"passRate": "0.5"},
    "passRateBand": {"low": "0.2", "high": "0.8"},
    "difficultyPools": {"edges": ["0.5"], "weights": ["1", "0.3"]},
    "edgeOfCompetence": {},
    "sec": {"edges": [2, 3], "temperature": "0.2"},
}


def curriculum(name: str) -> Any:
    return RecipeSpec.model_validate({"curriculum": {name: CURRICULA[name]}}).curriculum


def history(*rates: float) -> PromptHistory:
    """Of prompts 0, 1, …: each tried once in step 0, with ten completions."""
    made = PromptHistory()
    made.add_step(
        0,
        [
            Tried(prompt, prompt, 100, 100 * rate, 50, 9, passed=round(100 * rate))
            for prompt, rate in enumerate(rates)
        ],
    )
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
            passed=st.just(1),
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
    for step, step_groups in enumerate(groups):
        made.add_step(step, step_groups)
        until = data.draw(st.integers(until, step + 1))
        made.fold(until)
        again = data.draw(st.integers(0, step))
        for repeated in range(again, step + 1):  # the trainer returned to a checkpoint
            made.add_step(repeated, groups[repeated])
        made = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=PromptHistory)
    known = made.as_of(len(groups))
    for prompt in range(301):
        own = [t for step_groups in groups for t in step_groups if t.prompt == prompt]
        completions = sum(t.completions for t in own)
        expected = sum(t.passed for t in own) / completions if completions else None
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
        prompt, cursor = sampler.choose(SamplerInput(cursor, known.as_of(1)))
        prompts.append(prompt)
    return prompts


def test_every_curriculum_of_the_spec_has_a_sampler() -> None:
    assert set(CURRICULA) == set(ONE_OF["curriculum"])
    for name in CURRICULA:
        make_sampler(curriculum(name), 5, 0, float)


def test_uniform_has_every_prompt_once_an_epoch() -> None:
    sampler = make_sampler(curriculum("uniform"), 50, 3, float)
    assert drawn(sampler, history(*[1.0] * 50), 100) == [SeededEpochs(50, 3).choose(i) for i in range(100)]


def test_solved_prompts_leave() -> None:
    rates = [0.0, 0.89, 0.9, 1.0, 0.5]
    found = drawn(RuleSampler(6, 0, NoPositiveResampling(0.9)), history(*rates), 40)
    assert set(found) == {0, 1, 4, 5}, "5 was never tried"
    assert all(sorted(found[i : i + 4]) == [0, 1, 4, 5] for i in range(0, 40, 4)), "epochs of those that stay"


@pytest.mark.parametrize("folded", [True, False])
def test_partial_scores_are_no_passes_for_any_sampler(folded: bool) -> None:
    """Prompt 0 scores .95 each time and is never solved; prompt 1 passes always; prompt 2 passes in half of the cases."""
    made = PromptHistory()
    scores = {0: [0.95] * 8, 1: [1.0] * 8, 2: [1.0, 0.9] * 4}
    groups = [
        Tried(prompt, prompt, 8, sum(given), 8, 1, passed=sum(score >= 1 for score in given))
        for prompt, given in scores.items()
    ]
    made.add_step(0, groups)
    if folded:
        made.fold(1)
    known = made.as_of(1)
    assert [known.pass_rate(prompt) for prompt in scores] == [0.0, 1.0, 0.5]
    solved = NoPositiveResampling(0.9)
    assert [solved(prompt, 0, known) for prompt in scores] == [False, True, False]
    edge = EdgeOfCompetence(3, 0, 0.9, 0.1)._find(known)
    assert edge.prompts == [2]
    band = PassRateBand(0.25, 0.9)
    assert [band(prompt, 0, known) for prompt in scores] == [True, True, False]


def test_with_all_prompts_solved_all_are_drawn() -> None:
    found = drawn(RuleSampler(4, 0, NoPositiveResampling(0.9)), history(1.0, 1.0, 1.0, 1.0), 8)
    assert sorted(found[:4]) == [0, 1, 2, 3]


def test_band_of_pass_rates() -> None:
    found = drawn(RuleSampler(6, 0, PassRateBand(0.1, 0.9)), history(0.0, 0.1, 0.5, 0.9, 1.0), 40)
    assert set(found) == {1, 2, 3, 5}


def test_pools_are_drawn_by_their_weights() -> None:
    rates = [0.1] * 100 + [0.9] * 100
    found = drawn(RuleSampler(200, 0, DifficultyPools((0.5,), (1.0, 0.25), 7)), history(*rates), 4000)
    easy = sum(prompt >= 100 for prompt in found)
    assert easy / (4000 - easy) == pytest.approx(0.25, abs=0.04)


def after(*steps: list[Tried]) -> KnownHistory:
    """What is known after steps 0, 1, …"""
    made = PromptHistory()
    for step, groups in enumerate(steps):
        made.add_step(step, groups)
    return made.as_of(len(steps))


def group(prompt: int, passed: int, completions: int = 4, advantage: float = 0.0) -> Tried:
    return Tried(prompt, 0, completions, passed, 9, 9, advantage, passed)


def choices(sampler: Sampler, known: KnownHistory, count: int, cursor: int = 0) -> list[int]:
    found = []
    for _ in range(count):
        prompt, following = sampler.choose(SamplerInput(cursor, known))
        assert following > cursor
        cursor = following
        found.append(prompt)
    return found


def test_edge_of_competence_draws_partly_solved_prompts() -> None:
    known = after(
        [group(0, 0), group(1, 1), group(2, 3), group(3, 4), group(4, 2, completions=0), group(5, 1)]
    )
    found = choices(EdgeOfCompetence(1000, 0, 0.75, 0.25), known, 4000)
    at_edge = [prompt for prompt in found if prompt in (1, 5)]
    # Two are known at the edge and a step has five groups, so two fifths of the slots are theirs.
    assert len(at_edge) / 4000 == pytest.approx(2 / 5, abs=0.03)
    assert at_edge.count(1) == pytest.approx(at_edge.count(5), abs=2)
    rest = [prompt for prompt in found if prompt not in (1, 5)]
    epoch = [prompt for prompt in map(SeededEpochs(1000, 0).choose, range(1000)) if prompt not in (1, 5)]
    assert rest[:998] == epoch, "solved, hopeless and untried ones, each once an epoch"


def test_partial_scores_are_no_success() -> None:
    """A verifier that gives .01 to every wrong answer, and half of the score to an incomplete one."""
    scores = {0: [0.01] * 4, 1: [0.5, 0.01, 0.0, 0.99], 2: [0.01, 0.01, 1.0, 0.01], 3: [1.0, 1.0, 1.0, 0.01]}
    lengths = [5] * 4
    groups = [tried(p, p, Accepted("", 3, lengths, own, 0, 0, 0)) for p, own in scores.items()]
    assert [one.passed for one in groups] == [0, 0, 1, 3]
    found = choices(EdgeOfCompetence(1000, 0, 0.75, 0.1), after(groups), 400)
    assert [prompt for prompt in range(4) if found.count(prompt) > 20] == [2]


def test_share_of_measuring() -> None:
    known = after([group(prompt, 1) for prompt in range(100)])
    found = choices(EdgeOfCompetence(10_000, 3, 0.75, 0.25), known, 4000)
    edge = [prompt for prompt in found if prompt < 100]
    assert 1 - len(edge) / 4000 == pytest.approx(0.25, abs=0.03)
    counts = [edge.count(prompt) for prompt in range(100)]
    assert max(counts) - min(counts) <= 4, "they go round: by chance it would be about 25"


def test_prompt_is_rated_by_its_two_newest_groups() -> None:
    sampler = EdgeOfCompetence(50, 0, 0.75, 0.1)
    steps = [[group(0, 2), group(1, 0)], [group(0, 0), group(1, 0)], [group(0, 0), group(1, 1)]]
    in_turn = [choices(sampler, after(*steps[:known]), 200) for known in (1, 2, 3)]
    assert [{prompt for prompt in (0, 1) if found.count(prompt) > 20} for found in in_turn] == [{0}, {0}, {1}]


def test_old_measurement_does_not_hold() -> None:
    made = PromptHistory()
    made.add_step(0, [group(0, 1)])
    for step in range(1, RECENT_STEPS + 1):
        made.add_step(step, [group(1, 4)])
    sampler = EdgeOfCompetence(50, 0, 0.75, 0.1)
    assert choices(sampler, made.as_of(RECENT_STEPS), 50).count(0) > 20
    assert choices(sampler, made.as_of(RECENT_STEPS + 1), 50).count(0) <= 1
    made.fold(RECENT_STEPS + 1)
    assert list(made.recent) == list(range(1, RECENT_STEPS + 1))


def test_sec_by_hand() -> None:
    sampler = SelfEvolvingCurriculum(3000, 0, lambda prompt: prompt % 3, [1, 2], 0.5, 0.25)
    known = after(
        [group(0, 2, advantage=1.0), group(1, 1, advantage=0.8), group(4, 0, advantage=0.0)],
        [group(1, 1, advantage=0.6)],
    )
    # Q: 0 → .5; 0 → .5 · .4 = .2 → .5 · .6 + .5 · .2 = .4; 0. Weights: 1, e^-.4, e^-2; every prompt has a difficulty.
    found = choices(sampler, known, 6000)
    for category, expected in enumerate((0.5538, 0.3712, 0.0750)):  # of 1 + .67032 + .13534 = 1.80566
        share = sum(prompt % 3 == category for prompt in found) / 6000
        assert share == pytest.approx(expected, abs=0.02)


def test_rare_category_leaves_its_draws_to_others() -> None:
    """Also where the weights of all others, relative to its own, are 0 in floating point."""
    difficulties = {0: 0.0, **dict.fromkeys(range(1, 3000, 2), 9.0)}
    sampler = SelfEvolvingCurriculum(
        3000, 0, lambda prompt: difficulties.get(prompt, 2.0), [1, 3], 0.5, 0.0001
    )
    found = choices(sampler, after([group(0, 2, advantage=1.0)]), 1000)
    assert found.count(0) < 5
    assert sum(prompt % 2 for prompt in found) / 1000 == pytest.approx(0.5, abs=0.06)


def test_unreadable_prompt_has_no_difficulty(caplog: pytest.LogCaptureFixture) -> None:
    def difficulty(prompt: int) -> float:
        if prompt % 4 == 0:
            raise PromptError(f"prompt {prompt} cannot be generated")
        return 1.5

    sampler = SelfEvolvingCurriculum(100, 0, difficulty, [1, 2], 0.5, 0.25)
    found = choices(sampler, after([]), 400)
    assert sum(prompt % 4 == 0 for prompt in found) / 400 == pytest.approx(0.5, abs=0.08), (
        "two categories at Q = 0"
    )
    (record,) = caplog.records
    assert "cannot be generated" in record.getMessage()


def test_prompts_without_difficulty_are_a_category() -> None:
    sampler = SelfEvolvingCurriculum(100, 0, lambda prompt: None if prompt < 50 else 7.0, [1, 2], 0.5, 0.05)
    found = choices(sampler, after([group(0, 2, advantage=1.0)]), 200)
    assert sum(prompt < 50 for prompt in found) > 180


@given(
    st.sampled_from(["edgeOfCompetence", "sec"]),
    st.integers(1, 500),
    st.integers(0, 2**48),
    st.lists(
        st.lists(
            st.builds(group, st.integers(0, 499), st.integers(0, 4), st.just(4), st.floats(0, 1)), max_size=6
        ),
        max_size=5,
    ),
)
@settings(max_examples=100, deadline=None)
def test_equal_views_have_equal_choices_and_cursors_rise(
    name: str, prompts: int, cursor: int, steps: list[list[Tried]]
) -> None:
    steps = [[one for one in groups if one.prompt < prompts] for groups in steps]
    first = make_sampler(curriculum(name), prompts, 5, float)
    found = choices(first, after(*steps), 20, cursor)
    assert all(0 <= prompt < prompts for prompt in found)
    again = make_sampler(curriculum(name), prompts, 5, float)
    choices(again, after(*steps[:1]), 3)
    assert choices(again, after(*steps), 20, cursor) == found


# --- the same prompts whatever the timing -------------------------------------------------------------


def score(prompt: int, sample: int) -> float:
    """Some prompts are solved, some never, some now and then."""
    return float((prompt * 7 + sample * 3) % 4 < prompt % 4)


def run(name: str, seed: int | None, max_tries: int = 1, steps: int = 12) -> list[tuple[int, ...]]:
    """Prompts of every slot, in the order of its tries. seed: of the order in which groups arrive, restarts, returns to a checkpoint, and lost volumes."""
    world = World(
        make_settings(
            curriculum=curriculum(name), max_staleness_steps=2, evaluation_every=1000, max_tries=max_tries
        )
    )
    rng = random.Random(seed)
    prompts: dict[tuple[int, int], int] = {}
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
                place = lease.slot, len(world.state.tries.get(lease.slot, ()))
                assert prompts.setdefault(place, lease.prompt.index) == lease.prompt.index
            scores = [score(lease.prompt.index, sample) for sample in range(lease.completions)]
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
    assert max(prompts.values()) < TRAIN_PROMPTS
    tried = [tuple(prompts[place] for place in sorted(prompts) if place[0] == slot) for slot in range(first)]
    assert all(tried)
    return tried


@pytest.mark.parametrize("max_tries", [1, 3])
@pytest.mark.parametrize("name", CURRICULA)
def test_prompts_do_not_depend_on_timing(name: str, max_tries: int) -> None:
    undisturbed = run(name, None, max_tries)
    assert max(map(len, undisturbed)) == max_tries, "some scores are equal"
    for seed in range(6):
        assert run(name, seed, max_tries) == undisturbed, f"seed {seed}"
    if name != "uniform":
        assert undisturbed != run("uniform", None, max_tries), "the sampler looks at results"
