"""The state of random walks over a coordinator, and what holds after each operation."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from coordinator_client import make_group
from coordinator_world import Prompts, World, check_consistency, make_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from scalerl_api import wire
from scalerl_api.recipe.curriculum import CurriculumSpec, UniformSpec
from scalerl_api.wire import Split
from scalerl_coordinator import slots
from scalerl_coordinator.membership import UnknownMember
from scalerl_coordinator.prompt_history import PromptHistory
from scalerl_coordinator.sampler_interface import SamplerInput
from scalerl_coordinator.samplers import make_samplers
from scalerl_coordinator.settings import EvaluationSet, Settings
from scalerl_tasks import Mixture

NAMES = ("g0", "g1", "g2")
WEIGHTS = {
    1: (Fraction(1),),
    2: (Fraction("0.7"), Fraction("0.3")),
    3: (Fraction("0.5"), Fraction("0.2"), Fraction("0.3")),
}
"""By the number of tasks."""


KEPT = st.sampled_from([None, 1, 1, 2])
"""``evaluation.generators``. Most of a walk is done by two generators, of which one is to get newer weights."""
REACHED: Counter[str] = Counter()
"""What the walks of this process came to."""


class Walk(RuleBasedStateMachine):
    """What a walk begins with, what it keeps, and what must hold of it. Operations are those of :mod:`coordinator_rules`."""

    @initialize(
        k=st.integers(0, 3),
        ppo=st.booleans(),
        max_steps=st.none() | st.integers(2, 6),
        spare=st.booleans(),
        max_tries=st.sampled_from([1, 1, 3]),
        teacher=st.booleans(),
        tasks=st.sampled_from([1, 1, 2, 3]),
        sets=st.sampled_from([0, 1, 3]),
        forecast=st.integers(-1, 5),
        by_length=st.booleans(),
        kept=KEPT,
        held_out=st.integers(2, 6),
        every=st.integers(1, 2),
    )
    def begin(
        self,
        k: int,
        ppo: bool,
        max_steps: int | None,
        spare: bool,
        max_tries: int,
        teacher: bool,
        tasks: int,
        sets: int,
        forecast: int,
        by_length: bool,
        kept: int | None,
        held_out: int,
        every: int,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(slots, "ON_POLICY_EVERY", 1)  # walks are short: a slot of every k-th step waits
        self.patch.setattr(slots, "_MIN_ON_POLICY", 1)
        names, weights = ("main", "sums", "words")[:tasks], WEIGHTS[tasks]
        train = [Prompts() for _ in names]
        self.samplers = make_samplers(CurriculumSpec(uniform=UniformSpec()), train, names, weights, 11)
        self.mixture = Mixture(weights, 11)
        sets += tasks - 1  # each task of a mix has one
        self.world = self._make_world(
            make_settings(
                teacher=teacher,
                held_out_prompts=held_out,
                evaluation_every=every,
                tasks=names,
                weights=weights,
                task_max_tokens=(8, 6, 7)[:tasks] if tasks > 1 else (),
                max_staleness_steps=k,
                steps_per_batch=k + 1 if ppo else 0,
                max_steps=max_steps,
                zero_variance_filter=spare,
                max_tries=max_tries,
                sets=tuple(
                    EvaluationSet(f"set-{n}", f"digest-{n}", n % 3 + 1, 3 - n % 3) for n in range(sets)
                ),
                set_every=(1, 2, 3, 1, 2)[:sets],
                forecast_task=min(forecast, sets) if tasks > 1 else min(max(forecast, 0), sets),
                by_length=by_length,
                evaluation_generators=kept,
            )
        )
        self.bounds = [(0, k)]  # k, by the first step it holds for
        self.max_steps = max_steps
        self.members: dict[str, tuple[str, int]] = {}  # name → (member id, version it holds)
        self.work: list[tuple[str, wire.Lease]] = []  # handed out, by whom; some of it is lost meanwhile
        self.reported: dict[
            str, list[int]
        ] = {}  # tokens of an unfinished lease that its holder has: who sampled each
        self.accepted: dict[str, wire.Group] = {}  # training groups acknowledged
        self.trained: dict[int, list[str]] = {}  # lease ids by step, on the present line
        self.incarnation = ""
        self.trainers = 0
        self.checkpoints: dict[int, tuple[bytes, dict[int, list[str]], dict[int, int]]] = {}
        """By version: snapshot, what was trained, and weights."""
        self.unpublished = False
        self.point_versions: set[tuple[int, int]] = set()
        self.handed_over = 0  # tokens that another lease continued
        # Two lineages may have weights of one version. Which weights a version is now, and a generator holds:
        self.weights = {0: 0}
        self.held_weights: dict[str, int] = {}
        self.sampled_with: dict[str, tuple[int, int]] = {}  # lease id → version of its tokens, and weights
        self.trained_weights = 0

    def _make_world(self, settings: Settings) -> World:
        return World(settings)

    def _check_shard(self, plan: Any) -> None:
        """What the trainer gets."""

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "world"):
            return
        check_consistency(self.world)
        state = self.world.state
        assert state.lineage.staleness_max <= max(k for _, k in self.bounds)
        assert state.version == len(self.trained)
        versions = {(p.version, p.task) for p in state.points}
        assert self.point_versions <= versions
        assert all(sum(one.prompts for one in p.by_label) == p.prompts for p in state.points)
        self.point_versions = versions

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.patch.undo()
            self.world.write()
            assert self.world.replay().encode() == self.world.state.encode()

    def _bound_from(self, first: int) -> None:
        """What is not closed yet is held to the k of now."""
        self.bounds = [bound for bound in self.bounds if bound[0] < first]
        self.bounds.append((first, self.world.settings.identity.max_staleness_steps))

    def _bound(self, step: int) -> int:
        return next(k for first, k in reversed(self.bounds) if first <= step)

    def _prompt(self, slot: int, tries: int) -> tuple[int, int]:
        """Task and prompt of a slot after so many tries, whatever happened meanwhile."""
        task, cursor = self.mixture.place(slot)
        history = PromptHistory().as_of(0)
        if tries == 0:
            return task, self.samplers[task].choose(SamplerInput(cursor, history))[0]
        return task, self.samplers[task].refill(slot, tries, history)

    def _as_member(self, name: str, act: Any) -> Any:
        """``act(member id, version)``; a member that is not known registers again, as an actor does."""
        if name not in self.members:
            return None
        member_id, version = self.members[name]
        try:
            result = act(member_id, version)
        except UnknownMember:
            self.register(name, True, False)
            return None
        self.world.acknowledge()
        return result

    def _group(self, name: str, lease: wire.Lease, flat: bool) -> wire.Group:
        newest = max(lease.policy_version, self.members[name][1])
        if newest > self.world.state.newest:
            newest = lease.policy_version
        scores = [1.0] * lease.completions if flat else None
        taught = self.world.settings.teacher and lease.split is Split.TRAIN
        teacher = teacher_logprob(lease) if taught else None
        return make_group(lease, version=min(newest, lease.policy_version), scores=scores, teacher=teacher)

    def _hello(self, version: int, snapshot: bytes | None = None) -> None:
        self.trainers += 1
        self.incarnation = f"t{self.trainers}"
        lost = {step: ids for step, ids in self.trained.items() if step >= version}
        self.trained = {step: ids for step, ids in self.trained.items() if step < version}
        self.weights = {of: weights for of, weights in self.weights.items() if of <= version}
        welcome = self.world.hello(self.incarnation, version, snapshot)
        for step in range(len(self.trained), version):  # a checkpoint from ahead of the one before
            self.trained[step] = [g.lease_id for g in self.world.state.step_groups(step)]
            self.trained_weights += 1
            self.weights[step + 1] = self.trained_weights
        self.world.acknowledge()
        assert welcome.next_step == version
        self.unpublished = False
        for step, lease_ids in lost.items():  # the very same batches again
            if not snapshot:
                assert [g.lease_id for g in self.world.state.step_groups(step)] == lease_ids


def token(lease: wire.Lease, at: int) -> int:
    """Of slot, task and prompt, so that tokens of another are seen."""
    return (lease.slot * 31 + lease.prompt.index * 7 + lease.prompt.task * 13 + at) % 100


def teacher_logprob(lease: wire.Lease) -> float:
    """Of slot and prompt, as the tokens."""
    return -0.25 - token(lease, 0) / 8


def oldest(group: wire.Group) -> int:
    return min(span.version for completion in group.completions for span in completion.versions)
