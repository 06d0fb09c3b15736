"""The real engine on 1 and 2 ranks, packed and not: it takes the recorded steps, and no split changes a gradient."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trajectories
from engines_and_stages import Stage, engine_of
from free_port import free_port
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trainable_places import trainable_places

from scalerl_api import wire
from scalerl_api.recipe import ONE_OF, RecipeSpec
from scalerl_trainer.algo.gradient_guard import GradientGuard
from scalerl_trainer.engine import StepStats
from scalerl_trainer.models import load_model
from scalerl_trainer.packing import Sequence
from scalerl_trainer.shard_conversion import rank_batch

pytestmark = pytest.mark.slow

Config = tuple[int, Stage, bool]
"""Ranks, stage, whether sequences share rows."""

CONFIGS: list[Config] = [
    (world, stage, packed) for world in (1, 2) for stage in (*range(4), "FSDP2") for packed in (True, False)
]
IN_EVERY_CONFIG = "cispo"
"""Of the others, CI runs the three configurations that have least in common."""
OPPOSITE: list[Config] = [(1, 0, False), (2, 3, True), (2, "FSDP2", True)]


class Ranks:
    """The processes of ``rank_server.py``, of 1 rank and of 2."""

    def __init__(self, processes: Any, context: Any, model: str) -> None:
        self.model = model
        network = load_model(model, dtype="float32")
        self.shapes = {name: tuple(p.shape) for name, p in sorted(network.named_parameters())}
        self.initial = trajectories.flat(network)
        self._pipes: dict[int, list[Connection]] = {}
        self._running: list[Any] = []
        for world in (1, 2):
            port = free_port()
            self._pipes[world] = []
            for rank in range(world):
                ours, theirs = context.Pipe()
                given = {"pipe": theirs, "rank": rank, "world": world, "port": port, "model": model}
                self._running.append(processes.run("rank_server.py", SERVER=given))
                theirs.close()
                self._pipes[world].append(ours)

    def close(self) -> None:
        for pipe in [*self._pipes[1], *self._pipes[2]]:
            pipe.close()
        for process in self._running:
            process.join(60)

    def steps(self, world: int, shards: list[list[wire.Shard]], recipe: RecipeSpec, **job: Any) -> list[Step]:
        """``shards``: of each rank, one a step."""
        for pipe, own in zip(self._pipes[world], shards, strict=True):
            pipe.send({"shards": own, "recipe": recipe, **job})
        answers = []
        for pipe in self._pipes[world]:
            assert pipe.poll(300), "a rank does not answer; its traceback is above"
            answers.append(pipe.recv())
        return [
            Step(answers[0][step][0], *(self._whole([a[step][1] for a in answers], key) for key in ("weight", "exp_avg")))
            for step in range(len(shards[0]))
        ]  # fmt: skip

    def _whole(self, ranks: list[Any], key: str) -> torch.Tensor:
        """All parameters, flat, from the pieces of all ranks; an element that none has is not a number."""
        whole = {name: np.full(int(np.prod(shape)), np.nan) for name, shape in self.shapes.items()}
        for pieces in ranks:
            for name, start, values in pieces:
                whole[name][start : start + len(values[key])] = values[key]
        return torch.from_numpy(np.concatenate(list(whole.values())))


@dataclass(frozen=True)
class Step:
    stats: StepStats
    weights: torch.Tensor
    first_moment: torch.Tensor


@pytest.fixture(scope="module")
def ranks(
    module_processes: Any, forkserver: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    torch.set_num_threads(1)
    model = trajectories.write_model(tmp_path_factory.mktemp("model"))
    running = Ranks(module_processes, forkserver, model)
    yield running
    running.close()


@pytest.fixture(scope="module")
def sampled_by(ranks: Ranks) -> list[Any]:
    return trajectories.policies(ranks.model)


@pytest.fixture(scope="module")
def initial_policy(sampled_by: list[Any]) -> Any:
    return sampled_by[0]


@pytest.fixture(scope="module")
def shards(sampled_by: list[Any]) -> list[wire.Shard]:
    return trajectories.fixed_shards(sampled_by)


@pytest.fixture(scope="module")
def golden() -> dict[str, list[list[float]]]:
    return json.loads(trajectories.GOLDEN.read_text())  # type: ignore[no-any-return]


def split(shard: wire.Shard, world: int) -> list[wire.Shard]:
    """Two ranks get a third and two thirds: different numbers of micro-batches."""
    if world == 1:
        return [shard]
    sequences = shard.sequences
    parts = [sequences[::3], [s for i, s in enumerate(sequences) if i % 3]]
    return [wire.Shard(step=shard.step, groups=shard.groups, sequences=part) for part in parts]


def trajectory(
    ranks: Ranks, config: Config, recipe: RecipeSpec, shards: list[wire.Shard], **job: Any
) -> tuple[list[list[float]], list[Step]]:
    world, stage, packed = config
    by_rank = [list(own) for own in zip(*(split(shard, world) for shard in shards), strict=True)]
    steps = ranks.steps(
        world,
        by_rank,
        recipe,
        settings=trajectories.SETTINGS
        | engine_of(stage)
        | {"micro_batch_tokens": 48 if packed else trajectories.LONGEST},
        shared_rows=packed,
        keep=False,
        **job,
    )
    rows = [
        [s.stats.loss, s.stats.gradient_norm, *trajectories.checksums(ranks.initial, s.weights)]
        for s in steps
    ]
    return rows, steps


def cases() -> list[Any]:
    found = []
    for name in trajectories.RECIPES:
        for config in CONFIGS:
            world, stage, packed = config
            first = config in OPPOSITE or (name == IN_EVERY_CONFIG and stage in (0, 3, "FSDP2"))
            case = f"{name}-{world}-ranks-zero-{stage}-{'packed' if packed else 'unpacked'}"
            found.append(pytest.param(name, config, id=case, marks=[] if first else [pytest.mark.full]))
    return found


@pytest.mark.parametrize(("name", "config"), cases())
def test_engine_takes_the_recorded_steps(
    name: str, config: Config, ranks: Ranks, shards: list[wire.Shard], golden: dict[str, list[list[float]]]
) -> None:
    rows, steps = trajectory(ranks, config, trajectories.recipe_of(name), shards)
    assert [s.stats.skipped for s in steps] == [""] * trajectories.STEPS
    assert far_from(rows, golden[name]) <= 1


@pytest.mark.parametrize(
    "config",
    [
        pytest.param((2, 3, True), id="2-ranks-zero-3"),
        pytest.param((2, "FSDP2", True), id="2-ranks-FSDP2"),
        *(
            pytest.param((2, stage, True), id=f"2-ranks-zero-{stage}", marks=pytest.mark.full)
            for stage in range(3)
        ),
    ],
)
def test_a_resumed_engine_takes_the_recorded_steps(
    config: Config,
    ranks: Ranks,
    shards: list[wire.Shard],
    golden: dict[str, list[list[float]]],
    tmp_path: Path,
) -> None:
    """From checkpoints within a batch, after its first and its second update: the policy before the first is in them."""
    resumed = {0: tmp_path / "0", 1: tmp_path / "1"}
    rows, _ = trajectory(ranks, config, trajectories.recipe_of("decoupled"), shards, resumed=resumed)
    assert far_from(rows, golden["decoupled"]) <= 1


def far_from(rows: list[list[float]], golden: list[list[float]]) -> float:
    """The largest error, in tolerances.

    The recorded steps are float64's, the engine's float32's, in another order of summation for every split. The values
    are of the order of 1 and sums of many terms: the largest errors measured were 2e-7 (loss), 6e-7 (gradient
    norm), 4e-8 (distance) and 2e-6 (projection, a sum over 20,000 weights). The tolerances are some five times that.
    """
    tolerances = torch.tensor([1e-6, 3e-6, 1e-6, 1e-5], dtype=torch.float64)
    errors = torch.tensor(rows, dtype=torch.float64) - torch.tensor(golden, dtype=torch.float64)
    return float((errors.abs() / tolerances).max())


def test_recorded_steps_are_of_different_recipes(golden: dict[str, list[list[float]]]) -> None:
    """Every loss of the spec is among them, and its limits hold for some token, so that no other takes its steps."""
    names = list(trajectories.RECIPES)
    assert {loss for recipe in trajectories.RECIPES.values() for loss in recipe.get("loss", {})} == set(
        ONE_OF["loss"]
    ) - {"plugin"}
    assert list(golden) == names
    for i, name in enumerate(names):
        assert len(golden[name]) == trajectories.STEPS
        for other in names[:i]:
            assert far_from(golden[name], golden[other]) > 1000, (name, other)


def test_recorded_batches_are_mixed(shards: list[wire.Shard]) -> None:
    """Versions, forced tokens, lengths and advantages are what the recorded steps are meant to cover."""
    versions = [trajectories.version_of(one) for shard in shards for one in shard.sequences]
    assert max(len(set(own) - {wire.MASKED}) for own in versions) == 4
    assert any(set(own) == {wire.MASKED} for own in versions)
    assert sum(wire.MASKED in own and len(set(own)) > 2 for own in versions) >= 3
    for shard in shards:
        batch = rank_batch(shard, RecipeSpec()).batch
        assert len({len(one.completion) for one in batch.sequences}) >= 4
        assert any(
            a == 0 and len(trainable_places(s))
            for a, s in zip(batch.advantages_s, batch.sequences, strict=True)
        )
        assert len(batch.advantages_s.abs().unique()) >= 3


class TestVersions:
    """Three publishes inside one rollout."""

    SPANS = ((0, 0), (1, 3), (2, 6), (3, 8))
    TOKENS = 12

    def shard(self, sampled_by: list[Any]) -> wire.Shard:
        """Two completions, each token with the log-probability of its own version's policy."""
        random = np.random.default_rng(7)
        spans = [wire.VersionSpan(version, start) for version, start in self.SPANS]
        sequences = []
        for sample in range(2):
            one = wire.Sequence(
                group=0,
                sample=sample,
                prompt_token_ids=np.array([5, 9, 4], dtype="<i4").tobytes(),
                token_ids=random.integers(3, trajectories.VOCABULARY, self.TOKENS).astype("<i4").tobytes(),
                logprobs=b"",
                versions=spans,
            )
            sequences.append(
                trajectories.sampled(one, sampled_by, {version: version for version in range(4)})
            )
        group = wire.GroupMeta(
            slot=0,
            scores=[1.0, 0.0],
            rewards=[1.0, -1.0],
            completion_tokens=[self.TOKENS] * 2,
            filtered=False,
        )
        return wire.Shard(step=4, groups=[group], sequences=sequences)

    def test_each_ratio_is_to_the_version_that_sampled_the_token(
        self, ranks: Ranks, sampled_by: list[Any]
    ) -> None:
        """Of the engine's loss and mean ratio, against the policies' own probabilities; and those of any one version differ."""
        recipe = RecipeSpec.model_validate({"loss": {"cispo": {"ratioCap": "1.2"}}})
        shard = self.shard(sampled_by)
        _, (step,) = trajectory(ranks, (1, 0, True), recipe, [shard])
        assert step.stats.ratios is not None

        def by_hand(policy_of: list[int]) -> tuple[float, float]:
            """Loss and mean ratio; ``policy_of``: of each token."""
            loss, ratios = 0.0, []
            for one, advantage in zip(shard.sequences, (1.0, -1.0), strict=True):
                prompt, completion = (
                    np.frombuffer(b, "<i4").tolist() for b in (one.prompt_token_ids, one.token_ids)
                )
                with torch.no_grad():
                    logprobs = [
                        trajectories.plain_logprobs(p, Sequence(prompt, completion), 0.8).tolist()
                        for p in sampled_by
                    ]
                for place, policy in enumerate(policy_of):
                    own = logprobs[0][place]
                    ratios.append(math.exp(own - logprobs[policy][place]))
                    loss -= min(ratios[-1], 1.2) * advantage * own / (2 * self.TOKENS)
            return loss, sum(ratios) / len(ratios)

        found = (step.stats.loss, step.stats.ratios.ratio_mean)
        assert found == pytest.approx(by_hand([0] * 3 + [1] * 3 + [2] * 2 + [3] * 4), abs=3e-6)
        for version in range(4):
            assert found != pytest.approx(by_hand([version] * self.TOKENS), abs=1e-3)

    def test_log_probabilities_of_one_version_leave_the_recorded_steps(
        self, ranks: Ranks, sampled_by: list[Any], golden: dict[str, list[list[float]]]
    ) -> None:
        """What the recorded steps are worth: a trainer that forgets the versions is far outside of the tolerance."""
        for name in ("cispo", "gspo"):
            shards = trajectories.fixed_shards(sampled_by, one_version=True)
            rows, _ = trajectory(ranks, (1, 0, True), trajectories.recipe_of(name), shards)
            assert far_from(rows, golden[name]) > 1000


# --- gradients ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A batch, and one way to split it. ``rank_s``: of each sequence, where there are two."""

    shard: wire.Shard
    config: Config
    rank_s: list[int]
    micro_batch_tokens: int


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    groups: list[wire.GroupMeta] = []
    sequences: list[wire.Sequence] = []
    for slot in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(0, 9), min_size=2, max_size=4))
        rewards = [draw(st.sampled_from([-1.0, 0.3, 1.0])) for _ in lengths]
        prompt = random.integers(3, trajectories.VOCABULARY, draw(st.integers(1, 6))).astype("<i4").tobytes()
        masked = []
        for sample, tokens in enumerate(lengths):
            begin, end = sorted(draw(st.integers(0, tokens)) for _ in range(2))
            masked.append(end - begin)
            spans = [(0, 0, begin), (wire.MASKED, begin, end), (0, end, tokens)]
            sequences.append(
                wire.Sequence(
                    group=slot,
                    sample=sample,
                    prompt_token_ids=prompt,
                    token_ids=random.integers(3, trajectories.VOCABULARY, tokens).astype("<i4").tobytes(),
                    logprobs=(-3 + random.standard_normal(tokens)).astype("<f4").tobytes(),
                    versions=[wire.VersionSpan(v, start) for v, start, stop in spans if start < stop],
                )
            )
        groups.append(
            wire.GroupMeta(
                slot=slot,
                scores=rewards,
                rewards=rewards,
                completion_tokens=lengths,
                filtered=False,
                masked_tokens=masked,
            )
        )
    return Drawn(
        wire.Shard(step=0, groups=groups, sequences=sequences),
        (draw(st.sampled_from([1, 2])), draw(st.sampled_from([0, 3, "FSDP2"])), draw(st.booleans())),
        draw(st.lists(st.integers(0, 1), min_size=len(sequences), max_size=len(sequences))),
        draw(st.integers(15, 60)),
    )


def engine_gradient(
    ranks: Ranks,
    shards: list[wire.Shard],
    recipe: RecipeSpec,
    config: Config,
    micro_batch_tokens: int,
    **changes: Any,
) -> Step:
    """One step without a learning rate: Adam's first moment, without memory, is the gradient of the whole batch."""
    world, stage, packed = config
    settings = (
        trajectories.SETTINGS
        | engine_of(stage)
        | {
            "learning_rate": 0.0,
            "betas": (0.0, 0.999),
            "max_gradient_norm": 0.0,
            "ratio_guard": None,
            "micro_batch_tokens": micro_batch_tokens,
        }
        | changes
    )
    (step,) = ranks.steps(
        world, [[shard] for shard in shards], recipe, settings=settings, shared_rows=packed, keep=True
    )
    return step


@pytest.mark.parametrize("aggregation", ["PromptAverage", "SampleAverage", "TokenAverage", "Constant"])
@given(case=drawn())
@settings(max_examples=10, deadline=None)
def test_gradient_of_a_batch_is_the_sum_over_any_split(
    aggregation: str, case: Drawn, ranks: Ranks, initial_policy: Any
) -> None:
    """Of the whole batch at once, and of micro-batches, packed or not, on 1 or 2 ranks; both against float64."""
    trainable = sum(sum(group.trained_tokens) for group in case.shard.groups)
    assume(trainable)
    recipe = RecipeSpec.model_validate({"aggregation": aggregation, "maxCompletionTokens": 9})
    at_once = engine_gradient(ranks, [case.shard], recipe, (1, 0, True), 1000)
    world = case.config[0]
    parts = [
        wire.Shard(
            step=0,
            groups=case.shard.groups,
            sequences=[
                one
                for one, r in zip(case.shard.sequences, case.rank_s, strict=True)
                if world == 1 or r == rank
            ],
        )
        for rank in range(world)
    ]
    split = engine_gradient(ranks, parts, recipe, case.config, case.micro_batch_tokens)
    assert at_once.stats.micro_batches == 1
    assert split.stats.trainable_tokens == at_once.stats.trainable_tokens == trainable

    initial_policy.zero_grad()
    batch = rank_batch(case.shard, recipe).batch
    loss = trajectories.plain_loss(initial_policy, batch, recipe, trajectories.SETTINGS["temperature"])
    loss.backward()  # type: ignore[no-untyped-call]
    exact = torch.cat([p.grad.flatten() for _, p in sorted(initial_policy.named_parameters())])
    # Rounding of float32: 4e-7 at most in hundreds of batches.
    limit = 1e-6 * float(exact.norm())
    assert float((at_once.first_moment - exact).norm()) <= limit
    assert float((split.first_moment - exact).norm()) <= limit
    assert split.stats.loss == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)


# --- the guard against single tokens --------------------------------------------------------------------

GUARDED = {"gradient_guard": GradientGuard(min_tokens=8)}


def planted(shard: wire.Shard, tokens: dict[int, float], *, mask: bool) -> wire.Shard:
    """The shard with other log-probabilities of the generator: of the first trained token of some sequences. With ``mask``
    these tokens are forced instead, so that nothing is trained of them."""
    changed = list(shard.sequences)
    for index, logprob in tokens.items():
        one = changed[index]
        values = np.frombuffer(one.logprobs, "<f4").copy()
        values[0] = logprob
        changed[index] = wire.Sequence(
            group=one.group,
            sample=one.sample,
            prompt_token_ids=one.prompt_token_ids,
            token_ids=one.token_ids,
            logprobs=values.tobytes(),
            teacher_logprobs=one.teacher_logprobs,
            versions=[wire.VersionSpan(wire.MASKED, 0), wire.VersionSpan(0, 1)] if mask else one.versions,
        )
    return wire.Shard(step=shard.step, groups=shard.groups, sequences=changed)


@pytest.fixture(scope="module")
def ordinary(initial_policy: Any) -> wire.Shard:
    """A batch of the initial policy's own, 3 groups of 4: a completion of positive advantage, then three of negative ones."""
    random = np.random.default_rng(5)
    groups, sequences = [], []
    for slot in range(3):
        for sample in range(4):
            one = wire.Sequence(
                group=slot,
                sample=sample,
                prompt_token_ids=random.integers(3, trajectories.VOCABULARY, 3).astype("<i4").tobytes(),
                token_ids=random.integers(3, trajectories.VOCABULARY, 8).astype("<i4").tobytes(),
                logprobs=b"",
                versions=[wire.VersionSpan(0, 0)],
            )
            sequences.append(trajectories.sampled(one, [initial_policy], {0: 0}))
        rewards = [1.0, -1.0, -1.0, -1.0]
        groups.append(
            wire.GroupMeta(
                slot=slot,
                scores=[1.0, 0.0, 0.0, 0.0],
                rewards=rewards,
                completion_tokens=[8] * 4,
                filtered=False,
                masked_tokens=[0] * 4,
            )
        )
    return wire.Shard(step=0, groups=groups, sequences=sequences)


SPLITS: list[tuple[Config, int]] = [
    ((1, 0, True), 1000),
    ((1, 0, False), 24),
    ((2, 3, True), 30),
    ((2, 0, False), 12),
    ((2, "FSDP2", True), 30),
]


@pytest.mark.parametrize(
    ("loss", "tokens", "masked"),
    [
        pytest.param({"ppoClip": {}}, {5: -14.0}, 1, id="one"),
        pytest.param({"ppoClip": {}}, {1: -14.0, 5: -14.0, 9: -13.0}, 3, id="several of about one size"),
        pytest.param({"ppoClip": {}}, {1: -14.0, 5: -20.0}, 2, id="two of different sizes"),
        pytest.param({"dppo": {"ratioCap": "1000000"}}, {0: -14.0}, 1, id="dppo of a positive advantage"),
        pytest.param({"ppoClip": {"dualClip": "3"}}, {5: -14.0}, 0, id="dual clip"),
        pytest.param({"dppo": {}}, {1: -7.0}, 1, id="cap of 20"),
        pytest.param({"cispo": {}}, {5: -14.0}, 0, id="cispo bounds it"),
        pytest.param({"ppoClip": {}}, {5: -5.0}, 0, id="less than half"),
    ],
)
def test_guard_masks_what_would_take_the_gradient(
    loss: Any, tokens: dict[int, float], masked: int, ranks: Ranks, ordinary: wire.Shard
) -> None:
    """Whatever the split; and what is left is the gradient of the other tokens, with weights as if these were still there."""
    recipe = RecipeSpec.model_validate({"loss": loss, "aggregation": "TokenAverage"})
    whole = planted(ordinary, tokens, mask=False)
    # A TokenAverage of the batch without the masked tokens has the weight 1 / (N - masked) instead of 1 / N.
    unplanted = planted(ordinary, tokens, mask=True)
    total = sum(len(s.token_ids) // 4 for s in ordinary.sequences)
    steps = []
    for config, micro_batch_tokens in SPLITS:
        parts = split(whole, config[0])
        steps.append(engine_gradient(ranks, parts, recipe, config, micro_batch_tokens, **GUARDED))
        assert steps[-1].stats.guard_masked_tokens == masked, (config, steps[-1].stats)
        assert steps[-1].stats.skipped == ""
    size = float(steps[0].first_moment.norm())
    for step in steps[1:]:
        assert float((step.first_moment - steps[0].first_moment).norm()) <= 3e-6 * size
    if masked:
        assert masked == len(tokens)
        masks = [
            {**vars_of(g), "masked_tokens": [int(g.slot * 4 + i in tokens) for i in range(4)]}
            for g in whole.groups
        ]
        unplanted = wire.Shard(
            step=0, groups=[wire.GroupMeta(**m) for m in masks], sequences=unplanted.sequences
        )
        expected = engine_gradient(ranks, [unplanted], recipe, (1, 0, True), 1000, gradient_guard=None)
        scaled = expected.first_moment * (total - masked) / total
        assert float((steps[0].first_moment - scaled).norm()) <= 3e-6 * size


def vars_of(group: wire.GroupMeta) -> dict[str, Any]:
    return {name: getattr(group, name) for name in group.__struct_fields__}


def test_guard_leaves_small_batches_alone(ranks: Ranks, ordinary: wire.Shard) -> None:
    recipe = RecipeSpec.model_validate({"loss": {"ppoClip": {}}})
    step = engine_gradient(ranks, [planted(ordinary, {5: -14.0}, mask=False)], recipe, (1, 0, True), 1000)
    assert step.stats.guard_masked_tokens == 0
    assert step.stats.trainable_tokens < GradientGuard().min_tokens


def test_masked_step_changes_weights_as_one_without_the_token(ranks: Ranks, ordinary: wire.Shard) -> None:
    """At a real learning rate and with clipping: the discarded first pass leaves nothing in the optimizer."""
    recipe = RecipeSpec.model_validate({"loss": {"ppoClip": {}}, "aggregation": "TokenAverage"})
    settings = trajectories.SETTINGS | {"micro_batch_tokens": 1000, "ratio_guard": None} | GUARDED
    found = []
    for tokens in ({5: -14.0}, {5: -24.0}):
        shard = planted(ordinary, tokens, mask=False)
        for world, stage in ((1, 0), (2, 3), (2, "FSDP2")):
            (step,) = ranks.steps(
                world,
                [[part] for part in split(shard, world)],
                recipe,
                settings=settings | engine_of(stage),
                shared_rows=True,
                keep=False,
            )
            assert step.stats.guard_masked_tokens == 1
            assert step.stats.applied
            found.append(step.weights)
    for weights in found[1:]:
        torch.testing.assert_close(weights, found[0], rtol=0, atol=1e-7)
