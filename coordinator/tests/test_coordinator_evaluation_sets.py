"""Several evaluation sets beside each other, and the breakdown of a point by label."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_client import make_group, run_text
from coordinator_world import World, check_consistency, make_settings, train

from scalerl_api import wire
from scalerl_api.curve import curve_points, labels_csv
from scalerl_api.load import parse_run
from scalerl_api.paths import RunPaths
from scalerl_api.wire import LabelMean, PushResult, ReleaseCause, Split
from scalerl_coordinator.evaluation import Evaluation, PromptResult, summarize
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.generator_requests import OTHER_SETS_EVERY
from scalerl_coordinator.run_status import build_status
from scalerl_coordinator.settings import EvaluationSet, Settings
from scalerl_tasks import Prompt

POINT = summarize(
    Evaluation(0, 0, [], {0: PromptResult("a", 1.0, 2, 4, 0, False)}, 1), "held-out", "digest", 1.0, 1.0
)


def result(score_sum: float, **labels: str) -> PromptResult:
    return PromptResult("a", score_sum, 4, 40, 0, False, labels=labels)


def test_summarize_breaks_the_reward_down_by_label():
    results = {
        0: result(4.0, operations="10", mode="forward"),
        1: result(1.0, operations="9", mode="forward"),
        2: result(2.0, operations="10"),
    }
    point = summarize(Evaluation(8, 1234, [], results, 3), "held-out", "digest", 10.0, 30.0)
    assert [(one.label, one.value, one.reward, one.prompts) for one in point.by_label] == [
        ("mode", "forward", 0.625, 2),
        ("operations", "9", 0.25, 1),
        ("operations", "10", 0.75, 2),
    ]
    assert [line.split(",")[:7] for line in labels_csv([point]).splitlines()[:2]] == [
        ["set", "version", "compute", "label", "value", "reward", "prompts"],
        ["held-out", "8", "1234", "mode", "forward", "0.625", "2"],
    ]


def test_summarize_breaks_pass_at_k_down_by_label():
    """Of four samples, 0 or 1 passed: pass@2 is 1 − C(3, 2) / C(4, 2) = 1/2 where one did."""
    results = {
        0: PromptResult("a", 1.0, 4, 40, 0, False, passed=1, labels={"operations": "9"}),
        1: PromptResult("a", 0.0, 4, 40, 0, False, passed=0, labels={"operations": "9"}),
        2: PromptResult("a", 1.0, 4, 40, 0, False, passed=1, labels={"operations": "10"}),
    }
    point = summarize(Evaluation(8, 1234, [], results, 3), "held-out", "digest", 10.0, 30.0)
    nine, ten = point.by_label
    assert [(at.k, at.mean) for at in nine.pass_at] == [(2, 0.25), (4, 0.5)]
    assert [(at.k, at.mean) for at in ten.pass_at] == [(2, 0.5), (4, 1.0)]
    head, row, _ = labels_csv([point, POINT]).splitlines()
    assert head.endswith(
        "prompts,pass_at_2,pass_at_2_low,pass_at_2_high,pass_at_4,pass_at_4_low,pass_at_4_high"
    )
    assert row.split(",")[4:8] == ["9", "0.125", "2", "0.25"]
    assert nine.pass_at[0].low < 0.25 < nine.pass_at[0].high


def test_status_has_the_breakdown_of_the_newest_point_alone():
    world = two_sets()
    for version in (0, 1):
        world.state.points.append(
            msgspec.structs.replace(POINT, version=version, by_label=[LabelMean("mode", "forward", 0.5, 2)])
        )
    assert [len(point.by_label) for point in build_status(world.core).points] == [0, 1]


def two_sets() -> World:
    sets = (EvaluationSet("hard", "digest-hard", 3, 4),)
    return ready_for_both(World(make_settings(sets=sets, set_every=(2,))))


def ready_for_both(world: World) -> World:
    world.member = world.register("g")
    world.hello("t")
    world.next("t")
    world.publish("t")
    world.beat(world.member, 0)
    return world


def held_out(leases: list[wire.Lease]) -> list[tuple[int, int, int]]:
    return [
        (lease.prompt.task, lease.slot, lease.completions)
        for lease in leases
        if lease.split is Split.HELD_OUT
    ]


def test_sets_have_points_of_their_own_with_their_own_samples():
    world = two_sets()
    leases = world.lease(world.member, 0)
    assert held_out(leases) == [(0, 0, 2), (0, 1, 2), (1, 0, 4), (1, 1, 4), (1, 2, 4)]
    for lease in leases:
        assert world.push(world.member, make_group(lease, version=0)) is PushResult.ACCEPTED
    main, hard = world.state.curve(0)[0], world.state.curve(1)[0]
    assert (main.set_name, main.prompts, main.samples) == ("held-out", 2, 4)
    assert (hard.set_name, hard.prompts, hard.samples) == ("hard", 3, 12)
    assert main.set_digest != hard.set_digest
    check_consistency(world)


def test_publish_does_not_wait_for_another_set():
    """The trainer's time does not depend on the number of sets: only the forecast's evaluation holds a publish."""
    world = two_sets()
    for lease in world.lease(world.member, 0):
        if lease.prompt.task == 0:
            world.push(world.member, make_group(lease, version=0))
    world.report("t", 0)
    assert world.begin_publish("t") is not None
    assert list(world.state.evaluations) == [(0, 1)]


def test_training_precedes_another_set_but_for_every_eighth_lease():
    sets = (EvaluationSet("hard", "digest-hard", 100, 2),)
    world = ready_for_both(World(make_settings(sets=sets, set_every=(2,), prompts_per_step=20)))
    leases = world.lease(world.member, 0, 2)
    assert held_out(leases) == [(0, 0, 2), (0, 1, 2)]
    leases = [lease for _ in range(16) for lease in world.lease(world.member, 0, 1)]
    assert sum(lease.prompt.task == 1 for lease in leases) == 16 // OTHER_SETS_EVERY


def test_large_set_does_not_delay_a_small_one():
    sets = (EvaluationSet("large", "digest-large", 50, 2), EvaluationSet("small", "digest-small", 2, 2))
    world = ready_for_both(World(make_settings(sets=sets, set_every=(2, 2), prompts_per_step=2)))
    leases = [lease for _ in range(8) for lease in world.lease(world.member, 0, 4)]
    others = [lease.prompt.task for lease in leases if lease.prompt.task]
    assert others[:3] == [2, 2, 1]


def test_failures_do_not_count_in_another_set():
    world = two_sets()
    first = [lease for lease in world.lease(world.member, 0) if lease.split is Split.HELD_OUT]
    of = {(lease.prompt.task, lease.slot): lease for lease in first}
    request = wire.Release(
        member_id=world.member,
        lease_ids=[of[1, 0].lease_id],
        reason="no",
        cause=ReleaseCause.TOO_LONG,
    )
    world.generator_requests.release(request, world.now)
    assert world.state.evaluations[0, 1].results[0].given_up
    assert world.state.evaluations[0, 0].results == {}
    check_consistency(world)
    world.acknowledge()
    world.crash(0)
    check_consistency(world)


HARD: dict[str, object] = {
    "name": "hard",
    "task": {"jsonl": {"path": "/data/hard.jsonl"}, "verifier": {"name": "exact"}},
    "everySteps": 4,
    "samplesPerPrompt": 8,
    "k": 4,
}


def settings_of(*sets: dict[str, object], **evaluation: object) -> Settings:
    given = {"everySteps": 2, "samplesPerPrompt": 3, "sets": list(sets), **evaluation}
    run = parse_run(run_text(evaluation=given), "test")
    measured = [(f"digest-{one['name']}", 5) for one in sets if "task" in one]
    return Settings.of_run(run, train_digest="t", held_out=[("h", 2)], sets=measured)


def test_sets_of_the_spec_become_tasks_of_their_own():
    both = settings_of(HARD, {"name": "easy"})
    assert both.identity.evaluation_set(0) == EvaluationSet("easy", "h", 2, 3)
    assert both.identity.evaluation_set(1) == EvaluationSet("hard", "digest-hard", 5, 8, 4)
    assert (both.every_steps(0), both.every_steps(1)) == (2, 4)
    assert both.forecast_task == 1, "the first of the spec"
    assert settings_of(HARD, {"name": "easy"}, forecastSet="easy").forecast_task == 0
    assert list(settings_of(HARD).identity.set_tasks) == [1], "held-out prompts are not evaluated"


def test_samples_of_a_set_may_change_and_its_prompts_not():
    identity = two_sets().settings.identity
    for changes, kept in (({"samples": 8}, True), ({"k": 2}, True), ({"digest": "x"}, False)):
        sets = (msgspec.structs.replace(identity.sets[0], **changes),)
        assert (msgspec.structs.replace(identity, sets=sets).fixed == identity.fixed) is kept


def edit(world: World, every: int = 2, **changes: int) -> None:
    """Restart the coordinator with other values of the set's fields; generator and trainer continue."""
    held = list(world.state.leases)
    world.acknowledge()
    sets = (msgspec.structs.replace(world.settings.identity.sets[0], **changes),)
    world.change(sets=sets, set_every=(every,))
    world.member = world.register("g", held, version=world.state.version)
    world.hello("t", world.state.version)


@pytest.mark.parametrize("samples", [2, 6])
def test_edited_samples_of_a_set_apply_to_the_rest_of_its_evaluation(samples: int):
    world = two_sets()
    of = {(lease.split, lease.prompt.task, lease.slot): lease for lease in world.lease(world.member, 0)}
    for task in (0, 1):
        graded = of[Split.HELD_OUT, task, 0]
        assert world.push(world.member, make_group(graded, version=0)) is PushResult.ACCEPTED
    edit(world, samples=samples)
    kept = {lease.lease_id for key, lease in of.items() if key[:2] != (Split.HELD_OUT, 1)}
    assert world.state.leases.keys() == kept - {of[Split.HELD_OUT, 0, 0].lease_id}
    hard = world.state.evaluations[0, 1]
    assert (list(hard.results), hard.todo) == ([0], [1, 2])
    outdated = of[Split.HELD_OUT, 1, 1]
    assert world.push(world.member, make_group(outdated, version=0)) is not PushResult.ACCEPTED
    leases = [lease for lease in world.lease(world.member, 0) if lease.prompt.task == 1]
    assert held_out(leases) == [(1, 1, samples), (1, 2, samples)]
    for lease in leases:
        assert world.push(world.member, make_group(lease, version=0)) is PushResult.ACCEPTED
    [point] = world.state.curve(1)
    assert (point.prompts, point.samples) == (3, 4 + 2 * samples)
    assert [at.k for at in point.pass_at] == ([2] if samples == 2 else [2, 4]), "all prompts have so many"
    check_consistency(world)


def test_evaluation_in_progress_is_completed():
    world = two_sets()
    train(world)
    train(world)
    assert list(world.state.evaluations) == [(2, 1)], "every second version"
    edit(world, every=3)
    leases = world.lease(world.member, 2)
    for lease in leases:
        if lease.split is Split.TRAIN:
            world.push(world.member, make_group(lease, version=2))
    train(world)
    assert list(world.state.evaluations) == [(2, 1)], "version 3 would be due without it"
    for lease in leases:
        if lease.split is Split.HELD_OUT:
            assert world.push(world.member, make_group(lease, version=2)) is PushResult.ACCEPTED
    for _ in range(3):
        train(world)
    world.serve(world.member, 6)
    assert [point.version for point in world.state.curve(1)] == [0, 2, 6]
    assert [point.version for point in world.state.curve(0)] == [0, 2, 4, 6]
    check_consistency(world)


def test_curve_is_readable_after_an_edit_of_k(tmp_path):
    world = two_sets()
    train(world)
    edit(world, k=2)
    train(world)
    world.serve(world.member, 2)
    paths = RunPaths(tmp_path)
    RunFiles(paths).write_curves(world.state.points, 0)
    points = curve_points(paths.set_curve("hard").read_text())
    assert [(p.version, [at.k for at in p.pass_at]) for p in points] == [(0, [2, 4]), (2, [2])]
    assert [p.pass_at for p in points] == [p.pass_at for p in world.state.curve(1)]
    assert {"pass_at_2", "pass_at_4"} <= set(paths.labels.read_text().splitlines()[0].split(","))


def test_largest_k_bounds_pass_at_k():
    evaluation = Evaluation(0, 0, [], {0: PromptResult("a", 1.0, 8, 4, 0, False, passed=1)}, 1)
    assert [at.k for at in summarize(evaluation, "hard", "d", 1.0, 1.0).pass_at] == [2, 4, 8]
    assert [at.k for at in summarize(evaluation, "hard", "d", 1.0, 1.0, 4).pass_at] == [2, 4]


def test_other_sets_continue_with_newer_weights():
    """Publishes do not wait for it, so that its slots are mostly issued again to newer weights."""
    world = two_sets()
    leases = world.lease(world.member, 0)
    for lease in leases:
        if lease.prompt.task == 0:
            world.push(world.member, make_group(lease, version=0))
    world.report("t", 0)
    world.publish("t")
    world.beat(world.member, 1)
    lease = next(one for one in leases if one.prompt.task == 1)
    for sampled in (1, 2):
        versions = [wire.VersionSpan(at, at) for at in range(sampled)]
        tokens = wire.Partial(
            start=0, token_ids=bytes(4 * sampled), logprobs=bytes(4 * sampled), versions=versions
        )
        begun = wire.PartialGroup(
            lease_id=lease.lease_id,
            prompt=lease.prompt,
            slot=lease.slot,
            temperature=lease.temperature,
            prompt_token_ids=b"",
            completions=[tokens] * lease.completions,
        )
        reported = wire.Partials(member_id=world.member, groups=[begun])
        world.generator_requests.receive_partials(reported, world.now)
        released = wire.Release(member_id=world.member, lease_ids=[lease.lease_id], reason="drained")
        world.generator_requests.release(released, world.now)
        slot = lease.slot
        world.now += 2  # the slot is not offered again at once
        offered = world.lease(world.member, 1)
        lease = next(one for one in offered if (one.prompt.task, one.slot) == (1, slot))
        assert lease.partial is not None
        assert lease.partial.completions[0].token_ids == tokens.token_ids


class Hard:
    digest = "hard"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(f"hard/{index}", "", "")

    def difficulty(self, index: int) -> float | None:
        return None


async def test_prompts_are_those_of_the_lease_s_set(local):
    endpoints = local.server._generator_endpoints
    endpoints._prompts[Split.HELD_OUT].append(Hard())
    world = two_sets()
    leases = [lease for lease in world.lease(world.member, 0) if lease.split is Split.HELD_OUT]
    ids, failed = endpoints._prompt_ids(leases)
    assert ids == ["held-out/0", "held-out/1", "hard/0", "hard/1", "hard/2"]
    assert not failed


def test_curves_are_those_of_their_sets(tmp_path):
    paths = RunPaths(tmp_path)
    points = [
        msgspec.structs.replace(POINT, task=task, set_name=name, reward=0.25 * (1 + task))
        for task, name in enumerate(("easy", "hard"))
    ]
    RunFiles(paths).write_curves(points, 0)
    assert curve_points(paths.curve.read_text())[0].reward == 0.25
    assert curve_points(paths.set_curve("hard").read_text())[0].reward == 0.5
    RunFiles(paths).write_curves(points, 1)
    assert curve_points(paths.curve.read_text())[0].reward == 0.5
    assert curve_points(paths.set_curve("easy").read_text())[0].reward == 0.25
    assert not paths.set_curve("hard").exists(), "curve.csv has its points now"
