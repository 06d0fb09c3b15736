"""The actor as a process: what becomes of leases, prompts and groups, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import stand_in_vllm
from actor_scene import PROMPTS, Scene, decoded
from actor_stand_ins import END, GeneratorProcesses, until, write_run

from scalerl_api import endpoints
from scalerl_api.wire import MASKED, ReleaseCause, Split
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_tasks.grading.grading_pool import Graded, GradingPool
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import Verdict


async def test_lease_to_push(scene: Scene) -> None:
    await scene.member()
    assert (await scene.get(endpoints.READY))[0] == 200  # ready for weights
    scene.coordinator.offer(20, scene.train)
    await asyncio.sleep(0.3)
    assert not scene.coordinator.requests, "leased without weights"

    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 20)

    group = scene.coordinator.groups["train-0"]
    assert (group.slot, group.prompt.index, group.prompt_id) == (0, 0, scene.train[0])
    prompt = decoded(group.prompt_token_ids)
    even, odd, *_ = group.completions
    assert decoded(even.token_ids) == [*prompt, END]
    assert decoded(odd.token_ids) == [*prompt[:1] * 3, END]
    assert decoded(even.logprobs, "<f4") == [-0.25] * len(decoded(even.token_ids))
    assert group.verdicts.scores == [1.0, 0.0, 1.0, 0.0], "graded with the end token in its text"
    assert [c.finish_reason for c in group.completions] == ["stop"] * 4
    assert (group.looped, group.verdicts.unanswered) == (0, [])
    assert [(span.version, span.start) for span in even.versions] == [(0, 0)]
    (salt,) = set((await scene.server())["salts"])
    assert salt.startswith("0."), "one installation of version 0"

    await scene.shows(
        'scalerl_actor_rollouts_total{split="train"} 80.0',
        'scalerl_actor_groups_total{result="accepted"} 20.0',
    )
    tokens = sum(c.tokens for g in scene.coordinator.groups.values() for c in g.completions)
    await until(lambda: scene.coordinator.beats[-1].generated_tokens == tokens)
    assert scene.coordinator.beats[-1].busy_seconds > 0

    scene.generator.terminate()
    assert await scene.generator.exit_code() == 0
    assert not scene.coordinator.beats[-1].healthy, "a member that leaves says so"


async def test_truncated_completions_are_marked(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(1, scene.train, max_tokens=4)
    await until(lambda: scene.coordinator.groups)
    (group,) = scene.coordinator.groups.values()
    # "say 1" and its end token take more than four, three repetitions and the end token just four.
    assert [c.finish_reason for c in group.completions] == ["length", "stop"] * 2


async def test_slow_prompts_do_not_block_event_loop(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    encode, texts = PromptCodec.encode, PromptCodec.texts
    turns = 0
    meanwhile: list[int] = []

    def slow(function: Any) -> Any:
        def slowly(*given: Any) -> Any:
            """As slow as the event loop: until it has turned three times, or clearly stands still."""
            begun, deadline = turns, time.monotonic() + 30
            while turns < begun + 3 and time.monotonic() < deadline:
                time.sleep(0.02)
            meanwhile.append(turns - begun)
            return function(*given)

        return slowly

    monkeypatch.setattr(PromptCodec, "encode", slow(encode))
    monkeypatch.setattr(PromptCodec, "texts", slow(texts))
    scene.coordinator.offer(1, scene.train)
    while not scene.coordinator.groups:
        await asyncio.sleep(0.01)
        turns += 1
    assert len(meanwhile) >= 2, "both were called"
    assert min(meanwhile) > 0, "actor and test share a loop: it stood still"


async def test_grading_errors_are_logged_once_per_kind(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await scene.member()
    seconds = itertools.count(1)

    async def fails(self: GradingPool, prompt: Prompt, texts: list[str], **_: Any) -> list[Graded]:
        slow = Graded(None, f"grading took longer than {next(seconds)} s and was killed")
        return [slow, Graded(Verdict(1.0)), slow, Graded(None, "the verifier gave 7, which is not in [0, 1]")]

    monkeypatch.setattr(GradingPool, "score_group", fails)
    await scene.trainer.publish(0)
    scene.coordinator.offer(3, scene.train)
    await until(lambda: len(scene.coordinator.groups) == 3)
    logged = [r.getMessage() for r in caplog.records if "could not grade" in r.getMessage()]
    assert len(logged) == 2
    assert "prompt " + scene.train[0] in logged[0]
    assert "longer than 1 s" in logged[0]
    await scene.shows("scalerl_actor_grading_errors_total 9.0")


async def test_evaluation_goes_first(scene: Scene) -> None:
    await scene.member()
    scene.coordinator.offer(2, scene.train)
    scene.coordinator.offer(2, scene.held_out, Split.HELD_OUT, max_tokens=31)
    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 4)
    requests = (await scene.server())["requests"]
    assert [r["max_tokens"] for r in requests] == [31, 31, 32, 32]
    assert sorted(g.split for g in scene.coordinator.groups.values()) == ["held_out"] * 2 + ["train"] * 2


@pytest.mark.parametrize("scene", [{"generator__maxConcurrentSequences": 3}], indirect=True)
async def test_group_larger_than_the_server(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(1, scene.held_out, Split.HELD_OUT, lease_id="split", completions=8)
    scene.coordinator.offer(1, scene.held_out, Split.HELD_OUT, lease_id="greedy", temperature=0.0)
    await until(lambda: len(scene.coordinator.groups) == 2)
    assert len(scene.coordinator.groups["split"].completions) == 8
    requests = [(r["temperature"], r["n"]) for r in (await scene.server())["requests"]]
    assert sorted(requests) == [(0.0, 1)] * 4 + [(1.0, 2), (1.0, 3), (1.0, 3)]


@pytest.mark.parametrize("scene", [{"seconds_per_token": 3600.0, "processes": True}], indirect=True)
async def test_sigterm_releases_leases(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(3, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 3)
    scene.generator.terminate()
    assert await scene.generator.exit_code() == 0
    assert len(scene.coordinator.todo) == 3
    assert isinstance(scene.generator, GeneratorProcesses)
    assert "Traceback" not in scene.generator.log


async def test_stop_drains_and_exits(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(3, scene.train)
    scene.coordinator.stop = True
    assert await scene.generator.exit_code() == 0
    assert len(scene.coordinator.groups) == 3
    assert not scene.coordinator.leased


@pytest.mark.parametrize("scene", [{"prompts": [*PROMPTS[:5], "x" * 40]}], indirect=True)
async def test_prompt_too_long(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    both = [*scene.train, *scene.held_out]
    scene.coordinator.offer(len(scene.train), scene.train)
    scene.coordinator.offer(len(scene.held_out), scene.held_out, Split.HELD_OUT)
    assert len(both) == 6
    await until(lambda: len(scene.coordinator.groups) == 5)
    await until(lambda: scene.coordinator.releases)
    (release,) = scene.coordinator.releases
    assert release.cause is ReleaseCause.TOO_LONG
    assert "has 40 tokens; with 32 for the completion it exceeds model.contextTokens (64)" in release.reason
    assert scene.generator.running
    await scene.shows("scalerl_actor_skipped_prompts_total 1.0")


@pytest.mark.parametrize("scene", [{"prompts": [*PROMPTS, "why?", "so!"]}], indirect=True)
async def test_failed_group_does_not_stop_others(scene: Scene) -> None:
    """One prompt that the server cannot serve, one with a clamped log-probability: the others arrive as always."""
    await scene.member()
    await scene.trainer.publish(0)
    both = [(scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)]
    for ids, split in both:
        scene.coordinator.offer(len(ids), ids, split)
    await until(lambda: len(scene.coordinator.groups) == 13)
    await until(lambda: scene.coordinator.releases)
    (release,) = scene.coordinator.releases
    assert release.cause is ReleaseCause.FAILED
    assert "the engine cannot serve this prompt" in release.reason
    assert len(release.lease_ids) == 1
    assert scene.generator.running
    clamped = [
        [(span.version, span.start) for span in group.completions[0].versions]
        for group in scene.coordinator.groups.values()
        if stand_in_vllm.CLAMPED in decoded(group.prompt_token_ids)
    ]
    assert clamped == [[(0, 0), (MASKED, 1), (0, 2)]]
    assert sum(group.unusable_tokens for group in scene.coordinator.groups.values()) == 4
    await scene.shows("scalerl_actor_failed_groups_total 1.0", "scalerl_actor_masked_tokens_total 4.0")


@pytest.mark.parametrize("scene", [{"prompts": [f"{i}?" for i in range(8)]}], indirect=True)
async def test_actor_exits_if_every_group_fails(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(20, scene.train)
    assert await scene.generator.exit_code() == 1
    assert "the engine cannot serve this prompt" in caplog.text
    assert len(scene.coordinator.given_up) >= 16


@pytest.mark.parametrize(
    "scene",
    [{"prompts": ["aaa", "bbb", *PROMPTS], "task__prompt": {"template": "{prompt}<think>"}}],
    indirect=True,
)
async def test_unclosed_thought_of_template_scores_0(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split)
    await until(lambda: len(scene.coordinator.groups) == 14)
    # The odd completions of "aaa" say "aaa", which would be right if it were an answer.
    assert {score for g in scene.coordinator.groups.values() for score in g.verdicts.scores} == {0.0}


def interrupted_run(**interruption: Any) -> dict[str, Any]:
    recipe = {"maxCompletionTokens": 300, "length": {"interruption": interruption}}
    return {
        "prompts": [*PROMPTS, "go|"],
        "task__prompt": {"template": "{prompt}<think>"},
        "model__contextTokens": 512,
        "recipe": {"promptsPerStep": 4, "completionsPerPrompt": 4, **recipe},
    }


@pytest.mark.parametrize("scene", [interrupted_run(maxTokens=200, phrase=" enough.</think>")], indirect=True)
async def test_long_thoughts_are_interrupted(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split, max_tokens=300)
    await until(lambda: len(scene.coordinator.groups) == 13)
    interrupted = [
        [(span.version, span.start) for span in c.versions]
        for group in scene.coordinator.groups.values()
        if stand_in_vllm.ENDLESS in decoded(group.prompt_token_ids)
        for c in group.completions
    ]
    assert len(interrupted) == 4
    for (first, _), (forced, start), (last, end) in interrupted:
        assert (first, forced, last) == (0, MASKED, 0)
        assert 200 - 300 // 7 <= start <= 200
        assert end - start == len(" enough.</think>")
    await scene.shows("scalerl_actor_interrupted_rollouts_total 4.0", "scalerl_actor_masked_tokens_total 0.0")


@pytest.mark.parametrize("scene", [interrupted_run()], indirect=True)
async def test_phrase_of_unknown_tokens_is_refused_at_start(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """The tests' tokenizer has no capital letters."""
    assert await scene.generator.exit_code() == 2
    assert "recipe.length.interruption.phrase 'Okay, time is up." in caplog.text
    assert "the tokenizer of the model cannot encode it" in caplog.text


async def test_wrong_prompt(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(1, ["of another source"])
    assert await scene.generator.exit_code() == 2
    assert "but 'of another source' at the coordinator" in caplog.text


async def test_bad_token_file(tmp_path: Path) -> None:
    write_run(tmp_path, PROMPTS)
    (tmp_path / "token").unlink()
    generator = GeneratorProcesses(tmp_path, "http://127.0.0.1:1")
    await generator.start_actor()
    try:
        assert await generator.exit_code() == 2
    finally:
        await generator.end()
    assert "SCALERL_TOKEN_FILE" in generator.log
