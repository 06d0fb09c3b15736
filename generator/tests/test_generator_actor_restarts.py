"""The actor as a process, with a server and a coordinator that restart, and leases that end."""

from __future__ import annotations

import asyncio

import pytest
import stand_in_vllm
from actor_scene import PROMPTS, Scene, decoded
from actor_stand_ins import until

from scalerl_api import endpoints
from scalerl_api.wire import Problem, Split


@pytest.mark.parametrize("scene", [{"seconds_per_token": 3600.0, "processes": True}], indirect=True)
async def test_server_killed_in_mid_generation(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(4, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 4)
    await asyncio.sleep(0.2)
    await scene.generator.kill_server()

    await until(lambda: not scene.coordinator.leased)  # released, not waited out
    assert not scene.coordinator.groups
    await until(lambda: not scene.coordinator.beats[-1].healthy)
    assert scene.coordinator.beats[-1].weight_version == -1
    assert (await scene.get(endpoints.READY))[0] == 503
    problem = await scene.trainer.join(1)
    assert isinstance(problem, Problem)
    assert problem.error == "not-ready"

    scene.generator.seconds_per_token = 0.0
    await scene.generator.start_server()
    await scene.member(known=1)
    await asyncio.sleep(0.3)
    assert not scene.coordinator.groups, "generated with weights that were not published"
    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 4)


@pytest.mark.parametrize("max_tokens", [600, 1100], ids=["together", "one-by-one"])
@pytest.mark.parametrize(
    "scene",
    [{"prompts": [*PROMPTS, "f{"], "model__contextTokens": 2048}],
    indirect=True,
)
async def test_completions_continue_on_restarted_server(scene: Scene, max_tokens: int) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    await scene.server(hold=200)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split, max_tokens=max_tokens, policy_version=1)
    await until(lambda: len(scene.coordinator.groups) == 12)  # all but the long one
    await until(lambda: any(n > 400 for n in scene.coordinator.beats[-1].progress.values()))
    await scene.generator.kill_server()
    await until(lambda: not scene.coordinator.leased)

    await scene.generator.start_server()
    await scene.member(known=1)
    await scene.trainer.publish(1)
    await until(lambda: len(scene.coordinator.groups) == 13)
    long = max(scene.coordinator.groups.values(), key=lambda group: len(group.completions[0].token_ids))
    length = stand_in_vllm.counted_length(decoded(long.prompt_token_ids))
    asked = [r["max_tokens"] for r in (await scene.server())["requests"]]
    for completion, rest in zip(long.completions, asked, strict=True):
        assert decoded(completion.token_ids) == stand_in_vllm.counted(length)
        assert len(completion.logprobs) == len(completion.token_ids)
        assert [(span.version, span.start) for span in completion.versions] == [
            (0, 0),
            (1, max_tokens - rest),
        ]
        assert rest <= max_tokens - 65
    await scene.shows(f"scalerl_actor_resumed_tokens_total {sum(max_tokens - rest for rest in asked)}.0")


@pytest.mark.parametrize(
    "scene",
    [{"prompts": [*PROMPTS, "f{"], "model__contextTokens": 2048}],
    indirect=True,
)
async def test_tokens_at_undetected_server_restart_are_dropped(scene: Scene) -> None:
    """Some in flight may be of the restarted server, whose weights were not published."""
    await scene.member()
    await scene.trainer.publish(0)
    await scene.server(hold=200)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split, max_tokens=600)
    await until(lambda: len(scene.coordinator.groups) == 12)
    await until(lambda: any(n > 400 for n in scene.coordinator.beats[-1].progress.values()))
    await scene.generator.kill_server()
    await scene.generator.start_server()
    await scene.member(known=1)
    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 13)
    assert "scalerl_actor_resumed_tokens_total 0.0" in (await scene.get(endpoints.METRICS))[1]


@pytest.mark.parametrize("scene", [{"seconds_per_token": 3600.0}], indirect=True)
async def test_undetected_server_restart_drops_group(scene: Scene) -> None:
    """It answers every health check, but its tokens are of weights that were not published to it."""
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(2, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 2)
    await scene.generator.kill_server()
    scene.generator.seconds_per_token = 0.0
    await scene.generator.start_server()
    await scene.member(known=1)
    assert not scene.coordinator.groups
    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 2)


@pytest.mark.parametrize("scene", [{"seconds_per_token": 3600.0}], indirect=True)
async def test_lease_expiry_drops_group(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(1, scene.train, lease_id="short", remaining_seconds=0.8)
    await scene.shows('scalerl_actor_groups_total{result="expired"} 1.0')
    beats = len(scene.coordinator.beats)
    await until(lambda: len(scene.coordinator.beats) > beats + 1)
    assert scene.coordinator.beats[-1].held_leases == []
    assert not scene.coordinator.pushes


@pytest.mark.usefixtures("unhurried_leases")
@pytest.mark.parametrize(
    "scene",
    [{"seconds_per_token": 0.03, "prompts": [*PROMPTS, "go|"], "model__contextTokens": 512}],
    indirect=True,
)
async def test_lease_continues_while_tokens_grow(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split, remaining_seconds=4.0, max_tokens=200)
    await until(lambda: len(scene.coordinator.groups) == 13)
    longest = max(scene.coordinator.groups.values(), key=lambda g: g.generation_seconds)
    assert longest.generation_seconds > 4.5
    assert [c.tokens for c in longest.completions] == [200] * 4
    assert {c.finish_reason for c in longest.completions} == {"length"}
    versions = [
        beat.progress[longest.lease_id]
        for beat in scene.coordinator.beats
        if longest.lease_id in beat.progress
    ]
    assert versions == sorted(versions)
    assert len(set(versions)) > 2
    await until(lambda: not scene.coordinator.beats[-1].progress)


async def test_coordinator_restarts_and_loses_an_answer(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(2, scene.train)
    await until(lambda: len(scene.coordinator.groups) == 2)
    await scene.coordinator.kill()
    await asyncio.sleep(0.5)
    assert scene.generator.running

    scene.coordinator.lose_push_answers = 1
    await scene.coordinator.start()
    await scene.member(known=1)
    scene.coordinator.offer(6, scene.train)
    await until(lambda: len(scene.coordinator.groups) == 8)
    await until(lambda: _duplicates(scene) > 0)
    assert scene.coordinator.beats[-1].weight_version == 0, "weights survive a coordinator"


def _duplicates(scene: Scene) -> int:
    pushed = [group.lease_id for push in scene.coordinator.pushes for group in push.groups]
    return len(pushed) - len(set(pushed))


@pytest.mark.parametrize("scene", [{"seconds_per_token": 0.05}], indirect=True)
async def test_finished_groups_survive_coordinator_restart(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(4, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 4)
    await scene.coordinator.kill()
    await asyncio.sleep(1.0)  # generated and graded while no coordinator takes it
    await scene.coordinator.start()
    await until(lambda: len(scene.coordinator.groups) == 4)
